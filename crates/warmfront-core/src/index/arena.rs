//! Nodes: one for each distinct block that anybody holds.
//!
//! Struct of arrays; the two hash tables store node numbers and tags and leave the keys in the arrays, so no key is stored
//! twice. Nodes of one chain are made one after the other and therefore lie side by side: a walk tries the next number
//! before it asks the table, and mostly needs no table at all.
//!
//! What one would get wrong: most blocks are therefore not in the table of sequence hashes. A *joined* node is found from
//! the node of the block before it, whose number is one less, and enters the table when that node is freed.

use super::hash::scramble;
use super::plane::Plane;
use super::table::{Growth, Table, Tagged};
use crate::kv::wire::Tier;

/// Number of a node.
pub(crate) type Node = u32;

/// The planes, one a kind of fact.
#[derive(Debug, Default)]
pub(super) struct Planes {
    /// Confirmed on the device under the node's shared engine hash.
    pub(super) shared: Plane,
    /// Confirmed on the device under an engine hash of the slot's own.
    pub(super) private: Plane,
    pub(super) predicted: Plane,
    /// In a prompt that was dispatched not long ago.
    pub(super) covered: Plane,
    /// In use by a request in flight.
    pub(super) active: Plane,
    pub(super) host: Plane,
    /// Disk and remote tiers.
    pub(super) disk: Plane,
}

impl Planes {
    /// The plane of a tier other than the device.
    pub(super) fn tier(&mut self, tier: Tier) -> &mut Plane {
        if tier == Tier::Cpu { &mut self.host } else { &mut self.disk }
    }

    fn all(&self) -> [&Plane; 7] {
        let Self { shared, private, predicted, covered, active, host, disk } = self;
        [shared, private, predicted, covered, active, host, disk]
    }

    fn all_mut(&mut self) -> [&mut Plane; 7] {
        let Self { shared, private, predicted, covered, active, host, disk } = self;
        [shared, private, predicted, covered, active, host, disk]
    }
}

#[derive(Debug)]
pub(super) struct Arena {
    /// Sequence hash; zero marks a free node.
    seq: Vec<u64>,
    /// Engine hash that publishers share; zero: none.
    alias: Vec<u64>,
    /// Without joined nodes.
    by_seq: Table<Tagged>,
    /// One bit a node.
    joined: Vec<u64>,
    by_alias: Table<Tagged>,
    /// Restorations in progress; while there are any, no node is joined.
    restoring: u32,
    /// Last in, first out: engines evict a sequence from its tail, so what is taken from here ascends again.
    free: Vec<Node>,
    stride: usize,
    pub(super) planes: Planes,
}

/// Most nodes of one index: the top bit of a node number is used as a mark elsewhere.
const NODES_MAX: usize = 1 << 31;

/// Every new block enters a table, so some memory is traded for short ways: 11 to 17 bytes an entry.
const GROWTH: Growth = Growth { full_16ths: 11, grow_16ths: 8 };

impl Arena {
    pub(super) fn new() -> Self {
        Self {
            seq: Vec::new(),
            alias: Vec::new(),
            by_seq: Table::new(GROWTH),
            joined: Vec::new(),
            by_alias: Table::new(GROWTH),
            restoring: 0,
            free: Vec::new(),
            stride: 1,
            planes: Planes::default(),
        }
    }

    pub(super) fn stride(&self) -> usize {
        self.stride
    }

    /// Numbers in use and free ones; every node is below it.
    pub(super) fn limit(&self) -> Node {
        self.seq.len() as Node
    }

    pub(super) fn blocks(&self) -> usize {
        self.seq.len() - self.free.len()
    }

    /// Makes room for the bits of `slots` slots.
    pub(super) fn fit(&mut self, slots: usize) {
        let stride = slots.div_ceil(64).max(1);
        if stride > self.stride {
            for plane in self.planes.all_mut() {
                plane.restride(self.stride, stride);
            }
            self.stride = stride;
        }
    }

    #[inline]
    pub(super) fn seq(&self, node: Node) -> u64 {
        self.seq[node as usize]
    }

    #[inline]
    pub(super) fn alias(&self, node: Node) -> u64 {
        self.alias[node as usize]
    }

    /// The node `likely` has this sequence hash.
    #[inline]
    pub(super) fn is_at(&self, seq: u64, likely: Node) -> bool {
        self.seq.get(likely as usize) == Some(&seq)
    }

    /// The node of a sequence hash. `likely` is tried first: the number behind that of the block before, if that is known.
    #[inline]
    pub(super) fn find(&self, seq: u64, likely: Node) -> Option<Node> {
        if self.is_at(seq, likely) {
            return Some(likely);
        }
        self.by_seq.find(seq_tag(seq), |entry| self.seq.get(entry.node() as usize) == Some(&seq)).map(Tagged::node)
    }

    /// As [`Arena::find`], and makes the node when there is none.
    #[inline]
    pub(super) fn find_or_make(&mut self, seq: u64, likely: Node) -> Node {
        if self.is_at(seq, likely) {
            return likely;
        }
        let (tag, keys) = (seq_tag(seq), &self.seq);
        match self.by_seq.position(tag, |entry| keys.get(entry.node() as usize) == Some(&seq)) {
            Ok(at) => self.by_seq.at(at).node(),
            Err(at) => {
                let node = self.take_free(seq);
                // The block before may have been freed since.
                if node == likely && node > 0 && self.seq[node as usize - 1] != 0 && self.restoring == 0 {
                    self.joined[node as usize / 64] |= 1 << (node % 64);
                } else {
                    self.by_seq.insert(at, Tagged::new(tag, node));
                }
                node
            }
        }
    }

    /// A node number for a new block, preferably one that was freed.
    #[inline]
    fn take_free(&mut self, seq: u64) -> Node {
        if let Some(node) = self.free.pop() {
            self.seq[node as usize] = seq;
            return node;
        }
        assert!(self.seq.len() < NODES_MAX, "an index holds at most 2^31 blocks");
        if self.seq.len().is_multiple_of(64) {
            self.joined.push(0);
        }
        self.seq.push(seq);
        self.alias.push(0);
        self.seq.len() as Node - 1
    }

    /// From here on every new node enters the table: who restores knows blocks without the ones before them.
    pub(super) fn begin_restoring(&mut self) {
        self.restoring += 1;
    }

    /// Ends one [`Arena::begin_restoring`].
    pub(super) fn end_restoring(&mut self) {
        self.restoring -= 1;
    }

    /// Puts the joined ones of some nodes into the table, so that they are found without the ones before them.
    pub(super) fn list(&mut self, nodes: std::ops::Range<Node>) {
        for node in nodes {
            if self.part(node) {
                let tag = seq_tag(self.seq[node as usize]);
                self.by_seq.insert(self.by_seq.first_at(tag), Tagged::new(tag, node));
            }
        }
    }

    /// Takes the node's joint off. True when it had one.
    fn part(&mut self, node: Node) -> bool {
        let Some(word) = self.joined.get_mut(node as usize / 64) else { return false };
        let before = *word;
        *word &= !(1 << (node % 64));
        *word != before
    }

    /// Reads where a sequence hash would be found.
    #[inline]
    pub(super) fn peek(&self, seq: u64) -> u32 {
        self.by_seq.peek(seq_tag(seq))
    }

    /// Reads where a shared engine hash would be found.
    #[inline]
    pub(super) fn peek_alias(&self, hash: u64) -> u32 {
        self.by_alias.peek(alias_tag(hash))
    }

    /// The node that has this shared engine hash.
    #[inline]
    pub(super) fn find_alias(&self, hash: u64) -> Option<Node> {
        self.by_alias
            .find(alias_tag(hash), |entry| self.alias.get(entry.node() as usize) == Some(&hash))
            .map(Tagged::node)
    }

    /// Gives the node a shared engine hash in place of any it had. False when another node has that hash.
    #[inline]
    pub(super) fn adopt_alias(&mut self, node: Node, hash: u64) -> bool {
        let (tag, keys) = (alias_tag(hash), &self.alias);
        let Err(at) = self.by_alias.position(tag, |entry| keys.get(entry.node() as usize) == Some(&hash)) else {
            return false;
        };
        self.by_alias.insert(at, Tagged::new(tag, node));
        self.drop_alias(node);
        self.alias[node as usize] = hash;
        true
    }

    fn drop_alias(&mut self, node: Node) {
        let hash = std::mem::take(&mut self.alias[node as usize]);
        if hash != 0 {
            self.by_alias.remove(alias_tag(hash), |entry| entry.node() == node);
        }
    }

    /// Frees the node when no slot has any fact about it.
    pub(super) fn release(&mut self, node: Node) {
        let stride = self.stride;
        if self.planes.all().iter().any(|plane| !plane.is_zero(stride, node)) {
            return;
        }
        self.drop_alias(node);
        let seq = self.seq[node as usize];
        if !self.part(node) {
            let removed = self.by_seq.remove(seq_tag(seq), |entry| entry.node() == node);
            debug_assert!(removed.is_some(), "a node that is neither free nor joined is in the table");
        }
        if self.part(node + 1) {
            let tag = seq_tag(self.seq[node as usize + 1]);
            self.by_seq.insert(self.by_seq.first_at(tag), Tagged::new(tag, node + 1));
        }
        self.seq[node as usize] = 0;
        self.free.push(node);
    }

    pub(super) fn bytes(&self) -> usize {
        let arrays =
            self.seq.capacity() * 8 + self.alias.capacity() * 8 + self.free.capacity() * 4 + self.joined.capacity() * 8;
        let tables = self.by_seq.bytes() + self.by_alias.bytes();
        arrays + tables + self.planes.all().iter().map(|plane| plane.bytes()).sum::<usize>()
    }
}

/// Sequence hashes are spread already.
#[inline]
fn seq_tag(seq: u64) -> u32 {
    (seq >> 32) as u32
}

#[inline]
fn alias_tag(hash: u64) -> u32 {
    (scramble(hash) >> 32) as u32
}
