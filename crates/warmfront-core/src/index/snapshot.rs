//! Copying what is known of one slot, in pieces.
//!
//! Each [`Copying::step`] holds the index's lock for reading and does a bounded amount of work, so that decisions wait
//! microseconds and not for the whole copy. The caller keeps the slot's event stream from being applied meanwhile;
//! dispatches go on, and facts may be dropped for want of room. What one would get wrong: a node that is freed between
//! two pieces may come back as another block. Blocks are therefore copied first, with their hashes, and whatever names a
//! node later counts only if it fits what was copied.

use super::arena::Node;
use super::record::{BlockRow, DeviceRow, GroupRow, PREDICTED, PromptRow, SlotRecord, TierRow};
use super::{FastMap, Index, State};
use crate::mailbox::Slot;

/// Nodes looked at in one step.
const NODES_A_STEP: u32 = 2048;
/// Entries of a map or table copied in one step.
const ENTRIES_A_STEP: usize = 4096;
/// Blocks of prompts summed up in one step.
const PROMPT_BLOCKS_A_STEP: u32 = 4096;

/// What comes next.
#[derive(Clone, Copy, Debug)]
enum Stage {
    Blocks(Node),
    /// Position in the table of the slot's own engine hashes.
    Private(usize),
    /// Entries passed.
    Copies(usize),
    Tiers(usize),
    /// Group and members passed.
    Groups(usize, usize),
    Prompts(usize),
    Ages(usize),
    Done,
}

/// A prompt by nodes, with the sum of its hashes.
struct Prompt {
    touched_s: f64,
    runs: Vec<(Node, u32)>,
    sum: u64,
}

/// A copy in progress.
pub struct Copying {
    slot: Slot,
    now_s: f64,
    stage: Stage,
    /// Of the rows of `record.blocks`, ascending.
    nodes: Vec<Node>,
    /// Rows on slower tiers, and rows under engine hashes of the slot's own.
    marks: Vec<u8>,
    private: Vec<(Node, u64)>,
    copies: FastMap<u64, u32>,
    tiers: Vec<(Node, TierRow)>,
    prompts: Vec<Prompt>,
    record: SlotRecord,
}

const ON_TIERS: u8 = 1;
const PRIVATE: u8 = 2;

impl Copying {
    /// Begins a copy; ages are counted up to `now_s`.
    pub fn new(slot: Slot, now_s: f64) -> Self {
        Self {
            slot,
            now_s,
            stage: Stage::Blocks(0),
            nodes: Vec::new(),
            marks: Vec::new(),
            private: Vec::new(),
            copies: FastMap::default(),
            tiers: Vec::new(),
            prompts: Vec::new(),
            record: SlotRecord::default(),
        }
    }

    /// Copies one piece. False when nothing is left to copy, or the slot has gone.
    pub fn step(&mut self, index: &Index) -> bool {
        let state = index.state.read();
        if state.slot(self.slot).is_none() {
            self.stage = Stage::Done;
        }
        self.stage = match self.stage {
            Stage::Blocks(from) => self.blocks(&state, from),
            Stage::Private(from) => self.private(&state, from),
            Stage::Copies(from) => self.copies(&state, from),
            Stage::Tiers(from) => self.tiers(&state, from),
            Stage::Groups(row, from) => self.groups(&state, row, from),
            Stage::Prompts(from) => self.prompts(&state, from),
            Stage::Ages(from) => self.ages(&state, from),
            Stage::Done => Stage::Done,
        };
        !matches!(self.stage, Stage::Done)
    }

    fn blocks(&mut self, state: &State, from: Node) -> Stage {
        let (arena, stride, slot) = (&state.arena, state.arena.stride(), self.slot);
        let end = arena.limit().min(from.saturating_add(NODES_A_STEP));
        let planes = &arena.planes;
        for node in from..end {
            let has = |plane: &super::plane::Plane| plane.get(stride, node, slot);
            let (shared, private) = (has(&planes.shared), has(&planes.private));
            let (predicted, on_tiers) = (has(&planes.predicted), has(&planes.host) || has(&planes.disk));
            if !(shared || private || predicted || on_tiers || has(&planes.covered)) {
                continue;
            }
            let row = self.nodes.len() as u32;
            if shared {
                self.record.device.push(DeviceRow { block: row, hash: arena.alias(node), copies: 0 });
            }
            let flags = if predicted { PREDICTED } else { 0 };
            self.record.blocks.push(BlockRow { seq: arena.seq(node), flags });
            self.marks.push(if on_tiers { ON_TIERS } else { 0 } | if private { PRIVATE } else { 0 });
            self.nodes.push(node);
        }
        if end < arena.limit() { Stage::Blocks(end) } else { Stage::Private(0) }
    }

    fn private(&mut self, state: &State, from: usize) -> Stage {
        let Some(slot) = state.slot(self.slot) else { return Stage::Done };
        match slot.private.piece(from, ENTRIES_A_STEP, |hash, node| self.private.push((node, hash))) {
            Some(next) => Stage::Private(next),
            None => Stage::Copies(0),
        }
    }

    fn copies(&mut self, state: &State, from: usize) -> Stage {
        let Some(slot) = state.slot(self.slot) else { return Stage::Done };
        let piece = slot.copies.iter().skip(from).take(ENTRIES_A_STEP);
        let before = self.copies.len();
        self.copies.extend(piece.map(|(hash, copies)| (*hash, *copies)));
        if self.copies.len() == before { Stage::Tiers(0) } else { Stage::Copies(from + ENTRIES_A_STEP) }
    }

    fn tiers(&mut self, state: &State, from: usize) -> Stage {
        let Some(slot) = state.slot(self.slot) else { return Stage::Done };
        let before = self.tiers.len();
        for (hash, entry) in slot.offloaded.iter().skip(from).take(ENTRIES_A_STEP) {
            let row = TierRow { block: 0, hash: *hash, host: entry.host, disk: entry.disk };
            self.tiers.push((entry.node, row));
        }
        if self.tiers.len() == before { Stage::Groups(0, 0) } else { Stage::Tiers(from + ENTRIES_A_STEP) }
    }

    fn groups(&mut self, state: &State, row: usize, from: usize) -> Stage {
        let Some(slot) = state.slot(self.slot) else { return Stage::Done };
        self.record.is_doubtful = slot.is_doubtful;
        self.record.main_group = slot.groups.main();
        let Some(group) = slot.groups.others().get(row) else { return Stage::Prompts(0) };
        if self.record.groups.len() == row {
            let (number, block_size) = (group.number, group.block_size);
            let need = group.need.code();
            self.record.groups.push(GroupRow { number, need, block_size, members: Vec::new() });
        }
        let members = &mut self.record.groups[row].members;
        let before = members.len();
        members.extend(group.members().skip(from).take(ENTRIES_A_STEP));
        if members.len() == before { Stage::Groups(row + 1, 0) } else { Stage::Groups(row, from + ENTRIES_A_STEP) }
    }

    fn prompts(&mut self, state: &State, from: usize) -> Stage {
        let Some(slot) = state.slot(self.slot) else { return Stage::Done };
        let mut blocks = 0;
        for row in from..slot.recent.rows() {
            if blocks >= PROMPT_BLOCKS_A_STEP {
                return Stage::Prompts(row);
            }
            if !slot.recent.is_listed(row as u32) {
                continue;
            }
            let prompt = slot.recent.row(row as u32);
            blocks += prompt.covered;
            let touched_s = if prompt.in_flight > 0 { self.now_s } else { prompt.touched_s };
            let runs: Vec<(Node, u32)> = prompt.path.runs(prompt.covered).collect();
            let nodes = runs.iter().flat_map(|(first, length)| *first..*first + *length);
            let sum = nodes.fold(0, |sum, node| summed(sum, state.arena.seq(node)));
            self.prompts.push(Prompt { touched_s, runs, sum });
        }
        Stage::Ages(0)
    }

    fn ages(&mut self, state: &State, from: usize) -> Stage {
        let mut seen = 0;
        for (seq, slot, time_s) in state.ages.piece(from, ENTRIES_A_STEP, &mut seen) {
            if slot == self.slot {
                self.record.ages.push((seq, (self.now_s - time_s).max(0.0)));
            }
        }
        if seen == 0 { Stage::Done } else { Stage::Ages(from + seen) }
    }

    /// Facts copied so far, about.
    pub fn facts(&self) -> usize {
        self.record.facts() + self.private.len() + self.tiers.len()
    }

    /// Puts the pieces together. Needs no lock.
    pub fn finish(mut self) -> SlotRecord {
        self.place_private();
        if !self.record.is_doubtful {
            for row in &mut self.record.device {
                row.copies = self.copies.get(&row.hash).copied().unwrap_or(0);
            }
        }
        self.record.tiers = std::mem::take(&mut self.tiers)
            .into_iter()
            .filter_map(|(node, row)| Some(TierRow { block: self.marked(node, ON_TIERS)?, ..row }))
            .filter(|row| row.host > 0 || row.disk > 0)
            .collect();
        self.record.tiers.sort_unstable_by_key(|row| (row.block, row.hash));
        self.record.prompts = std::mem::take(&mut self.prompts).iter().filter_map(|each| self.prompt(each)).collect();
        self.record.prompts.sort_by(|left, right| right.age_s.total_cmp(&left.age_s));
        self.record
    }

    fn place_private(&mut self) {
        let mut private = std::mem::take(&mut self.private);
        private.sort_unstable();
        private.dedup(); // an entry that moved between two pieces may have been met twice
        for (node, hash) in private {
            if let Some(block) = self.marked(node, PRIVATE) {
                self.record.device.push(DeviceRow { block, hash, copies: 0 });
            }
        }
        self.record.device.sort_by_key(|row| row.block);
    }

    /// The row of a node that has the mark.
    fn marked(&self, node: Node, mark: u8) -> Option<u32> {
        let row = self.nodes.binary_search(&node).ok()?;
        (self.marks[row] & mark != 0).then_some(row as u32)
    }

    /// A prompt by rows; `None` when its blocks are others than were copied.
    fn prompt(&self, prompt: &Prompt) -> Option<PromptRow> {
        let mut runs = Vec::with_capacity(prompt.runs.len());
        let mut sum = 0;
        for (first, length) in &prompt.runs {
            // Nodes in a row may not be rows in a row: the slot may have facts about others in between, never fewer.
            let row = self.nodes.binary_search(first).ok()?;
            let nodes = self.nodes.get(row..row + *length as usize)?;
            if nodes.last().is_none_or(|last| *last != first + length - 1) {
                return None;
            }
            sum = self.record.blocks[row..row + *length as usize].iter().fold(sum, |sum, block| summed(sum, block.seq));
            runs.push((row as u32, *length));
        }
        let age_s = (self.now_s - prompt.touched_s).max(0.0);
        (sum == prompt.sum && !runs.is_empty()).then_some(PromptRow { age_s, runs })
    }
}

/// A sum that depends on the order.
fn summed(sum: u64, seq: u64) -> u64 {
    sum.rotate_left(7).wrapping_add(seq)
}

impl Index {
    /// Copies a slot at once, for tests and tools; a router copies in pieces.
    pub fn record(&self, slot: Slot, now_s: f64) -> SlotRecord {
        let mut copying = Copying::new(slot, now_s);
        while copying.step(self) {}
        copying.finish()
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use proptest::prelude::*;

    use super::*;
    use crate::block::SeqHash;
    use crate::index::{Feed, IndexOptions, Restoring};

    /// A prompt by one small number a block.
    type Prompt = Vec<bool>;

    fn hashes(prompt: &[bool]) -> Vec<SeqHash> {
        let next = |hash: &mut u64, block: &bool| {
            *hash = *hash * 2 + u64::from(*block);
            Some(SeqHash(*hash << 32 | 1))
        };
        prompt.iter().scan(1, next).collect()
    }

    #[derive(Clone, Debug)]
    enum Move {
        Dispatch(u64, Prompt, Slot),
        Release(u64),
        Withdraw(u64),
        /// The copy goes on by a step.
        Step,
    }

    fn a_move() -> impl Strategy<Value = Move> {
        let prompt = proptest::collection::vec(any::<bool>(), 1..5);
        prop_oneof![
            4 => (1..6_u64, prompt, 0..2_u32).prop_map(|(id, prompt, slot)| Move::Dispatch(id, prompt, slot)),
            2 => (1..6_u64).prop_map(Move::Release),
            1 => (1..6_u64).prop_map(Move::Withdraw),
            3 => Just(Move::Step),
        ]
    }

    fn probes() -> Vec<Prompt> {
        (0..16).map(|number: u32| (0..4).map(|bit| number >> bit & 1 == 1).collect()).collect()
    }

    fn depths(index: &Index) -> Vec<u32> {
        probes().iter().map(|probe| index.overlap(&hashes(probe), 0.0).device[0]).collect()
    }

    fn index() -> Index {
        let index = Index::new(IndexOptions::default());
        index.add_slot(0, Feed::Approximate, Some(6));
        index.add_slot(1, Feed::Approximate, Some(6));
        index
    }

    proptest! {
        #![proptest_config(ProptestConfig { failure_persistence: None, ..ProptestConfig::with_cases(400) })]

        /// Nodes are freed and taken by other blocks between the steps of the copy.
        #[test]
        fn a_copy_amid_dispatches_claims_nothing_that_was_never_held(
            before in proptest::collection::vec(a_move(), 0..30),
            amid in proptest::collection::vec(a_move(), 0..40),
        ) {
            let index = index();
            let make = |each: &Move| match each {
                Move::Dispatch(id, prompt, slot) => index.dispatched(*id, &hashes(prompt), *slot, 0.0),
                Move::Release(id) => index.released(*id),
                Move::Withdraw(id) => index.withdrawn(*id),
                Move::Step => {}
            };
            before.iter().for_each(make);
            let mut held = depths(&index);
            let mut copying = Copying::new(0, 0.0);
            for each in &amid {
                make(each);
                held = held.iter().zip(depths(&index)).map(|(most, now)| *most.max(&now)).collect();
                if matches!(each, Move::Step) {
                    copying.step(&index);
                }
            }
            while copying.step(&index) {}
            let record = SlotRecord::decode(&copying.finish().encode()).expect("what is written can be read");
            let restored = Arc::new(self::index());
            let mut restoring = Restoring::new(Arc::clone(&restored), record, 0, 0.0);
            while restoring.step(0.0) {}
            for (most, now) in held.iter().zip(depths(&restored)) {
                prop_assert!(now <= *most, "{now} blocks restored, and at most {most} were ever held");
            }
        }
    }
}
