//! What each replica of a pool holds of a prompt, in tokens, whatever its block size.
//!
//! Each block size of a pool has an index of its own, which counts blocks and knows only the slots of that size. Here
//! their columns become one: a slot is in exactly one of them, so rows add up.

use crate::fleet::Pool;
use crate::index::OverlapColumns;
use crate::requests::Prompt;

/// The columns of `warmfront.types.Overlap`, one row a slot.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct PoolOverlap {
    pub device: Vec<u32>,
    pub confirmed: Vec<u32>,
    pub host: Vec<u32>,
    pub disk: Vec<u32>,
    pub active: Vec<u32>,
    pub active_tokens: Vec<u64>,
    pub resident_tokens: Vec<u64>,
    pub evicted_blocks: Vec<u64>,
    pub regretted_blocks: Vec<u64>,
    /// Negative: never sent there.
    pub age_s: Vec<f64>,
    pub frontier_key: Option<u64>,
}

impl PoolOverlap {
    /// Walks the prompt through every index of the pool.
    ///
    /// An engine computes at least one token of every prompt, so the block that would hold the last one is never reused;
    /// it counts in `confirmed` alone, which is what the replica holds. Cutting before the walk, not after, matters for
    /// models with window groups, whose hit ends at a retained window.
    #[must_use]
    pub fn of(prompt: &Prompt, pool: &Pool, now_s: f64) -> Self {
        let mut found = prompt.hashes.iter().filter_map(|(block_size, hashes)| {
            let index = pool.indexes.get(block_size)?;
            let reusable = if prompt.reads_cache { prompt.tokens.saturating_sub(1) / block_size } else { 0 } as usize;
            let mut columns = index.overlap(&hashes[..reusable.min(hashes.len())], now_s);
            if reusable < hashes.len() {
                columns.confirmed = index.overlap(hashes, now_s).confirmed;
            }
            Some(Self::in_tokens(columns, *block_size))
        });
        let first = found.next().unwrap_or_default();
        found.fold(first, |joined, other| joined.joined(&other))
    }

    fn in_tokens(columns: OverlapColumns, block_size: u32) -> Self {
        let tokens = |blocks: Vec<u32>| scaled(blocks, block_size);
        let wide_tokens = |blocks: Vec<u64>| scaled(blocks, u64::from(block_size));
        Self {
            device: tokens(columns.device),
            confirmed: tokens(columns.confirmed),
            host: tokens(columns.host),
            disk: tokens(columns.disk),
            active: tokens(columns.active),
            active_tokens: wide_tokens(columns.active_blocks),
            resident_tokens: wide_tokens(columns.resident),
            evicted_blocks: columns.evicted,
            regretted_blocks: columns.regretted,
            age_s: columns.age_s,
            frontier_key: columns.frontier_key,
        }
    }

    fn joined(self, other: &Self) -> Self {
        let deepest = |overlap: &Self| overlap.host.iter().copied().max().unwrap_or(0);
        let frontier_key = if deepest(other) > deepest(&self) { other.frontier_key } else { self.frontier_key };
        Self {
            device: summed(self.device, &other.device),
            confirmed: summed(self.confirmed, &other.confirmed),
            host: summed(self.host, &other.host),
            disk: summed(self.disk, &other.disk),
            active: summed(self.active, &other.active),
            active_tokens: summed(self.active_tokens, &other.active_tokens),
            resident_tokens: summed(self.resident_tokens, &other.resident_tokens),
            evicted_blocks: summed(self.evicted_blocks, &other.evicted_blocks),
            regretted_blocks: summed(self.regretted_blocks, &other.regretted_blocks),
            age_s: latest(self.age_s, &other.age_s),
            frontier_key,
        }
    }
}

fn scaled<T: Copy + std::ops::MulAssign>(mut column: Vec<T>, factor: T) -> Vec<T> {
    for row in &mut column {
        *row *= factor;
    }
    column
}

/// Adds row by row; the shorter column counts as zero where it ends.
fn summed<T: Copy + std::ops::AddAssign>(mut long: Vec<T>, short: &[T]) -> Vec<T> {
    if short.len() > long.len() {
        return summed(short.to_vec(), &long);
    }
    for (row, more) in long.iter_mut().zip(short) {
        *row += *more;
    }
    long
}

/// The age that is known: only the index that has the slot knows one, the others say negative.
fn latest(mut long: Vec<f64>, short: &[f64]) -> Vec<f64> {
    if short.len() > long.len() {
        return latest(short.to_vec(), &long);
    }
    for (row, other) in long.iter_mut().zip(short) {
        *row = row.max(*other);
    }
    long
}

#[cfg(test)]
mod tests {
    use super::*;

    fn column(device: &[u32], age_s: &[f64], frontier_key: u64) -> OverlapColumns {
        OverlapColumns {
            device: device.to_vec(),
            host: device.to_vec(),
            age_s: age_s.to_vec(),
            frontier_key: Some(frontier_key),
            ..OverlapColumns::default()
        }
    }

    #[test]
    fn replicas_of_different_block_sizes_are_compared_in_tokens() {
        let small = PoolOverlap::in_tokens(column(&[3, 0], &[1.5, -1.0], 7), 16);
        let large = PoolOverlap::in_tokens(column(&[0, 1, 0], &[-1.0, -1.0, 4.0], 9), 128);
        let joined = small.joined(&large);
        assert_eq!(joined.device, [48, 128, 0]);
        assert_eq!(joined.age_s, [1.5, -1.0, 4.0]);
        assert_eq!(joined.frontier_key, Some(9));
    }
}
