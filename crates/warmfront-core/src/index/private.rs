//! Engine hashes that only one publisher uses for a block.
//!
//! Publishers with the same hash seed agree on engine hashes, and then one alias on the node serves all of them. Where a
//! publisher uses another hash for a block than the shared one (random seeds, another adapter path, another algorithm),
//! its hash is kept here, for its slot alone.

use hashbrown::HashTable;

use super::arena::Node;
use super::hash::{FastMap, mix};

#[derive(Debug, Default)]
pub(super) struct Private {
    hash: Vec<u64>,
    node: Vec<Node>,
    by_hash: HashTable<u32>,
    /// Hashes beyond the first for one node.
    more: FastMap<Node, u32>,
}

impl Private {
    #[inline]
    pub(super) fn get(&self, hash: u64) -> Option<Node> {
        if self.hash.is_empty() {
            return None;
        }
        self.row(hash).map(|row| self.node[row as usize])
    }

    fn row(&self, hash: u64) -> Option<u32> {
        self.by_hash.find(mix(hash), |row| self.hash[*row as usize] == hash).copied()
    }

    /// Adds a hash that is not there yet. `known`: the slot has another private hash for this node.
    pub(super) fn insert(&mut self, hash: u64, node: Node, known: bool) {
        let keys = &self.hash;
        let row = keys.len() as u32;
        self.by_hash.insert_unique(mix(hash), row, |row| {
            mix(keys.get(*row as usize).copied().unwrap_or(hash))
        });
        self.hash.push(hash);
        self.node.push(node);
        if known {
            *self.more.entry(node).or_insert(0) += 1;
        }
    }

    /// Removes a hash. Returns its node, and whether no other private hash of the slot names that node.
    pub(super) fn remove(&mut self, hash: u64) -> Option<(Node, bool)> {
        if self.hash.is_empty() {
            return None;
        }
        let found = self.by_hash.find_entry(mix(hash), |row| self.hash[*row as usize] == hash).ok()?;
        let row = found.remove().0 as usize;
        let node = self.node[row];
        self.close_gap(row);
        Some((node, self.forget_one(node)))
    }

    /// Moves the last row into `row`.
    fn close_gap(&mut self, row: usize) {
        let last = self.hash.len() - 1;
        if row != last {
            let moved = self.hash[last];
            let entry = self.by_hash.find_mut(mix(moved), |other| *other as usize == last);
            *entry.expect("every row is in the table") = row as u32;
        }
        self.hash.swap_remove(row);
        self.node.swap_remove(row);
    }

    fn forget_one(&mut self, node: Node) -> bool {
        if self.more.is_empty() {
            return true;
        }
        let Some(more) = self.more.get_mut(&node) else { return true };
        *more -= 1;
        if *more == 0 {
            self.more.remove(&node);
        }
        false
    }

    /// Some hash, for dropping facts when room is short: the first row, which is among the oldest.
    pub(super) fn any(&self) -> Option<u64> {
        self.hash.first().copied()
    }

    /// All (hash, node) pairs, in no order that means anything.
    pub(super) fn pairs(&self) -> impl Iterator<Item = (u64, Node)> {
        self.hash.iter().copied().zip(self.node.iter().copied())
    }

    pub(super) fn clear(&mut self) {
        *self = Self::default();
    }

    pub(super) fn bytes(&self) -> usize {
        self.hash.capacity() * 8
            + self.node.capacity() * 4
            + self.by_hash.allocation_size()
            + self.more.allocation_size()
    }
}
