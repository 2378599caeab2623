//! Blocks that a slot evicted not long ago.
//!
//! When a request needs a block that its replica does not hold and that some slot evicted before, the eviction is
//! regretted: had the block stayed, it would have been a hit. The share of regretted evictions prices evicting.

use std::collections::VecDeque;

use hashbrown::HashTable;

use super::hash::FastMap;

/// Ghosts of one slot when it holds little.
const GHOSTS_MIN: usize = 64;

#[derive(Debug)]
struct Ghost {
    /// Sequence hash.
    seq: u64,
    slot: u32,
    /// Number of its row in the slot's order.
    row: u32,
}

#[derive(Debug, Default)]
struct Order {
    rows: VecDeque<u64>,
    /// Number of the first row; wraps.
    first: u32,
}

#[derive(Debug, Default)]
pub(super) struct Ghosts {
    table: HashTable<Ghost>,
    /// Eviction order per slot. A row whose ghost was regretted stays until its turn.
    orders: FastMap<u32, Order>,
}

impl Ghosts {
    /// Notes an eviction. The slot keeps as many rows as it holds blocks.
    pub(super) fn add(&mut self, seq: u64, slot: u32, resident: usize) {
        let order = self.orders.entry(slot).or_default();
        if self.table.find(seq, |ghost| ghost.seq == seq && ghost.slot == slot).is_none() {
            let row = order.first.wrapping_add(order.rows.len() as u32);
            self.table.insert_unique(seq, Ghost { seq, slot, row }, |ghost| ghost.seq);
            order.rows.push_back(seq);
        }
        while order.rows.len() > resident.max(GHOSTS_MIN) {
            let Some(oldest) = order.rows.pop_front() else { break };
            let row = order.first;
            order.first = row.wrapping_add(1);
            let is_it = |ghost: &Ghost| ghost.seq == oldest && ghost.slot == slot && ghost.row == row;
            if let Ok(found) = self.table.find_entry(oldest, is_it) {
                found.remove();
            }
        }
    }

    /// Takes the ghosts of a block that is asked for, slot by slot.
    pub(super) fn take(&mut self, seq: u64, mut regret: impl FnMut(u32)) {
        while let Ok(found) = self.table.find_entry(seq, |ghost| ghost.seq == seq) {
            regret(found.remove().0.slot);
        }
    }

    pub(super) fn forget(&mut self, slot: u32) {
        for seq in self.orders.remove(&slot).unwrap_or_default().rows {
            if let Ok(found) = self.table.find_entry(seq, |ghost| ghost.seq == seq && ghost.slot == slot) {
                found.remove();
            }
        }
    }

    pub(super) fn is_empty(&self) -> bool {
        self.table.is_empty()
    }

    pub(super) fn bytes(&self) -> usize {
        self.table.allocation_size() + self.orders.values().map(|order| order.rows.capacity() * 8).sum::<usize>()
    }
}
