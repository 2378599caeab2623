//! Walking a prefix: how deep each slot's blocks reach, in one pass.
//!
//! One bit a slot says that its prefix is unbroken so far. At each block the bits of the slots that hold it are anded in; a
//! slot whose bit goes out has its depth. The pass ends when no bit is left, so its cost follows the blocks that match and
//! neither the prompt nor the index.

use super::State;
use super::arena::Node;
use super::dispatch::AGE_BLOCKS;
use super::groups::{Group, Need};
use super::slots::SlotState;
use crate::block::SeqHash;
use crate::mailbox::Slot;

/// What each slot holds of one prompt. One row a slot, zero where no replica has the slot; depths are leading blocks.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct OverlapColumns {
    /// On the device, confirmed or predicted; of a stale slot predicted only.
    pub device: Vec<u32>,
    /// On the device by events alone.
    pub confirmed: Vec<u32>,
    /// On the device or in host memory.
    pub host: Vec<u32>,
    /// On any tier.
    pub disk: Vec<u32>,
    /// In use by requests in flight.
    pub active: Vec<u32>,
    /// Distinct blocks in use by any request in flight.
    pub active_blocks: Vec<u64>,
    /// Blocks on the device.
    pub resident: Vec<u64>,
    pub evicted: Vec<u64>,
    pub regretted: Vec<u64>,
    /// Seconds since the prefix up to the frontier was last dispatched to the slot; negative: never, or long ago.
    pub age_s: Vec<f64>,
    /// Sequence hash at the deepest device or host depth of any slot.
    pub frontier_key: Option<u64>,
}

/// Device, confirmed, host, disk, active: as in [`OverlapColumns`].
const COLUMNS: usize = 5;

/// One bit a slot, by words.
struct Masks {
    /// Slots that exist.
    slots: Vec<u64>,
    /// Those whose events are believed.
    fresh: Vec<u64>,
    /// Those whose events come from the process that publishes now, as far as is known.
    verified: Vec<u64>,
}

/// The columns of depths during the walk.
struct Depths {
    /// Slots whose prefix is unbroken, by words of slots.
    alive: Vec<[u64; COLUMNS]>,
    depths: [Vec<u32>; COLUMNS],
}

impl Depths {
    fn new(slots: &[u64], rows: usize) -> Self {
        Self {
            alive: slots.iter().map(|word| [*word; COLUMNS]).collect(),
            depths: std::array::from_fn(|_| vec![0; rows]),
        }
    }

    /// Ands in the holders of block `depth`, one word of slots. True when a slot was lost in some column.
    #[inline]
    fn step(&mut self, word: usize, holders: [u64; COLUMNS], depth: u32) -> bool {
        let [device, confirmed, host, disk, active] = self.alive[word];
        let gone = (device & !holders[0])
            | (confirmed & !holders[1])
            | (host & !holders[2])
            | (disk & !holders[3])
            | (active & !holders[4]);
        if gone != 0 {
            self.lose(word, holders, depth);
        }
        gone != 0
    }

    /// Rare beside blocks that all of them hold.
    #[cold]
    #[inline(never)]
    fn lose(&mut self, word: usize, holders: [u64; COLUMNS], depth: u32) {
        for (column, depths) in self.depths.iter_mut().enumerate() {
            let alive = &mut self.alive[word][column];
            let mut gone = *alive & !holders[column];
            *alive &= holders[column];
            while gone != 0 {
                depths[word * 64 + gone.trailing_zeros() as usize] = depth;
                gone &= gone - 1;
            }
        }
    }

    fn is_any_left(&self) -> bool {
        self.alive.iter().any(|word| *word != [0; COLUMNS])
    }

    fn finish(mut self, depth: u32) -> [Vec<u32>; COLUMNS] {
        for word in 0..self.alive.len() {
            self.step(word, [0; COLUMNS], depth);
        }
        self.depths
    }
}

impl State {
    pub(super) fn overlap(&self, hashes: &[SeqHash], now_s: f64) -> OverlapColumns {
        let rows = self.slots.len();
        let Masks { slots, fresh, verified } = self.slot_masks();
        let hybrid = self.slots.iter().flatten().any(|state| !state.groups.others().is_empty());
        let mut path: Vec<Node> = Vec::new();
        let mut columns = Depths::new(&slots, rows);
        let reached = self.walk(hashes, |node, words, depth| {
            if hybrid {
                path.push(node);
            }
            self.step(&mut columns, (&fresh, &verified), words, depth)
        });
        let [device, confirmed, host, disk, active] = columns.finish(reached);
        let frontier = host.iter().copied().max().filter(|depth| *depth > 0);
        let mut overlap = OverlapColumns {
            device,
            confirmed,
            host,
            disk,
            active,
            age_s: self.ages_s(hashes, frontier, now_s),
            frontier_key: frontier.map(|depth| hashes[depth as usize - 1].0),
            ..OverlapColumns::default()
        };
        self.totals(&mut overlap);
        if hybrid {
            self.cut_hybrids(&path, &mut overlap);
        }
        overlap
    }

    /// Deepest device or host depth of any slot; `None`: nobody holds the first block.
    pub(super) fn frontier(&self, nodes: &[Node]) -> Option<usize> {
        let stride = self.arena.stride();
        let Masks { slots: mut alive, fresh, .. } = self.slot_masks();
        let is_held = |node: &&Node| {
            let mut any = 0;
            for (word, alive) in alive.iter_mut().enumerate() {
                let at = **node as usize * stride + word;
                let trusted = self.confirmed_word(at) | self.arena.planes.host.word(at);
                *alive &= (trusted & fresh[word]) | self.arena.planes.predicted.word(at);
                any |= *alive;
            }
            any != 0
        };
        let reached = nodes.iter().take_while(is_held).count();
        (reached > 0).then_some(reached)
    }

    /// Visits the nodes of a prefix until there is none or `step` says so. `step` gets the node, the position of its words
    /// in every plane and its depth. Returns how many nodes were passed.
    #[inline]
    fn walk(&self, hashes: &[SeqHash], mut step: impl FnMut(Node, usize, u32) -> bool) -> u32 {
        let stride = self.arena.stride();
        let mut likely = 0;
        for (depth, hash) in hashes.iter().enumerate() {
            let Some(node) = self.arena.find(hash.0, likely) else { return depth as u32 };
            likely = node + 1;
            if !step(node, node as usize * stride, depth as u32) {
                return depth as u32;
            }
        }
        hashes.len() as u32
    }

    #[inline]
    fn step(&self, columns: &mut Depths, (fresh, verified): (&[u64], &[u64]), words: usize, depth: u32) -> bool {
        let planes = &self.arena.planes;
        let mut is_any_lost = false;
        for (word, (fresh, verified)) in fresh.iter().zip(verified).enumerate() {
            let at = words + word;
            let held = self.confirmed_word(at) & fresh;
            let confirmed = held & verified;
            let device = held | planes.predicted.word(at);
            let host = device | (planes.host.word(at) & fresh);
            let disk = host | (planes.disk.word(at) & fresh);
            is_any_lost |= columns.step(word, [device, confirmed, host, disk, planes.active.word(at)], depth);
        }
        !is_any_lost || columns.is_any_left()
    }

    #[inline]
    fn confirmed_word(&self, at: usize) -> u64 {
        self.arena.planes.shared.word(at) | self.arena.planes.private.word(at)
    }

    fn slot_masks(&self) -> Masks {
        let words = || vec![0; self.arena.stride()];
        let mut masks = Masks { slots: words(), fresh: words(), verified: words() };
        for (slot, state) in self.slots.iter().enumerate() {
            if let Some(state) = state {
                masks.slots[slot / 64] |= 1 << (slot % 64);
                masks.fresh[slot / 64] |= u64::from(!state.stale) << (slot % 64);
                masks.verified[slot / 64] |= u64::from(!state.unverified) << (slot % 64);
            }
        }
        masks
    }

    fn totals(&self, overlap: &mut OverlapColumns) {
        for state in &self.slots {
            let stats = state.as_ref().map(|state| state.stats).unwrap_or_default();
            overlap.active_blocks.push(stats.active);
            overlap.resident.push(state.as_ref().map_or(0, SlotState::resident));
            overlap.evicted.push(stats.evicted);
            overlap.regretted.push(stats.regretted);
        }
    }

    fn ages_s(&self, hashes: &[SeqHash], frontier: Option<u32>, now_s: f64) -> Vec<f64> {
        let mut ages_s = vec![-1.0; self.slots.len()];
        let Some(frontier) = frontier.map(|depth| depth as usize) else { return ages_s };
        if self.ages.is_empty() {
            return ages_s;
        }
        for hash in &hashes[frontier.saturating_sub(AGE_BLOCKS)..frontier] {
            for (slot, time_s) in self.ages.of(hash.0) {
                let since_s = (now_s - time_s).max(0.0);
                let row = &mut ages_s[*slot as usize];
                if *row < 0.0 || since_s < *row {
                    *row = since_s;
                }
            }
        }
        ages_s
    }

    /// Shortens the depths of slots with several cache groups to what all groups can serve.
    fn cut_hybrids(&self, path: &[Node], overlap: &mut OverlapColumns) {
        for (slot, state) in self.slots.iter().enumerate() {
            let Some(state) = state else { continue };
            let others = state.groups.others();
            if others.is_empty() {
                continue;
            }
            let names = Names::new(self, slot as Slot, state);
            for column in [&mut overlap.device, &mut overlap.confirmed] {
                column[slot] = names.usable(others, &path[..column[slot] as usize], self.options.block_size);
            }
            overlap.host[slot] = overlap.host[slot].max(overlap.device[slot]);
        }
    }
}

/// Names of blocks in one slot's own words.
struct Names<'a> {
    index: &'a State,
    slot: Slot,
    private: super::FastMap<Node, Vec<u64>>,
}

impl<'a> Names<'a> {
    fn new(index: &'a State, slot: Slot, state: &SlotState) -> Self {
        let mut private: super::FastMap<Node, Vec<u64>> = super::FastMap::default();
        for (hash, node) in state.private.pairs() {
            private.entry(node).or_default().push(hash);
        }
        Self { index, slot, private }
    }

    /// The group has the block, or will have it: a prediction covers all groups.
    fn has(&self, group: &Group, node: Node) -> bool {
        let (arena, stride) = (&self.index.arena, self.index.arena.stride());
        if arena.planes.predicted.get(stride, node, self.slot) {
            return true;
        }
        let shared = arena.planes.shared.get(stride, node, self.slot) && group.has(arena.alias(node));
        shared || self.private.get(&node).is_some_and(|hashes| hashes.iter().any(|hash| group.has(*hash)))
    }

    /// Longest usable prefix of `path`, in blocks of `block_size` tokens.
    fn usable(&self, groups: &[Group], path: &[Node], block_size: u32) -> u32 {
        let mut length = path.len();
        loop {
            let before = length;
            for group in groups {
                length = self.usable_by(group, &path[..length], block_size);
            }
            if length == before {
                return length as u32;
            }
        }
    }

    fn usable_by(&self, group: &Group, path: &[Node], block_size: u32) -> usize {
        // A group may have larger blocks; a coarse block carries the hash of the fine one at its end.
        let coarse = (group.block_size.max(block_size) / block_size.max(1)).max(1) as usize;
        let mut length = path.len() / coarse * coarse;
        let tail = |length: usize| match group.need {
            Need::All => length / coarse,
            Need::Tokens(tokens) => (tokens as usize).div_ceil(coarse * block_size as usize).min(length / coarse),
            Need::Nothing => 0,
        };
        if group.need == Need::Nothing {
            return path.len();
        }
        let mut checked = 0;
        while checked < tail(length) {
            let end = length - checked * coarse;
            if self.has(group, path[end - 1]) {
                checked += 1;
            } else {
                length = end - coarse;
                checked = 0;
            }
        }
        length
    }
}
