//! The client and the fixed upstream, against each other and without a router.

use std::io::{BufRead, BufReader};
use std::net::SocketAddr;
use std::process::{Child, Command, Stdio};
use std::time::Duration;

use warmfront_bench::client::{self, Plan, Requests, Tally};
use warmfront_bench::text::ChatBodies;

struct Upstream {
    process: Child,
    ports: Vec<u16>,
}

impl Upstream {
    fn start(flags: &[&str]) -> Self {
        let mut command = Command::new(env!("CARGO_BIN_EXE_upstream"));
        let mut process = command.args(flags).stdout(Stdio::piped()).spawn().unwrap();
        let mut line = String::new();
        BufReader::new(process.stdout.take().unwrap()).read_line(&mut line).unwrap();
        let said: serde_json::Value = serde_json::from_str(&line).unwrap();
        let ports = said["ports"].as_array().unwrap().iter().map(|port| port.as_u64().unwrap() as u16).collect();
        Self { process, ports }
    }
}

impl Drop for Upstream {
    fn drop(&mut self) {
        self.process.kill().unwrap();
        self.process.wait().unwrap();
    }
}

struct Chat {
    path: &'static str,
    bodies: ChatBodies,
}

impl Requests for Chat {
    fn append(&mut self, into: &mut Vec<u8>) {
        let length = self.bodies.body_bytes();
        let head = format!("POST {} HTTP/1.1\r\nhost: a\r\ncontent-length: {length}\r\n\r\n", self.path);
        into.extend_from_slice(head.as_bytes());
        self.bodies.append(into);
    }
}

fn drive(upstream: &Upstream, path: &'static str, connections: usize, reads: bool) -> Tally {
    let plan = Plan {
        target: SocketAddr::from(([127, 0, 0, 1], upstream.ports[0])),
        connections,
        warmup: Duration::from_millis(100),
        window: Duration::from_millis(600),
        pids: vec![upstream.process.id()],
        reads,
    };
    let mut chat = Chat { path, bodies: ChatBodies::new("m", 4096, 0.8, 1, true, 1) };
    client::drive(&plan, &mut chat).unwrap()
}

#[test]
fn every_request_is_answered_on_several_ports() {
    let upstream = Upstream::start(&["--ports", "3"]);
    assert_eq!(upstream.ports.len(), 3);
    let tally = drive(&upstream, "/v1/chat/completions", 4, true);
    assert!(tally.requests > 10);
    assert_eq!((tally.refused, tally.broken, tally.events), (0, 0, 0));
    assert!(tally.after.processes == 1 && tally.resident_bytes_max > 0);
}

#[test]
fn streams_carry_their_events_and_a_last_one() {
    let upstream = Upstream::start(&["--stream", "true", "--events", "5"]);
    let tally = drive(&upstream, "/v1/chat/completions", 2, true);
    assert!(tally.requests > 2);
    let share = tally.events as f64 / tally.requests as f64;
    assert!((5.5..6.5).contains(&share), "{share} events a stream");
}

#[test]
fn paced_streams_keep_their_pace() {
    let upstream = Upstream::start(&["--stream", "true", "--pace-ms", "20"]);
    let mut tally = drive(&upstream, "/v1/chat/completions", 8, true);
    let gap_ms = client::percentile_ms(&mut tally.gaps_us, 0.5).unwrap();
    assert!((15.0..200.0).contains(&gap_ms), "{gap_ms} ms between events");
}

#[test]
fn an_upstream_keeps_little_for_clients_that_never_read() {
    let upstream = Upstream::start(&["--stream", "true", "--events", "1000000"]);
    let tally = drive(&upstream, "/v1/chat/completions", 4, false);
    assert_eq!(tally.events, 0);
    assert!(tally.resident_bytes_max < 32 << 20, "{} bytes", tally.resident_bytes_max);
}

#[test]
fn rendering_is_refused_unless_it_was_asked_for() {
    let refusing = drive(&Upstream::start(&[]), "/v1/chat/completions/render", 1, true);
    assert!(refusing.requests > 0 && refusing.refused == refusing.requests);
    let rendering = drive(&Upstream::start(&["--render", "true"]), "/v1/chat/completions/render", 1, true);
    assert!(rendering.requests > 0 && rendering.refused == 0);
    assert!(rendering.body_bytes / rendering.requests > 4096);
}
