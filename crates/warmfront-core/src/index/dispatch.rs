//! Our own dispatches: blocks in use, predictions, and what makes predictions end.
//!
//! A prediction ends when an event confirms it, when its time is up, when the slot's capacity is used up (approximate
//! feed), or when the request turns out never to have been computed. Its time does not run while a request in flight uses
//! the block: a queue in front of an engine may be longer than any fixed time.

use std::collections::VecDeque;

use super::arena::Node;
use super::hash::FastMap;
use super::{Feed, State};
use crate::block::SeqHash;
use crate::mailbox::{RequestId, Slot};

/// Marks a node of a request in flight whose prediction that request made.
const FRESH: Node = 1 << 31;

/// Prefixes for which the last dispatch is remembered.
const AGES_MAX: usize = 65_536;

/// How many blocks before the frontier of a prompt its last dispatch is looked for: the answer that an engine caches
/// behind a prompt moves the frontier past the end of the request that was dispatched.
pub(super) const AGE_BLOCKS: usize = 64;

/// A dispatched request.
#[derive(Debug)]
pub(super) struct InFlight {
    pub(super) slot: Slot,
    nodes: Box<[Node]>,
}

impl InFlight {
    pub(super) fn bytes(&self) -> usize {
        self.nodes.len() * 4 + size_of::<Self>()
    }
}

/// When prefixes were last dispatched, by sequence hash and slot.
#[derive(Debug, Default)]
pub(super) struct Ages {
    times: FastMap<u64, Vec<(Slot, f64)>>,
    order: VecDeque<u64>,
}

impl Ages {
    fn note(&mut self, seq: u64, slot: Slot, now_s: f64) {
        if !self.times.contains_key(&seq) {
            if self.order.len() == AGES_MAX
                && let Some(oldest) = self.order.pop_front()
            {
                self.times.remove(&oldest);
            }
            self.order.push_back(seq);
        }
        let times = self.times.entry(seq).or_default();
        match times.iter_mut().find(|(other, _)| *other == slot) {
            Some((_, last_s)) => *last_s = now_s,
            None => times.push((slot, now_s)),
        }
    }

    pub(super) fn of(&self, seq: u64) -> &[(Slot, f64)] {
        self.times.get(&seq).map_or(&[], Vec::as_slice)
    }

    pub(super) fn is_empty(&self) -> bool {
        self.times.is_empty()
    }

    pub(super) fn forget(&mut self, slot: Slot) {
        for times in self.times.values_mut() {
            times.retain(|(other, _)| *other != slot);
        }
    }

    pub(super) fn bytes(&self) -> usize {
        self.times.allocation_size() + self.order.capacity() * 8 + self.times.len() * size_of::<(Slot, f64)>()
    }
}

impl State {
    pub(super) fn dispatched(&mut self, id: RequestId, hashes: &[SeqHash], slot: Slot, now_s: f64) {
        self.expire(now_s);
        self.withdrawn(id);
        if self.slot(slot).is_none() {
            return;
        }
        self.regret(hashes, slot);
        if let Some(frontier) = self.frontier(hashes) {
            self.ages.note(hashes[frontier - 1].0, slot, now_s);
        }
        if let Some(last) = hashes.last() {
            self.ages.note(last.0, slot, now_s);
        }
        let mut nodes = self.use_blocks(hashes, slot);
        self.predict(&mut nodes, slot, now_s);
        self.in_flight.insert(id, InFlight { slot, nodes: nodes.into() });
        self.keep_capacity(slot);
        self.keep_room();
    }

    /// Counts the evicted blocks that this request needs and that its replica does not hold.
    fn regret(&mut self, hashes: &[SeqHash], slot: Slot) {
        if self.ghosts.is_empty() {
            return;
        }
        let mut likely = 0;
        for hash in hashes {
            let node = self.arena.find(hash.0, likely);
            if let Some(node) = node {
                likely = node + 1;
                if self.is_on_device(slot, node) {
                    continue;
                }
            }
            let slots = &mut self.slots;
            self.ghosts.take(hash.0, |evicter| {
                if let Some(Some(state)) = slots.get_mut(evicter as usize) {
                    state.stats.regretted += 1;
                }
            });
        }
    }

    fn is_on_device(&self, slot: Slot, node: Node) -> bool {
        let is_stale = self.slot(slot).is_some_and(|state| state.stale);
        self.arena.planes.predicted.get(self.arena.stride(), node, slot) || (!is_stale && self.is_confirmed(slot, node))
    }

    fn use_blocks(&mut self, hashes: &[SeqHash], slot: Slot) -> Vec<Node> {
        let stride = self.arena.stride();
        let mut nodes = Vec::with_capacity(hashes.len());
        let mut likely = 0;
        for hash in hashes {
            let node = self.arena.find_or_make(hash.0, likely);
            likely = node + 1;
            nodes.push(node);
            let Some(state) = self.slots.get_mut(slot as usize).and_then(Option::as_mut) else { continue };
            if self.arena.planes.active.set(stride, node, slot) {
                *state.users.entry(node).or_insert(0) += 1;
            } else {
                state.stats.active += 1;
            }
        }
        nodes
    }

    /// Predicts every block that is not confirmed already, the last block first: engines evict a sequence from its tail.
    fn predict(&mut self, nodes: &mut [Node], slot: Slot, now_s: f64) {
        let stride = self.arena.stride();
        let Some((is_stale, feed)) = self.slot(slot).map(|state| (state.stale, state.feed)) else { return };
        self.next_expiry_s = self.next_expiry_s.min(now_s + self.ttl_s(feed));
        for entry in nodes.iter_mut().rev() {
            let node = *entry;
            if !is_stale && self.is_confirmed(slot, node) {
                continue;
            }
            self.arena.planes.predicted.set(stride, node, slot);
            let Some(state) = self.slots.get_mut(slot as usize).and_then(Option::as_mut) else { return };
            if state.recent.touch(node, now_s) {
                state.stats.predicted += 1;
                state.stats.predictions += 1;
                self.facts += 1;
                *entry |= FRESH;
            }
        }
    }

    pub(super) fn released(&mut self, id: RequestId) {
        if let Some(request) = self.in_flight.remove(&id) {
            for entry in &request.nodes {
                self.stop_using(request.slot, entry & !FRESH);
            }
        }
    }

    pub(super) fn withdrawn(&mut self, id: RequestId) {
        let Some(request) = self.in_flight.remove(&id) else { return };
        let stride = self.arena.stride();
        for entry in &request.nodes {
            let node = entry & !FRESH;
            let shared = self.slot(request.slot).is_some_and(|state| state.users.contains_key(&node));
            if entry & FRESH != 0 && !shared && self.arena.planes.predicted.clear(stride, node, request.slot) {
                self.forget_recent(request.slot, node);
            }
            self.stop_using(request.slot, node);
        }
    }

    fn stop_using(&mut self, slot: Slot, node: Node) {
        let stride = self.arena.stride();
        let Some(state) = self.slots.get_mut(slot as usize).and_then(Option::as_mut) else { return };
        if let Some(users) = state.users.get_mut(&node) {
            *users -= 1;
            if *users == 0 {
                state.users.remove(&node);
            }
            return;
        }
        if self.arena.planes.active.clear(stride, node, slot) {
            state.stats.active -= 1;
            self.arena.release(node);
        }
    }

    fn forget_recent(&mut self, slot: Slot, node: Node) {
        if let Some(state) = self.slot_mut(slot)
            && state.recent.drop(node)
        {
            state.stats.predicted -= 1;
            self.facts -= 1;
        }
    }

    pub(super) fn drop_prediction(&mut self, slot: Slot, node: Node) {
        self.arena.planes.predicted.clear(self.arena.stride(), node, slot);
        self.forget_recent(slot, node);
        self.arena.release(node);
    }

    fn ttl_s(&self, feed: Feed) -> f64 {
        match feed {
            Feed::Exact => self.options.predicted_ttl_s,
            Feed::Approximate => self.options.approximate_ttl_s,
        }
    }

    /// Ends the predictions whose time is up, or starts their time anew while the block is in use.
    pub(crate) fn expire(&mut self, now_s: f64) {
        if now_s < self.next_expiry_s {
            return;
        }
        self.next_expiry_s = f64::INFINITY;
        let stride = self.arena.stride();
        for slot in 0..self.slots.len() as Slot {
            let Some(feed) = self.slot(slot).map(|state| state.feed) else { continue };
            let ttl_s = self.ttl_s(feed);
            while let Some(state) = self.slots.get_mut(slot as usize).and_then(Option::as_mut)
                && let Some((node, touched_s)) = state.recent.oldest()
                && touched_s + ttl_s <= now_s
            {
                // A time to live of zero would restart for ever.
                if ttl_s > 0.0 && self.arena.planes.active.get(stride, node, slot) {
                    state.recent.touch(node, now_s);
                    continue;
                }
                if feed == Feed::Exact && !state.stale {
                    state.stats.unconfirmed += 1;
                }
                self.drop_prediction(slot, node);
            }
            if let Some((_, touched_s)) = self.slot(slot).and_then(|state| state.recent.oldest()) {
                self.next_expiry_s = self.next_expiry_s.min(touched_s + ttl_s);
            }
        }
    }

    /// An engine without events holds no more than its capacity: the blocks used longest ago have gone.
    fn keep_capacity(&mut self, slot: Slot) {
        while let Some(state) = self.slot(slot)
            && state.feed == Feed::Approximate
            && state.capacity_blocks.is_some_and(|capacity| state.resident() > capacity)
            && let Some((node, _)) = state.recent.oldest()
        {
            let seq = self.arena.seq(node);
            self.drop_prediction(slot, node);
            self.note_evicted(slot, seq);
        }
    }

    /// Drops facts until there is room: the oldest predictions of the slot with most of them, then confirmed facts of the
    /// slot with most of those, in the order in which their nodes come under a hand that goes round the arena.
    pub(crate) fn keep_room(&mut self) {
        let mut excess = self.facts.saturating_sub(self.options.facts_max);
        while excess > 0 && (self.drop_one_predicted() || self.drop_one_confirmed()) {
            self.evicted_for_room += 1;
            excess -= 1;
        }
    }

    fn largest(&self, size: impl Fn(&super::SlotState) -> u64) -> Option<Slot> {
        let sizes = self.slots.iter().enumerate().filter_map(|(slot, state)| Some((size(state.as_ref()?), slot)));
        // Of equal ones the lowest slot: reproducible.
        sizes
            .filter(|(size, _)| *size > 0)
            .max_by_key(|(size, slot)| (*size, usize::MAX - slot))
            .map(|(_, slot)| slot as Slot)
    }

    fn drop_one_predicted(&mut self) -> bool {
        let Some(slot) = self.largest(|state| state.stats.predicted) else { return false };
        let Some((node, _)) = self.slot(slot).and_then(|state| state.recent.oldest()) else { return false };
        self.drop_prediction(slot, node);
        true
    }

    fn drop_one_confirmed(&mut self) -> bool {
        let Some(slot) = self.largest(|state| state.stats.confirmed) else { return false };
        let hash = self.slot_mut(slot).and_then(|state| state.private.any()).or_else(|| self.next_shared(slot));
        let Some(hash) = hash else { return false };
        let Some(node) = self.resolve(slot, hash) else { return false };
        let before = self.slot(slot).map_or(0, |state| state.stats.confirmed);
        while self.unconfirm(slot, hash) == super::Removal::CopyRemains {}
        self.arena.release(node);
        self.slot(slot).is_some_and(|state| state.stats.confirmed < before) || self.drop_one_confirmed()
    }

    /// The shared hash of the next node under the hand that the slot holds.
    fn next_shared(&mut self, slot: Slot) -> Option<u64> {
        let stride = self.arena.stride();
        for _ in 0..self.arena.limit() {
            let node = self.hand;
            self.hand = if node + 1 >= self.arena.limit() { 0 } else { node + 1 };
            if self.arena.planes.shared.get(stride, node, slot) {
                return Some(self.arena.alias(node));
            }
        }
        None
    }
}
