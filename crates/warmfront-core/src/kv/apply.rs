//! Applies decoded KV events to the index.
//!
//! All events of a batch are applied in order under one lock: a clear and the stores after it often come together. Only dense
//! stores of the main cache group teach tokens. A store whose parent the slot does not hold is counted and ignored; when
//! that goes on, the subscriber takes it for a gap.
//!
//! A store that an engine sends because a request asked for `kv_cache_report_mode=full` looks like any other store and is
//! never balanced by removals. It cannot be told apart; engines behind a router must not be asked for it.

use crate::block::{BlockHasher, ExtraDigest, ExtraKey, SeqHash, event_digest};
use crate::index::{Index, Place, Removal, State};
use crate::kv::wire::{EventBatch, ExtraKeys, KvEvent, Removed, Stored, Tier};
use crate::mailbox::Slot;

/// What a batch did. Counts are blocks unless said otherwise.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct ApplyReport {
    /// Stored on the device, further physical copies and other cache groups included.
    pub stored: u64,
    /// Of these, copies of blocks that the slot held already.
    pub duplicates: u64,
    /// Removed from the device or a tier.
    pub removed: u64,
    /// Removals of blocks that the slot did not hold: late, or lost with something before.
    pub unknown_removals: u64,
    /// Clears (events).
    pub cleared: u64,
    /// Stored behind a parent that the slot does not hold; ignored.
    pub unknown_parents: u64,
    /// Stored on a slower tier.
    pub offloaded: u64,
    /// Placeholders of tiers for blocks that the slot is not known to hold; ignored.
    pub unknown_placeholders: u64,
    /// Stores whose shape makes no sense in their group; ignored.
    pub malformed: u64,
    /// Events of unknown kinds.
    pub unknown_events: u64,
    /// Block size of stores that do not fit this index, if there were any; they were ignored.
    pub other_block_size: Option<u32>,
    /// Tokens of lookahead that the engine hashes with, if it does.
    pub lookahead: u32,
}

impl Index {
    /// Applies one batch of the replica in `slot`.
    ///
    /// `now_s` ends predictions whose time is up, after those that the batch confirms. A slot that was never added ignores everything.
    pub fn apply(&self, slot: Slot, batch: &EventBatch, now_s: f64) -> ApplyReport {
        self.change(|state, hasher| {
            let mut apply = Apply { state, hasher, slot, report: ApplyReport::default() };
            apply.batch(batch);
            let report = apply.report;
            state.expire(now_s);
            state.keep_room();
            report
        })
    }
}

/// Blocks whose table entries are fetched at a time.
const AHEAD: usize = 32;

struct Apply<'a> {
    state: &'a mut State,
    hasher: &'a BlockHasher,
    slot: Slot,
    report: ApplyReport,
}

impl Apply<'_> {
    fn batch(&mut self, batch: &EventBatch) {
        self.report.unknown_events = u64::from(batch.unknown_events);
        if !self.state.has_slot(self.slot) {
            return;
        }
        for event in &batch.events {
            match event {
                KvEvent::Stored(stored) if stored.tier == Tier::Gpu => self.stored(stored),
                KvEvent::Stored(stored) => self.stored_on_tier(stored),
                KvEvent::Removed(removed) => self.removed(removed),
                KvEvent::Cleared => {
                    self.state.clear_device(self.slot);
                    self.report.cleared += 1;
                }
            }
        }
    }

    fn stored(&mut self, stored: &Stored) {
        if stored.block_size == 0 {
            self.report.malformed += 1;
            return;
        }
        self.report.lookahead = self.report.lookahead.max(stored.lookahead);
        match self.state.learn_group(self.slot, stored) {
            Place::Main => self.chain(stored, Tier::Gpu),
            Place::Other(row) => {
                self.state.store_members(self.slot, row, stored);
                self.report.stored += stored.block_hashes.len() as u64;
            }
            Place::Nowhere => self.report.malformed += 1,
        }
    }

    /// Self-describing stores of a tier build the chain as the device does; placeholders attach to what is known.
    fn stored_on_tier(&mut self, stored: &Stored) {
        if self.state.group_place(self.slot, stored.group) != Place::Main {
            return;
        }
        if stored.block_size > 0 && !stored.token_ids.is_empty() {
            self.chain(stored, stored.tier);
            return;
        }
        for hash in &stored.block_hashes {
            if let Some(node) = self.state.resolve(self.slot, hash.0) {
                self.state.offload(self.slot, stored.tier, node, hash.0);
                self.report.offloaded += 1;
            } else {
                self.report.unknown_placeholders += 1;
            }
        }
    }

    /// Hashes a dense run of blocks and notes each.
    fn chain(&mut self, stored: &Stored, tier: Tier) {
        let block_size = self.hasher.block_size();
        if stored.block_size as usize != block_size {
            self.report.other_block_size = Some(stored.block_size);
            return;
        }
        let blocks = stored.block_hashes.len();
        if stored.token_ids.len() != blocks * block_size {
            self.report.malformed += 1;
            return;
        }
        let (mut parent, mut likely) = (self.hasher.root(), 0);
        if let Some(hash) = stored.parent {
            let Some(node) = self.state.resolve(self.slot, hash.0) else {
                self.report.unknown_parents += blocks as u64;
                return;
            };
            (parent, likely) = (self.state.seq_hash(node), node + 1);
        }
        let hashes = self.hash(stored, parent);
        for (ours, theirs) in hashes.chunks(AHEAD).zip(stored.block_hashes.chunks(AHEAD)) {
            self.state.look_ahead(self.slot, ours, theirs, likely);
            for (ours, theirs) in ours.iter().zip(theirs) {
                likely = self.note(*ours, likely, tier, theirs.0) + 1;
            }
        }
    }

    fn hash(&self, stored: &Stored, mut parent: SeqHash) -> Vec<SeqHash> {
        let mut extras = Extras::new(stored);
        let mut hashes = Vec::with_capacity(stored.block_hashes.len());
        for (block, tokens) in stored.token_ids.chunks_exact(self.hasher.block_size()).enumerate() {
            parent = self.hasher.next(parent, extras.digest(block), tokens, self.ahead(stored, block));
            hashes.push(parent);
        }
        hashes
    }

    /// Tokens after the block, when the index hashes with as many as the engine does.
    fn ahead<'a>(&self, stored: &'a Stored, block: usize) -> &'a [u32] {
        let length = self.hasher.lookahead();
        if length == 0 || stored.lookahead as usize != length {
            return &[];
        }
        stored.lookahead_tokens.get(block * length..(block + 1) * length).unwrap_or(&[])
    }

    #[inline]
    fn note(&mut self, seq: SeqHash, likely: u32, tier: Tier, hash: u64) -> u32 {
        let node = self.state.make(seq, likely);
        if tier == Tier::Gpu {
            self.report.stored += 1;
            self.report.duplicates += u64::from(self.state.confirm(self.slot, node, hash));
        } else {
            self.report.offloaded += 1;
            self.state.offload(self.slot, tier, node, hash);
            // When the hash already stood for another node there, this one has no fact.
            self.state.release(node);
        }
        node
    }

    fn removed(&mut self, removed: &Removed) {
        let place = self.state.group_place(self.slot, removed.group);
        for hash in &removed.block_hashes {
            let removal = match (removed.tier, place) {
                (Tier::Gpu, Place::Main) => self.state.evict(self.slot, hash.0),
                (Tier::Gpu, Place::Other(row)) => self.state.remove_member(self.slot, row, *hash),
                (tier, Place::Main) => self.state.unload(self.slot, tier, hash.0),
                _ => Removal::Unknown,
            };
            if removal == Removal::Unknown {
                self.report.unknown_removals += 1;
            } else {
                self.report.removed += 1;
            }
        }
    }
}

/// Digests of the extra keys of one store's blocks, computed once where all are alike.
struct Extras<'a> {
    stored: &'a Stored,
    scratch: ExtraDigest,
    /// Digest of a block without keys of its own.
    plain: u64,
}

impl<'a> Extras<'a> {
    fn new(stored: &'a Stored) -> Self {
        let mut scratch = ExtraDigest::default();
        let plain = event_digest(stored.lora_name.as_deref(), stored.lora_id, &[], &mut scratch);
        Self { stored, scratch, plain }
    }

    #[inline]
    fn digest(&mut self, block: usize) -> u64 {
        match &self.stored.extra_keys {
            ExtraKeys::Absent | ExtraKeys::Plain => self.plain,
            ExtraKeys::Each(each) => self.keyed(each.get(block).map_or(&[], Vec::as_slice)),
        }
    }

    fn keyed(&mut self, keys: &[ExtraKey]) -> u64 {
        event_digest(self.stored.lora_name.as_deref(), self.stored.lora_id, keys, &mut self.scratch)
    }
}
