//! What is refused, and with which words.

use std::sync::atomic::Ordering;
use std::time::Duration;

use tokio::net::TcpStream;

use crate::world::{Act, CHAT, Engine, Options, World, eventually, json_reply, never, post, shed};

async fn refusing(change: impl FnOnce(&mut Options)) -> (World, Engine) {
    let engine = Engine::start(|_| Act::Say(json_reply("{}"))).await;
    let mut options = Options::new(&[&engine]);
    change(&mut options);
    (World::start(options).await, engine)
}

// bug 93
#[tokio::test]
async fn unknown_paths_and_wrong_methods_are_refused_in_the_openai_format() {
    let (world, engine) = refusing(|_| ()).await;
    let mut client = world.client().await;
    client.send(post("/v1/load_lora_adapter", "{}")).await;
    let answer = client.answer().await;
    assert_eq!((answer.status, answer.json()["error"]["code"].as_str()), (404, Some("path_not_found")));
    client.send("GET /v1/chat/completions HTTP/1.1\r\nhost: r\r\n\r\n").await;
    let answer = client.answer().await;
    assert_eq!((answer.status, answer.header("allow")), (405, Some("POST")));
    client.send("OPTIONS /v1/chat/completions HTTP/1.1\r\nhost: r\r\n\r\n").await;
    let answer = client.answer().await;
    assert_eq!((answer.status, answer.header("allow")), (204, Some("POST")));
    client.send("HEAD /health HTTP/1.1\r\nhost: r\r\n\r\nGET /health HTTP/1.1\r\nhost: r\r\n\r\n").await;
    let text = client.until("{}").await;
    assert_eq!((text.matches("HTTP/1.1 200 OK").count(), text.matches("{}").count()), (2, 1), "{text}");
    assert_eq!(engine.requests(), 0);
}

// bug 73, 74
#[tokio::test]
async fn bodies_that_are_no_object_and_unknown_models_are_named() {
    let (world, engine) = refusing(|_| ()).await;
    for body in ["", "[1]", "{\"model\":\"m\", \"messages\": [}"] {
        let answer = world.chat(body).await;
        assert_eq!((answer.status, answer.json()["error"]["code"].as_str()), (400, Some("invalid_body")), "{body}");
    }
    let answer = world.chat("{\"model\":\"gpt-9\",\"messages\":[]}").await;
    assert_eq!(answer.status, 404);
    assert_eq!(answer.json()["error"]["code"], "model_not_found");
    assert!(answer.json()["error"]["message"].as_str().unwrap().contains("gpt-9"));
    assert_eq!(engine.requests(), 0);
    assert!(world.metrics.render().contains("warmfront_requests_total{model=\"unknown\",outcome=\"invalid\"} 4\n"));
    assert!(world.ends().is_empty());
}

#[tokio::test]
async fn a_compressed_prompt_is_refused_in_the_protocol_of_its_path_and_nothing_else_is() {
    let (world, engine) = refusing(|_| ()).await;
    let ask = async |path: &str, coding: &str| {
        let mut client = world.client().await;
        client.send(post(path, CHAT).replace("host:", &format!("content-encoding: {coding}\r\nhost:"))).await;
        client.answer().await
    };
    for coding in ["gzip", "br", "identity, gzip", ""] {
        let answer = ask("/v1/chat/completions", coding).await;
        assert_eq!((answer.status, answer.header("accept-encoding")), (415, Some("identity")), "{coding}");
        assert_eq!(answer.json()["error"]["code"], "unsupported_encoding");
    }
    let answer = ask("/v1/messages", "gzip").await;
    assert_eq!((answer.status, answer.json()["error"]["type"].as_str()), (415, Some("invalid_request_error")));
    assert_eq!(answer.json()["type"], "error");
    assert_eq!(engine.requests(), 0);
    assert_eq!(ask("/v1/chat/completions", "Identity").await.status, 200);
    assert_eq!(ask("/v1/embeddings", "gzip").await.status, 200, "the engine's business");
}

#[tokio::test]
async fn a_head_that_cannot_be_read_is_answered_in_words() {
    let (world, engine) = refusing(|options| {
        (options.front.headers_max, options.front.header_bytes_max) = (16, 256 * 1024);
    })
    .await;
    let fields = "x: y\r\n".repeat(17);
    let path = "p".repeat(70_000);
    for (request, status, code) in [
        ("nonsense\r\n\r\n".to_owned(), 400, "invalid_body"),
        (format!("GET /health HTTP/1.1\r\n{fields}\r\n"), 431, "headers_too_large"),
        (format!("GET /{path} HTTP/1.1\r\n\r\n"), 414, "uri_too_long"),
    ] {
        for before in [0, 2] {
            let mut client = world.client().await;
            for _ in 0..before {
                client.send(post("/v1/chat/completions", CHAT)).await;
                assert_eq!(client.answer().await.status, 200);
            }
            client.send(&request).await;
            let answer = client.answer().await;
            assert_eq!((answer.status, answer.json()["error"]["code"].as_str()), (status, Some(code)));
            assert_eq!((answer.header("connection"), answer.is_whole), (Some("close"), true));
            assert!(client.is_closed().await);
        }
    }
    assert_eq!(engine.requests(), 6);
}

#[tokio::test]
async fn an_engines_own_refusal_without_a_body_stays_without() {
    let engine =
        Engine::start(|_| Act::Say(vec![b"HTTP/1.1 400 Bad Request\r\ncontent-length: 0\r\n\r\n".to_vec()])).await;
    let world = World::start(Options::new(&[&engine])).await;
    let mut client = world.client().await;
    for _ in 0..2 {
        client.send(post("/v1/chat/completions", CHAT)).await;
        let answer = client.answer().await;
        assert_eq!((answer.status, answer.text()), (400, ""));
    }
}

#[tokio::test]
async fn a_body_beyond_the_limit_is_refused_before_and_while_it_comes() {
    let (world, engine) = refusing(|options| options.front.body_bytes_max = 1000).await;
    let mut client = world.client().await;
    let head = "POST /v1/completions HTTP/1.1\r\nhost: r\r\n";
    client.send(format!("{head}expect: 100-continue\r\ncontent-length: 1001\r\n\r\n")).await;
    let answer = client.answer().await;
    assert_eq!((answer.status, answer.json()["error"]["code"].as_str()), (413, Some("body_too_large")));
    let mut client = world.client().await;
    client.send(format!("{head}content-length: 500000\r\n\r\n{}", "x".repeat(500_000))).await;
    assert_eq!(client.answer().await.status, 413, "also for a client that has sent everything");
    let mut client = world.client().await;
    client.send(format!("{head}transfer-encoding: chunked\r\n\r\n3e9\r\n{}\r\n", "x".repeat(1001))).await;
    assert_eq!(client.answer().await.status, 413);
    assert_eq!(engine.requests(), 0);
}

#[tokio::test]
async fn a_header_beyond_the_limits_is_refused() {
    let (world, _engine) = refusing(|_| ()).await;
    let with =
        |extra: String| format!("POST /v1/completions HTTP/1.1\r\nhost: r\r\n{extra}content-length: 2\r\n\r\n{{}}");
    let mut client = world.client().await;
    client.send(with(format!("x-long: {}\r\n", "a".repeat(17_000)))).await;
    let answer = client.answer().await;
    assert_eq!((answer.status, answer.json()["error"]["code"].as_str()), (431, Some("headers_too_large")));
    for extra in [format!("x-long: {}\r\n", "a".repeat(60_000)), "x-many: 1\r\n".repeat(100)] {
        let mut client = world.client().await;
        client.send(with(extra)).await;
        assert_eq!(client.answer().await.status, 431);
    }
}

#[tokio::test]
async fn slow_clients_are_given_up() {
    let (world, engine) = refusing(|options| {
        options.front.header_timeout_s = 0.05;
        options.front.idle_timeout_s = 0.05;
        options.front.body_timeout_s = 0.05;
    })
    .await;
    assert!(world.client().await.is_closed().await, "without a word");
    let mut client = world.client().await;
    client.send("POST /v1/compl").await;
    assert!(client.is_closed().await, "inside a header");
    let mut client = world.client().await;
    client.send("POST /v1/completions HTTP/1.1\r\nhost: r\r\ncontent-length: 9\r\n\r\n{").await;
    let answer = client.answer().await;
    assert_eq!((answer.status, answer.json()["error"]["code"].as_str()), (408, Some("request_timeout")));
    assert_eq!(engine.requests(), 0);
}

#[tokio::test]
async fn a_shed_request_is_told_why_and_when_to_come_back() {
    let (world, engine) = refusing(|options| {
        options.decide =
            Box::new(|event| (event[0] == "arrived").then(|| shed(&event[1][0], "fleet_saturated", Some(2.5))));
    })
    .await;
    let answer = world.chat(CHAT).await;
    assert_eq!((answer.status, answer.header("retry-after")), (429, Some("3")));
    assert_eq!(answer.json()["error"]["code"], "fleet_saturated");
    let mut client = world.client().await;
    client.send(post("/v1/messages", r#"{"model":"m","max_tokens":1,"messages":[]}"#)).await;
    let answer = client.answer().await;
    assert_eq!(answer.status, 429);
    assert_eq!(answer.json()["error"]["type"], "rate_limit_error");
    assert_eq!(answer.json()["type"], "error");
    assert_eq!(engine.requests(), 0);
    world.expect_ends(&[]).await;
}

#[tokio::test]
async fn a_full_event_queue_is_told_at_once() {
    let (world, _engine) = refusing(|options| {
        options.queues.events_max = 0;
        options.decide = never();
    })
    .await;
    let answer = world.chat(CHAT).await;
    assert_eq!((answer.status, answer.header("retry-after")), (503, Some("1")));
    assert_eq!(answer.json()["error"]["code"], "router_overloaded");
    world.expect_ends(&[]).await;
}

#[tokio::test]
async fn connections_beyond_the_limit_are_closed_at_once() {
    let (world, _engine) = refusing(|options| options.front.connections_max = 1).await;
    let mut first = world.client().await;
    first.send(post("/v1/completions", r#"{"prompt":"a"}"#)).await;
    assert_eq!(first.answer().await.status, 200);
    assert!(world.client().await.is_closed().await);
    first.send(post("/v1/completions", r#"{"prompt":"a"}"#)).await;
    assert_eq!(first.answer().await.status, 200);
}

#[tokio::test]
async fn an_engine_that_does_not_begin_to_answer_is_given_up() {
    let engine = Engine::start(|_| Act::SayAndHang(vec![])).await;
    let mut options = Options::new(&[&engine]);
    options.upstream.first_byte_timeout_s = 0.1;
    let world = World::start(options).await;
    let answer = world.chat(CHAT).await;
    assert_eq!((answer.status, answer.json()["error"]["code"].as_str()), (504, Some("upstream_timeout")));
    world.expect_ends(&[]).await;
    eventually(|| engine.dropped.load(Ordering::Relaxed) == 1).await;
    assert_eq!(engine.requests(), 1);
}

// bug 138
#[tokio::test]
async fn a_stopped_front_ends_its_streams_and_takes_no_new_connections() {
    let pieces = vec![crate::world::SSE_HEAD.as_bytes().to_vec(), crate::world::chunk("data: {}\n\n")];
    let engine = Engine::start(move |_| Act::SayAndHang(pieces.clone())).await;
    let mut options = Options::new(&[&engine]);
    options.front.grace_s = 0.2;
    let mut world = World::start(options).await;
    let mut idle = world.client().await;
    idle.send("GET /health HTTP/1.1\r\nhost: r\r\n\r\n").await;
    idle.answer().await;
    let mut client = world.client().await;
    client.send(post("/v1/chat/completions", CHAT)).await;
    client.until("text/event-stream").await;
    world.stop.set();
    assert!(idle.is_closed().await, "an idle connection ends at once");
    tokio::time::timeout(Duration::from_secs(10), &mut world.served).await.expect("ends at the grace time").unwrap();
    assert!(TcpStream::connect(world.address).await.is_err());
    world.expect_ends(&["cancelled"]).await;
}

#[tokio::test]
async fn connections_to_engines_under_a_replaced_configuration_are_closed() {
    let engine = Engine::start(|_| Act::Say(json_reply("{}"))).await;
    let mut options = Options::new(&[&engine]);
    options.upstream.idle_timeout_s = 1000.0;
    let (config, mut upstream) = (options.front.clone(), options.upstream.clone());
    let world = World::start(options).await;
    let mut client = world.client().await;
    client.send(post("/v1/chat/completions", CHAT)).await;
    assert_eq!(client.answer().await.status, 200);
    let open = world.metrics.gauge("warmfront_upstream_connections", &[&format!("http://{}", engine.address)]);
    eventually(|| open.value() > 0.0).await;
    upstream.connect_timeout_s = 3.0;
    world.fronts.replace(world.fronts.current().reconfigured(config, upstream));
    eventually(|| open.value() == 0.0).await;
    client.send(post("/v1/chat/completions", CHAT)).await;
    assert_eq!(client.answer().await.status, 200, "the client's own connection goes on");
}
