//! How a front takes leave of its clients, and how it goes on under another configuration.

use std::io::{Read, Write};
use std::net::TcpStream as BlockingStream;

use tokio::net::TcpStream;

use crate::world::{CHAT, Engine, Options, PATIENCE, World, eventually, in_time, json_reply, post, stream_reply};

const READY: &str = "GET /ready HTTP/1.1\r\nhost: r\r\n\r\n";
const HEALTH: &str = "GET /health HTTP/1.1\r\nhost: r\r\n\r\n";

async fn answering() -> Options {
    let engine = Engine::start(|_| crate::world::Act::Say(json_reply(r#"{"choices":[]}"#))).await;
    Options::new(&[&engine])
}

// bug 137
#[tokio::test]
async fn while_it_settles_a_stopped_front_fails_readiness_and_serves_old_and_new_connections() {
    let mut options = answering().await;
    options.front.settle_s = 1.0;
    let mut world = World::start(options).await;
    let mut kept = world.client().await;
    kept.send(READY).await;
    assert_eq!(kept.answer().await.status, 200);
    world.stop.set();
    let mut new = world.client().await;
    new.send(READY).await;
    let answer = new.answer().await;
    assert_eq!((answer.status, answer.header("connection")), (503, Some("close")));
    assert!(new.is_closed().await);
    kept.send(post("/v1/chat/completions", CHAT)).await;
    let answer = kept.answer().await;
    assert_eq!((answer.status, answer.header("connection")), (200, Some("close")));
    assert!(kept.is_closed().await, "after its last answer");
    in_time(&mut world.served).await.unwrap();
    assert!(TcpStream::connect(world.address).await.is_err());
}

#[tokio::test]
async fn settling_takes_no_longer_than_the_grace_time() {
    let mut options = answering().await;
    (options.front.settle_s, options.front.grace_s) = (3600.0, 0.1);
    let mut world = World::start(options).await;
    world.stop.set();
    in_time(&mut world.served).await.unwrap();
}

#[tokio::test]
async fn connections_that_the_kernel_has_accepted_are_served_after_the_stop() {
    let mut world = World::start(answering().await).await;
    // Without an await in between nothing of the front runs, so all of these are in the kernel's queue.
    let waiting: Vec<BlockingStream> = (0..20)
        .map(|_| {
            let mut stream = BlockingStream::connect(world.address).unwrap();
            stream.write_all(HEALTH.as_bytes()).unwrap();
            stream
        })
        .collect();
    world.stop.set();
    in_time(&mut world.served).await.unwrap();
    for mut stream in waiting {
        stream.set_read_timeout(Some(PATIENCE)).unwrap();
        let mut answer = String::new();
        stream.read_to_string(&mut answer).unwrap();
        assert!(answer.starts_with("HTTP/1.1 200") && answer.contains("connection: close"), "{answer}");
    }
}

#[tokio::test]
async fn draining_can_be_taken_back() {
    let world = World::start(answering().await).await;
    world.stop.drain(true);
    let mut client = world.client().await;
    client.send(READY).await;
    assert_eq!(client.answer().await.status, 503);
    world.stop.drain(false);
    let mut client = world.client().await;
    for _ in 0..2 {
        client.send(READY).await;
        let answer = client.answer().await;
        assert_eq!((answer.status, answer.header("connection")), (200, None));
    }
}

#[tokio::test]
async fn another_configuration_holds_for_the_next_request_of_a_connection_and_not_for_the_one_before() {
    let engine = Engine::start(|heard| {
        let is_stream = heard.body.windows(8).any(|window| window == b"\"stream\"");
        if is_stream {
            crate::world::Act::SayAndHang(stream_reply(&["data: {}\n\n"])[..2].to_vec())
        } else {
            crate::world::Act::Say(json_reply("{}"))
        }
    })
    .await;
    let world = World::start(Options::new(&[&engine])).await;
    let mut streaming = world.client().await;
    streaming.send(post("/v1/chat/completions", crate::world::CHAT_STREAM)).await;
    streaming.until("data: {}").await;
    let mut kept = world.client().await;
    kept.send(post("/v1/chat/completions", CHAT)).await;
    assert_eq!(kept.answer().await.status, 200);
    let front = world.fronts.current();
    let mut config = front.config().clone();
    config.body_bytes_max = 10;
    world.fronts.replace(front.reconfigured(config, Options::new(&[&engine]).upstream));
    drop(front);
    kept.send(post("/v1/chat/completions", CHAT)).await;
    assert_eq!(kept.answer().await.status, 413);
    assert_eq!(world.requests.len(), 1, "the stream goes on");
    drop(streaming);
    eventually(|| world.requests.is_empty()).await;
}
