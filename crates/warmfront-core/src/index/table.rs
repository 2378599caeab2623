//! Hash tables that are sorted arrays with gaps.
//!
//! An entry carries 32 bits of its key's hash, its *tag*. It stands at the place that the tag names, a fixed share of the
//! way through the array, or as close behind it as the entries before it allow, so tags ascend. A lookup reads one or two
//! lines of memory. Growing copies the entries in order: it reads no key, hashes nothing and jumps nowhere, and any
//! capacity will do, so a table grows by as little as its memory bound asks for.
//!
//! What one would get wrong: equal tags are not equal keys; whoever looks up must compare the keys.

use super::arena::Node;

/// What a table stores.
pub(super) trait Entry: Copy {
    /// Has the largest tag.
    const EMPTY: Self;
    fn tag(self) -> u32;
    fn is_empty(self) -> bool;
}

/// How full a table may be before it grows, and by how much it then grows.
#[derive(Clone, Copy, Debug)]
pub(super) struct Growth {
    /// Entries for each 16 places, at most.
    pub(super) full_16ths: usize,
    /// Places added for each 16 places.
    pub(super) grow_16ths: usize,
}

/// Places of the smallest table that is not empty.
const PLACES_MIN: usize = 16;

#[derive(Debug)]
pub(super) struct Table<E> {
    /// At least as many as there are places; more where the last entries were pushed behind the last place.
    entries: Vec<E>,
    places: usize,
    /// Entries in use.
    count: usize,
    growth: Growth,
}

impl<E: Entry> Table<E> {
    pub(super) fn new(growth: Growth) -> Self {
        Self { entries: Vec::new(), places: 0, count: 0, growth }
    }

    pub(super) fn is_empty(&self) -> bool {
        self.count == 0
    }

    /// All entries, by tag.
    pub(super) fn iter(&self) -> impl Iterator<Item = E> {
        self.entries.iter().copied().filter(|entry| !entry.is_empty())
    }

    /// At most `places` places from a position on, gaps among them; `None` behind the last.
    pub(super) fn piece(&self, from: usize, places: usize) -> Option<&[E]> {
        let piece = self.entries.get(from..self.entries.len().min(from.saturating_add(places)))?;
        (!piece.is_empty()).then_some(piece)
    }

    /// The first entry from a position on, round the end, and its position.
    pub(super) fn next_from(&self, position: usize) -> Option<(usize, E)> {
        let (before, after) = self.entries.split_at(position.min(self.entries.len()));
        let numbered = after.iter().enumerate().map(|(at, entry)| (before.len() + at, *entry));
        numbered.chain(before.iter().copied().enumerate()).find(|(_, entry)| !entry.is_empty())
    }

    /// The entry for which `is_it`, among those with the tag.
    #[inline]
    pub(super) fn find(&self, tag: u32, is_it: impl Fn(E) -> bool) -> Option<E> {
        self.position(tag, is_it).ok().map(|at| self.entries[at])
    }

    /// Where the entry is, or else where it belongs.
    #[inline]
    pub(super) fn position(&self, tag: u32, is_it: impl Fn(E) -> bool) -> Result<usize, usize> {
        let first = self.first_at(tag);
        let mut at = first;
        while let Some(entry) = self.entries.get(at)
            && entry.tag() == tag
            && !entry.is_empty()
        {
            if is_it(*entry) {
                return Ok(at);
            }
            at += 1;
        }
        Err(first)
    }

    /// The entry at a position where there is one.
    #[inline]
    pub(super) fn at(&self, position: usize) -> E {
        self.entries[position]
    }

    /// Reads where an entry of the tag would be, so that its memory is near when it is looked up soon.
    #[inline]
    pub(super) fn peek(&self, tag: u32) -> u32 {
        self.entries.get(self.place(tag)).map_or(0, |entry| entry.tag())
    }

    /// Adds an entry at the position that [`Table::position`] gave for it.
    #[inline]
    pub(super) fn insert(&mut self, at: usize, entry: E) {
        if self.count * 16 >= self.places * self.growth.full_16ths {
            self.grow();
            return self.push_in(self.first_at(entry.tag()), entry);
        }
        self.push_in(at, entry);
    }

    /// The position of the first entry that has the tag or a larger one.
    #[inline]
    pub(super) fn first_at(&self, tag: u32) -> usize {
        let mut at = self.place(tag);
        while let Some(entry) = self.entries.get(at)
            && entry.tag() < tag
        {
            at += 1;
        }
        at
    }

    /// Puts the entry in and moves those behind it up to the next gap.
    #[inline]
    fn push_in(&mut self, at: usize, entry: E) {
        self.count += 1;
        let behind = &self.entries[at..];
        let gap = if let Some(steps) = behind.iter().position(|entry| entry.is_empty()) {
            at + steps
        } else {
            self.lengthen(self.entries.len() + 1);
            self.entries.len() - 1
        };
        self.entries.copy_within(at..gap, at + 1);
        self.entries[at] = entry;
    }

    /// Takes out the entry for which `is_it`, among those with the tag.
    pub(super) fn remove(&mut self, tag: u32, is_it: impl Fn(E) -> bool) -> Option<E> {
        let mut gap = self.position(tag, is_it).ok()?;
        let removed = self.entries[gap];
        while let Some(next) = self.entries.get(gap + 1).copied()
            && !next.is_empty()
            && self.place(next.tag()) <= gap
        {
            self.entries[gap] = next;
            gap += 1;
        }
        self.entries[gap] = E::EMPTY;
        self.count -= 1;
        Some(removed)
    }

    /// Grows in place, so that a large table moves by pages and leaves no hole behind: packs the entries at the end, then
    /// deals them out from the front.
    #[cold]
    fn grow(&mut self) {
        self.places = (self.places + self.places * self.growth.grow_16ths / 16).max(PLACES_MIN);
        let before = self.entries.len();
        self.lengthen(self.places.max(before));
        // No branch depends on where the gaps are: they are random.
        let mut packed = self.entries.len();
        for at in (0..before).rev() {
            let entry = self.entries[at];
            self.entries[packed - 1] = entry;
            packed -= usize::from(!entry.is_empty());
        }
        self.entries[..packed].fill(E::EMPTY);
        self.deal(packed);
    }

    /// Puts the entries from `packed` on where they belong; all before are gaps.
    fn deal(&mut self, mut packed: usize) {
        let mut next = 0;
        while packed < self.entries.len() {
            let entry = std::mem::replace(&mut self.entries[packed], E::EMPTY);
            let place = self.place(entry.tag()).max(next);
            if place > packed {
                // The last ones need more room than there is.
                let (length, missing) = (self.entries.len(), place - packed);
                self.lengthen(length + missing);
                self.entries.copy_within(packed..length, place);
                self.entries[packed..place].fill(E::EMPTY);
                packed = place;
            }
            self.entries[place] = entry;
            (next, packed) = (place + 1, packed + 1);
        }
    }

    fn lengthen(&mut self, length: usize) {
        if length > self.entries.capacity() {
            // The usual growth of a vector would double it.
            self.entries.reserve_exact(length + length / 1024 + PLACES_MIN - self.entries.len());
        }
        self.entries.resize(length, E::EMPTY);
    }

    #[inline]
    fn place(&self, tag: u32) -> usize {
        ((u64::from(tag) * self.places as u64) >> 32) as usize
    }

    pub(super) fn bytes(&self) -> usize {
        self.entries.capacity() * size_of::<E>()
    }
}

/// An entry whose key is kept with the node.
#[derive(Clone, Copy, Debug)]
pub(super) struct Tagged(u64);

impl Tagged {
    #[inline]
    pub(super) fn new(tag: u32, node: Node) -> Self {
        Self(u64::from(tag) << 32 | u64::from(node))
    }

    #[inline]
    pub(super) fn node(self) -> Node {
        self.0 as Node
    }
}

impl Entry for Tagged {
    /// No node has this number.
    const EMPTY: Self = Self(u64::MAX);

    #[inline]
    fn tag(self) -> u32 {
        (self.0 >> 32) as u32
    }

    #[inline]
    fn is_empty(self) -> bool {
        self.0 == u64::MAX
    }
}

/// An entry that holds its whole key, scrambled, in twelve bytes.
#[derive(Clone, Copy, Debug)]
pub(super) struct Named {
    high: u32,
    low: u32,
    node: Node,
}

impl Named {
    #[inline]
    pub(super) fn new(key: u64, node: Node) -> Self {
        Self { high: (key >> 32) as u32, low: key as u32, node }
    }

    #[inline]
    pub(super) fn key(self) -> u64 {
        u64::from(self.high) << 32 | u64::from(self.low)
    }

    #[inline]
    pub(super) fn node(self) -> Node {
        self.node
    }
}

impl Entry for Named {
    const EMPTY: Self = Self { high: u32::MAX, low: u32::MAX, node: Node::MAX };

    #[inline]
    fn tag(self) -> u32 {
        self.high
    }

    #[inline]
    fn is_empty(self) -> bool {
        self.node == Node::MAX
    }
}

#[cfg(test)]
mod tests {
    use std::collections::HashMap;

    use proptest::prelude::*;

    use super::*;

    const TIGHT: Growth = Growth { full_16ths: 14, grow_16ths: 2 };

    fn find(table: &Table<Named>, key: u64) -> Option<Node> {
        table.find((key >> 32) as u32, |entry| entry.key() == key).map(Named::node)
    }

    fn insert(table: &mut Table<Named>, key: u64, node: Node) {
        if let Err(at) = table.position((key >> 32) as u32, |entry| entry.key() == key) {
            table.insert(at, Named::new(key, node));
        }
    }

    fn remove(table: &mut Table<Named>, key: u64) -> Option<Node> {
        table.remove((key >> 32) as u32, |entry| entry.key() == key).map(Named::node)
    }

    /// Keys that crowd: few tags, among them the smallest and the largest.
    fn keys() -> impl Strategy<Value = u64> {
        let tags = prop_oneof![Just(0), Just(u32::MAX), Just(u32::MAX - 1), 0_u32..8, any::<u32>()];
        (tags, prop_oneof![Just(0), Just(u32::MAX), 0_u32..4])
            .prop_map(|(tag, low)| u64::from(tag) << 32 | u64::from(low))
    }

    proptest! {
        #![proptest_config(ProptestConfig { failure_persistence: None, ..ProptestConfig::with_cases(500) })]

        #[test]
        fn a_table_holds_what_a_map_holds(moves in proptest::collection::vec((keys(), any::<bool>()), 0..300)) {
            let (mut table, mut map) = (Table::new(TIGHT), HashMap::new());
            for (node, (key, adds)) in moves.iter().enumerate() {
                if *adds {
                    insert(&mut table, *key, node as Node);
                    map.entry(*key).or_insert(node as Node);
                } else {
                    prop_assert_eq!(remove(&mut table, *key), map.remove(key));
                }
            }
            for (key, _) in &moves {
                prop_assert_eq!(find(&table, *key), map.get(key).copied());
            }
            let mut held: Vec<u64> = table.iter().map(Named::key).collect();
            let mut expected: Vec<u64> = map.into_keys().collect();
            held.sort_unstable();
            expected.sort_unstable();
            prop_assert_eq!(held, expected);
        }
    }

    #[test]
    fn a_table_is_never_larger_than_its_growth_says() {
        let mut table = Table::new(TIGHT);
        let mut key = 1_u64;
        for count in 1..20_000 {
            key = key.wrapping_mul(0x9e37_79b9_7f4a_7c15) ^ (key >> 29);
            insert(&mut table, key, count);
            assert!(count < 1_000 || table.bytes() as f64 <= 16.0 * f64::from(count), "{count}: {}", table.bytes());
        }
    }
}
