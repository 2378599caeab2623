//! Nodes: one for each distinct block that anybody holds.
//!
//! Struct of arrays; the two hash tables store node numbers only and read their keys from the arrays, so no key is stored
//! twice. Nodes of one chain are made one after the other and therefore lie side by side: a walk tries the next number
//! before it asks the table, and mostly needs no table at all.

use hashbrown::HashTable;
use hashbrown::hash_table::Entry;

use super::hash::mix;
use super::plane::Plane;
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

    fn all(&self) -> [&Plane; 6] {
        [&self.shared, &self.private, &self.predicted, &self.active, &self.host, &self.disk]
    }

    fn all_mut(&mut self) -> [&mut Plane; 6] {
        [
            &mut self.shared,
            &mut self.private,
            &mut self.predicted,
            &mut self.active,
            &mut self.host,
            &mut self.disk,
        ]
    }
}

#[derive(Debug)]
pub(super) struct Arena {
    /// Sequence hash; zero marks a free node.
    seq: Vec<u64>,
    /// Engine hash that publishers share; zero: none.
    alias: Vec<u64>,
    by_seq: HashTable<Node>,
    by_alias: HashTable<Node>,
    /// Last in, first out: engines evict a sequence from its tail, so what is taken from here ascends again.
    free: Vec<Node>,
    stride: usize,
    pub(super) planes: Planes,
}

/// Most nodes of one index: the top bit of a node number is used as a mark elsewhere.
const NODES_MAX: usize = 1 << 31;

impl Arena {
    pub(super) fn new() -> Self {
        Self {
            seq: Vec::new(),
            alias: Vec::new(),
            by_seq: HashTable::new(),
            by_alias: HashTable::new(),
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

    /// The node of a sequence hash; `likely` is tried first.
    #[inline]
    pub(super) fn find(&self, seq: u64, likely: Node) -> Option<Node> {
        if self.is_at(seq, likely) {
            return Some(likely);
        }
        self.by_seq.find(seq, |node| self.seq[*node as usize] == seq).copied()
    }

    /// As [`Arena::find`], and makes the node when there is none.
    #[inline]
    pub(super) fn find_or_make(&mut self, seq: u64, likely: Node) -> Node {
        if self.is_at(seq, likely) {
            return likely;
        }
        let keys = &self.seq;
        let slot = self.by_seq.entry(seq, |node| keys[*node as usize] == seq, |node| keys[*node as usize]);
        let vacant = match slot {
            Entry::Occupied(found) => return *found.get(),
            Entry::Vacant(vacant) => vacant,
        };
        if let Some(node) = self.free.pop() {
            vacant.insert(node);
            self.seq[node as usize] = seq;
            return node;
        }
        assert!(self.seq.len() < NODES_MAX, "an index holds at most 2^31 blocks");
        let node = self.seq.len() as Node;
        vacant.insert(node);
        self.seq.push(seq);
        self.alias.push(0);
        node
    }

    /// The node that has this shared engine hash.
    #[inline]
    pub(super) fn find_alias(&self, hash: u64) -> Option<Node> {
        self.by_alias.find(mix(hash), |node| self.alias[*node as usize] == hash).copied()
    }

    /// Gives the node a shared engine hash in place of any it had. False when another node has that hash.
    #[inline]
    pub(super) fn adopt_alias(&mut self, node: Node, hash: u64) -> bool {
        let keys = &self.alias;
        let slot =
            self.by_alias.entry(mix(hash), |other| keys[*other as usize] == hash, |other| mix(keys[*other as usize]));
        let Entry::Vacant(vacant) = slot else { return false };
        vacant.insert(node);
        self.drop_alias(node);
        self.alias[node as usize] = hash;
        true
    }

    fn drop_alias(&mut self, node: Node) {
        let hash = self.alias[node as usize];
        if hash != 0
            && let Ok(found) = self.by_alias.find_entry(mix(hash), |other| *other == node)
        {
            found.remove();
        }
        self.alias[node as usize] = 0;
    }

    /// Frees the node when no slot has any fact about it.
    pub(super) fn release(&mut self, node: Node) {
        let stride = self.stride;
        if self.planes.all().iter().any(|plane| !plane.is_zero(stride, node)) {
            return;
        }
        self.drop_alias(node);
        let seq = self.seq[node as usize];
        let found = self.by_seq.find_entry(seq, |other| *other == node);
        found.expect("a node that is not free is in the table").remove();
        self.seq[node as usize] = 0;
        self.free.push(node);
    }

    pub(super) fn bytes(&self) -> usize {
        let arrays = self.seq.capacity() * 8 + self.alias.capacity() * 8 + self.free.capacity() * 4;
        let tables = self.by_seq.allocation_size() + self.by_alias.allocation_size();
        arrays + tables + self.planes.all().iter().map(|plane| plane.bytes()).sum::<usize>()
    }
}
