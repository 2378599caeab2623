//! From the event stream of one replica into the index: decode, apply, and notice when the index does not fit.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};

use tokio::sync::Notify;

use crate::index::Index;
use crate::kv::subscribe::{Applied, Sink};
use crate::kv::wire;
use crate::mailbox::Slot;

/// What the events of a replica say about the shape of its blocks, where the index has another. 0: nothing.
#[derive(Debug, Default)]
pub struct Shape {
    block_size: AtomicU32,
    lookahead: AtomicU32,
}

impl Shape {
    /// Block size in tokens that the events have and the index has not.
    pub fn block_size(&self) -> Option<u32> {
        Some(self.block_size.load(Ordering::Relaxed)).filter(|&tokens| tokens > 0)
    }

    /// Tokens of lookahead that the events have and the index has not.
    pub fn lookahead(&self) -> Option<u32> {
        Some(self.lookahead.load(Ordering::Relaxed)).filter(|&tokens| tokens > 0)
    }
}

/// The rows of one slot in one index.
pub struct SlotSink {
    index: Arc<Index>,
    slot: Slot,
    shape: Arc<Shape>,
    /// Blocks of the index's own size came, so others are those of a secondary cache group.
    fits: AtomicBool,
    changed: Arc<Notify>,
}

impl SlotSink {
    /// `changed` is told when the shape is found to be another.
    pub fn new(index: Arc<Index>, slot: Slot, shape: Arc<Shape>, changed: Arc<Notify>) -> Self {
        Self { index, slot, shape, fits: AtomicBool::new(false), changed }
    }

    fn note_shape(&self, report: &crate::kv::apply::ApplyReport) {
        if report.stored > 0 {
            self.fits.store(true, Ordering::Relaxed);
        }
        if let Some(tokens) = report.other_block_size
            && !self.fits.load(Ordering::Relaxed)
            && self.shape.block_size.swap(tokens, Ordering::Relaxed) != tokens
        {
            self.changed.notify_one();
        }
        if report.lookahead > self.index.options().lookahead
            && self.shape.lookahead.swap(report.lookahead, Ordering::Relaxed) != report.lookahead
        {
            self.changed.notify_one();
        }
    }
}

impl Sink for SlotSink {
    fn apply(&self, payload: &[u8], now_s: f64) -> Result<Applied, String> {
        let batch = wire::decode(payload).map_err(|error| error.to_string())?;
        let report = self.index.apply(self.slot, &batch, now_s);
        self.note_shape(&report);
        Ok(Applied {
            written_s: batch.ts,
            blocks_stored: report.stored,
            blocks_removed: report.removed,
            cleared: report.cleared,
            unknown_parents: report.unknown_parents,
            malformed: report.malformed,
            block_size: report
                .other_block_size
                .or_else(|| (report.stored > 0).then(|| self.index.options().block_size)),
        })
    }

    fn forget(&self) {
        self.index.forget_confirmed(self.slot);
    }

    fn doubt(&self) {
        self.index.doubt(self.slot);
    }

    fn note_lag(&self, lag_s: f64) {
        self.index.note_lag(self.slot, lag_s);
    }

    fn set_stale(&self, stale: bool) {
        self.index.set_stale(self.slot, stale);
    }
}
