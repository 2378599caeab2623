//! Token ids of pieces of text that were seen before.
//!
//! Keyed by a seeded 128-bit hash of the text, so the text itself is not kept. Two generations instead of a list of
//! uses: inserts go into the young one; when it holds its half of a shard's budget it becomes the old one and what was
//! old is dropped. A hit in the old one moves the entry back. One cache may serve several tokenizers, whose seeds differ.

use std::collections::HashMap;
use std::hash::{BuildHasherDefault, Hasher};
use std::sync::atomic::{AtomicU64, Ordering};

use parking_lot::Mutex;

const SHARDS: usize = 16;

/// Memory of an entry beside its ids: key, box, and its share of the table.
const ENTRY_BYTES: usize = 64;

/// Bounded map from a piece of text to its token ids. Safe to share.
#[derive(Debug)]
pub struct SegmentCache {
    shards: Vec<Mutex<Shard>>,
    generation_bytes_max: usize,
    hits: AtomicU64,
    misses: AtomicU64,
    hit_bytes: AtomicU64,
}

/// Counters since the start, and what is held now.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct SegmentCacheStats {
    pub hits: u64,
    pub misses: u64,
    /// Text that did not have to be tokenized.
    pub hit_bytes: u64,
    /// Memory held now.
    pub bytes: usize,
}

#[derive(Debug, Default)]
struct Shard {
    young: Generation,
    old: Generation,
}

#[derive(Debug, Default)]
struct Generation {
    ids: HashMap<u128, Box<[u32]>, BuildHasherDefault<AlreadyHashed>>,
    bytes: usize,
}

/// The keys are hashes: their low half is as good as any.
#[derive(Debug, Default)]
struct AlreadyHashed(u64);

impl Hasher for AlreadyHashed {
    fn finish(&self) -> u64 {
        self.0
    }

    fn write(&mut self, bytes: &[u8]) {
        for &byte in bytes {
            self.0 = self.0.rotate_left(8) ^ u64::from(byte);
        }
    }

    fn write_u128(&mut self, key: u128) {
        self.0 = key as u64;
    }
}

fn cost(ids: &[u32]) -> usize {
    std::mem::size_of_val(ids) + ENTRY_BYTES
}

impl SegmentCache {
    /// A cache that holds at most `bytes_max`; 0 holds nothing.
    #[must_use]
    pub fn new(bytes_max: usize) -> Self {
        Self {
            shards: (0..SHARDS).map(|_| Mutex::default()).collect(),
            generation_bytes_max: bytes_max / SHARDS / 2,
            hits: AtomicU64::new(0),
            misses: AtomicU64::new(0),
            hit_bytes: AtomicU64::new(0),
        }
    }

    /// Appends the ids of a piece of `text_bytes` bytes to `out`, if they are known.
    pub(super) fn append(&self, key: u128, text_bytes: usize, out: &mut Vec<u32>) -> bool {
        let mut shard = self.shard(key).lock();
        if let Some(ids) = shard.young.ids.get(&key) {
            out.extend_from_slice(ids);
        } else if let Some(ids) = shard.old.remove(key) {
            out.extend_from_slice(&ids);
            self.insert(&mut shard, key, ids);
        } else {
            self.misses.fetch_add(1, Ordering::Relaxed);
            return false;
        }
        self.hits.fetch_add(1, Ordering::Relaxed);
        self.hit_bytes.fetch_add(text_bytes as u64, Ordering::Relaxed);
        true
    }

    pub(super) fn remember(&self, key: u128, ids: &[u32]) {
        if cost(ids) <= self.generation_bytes_max {
            self.insert(&mut self.shard(key).lock(), key, ids.into());
        }
    }

    #[must_use]
    pub fn stats(&self) -> SegmentCacheStats {
        SegmentCacheStats {
            hits: self.hits.load(Ordering::Relaxed),
            misses: self.misses.load(Ordering::Relaxed),
            hit_bytes: self.hit_bytes.load(Ordering::Relaxed),
            bytes: self.shards.iter().map(|shard| shard.lock().bytes()).sum(),
        }
    }

    fn shard(&self, key: u128) -> &Mutex<Shard> {
        &self.shards[(key >> 64) as usize % SHARDS]
    }

    fn insert(&self, shard: &mut Shard, key: u128, ids: Box<[u32]>) {
        if shard.young.bytes + cost(&ids) > self.generation_bytes_max {
            shard.old = std::mem::take(&mut shard.young);
        }
        shard.young.bytes += cost(&ids);
        if let Some(before) = shard.young.ids.insert(key, ids) {
            shard.young.bytes -= cost(&before);
        }
    }
}

impl Shard {
    fn bytes(&self) -> usize {
        self.young.bytes + self.old.bytes
    }
}

impl Generation {
    fn remove(&mut self, key: u128) -> Option<Box<[u32]>> {
        let ids = self.ids.remove(&key)?;
        self.bytes -= cost(&ids);
        Some(ids)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn get(cache: &SegmentCache, key: u128) -> Option<Vec<u32>> {
        let mut out = Vec::new();
        cache.append(key, 4, &mut out).then_some(out)
    }

    #[test]
    fn what_was_remembered_is_found() {
        let cache = SegmentCache::new(1 << 20);
        assert_eq!(get(&cache, 7), None);
        cache.remember(7, &[1, 2, 3]);
        assert_eq!(get(&cache, 7), Some(vec![1, 2, 3]));
        let stats = cache.stats();
        assert_eq!((stats.hits, stats.misses, stats.hit_bytes, stats.bytes), (1, 1, 4, 12 + ENTRY_BYTES));
    }

    #[test]
    fn memory_stays_within_the_budget_and_what_is_used_stays() {
        let budget = 1 << 16;
        let cache = SegmentCache::new(budget);
        for key in 1..5_000u128 {
            let spread = (key << 64) | key;
            cache.remember(spread, &[key as u32; 8]);
            cache.remember(16 << 64, &[42]);
            assert_eq!(get(&cache, 16 << 64), Some(vec![42]));
        }
        assert!(cache.stats().bytes <= budget, "{}", cache.stats().bytes);
    }

    #[test]
    fn a_cache_without_room_holds_nothing() {
        let cache = SegmentCache::new(0);
        cache.remember(1, &[1]);
        assert_eq!((get(&cache, 1), cache.stats().bytes), (None, 0));
    }
}
