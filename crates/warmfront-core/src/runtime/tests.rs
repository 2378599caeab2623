//! The whole core on loopback, driven from outside; no Python, no engine.

use std::io::{Read, Write};
use std::net::{TcpListener as StdListener, TcpStream};
use std::os::unix::net::UnixStream;
use std::time::Instant;

use serde_json::json;

use super::*;

const DEADLINE: Duration = Duration::from_secs(20);

fn config(listen: &str, socket: &str, command: &[&str]) -> CoreConfig {
    serde_json::from_value(json!({
        "front": {
            "listen": listen, "io_threads": 1, "compute_threads": 1, "body_bytes_max": 1 << 20,
            "header_bytes_max": 65536, "headers_max": 128, "header_timeout_s": 10, "body_timeout_s": 10,
            "idle_timeout_s": 10, "write_timeout_s": 10, "connections_max": 64, "expose_headers": true, "grace_s": 5,
            "settle_s": 0, "handover": null, "handover_timeout_s": 5, "fleet_wait_s": 0,
            "tls": null, "keys_file": null, "metrics_without_key": false, "forward_authorization": "auto",
            "trusted_networks": null, "trusted_secret_file": null, "headers": {"remove": [], "allow": null},
            "streams_per_client_max": 100, "keep_alive_s": 0
        },
        "upstream": {
            "connect_timeout_s": 1, "first_byte_timeout_s": 10, "idle_connections_per_server": 4, "idle_timeout_s": 4
        },
        "session": {"headers": ["x-session-id"], "baggage": ""},
        "index": {
            "facts_max": 100_000, "seed": 0, "predicted_ttl_s": 10, "approximate_ttl_s": 600,
            "block_size_default": 16, "segment_cache_bytes": 0
        },
        "kv": {
            "message_bytes_max": 1 << 20, "replay_timeout_s": 1, "replay_check_interval_s": 1,
            "reconnect_delay_s": 0.05, "reconnect_delay_s_max": 0.1, "unknown_parents_max": 64
        },
        "queues": {"events_max": 1000, "commands_max": 1000, "batch_max": 100, "tick_interval_s": 0.5},
        "control": {
            "command": command, "socket": socket, "restart_delay_s": 0.01, "restart_delay_s_max": 0.05
        },
        "log": {"level": "info"},
        "metrics": crate::meter::CATALOGUE.iter().map(|(name, kind, labels)| json!({
            "name": name, "kind": kind, "help": "", "labels": labels, "buckets": [1.0]
        })).collect::<Vec<_>>(),
        "label_values_max": 100
    }))
    .unwrap()
}

fn wait(what: &str, condition: impl Fn() -> bool) {
    let end = Instant::now() + DEADLINE;
    while !condition() {
        assert!(Instant::now() < end, "waited too long for: {what}");
        std::thread::yield_now();
    }
}

fn get(address: SocketAddr, path: &str) -> String {
    let mut stream = TcpStream::connect(address).unwrap();
    write!(stream, "GET {path} HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n").unwrap();
    let mut answer = String::new();
    stream.read_to_string(&mut answer).unwrap();
    answer
}

/// Receives until the end, as the deciding thread does.
fn drain(service: &Service) -> Vec<u8> {
    std::iter::from_fn(|| service.receive()).flatten().collect()
}

fn contains(bytes: &[u8], text: &str) -> bool {
    bytes.windows(text.len()).any(|window| window == text.as_bytes())
}

#[test]
fn an_address_in_use_is_named_in_the_error() {
    let taken = StdListener::bind("127.0.0.1:0").unwrap();
    let address = taken.local_addr().unwrap().to_string();
    let error = Service::start(config(&address, "", &[])).err().expect("the address is taken");
    assert!(error.to_string().contains(&address), "{error}");
}

#[test]
fn a_fleet_from_the_control_socket_is_served_and_told_to_the_router() {
    let directory = tempfile::tempdir().unwrap();
    let socket = directory.path().join("control.sock");
    let service = Service::start(config("127.0.0.1:0", socket.to_str().unwrap(), &[])).unwrap();
    assert!(get(service.address(), "/ready").starts_with("HTTP/1.1 503"));
    let mut link = UnixStream::connect(&socket).unwrap();
    let update = rmp_serde::to_vec_named(&json!({"type": "fleet", "update": {
        "version": 1, "degraded": [],
        "pools": [{
            "name": "m", "models": {"m": null}, "tokenizer": null,
            "replicas": [{"id": "http://127.0.0.1:9", "url": "http://127.0.0.1:9", "engine": "vllm", "ready": true,
                          "rank": null, "block_size": 16, "capacity_tokens": 1024, "events": null}]
        }]
    }}))
    .unwrap();
    link.write_all(&(update.len() as u32).to_be_bytes()).unwrap();
    link.write_all(&update).unwrap();
    wait("the pool to be ready", || get(service.address(), "/ready").starts_with("HTTP/1.1 200"));
    let fleet = service.fleet();
    let (pool, adapter) = fleet.pool_of("m").unwrap();
    assert_eq!((adapter, pool.block_sizes.as_slice()), (None, &[16][..]));
    assert_eq!(pool.tokens.reason(), Some("no tokenizer is known for this pool"));
    service.stop();
    assert!(contains(&drain(&service), "fleet_changed"));
    service.join();
    assert!(!socket.exists());
}

#[test]
fn stopping_is_told_drained_and_ends_all_threads() {
    let service = Service::start(config("127.0.0.1:0", "", &[])).unwrap();
    service.stop();
    let events = drain(&service);
    assert!(contains(&events, "stopping"));
    assert!(service.receive().is_none(), "still over");
    service.join();
    assert!(TcpStream::connect(service.address()).is_err());
}

#[test]
fn a_control_process_that_ends_is_started_again_and_ends_with_us() {
    let directory = tempfile::tempdir().unwrap();
    let starts = directory.path().join("starts");
    let script = format!("echo $$ >> {0}; [ $(wc -l < {0}) -ge 3 ] && read end; exit 1", starts.display());
    let service = Service::start(config("127.0.0.1:0", "", &["sh", "-c", &script])).unwrap();
    let pids = || std::fs::read_to_string(&starts).unwrap_or_default();
    wait("three starts", || pids().lines().count() == 3);
    let last = pids().lines().last().unwrap().to_owned();
    wait("the third to run", || std::path::Path::new("/proc").join(&last).exists());
    assert!(service.metrics().render().contains("warmfront_control_restarts_total 2"));
    service.stop();
    drain(&service);
    service.join();
    assert!(!std::path::Path::new("/proc").join(&last).exists(), "the control process outlived us");
}

#[test]
fn a_thread_that_panics_ends_the_process_instead_of_leaving_it_deaf() {
    let service = Service::start(config("127.0.0.1:0", "", &[])).unwrap();
    let thread = spawn("warmfront-test", &service.shared, || panic!("on purpose")).unwrap();
    assert!(thread.join().is_err());
    drain(&service);
    assert!(service.has_panicked());
    service.join();
}

fn with_handover(listen: &str, control: &Path, handover: &Path) -> CoreConfig {
    let mut config = config(listen, control.to_str().unwrap(), &[]);
    config.front.handover = Some(handover.to_str().unwrap().to_owned());
    config
}

/// Tells a process of a fleet with one ready replica; the link must stay open.
fn make_ready(socket: &Path) -> UnixStream {
    let mut link = UnixStream::connect(socket).unwrap();
    let replica = json!({"id": "http://127.0.0.1:9", "url": "http://127.0.0.1:9", "engine": "vllm", "ready": true,
                         "rank": null, "block_size": 16, "capacity_tokens": 1024, "events": null});
    let pool = json!({"name": "m", "models": {"m": null}, "tokenizer": null, "replicas": [replica]});
    let update = json!({"type": "fleet", "update": {"version": 1, "pools": [pool]}});
    let update = rmp_serde::to_vec_named(&update).unwrap();
    link.write_all(&(update.len() as u32).to_be_bytes()).unwrap();
    link.write_all(&update).unwrap();
    link
}

#[test]
fn the_next_process_takes_the_socket_when_it_is_ready_and_the_one_before_ends() {
    let directory = tempfile::tempdir().unwrap();
    let path = |name: &str| directory.path().join(name);
    let handover = path("handover.sock");
    let first = Service::start(with_handover("127.0.0.1:0", &path("1.sock"), &handover)).unwrap();
    wait("the offer", || handover.exists());
    let address = first.address();
    let second = Service::start(with_handover(&address.to_string(), &path("2.sock"), &handover)).unwrap();
    assert_eq!(second.address(), address);
    assert!(get(address, "/health").starts_with("HTTP/1.1 200"), "the first still serves");
    assert!(!first.shared.stop.is_set());
    let _link = make_ready(&path("2.sock"));
    assert!(contains(&drain(&first), "stopping"));
    first.join();
    assert!(get(address, "/ready").starts_with("HTTP/1.1 200"), "the second serves at the same socket");
    wait("the next offer", || handover.exists());
    second.stop();
    drain(&second);
    second.join();
    assert!(!handover.exists());
    assert!(TcpStream::connect(address).is_err());
}

/// Sends the header of a request; its body is `{}`.
fn begin_request(address: SocketAddr) -> TcpStream {
    let mut stream = TcpStream::connect(address).unwrap();
    let head = "POST /v1/completions HTTP/1.1\r\nHost: x\r\nExpect: 100-continue\r\nContent-Length: 2\r\n\r\n";
    stream.write_all(head.as_bytes()).unwrap();
    let mut asked = [0; 25];
    stream.read_exact(&mut asked).unwrap();
    assert_eq!(asked, *b"HTTP/1.1 100 Continue\r\n\r\n");
    stream
}

/// Sends the body, and reads whatever comes.
fn end_request(mut stream: TcpStream) -> String {
    let mut answer = String::new();
    let sent = stream.write_all(b"{}").and_then(|()| stream.read_to_string(&mut answer));
    sent.map_or_else(|error| error.to_string(), |_| answer)
}

#[test]
fn the_first_signal_after_a_handover_leaves_running_requests_their_time_and_the_second_does_not() {
    let directory = tempfile::tempdir().unwrap();
    let path = |name: &str| directory.path().join(name);
    let handover = path("handover.sock");
    let first = Service::start(with_handover("127.0.0.1:0", &path("1.sock"), &handover)).unwrap();
    wait("the offer", || handover.exists());
    let address = first.address();
    let [one, two, three] = [(); 3].map(|()| begin_request(address));
    let second = Service::start(with_handover(&address.to_string(), &path("2.sock"), &handover)).unwrap();
    let _link = make_ready(&path("2.sock"));
    wait("the handover", || first.shared.stop.is_handed_over());
    first.stop();
    for request in [one, two] {
        let answer = end_request(request); // of the second: the first process has had every chance to end by then
        assert!(answer.starts_with("HTTP/1.1 503") && answer.contains("No engine is known yet"), "{answer}");
    }
    first.stop();
    drain(&first);
    first.join();
    assert!(!end_request(three).starts_with("HTTP/1.1 503"), "cut");
    second.stop();
    drain(&second);
    second.join();
}

#[test]
fn a_process_that_does_not_become_ready_ends_and_the_one_before_serves_on() {
    let directory = tempfile::tempdir().unwrap();
    let path = |name: &str| directory.path().join(name);
    let handover = path("handover.sock");
    let first = Service::start(with_handover("127.0.0.1:0", &path("1.sock"), &handover)).unwrap();
    wait("the offer", || handover.exists());
    let mut late = with_handover(&first.address().to_string(), &path("2.sock"), &handover);
    late.front.handover_timeout_s = 0.05;
    let late = Service::start(late).unwrap();
    drain(&late);
    assert!(late.failure().unwrap().contains("the process before stays in charge"));
    late.join();
    drop(late);
    assert!(handover.exists(), "the offer of the first is still there");
    assert!(get(first.address(), "/health").starts_with("HTTP/1.1 200"));
}

#[test]
fn a_socket_at_another_address_is_refused_with_both_named() {
    let directory = tempfile::tempdir().unwrap();
    let path = |name: &str| directory.path().join(name);
    let handover = path("handover.sock");
    let first = Service::start(with_handover("127.0.0.1:0", &path("1.sock"), &handover)).unwrap();
    wait("the offer", || handover.exists());
    let error = Service::start(with_handover("127.0.0.1:1", &path("2.sock"), &handover)).err().unwrap();
    let words = error.to_string();
    assert!(words.contains("127.0.0.1:1") && words.contains(&first.address().to_string()), "{words}");
}
