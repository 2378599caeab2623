//! Follows the KV events of one engine and prints what it would apply, one JSON line each.
//!
//! `subscribe ENDPOINT [REPLAY [TOPIC [KV_CONFIG_JSON]]]`, for example
//! `cargo run --example subscribe tcp://127.0.0.1:5557 tcp://127.0.0.1:5558 kv-events`. Lines: `{"applied": batch}`,
//! `{"forget": true}`, `{"doubt": true}`, `{"stale": bool}` and, when it changes, `{"state": {...}}`. An empty REPLAY means none.

use std::io::Write;
use std::sync::Arc;
use std::time::Duration;

use parking_lot::Mutex;
use serde_json::{Value, json};
use tokio::sync::Notify;
use warmfront_core::clock::Clock;
use warmfront_core::config::KvConfig;
use warmfront_core::fleet::{EventSource, EventState};
use warmfront_core::kv::subscribe::{Applied, Place, Sink, Subscription, Watched};
use warmfront_core::meter::NoMeter;

/// How often the state is looked at.
const STATE_INTERVAL: Duration = Duration::from_millis(50);

struct Printer;

/// A reader that has gone is the end of the program.
fn print(line: &Value) {
    if writeln!(std::io::stdout().lock(), "{line}").is_err() {
        std::process::exit(0);
    }
}

impl Sink for Printer {
    fn note_lag(&self, _lag_s: f64) {}

    fn apply(&self, payload: &[u8], _now_s: f64) -> Result<Applied, String> {
        let batch: (f64, Vec<Value>, Option<u32>) =
            rmp_serde::from_slice(payload).map_err(|error| error.to_string())?;
        print(&json!({"applied": batch}));
        Ok(Applied { written_s: batch.0, blocks_stored: batch.1.len() as u64, ..Applied::default() })
    }

    fn forget(&self) {
        print(&json!({"forget": true}));
    }

    fn doubt(&self) {
        print(&json!({"doubt": true}));
    }

    fn set_stale(&self, stale: bool) {
        print(&json!({"stale": stale}));
    }
}

fn config(json: Option<&str>) -> Result<KvConfig, serde_json::Error> {
    serde_json::from_str(json.unwrap_or(
        r#"{"message_bytes_max": 67108864, "replay_timeout_s": 5, "replay_check_interval_s": 10,
            "reconnect_delay_s": 0.2, "reconnect_delay_s_max": 5, "unknown_parents_max": 64}"#,
    ))
}

#[tokio::main(flavor = "current_thread")]
async fn main() -> Result<(), Box<dyn std::error::Error>> {
    let mut arguments = std::env::args().skip(1);
    let source = EventSource {
        endpoint: arguments.next().ok_or("usage: subscribe ENDPOINT [REPLAY [TOPIC [KV_CONFIG_JSON]]]")?,
        replay: arguments.next().filter(|replay| !replay.is_empty()),
        topic: arguments.next().unwrap_or_default(),
        origin: "configuration".into(),
    };
    let config = config(arguments.next().as_deref())?;
    let state = Arc::new(Mutex::new(EventState::default()));
    let watched = Watched {
        replica: source.endpoint.clone(),
        state: Arc::clone(&state),
        changed: Arc::new(Notify::new()),
        meter: Arc::new(NoMeter),
        place: Place::default(),
    };
    let subscription =
        tokio::spawn(Subscription::new(source, config, Clock::start(), Arc::new(Printer), watched).run());
    let mut shown = EventState::default();
    while !subscription.is_finished() {
        tokio::time::sleep(STATE_INTERVAL).await;
        let now = state.lock().clone();
        if now != shown {
            print(&json!({"state": now}));
            shown = now;
        }
    }
    Ok(subscription.await?)
}
