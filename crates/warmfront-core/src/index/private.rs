//! Engine hashes that only one publisher uses for a block.
//!
//! Publishers with the same hash seed agree on engine hashes, and then one alias on the node serves all of them. Where a
//! publisher uses another hash for a block than the shared one (random seeds, another adapter path, another algorithm),
//! its hash is kept here, for its slot alone.

use super::arena::Node;
use super::hash::{FastMap, scramble, unscramble};
use super::table::{Entry, Growth, Named, Table};

/// There is one entry for each fact, so the table is kept dense: 15 to 17 bytes an entry.
const GROWTH: Growth = Growth { full_16ths: 13, grow_16ths: 2 };

#[derive(Debug)]
pub(super) struct Private {
    /// By scrambled hash.
    table: Table<Named>,
    /// Hashes beyond the first for one node.
    more: FastMap<Node, u32>,
    /// Where [`Private::any`] looks next.
    hand: usize,
}

impl Default for Private {
    fn default() -> Self {
        Self { table: Table::new(GROWTH), more: FastMap::default(), hand: 0 }
    }
}

impl Private {
    pub(super) fn is_empty(&self) -> bool {
        self.table.is_empty()
    }

    #[inline]
    pub(super) fn get(&self, hash: u64) -> Option<Node> {
        if self.table.is_empty() { None } else { self.locate(hash).ok() }
    }

    /// The node of a hash, or else where in the table the hash belongs.
    #[inline]
    pub(super) fn locate(&self, hash: u64) -> Result<Node, usize> {
        let key = scramble(hash);
        self.table.position(tag(key), |entry| entry.key() == key).map(|at| self.table.at(at).node())
    }

    /// Reads where the hash would be found.
    #[inline]
    pub(super) fn peek(&self, hash: u64) -> u32 {
        self.table.peek(tag(scramble(hash)))
    }

    /// Adds a hash where [`Private::locate`] said. `known`: the slot has another private hash for this node.
    pub(super) fn insert(&mut self, at: usize, hash: u64, node: Node, known: bool) {
        self.table.insert(at, Named::new(scramble(hash), node));
        if known {
            *self.more.entry(node).or_insert(0) += 1;
        }
    }

    /// Removes a hash. Returns its node, and whether no other private hash of the slot names that node.
    pub(super) fn remove(&mut self, hash: u64) -> Option<(Node, bool)> {
        if self.table.is_empty() {
            return None;
        }
        let key = scramble(hash);
        let node = self.table.remove(tag(key), |entry| entry.key() == key)?.node();
        Some((node, self.forget_one(node)))
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

    /// Some hash, for dropping facts when room is short: the next one under a hand that goes round the table.
    pub(super) fn any(&mut self) -> Option<u64> {
        let (position, entry) = self.table.next_from(self.hand)?;
        self.hand = position;
        Some(unscramble(entry.key()))
    }

    /// All (hash, node) pairs, in no order that means anything.
    pub(super) fn pairs(&self) -> impl Iterator<Item = (u64, Node)> {
        self.table.iter().map(|entry| (unscramble(entry.key()), entry.node()))
    }

    /// Visits the pairs of at most `places` places of the table from `from` on; returns where to go on, if anywhere.
    pub(super) fn piece(&self, from: usize, places: usize, mut visit: impl FnMut(u64, Node)) -> Option<usize> {
        let piece = self.table.piece(from, places)?;
        for entry in piece.iter().filter(|entry| !entry.is_empty()) {
            visit(unscramble(entry.key()), entry.node());
        }
        Some(from + piece.len())
    }

    pub(super) fn clear(&mut self) {
        *self = Self::default();
    }

    pub(super) fn bytes(&self) -> usize {
        self.table.bytes() + self.more.allocation_size()
    }
}

#[inline]
fn tag(key: u64) -> u32 {
    (key >> 32) as u32
}
