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

/// An odd number near the golden ratio of 2^64.
const ODD: u64 = 0x9e37_79b9_7f4a_7c15;

/// What undoes a multiplication by [`ODD`].
const ODD_INVERSE: u64 = inverse(ODD);

/// Spreads a 64-bit key over its high half, so that no two keys become one.
#[inline]
pub(super) fn scramble(key: u64) -> u64 {
    (key ^ (key >> 32)).wrapping_mul(ODD)
}

/// The key of which [`scramble`] made this.
pub(super) fn unscramble(scrambled: u64) -> u64 {
    let key = scrambled.wrapping_mul(ODD_INVERSE);
    key ^ (key >> 32)
}

/// Newton's method: each step doubles the number of right bits, and an odd number is its own inverse in three.
const fn inverse(odd: u64) -> u64 {
    let mut inverse = odd;
    let mut right_bits = 3;
    while right_bits < 64 {
        inverse = inverse.wrapping_mul(2_u64.wrapping_sub(odd.wrapping_mul(inverse)));
        right_bits *= 2;
    }
    inverse
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn scrambling_is_undone() {
        for key in [0, 1, 2, 0xffff_ffff, 1 << 32, 1 << 63, u64::MAX, 0x0123_4567_89ab_cdef] {
            assert_eq!(unscramble(scramble(key)), key);
        }
    }
}
