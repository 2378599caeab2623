//! Our own dispatches: blocks in use, predictions, and what makes predictions end.
//!
//! A prediction ends when an event confirms it, when its time is up, when the slot's capacity is used up (approximate
//! feed), or when the request turns out never to have been computed. Time and capacity work on whole prompts: a block is
//! predicted no longer than a dispatched prompt *covers* it, and a repeated dispatch moves one row, not its blocks. The time
//! of a prompt does not run while a request with it is in flight: a queue in front of an engine may be longer than any
//! fixed time.

use std::collections::VecDeque;

use super::arena::Node;
use super::hash::FastMap;
use super::path::Path;
use super::recent::ROWS_MAX;
use super::slots::SlotState;
use super::{Feed, State};
use crate::block::SeqHash;
use crate::mailbox::{RequestId, Slot};

/// Prefixes for which the last dispatch is remembered.
const AGES_MAX: usize = 65_536;

/// How many blocks before the frontier of a prompt its last dispatch is looked for: the answer that an engine caches
/// behind a prompt moves the frontier past the end of the request that was dispatched.
pub(super) const AGE_BLOCKS: usize = 64;

/// A dispatched request.
#[derive(Clone, Copy, Debug)]
pub(super) struct InFlight {
    pub(super) slot: Slot,
    /// Row of its prompt among those dispatched to the slot; `None`: it has no full block.
    row: Option<u32>,
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

    /// Notes a dispatch of a former process, unless a later one is known.
    pub(super) fn note_past(&mut self, seq: u64, slot: Slot, time_s: f64) {
        if self.of(seq).iter().all(|(other, _)| *other != slot) && self.order.len() < AGES_MAX {
            self.note(seq, slot, time_s);
        }
    }

    /// Prefix, slot and time of what is known about at most `prefixes` prefixes from the `from`th on; `seen` is how many.
    pub(super) fn piece<'a>(
        &'a self,
        from: usize,
        prefixes: usize,
        seen: &mut usize,
    ) -> impl Iterator<Item = (u64, Slot, f64)> + 'a {
        *seen = prefixes.min(self.order.len().saturating_sub(from));
        let piece = self.order.iter().skip(from).take(*seen);
        piece.flat_map(|seq| self.of(*seq).iter().map(|(slot, time_s)| (*seq, *slot, *time_s)))
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
        let nodes = self.nodes(hashes);
        self.regret(&nodes, slot);
        if let Some(frontier) = self.frontier(&nodes) {
            self.ages.note(hashes[frontier - 1].0, slot, now_s);
        }
        if let Some(last) = hashes.last() {
            self.ages.note(last.0, slot, now_s);
        }
        self.predict(&nodes, slot, now_s);
        let row = nodes.last().and_then(|end| self.use_prompt(*end, &nodes, slot, now_s));
        self.in_flight.insert(id, InFlight { slot, row });
        self.keep_capacity(slot);
        self.keep_room();
    }

    fn nodes(&mut self, hashes: &[SeqHash]) -> Vec<Node> {
        let mut likely = 0;
        let node = |hash: &SeqHash| {
            let node = self.arena.find_or_make(hash.0, likely);
            likely = node + 1;
            node
        };
        hashes.iter().map(node).collect()
    }

    /// A prompt that a former process dispatched and that has ended. With each block: whether it was predicted.
    pub(super) fn restore_prompt(&mut self, slot: Slot, hashes: &[(SeqHash, bool)], touched_s: f64) {
        let Some((unverified, feed)) = self.slot(slot).map(|state| (state.unverified, state.feed_now())) else {
            return;
        };
        let stride = self.arena.stride();
        let nodes = self.nodes(&hashes.iter().map(|(hash, _)| *hash).collect::<Vec<_>>());
        let Some(state) = self.slots.get_mut(slot as usize).and_then(Option::as_mut) else { return };
        if nodes.last().is_none_or(|end| state.recent.find(*end).is_some()) {
            return; // dispatched again meanwhile, and of one's own making
        }
        let path = Path::new(&nodes);
        state.covered.add(&mut self.arena.planes.covered, stride, &path, slot);
        let row = state.recent.add_past(path, touched_s);
        state.recent.row_mut(row).dispatches = 1;
        let mut made = 0;
        for (node, (_, is_predicted)) in nodes.iter().zip(hashes) {
            // What is unverified may have to be forgotten, and a stale slot counts with its predictions only.
            if *is_predicted && (unverified || !self.is_confirmed(slot, *node)) {
                made += u64::from(!self.arena.planes.predicted.set(stride, *node, slot));
            }
        }
        self.facts += made;
        self.next_expiry_s = self.next_expiry_s.min(touched_s + self.ttl_s(slot, feed));
        if let Some(state) = self.slot_mut(slot) {
            state.stats.predicted += made;
        }
        self.bound_rows(slot);
    }

    /// Forgets the oldest prompt when there are more than are remembered.
    fn bound_rows(&mut self, slot: Slot) {
        if let Some(state) = self.slot(slot)
            && state.recent.len() > ROWS_MAX
            && let Some(oldest) = state.recent.oldest()
        {
            self.drop_prompt(slot, oldest);
        }
    }

    /// Counts the evicted blocks that this request needs and that its replica does not hold.
    fn regret(&mut self, nodes: &[Node], slot: Slot) {
        if self.ghosts.is_empty() {
            return;
        }
        for node in nodes {
            if self.is_on_device(slot, *node) {
                continue;
            }
            let slots = &mut self.slots;
            self.ghosts.take(self.arena.seq(*node), |evicter| {
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

    /// Predicts every block that is not confirmed already. What is unverified may have to be forgotten, and this request
    /// computes its blocks all the same.
    fn predict(&mut self, nodes: &[Node], slot: Slot, now_s: f64) {
        let stride = self.arena.stride();
        let Some(state) = self.slot(slot) else { return };
        let (is_proved, feed) = (!state.stale && !state.unverified, state.feed_now());
        self.next_expiry_s = self.next_expiry_s.min(now_s + self.ttl_s(slot, feed));
        let mut made = 0;
        for node in nodes {
            if !is_proved || !self.is_confirmed(slot, *node) {
                made += u64::from(!self.arena.planes.predicted.set(stride, *node, slot));
            }
        }
        self.facts += made;
        if let Some(state) = self.slot_mut(slot) {
            state.stats.predicted += made;
            state.stats.predictions += made;
        }
    }

    /// Makes the prompt the newest of those dispatched to the slot, and its blocks active. Returns its row.
    fn use_prompt(&mut self, end: Node, nodes: &[Node], slot: Slot, now_s: f64) -> Option<u32> {
        let stride = self.arena.stride();
        let state = self.slots.get_mut(slot as usize).and_then(Option::as_mut)?;
        let row = if let Some(row) = state.recent.find(end) {
            state.recent.touch(row, now_s);
            row
        } else {
            let path = Path::new(nodes);
            state.covered.add(&mut self.arena.planes.covered, stride, &path, slot);
            state.recent.add(path, now_s)
        };
        let prompt = state.recent.row_mut(row);
        prompt.dispatches += 1;
        prompt.in_flight += 1;
        if prompt.in_flight == 1 {
            let added = state.active.add(&mut self.arena.planes.active, stride, &prompt.path, slot);
            state.stats.active += u64::from(added);
        }
        self.bound_rows(slot);
        Some(row)
    }

    pub(super) fn released(&mut self, id: RequestId) {
        if let Some(InFlight { slot, row: Some(row) }) = self.in_flight.remove(&id) {
            self.stop_using(slot, row);
        }
    }

    pub(super) fn withdrawn(&mut self, id: RequestId) {
        let Some(InFlight { slot, row: Some(row) }) = self.in_flight.remove(&id) else { return };
        let Some(state) = self.slot_mut(slot) else { return };
        let has_events = state.feed == Feed::Exact;
        let prompt = state.recent.row_mut(row);
        prompt.dispatches -= 1;
        // Where there are events, they say what an equal dispatch computed before (while they are not heard, that process may
        // be dead); one still in flight will compute it.
        let is_computed = if has_events { prompt.in_flight > 1 } else { prompt.dispatches > 0 };
        let is_void = !is_computed && state.recent.is_listed(row);
        self.stop_using(slot, row);
        if is_void {
            self.drop_prompt(slot, row);
        }
    }

    fn stop_using(&mut self, slot: Slot, row: u32) {
        let stride = self.arena.stride();
        let Some(state) = self.slots.get_mut(slot as usize).and_then(Option::as_mut) else { return };
        let prompt = state.recent.row(row);
        let path = (prompt.in_flight == 1).then(|| prompt.path.clone());
        state.recent.stop_using(row);
        let Some(path) = path else { return };
        for node in path.backwards(path.len()) {
            if !state.active.leave(&mut self.arena.planes.active, stride, node, slot) {
                return;
            }
            state.stats.active -= 1;
            self.arena.release(node);
        }
    }

    /// Forgets a dispatched prompt: blocks that no other one covers are no longer predicted. Returns the predictions that
    /// ended so.
    fn drop_prompt(&mut self, slot: Slot, row: u32) -> u64 {
        let stride = self.arena.stride();
        let Some(state) = self.slots.get_mut(slot as usize).and_then(Option::as_mut) else { return 0 };
        let (path, covered) = (state.recent.row(row).path.clone(), state.recent.row(row).covered);
        state.recent.unlist(row);
        let mut ended = 0;
        for node in path.backwards(covered) {
            let Some(state) = self.slots.get_mut(slot as usize).and_then(Option::as_mut) else { break };
            if !state.covered.leave(&mut self.arena.planes.covered, stride, node, slot) {
                break;
            }
            ended += u64::from(self.drop_prediction(slot, node));
        }
        ended
    }

    /// Takes blocks off the end of the prompt whose dispatch is longest ago, until one of them was predicted. Returns that
    /// one's sequence hash.
    fn shed_prediction(&mut self, slot: Slot) -> Option<u64> {
        let stride = self.arena.stride();
        loop {
            let state = self.slots.get_mut(slot as usize).and_then(Option::as_mut)?;
            let row = state.recent.oldest()?;
            let prompt = state.recent.row(row);
            let node = prompt.path.node(prompt.covered - 1);
            if !state.covered.leave(&mut self.arena.planes.covered, stride, node, slot) {
                // What is left of it belongs to prompts that were dispatched since.
                state.recent.unlist(row);
                continue;
            }
            state.recent.shorten(row);
            let seq = self.arena.seq(node);
            if self.drop_prediction(slot, node) {
                return Some(seq);
            }
        }
    }

    /// Ends a prediction if there is one, and frees the node if that was all. True when there was one.
    pub(super) fn drop_prediction(&mut self, slot: Slot, node: Node) -> bool {
        let was_predicted = self.arena.planes.predicted.clear(self.arena.stride(), node, slot);
        if was_predicted && let Some(state) = self.slot_mut(slot) {
            state.stats.predicted -= 1;
            self.facts -= 1;
        }
        self.arena.release(node);
        was_predicted
    }

    /// How long predictions of a slot live, whose feed is this one now.
    fn ttl_s(&self, slot: Slot, feed: Feed) -> f64 {
        match feed {
            Feed::Exact => self.options.predicted_ttl_s + self.slot(slot).map_or(0.0, |state| f64::from(state.lag_s)),
            Feed::Approximate => self.options.approximate_ttl_s,
        }
    }

    /// Ends the predictions of prompts whose time is up, or starts that anew while they are in flight.
    pub(crate) fn expire(&mut self, now_s: f64) {
        if now_s < self.next_expiry_s {
            return;
        }
        self.next_expiry_s = f64::INFINITY;
        for slot in 0..self.slots.len() as Slot {
            let Some(feed) = self.slot(slot).map(SlotState::feed_now) else { continue };
            let ttl_s = self.ttl_s(slot, feed);
            while let Some(state) = self.slot_mut(slot)
                && let Some(row) = state.recent.oldest()
            {
                let due_s = state.recent.row(row).touched_s + ttl_s;
                if due_s > now_s {
                    self.next_expiry_s = self.next_expiry_s.min(due_s);
                    break;
                }
                // A time to live of zero would restart for ever.
                if ttl_s > 0.0 && state.recent.row(row).in_flight > 0 {
                    state.recent.touch(row, now_s);
                    continue;
                }
                let is_news = feed == Feed::Exact;
                let ended = self.drop_prompt(slot, row);
                if is_news && let Some(state) = self.slot_mut(slot) {
                    state.stats.unconfirmed += ended;
                }
            }
        }
    }

    /// An engine without events holds no more than its capacity: the blocks used longest ago have gone.
    fn keep_capacity(&mut self, slot: Slot) {
        while let Some(state) = self.slot(slot)
            && state.is_over_capacity()
            && let Some(seq) = self.shed_prediction(slot)
        {
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
        self.shed_prediction(slot).is_some()
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
