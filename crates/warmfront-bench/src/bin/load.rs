//! Closed-loop load of chat completions: `load --target 127.0.0.1:8080 --bytes 16384 --connections 16 --pid 4711`.
//!
//! Prints one JSON object: requests a second by the wall clock and by the CPU seconds of the charged processes,
//! latencies, refused and broken requests, and memory.

use std::error::Error;
use std::net::SocketAddr;
use std::time::Duration;

use serde_json::json;
use warmfront_bench::client::{self, Departures, Plan, Requests, Tally};
use warmfront_bench::flags::Flags;
use warmfront_bench::samples::percentile_ms;
use warmfront_bench::text::ChatBodies;

const FLAGS: &[&str] =
    &["target", "bytes", "shared", "connections", "warmup-s", "window-s", "pid", "model", "max-tokens", "seed"];

struct Chat {
    host: String,
    bodies: ChatBodies,
}

impl Requests for Chat {
    fn append(&mut self, into: &mut Vec<u8>) {
        let head = format!(
            "POST /v1/chat/completions HTTP/1.1\r\nhost: {}\r\ncontent-type: application/json\r\ncontent-length: {}\r\n\r\n",
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
    let plan = Plan {
        target,
        departures: Departures::OnAnswer,
        connections: flags.get("connections", 16)?,
        warmup: Duration::from_secs_f64(flags.get("warmup-s", 1.0)?),
        window: Duration::from_secs_f64(flags.get("window-s", 5.0)?),
        pids: flags.all("pid")?,
        reads: true,
    };
    let bodies = ChatBodies::new(
        &flags.get("model", "m".to_owned())?,
        flags.get("bytes", 1024)?,
        flags.get("shared", 0.8)?,
        flags.get("max-tokens", 16)?,
        false,
        flags.get("seed", 1)?,
    );
    let tally = client::drive(&plan, &mut Chat { host: target.to_string(), bodies })?;
    println!("{}", report(tally));
    Ok(())
}

fn report(mut tally: Tally) -> serde_json::Value {
    let requests = tally.requests as f64;
    json!({
        "requests": tally.requests,
        "refused": tally.refused,
        "broken": tally.broken,
        "window_s": tally.window_s,
        "requests_per_s": requests / tally.window_s,
        "cpu_s": tally.cpu_s(),
        "requests_per_cpu_s": (tally.cpu_s() > 0.0).then(|| requests / tally.cpu_s()),
        "p50_ms": percentile_ms(&mut tally.latencies_us, 0.5),
        "p99_ms": percentile_ms(&mut tally.latencies_us, 0.99),
        "processes": tally.after.processes,
        "resident_bytes_max": tally.resident_bytes_max,
    })
}
