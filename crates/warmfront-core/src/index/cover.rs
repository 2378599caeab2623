//! Sets of blocks that are unions of prefixes, with the count that taking a prefix away needs.
//!
//! A block that is in such a set stands for one reason at least: a path ends at it, or the block behind it is in the set.
//! Only reasons beyond the first are counted, and those exist where paths branch or end early. Adding and removing a path
//! therefore cost what it does not share with others, however many others there are.
//!
//! What one would get wrong: paths must be chains from the first block on. Then whatever precedes a block of the set is in
//! it too.

use super::arena::Node;
use super::hash::FastMap;
use super::path::Path;
use super::plane::Plane;
use crate::mailbox::Slot;

/// Reasons beyond the first, by node; the set itself is a slot's bits of a plane.
#[derive(Debug, Default)]
pub(super) struct Cover {
    more: FastMap<Node, u32>,
}

impl Cover {
    /// Adds a path. Returns how many of its blocks were not in the set.
    pub(super) fn add(&mut self, plane: &mut Plane, stride: usize, path: &Path, slot: Slot) -> u32 {
        let mut added = 0;
        for node in path.backwards(path.len()) {
            if plane.set(stride, node, slot) {
                *self.more.entry(node).or_insert(0) += 1;
                break;
            }
            added += 1;
        }
        added
    }

    /// Takes one reason from a block that is in the set. True when that was the last one: the block is out, and one
    /// reason is to be taken from the block before it.
    #[inline]
    pub(super) fn leave(&mut self, plane: &mut Plane, stride: usize, node: Node, slot: Slot) -> bool {
        if !self.more.is_empty()
            && let Some(more) = self.more.get_mut(&node)
        {
            *more -= 1;
            if *more == 0 {
                self.more.remove(&node);
            }
            return false;
        }
        plane.clear(stride, node, slot);
        true
    }

    pub(super) fn bytes(&self) -> usize {
        self.more.allocation_size()
    }
}
