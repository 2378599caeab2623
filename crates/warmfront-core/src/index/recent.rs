//! Prompts that were dispatched to one slot, oldest dispatch first.
//!
//! One row a prompt, in a doubly linked list through a slab: a repeated dispatch moves one row, however long the prompt is.
//! A block's prediction lives as long as a row that covers it.

use hashbrown::HashTable;

use super::arena::Node;
use super::hash::mix;
use super::path::Path;

const END: u32 = u32::MAX;

/// Most rows of one slot.
pub(super) const ROWS_MAX: usize = 65_536;

#[derive(Debug)]
pub(super) struct Row {
    pub(super) path: Path,
    /// Leading blocks that the row covers: all, until the slot's capacity takes some from the end.
    pub(super) covered: u32,
    pub(super) touched_s: f64,
    /// Dispatches that were not withdrawn.
    pub(super) dispatches: u32,
    /// Of these, requests in flight.
    pub(super) in_flight: u32,
    older: u32,
    newer: u32,
    is_listed: bool,
}

impl Row {
    fn is_whole(&self) -> bool {
        self.covered == self.path.len()
    }

    fn end(&self) -> Node {
        self.path.node(self.path.len() - 1)
    }
}

#[derive(Debug)]
pub(super) struct Recent {
    rows: Vec<Row>,
    free: Vec<u32>,
    /// Whole rows by their last node.
    by_end: HashTable<u32>,
    oldest: u32,
    newest: u32,
    listed: usize,
    path_bytes: usize,
}

impl Default for Recent {
    fn default() -> Self {
        Self {
            rows: Vec::new(),
            free: Vec::new(),
            by_end: HashTable::new(),
            oldest: END,
            newest: END,
            listed: 0,
            path_bytes: 0,
        }
    }
}

impl Recent {
    /// Rows in the list.
    pub(super) fn len(&self) -> usize {
        self.listed
    }

    /// Rows of the slab, listed ones and others.
    pub(super) fn rows(&self) -> usize {
        self.rows.len()
    }

    /// The row of the prompt that ends at `end`, if the row covers all of it.
    pub(super) fn find(&self, end: Node) -> Option<u32> {
        self.by_end.find(mix(u64::from(end)), |row| self.rows[*row as usize].end() == end).copied()
    }

    pub(super) fn row(&self, row: u32) -> &Row {
        &self.rows[row as usize]
    }

    pub(super) fn row_mut(&mut self, row: u32) -> &mut Row {
        &mut self.rows[row as usize]
    }

    /// Adds the row of a path that is not empty and has none, as the newest.
    pub(super) fn add(&mut self, path: Path, now_s: f64) -> u32 {
        self.path_bytes += path.bytes();
        let covered = path.len();
        let blank = Row {
            path,
            covered,
            touched_s: now_s,
            dispatches: 0,
            in_flight: 0,
            older: END,
            newer: END,
            is_listed: true,
        };
        let row = if let Some(row) = self.free.pop() {
            self.rows[row as usize] = blank;
            row
        } else {
            self.rows.push(blank);
            self.rows.len() as u32 - 1
        };
        let rows = &self.rows;
        let hash = |row: &u32| mix(u64::from(rows[*row as usize].end()));
        self.by_end.insert_unique(hash(&row), row, hash);
        self.listed += 1;
        self.link(row, now_s);
        row
    }

    /// Adds the row of a path that was dispatched before those dispatched since `touched_s`.
    pub(super) fn add_past(&mut self, path: Path, touched_s: f64) -> u32 {
        let row = self.add(path, touched_s);
        let mut after = self.rows[row as usize].older;
        while let Some(entry) = self.rows.get(after as usize)
            && entry.touched_s > touched_s
        {
            after = entry.older;
        }
        if after != self.rows[row as usize].older {
            self.unlink(row);
            self.link_after(row, after);
        }
        row
    }

    /// Makes the row the newest.
    pub(super) fn touch(&mut self, row: u32, now_s: f64) {
        self.unlink(row);
        self.link(row, now_s);
    }

    pub(super) fn oldest(&self) -> Option<u32> {
        (self.oldest != END).then_some(self.oldest)
    }

    /// Takes the last covered block off a row in the list; the row leaves the list with its last block.
    pub(super) fn shorten(&mut self, row: u32) {
        self.forget_end(row);
        self.rows[row as usize].covered -= 1;
        if self.rows[row as usize].covered == 0 {
            self.unlist(row);
        }
    }

    /// Takes the row out of the list. It stays until no request in flight uses it.
    pub(super) fn unlist(&mut self, row: u32) {
        self.forget_end(row);
        self.unlink(row);
        self.listed -= 1;
        self.rows[row as usize].is_listed = false;
        self.free_unused(row);
    }

    /// A request that used the row is no longer in flight.
    pub(super) fn stop_using(&mut self, row: u32) {
        self.rows[row as usize].in_flight -= 1;
        self.free_unused(row);
    }

    pub(super) fn is_listed(&self, row: u32) -> bool {
        self.rows[row as usize].is_listed
    }

    fn free_unused(&mut self, row: u32) {
        let entry = &mut self.rows[row as usize];
        if !entry.is_listed && entry.in_flight == 0 {
            self.path_bytes -= entry.path.bytes();
            entry.path = Path::new(&[]);
            self.free.push(row);
        }
    }

    fn forget_end(&mut self, row: u32) {
        let entry = &self.rows[row as usize];
        if entry.is_whole()
            && let Ok(found) = self.by_end.find_entry(mix(u64::from(entry.end())), |other| *other == row)
        {
            found.remove();
        }
    }

    pub(super) fn bytes(&self) -> usize {
        self.rows.capacity() * size_of::<Row>()
            + self.free.capacity() * 4
            + self.by_end.allocation_size()
            + self.path_bytes
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

    /// Links a row behind an older one; [`END`]: as the oldest. A newer row exists.
    fn link_after(&mut self, row: u32, older: u32) {
        let newer = match self.rows.get_mut(older as usize) {
            Some(before) => std::mem::replace(&mut before.newer, row),
            None => std::mem::replace(&mut self.oldest, row),
        };
        (self.rows[row as usize].older, self.rows[row as usize].newer) = (older, newer);
        self.rows[newer as usize].older = row;
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
