//! The client and the fixed upstream, against each other and without a router.

use std::io::{BufRead, BufReader};
use std::net::{SocketAddr, TcpListener};
use std::process::{Child, Command, Stdio};
use std::time::Duration;

use warmfront_bench::client::{self, Departures, Plan, Requests, Tally};
use warmfront_bench::samples::percentile_ms;
use warmfront_bench::text::ChatBodies;

const CHAT: &str = "/v1/chat/completions";
/// About 60 requests in the measured 0.6 s.
const STEADY: Departures = Departures::Steady { per_s: 100.0, seed: 1 };

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
    run(&Plan { reads, ..plan(upstream, connections, Departures::OnAnswer) }, path)
}

fn plan(upstream: &Upstream, connections: usize, departures: Departures) -> Plan {
    Plan {
        target: SocketAddr::from(([127, 0, 0, 1], upstream.ports[0])),
        departures,
        connections,
        warmup: Duration::from_millis(100),
        window: Duration::from_millis(600),
        pids: vec![upstream.process.id()],
        reads: true,
    }
}

fn p99_ms(samples_us: &mut [u32]) -> f64 {
    percentile_ms(samples_us, 0.99).unwrap()
}

fn run(plan: &Plan, path: &'static str) -> Tally {
    let mut chat = Chat { path, bodies: ChatBodies::new("m", 4096, 0.8, 1, true, 1) };
    client::drive(plan, &mut chat).unwrap()
}

#[test]
fn every_request_is_answered_on_several_ports() {
    let upstream = Upstream::start(&["--ports", "3"]);
    assert_eq!(upstream.ports.len(), 3);
    let tally = drive(&upstream, CHAT, 4, true);
    assert!(tally.requests > 10);
    assert_eq!((tally.refused, tally.broken, tally.events), (0, 0, 0));
    assert!(tally.after.processes == 1 && tally.resident_bytes_max > 0);
}

#[test]
fn streams_carry_their_events_and_a_last_one() {
    let upstream = Upstream::start(&["--stream", "true", "--events", "5"]);
    let tally = drive(&upstream, CHAT, 2, true);
    assert!(tally.requests > 2);
    let share = tally.events as f64 / tally.requests as f64;
    assert!((5.5..6.5).contains(&share), "{share} events a stream");
}

#[test]
fn paced_streams_keep_their_pace() {
    let upstream = Upstream::start(&["--stream", "true", "--pace-ms", "20"]);
    let mut tally = drive(&upstream, CHAT, 8, true);
    let gap_ms = percentile_ms(&mut tally.gaps_us, 0.5).unwrap();
    assert!((15.0..200.0).contains(&gap_ms), "{gap_ms} ms between events");
}

#[test]
fn an_upstream_keeps_little_for_clients_that_never_read() {
    let upstream = Upstream::start(&["--stream", "true", "--events", "1000000"]);
    let tally = drive(&upstream, CHAT, 4, false);
    assert_eq!((tally.events, tally.refused), (0, 0));
    assert!(tally.resident_bytes_max < 32 << 20, "{} bytes", tally.resident_bytes_max);
}

#[test]
fn a_client_that_never_reads_still_tells_whether_it_was_refused() {
    let tally = drive(&Upstream::start(&[]), "/v1/chat/completions/render", 3, false);
    assert_eq!(tally.refused, 3);
}

#[test]
fn steady_requests_leave_however_long_the_answers_take() {
    let upstream = Upstream::start(&["--stream", "true", "--pace-ms", "1000", "--eager", "true"]);
    let mut tally = run(&plan(&upstream, 100, STEADY), CHAT);
    assert_eq!((tally.requests, tally.refused, tally.broken, tally.unsent), (0, 0, 0, 0));
    assert!((40..=80).contains(&tally.late_us.len()), "{} requests of 60", tally.late_us.len());
    assert!(tally.first_byte_us.len() >= tally.late_us.len(), "requests without a first byte");
    let (byte_ms, event_ms) = (p99_ms(&mut tally.first_byte_us), p99_ms(&mut tally.first_event_us));
    assert!(byte_ms <= event_ms && event_ms < 900.0, "{byte_ms} ms to the first byte, {event_ms} ms to the event");
}

#[test]
fn the_first_event_waits_for_one_pace_unless_the_engine_is_eager() {
    let slow = Upstream::start(&["--stream", "true", "--pace-ms", "50", "--events", "3"]);
    let mut tally = run(&plan(&slow, 100, STEADY), CHAT);
    assert!(percentile_ms(&mut tally.first_event_us, 0.01).unwrap() >= 50.0);
    assert!(percentile_ms(&mut tally.first_byte_us, 0.01).unwrap() < 50.0);
}

#[test]
fn connections_of_steady_requests_are_used_again() {
    let upstream = Upstream::start(&["--stream", "true", "--pace-ms", "5", "--events", "3", "--eager", "true"]);
    let tally = run(&plan(&upstream, 10, Departures::Steady { per_s: 50.0, seed: 2 }), CHAT);
    assert!(tally.requests > 10, "{} answers over at most 10 connections", tally.requests);
    assert_eq!(tally.broken, 0);
}

#[test]
fn requests_beyond_the_most_connections_are_counted_as_unsent() {
    let upstream = Upstream::start(&["--stream", "true", "--pace-ms", "1000"]);
    let tally = run(&plan(&upstream, 2, STEADY), CHAT);
    assert!(tally.unsent > 20, "{} unsent", tally.unsent);
}

#[test]
fn a_request_that_is_never_answered_counts_with_the_time_it_has_waited() {
    let silent = TcpListener::bind("127.0.0.1:0").unwrap();
    let upstream = Upstream::start(&[]);
    let plan = Plan { target: silent.local_addr().unwrap(), ..plan(&upstream, 100, STEADY) };
    let mut tally = run(&plan, CHAT);
    assert!(tally.waiting > 40 && tally.first_byte_us.len() as u64 == tally.waiting, "{} waiting", tally.waiting);
    assert!(percentile_ms(&mut tally.first_byte_us, 1.0).unwrap() > 2000.0);
}

#[test]
fn rendering_is_refused_unless_it_was_asked_for() {
    let refusing = drive(&Upstream::start(&[]), "/v1/chat/completions/render", 1, true);
    assert!(refusing.requests > 0 && refusing.refused == refusing.requests);
    let rendering = drive(&Upstream::start(&["--render", "true"]), "/v1/chat/completions/render", 1, true);
    assert!(rendering.requests > 0 && rendering.refused == 0);
    assert!(rendering.body_bytes / rendering.requests > 4096);
}
