//! What is measured of one request, written when it ends, whichever path ends it.

use std::sync::Arc;

use crate::clock::Clock;
use crate::metrics::{Histogram, Metrics};

/// How a request ended, as the label of `warmfront_requests_total`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum End {
    /// The engine's answer went out in full, with status below 400.
    Finished,
    /// The same with an engine's 4xx or 5xx.
    EngineError,
    /// Refused by the router.
    Shed,
    /// Refused before the router saw it: bad body, unknown model.
    Invalid,
    /// No room in a queue of ours.
    Overloaded,
    /// No engine could be reached, or one failed half-way.
    Failed,
    /// It was not over at the end of the grace time.
    Cut,
    /// The client left.
    Cancelled,
}

impl End {
    fn label(self) -> &'static str {
        match self {
            Self::Finished => "finished",
            Self::EngineError => "engine_error",
            Self::Shed => "shed",
            Self::Invalid => "invalid",
            Self::Overloaded => "overloaded",
            Self::Failed => "failed",
            Self::Cut => "cut",
            Self::Cancelled => "cancelled",
        }
    }
}

/// Counts one request when dropped; `Cancelled` unless a path says better.
#[derive(Debug)]
pub(crate) struct Account {
    metrics: Arc<Metrics>,
    clock: Clock,
    started_s: f64,
    model: String,
    end: End,
}

/// Model label of requests whose model is not served here: what clients send must not become labels.
const UNKNOWN_MODEL: &str = "unknown";

impl Account {
    pub(crate) fn open(metrics: &Arc<Metrics>, clock: Clock) -> Self {
        Self {
            metrics: Arc::clone(metrics),
            clock,
            started_s: clock.now_s(),
            model: UNKNOWN_MODEL.to_owned(),
            end: End::Cancelled,
        }
    }

    /// The model is a served one.
    pub(crate) fn of_model(&mut self, model: &str) {
        model.clone_into(&mut self.model);
    }

    pub(crate) fn ends(&mut self, end: End) {
        self.end = end;
    }

    pub(crate) fn model(&self) -> &str {
        &self.model
    }

    pub(crate) fn metrics(&self) -> &Arc<Metrics> {
        &self.metrics
    }

    pub(crate) fn first_token(&self, now_s: f64) {
        self.metrics.observe("warmfront_ttft_seconds", &[&self.model], now_s - self.started_s);
    }

    pub(crate) fn gaps(&self) -> Histogram {
        self.metrics.histogram("warmfront_itl_seconds", &[&self.model])
    }
}

impl Drop for Account {
    fn drop(&mut self) {
        self.metrics.inc("warmfront_requests_total", &[&self.model, self.end.label()], 1);
        let seconds = self.clock.now_s() - self.started_s;
        self.metrics.observe("warmfront_request_duration_seconds", &[&self.model], seconds);
    }
}
