//! A histogram whose bounds grow by 2 %: gaps between tokens of millions of answers in a few kilobytes.

/// Upper bound of the first bin, in seconds; everything below falls into it.
const FIRST_S: f64 = 1e-5;
const GROWTH: f64 = 1.02;
/// Enough for 10,000 s; longer values fall into the last bin.
const BINS: usize = 1050;

#[derive(Debug)]
pub struct Histogram {
    bounds: Vec<f64>,
    counts: Vec<u64>,
    /// Bin of the value before: neighbouring steps of an engine last about as long.
    last: usize,
}

impl Default for Histogram {
    fn default() -> Self {
        let bounds = (0..BINS).scan(FIRST_S, |bound, _| {
            let this = *bound;
            *bound *= GROWTH;
            Some(this)
        });
        Self { bounds: bounds.collect(), counts: vec![0; BINS], last: 0 }
    }
}

impl Histogram {
    /// Counts `count` values of `seconds`.
    pub fn add(&mut self, seconds: f64, count: u64) {
        let fits = seconds <= self.bounds[self.last] && (self.last == 0 || seconds > self.bounds[self.last - 1]);
        if !fits {
            self.last = self.bounds.partition_point(|bound| *bound < seconds).min(BINS - 1);
        }
        self.counts[self.last] += count;
    }

    /// Bins that are not empty: upper bound in seconds and count.
    pub fn bins(&self) -> Vec<(f64, u64)> {
        let bins = self.bounds.iter().copied().zip(self.counts.iter().copied());
        bins.filter(|(_, count)| *count > 0).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_value_lies_under_its_bound_and_at_most_two_percent_below() {
        let mut histogram = Histogram::default();
        for seconds in [0.0, 0.011, 0.025, 0.0251, 3.0] {
            histogram.add(seconds, 2);
        }
        let bins = histogram.bins();
        assert_eq!(bins.iter().map(|(_, count)| count).sum::<u64>(), 10);
        assert!(
            bins[1..]
                .iter()
                .zip([0.011, 0.025, 3.0])
                .all(|((bound, _), value)| { *bound >= value && *bound <= value * GROWTH })
        );
    }
}
