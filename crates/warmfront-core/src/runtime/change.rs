//! What changes while the process runs: taking leave, another configuration, the signals and the process that take over.
//!
//! A reload brings the bounds and time-outs of the front and of the connections to engines; requests that have begun end
//! under those they began with. Everything else of the core is fixed at start, and the control process says so.

use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use serde::Deserialize;
use serde_json::value::RawValue;
use tokio::signal::unix::{Signal, SignalKind, signal};

use super::Shared;
use crate::config::{FrontConfig, UpstreamConfig};
use crate::control::Reply;
use crate::error::CoreError;
use crate::handover::{Claim, Offer};
use crate::mailbox::Event;

/// How often a process that is about to take over looks whether it can.
const READY_INTERVAL: Duration = Duration::from_millis(20);

/// Payload of `reload`, as JSON: already validated by the control process.
#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Reload {
    front: FrontConfig,
    upstream: UpstreamConfig,
    /// The whole configuration, for the router.
    config: Box<RawValue>,
}

/// Puts another configuration in force.
pub(super) fn reload(shared: &Shared, payload: &[u8]) -> Reply {
    let reload: Reload = match serde_json::from_slice(payload) {
        Ok(reload) => reload,
        Err(error) => return super::questions::failure(400, &error.to_string()),
    };
    shared.fronts.replace(shared.fronts.current().reconfigured(reload.front, reload.upstream));
    let config = Bytes::from(Box::<str>::from(reload.config).into_string());
    shared.mailbox.push(Event::ConfigChanged { time_s: shared.clock.now_s(), config });
    shared.metrics.inc("warmfront_config_reloads_total", &["applied"], 1);
    (200, "{}".into())
}

/// Counts a configuration that the control process refused.
pub(super) fn reload_refused(shared: &Shared) -> Reply {
    shared.metrics.inc("warmfront_config_reloads_total", &["refused"], 1);
    (200, "{}".into())
}

/// Begins to take leave of clients, or ends that; says what is still there.
pub(super) fn drain(shared: &Shared, is_draining: bool) -> Reply {
    if shared.stop.is_set() {
        return super::questions::failure(400, "this process is stopping already");
    }
    if shared.stop.is_draining() != is_draining {
        tracing::info!(is_draining, "draining: readiness and kept-alive connections follow");
    }
    shared.stop.drain(is_draining);
    shared.metrics.set("warmfront_draining", &[], f64::from(u8::from(is_draining)));
    let connections = shared.metrics.gauge("warmfront_connections", &[]).value();
    let answer = serde_json::json!({
        "draining": is_draining, "connections": connections as u64, "requests": shared.requests.len(),
    });
    (200, answer.to_string().into())
}

/// Signals that the process obeys.
pub(super) struct Signals {
    terminate: Signal,
    interrupt: Signal,
    hangup: Signal,
}

impl Signals {
    /// Within a runtime.
    pub(super) fn listen() -> Result<Self, CoreError> {
        let listen = |kind| signal(kind).map_err(|error| CoreError::Config(format!("signals: {error}")));
        Ok(Self {
            terminate: listen(SignalKind::terminate())?,
            interrupt: listen(SignalKind::interrupt())?,
            hangup: listen(SignalKind::hangup())?,
        })
    }

    /// The first termination signal stops in order, the second at once; a hangup reloads. Never returns.
    pub(super) async fn obey(mut self, shared: &Shared) {
        loop {
            tokio::select! {
                _ = self.terminate.recv() => tracing::info!("termination signal"),
                _ = self.interrupt.recv() => tracing::info!("interrupt"),
                _ = self.hangup.recv() => {
                    tracing::info!("hangup: the configuration is read again");
                    shared.reloads.notify_one();
                    continue;
                }
            }
            if !shared.stop.is_set() {
                shared.memory.prepare_to_stop().await;
            }
            shared.stop_or_halt();
        }
    }
}

/// Takes the socket from the process before, once this one can serve, and offers it to the next.
pub(super) async fn hand_over(shared: &Arc<Shared>, claim: Option<Claim>) {
    if let Some(claim) = claim {
        if !is_ready_in_time(shared).await {
            shared.fail("front.handover: no pool was ready in time; the process before stays in charge".into());
            return;
        }
        match claim.take().await {
            Ok(()) => tracing::info!("the process before accepts no more; this one does"),
            Err(error) => tracing::warn!("the process before did not say that it stopped: {error}; accepting anyway"),
        }
        shared.begin.notify_one();
    }
    let (Some(path), Some(socket)) = (&shared.config.front.handover, shared.socket.lock().take()) else { return };
    match Offer::make(path, socket) {
        Ok(offer) => tokio::select! {
            () = offer.run(|| shared.hand_over()) => {}
            () = stopped_by_itself(shared) => {}
        },
        Err(error) => tracing::error!("front.handover: cannot listen at {path}: {error}; upgrades will need a pause"),
    }
}

/// Ready once this process stops for another reason than that it was taken over from.
async fn stopped_by_itself(shared: &Shared) {
    shared.stop.wait().await;
    if shared.stop.is_handed_over() {
        std::future::pending::<()>().await;
    }
}

async fn is_ready_in_time(shared: &Shared) -> bool {
    let ready = async {
        while !shared.view.load().pools.iter().any(|pool| pool.is_ready()) {
            tokio::time::sleep(READY_INTERVAL).await;
        }
    };
    let limit = Duration::from_secs_f64(shared.config.front.handover_timeout_s);
    tokio::time::timeout(limit, ready).await.is_ok()
}
