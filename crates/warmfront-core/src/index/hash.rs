//! Hash maps for keys that are hashes or small numbers already.
//!
//! Engine hashes may be chosen by an adversary or be plain counters (engines that are not vLLM), so they are mixed once
//! more; a multiply and a fold spread both.

use std::hash::{BuildHasherDefault, Hasher};

/// A map keyed by hashes and small numbers.
pub type FastMap<K, V> = hashbrown::HashMap<K, V, BuildHasherDefault<Mix>>;

/// Spreads a 64-bit key over the whole word.
#[inline]
pub(super) fn mix(key: u64) -> u64 {
    let product = u128::from(key ^ 0x9e37_79b9_7f4a_7c15) * 0xd6e8_feb8_6659_fd93_u128;
    (product as u64) ^ ((product >> 64) as u64)
}

/// The hasher of [`FastMap`].
#[derive(Clone, Copy, Debug, Default)]
pub struct Mix(u64);

impl Hasher for Mix {
    fn write(&mut self, bytes: &[u8]) {
        for byte in bytes {
            self.write_u64(u64::from(*byte));
        }
    }

    fn write_u8(&mut self, value: u8) {
        self.write_u64(u64::from(value));
    }

    fn write_u32(&mut self, value: u32) {
        self.write_u64(u64::from(value));
    }

    #[inline]
    fn write_u64(&mut self, value: u64) {
        self.0 = mix(self.0.rotate_left(23) ^ value);
    }

    fn finish(&self) -> u64 {
        self.0
    }
}
