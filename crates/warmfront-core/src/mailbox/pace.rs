//! Gaps between tokens, added up per replica until the next `Paced` event.
//!
//! A stream notes one gap a chunk, so the note costs two relaxed atomic additions; everything else happens when a stream
//! opens (finding the cell) and a few times a second (the flush).

use std::collections::BTreeMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};

use parking_lot::Mutex;

use super::{Event, Slot};

/// What the streams of one replica add up. Shared by all of them.
#[derive(Debug, Default)]
pub struct PaceCell {
    gaps: AtomicU32,
    nanoseconds: AtomicU64,
}

impl PaceCell {
    /// Notes `gaps` tokens that took `seconds` together.
    pub fn note(&self, gaps: u32, seconds: f64) {
        self.gaps.fetch_add(gaps, Ordering::Relaxed);
        self.nanoseconds.fetch_add((seconds * 1e9) as u64, Ordering::Relaxed);
    }

    fn take(&self) -> (u32, f64) {
        let gaps = self.gaps.swap(0, Ordering::Relaxed);
        (gaps, self.nanoseconds.swap(0, Ordering::Relaxed) as f64 / 1e9)
    }
}

/// All cells, by pool and slot. Bounded by the replicas that stream: a cell nobody holds goes with the next flush.
#[derive(Debug, Default)]
pub(super) struct PaceBook {
    pools: Mutex<BTreeMap<String, BTreeMap<Slot, Arc<PaceCell>>>>,
}

impl PaceBook {
    pub(super) fn cell(&self, pool: &str, slot: Slot) -> Arc<PaceCell> {
        let mut pools = self.pools.lock();
        if let Some(cell) = pools.get(pool).and_then(|cells| cells.get(&slot)) {
            return Arc::clone(cell);
        }
        Arc::clone(pools.entry(pool.to_owned()).or_default().entry(slot).or_default())
    }

    /// One event a pool with gaps since the last flush.
    pub(super) fn flush(&self, time_s: f64) -> Vec<Event> {
        let mut events = Vec::new();
        let mut pools = self.pools.lock();
        for (pool, cells) in pools.iter_mut() {
            let (mut slots, mut gaps, mut gap_seconds) = (Vec::new(), Vec::new(), Vec::new());
            cells.retain(|slot, cell| {
                let is_held = Arc::strong_count(cell) > 1; // before taking: a late note of the last holder is not lost
                let (count, seconds) = cell.take();
                if count > 0 {
                    slots.push(*slot);
                    gaps.push(count);
                    gap_seconds.push(seconds);
                }
                is_held
            });
            if !slots.is_empty() {
                events.push(Event::Paced { time_s, pool: pool.clone(), slots, gaps, gap_seconds });
            }
        }
        pools.retain(|_, cells| !cells.is_empty());
        events
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn gaps_of_all_streams_of_a_replica_add_up_and_start_over_after_a_flush() {
        let book = PaceBook::default();
        let (one, two) = (book.cell("p", 3), book.cell("p", 3));
        one.note(1, 0.25);
        two.note(2, 0.5);
        book.cell("p", 4).note(1, 1.0);
        let expected = Event::Paced {
            time_s: 9.0,
            pool: "p".into(),
            slots: vec![3, 4],
            gaps: vec![3, 1],
            gap_seconds: vec![0.75, 1.0],
        };
        assert_eq!(book.flush(9.0), [expected]);
        assert_eq!(book.flush(10.0), []);
    }

    #[test]
    fn a_cell_nobody_holds_is_forgotten_with_the_flush() {
        let book = PaceBook::default();
        book.cell("p", 0).note(1, 0.1);
        book.flush(0.0);
        assert!(book.pools.lock().is_empty());
    }
}
