//! The paged KV cache: which physical block holds which hash, and which block is taken next.
//!
//! Follows vLLM's block pool, so the order of removals is exact: the free list is an LRU queue from which allocation
//! takes the head; a freed sequence gives its blocks back tail first; blocks without a hash go to the head (0.24 and
//! later). A free block keeps its hash until it is taken. One would expect equal hashes to share a block; they do not: a
//! block computed twice is cached twice, and each copy is removed with an event of its own.

use warmfront_core::index::FastMap;

use super::list::Ring;

/// Number of a physical block. Block 0 is vLLM's null block and never used.
pub type Block = u32;

/// What a taken block had cached.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Evicted {
    pub(crate) hash: u64,
    /// No other copy of it remains.
    pub(crate) last: bool,
}

#[derive(Debug)]
pub struct BlockPool {
    references: Vec<u32>,
    hash_of: Vec<Option<u64>>,
    free: Ring,
    cached: FastMap<u64, Block>,
    /// Further copies of cached hashes, oldest first.
    copies: FastMap<u64, Vec<Block>>,
}

impl BlockPool {
    /// An empty cache of `blocks` blocks, the null block included.
    pub fn new(blocks: u32) -> Self {
        let mut free = Ring::new(blocks as usize);
        (1..blocks).for_each(|block| free.push_back(block));
        Self {
            references: vec![0; blocks as usize],
            hash_of: vec![None; blocks as usize],
            free,
            cached: FastMap::default(),
            copies: FastMap::default(),
        }
    }

    /// Blocks that sequences can hold.
    pub fn usable(&self) -> usize {
        self.references.len() - 1
    }

    /// Blocks that no sequence holds, cached or not.
    pub fn free(&self) -> usize {
        self.free.len()
    }

    /// Share of blocks held by sequences: 0 for a warm idle cache, as `vllm:kv_cache_usage_perc`.
    pub fn usage(&self) -> f64 {
        1.0 - self.free() as f64 / self.usable() as f64
    }

    /// Every cached hash with its number of copies, in no order.
    pub fn resident(&self) -> impl Iterator<Item = (u64, usize)> {
        self.cached.keys().map(|hash| (*hash, 1 + self.copies.get(hash).map_or(0, Vec::len)))
    }

    /// The blocks of the longest cached prefix of `hashes`; the oldest copy of each.
    pub(crate) fn lookup(&self, hashes: &[u64]) -> Vec<Block> {
        hashes.iter().map_while(|hash| self.cached.get(hash).copied()).collect()
    }

    /// How many of `blocks` are free: taking them lessens the room for others.
    pub(crate) fn idle(&self, blocks: &[Block]) -> usize {
        blocks.iter().filter(|block| self.references[**block as usize] == 0).count()
    }

    /// Holds blocks found by [`BlockPool::lookup`].
    pub(crate) fn touch(&mut self, blocks: &[Block]) {
        for block in blocks {
            let references = &mut self.references[*block as usize];
            if *references == 0 {
                self.free.remove(*block);
            }
            *references += 1;
        }
    }

    /// Takes the block at the head of the free list, which the caller knows not to be empty.
    pub(crate) fn take(&mut self) -> (Block, Option<Evicted>) {
        let block = self.free.first().expect("the caller has checked `free`");
        self.free.remove(block);
        self.references[block as usize] = 1;
        let evicted = self.hash_of[block as usize].take().map(|hash| self.uncache(block, hash));
        (block, evicted)
    }

    /// Puts full blocks into the cache under their hashes. The caller announces them.
    pub(crate) fn register(&mut self, blocks: &[Block], hashes: &[u64]) {
        for (block, hash) in blocks.iter().zip(hashes) {
            self.hash_of[*block as usize] = Some(*hash);
            if *self.cached.entry(*hash).or_insert(*block) != *block {
                self.copies.entry(*hash).or_default().push(*block);
            }
        }
    }

    /// Lets go of a sequence's blocks, given in sequence order.
    pub(crate) fn release(&mut self, blocks: &[Block]) {
        for block in blocks.iter().rev() {
            let references = &mut self.references[*block as usize];
            *references -= 1;
            if *references > 0 {
                continue;
            }
            if self.hash_of[*block as usize].is_some() {
                self.free.push_back(*block);
            } else {
                self.free.push_front(*block);
            }
        }
    }

    /// Forgets every hash; refused while a sequence holds a block. The order of the free list stays.
    pub(crate) fn clear(&mut self) -> bool {
        if self.free() != self.usable() {
            return false;
        }
        self.hash_of.fill(None);
        self.cached.clear();
        self.copies.clear();
        true
    }

    fn uncache(&mut self, block: Block, hash: u64) -> Evicted {
        let Some(copies) = self.copies.get_mut(&hash) else {
            self.cached.remove(&hash);
            return Evicted { hash, last: true };
        };
        if self.cached[&hash] == block {
            self.cached.insert(hash, copies.remove(0));
        } else {
            copies.retain(|copy| *copy != block);
        }
        if copies.is_empty() {
            self.copies.remove(&hash);
        }
        Evicted { hash, last: false }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn allocate(pool: &mut BlockPool, count: usize) -> (Vec<Block>, Vec<u64>) {
        let (mut blocks, mut removed) = (Vec::new(), Vec::new());
        for _ in 0..count {
            let (block, evicted) = pool.take();
            blocks.push(block);
            removed.extend(evicted.map(|evicted| evicted.hash));
        }
        (blocks, removed)
    }

    #[test]
    fn allocation_takes_the_least_recently_freed_and_the_tail_of_a_sequence_first() {
        let mut pool = BlockPool::new(7);
        let (first, second) = (allocate(&mut pool, 3).0, allocate(&mut pool, 3).0);
        pool.register(&first, &[11, 12, 13]);
        pool.register(&second, &[21, 22, 23]);
        pool.release(&second);
        pool.release(&first);
        assert_eq!(allocate(&mut pool, 6).1, [23, 22, 21, 13, 12, 11]);
    }

    #[test]
    fn blocks_without_a_hash_are_reused_before_cached_ones() {
        let mut pool = BlockPool::new(4);
        let (blocks, _) = allocate(&mut pool, 3);
        pool.register(&blocks[..2], &[1, 2]);
        pool.release(&blocks);
        assert_eq!(allocate(&mut pool, 1), (vec![blocks[2]], vec![]));
    }

    #[test]
    fn a_block_computed_twice_is_cached_twice_and_found_until_both_are_gone() {
        let mut pool = BlockPool::new(4);
        for _ in 0..2 {
            let (blocks, _) = allocate(&mut pool, 1);
            pool.register(&blocks, &[9]);
            pool.release(&blocks);
        }
        assert_eq!(pool.resident().collect::<Vec<_>>(), [(9, 2)]);
        allocate(&mut pool, 2); // a fresh block and the older copy
        assert_eq!(pool.lookup(&[9]), [2]);
        assert_eq!(allocate(&mut pool, 1).1, [9]);
        assert!(pool.lookup(&[9]).is_empty());
    }

    #[test]
    fn touched_blocks_are_not_evicted_and_a_held_cache_is_not_cleared() {
        let mut pool = BlockPool::new(3);
        let (blocks, _) = allocate(&mut pool, 2);
        pool.register(&blocks, &[1, 2]);
        pool.release(&blocks);
        let found = pool.lookup(&[1]);
        pool.touch(&found);
        assert_eq!(pool.idle(&blocks), 1);
        assert_eq!(allocate(&mut pool, 1).1, [2]);
        assert!(!pool.clear());
    }
}
