//! How requests end when somebody leaves or dies. Every dispatched request has exactly one end.

use std::sync::atomic::Ordering;
use std::time::Duration;

use serde_json::json;
use tokio::net::TcpListener;

use crate::world::{
    Act, CHAT, CHAT_STREAM, Engine, Options, SSE_HEAD, World, always, chunk, dispatch, eventually, json_reply, never,
    post, say, shed, stream_reply,
};

/// An address where nobody listens.
async fn nobody() -> std::net::SocketAddr {
    TcpListener::bind("127.0.0.1:0").await.unwrap().local_addr().unwrap()
}

// bug 119
#[tokio::test]
async fn a_choice_that_refuses_the_connection_is_passed_over() {
    let engine = Engine::start(|_| Act::Say(json_reply("{}"))).await;
    let mut options = Options::new(&[&engine, &engine]);
    options.engines[0] = nobody().await;
    options.decide = always(&[0, 1]);
    let world = World::start(options).await;
    assert_eq!(world.chat(CHAT).await.status, 200);
    world.expect_ends(&["finished"]).await;
    assert_eq!(world.events("moved")[0][3], 1);
    assert_eq!(world.events("finished")[0][3], 1);
    assert!(world.metrics.render().contains("kind=\"connect\"} 1\n"));
}

#[tokio::test]
async fn a_request_that_reached_nobody_may_be_decided_again() {
    let engine = Engine::start(|_| Act::Say(json_reply("{}"))).await;
    let mut options = Options::new(&[&engine, &engine]);
    options.engines[0] = nobody().await;
    options.decide = Box::new(|event| match event[0].as_str().unwrap() {
        "arrived" => Some(dispatch(&event[1][0], &[0, 7])),
        "failed" => Some(dispatch(&event[1], &[1])),
        _ => None,
    });
    let world = World::start(options).await;
    assert_eq!(world.chat(CHAT).await.status, 200);
    world.expect_ends(&["finished"]).await;
    let failed = [json!("connect"), json!([0]), json!(false), json!(null), json!(null), json!(false)];
    assert_eq!(world.events("failed")[0][3..], failed);
}

#[tokio::test]
async fn a_replica_that_left_was_not_tried_and_its_slot_may_be_chosen_again() {
    let engine = Engine::start(|_| Act::Say(json_reply("{}"))).await;
    let mut options = Options::new(&[&engine]);
    options.decide = Box::new(|event| match event[0].as_str().unwrap() {
        "arrived" => Some(dispatch(&event[1][0], &[7, 8])),
        "failed" => Some(dispatch(&event[1], &[0])),
        _ => None,
    });
    let world = World::start(options).await;
    assert_eq!(world.chat(CHAT).await.status, 200);
    let failed = [json!("left"), json!([]), json!(false), json!(null), json!(null), json!(false)];
    assert_eq!(world.events("failed")[0][3..], failed);
    assert!(world.events("moved").is_empty());
}

#[tokio::test]
async fn a_request_that_reached_nobody_may_be_shed() {
    let mut options = Options::new(&[]);
    options.engines = vec![nobody().await];
    options.decide = Box::new(|event| match event[0].as_str().unwrap() {
        "arrived" => Some(dispatch(&event[1][0], &[0])),
        "failed" => Some(shed(&event[1], "no_ready_replica", None)),
        _ => None,
    });
    let world = World::start(options).await;
    let answer = world.chat(CHAT).await;
    assert_eq!((answer.status, answer.json()["error"]["code"].as_str()), (503, Some("no_ready_replica")));
    world.expect_ends(&[]).await;
}

#[tokio::test]
async fn deciding_again_is_bounded() {
    let mut options = Options::new(&[]);
    options.engines = vec![nobody().await];
    options.decide = Box::new(|event| match event[0].as_str().unwrap() {
        "arrived" => Some(dispatch(&event[1][0], &[0])),
        "failed" => Some(dispatch(&event[1], &[0])),
        _ => None,
    });
    let world = World::start(options).await;
    let answer = world.chat(CHAT).await;
    assert_eq!((answer.status, answer.json()["error"]["code"].as_str()), (502, Some("upstream_unreachable")));
    assert!(!answer.text().contains("127.0.0.1"), "no addresses in {}", answer.text());
    world.expect_ends(&["failed"]).await;
    assert_eq!(world.events("failed").len(), 3);
}

// bug 99
#[tokio::test]
async fn a_request_that_was_sent_goes_elsewhere_only_by_the_routers_word() {
    let first = Engine::start(|_| Act::SayAndClose(vec![])).await;
    let second = Engine::start(|_| Act::Say(json_reply("{}"))).await;
    let mut options = Options::new(&[&first, &second]);
    options.decide = always(&[0, 1]);
    let world = World::start(options).await;
    let answer = world.chat(CHAT).await;
    assert_eq!((answer.status, answer.json()["error"]["code"].as_str()), (502, Some("upstream_unreachable")));
    world.expect_ends(&[]).await;
    assert_eq!((first.requests(), second.requests()), (1, 0));
    let failed = [json!([0]), json!(false), json!(null), json!(null), json!(true)];
    assert_eq!(world.events("failed")[0][4..], failed, "it may have been worked on");
}

#[tokio::test]
async fn an_answer_that_is_not_http_is_a_502_and_the_connection_serves_on() {
    for nonsense in [
        "HTTP/1.1 101 Switching Protocols\r\nconnection: upgrade\r\nupgrade: x\r\n\r\nHTTP/1.1 200 OK\r\n",
        "\0garbage\r\n\r\n",
        "HTTP/1.1 200 OK\r\ncontent-length: 8\r\ncontent-length: 9\r\n\r\n12345678",
    ] {
        let (world, _engine) = World::with(move |_| Act::Say(say(nonsense))).await;
        let mut client = world.client().await;
        for _ in 0..2 {
            client.send(post("/v1/chat/completions", CHAT)).await;
            let answer = client.answer().await;
            assert_eq!((answer.status, answer.json()["error"]["code"].as_str()), (502, Some("upstream_unreachable")));
            assert!(answer.text().contains("could not be understood"), "{}", answer.text());
        }
        world.expect_ends(&[]).await;
    }
}

// bug 99
#[tokio::test]
async fn an_idle_connection_that_the_engine_closed_is_not_used() {
    let (world, engine) = World::with(|_| Act::SayAndClose(json_reply("{}"))).await;
    let mut client = world.client().await;
    for _ in 0..5 {
        client.send(post("/v1/chat/completions", CHAT)).await;
        assert_eq!(client.answer().await.status, 200);
        // The engine's close is seen by the I/O driver before the next request is.
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
    assert_eq!(engine.requests(), 5);
}

// bug 54, 55
#[tokio::test]
async fn a_stream_whose_engine_dies_ends_with_an_error_event() {
    for (path, body, event) in [
        ("/v1/chat/completions", CHAT_STREAM, "data: {\"error\":{"),
        (
            "/v1/responses",
            r#"{"model":"m","input":"a","stream":true}"#,
            "event: error\ndata: {\"type\":\"error\",\"sequence_number\":1,",
        ),
        (
            "/v1/messages",
            r#"{"model":"m","messages":[],"stream":true}"#,
            "event: error\ndata: {\"type\":\"error\",\"error\":",
        ),
    ] {
        let (world, _engine) = World::with(|_| {
            let mut pieces = say(SSE_HEAD);
            pieces.push(chunk("data: {\"a\":1}\n\n"));
            Act::SayAndClose(pieces)
        })
        .await;
        let mut client = world.client().await;
        client.send(post(path, body)).await;
        let answer = client.answer().await;
        assert!(answer.is_whole, "the framing is complete");
        let rest = answer.text().strip_prefix("data: {\"a\":1}\n\n").unwrap();
        assert!(rest.starts_with(event) && rest.ends_with("\n\n") && !rest.contains("[DONE]"), "{rest}");
        world.expect_ends(&["failed"]).await;
        assert_eq!(world.events("failed")[0][3..6], [json!("midstream"), json!([0]), json!(true)]);
        assert!(world.metrics.render().contains("outcome=\"failed\"} 1\n"));
    }
}

#[tokio::test]
async fn an_event_cut_in_the_middle_is_closed_before_the_error_event() {
    let (world, _engine) = World::with(|_| {
        let mut pieces = say(SSE_HEAD);
        pieces.push(chunk("data: {\"a\":1}\n\n"));
        pieces.push(chunk("data: {\"a\""));
        Act::SayAndClose(pieces)
    })
    .await;
    let answer = world.chat(CHAT_STREAM).await;
    let rest = answer.text().strip_prefix("data: {\"a\":1}\n\n").unwrap();
    assert!(rest.starts_with("data: {\"a\"\n\ndata: {\"error\":"), "{rest}");
}

#[tokio::test]
async fn a_body_whose_engine_dies_is_cut() {
    let (world, _engine) =
        World::with(|_| Act::SayAndClose(say("HTTP/1.1 200 OK\r\ncontent-length: 50\r\n\r\n{\"a\":1"))).await;
    assert!(!world.chat(CHAT).await.is_whole);
    world.expect_ends(&["failed"]).await;
}

// bug 105
#[tokio::test]
async fn a_client_that_leaves_while_the_router_decides_cancels_its_request() {
    let engine = Engine::start(|_| Act::Say(json_reply("{}"))).await;
    let mut options = Options::new(&[&engine]);
    options.decide = never();
    let world = World::start(options).await;
    let mut client = world.client().await;
    client.send(post("/v1/chat/completions", CHAT)).await;
    eventually(|| world.events("arrived").len() == 1).await;
    eventually(|| !world.events("tick").is_empty()).await;
    drop(client);
    world.expect_ends(&["cancelled"]).await;
    assert_eq!(engine.requests(), 0);
    assert!(world.metrics.render().contains("outcome=\"cancelled\"} 1\n"));
}

// bug 10, 101
#[tokio::test]
async fn a_client_that_leaves_before_the_answer_closes_the_engines_connection() {
    let (world, engine) = World::with(|_| Act::SayAndHang(vec![])).await;
    let mut client = world.client().await;
    client.send(post("/v1/chat/completions", CHAT)).await;
    eventually(|| engine.requests() == 1).await;
    drop(client);
    eventually(|| engine.dropped.load(Ordering::Relaxed) == 1).await;
    world.expect_ends(&["cancelled"]).await;
}

#[tokio::test]
async fn a_client_that_leaves_amid_a_stream_closes_the_engines_connection() {
    let (world, engine) = World::with(|_| {
        let mut pieces = say(SSE_HEAD);
        pieces.push(chunk("data: {\"a\":1}\n\n"));
        Act::SayAndHang(pieces)
    })
    .await;
    let mut client = world.client().await;
    client.send(post("/v1/chat/completions", CHAT_STREAM)).await;
    client.until("data: {").await;
    drop(client);
    eventually(|| engine.dropped.load(Ordering::Relaxed) == 1).await;
    world.expect_ends(&["cancelled"]).await;
}

// bug 83
#[tokio::test]
async fn a_client_that_leaves_right_behind_the_end_marker_has_finished() {
    let (world, engine) = World::with(|_| {
        let mut pieces = say(SSE_HEAD);
        pieces.push(chunk("data: {\"a\":1}\n\ndata: [DONE]\n\n"));
        Act::SayAndHang(pieces)
    })
    .await;
    let mut client = world.client().await;
    client.send(post("/v1/chat/completions", CHAT_STREAM)).await;
    client.until("[DONE]").await;
    drop(client);
    world.expect_ends(&["finished"]).await;
    eventually(|| engine.dropped.load(Ordering::Relaxed) == 1).await;
}

#[tokio::test]
async fn gaps_between_tokens_reach_the_router() {
    let events: Vec<&str> = vec!["data: {\"choices\":[{\"delta\":{\"content\":\"a\"}}]}\n\n"; 10];
    let (world, _engine) = World::with(move |_| Act::Say(stream_reply(&events))).await;
    world.chat(CHAT_STREAM).await;
    let gaps = || world.events("paced").iter().map(|event| event[4][0].as_u64().unwrap()).sum::<u64>();
    eventually(|| gaps() == 9).await;
    assert_eq!(world.events("paced")[0][2..4], [json!("m"), json!([0])]);
}
