//! Many streams through a router: `sse --target 127.0.0.1:8080 --connections 256 --pid 4711`.
//!
//! Prints one JSON object: events a second by the wall clock and by the CPU seconds of the charged processes, the time to
//! the first byte and event and the gaps between events as the client sees them, and memory. Each connection begins its
//! next stream when the last has ended; with `--arrivals-per-s 250` streams begin at that rate instead. With
//! `--reads false` every client sends its request and then never reads a byte; what counts then is the memory a stream
//! costs.

use std::error::Error;
use std::net::SocketAddr;
use std::time::Duration;

use serde_json::json;
use warmfront_bench::client::{self, Departures, Plan, Requests, Tally};
use warmfront_bench::flags::Flags;
use warmfront_bench::samples::percentile_ms;
use warmfront_bench::text::ChatBodies;

const FLAGS: &[&str] =
    &["target", "connections", "arrivals-per-s", "warmup-s", "window-s", "pid", "model", "reads", "seed"];
const BODY_BYTES: usize = 512;
const SHARED: f64 = 0.5;
const MAX_TOKENS: u32 = 200;

struct Streams {
    host: String,
    bodies: ChatBodies,
}

impl Requests for Streams {
    fn append(&mut self, into: &mut Vec<u8>) {
        let head = format!(
            "POST /v1/chat/completions HTTP/1.1\r\nhost: {}\r\ncontent-type: application/json\r\n\
             accept: text/event-stream\r\ncontent-length: {}\r\n\r\n",
            self.host,
            self.bodies.body_bytes()
        );
        into.extend_from_slice(head.as_bytes());
        self.bodies.append(into);
    }
}

fn main() -> Result<(), Box<dyn Error>> {
    let flags = Flags::from_env(FLAGS)?;
    let target: SocketAddr = flags.require("target")?;
    let (arrivals_per_s, seed) = (flags.get("arrivals-per-s", 0.0)?, flags.get("seed", 1)?);
    let is_open = arrivals_per_s > 0.0;
    let plan = Plan {
        target,
        departures: if is_open { Departures::Steady { per_s: arrivals_per_s, seed } } else { Departures::OnAnswer },
        connections: flags.get("connections", 32)?,
        warmup: Duration::from_secs_f64(flags.get("warmup-s", 2.0)?),
        window: Duration::from_secs_f64(flags.get("window-s", 5.0)?),
        pids: flags.all("pid")?,
        reads: flags.get("reads", true)?,
    };
    let idle = warmfront_bench::process::usage(&plan.pids);
    let model: String = flags.get("model", "m".to_owned())?;
    let bodies = ChatBodies::new(&model, BODY_BYTES, SHARED, MAX_TOKENS, true, seed);
    let tally = client::drive(&plan, &mut Streams { host: target.to_string(), bodies })?;
    println!("{}", report(tally, idle.resident_bytes, plan.connections));
    Ok(())
}

fn report(mut tally: Tally, idle_bytes: u64, connections: usize) -> serde_json::Value {
    let events = tally.events as f64;
    json!({
        "streams": connections,
        "finished": tally.requests,
        "refused": tally.refused,
        "broken": tally.broken,
        "unsent": tally.unsent,
        "waiting": tally.waiting,
        "window_s": tally.window_s,
        "events": tally.events,
        "events_per_s": events / tally.window_s,
        "cpu_s": tally.cpu_s(),
        "events_per_cpu_s": (tally.cpu_s() > 0.0).then(|| events / tally.cpu_s()),
        "first_byte_p50_ms": percentile_ms(&mut tally.first_byte_us, 0.5),
        "first_byte_p99_ms": percentile_ms(&mut tally.first_byte_us, 0.99),
        "first_event_p50_ms": percentile_ms(&mut tally.first_event_us, 0.5),
        "first_event_p99_ms": percentile_ms(&mut tally.first_event_us, 0.99),
        "late_p99_ms": percentile_ms(&mut tally.late_us, 0.99),
        "open_mean": (!tally.late_us.is_empty()).then(|| tally.open_sum as f64 / tally.late_us.len() as f64),
        "gap_p50_ms": percentile_ms(&mut tally.gaps_us, 0.5),
        "gap_p99_ms": percentile_ms(&mut tally.gaps_us, 0.99),
        "resident_bytes_idle": idle_bytes,
        "resident_bytes_max": tally.resident_bytes_max,
        "resident_bytes_a_stream": tally.resident_bytes_max.saturating_sub(idle_bytes) / connections.max(1) as u64,
    })
}
