//! Requests that come before the fleet is known.
//!
//! A router that was started again listens long before its control process has asked the first engine. What comes then
//! waits for the fleet instead of being refused: with its body read, at most for `front.fleet_wait_s` from the time on at
//! which accepting began, and never beyond what its client allows. Then it enters flow control like any other. What one
//! would get wrong: a model that nobody serves is only known when every server was asked, and a pool counts only once the
//! router was told of it.

use std::sync::{Arc, OnceLock};
use std::time::Duration;

use arc_swap::ArcSwap;
use tokio::sync::watch;
use tokio::time::Instant;

use crate::fleet::FleetView;

/// When accepting began, and which fleet the router knows. One for the process.
#[derive(Debug)]
pub struct Outset {
    /// Version of the last fleet that the router was told.
    told: watch::Sender<u64>,
    end: OnceLock<Instant>,
}

impl Default for Outset {
    fn default() -> Self {
        Self { told: watch::Sender::new(0), end: OnceLock::new() }
    }
}

impl Outset {
    /// The router knows the fleet of this version.
    pub fn tell(&self, version: u64) {
        self.told.send_replace(version);
    }

    /// Accepting begins, and with it the time in which requests wait for a fleet.
    pub(super) fn begin(&self, wait: Duration) {
        self.end.get_or_init(|| Instant::now() + wait);
    }

    /// How long a request that comes now may wait; `None`: there is nothing to wait for any more.
    pub(super) fn wait(&self, timeout_s: Option<f64>) -> Option<Wait> {
        let (now, end) = (Instant::now(), *self.end.get()?);
        let own = timeout_s.and_then(|seconds| now.checked_add(Duration::try_from_secs_f64(seconds).ok()?));
        let end = own.map_or(end, |own| own.min(end));
        (now < end).then(|| Wait { told: self.told.subscribe(), end })
    }

    /// Waits until every server was asked once, or for as long as requests do.
    pub(super) async fn whole(&self, fleet: &ArcSwap<FleetView>) -> Arc<FleetView> {
        let Some(mut wait) = self.wait(None) else { return fleet.load_full() };
        loop {
            let view = wait.look(fleet);
            match view {
                Some(view) if !view.is_partial => return view,
                _ if wait.news().await => {}
                _ => return fleet.load_full(),
            }
        }
    }
}

/// One request's wait for a fleet that serves it.
#[derive(Debug)]
pub(super) struct Wait {
    told: watch::Receiver<u64>,
    end: Instant,
}

impl Wait {
    /// The fleet as it is now; `None` while the router does not know it.
    pub(super) fn look(&mut self, fleet: &ArcSwap<FleetView>) -> Option<Arc<FleetView>> {
        let told = *self.told.borrow_and_update();
        Some(fleet.load_full()).filter(|view| view.version <= told)
    }

    /// Waits for a fleet that was told after the last look; `false`: the time is over.
    pub(super) async fn news(&mut self) -> bool {
        matches!(tokio::time::timeout_at(self.end, self.told.changed()).await, Ok(Ok(())))
    }
}
