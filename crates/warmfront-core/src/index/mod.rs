//! One index, two feeds: which replica holds which block.
//!
//! One [`Index`] serves the replicas of a pool that have one block size. It maps sequence hashes to the slots that hold
//! the block, by tier. A fact is *confirmed* by a KV event, or *predicted* by our own dispatch until it is confirmed or runs
//! out; a replica without events has predicted facts only. See `docs/explanation/index.md`.
//!
//! What one would get wrong: residency is a multiset. An engine stores the same hash once for each physical block and removes
//! it as often; the block is gone when the last copy is.

mod arena;
mod cover;
mod dispatch;
mod facts;
mod ghosts;
mod groups;
mod hash;
mod overlap;
mod path;
mod plane;
mod private;
mod recent;
mod record;
mod restore;
mod slots;
mod snapshot;
mod table;

use parking_lot::RwLock;

use arena::Arena;
pub(crate) use arena::Node;
use dispatch::{Ages, InFlight};
pub(crate) use facts::Removal;
use ghosts::Ghosts;
pub(crate) use groups::Place;
pub use hash::FastMap;
pub use overlap::OverlapColumns;
pub use record::SlotRecord;
pub use restore::Restoring;
use slots::SlotState;
pub use slots::SlotStats;
pub use snapshot::Copying;

use crate::block::{BlockHasher, SeqHash};
use crate::kv::wire::{EngineHash, Stored};
use crate::mailbox::{RequestId, Slot};

/// Where knowledge about a slot comes from.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Feed {
    /// The engine publishes KV events.
    Exact,
    /// Nothing but our own dispatches.
    Approximate,
}

/// How an index is built.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct IndexOptions {
    /// Tokens a block (bytes a block for an index over bytes).
    pub block_size: u32,
    /// Seed of the sequence hashes; the same one as the requests are hashed with.
    pub seed: u64,
    /// Tokens after a block that its hash covers; 0 unless the engines hash ahead.
    pub lookahead: u32,
    /// Most facts (slot, block) on devices. Beyond it predictions go first, then confirmed facts.
    pub facts_max: u64,
    /// How long a prediction lives on an exact feed, from its dispatch or from the end of the request, where events are not
    /// late.
    pub predicted_ttl_s: f64,
    /// The same on an approximate feed.
    pub approximate_ttl_s: f64,
}

impl Default for IndexOptions {
    fn default() -> Self {
        Self {
            block_size: 16,
            seed: 0,
            lookahead: 0,
            facts_max: 64 << 20,
            predicted_ttl_s: 5.0,
            approximate_ttl_s: 600.0,
        }
    }
}

/// Events may be later than this; predictions do not live longer for it. A clock of an engine that is wrong by an hour
/// costs no more.
pub const LAG_S_MAX: f64 = 60.0;

/// Slots of one index; a fleet beyond it is a configuration error elsewhere.
pub const SLOTS_MAX: u32 = 4096;

/// Size of an index, in all.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct IndexStats {
    /// Distinct blocks.
    pub blocks: u64,
    /// (slot, block) pairs on devices by events.
    pub confirmed_facts: u64,
    /// (slot, block) pairs on devices by prediction.
    pub predicted_facts: u64,
    /// Engine hashes on slower tiers, over all slots.
    pub offloaded_facts: u64,
    /// Memory of the tables.
    pub bytes: u64,
    /// Facts dropped because of `facts_max`.
    pub evicted_for_room: u64,
    /// Requests in flight.
    pub in_flight: u64,
}

/// Which replica holds which block. Every method takes `&self`; lookups share a lock, changes exclude.
#[derive(Debug)]
pub struct Index {
    options: IndexOptions,
    hasher: BlockHasher,
    state: RwLock<State>,
}

/// Everything behind the lock.
#[derive(Debug)]
pub(crate) struct State {
    arena: Arena,
    slots: Vec<Option<SlotState>>,
    ghosts: Ghosts,
    in_flight: FastMap<RequestId, InFlight>,
    ages: Ages,
    options: IndexOptions,
    /// Sum of confirmed and predicted facts of all slots.
    facts: u64,
    /// No prediction's time is up before this.
    next_expiry_s: f64,
    evicted_for_room: u64,
    /// Next node to look at when confirmed facts must go.
    hand: Node,
}

impl Index {
    pub fn new(options: IndexOptions) -> Self {
        let state = State {
            arena: Arena::new(),
            slots: Vec::new(),
            ghosts: Ghosts::default(),
            in_flight: FastMap::default(),
            ages: Ages::default(),
            options,
            facts: 0,
            next_expiry_s: f64::INFINITY,
            evicted_for_room: 0,
            hand: 0,
        };
        let hasher = BlockHasher::new(options.seed, options.block_size).with_lookahead(options.lookahead);
        Self { options, hasher, state: RwLock::new(state) }
    }

    pub fn options(&self) -> &IndexOptions {
        &self.options
    }

    /// Hashes as this index does.
    pub fn hasher(&self) -> &BlockHasher {
        &self.hasher
    }

    /// Adds a replica without any facts, in place of one that had the slot. Slots from [`SLOTS_MAX`] on are not taken.
    pub fn add_slot(&self, slot: Slot, feed: Feed, capacity_blocks: Option<u64>) {
        if slot >= SLOTS_MAX {
            return;
        }
        let mut state = self.state.write();
        state.remove_slot(slot);
        let rows = state.slots.len().max(slot as usize + 1);
        state.slots.resize_with(rows, || None);
        state.arena.fit(rows);
        state.slots[slot as usize] = Some(SlotState::new(feed, capacity_blocks));
    }

    /// The replica is gone, and all its facts with it.
    pub fn remove_slot(&self, slot: Slot) {
        self.state.write().remove_slot(slot);
    }

    /// What is known from events is void: a gap that could not be filled, or another process. Predictions stay.
    pub fn forget_confirmed(&self, slot: Slot) {
        self.state.write().forget_confirmed(slot);
    }

    /// Some events of the slot are lost: what is known stays, but a removal takes all copies of a block.
    pub fn doubt(&self, slot: Slot) {
        self.state.write().doubt(slot);
    }

    /// While stale, a slot counts with its predictions only, which live as on an approximate feed.
    pub fn set_stale(&self, slot: Slot, stale: bool) {
        self.state.write().set_stale(slot, stale);
    }

    /// An event came so late: until then nothing could confirm a prediction, so that predictions live longer by it, up to
    /// [`LAG_S_MAX`]. Rises at once and falls with each event that is less late.
    pub fn note_lag(&self, slot: Slot, lag_s: f64) {
        let lag_s = lag_s.clamp(0.0, LAG_S_MAX).round() as u32;
        let is_news = |state: &SlotState| lag_s != state.lag_s;
        if self.state.read().slot(slot).is_some_and(is_news) {
            self.state.write().note_lag(slot, lag_s);
        }
    }

    /// What each slot holds of a prompt, in blocks.
    ///
    /// Pass the hashes of the first `(prompt_tokens - 1) / block_size` blocks to count what an engine can hit: it computes
    /// at least one token itself.
    pub fn overlap(&self, hashes: &[SeqHash], now_s: f64) -> OverlapColumns {
        let state = self.state.read();
        if state.next_expiry_s <= now_s {
            drop(state);
            self.state.write().expire(now_s);
            return self.state.read().overlap(hashes, now_s);
        }
        state.overlap(hashes, now_s)
    }

    /// A request goes to `slot`: its blocks are in use there, and predicted to be held. A request that was dispatched
    /// before is withdrawn from where it was. `hashes` are one prompt's, from its first block on.
    pub fn dispatched(&self, id: RequestId, hashes: &[SeqHash], slot: Slot, now_s: f64) {
        self.state.write().dispatched(id, hashes, slot, now_s);
    }

    /// The request ended; its blocks are no longer in use. Unknown ids are ignored.
    pub fn released(&self, id: RequestId) {
        self.state.write().released(id);
    }

    /// The request ended without having been computed (refused, unreachable): its predictions are void too.
    pub fn withdrawn(&self, id: RequestId) {
        self.state.write().withdrawn(id);
    }

    pub fn stats(&self) -> IndexStats {
        self.state.read().stats()
    }

    /// `None`: no such slot.
    pub fn slot_stats(&self, slot: Slot) -> Option<SlotStats> {
        self.state.read().slot(slot).map(|state| state.stats)
    }

    /// For `kv/apply.rs`: all changes of one batch under one lock.
    pub(crate) fn change<T>(&self, change: impl FnOnce(&mut State, &BlockHasher) -> T) -> T {
        change(&mut self.state.write(), &self.hasher)
    }
}

impl State {
    pub(crate) fn has_slot(&self, slot: Slot) -> bool {
        self.slot(slot).is_some()
    }

    #[inline]
    pub(crate) fn make(&mut self, hash: SeqHash, likely: Node) -> Node {
        self.arena.find_or_make(hash.0, likely)
    }

    /// Brings the table entries of new blocks into the processor's cache. The lookups do not depend on one another, so
    /// their waits overlap, which those of the stores that follow do not.
    #[inline]
    pub(crate) fn look_ahead(&self, slot: Slot, ours: &[SeqHash], theirs: &[EngineHash], likely: Node) {
        let Some(state) = self.slot(slot) else { return };
        let has_own = !state.private.is_empty();
        let is_known = ours.first().is_some_and(|first| self.arena.is_at(first.0, likely));
        let mut seen = 0;
        if !is_known {
            seen ^= ours.iter().fold(0, |seen, hash| seen ^ self.arena.peek(hash.0));
        }
        // A known block is confirmed by the hash on its node, unless the slot has names of its own.
        if !is_known || has_own {
            seen ^= theirs.iter().fold(0, |seen, hash| seen ^ self.arena.peek_alias(hash.0));
        }
        if has_own {
            seen ^= theirs.iter().fold(0, |seen, hash| seen ^ state.private.peek(hash.0));
        }
        std::hint::black_box(seen);
    }

    /// Frees a node that nobody has a fact about.
    pub(crate) fn release(&mut self, node: Node) {
        self.arena.release(node);
    }

    pub(crate) fn seq_hash(&self, node: Node) -> SeqHash {
        SeqHash(self.arena.seq(node))
    }

    pub(crate) fn learn_group(&mut self, slot: Slot, stored: &Stored) -> Place {
        self.slot_mut(slot).map_or(Place::Nowhere, |state| state.groups.learn(stored))
    }

    pub(crate) fn group_place(&self, slot: Slot, group: Option<u32>) -> Place {
        self.slot(slot).map_or(Place::Nowhere, |state| state.groups.place(group))
    }

    pub(crate) fn store_members(&mut self, slot: Slot, row: usize, stored: &Stored) {
        if let Some(state) = self.slot_mut(slot) {
            state.groups.store(row, &stored.block_hashes);
        }
    }

    pub(crate) fn remove_member(&mut self, slot: Slot, row: usize, hash: EngineHash) -> Removal {
        let known = self.slot_mut(slot).is_some_and(|state| state.groups.remove(row, hash));
        if known { Removal::Gone } else { Removal::Unknown }
    }

    /// Everything on the device is gone; slower tiers stay.
    pub(crate) fn clear_device(&mut self, slot: Slot) {
        let Some(state) = self.slot_mut(slot) else { return };
        state.private.clear();
        state.copies.clear();
        state.groups.clear();
        let confirmed = std::mem::take(&mut state.stats.confirmed);
        self.facts -= confirmed;
        self.clear_planes(slot, |planes| vec![&mut planes.shared, &mut planes.private]);
    }

    fn forget_confirmed(&mut self, slot: Slot) {
        let Some(state) = self.slot_mut(slot) else { return };
        state.is_doubtful = false;
        let was_unverified = std::mem::take(&mut state.unverified);
        state.groups.forget();
        state.offloaded.clear();
        state.offloaded_more.clear();
        if was_unverified {
            self.next_expiry_s = f64::NEG_INFINITY; // predictions lived longer until now
        }
        self.clear_device(slot);
        self.clear_planes(slot, |planes| vec![&mut planes.host, &mut planes.disk]);
    }

    fn doubt(&mut self, slot: Slot) {
        if let Some(state) = self.slot_mut(slot) {
            state.is_doubtful = true;
            state.copies.clear();
        }
    }

    fn remove_slot(&mut self, slot: Slot) {
        if self.slot(slot).is_none() {
            return;
        }
        self.forget_confirmed(slot);
        self.facts -= self.slot(slot).map_or(0, |state| state.stats.predicted);
        self.clear_planes(slot, |planes| vec![&mut planes.predicted, &mut planes.active, &mut planes.covered]);
        self.in_flight.retain(|_, request| request.slot != slot);
        self.ghosts.forget(slot);
        self.ages.forget(slot);
        self.slots[slot as usize] = None;
    }

    fn clear_planes(&mut self, slot: Slot, select: impl Fn(&mut arena::Planes) -> Vec<&mut plane::Plane>) {
        let stride = self.arena.stride();
        // From the end, as engines evict: what is freed is taken again in ascending order.
        for node in (0..self.arena.limit()).rev() {
            let mut changed = false;
            for plane in select(&mut self.arena.planes) {
                changed |= plane.clear(stride, node, slot);
            }
            if changed {
                self.arena.release(node);
            }
        }
    }

    fn note_lag(&mut self, slot: Slot, lag_s: u32) {
        let Some(state) = self.slot_mut(slot) else { return };
        state.lag_s = lag_s.max(state.lag_s.saturating_sub(1));
        self.next_expiry_s = f64::NEG_INFINITY;
    }

    fn set_stale(&mut self, slot: Slot, is_stale: bool) {
        let Some(state) = self.slot_mut(slot) else { return };
        (state.stale, state.unverified) = (is_stale, false);
        self.next_expiry_s = f64::NEG_INFINITY; // predictions live longer while it is stale or unverified
        if is_stale {
            return;
        }
        // What was predicted while events were not believed may have been confirmed all along.
        for node in 0..self.arena.limit() {
            if self.is_confirmed(slot, node) {
                self.drop_prediction(slot, node);
            }
        }
    }

    fn stats(&self) -> IndexStats {
        let mut stats = IndexStats {
            blocks: self.arena.blocks() as u64,
            evicted_for_room: self.evicted_for_room,
            in_flight: self.in_flight.len() as u64,
            ..IndexStats::default()
        };
        let mut bytes = self.arena.bytes() + self.ghosts.bytes() + self.ages.bytes() + self.in_flight.allocation_size();
        for state in self.slots.iter().flatten() {
            stats.confirmed_facts += state.stats.confirmed;
            stats.predicted_facts += state.stats.predicted;
            stats.offloaded_facts += state.offloaded.len() as u64;
            bytes += state.bytes();
        }
        stats.bytes = bytes as u64;
        stats
    }
}
