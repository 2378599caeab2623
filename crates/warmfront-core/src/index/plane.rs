//! One bit for each (node, slot): a kind of fact.
//!
//! A plane grows when a bit is set, so a kind of fact that never occurs costs nothing.

/// Bits of all slots for each node, `stride` words a node.
#[derive(Debug, Default)]
pub(super) struct Plane {
    words: Vec<u64>,
}

impl Plane {
    #[inline]
    pub(super) fn word(&self, at: usize) -> u64 {
        self.words.get(at).copied().unwrap_or(0)
    }

    #[inline]
    pub(super) fn get(&self, stride: usize, node: u32, slot: u32) -> bool {
        self.word(position(stride, node, slot)) & bit(slot) != 0
    }

    /// Sets the bit and says whether it was set before.
    #[inline]
    pub(super) fn set(&mut self, stride: usize, node: u32, slot: u32) -> bool {
        let at = position(stride, node, slot);
        if at >= self.words.len() {
            self.words.resize((node as usize + 1) * stride, 0);
        }
        let before = self.words[at];
        self.words[at] = before | bit(slot);
        before & bit(slot) != 0
    }

    /// Clears the bit and says whether it was set before.
    #[inline]
    pub(super) fn clear(&mut self, stride: usize, node: u32, slot: u32) -> bool {
        let Some(word) = self.words.get_mut(position(stride, node, slot)) else { return false };
        let before = *word;
        *word = before & !bit(slot);
        before & bit(slot) != 0
    }

    /// No slot has the fact.
    #[inline]
    pub(super) fn is_zero(&self, stride: usize, node: u32) -> bool {
        let start = node as usize * stride;
        (start..start + stride).all(|at| self.word(at) == 0)
    }

    /// Lays the plane out anew for more slots.
    pub(super) fn restride(&mut self, from: usize, to: usize) {
        let mut words = vec![0; self.words.len() / from * to];
        for (new, old) in words.chunks_exact_mut(to).zip(self.words.chunks_exact(from)) {
            new[..from].copy_from_slice(old);
        }
        self.words = words;
    }

    pub(super) fn bytes(&self) -> usize {
        self.words.capacity() * 8
    }
}

#[inline]
fn position(stride: usize, node: u32, slot: u32) -> usize {
    node as usize * stride + slot as usize / 64
}

#[inline]
fn bit(slot: u32) -> u64 {
    1 << (slot % 64)
}
