//! Predicted facts of one slot, oldest dispatch first.
//!
//! A doubly linked list through a slab: touching, dropping and taking the oldest are constant time, and memory follows
//! the number of facts.

use hashbrown::HashTable;

use super::arena::Node;
use super::hash::mix;

const END: u32 = u32::MAX;

#[derive(Debug)]
struct Row {
    node: Node,
    older: u32,
    newer: u32,
    touched_s: f64,
}

#[derive(Debug)]
pub(super) struct Recent {
    rows: Vec<Row>,
    free: Vec<u32>,
    by_node: HashTable<u32>,
    oldest: u32,
    newest: u32,
}

impl Default for Recent {
    fn default() -> Self {
        Self { rows: Vec::new(), free: Vec::new(), by_node: HashTable::new(), oldest: END, newest: END }
    }
}

impl Recent {
    pub(super) fn len(&self) -> usize {
        self.by_node.len()
    }

    /// Makes the node the newest, adding it if needed. True when it was added.
    pub(super) fn touch(&mut self, node: Node, now_s: f64) -> bool {
        if let Some(row) = self.row(node) {
            self.unlink(row);
            self.link(row, now_s);
            return false;
        }
        let blank = Row { node, older: END, newer: END, touched_s: now_s };
        let row = if let Some(row) = self.free.pop() {
            self.rows[row as usize] = blank;
            row
        } else {
            self.rows.push(blank);
            self.rows.len() as u32 - 1
        };
        let rows = &self.rows;
        self.by_node.insert_unique(mix(u64::from(node)), row, |row| mix(u64::from(rows[*row as usize].node)));
        self.link(row, now_s);
        true
    }

    /// Drops the node. True when it was there.
    pub(super) fn drop(&mut self, node: Node) -> bool {
        if self.by_node.is_empty() {
            return false;
        }
        let rows = &self.rows;
        let Ok(found) = self.by_node.find_entry(mix(u64::from(node)), |row| rows[*row as usize].node == node) else {
            return false;
        };
        let row = found.remove().0;
        self.unlink(row);
        self.free.push(row);
        true
    }

    /// The node whose dispatch is longest ago, and when that was.
    pub(super) fn oldest(&self) -> Option<(Node, f64)> {
        self.rows.get(self.oldest as usize).map(|row| (row.node, row.touched_s))
    }

    /// All nodes, oldest first.
    pub(super) fn nodes(&self) -> Vec<Node> {
        let mut nodes = Vec::with_capacity(self.len());
        let mut at = self.oldest;
        while let Some(row) = self.rows.get(at as usize) {
            nodes.push(row.node);
            at = row.newer;
        }
        nodes
    }

    pub(super) fn bytes(&self) -> usize {
        self.rows.capacity() * size_of::<Row>() + self.free.capacity() * 4 + self.by_node.allocation_size()
    }

    fn row(&self, node: Node) -> Option<u32> {
        self.by_node.find(mix(u64::from(node)), |row| self.rows[*row as usize].node == node).copied()
    }

    fn link(&mut self, row: u32, now_s: f64) {
        let newest = self.newest;
        let entry = &mut self.rows[row as usize];
        (entry.older, entry.newer, entry.touched_s) = (newest, END, now_s);
        match self.rows.get_mut(newest as usize) {
            Some(before) => before.newer = row,
            None => self.oldest = row,
        }
        self.newest = row;
    }

    fn unlink(&mut self, row: u32) {
        let (older, newer) = (self.rows[row as usize].older, self.rows[row as usize].newer);
        match self.rows.get_mut(older as usize) {
            Some(before) => before.newer = newer,
            None => self.oldest = newer,
        }
        match self.rows.get_mut(newer as usize) {
            Some(after) => after.older = older,
            None => self.newest = older,
        }
    }
}
