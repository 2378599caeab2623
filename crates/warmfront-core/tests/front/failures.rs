//! What the client sees, and what the router hears, of each way in which an engine fails.

use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use serde_json::json;
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::TcpListener;

use crate::world::{
    Act, CHAT, CHAT_STREAM, Engine, Options, PATIENCE, SSE_HEAD, World, always, chunk, eventually, json_reply,
    one_after_another, post, say, stream_reply,
};

const HELLO: &str = "data: {\"choices\":[{\"delta\":{\"content\":\"a\"}}]}\n\n";
const DONE: &str = "data: [DONE]\n\n";
const OVERLOADED: &str =
    "data: {\"error\":{\"message\":\"full\",\"type\":\"ServiceUnavailableError\",\"code\":503}}\n\n";

fn reply(status: &str, headers: &str, body: &str) -> Vec<Vec<u8>> {
    say(&format!("HTTP/1.1 {status}\r\n{headers}content-length: {}\r\n\r\n{body}", body.len()))
}

/// An engine that answers everything so.
async fn saying(pieces: Vec<Vec<u8>>) -> Engine {
    Engine::start(move |_| Act::Say(pieces.clone())).await
}

/// A world in which requests that fail at the first engine go to the second.
async fn two(first: &Engine, second: &Engine) -> World {
    let mut options = Options::new(&[first, second]);
    options.decide = one_after_another(2);
    World::start(options).await
}

async fn healthy() -> Engine {
    Engine::start(|heard| {
        let is_stream = heard.body.windows(6).any(|window| window == b"stream");
        Act::Say(if is_stream { stream_reply(&[HELLO, DONE]) } else { json_reply("{\"ok\":1}") })
    })
    .await
}

// bug 113
#[tokio::test]
async fn a_refusal_is_answered_by_another_engine_and_the_client_sees_nothing_of_it() {
    for status in ["429 Too Many Requests", "503 Service Unavailable"] {
        let (first, second) = (saying(reply(status, "retry-after: 7\r\n", "full")).await, healthy().await);
        let world = two(&first, &second).await;
        let answer = world.chat(CHAT).await;
        assert_eq!((answer.status, answer.text()), (200, "{\"ok\":1}"));
        world.expect_ends(&["finished"]).await;
        let status: u16 = status[..3].parse().unwrap();
        let failed = [json!("rejected"), json!([0]), json!(false), json!(status), json!(7.0), json!(false)];
        assert_eq!(world.events("failed")[0][3..], failed);
        assert_eq!((first.requests(), second.requests()), (1, 1));
        assert!(world.metrics.render().contains("kind=\"rejected\"} 1\n"));
    }
}

#[tokio::test]
async fn a_server_error_is_told_as_work_that_may_have_been_done() {
    for status in ["500 Internal Server Error", "502 Bad Gateway", "504 Gateway Timeout"] {
        let (first, second) = (saying(reply(status, "", "boom")).await, healthy().await);
        let world = two(&first, &second).await;
        assert_eq!(world.chat(CHAT).await.status, 200);
        let failed = &world.events("failed")[0];
        assert_eq!((failed[3].as_str(), failed[8].as_bool()), (Some("server_error"), Some(true)));
    }
}

#[tokio::test]
async fn the_last_engines_own_answer_passes_byte_for_byte_when_nobody_else_takes_the_request() {
    let headers = "retry-after: 11\r\ncontent-type: application/json\r\nx-own: 1\r\nx-own: 2\r\n";
    let body = "{\"error\": {\"message\":\"too  many\"} }\n";
    let first = saying(reply("503 Service Unavailable", "", "first")).await;
    let second = saying(reply("429 Too Many Requests", headers, body)).await;
    let world = two(&first, &second).await;
    let mut client = world.client().await;
    for _ in 0..2 {
        client.send(post("/v1/chat/completions", CHAT)).await;
        let answer = client.answer().await;
        assert_eq!((answer.status, answer.text(), answer.header("retry-after")), (429, body, Some("11")));
        assert_eq!(answer.head.matches("x-own:").count(), 2, "{}", answer.head);
        assert!(answer.is_whole);
    }
    world.expect_ends(&[]).await;
    assert!(world.metrics.render().contains("outcome=\"engine_error\"} 2\n"));
}

#[tokio::test]
async fn an_engines_own_words_are_kept_when_the_next_engine_says_nothing() {
    let first = saying(reply("503 Service Unavailable", "retry-after: 2\r\n", "full")).await;
    let second = Engine::start(|_| Act::SayAndClose(vec![])).await;
    let world = two(&first, &second).await;
    let answer = world.chat(CHAT).await;
    assert_eq!((answer.status, answer.text()), (503, "full"));
}

// bug 115
#[tokio::test]
async fn client_errors_pass_at_once_and_the_router_hears_of_a_finished_request() {
    for status in ["400 Bad Request", "404 Not Found", "413 Content Too Large", "422 Unprocessable Entity"] {
        let (first, second) = (saying(reply(status, "", "your fault")).await, healthy().await);
        let world = two(&first, &second).await;
        let answer = world.chat(CHAT_STREAM).await;
        assert_eq!((answer.status, answer.text()), (status[..3].parse().unwrap(), "your fault"));
        world.expect_ends(&["finished"]).await;
        assert_eq!((world.events("failed").len(), world.events("first_token").len(), second.requests()), (0, 0, 0));
    }
}

#[tokio::test]
async fn an_error_in_the_first_chunk_of_a_stream_is_answered_by_another_engine() {
    let (first, second) = (saying(stream_reply(&[OVERLOADED, DONE])).await, healthy().await);
    let world = two(&first, &second).await;
    let answer = world.chat(CHAT_STREAM).await;
    assert_eq!((answer.status, answer.text()), (200, format!("{HELLO}{DONE}").as_str()));
    world.expect_ends(&["finished"]).await;
    let failed = [json!("stream_rejected"), json!([0]), json!(false), json!(503), json!(null), json!(false)];
    assert_eq!(world.events("failed")[0][3..], failed);
}

#[tokio::test]
async fn an_error_in_the_first_event_is_noticed_however_it_is_cut() {
    let lines = "data: {\"error\":{\"message\":\"full\",\ndata: \"code\":503}}\n\n";
    for pieces in [
        vec![&OVERLOADED[..20], &OVERLOADED[20..]],
        vec!["event: error\n", OVERLOADED],
        vec!["\n", OVERLOADED],
        vec!["\u{feff}", OVERLOADED],
        vec![&OVERLOADED[..OVERLOADED.len() - 1], "\n"],
        vec![lines],
    ] {
        let (first, second) = (saying(stream_reply(&[&pieces[..], &[DONE]].concat())).await, healthy().await);
        let world = two(&first, &second).await;
        let answer = world.chat(CHAT_STREAM).await;
        assert_eq!((answer.status, answer.text()), (200, format!("{HELLO}{DONE}").as_str()), "{pieces:?}");
    }
}

#[tokio::test]
async fn an_engine_that_dies_inside_the_first_event_has_told_the_client_nothing() {
    let mut pieces = say(SSE_HEAD);
    pieces.push(chunk(&HELLO[..10]));
    let dying = Engine::start(move |_| Act::SayAndClose(pieces.clone())).await;
    let answer = World::start(Options::new(&[&dying])).await.chat(CHAT_STREAM).await;
    assert_eq!((answer.status, answer.json()["error"]["code"].as_str()), (502, Some("upstream_unreachable")));
}

#[tokio::test]
async fn an_error_in_the_first_chunk_passes_unchanged_when_nobody_else_takes_the_request() {
    for error in [OVERLOADED, "data: {\"error\":{\"message\":\"boom\",\"code\":500}}\n\n"] {
        let engine = saying(stream_reply(&[error, DONE])).await;
        let world = World::start(Options::new(&[&engine])).await;
        let answer = world.chat(CHAT_STREAM).await;
        assert_eq!((answer.status, answer.text()), (200, format!("{error}{DONE}").as_str()));
        assert!(answer.header("content-type").unwrap().starts_with("text/event-stream"));
    }
}

// bug 115
#[tokio::test]
async fn an_error_in_the_first_chunk_that_is_the_clients_own_passes_at_once() {
    let error = "data: {\"error\":{\"message\":\"bad\",\"code\":400}}\n\n";
    let (first, second) = (saying(stream_reply(&[error, DONE])).await, healthy().await);
    let world = two(&first, &second).await;
    assert_eq!(world.chat(CHAT_STREAM).await.text(), format!("{error}{DONE}"));
    world.expect_ends(&["finished"]).await;
    assert_eq!(second.requests(), 0);
}

#[tokio::test]
async fn an_error_behind_the_first_chunk_passes_since_the_client_has_seen_bytes() {
    let (first, second) = (saying(stream_reply(&[HELLO, OVERLOADED])).await, healthy().await);
    let world = two(&first, &second).await;
    assert_eq!(world.chat(CHAT_STREAM).await.text(), format!("{HELLO}{OVERLOADED}"));
    world.expect_ends(&["finished"]).await;
    assert_eq!(second.requests(), 0);
}

#[tokio::test]
async fn an_engine_that_dies_before_the_first_chunk_of_its_stream_has_told_the_client_nothing() {
    let first = Engine::start(|_| Act::SayAndClose(say(SSE_HEAD))).await;
    let second = healthy().await;
    let world = two(&first, &second).await;
    assert_eq!(world.chat(CHAT_STREAM).await.text(), format!("{HELLO}{DONE}"));
    let failed = &world.events("failed")[0];
    assert_eq!((failed[5].as_bool(), failed[8].as_bool()), (Some(false), Some(true)));
}

#[tokio::test]
async fn silence_before_the_first_byte_and_before_the_first_chunk_times_out() {
    for pieces in [vec![], say(SSE_HEAD)] {
        let engine = Engine::start(move |_| Act::SayAndHang(pieces.clone())).await;
        let mut options = Options::new(&[&engine]);
        options.upstream.first_byte_timeout_s = 0.1;
        let world = World::start(options).await;
        let answer = world.chat(CHAT_STREAM).await;
        assert_eq!((answer.status, answer.json()["error"]["code"].as_str()), (504, Some("upstream_timeout")));
        let failed = &world.events("failed")[0];
        assert_eq!((failed[3].as_str(), failed[8].as_bool()), (Some("first_byte_timeout"), Some(true)));
        eventually(|| engine.dropped.load(Ordering::Relaxed) == 1).await;
    }
}

#[tokio::test]
async fn an_error_that_is_too_long_or_does_not_end_is_not_held_and_passes_as_it_comes() {
    let long = "x".repeat(200 * 1024);
    let (first, second) = (saying(reply("503 Service Unavailable", "", &long)).await, healthy().await);
    let world = two(&first, &second).await;
    let answer = world.chat(CHAT).await;
    assert_eq!((answer.status, answer.text() == long, answer.is_whole), (503, true, true));
    world.expect_ends(&["finished"]).await;

    let endless = say("HTTP/1.1 500 Internal Server Error\r\ncontent-length: 50\r\n\r\nhalf");
    let first = Engine::start(move |_| Act::SayAndHang(endless.clone())).await;
    let world = two(&first, &second).await;
    let mut client = world.client().await;
    client.send(post("/v1/chat/completions", CHAT)).await;
    assert!(client.until("half").await.starts_with("HTTP/1.1 500"));
    drop(client);
    eventually(|| first.dropped.load(Ordering::Relaxed) == 1).await;
    world.expect_ends(&["cancelled"]).await;
    assert_eq!(second.requests(), 0);
}

#[tokio::test]
async fn an_error_that_breaks_off_is_a_failed_attempt_and_never_passes_as_a_whole_answer() {
    let chunked = "HTTP/1.1 503 Service Unavailable\r\ntransfer-encoding: chunked\r\n\r\n4\r\nhalf\r\n";
    let measured = "HTTP/1.1 500 Internal Server Error\r\ncontent-length: 50\r\n\r\nhalf";
    let streamed = format!("{SSE_HEAD}{}", String::from_utf8(chunk(OVERLOADED)).unwrap());
    for half in [chunked, measured, &streamed] {
        let half = say(half);
        let first = Engine::start(move |_| Act::SayAndClose(half.clone())).await;
        let second = healthy().await;
        let world = two(&first, &second).await;
        assert_eq!(world.chat(CHAT).await.text(), "{\"ok\":1}", "another engine answers");
        world.expect_ends(&["finished"]).await;
        let failed = &world.events("failed")[0];
        assert_eq!((failed[3].as_str(), failed[8].as_bool()), (Some("broken"), Some(true)));
        let world = World::start(Options::new(&[&first])).await;
        let answer = world.chat(CHAT).await;
        assert_eq!((answer.status, answer.json()["error"]["code"].as_str()), (502, Some("upstream_unreachable")));
    }
}

// bug 114
#[tokio::test]
async fn no_answer_of_ours_names_an_engine() {
    let gone = TcpListener::bind("127.0.0.1:0").await.unwrap().local_addr().unwrap();
    let dying = Engine::start(|_| Act::SayAndClose(vec![])).await;
    for address in [gone, dying.address] {
        let mut options = Options::new(&[]);
        options.engines = vec![address];
        let world = World::start(options).await;
        let answer = world.chat(CHAT).await;
        assert_eq!(answer.status, 502);
        let said = format!("{}{}", answer.head, answer.text());
        assert!(!said.contains("127.0.0.1") && !said.contains(&address.port().to_string()), "{said}");
    }
}

// bug 99: the kernel took our bytes, the engine closed; whether it read them is not known.
#[tokio::test]
async fn a_request_written_to_a_reused_connection_that_breaks_is_not_sent_again_by_itself() {
    let count = std::sync::atomic::AtomicUsize::new(0);
    let engine = Engine::start(move |_| match count.fetch_add(1, Ordering::Relaxed) {
        0 => Act::Say(json_reply("{}")),
        _ => Act::SayAndClose(vec![]),
    })
    .await;
    let mut options = Options::new(&[&engine]);
    options.decide = always(&[0]);
    let world = World::start(options).await;
    assert_eq!(world.chat(CHAT).await.status, 200);
    assert_eq!(world.chat(CHAT).await.status, 502);
    assert_eq!(engine.requests(), 2);
    assert_eq!(world.events("failed")[0][8], true, "it may have been worked on");
}

// bug 54, 55, 82
#[tokio::test]
async fn the_end_of_the_grace_time_ends_each_stream_with_one_error_event_and_a_clean_end() {
    for (path, body, shape) in [
        ("/v1/chat/completions", CHAT_STREAM, "data: "),
        ("/v1/responses", r#"{"model":"m","input":"a","stream":true}"#, "event: error\ndata: "),
        ("/v1/messages", r#"{"model":"m","messages":[],"stream":true}"#, "event: error\ndata: "),
    ] {
        let engine = Engine::start(|_| {
            let mut pieces = say(SSE_HEAD);
            pieces.push(chunk(HELLO));
            Act::SayAndHang(pieces)
        })
        .await;
        let mut options = Options::new(&[&engine]);
        options.front.grace_s = 0.05;
        let world = World::start(options).await;
        let mut client = world.client().await;
        client.send(post(path, body)).await;
        client.until(HELLO).await;
        world.stop.set();
        let answer = client.answer().await;
        assert!(answer.is_whole, "the framing is complete");
        let event = answer.text().strip_prefix(HELLO).unwrap();
        let data = event.strip_prefix(shape).and_then(|data| data.strip_suffix("\n\n")).unwrap();
        let data: serde_json::Value = serde_json::from_str(data).unwrap();
        assert!(data.to_string().contains("shutting down"), "{data}");
        world.expect_ends(&["cancelled"]).await;
        assert!(world.metrics.render().contains("outcome=\"cut\"} 1\n"));
    }
}

// bug 82
#[tokio::test]
async fn a_request_without_an_answer_at_the_end_of_the_grace_time_gets_503() {
    let engine = Engine::start(|_| Act::SayAndHang(vec![])).await;
    let mut options = Options::new(&[&engine]);
    options.front.grace_s = 0.05;
    let world = World::start(options).await;
    let mut client = world.client().await;
    client.send(post("/v1/messages", r#"{"model":"m","messages":[]}"#)).await;
    eventually(|| engine.requests() == 1).await;
    world.stop.set();
    let answer = client.answer().await;
    assert_eq!((answer.status, answer.json()["error"]["type"].as_str()), (503, Some("overloaded_error")));
    assert!(answer.header("retry-after").is_some());
    world.expect_ends(&["cancelled"]).await;
}

#[tokio::test]
async fn an_engine_that_answers_before_it_has_read_the_body_is_heard_and_its_connection_not_used_again() {
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let mut options = Options::new(&[]);
    options.engines = vec![listener.local_addr().unwrap()];
    options.front.body_bytes_max = 16 * 1024 * 1024;
    let world = World::start(options).await;
    let long = format!(r#"{{"model":"m","messages":[],"x":"{}"}}"#, "y".repeat(8 * 1024 * 1024));
    for _ in 0..2 {
        let mut client = world.client().await;
        let sending = client.send(post("/v1/chat/completions", &long));
        let answering = async {
            let (mut engine, _) = listener.accept().await.unwrap(); // each time a connection of its own
            engine.read_exact(&mut [0; 100]).await.unwrap();
            engine.write_all(b"HTTP/1.1 413 Content Too Large\r\ncontent-length: 3\r\n\r\nbig").await.unwrap();
            engine
        };
        let ((), engine) = tokio::join!(sending, answering);
        let answer = client.answer().await;
        assert_eq!((answer.status, answer.text()), (413, "big"));
        drop(engine);
    }
    world.expect_ends(&["finished", "finished"]).await;
}

// bug 122: the time-out is for the first byte, never for the whole.
#[tokio::test]
async fn a_stream_that_lasts_longer_than_the_first_byte_timeout_is_not_cut() {
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let mut options = Options::new(&[]);
    options.engines = vec![listener.local_addr().unwrap()];
    options.upstream.first_byte_timeout_s = 1.0;
    let world = World::start(options).await;
    let mut client = world.client().await;
    client.send(post("/v1/chat/completions", CHAT_STREAM)).await;
    let (mut engine, _) = listener.accept().await.unwrap();
    engine.write_all(SSE_HEAD.as_bytes()).await.unwrap();
    engine.write_all(&chunk(HELLO)).await.unwrap();
    client.until(HELLO).await;
    tokio::time::sleep(Duration::from_millis(1200)).await; // the silence is what is tested
    engine.write_all(&chunk(DONE)).await.unwrap();
    engine.write_all(b"0\r\n\r\n").await.unwrap();
    assert_eq!(client.answer().await.text(), format!("{HELLO}{DONE}"));
    world.expect_ends(&["finished"]).await;
}

// bug 98
#[tokio::test]
async fn a_silent_stream_is_kept_alive_by_comments_between_its_events() {
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let mut options = Options::new(&[]);
    options.engines = vec![listener.local_addr().unwrap()];
    options.front.keep_alive_s = 0.02;
    let world = World::start(options).await;
    let mut client = world.client().await;
    client.send(post("/v1/chat/completions", CHAT_STREAM)).await;
    let (mut engine, _) = listener.accept().await.unwrap();
    engine.write_all(SSE_HEAD.as_bytes()).await.unwrap();
    client.until(": keep-alive\n\n").await;
    engine.write_all(&chunk("data: {\"a\"")).await.unwrap();
    let so_far = client.until("data: {\"a\"").await.matches(": keep-alive").count();
    tokio::time::sleep(Duration::from_millis(100)).await; // several pauses long, inside an event
    engine.write_all(&chunk(":1}\n\n")).await.unwrap();
    let text = client.until(":1}").await;
    assert_eq!(text.matches(": keep-alive").count(), so_far, "no comment cuts an event: {text}");
    client.until(":1}\n\n\r\nE\r\n: keep-alive").await; // in a chunk of its own
    engine.write_all(&chunk(DONE)).await.unwrap();
    engine.write_all(b"0\r\n\r\n").await.unwrap();
    let answer = client.answer().await;
    let events = answer.text().replace(": keep-alive\n\n", "");
    assert_eq!((events.as_str(), answer.is_whole), ("data: {\"a\":1}\n\ndata: [DONE]\n\n", true));
    world.expect_ends(&["finished"]).await;
}

// bug 98: a comment that is not asked for would change what clients get.
#[tokio::test]
async fn without_a_keep_alive_a_silent_stream_stays_silent() {
    let pieces = [SSE_HEAD.as_bytes().to_vec(), chunk(HELLO)];
    let (world, engine) = World::with(move |_| Act::SayAndHang(pieces.to_vec())).await;
    let mut client = world.client().await;
    client.send(post("/v1/chat/completions", CHAT_STREAM)).await;
    let start = Instant::now();
    let text = client.until(HELLO).await;
    assert!(text.ends_with(&format!("{HELLO}\r\n")), "{text}");
    assert!(start.elapsed() < PATIENCE && engine.requests() == 1);
}

/// TCP does not tell a client that only ended its sending from one that has gone, and tokens for nobody cost more.
#[tokio::test]
async fn a_client_that_closes_its_sending_half_counts_as_gone() {
    let (world, engine) = World::with(|_| Act::SayAndHang(vec![])).await;
    let mut client = world.client().await;
    client.send(post("/v1/chat/completions", CHAT)).await;
    eventually(|| engine.requests() == 1).await;
    client.socket.shutdown().await.unwrap();
    eventually(|| engine.dropped.load(Ordering::Relaxed) == 1).await;
    world.expect_ends(&["cancelled"]).await;
}

#[tokio::test]
async fn ready_says_no_when_every_circuit_is_open() {
    let (first, second) = (healthy().await, healthy().await);
    let world = World::start(Options::new(&[&first, &second])).await;
    let standing = |rows: &[(u32, &str, &str)]| rmp_serde::to_vec(&[("standing", "m", rows)]).unwrap();
    for (rows, status, serving) in [
        (&[(0, "open", "connect")][..], 200, 1),
        (&[(0, "open", "connect"), (1, "open", "frozen")], 503, 0),
        (&[(0, "open", "connect"), (1, "paused", "")], 200, 1),
        (&[], 200, 2),
    ] {
        world.mailbox.command(&standing(rows)).unwrap();
        let mut client = world.client().await;
        client.send("GET /ready HTTP/1.1\r\nhost: r\r\n\r\n").await;
        let answer = client.answer().await;
        assert_eq!((answer.status, answer.json()["pools"][0]["serving"].as_u64()), (status, Some(serving)));
        assert!(!answer.text().contains("127.0.0.1"), "{}", answer.text());
    }
}
