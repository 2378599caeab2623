//! What passes through, and how it looks on the other side.

use serde_json::json;

use crate::world::{
    Act, CHAT, CHAT_STREAM, Engine, Options, World, chunk, header, json_reply, post, say, stream_reply,
};

#[tokio::test]
async fn bytes_pass_unchanged_both_ways() {
    let reply = "HTTP/1.1 200 Fine\r\ncontent-type: application/json\r\ncontent-encoding: gzip\r\nset-cookie: a=1\r\n\
         set-cookie: b=2\r\nx-custom: yes\r\nkeep-alive: timeout=5\r\ncontent-length: 4\r\n\r\n\u{1}\u{2}{}";
    let (world, engine) = World::with(move |_| Act::Say(say(reply))).await;
    let body =
        "{ \"model\":\"m\",\"x\":1e2,\"stop\":null,\"stop\":null,\n\"messages\":[{\"name\":\"n\",\"role\":\"odd\"}]}";
    let mut client = world.client().await;
    let request = format!(
        "POST /v1/chat/completions?a=b HTTP/1.1\r\nHost: router\r\nX-Request-ID: mine-1\r\nAuthorization: Bearer k\r\n\
         Connection: keep-alive, x-hop\r\nX-Hop: 1\r\nX-Two: a\r\nX-Two: b\r\nTE: trailers\r\nContent-Length: {}\r\n\r\n{body}",
        body.len()
    );
    client.send(request).await;
    let answer = client.answer().await;
    let heard = engine.heard.lock()[0].clone();
    assert_eq!(heard.body, body.as_bytes());
    assert!(heard.head.starts_with("POST /v1/chat/completions?a=b HTTP/1.1\r\n"), "{}", heard.head);
    assert_eq!(header(&heard.head, "host"), Some(engine.address.to_string().as_str()));
    assert_eq!(header(&heard.head, "authorization"), Some("Bearer k"));
    assert_eq!(header(&heard.head, "x-request-id"), Some("mine-1"));
    assert_eq!(header(&heard.head, "x-hop"), None);
    assert_eq!(header(&heard.head, "te"), None);
    assert_eq!(heard.head.matches("x-two: ").count(), 2);
    assert_eq!((answer.status, answer.body.as_slice()), (200, &b"\x01\x02{}"[..]));
    assert_eq!(answer.head.matches("set-cookie: ").count(), 2);
    assert_eq!(answer.header("content-encoding"), Some("gzip"));
    assert_eq!(answer.header("keep-alive"), None);
    assert_eq!(answer.header("x-request-id"), Some("mine-1"));
    assert_eq!(answer.header("x-warmfront-replica"), Some(format!("http://{}", engine.address).as_str()));
    assert_eq!(answer.header("x-warmfront-predicted-cached-tokens"), Some("32"));
    world.expect_ends(&["finished"]).await;
}

#[tokio::test]
async fn a_stream_passes_byte_for_byte_and_is_accounted() {
    let events = [
        ": ping\n\n",
        "event: message\r\ndata: {\"a\":1}\r\n\r\n",
        "data: {\"choices\":[{\"delta\":{\"content\":\"h\u{e9}\u{4e2d}\"}}]}\n\n",
        "data: line1\ndata: line2\n\n",
        "data: {\"choices\":[],\"usage\":{\"prompt_tokens\":50,\"completion_tokens\":2,\"prompt_tokens_details\":{\"cached_tokens\":48}}}\n\n",
        "data: [DONE]\n\n",
    ];
    let (world, _engine) = World::with(move |_| Act::Say(stream_reply(&events))).await;
    let answer = world.chat(CHAT_STREAM).await;
    assert!(answer.is_whole);
    assert_eq!(answer.text(), events.concat());
    world.expect_ends(&["finished"]).await;
    let finished = &world.events("finished")[0];
    assert_eq!(finished[3..], [json!(0), json!(200), json!([50, 48, 2]), json!(3)]);
    assert_eq!(world.events("first_token").len(), 1);
    let metrics = world.metrics.render();
    for line in [
        "warmfront_requests_total{model=\"m\",outcome=\"finished\"} 1\n".to_owned(),
        "warmfront_ttft_seconds_count{model=\"m\"} 1\n".to_owned(),
        "warmfront_itl_seconds_count{model=\"m\"} 3\n".to_owned(),
        "warmfront_streams 0\n".to_owned(),
    ] {
        assert!(metrics.contains(&line), "{line} in {metrics}");
    }
}

#[tokio::test]
async fn a_connection_serves_many_requests_and_so_does_the_engines() {
    let (world, engine) = World::with(|_| Act::Say(json_reply("{}"))).await;
    let mut client = world.client().await;
    for _ in 0..5 {
        client.send(post("/v1/completions", r#"{"prompt":"a"}"#)).await;
        assert_eq!(client.answer().await.status, 200);
    }
    assert_eq!(engine.requests(), 5);
    let connections = format!("warmfront_upstream_connections{{replica=\"http://{}\"}} 1\n", engine.address);
    assert!(world.metrics.render().contains(&connections));
}

#[tokio::test]
async fn pipelined_requests_are_answered_in_order() {
    let (world, _engine) = World::with(|heard| Act::Say(json_reply(std::str::from_utf8(&heard.body).unwrap()))).await;
    let mut client = world.client().await;
    let bodies = ["{\"prompt\":\"1\"}", "{\"prompt\":\"22\"}", "{\"prompt\":\"333\"}"];
    client.send(bodies.map(|body| post("/v1/completions", body)).concat()).await;
    for body in bodies {
        assert_eq!(client.answer().await.text(), body);
    }
}

#[tokio::test]
async fn a_chunked_request_reaches_the_engine_with_its_length() {
    let (world, engine) = World::with(|_| Act::Say(json_reply("{}"))).await;
    let mut client = world.client().await;
    client.send("POST /v1/completions HTTP/1.1\r\nhost: r\r\ntransfer-encoding: chunked\r\n\r\n").await;
    client.send("9\r\n{\"prompt\"\r\n").await;
    client.send("5\r\n:\"a\"}\r\n0\r\n\r\n").await;
    assert_eq!(client.answer().await.status, 200);
    let heard = engine.heard.lock()[0].clone();
    assert_eq!(heard.body, b"{\"prompt\":\"a\"}");
    assert_eq!(header(&heard.head, "content-length"), Some("14"));
    assert_eq!(header(&heard.head, "transfer-encoding"), None);
}

#[tokio::test]
async fn a_client_that_expects_100_continue_gets_it_and_the_engine_does_not_hear_of_it() {
    let (world, engine) = World::with(|_| Act::Say(json_reply("{}"))).await;
    let mut client = world.client().await;
    client.send("POST /v1/completions HTTP/1.1\r\nhost: r\r\nexpect: 100-continue\r\ncontent-length: 14\r\n\r\n").await;
    client.until("HTTP/1.1 100 Continue\r\n\r\n").await;
    assert_eq!(client.answer().await.status, 100);
    client.send("{\"prompt\":\"a\"}").await;
    assert_eq!(client.answer().await.status, 200);
    assert_eq!(header(&engine.heard.lock()[0].head, "expect"), None);
}

#[tokio::test]
async fn a_client_of_http_1_0_gets_a_plain_body_and_a_closed_connection() {
    let (world, _engine) = World::with(|_| Act::Say(stream_reply(&["data: a\n\n", "data: [DONE]\n\n"]))).await;
    let mut client = world.client().await;
    let body = r#"{"prompt":"a","stream":true}"#;
    client.send(format!("POST /v1/completions HTTP/1.0\r\ncontent-length: {}\r\n\r\n{body}", body.len())).await;
    let answer = client.answer().await;
    assert_eq!(answer.header("transfer-encoding"), None);
    assert_eq!(answer.text(), "data: a\n\ndata: [DONE]\n\n");
}

#[tokio::test]
async fn an_engines_error_passes_as_it_is() {
    let reply = "HTTP/1.1 429 Busy\r\nretry-after: 7\r\ncontent-type: application/json\r\ncontent-length: 12\r\n\r\n{\"error\":{}}";
    let (world, engine) = World::with(move |_| Act::Say(say(reply))).await;
    let answer = world.chat(CHAT).await;
    assert_eq!((answer.status, answer.text(), answer.header("retry-after")), (429, "{\"error\":{}}", Some("7")));
    world.expect_ends(&[]).await;
    assert_eq!((world.events("failed").len(), &world.events("failed")[0][6]), (1, &json!(429)));
    assert_eq!(engine.requests(), 1);
    assert!(world.metrics.render().contains("outcome=\"engine_error\"} 1\n"));
}

#[tokio::test]
async fn answers_without_a_body_or_a_length_end_properly() {
    for (reply, status) in [
        ("HTTP/1.1 204 No Content\r\n\r\n", 204),
        ("HTTP/1.1 200 OK\r\ncontent-length: 0\r\n\r\n", 200),
        ("HTTP/1.1 200 OK\r\ncontent-type: application/json\r\nconnection: close\r\n\r\n{}", 200),
    ] {
        let (world, _engine) = World::with(move |_| Act::SayAndClose(say(reply))).await;
        let answer = world.chat(CHAT).await;
        assert_eq!((answer.status, answer.is_whole), (status, true), "{reply}");
        world.expect_ends(&["finished"]).await;
    }
}

// bug 62
#[tokio::test]
async fn a_length_beside_chunks_does_not_cut_the_answer() {
    let (world, _engine) = World::with(|_| {
        let mut pieces = say("HTTP/1.1 200 OK\r\ncontent-length: 3\r\ntransfer-encoding: chunked\r\n\r\n");
        pieces.extend([chunk("whole answer"), b"0\r\n\r\n".to_vec()]);
        Act::SayAndClose(pieces)
    })
    .await;
    let answer = world.chat(CHAT).await;
    assert_eq!((answer.status, answer.text()), (200, "whole answer"));
    world.expect_ends(&["finished"]).await;
}

// bug 75
#[tokio::test]
async fn paths_by_load_carry_the_model_of_a_json_body_or_a_form() {
    let (world, engine) = World::with(|_| Act::Say(json_reply("{}"))).await;
    let form = "--b\r\nContent-Disposition: form-data; name=\"model\"\r\n\r\nlora\r\n--b--\r\n";
    let mut client = world.client().await;
    client.send(post("/v1/embeddings", r#"{"model":"m","input":"a"}"#)).await;
    assert_eq!(client.answer().await.status, 200);
    let head = "POST /v1/audio/transcriptions HTTP/1.1\r\nhost: r\r\ncontent-type: multipart/form-data; boundary=b\r\n";
    client.send(format!("{head}content-length: {}\r\n\r\n{form}", form.len())).await;
    assert_eq!(client.answer().await.status, 200);
    assert_eq!(engine.requests(), 2);
    let arrived = world.events("arrived");
    let facts: Vec<_> = arrived.iter().map(|event| (&event[1][3], &event[1][4], &event[1][7], &event[1][8])).collect();
    assert_eq!(facts[0], (&json!("m"), &json!(null), &json!("load"), &json!("none")));
    assert_eq!(facts[1], (&json!("lora"), &json!("lora"), &json!("load"), &json!("none")));
}

#[tokio::test]
async fn what_the_router_is_told_of_a_request() {
    let (world, _engine) = World::with(|_| Act::Say(json_reply("{}"))).await;
    let text = "word ".repeat(100);
    let body = format!(
        "{{\"model\":\"lora\",\"stream\":false,\"max_tokens\":7,\"priority\":3,\"messages\":[{{\"role\":\"user\",\"content\":\"{text}\"}}]}}"
    );
    let extra = "x-warmfront-flow: team\r\nx-session-id: s\r\nx-vllm-priority: -2\r\nx-request-timeout: 20\r\n";
    let request = post("/v1/chat/completions", &body).replace("host: router\r\n", extra);
    let mut client = world.client().await;
    client.send(request).await;
    client.answer().await;
    let arrived = world.events("arrived");
    let facts = arrived[0][1].as_array().unwrap();
    let told = [2, 3, 4, 5, 6, 7, 8].map(|field| facts[field].clone());
    let expected =
        [json!("m"), json!("lora"), json!("lora"), json!("team"), json!(-2), json!("prefix"), json!("bytes")];
    assert_eq!(told, expected);
    assert!(facts[10].as_u64().unwrap() > 5, "blocks of {facts:?}");
    assert_eq!(facts[12], 7);
    assert!(facts[13].is_u64() && facts[14].is_u64());
    assert_eq!(facts[17].as_f64(), Some(facts[1].as_f64().unwrap() + 20.0));
    assert_eq!(world.metrics.counter("warmfront_session_keys_total", &["header"]).value(), 1);
}

#[tokio::test]
async fn the_backlog_is_shown_in_the_numbers_published_last_without_asking_the_router() {
    let engine = Engine::start(|_| Act::Say(vec![])).await;
    let world = World::start(Options::new(&[&engine])).await;
    let set = |name: &str, labels: &[&str], value| world.metrics.set(name, labels, value);
    set("warmfront_waiting_requests", &["m"], 3.0);
    set("warmfront_waiting_requests", &["gone"], 9.0);
    set("warmfront_waiting_band_requests", &["m", "-1"], 1.0);
    set("warmfront_waiting_band_requests", &["m", "0"], 2.0);
    set("warmfront_waiting_band_requests", &["m", "4"], 0.0);
    set("warmfront_oldest_wait_seconds", &["m"], 1.25);
    set("warmfront_pool_requests", &["m"], 7.0);
    set("warmfront_flow_limit", &["queue"], 1024.0);
    set("warmfront_flow_limit", &["in_flight"], f64::INFINITY);
    world.metrics.inc("warmfront_shed_total", &["m", "queue_timeout"], 2);
    world.metrics.inc("warmfront_held_total", &["m", "estimated_wait"], 5);
    let mut client = world.client().await;
    client.send("GET /health/backlog HTTP/1.1\r\nhost: r\r\n\r\n".to_owned()).await;
    let answer = client.answer().await;
    assert_eq!(answer.status, 200);
    let expected = json!({
        "in_flight_requests": 7,
        "waiting_requests": 3,
        "limits": {"queue": 1024, "in_flight": null},
        "pools": [{
            "name": "m",
            "waiting": 3,
            "waiting_by_band": {"-1": 1, "0": 2},
            "oldest_wait_s": 1.25,
            "in_flight": 7,
            "held_total": {"estimated_wait": 5},
            "rejected_total": {"queue_timeout": 2},
        }],
    });
    assert_eq!(answer.json(), expected);
    assert!(world.events("asked").is_empty());
}

// bug 87, 178
#[tokio::test]
async fn the_router_shows_its_models_readiness_metrics_and_version() {
    let engine = Engine::start(|_| Act::Say(vec![])).await;
    let world = World::start(Options::new(&[&engine])).await;
    let mut client = world.client().await;
    let mut get = async |path: &str| {
        client.send(format!("GET {path} HTTP/1.1\r\nhost: r\r\n\r\n")).await;
        client.answer().await
    };
    let models = get("/v1/models/").await.json();
    assert_eq!(models["data"][0]["max_model_len"], 4096);
    assert_eq!(models["data"][1]["id"], "lora");
    assert_eq!(get("/v1/models/m").await.json()["id"], "m");
    assert_eq!(get("/v1/models/none").await.status, 404);
    let ready = get("/ready").await;
    assert_eq!(ready.status, 200);
    assert_eq!(ready.json()["pools"][0]["events"], json!({"live": 0, "stale": 0, "none": 1}));
    assert_eq!(get("/health").await.status, 200);
    assert!(get("/metrics").await.text().contains("# TYPE warmfront_connections gauge\n"));
    assert!(get("/version").await.json()["version"].is_string());
    assert_eq!(engine.requests(), 0);
}
