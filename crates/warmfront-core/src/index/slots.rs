//! What the index keeps for one slot beside its bits on the nodes.

use super::Feed;
use super::arena::Node;
use super::cover::Cover;
use super::groups::Groups;
use super::hash::FastMap;
use super::private::Private;
use super::recent::Recent;
use crate::kv::wire::Tier;

/// A block on slower tiers, by one engine hash.
#[derive(Debug)]
pub(super) struct Offloaded {
    pub(super) node: Node,
    /// Copies in host memory.
    pub(super) host: u32,
    /// Copies on disk or further away.
    pub(super) disk: u32,
}

impl Offloaded {
    pub(super) fn copies(&mut self, tier: Tier) -> &mut u32 {
        if tier == Tier::Cpu { &mut self.host } else { &mut self.disk }
    }
}

/// What happened to a slot since it was added.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct SlotStats {
    /// Distinct blocks on the device by events.
    pub confirmed: u64,
    /// Blocks predicted now.
    pub predicted: u64,
    /// Predictions ever made.
    pub predictions: u64,
    /// Predictions that ran out and that no event confirmed although events flow: tokens or templates differ.
    pub unconfirmed: u64,
    /// Blocks that the engine removed (or that capacity pushed out, on an approximate feed).
    pub evicted: u64,
    /// Evicted blocks that were needed again.
    pub regretted: u64,
    /// Distinct blocks in use by requests in flight.
    pub active: u64,
}

#[derive(Debug)]
pub(super) struct SlotState {
    pub(super) feed: Feed,
    pub(super) capacity_blocks: Option<u64>,
    pub(super) stale: bool,
    /// Some events were lost: copies are not counted, since a copy too many would outlive every removal.
    pub(super) is_doubtful: bool,
    /// What is known comes from a former process, and the event stream has not proved it yet.
    pub(super) unverified: bool,
    /// How late its events are, in whole seconds.
    pub(super) lag_s: u32,
    pub(super) stats: SlotStats,
    pub(super) recent: Recent,
    pub(super) private: Private,
    /// Physical copies beyond the first on the device, by engine hash.
    pub(super) copies: FastMap<u64, u32>,
    pub(super) offloaded: FastMap<u64, Offloaded>,
    /// Engine hashes beyond the first for one block of one tier (true: host).
    pub(super) offloaded_more: FastMap<(Node, bool), u32>,
    pub(super) groups: Groups,
    /// Blocks of the prompts in `recent`.
    pub(super) covered: Cover,
    /// Blocks in use by requests in flight.
    pub(super) active: Cover,
}

impl SlotState {
    pub(super) fn new(feed: Feed, capacity_blocks: Option<u64>) -> Self {
        Self {
            feed,
            capacity_blocks,
            stale: false,
            is_doubtful: false,
            unverified: false,
            lag_s: 0,
            stats: SlotStats::default(),
            recent: Recent::default(),
            private: Private::default(),
            copies: FastMap::default(),
            offloaded: FastMap::default(),
            offloaded_more: FastMap::default(),
            groups: Groups::default(),
            covered: Cover::default(),
            active: Cover::default(),
        }
    }

    /// Blocks taken to be on the device: what events say unless they are stale, and what was predicted.
    pub(super) fn resident(&self) -> u64 {
        if self.stale { self.stats.predicted } else { self.stats.confirmed + self.stats.predicted }
    }

    /// Notes another physical copy.
    pub(super) fn add_copy(&mut self, hash: u64) {
        if !self.is_doubtful {
            *self.copies.entry(hash).or_insert(0) += 1;
        }
    }

    /// Whether nothing but our own dispatches says what the slot holds now: no event can confirm a prediction before the
    /// stream has been heard.
    pub(super) fn feed_now(&self) -> Feed {
        if self.stale || self.unverified { Feed::Approximate } else { self.feed }
    }

    /// Whether more is predicted than fits, and no event says what has gone. Unverified facts are not counted: a warm
    /// engine is full of them, and would leave no room for what is sent to it now.
    pub(super) fn is_over_capacity(&self) -> bool {
        let held = if self.unverified { self.stats.predicted } else { self.resident() };
        self.feed_now() == Feed::Approximate && self.capacity_blocks.is_some_and(|capacity| held > capacity)
    }

    /// Removes one physical copy beyond the first. False when there is only one.
    pub(super) fn drop_copy(&mut self, hash: u64) -> bool {
        if self.copies.is_empty() {
            return false;
        }
        let Some(copies) = self.copies.get_mut(&hash) else { return false };
        *copies -= 1;
        if *copies == 0 {
            self.copies.remove(&hash);
        }
        true
    }

    pub(super) fn bytes(&self) -> usize {
        self.recent.bytes()
            + self.private.bytes()
            + self.copies.allocation_size()
            + self.offloaded.allocation_size()
            + self.groups.bytes()
            + self.covered.bytes()
            + self.active.bytes()
    }
}
