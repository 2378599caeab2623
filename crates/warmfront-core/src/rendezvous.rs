//! Preference for one replica by key: the arithmetic of `warmfront.policy.affinity`.

/// Combines two numbers into one where every input bit matters: the finaliser of splitmix64.
#[must_use]
pub fn mix(first: u64, second: u64) -> u64 {
    let mut value = first ^ second.wrapping_mul(0x9E37_79B9_7F4A_7C15);
    value = (value ^ (value >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
    value = (value ^ (value >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
    value ^ (value >> 31)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers_are_mixed_as_every_router_mixes_them() {
        assert_eq!(mix(0, 0), 0);
        assert_eq!(mix(7, 11), 0x9EC4_421F_F2BB_3740);
    }
}
