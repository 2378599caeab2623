//! Who is let in, what a client may say of itself, and what it can never reach.

use std::io::Write as _;

use tempfile::NamedTempFile;
use warmfront_core::config::{ForwardAuthorization, HeaderRules};

use crate::world::{Act, Answer, CHAT, Engine, Options, World, eventually, header, json_reply, say};

/// SHA-256 of `abc`, from FIPS 180-4.
const ABC: &str = "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad";

fn keys_file(flow: &str, priority: &str) -> NamedTempFile {
    let mut file = NamedTempFile::new().unwrap();
    write!(file, r#"{{"keys":[{{"name":"a","flow":"{flow}","sha256":"{ABC}","priority":{priority}}}]}}"#).unwrap();
    file
}

async fn world(change: impl FnOnce(&mut Options)) -> (World, Engine) {
    let engine = Engine::start(|_| Act::Say(json_reply("{}"))).await;
    let mut options = Options::new(&[&engine]);
    change(&mut options);
    (World::start(options).await, engine)
}

async fn with_keys(change: impl FnOnce(&mut Options)) -> (World, Engine, NamedTempFile) {
    let file = keys_file("team", "null");
    let (world, engine) = world(|options| {
        options.front.keys_file = Some(file.path().to_str().unwrap().to_owned());
        change(options);
    })
    .await;
    (world, engine, file)
}

async fn ask(world: &World, method: &str, path: &str, headers: &str, body: &str) -> Answer {
    let mut client = world.client().await;
    let length = body.len();
    client
        .send(format!("{method} {path} HTTP/1.1\r\nhost: r\r\n{headers}content-length: {length}\r\n\r\n{body}"))
        .await;
    client.answer().await
}

async fn chat(world: &World, headers: &str) -> Answer {
    ask(world, "POST", "/v1/chat/completions", headers, CHAT).await
}

fn code(answer: &Answer) -> (u16, String) {
    (answer.status, answer.json()["error"]["code"].as_str().unwrap_or_default().to_owned())
}

// bug 93, 95, 167
#[tokio::test]
async fn every_path_but_health_and_ready_wants_a_key() {
    let (world, engine, _file) = with_keys(|_| ()).await;
    let denied = (401, "invalid_api_key".to_owned());
    for (method, path) in [
        ("POST", "/v1/chat/completions"),
        ("POST", "/v1/completions"),
        ("POST", "/v1/responses"),
        ("POST", "/v1/audio/transcriptions"),
        ("POST", "/v1/audio/speech"),
        ("POST", "/v1/embeddings"),
        ("POST", "/tokenize"),
        ("POST", "/invocations"),
        ("POST", "/sleep"),
        ("GET", "/v1/models"),
        ("GET", "/v1/models/m"),
        ("GET", "/metrics"),
        ("GET", "/metrics/"),
        ("GET", "/version"),
        ("GET", "/"),
        ("OPTIONS", "/v1/chat/completions"),
        ("DELETE", "/v1/responses/1"),
        ("GET", "//health"),
        ("GET", "/health/../metrics"),
        ("GET", "/health%2f"),
        ("GET", "/HEALTH"),
    ] {
        let answer = ask(&world, method, path, "", "").await;
        assert_eq!(code(&answer), denied, "{method} {path}");
        assert_eq!(answer.header("www-authenticate"), Some("Bearer"));
    }
    for path in ["/health", "/health?x=1"] {
        assert_eq!(ask(&world, "GET", path, "", "").await.status, 200, "{path}");
    }
    assert_ne!(ask(&world, "GET", "/ready", "", "").await.status, 401);
    assert_eq!(engine.requests(), 0);
    assert!(world.metrics.render().contains("warmfront_refused_clients_total{reason=\"no_key\"} 21\n"));
}

#[tokio::test]
async fn the_key_is_taken_from_either_header_and_a_wrong_one_is_refused_in_the_protocols_shape() {
    let (world, engine, _file) = with_keys(|_| ()).await;
    for good in ["authorization: Bearer abc\r\n", "AUTHORIZATION: bearer abc\r\n", "x-api-key: abc\r\n"] {
        assert_eq!(chat(&world, good).await.status, 200, "{good}");
    }
    for bad in [
        "authorization: Bearer abd\r\n",
        "authorization: Basic abc\r\n",
        "authorization: abc\r\n",
        "x-api-key: abcd\r\n",
        "authorization: Bearer abc\r\nauthorization: Bearer abd\r\n",
        "cookie: x-api-key=abc\r\n",
    ] {
        assert_eq!(code(&chat(&world, bad).await), (401, "invalid_api_key".to_owned()), "{bad}");
    }
    let answer = ask(&world, "POST", "/v1/messages", "x-api-key: no\r\n", "{}").await;
    assert_eq!((answer.status, answer.json()["type"].as_str()), (401, Some("error")));
    assert_eq!(answer.json()["error"]["type"], "authentication_error");
    assert_eq!(engine.requests(), 3);
}

#[tokio::test]
async fn a_revoked_key_is_refused_soon() {
    let (world, _engine, file) = with_keys(|_| ()).await;
    assert_eq!(chat(&world, "x-api-key: abc\r\n").await.status, 200);
    std::fs::write(file.path(), r#"{"keys":[]}"#).unwrap();
    let deadline = std::time::Instant::now() + crate::world::PATIENCE;
    while chat(&world, "x-api-key: abc\r\n").await.status != 401 {
        assert!(std::time::Instant::now() < deadline, "the key is still taken");
    }
}

// bug 151
#[tokio::test]
async fn a_checked_key_stays_here_and_an_unchecked_one_reaches_every_engine_that_is_tried() {
    let (world, engine, _file) = with_keys(|_| ()).await;
    chat(&world, "authorization: Bearer abc\r\nx-api-key: other\r\napi-key: azures\r\n").await;
    let heard = engine.heard.lock()[0].head.clone();
    for name in ["authorization", "x-api-key", "api-key"] {
        assert_eq!(header(&heard, name), None, "{name}");
    }
    let (world, engine, _file) =
        with_keys(|options| options.front.forward_authorization = ForwardAuthorization::Always).await;
    chat(&world, "authorization: Bearer abc\r\n").await;
    assert_eq!(header(&engine.heard.lock()[0].head, "authorization"), Some("Bearer abc"));
    let gone = Engine::start(|_| Act::Say(vec![])).await.address;
    let engine = Engine::start(|_| Act::Say(json_reply("{}"))).await;
    let mut options = Options::new(&[&engine]);
    options.engines.insert(0, std::net::SocketAddr::new(gone.ip(), 1));
    options.decide = crate::world::always(&[0, 1]);
    let world = World::start(options).await;
    assert_eq!(chat(&world, "authorization: Bearer engines-own\r\n").await.status, 200);
    assert_eq!(header(&engine.heard.lock()[0].head, "authorization"), Some("Bearer engines-own"));
}

/// Flow and priority of the only arrival.
fn told(world: &World) -> (String, i64) {
    let arrived = world.events("arrived");
    let facts = &arrived.last().expect("an arrival")[1];
    let fields = facts.as_array().unwrap();
    (fields[5].as_str().unwrap().to_owned(), fields[6].as_i64().unwrap())
}

#[tokio::test]
async fn a_keys_flow_and_priority_count_and_not_what_its_client_says() {
    let file = keys_file("team", "2");
    let (world, engine) = world(|options| {
        options.front.keys_file = Some(file.path().to_str().unwrap().to_owned());
    })
    .await;
    let claims =
        "x-api-key: abc\r\nx-warmfront-flow: other\r\nx-vllm-priority: -5\r\nx-warmfront-priority-limit: -9\r\n";
    let urgent = CHAT.replacen('{', "{\"priority\":-7,", 1);
    let patient = CHAT.replacen('{', "{\"priority\":7,", 1);
    for (body, priority, overruled) in [(CHAT, 2, Some("2")), (&urgent, 2, Some("2")), (&patient, 7, None)] {
        ask(&world, "POST", "/v1/chat/completions", claims, body).await;
        assert_eq!(told(&world), ("team".to_owned(), priority), "{body}");
        assert_eq!(header(&engine.heard.lock().last().unwrap().head, "x-vllm-priority"), overruled, "{body}");
    }
    let hidden = format!("{claims}connection: x-vllm-priority, x-warmfront-priority-limit, x-warmfront-flow\r\n");
    let body = urgent;
    ask(&world, "POST", "/v1/chat/completions", &hidden, &body).await;
    assert_eq!(told(&world), ("team".to_owned(), 2));
    let heard = engine.heard.lock().last().unwrap().clone();
    assert_eq!(header(&heard.head, "x-vllm-priority"), Some("2"), "vLLM lets the header overrule the body");
    assert_eq!(heard.body, body.as_bytes());
    assert_eq!(header(&heard.head, "x-warmfront-flow"), None);
    let (trusting, _engine, _file) =
        with_keys(|options| options.front.trusted_networks = Some(vec!["127.0.0.0/8".to_owned()])).await;
    chat(&trusting, "x-api-key: abc\r\nx-warmfront-flow: other\r\n").await;
    assert_eq!(told(&trusting).0, "team", "nor what a trusted gateway says of it");
}

#[tokio::test]
async fn only_trusted_peers_speak_for_their_clients() {
    let claims = "x-warmfront-flow: vip\r\nx-vllm-priority: -5\r\nx-forwarded-for: 1.2.3.4\r\nforwarded: for=1.2.3.4\r\n\
                  x-real-ip: 1.2.3.4\r\nx-data-parallel-rank: 3\r\n";
    let (trusting, engine) = world(|_| ()).await;
    chat(&trusting, claims).await;
    assert_eq!(told(&trusting), ("vip".to_owned(), -5), "this machine is trusted by default");
    let heard = engine.heard.lock()[0].head.clone();
    assert_eq!(header(&heard, "x-forwarded-for"), Some("1.2.3.4"));
    assert_eq!(header(&heard, "x-data-parallel-rank"), None, "no client chooses a rank");
    let (strict, engine) = world(|options| options.front.trusted_networks = Some(vec!["10.0.0.0/8".to_owned()])).await;
    chat(&strict, claims).await;
    assert_eq!(told(&strict), ("default".to_owned(), 0));
    let body = CHAT.replacen('{', "{\"priority\":-7,", 1);
    ask(&strict, "POST", "/v1/chat/completions", "", &body).await;
    assert_eq!(told(&strict).1, 0, "nor by its body is a stranger more urgent than others");
    let heard = engine.heard.lock()[0].head.clone();
    for name in ["x-forwarded-for", "forwarded", "x-real-ip", "x-vllm-priority", "x-data-parallel-rank"] {
        assert_eq!(header(&heard, name), None, "{name}");
    }
}

#[tokio::test]
async fn a_priority_that_only_engines_can_read_does_not_pass_the_limit() {
    let (world, engine) = world(|options| {
        options.front.trusted_networks = Some(vec![]);
        options.front.body_bytes_max = 8 * 1024 * 1024;
    })
    .await;
    let told_engine = || {
        let heard = engine.heard.lock().last().unwrap().head.clone();
        header(&heard, "x-vllm-priority").map(str::to_owned)
    };
    for odd in ["\"-100\"", "-100.0", "-1e2", "-99999999999999999999"] {
        let body = CHAT.replacen('{', &format!("{{\"priority\":{odd},"), 1);
        ask(&world, "POST", "/v1/chat/completions", "", &body).await;
        assert_eq!((told(&world).1, told_engine().as_deref()), (0, Some("0")), "{odd}");
    }
    let long = format!(r#"{{"model":"m","prompt":[0{}],"priority":-100}}"#, ",0".repeat(1 << 20));
    ask(&world, "POST", "/v1/completions", "", &long).await;
    assert_eq!(told_engine().as_deref(), Some("0"), "behind more than is read of a body");
    let wide: Vec<u8> = r#"{"priority":-100}"#.encode_utf16().flat_map(|unit| u32::from(unit).to_le_bytes()).collect();
    ask(&world, "POST", "/v1/embeddings", "", std::str::from_utf8(&wide).unwrap()).await;
    assert_eq!(told_engine().as_deref(), Some("0"), "in UTF-32");
    chat(&world, "").await;
    assert_eq!(told_engine(), None, "others reach the engine as they are");
}

#[tokio::test]
async fn a_stranger_says_how_long_it_waits_and_nothing_else_that_is_the_routers() {
    let (world, _engine) = world(|options| options.front.trusted_networks = Some(vec![])).await;
    let asked = |name| format!("{name}: 5\r\nx-warmfront-flow: vip\r\n");
    for name in ["x-warmfront-timeout-s", "x-request-timeout"] {
        chat(&world, &asked(name)).await;
        let arrived = world.events("arrived").last().unwrap()[1].clone();
        let (arrived_s, deadline_s) = (arrived[1].as_f64().unwrap(), arrived.as_array().unwrap().last().unwrap());
        assert_eq!(deadline_s.as_f64(), Some(arrived_s + 5.0), "{name}");
        assert_eq!(told(&world).0, "default");
    }
}

#[tokio::test]
async fn a_shared_secret_makes_a_gateway_trusted_and_goes_no_further() {
    let mut secret = NamedTempFile::new().unwrap();
    writeln!(secret, "hush-hush").unwrap();
    let (world, engine) = world(|options| {
        options.front.trusted_networks = Some(vec![]);
        options.front.trusted_secret_file = Some(secret.path().to_str().unwrap().to_owned());
    })
    .await;
    for (given, flow) in [("", "default"), ("hush", "default"), ("hush-hush", "vip")] {
        chat(&world, &format!("x-warmfront-gateway-secret: {given}\r\nx-warmfront-flow: vip\r\n")).await;
        assert_eq!(told(&world).0, flow, "{given}");
    }
    assert!(engine.heard.lock().iter().all(|heard| !heard.head.contains("hush")));
}

#[tokio::test]
async fn operators_say_which_headers_engines_get() {
    let (world, engine) = world(|options| {
        options.front.headers = HeaderRules { remove: vec!["cookie".to_owned()], allow: None };
    })
    .await;
    chat(&world, "cookie: a=1\r\nx-tenant: t\r\nx-tenant: u\r\n").await;
    let heard = engine.heard.lock()[0].head.clone();
    assert_eq!((header(&heard, "cookie"), heard.matches("x-tenant: ").count()), (None, 2));
    assert_eq!(header(&heard, "via"), Some("1.1 warmfront"));
}

#[tokio::test]
async fn one_client_has_a_bounded_number_of_requests_running_and_others_are_not_held_up() {
    let engine = Engine::start(|_| {
        let mut pieces = say(crate::world::SSE_HEAD);
        pieces.push(crate::world::chunk("data: {}\n\n"));
        Act::SayAndHang(pieces)
    })
    .await;
    let mut options = Options::new(&[&engine]);
    options.front.trusted_networks = Some(vec![]);
    options.front.streams_per_client_max = 2;
    let upstream = options.upstream.clone();
    let world = World::start(options).await;
    let mut held = Vec::new();
    for _ in 0..2 {
        let mut client = world.client().await;
        client.send(crate::world::post("/v1/chat/completions", CHAT)).await;
        client.until("text/event-stream").await;
        held.push(client);
    }
    let refused = chat(&world, "").await;
    assert_eq!((code(&refused), refused.header("retry-after")), ((429, "rate_limit_exceeded".to_owned()), Some("1")));
    drop(held.pop());
    eventually(|| world.requests.len() == 1).await;
    let mut client = world.client().await;
    client.send(crate::world::post("/v1/chat/completions", CHAT)).await;
    client.until("text/event-stream").await;
    let mut config = world.fronts.current().config().clone();
    config.streams_per_client_max = 3;
    world.fronts.replace(world.fronts.current().reconfigured(config, upstream));
    let mut third = world.client().await;
    third.send(crate::world::post("/v1/chat/completions", CHAT)).await;
    third.until("text/event-stream").await;
    assert_eq!(chat(&world, "").await.status, 429, "those that ran before count under the new limit");
}

// bug 93, 178
#[tokio::test]
async fn an_engines_own_paths_cannot_be_reached_by_any_spelling() {
    let (world, engine) = world(|_| ()).await;
    for path in [
        "/sleep",
        "/wake_up",
        "/reset_prefix_cache",
        "/v1/load_lora_adapter",
        "/v1/unload_lora_adapter",
        "/collective_rpc",
        "/invocations",
        "/ping",
        "/server_info",
        "/docs",
        "/openapi.json",
        "/v1/../sleep",
        "/v1/chat/completions/../../../sleep",
        "/v1/chat/completions/..%2f..%2fsleep",
        "/v1%2fchat%2fcompletions",
        "/%73leep",
        "//sleep",
        "/v1//chat/completions",
        "/./sleep",
        "/v1/chat/completions;/sleep",
        "/v1/chat/completions\\..\\sleep",
        "/v1/models/../../sleep",
        "http://127.0.0.1:1/sleep",
    ] {
        let mut client = world.client().await;
        client.send(format!("POST {path} HTTP/1.1\r\nhost: r\r\ncontent-length: 2\r\n\r\n{{}}")).await;
        let status = client.answer().await.status;
        assert!([400, 404, 405].contains(&status), "{path}: {status}");
    }
    assert_eq!(engine.requests(), 0);
    let metrics = ask(&world, "GET", "/metrics", "", "").await;
    assert!(
        metrics.text().lines().all(|line| line.starts_with('#') || line.starts_with("warmfront_")),
        "own ones only"
    );
}

#[tokio::test]
async fn a_client_cannot_name_its_own_upstream() {
    let other = Engine::start(|_| Act::Say(json_reply("{}"))).await;
    let (world, engine) = world(|_| ()).await;
    let elsewhere = other.address;
    let length = CHAT.len();
    let mut client = world.client().await;
    client
        .send(format!(
            "POST http://{elsewhere}/v1/chat/completions HTTP/1.1\r\nhost: {elsewhere}\r\nx-forwarded-host: {elsewhere}\r\n\
             x-original-url: http://{elsewhere}/\r\nforwarded: host={elsewhere}\r\nx-warmfront-replica: http://{elsewhere}\r\n\
             content-length: {length}\r\n\r\n{CHAT}"
        ))
        .await;
    assert_eq!(client.answer().await.status, 200);
    let heard = engine.heard.lock()[0].head.clone();
    assert!(heard.starts_with("POST /v1/chat/completions HTTP/1.1\r\n"), "{heard}");
    assert_eq!(header(&heard, "host"), Some(engine.address.to_string().as_str()));
    let mut client = world.client().await;
    client.send(format!("CONNECT {elsewhere} HTTP/1.1\r\nhost: {elsewhere}\r\n\r\n")).await;
    assert_eq!(client.answer().await.status, 404);
    assert_eq!(other.requests(), 0);
}

#[tokio::test]
async fn a_body_has_one_length_or_the_connection_ends() {
    let (world, engine) = world(|_| ()).await;
    let head = "POST /v1/completions HTTP/1.1\r\nhost: r\r\n";
    let smuggled = "0\r\n\r\nGET /v1/models HTTP/1.1\r\nhost: r\r\n\r\n";
    for framing in [
        "content-length: 4\r\ntransfer-encoding: chunked\r\n",
        "content-length: 4\r\ncontent-length: 5\r\n",
        "content-length: 4, 5\r\n",
        "content-length: +4\r\n",
        "content-length: -1\r\n",
        "content-length : 4\r\n",
        "transfer-encoding: chunked, identity\r\n",
        "transfer-encoding: xchunked\r\n",
        "transfer-encoding: gzip, chunked\r\n",
        "transfer-encoding: chunked\r\ntransfer-encoding: chunked\r\n",
        "transfer-encoding:\u{b}chunked\r\n",
        "x-a: 1\r\n folded: 2\r\ncontent-length: 4\r\n",
    ] {
        let mut client = world.client().await;
        client.send(format!("{head}{framing}\r\n{smuggled}")).await;
        let answer = client.answer().await;
        assert_eq!(answer.status, 400, "{framing}");
        assert!(client.is_closed().await, "nothing behind it is read as a request: {framing}");
    }
    assert_eq!(engine.requests(), 0);
}

#[tokio::test]
async fn a_chunked_request_from_a_stranger_is_the_last_on_its_connection() {
    let (world, engine) = world(|options| options.front.trusted_networks = Some(vec![])).await;
    let mut client = world.client().await;
    client
        .send("POST /v1/completions HTTP/1.1\r\nhost: r\r\ntransfer-encoding: chunked\r\ncontent-length: 3\r\n\r\n")
        .await;
    client.send("e\r\n{\"prompt\":\"a\"}\r\n0\r\n\r\nGET /health HTTP/1.1\r\nhost: r\r\n\r\n").await;
    let answer = client.answer().await;
    assert_eq!((answer.status, answer.header("connection")), (200, Some("close")));
    assert!(client.is_closed().await);
    assert_eq!(engine.requests(), 1);
}

// bug 61, 62, 63, 65
#[tokio::test]
async fn an_answer_has_one_server_header_one_framing_and_all_its_cookies() {
    let reply = "HTTP/1.1 200 OK\r\nserver: uvicorn\r\nconnection: keep-alive, x-hop\r\nx-hop: 1\r\n\
                 transfer-encoding: chunked\r\nset-cookie: a=1\r\nset-cookie: b=2\r\nproxy-authenticate: x\r\n\
                 trailer: x-t\r\nupgrade: h2c\r\n\r\n2\r\n{}\r\n0\r\n\r\n";
    let (world, _engine) = World::with(move |_| Act::Say(say(reply))).await;
    let answer = chat(&world, "").await;
    assert_eq!(answer.text(), "{}");
    for (name, count) in [("server:", 1), ("transfer-encoding:", 1), ("set-cookie:", 2), ("content-length:", 0)] {
        assert_eq!(answer.head.matches(&format!("\r\n{name}")).count(), count, "{}", answer.head);
    }
    for name in ["x-hop", "proxy-authenticate", "trailer", "upgrade", "access-control-allow-origin"] {
        assert_eq!(answer.header(name), None, "{name}");
    }
}

// bug 114
#[tokio::test]
async fn an_error_of_ours_tells_nothing_about_engines() {
    let engine = Engine::start(|_| Act::SayAndClose(vec![])).await;
    let world = World::start(Options::new(&[&engine])).await;
    let answer = chat(&world, "").await;
    assert_eq!(answer.status, 502);
    let port = engine.address.port().to_string();
    assert!(!answer.text().contains(&port) && !answer.head.contains(&port), "{}{}", answer.head, answer.text());
}

// bug 159
#[tokio::test]
async fn labels_come_from_known_models_and_no_path_is_one() {
    let (world, _engine) = world(|_| ()).await;
    for number in 0..20 {
        ask(&world, "GET", &format!("/nothing/{number}"), "", "").await;
        ask(&world, "POST", "/v1/completions", "", &format!("{{\"model\":\"made-up-{number}\",\"prompt\":\"a\"}}"))
            .await;
    }
    let page = world.metrics.render();
    assert!(!page.contains("made-up") && !page.contains("nothing"), "{page}");
}
