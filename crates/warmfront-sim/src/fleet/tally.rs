//! What the steps of all engines add up to.

use warmfront_core::mailbox::Slot;

use crate::histogram::Histogram;

/// A step that has ended.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Traced {
    pub slot: Slot,
    pub end_s: f64,
    pub prefill_tokens: u64,
    pub decodes: u64,
}

/// Where the steps of all engines add up.
#[derive(Debug, Default)]
pub(super) struct Tally {
    pub(super) gaps: Histogram,
    pub(super) trace: Option<Vec<Traced>>,
}

impl Tally {
    /// Nothing yet; with `traced` every step is written down.
    pub(super) fn new(traced: bool) -> Self {
        Self { gaps: Histogram::default(), trace: traced.then(Vec::new) }
    }

    /// Writes a step down, when steps are.
    pub(super) fn note(&mut self, step: Traced) {
        if let Some(trace) = &mut self.trace {
            trace.push(step);
        }
    }
}
