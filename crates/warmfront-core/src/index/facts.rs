//! Confirmed facts: what events make true and untrue.
//!
//! Engine hashes are opaque and per publisher. One alias on a node serves all publishers that agree on it; a publisher
//! that does not gets a private alias. A removal first asks the slot's private aliases, then the shared one, and counts
//! only if this slot holds the block under it: what another publisher calls the same must not be touched.

use super::State;
use super::arena::Node;
use super::slots::{Offloaded, SlotState};
use crate::kv::wire::Tier;
use crate::mailbox::Slot;

/// What a removal met.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Removal {
    /// The last copy is gone.
    Gone,
    /// Another physical copy remains.
    CopyRemains,
    /// The slot did not hold it, as far as the index knows.
    Unknown,
}

impl State {
    pub(super) fn slot(&self, slot: Slot) -> Option<&SlotState> {
        self.slots.get(slot as usize)?.as_ref()
    }

    pub(super) fn slot_mut(&mut self, slot: Slot) -> Option<&mut SlotState> {
        self.slots.get_mut(slot as usize)?.as_mut()
    }

    /// The node that the slot calls `hash`, if it holds it anywhere.
    pub(crate) fn resolve(&self, slot: Slot, hash: u64) -> Option<Node> {
        let state = self.slot(slot)?;
        if let Some(node) = state.private.get(hash) {
            return Some(node);
        }
        let stride = self.arena.stride();
        let shared = self.arena.find_alias(hash).filter(|node| self.arena.planes.shared.get(stride, *node, slot));
        shared.or_else(|| state.offloaded.get(&hash).map(|offloaded| offloaded.node))
    }

    pub(super) fn is_confirmed(&self, slot: Slot, node: Node) -> bool {
        let stride = self.arena.stride();
        self.arena.planes.shared.get(stride, node, slot) || self.arena.planes.private.get(stride, node, slot)
    }

    /// Confirms a block on the device. True when it is another physical copy.
    #[inline]
    pub(crate) fn confirm(&mut self, slot: Slot, node: Node, hash: u64) -> bool {
        let stride = self.arena.stride();
        let Some(state) = self.slots.get_mut(slot as usize).and_then(Option::as_mut) else { return false };
        let place = match state.private.locate(hash) {
            Ok(other) if other == node => {
                state.add_copy(hash);
                return true;
            }
            Ok(other) => {
                self.supersede(slot, other, hash);
                None
            }
            Err(place) => Some(place),
        };
        let usable = hash != 0;
        if usable && self.arena.alias(node) == hash {
            return self.confirm_shared(slot, node, hash);
        }
        let adoptable = usable && (self.arena.alias(node) == 0 || self.arena.planes.shared.is_zero(stride, node));
        if adoptable && self.arena.adopt_alias(node, hash) {
            return self.confirm_shared(slot, node, hash);
        }
        if let Some(other) = self.arena.find_alias(hash)
            && self.arena.planes.shared.get(stride, other, slot)
        {
            self.supersede(slot, other, hash);
        }
        if adoptable && self.arena.adopt_alias(node, hash) {
            return self.confirm_shared(slot, node, hash);
        }
        self.confirm_private(slot, node, hash, place);
        false
    }

    /// The engine uses `hash` for another block than `other` now: that cannot be there any more.
    fn supersede(&mut self, slot: Slot, other: Node, hash: u64) {
        if let Some(state) = self.slot_mut(slot) {
            state.copies.remove(&hash);
        }
        self.unconfirm(slot, hash);
        self.arena.release(other);
    }

    fn confirm_shared(&mut self, slot: Slot, node: Node, hash: u64) -> bool {
        let stride = self.arena.stride();
        let Some(state) = self.slots.get_mut(slot as usize).and_then(Option::as_mut) else { return false };
        if self.arena.planes.shared.set(stride, node, slot) {
            state.add_copy(hash);
            return true;
        }
        let known = self.arena.planes.private.get(stride, node, slot);
        self.note_confirmed(slot, node, known);
        false
    }

    /// `place`: where the hash belongs among the slot's own, if that is known.
    fn confirm_private(&mut self, slot: Slot, node: Node, hash: u64, place: Option<usize>) {
        let stride = self.arena.stride();
        let known = self.arena.planes.private.set(stride, node, slot);
        let held = known || self.arena.planes.shared.get(stride, node, slot);
        if let Some(state) = self.slot_mut(slot)
            && let Some(place) = place.or_else(|| state.private.locate(hash).err())
        {
            state.private.insert(place, hash, node, known);
        }
        self.note_confirmed(slot, node, held);
    }

    /// The block is on the device for certain: no prediction is needed any more.
    #[inline]
    fn note_confirmed(&mut self, slot: Slot, node: Node, held: bool) {
        let stride = self.arena.stride();
        let predicted = self.arena.planes.predicted.clear(stride, node, slot);
        let Some(state) = self.slots.get_mut(slot as usize).and_then(Option::as_mut) else { return };
        if !held {
            state.stats.confirmed += 1;
            self.facts += 1;
        }
        if predicted {
            state.stats.predicted -= 1;
            self.facts -= 1;
        }
    }

    /// Takes one physical copy off the device.
    pub(crate) fn unconfirm(&mut self, slot: Slot, hash: u64) -> Removal {
        let stride = self.arena.stride();
        let Some(state) = self.slots.get_mut(slot as usize).and_then(Option::as_mut) else { return Removal::Unknown };
        if state.drop_copy(hash) {
            return Removal::CopyRemains;
        }
        let planes = &mut self.arena.planes;
        let node = if let Some((node, last)) = state.private.remove(hash) {
            if last {
                planes.private.clear(stride, node, slot);
            }
            node
        } else {
            let Some(node) = self.arena.find_alias(hash) else { return Removal::Unknown };
            if !self.arena.planes.shared.clear(stride, node, slot) {
                return Removal::Unknown;
            }
            node
        };
        if !self.is_confirmed(slot, node)
            && let Some(state) = self.slot_mut(slot)
        {
            state.stats.confirmed -= 1;
            self.facts -= 1;
        }
        Removal::Gone
    }

    /// Takes one physical copy off the device because the engine evicted it.
    pub(crate) fn evict(&mut self, slot: Slot, hash: u64) -> Removal {
        let Some(node) = self.resolve(slot, hash) else { return self.unconfirm(slot, hash) };
        let seq = self.arena.seq(node);
        let removal = self.unconfirm(slot, hash);
        if removal == Removal::Gone {
            if !self.is_confirmed(slot, node) {
                self.note_evicted(slot, seq);
            }
            self.arena.release(node);
        }
        removal
    }

    /// Counts an eviction and remembers its ghost.
    pub(super) fn note_evicted(&mut self, slot: Slot, seq: u64) {
        let Some(state) = self.slots.get_mut(slot as usize).and_then(Option::as_mut) else { return };
        state.stats.evicted += 1;
        let resident = state.resident() as usize;
        self.ghosts.add(seq, slot, resident);
    }

    /// Notes a copy on a slower tier.
    pub(crate) fn offload(&mut self, slot: Slot, tier: Tier, node: Node, hash: u64) {
        let stride = self.arena.stride();
        let Some(state) = self.slots.get_mut(slot as usize).and_then(Option::as_mut) else { return };
        // A hash that names other content by now keeps its node: tiers correct themselves by removals and misses.
        let entry = state.offloaded.entry(hash).or_insert(Offloaded { node, host: 0, disk: 0 });
        let copies = entry.copies(tier);
        *copies += 1;
        if *copies > 1 {
            return;
        }
        let node = entry.node;
        if self.arena.planes.tier(tier).set(stride, node, slot) {
            *state.offloaded_more.entry((node, tier == Tier::Cpu)).or_insert(0) += 1;
        }
    }

    /// Takes one copy off a slower tier.
    pub(crate) fn unload(&mut self, slot: Slot, tier: Tier, hash: u64) -> Removal {
        let stride = self.arena.stride();
        let Some(state) = self.slots.get_mut(slot as usize).and_then(Option::as_mut) else { return Removal::Unknown };
        let Some(entry) = state.offloaded.get_mut(&hash) else { return Removal::Unknown };
        let copies = entry.copies(tier);
        if *copies == 0 {
            return Removal::Unknown;
        }
        *copies -= 1;
        if *copies > 0 {
            return Removal::CopyRemains;
        }
        let node = entry.node;
        if entry.host == 0 && entry.disk == 0 {
            state.offloaded.remove(&hash);
        }
        if let Some(more) = state.offloaded_more.get_mut(&(node, tier == Tier::Cpu)) {
            *more -= 1;
            if *more == 0 {
                state.offloaded_more.remove(&(node, tier == Tier::Cpu));
            }
        } else {
            self.arena.planes.tier(tier).clear(stride, node, slot);
            self.arena.release(node);
        }
        Removal::Gone
    }
}
