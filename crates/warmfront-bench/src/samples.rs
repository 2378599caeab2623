//! Samples of durations, kept in microseconds, and their percentiles.

use std::time::Duration;

/// Bound on kept samples of one kind; later ones are dropped.
const SAMPLES_MAX: usize = 8_000_000;

/// Keeps a duration.
pub fn push(samples_us: &mut Vec<u32>, value: Duration) {
    if samples_us.len() < SAMPLES_MAX {
        samples_us.push(u32::try_from(value.as_micros()).unwrap_or(u32::MAX));
    }
}

/// The sample below which `share` of the samples lie, in milliseconds; `None` without samples.
pub fn percentile_ms(samples_us: &mut [u32], share: f64) -> Option<f64> {
    let last = samples_us.len().checked_sub(1)?;
    let rank = (last as f64 * share).round() as usize;
    let (_, value, _) = samples_us.select_nth_unstable(rank);
    Some(f64::from(*value) / 1000.0)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn percentiles_are_samples() {
        let mut samples: Vec<u32> = (1..=101).rev().map(|value| value * 1000).collect();
        assert_eq!(percentile_ms(&mut samples, 0.5), Some(51.0));
        assert_eq!(percentile_ms(&mut samples, 0.99), Some(100.0));
        assert_eq!(percentile_ms(&mut samples, 1.0), Some(101.0));
        assert_eq!(percentile_ms(&mut [], 0.5), None);
    }

    #[test]
    fn a_duration_beyond_the_range_is_kept_as_the_largest_one() {
        let mut samples = Vec::new();
        push(&mut samples, Duration::from_micros(1500));
        push(&mut samples, Duration::from_secs(3 * 3600));
        assert_eq!(samples, [1500, u32::MAX]);
    }
}
