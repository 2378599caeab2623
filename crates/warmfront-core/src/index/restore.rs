//! Putting a slot's record back, in pieces.
//!
//! Each [`Restoring::step`] holds the index's lock for a bounded amount of work. The slot is new and its event stream has
//! not begun; requests may be dispatched to it meanwhile. A slot with events is *unverified* from the first step on, until
//! the stream proves its facts or they are forgotten: facts from events count as held but not as confirmed, and predictions
//! live as on an approximate feed, since no event can have confirmed them.
//!
//! What one would get wrong: a record names blocks without those before them, and joined nodes are found only from there.
//! So all nodes are listed in the arena's table first, and none is joined before the end.

use std::sync::Arc;

use super::arena::Node;
use super::groups::Need;
use super::record::{PREDICTED, PromptRow, SlotRecord};
use super::{Feed, Index, State};
use crate::block::SeqHash;
use crate::kv::wire::Tier;
use crate::mailbox::Slot;

/// Nodes listed in one step.
const NODES_A_STEP: Node = 2048;
/// Facts put back in one step.
const FACTS_A_STEP: usize = 512;
/// Blocks of prompts put back in one step.
const PROMPT_BLOCKS_A_STEP: u64 = 1024;

/// How far it has come: nodes that are listed, and rows of each list that are done.
#[derive(Debug, Default)]
struct Done {
    nodes: Node,
    device: usize,
    tiers: usize,
    groups: bool,
    prompts: usize,
    ages: usize,
}

/// A record on its way back; dropping it ends that, wherever it is.
pub struct Restoring {
    index: Arc<Index>,
    record: SlotRecord,
    slot: Slot,
    copied_s: f64,
    done: Done,
}

impl Restoring {
    /// `copied_s`: when the record was made, on the index's clock; before its start when another process made it.
    pub fn new(index: Arc<Index>, record: SlotRecord, slot: Slot, copied_s: f64) -> Self {
        index.change(|state, _| {
            state.arena.begin_restoring();
            if let Some(slot) = state.slot_mut(slot) {
                slot.unverified = slot.feed == Feed::Exact;
                slot.is_doubtful = record.is_doubtful;
            }
        });
        Self { index, record, slot, copied_s, done: Done::default() }
    }

    /// Puts one piece back. False when nothing is left, or the slot has gone.
    pub fn step(&mut self, now_s: f64) -> bool {
        let index = Arc::clone(&self.index);
        index.change(|state, _| {
            if !state.has_slot(self.slot) {
                return false;
            }
            let goes_on = self.list(state)
                || self.device(state)
                || self.tiers(state)
                || self.groups(state)
                || self.prompts(state)
                || self.ages(state);
            state.expire(now_s);
            state.keep_room();
            goes_on
        })
    }

    fn list(&mut self, state: &mut State) -> bool {
        let end = state.arena.limit().min(self.done.nodes.saturating_add(NODES_A_STEP));
        if self.done.nodes >= end {
            return false;
        }
        state.arena.list(self.done.nodes..end);
        self.done.nodes = end;
        true
    }

    fn device(&mut self, state: &mut State) -> bool {
        let from = self.done.device;
        let end = self.record.device.len().min(from + FACTS_A_STEP);
        let mut likely = 0;
        for row in &self.record.device[from..end] {
            let node = state.make(SeqHash(self.record.blocks[row.block as usize].seq), likely);
            state.confirm(self.slot, node, row.hash);
            if row.copies > 0
                && let Some(slot) = state.slot_mut(self.slot)
            {
                slot.copies.insert(row.hash, row.copies);
            }
            likely = node + 1;
        }
        self.done.device = end;
        from < end
    }

    fn tiers(&mut self, state: &mut State) -> bool {
        let from = self.done.tiers;
        let end = self.record.tiers.len().min(from + FACTS_A_STEP);
        for row in &self.record.tiers[from..end] {
            let node = state.make(SeqHash(self.record.blocks[row.block as usize].seq), 0);
            for (tier, copies) in [(Tier::Cpu, row.host), (Tier::Disk, row.disk)] {
                if copies > 0 {
                    state.offload(self.slot, tier, node, row.hash);
                    state.set_offloaded(self.slot, tier, row.hash, copies);
                }
            }
            state.release(node);
        }
        self.done.tiers = end;
        from < end
    }

    fn groups(&mut self, state: &mut State) -> bool {
        if std::mem::replace(&mut self.done.groups, true) {
            return false;
        }
        if let Some(slot) = state.slot_mut(self.slot) {
            slot.groups.restore(self.record.main_group);
            for group in self.record.groups.drain(..) {
                slot.groups.restore_other(group.number, Need::of_code(group.need), group.block_size, group.members);
            }
        }
        true
    }

    fn prompts(&mut self, state: &mut State) -> bool {
        let mut blocks = 0;
        let from = self.done.prompts;
        while blocks < PROMPT_BLOCKS_A_STEP
            && let Some(prompt) = self.record.prompts.get(self.done.prompts)
        {
            blocks += prompt.blocks();
            let hashes: Vec<(SeqHash, bool)> = self.hashes(prompt).collect();
            state.restore_prompt(self.slot, &hashes, self.copied_s - prompt.age_s);
            self.done.prompts += 1;
        }
        from < self.done.prompts
    }

    /// The blocks of a prompt, and whether each was predicted.
    fn hashes<'a>(&'a self, prompt: &'a PromptRow) -> impl Iterator<Item = (SeqHash, bool)> + 'a {
        let rows = prompt.runs.iter().flat_map(|(first, length)| *first as usize..(*first + *length) as usize);
        rows.map(|row| self.record.blocks[row]).map(|block| (SeqHash(block.seq), block.flags & PREDICTED != 0))
    }

    fn ages(&mut self, state: &mut State) -> bool {
        let from = self.done.ages;
        let end = self.record.ages.len().min(from + FACTS_A_STEP);
        for (seq, age_s) in &self.record.ages[from..end] {
            state.ages.note_past(*seq, self.slot, self.copied_s - age_s);
        }
        self.done.ages = end;
        from < end
    }
}

impl Drop for Restoring {
    fn drop(&mut self) {
        self.index.change(|state, _| state.arena.end_restoring());
    }
}

impl State {
    /// Sets how many copies a hash has on a tier where it has one.
    fn set_offloaded(&mut self, slot: Slot, tier: Tier, hash: u64, copies: u32) {
        if let Some(entry) = self.slot_mut(slot).and_then(|state| state.offloaded.get_mut(&hash)) {
            *entry.copies(tier) = copies;
        }
    }
}
