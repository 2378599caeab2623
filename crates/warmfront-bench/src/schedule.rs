//! Steady departures: so many a second, each at a random point of its own equal share of time.
//!
//! What one would get wrong: departures at exact intervals. Streams that send a token every 20 ms and begin every 4 ms
//! fall into five groups that send at the same instants, and the harness measures its own herd. Bursts of a Poisson
//! process are no better here: the number of open streams would wander.

use std::time::{Duration, Instant};

use crate::text::Random;

/// Hands out one departure after the other.
pub struct Schedule {
    start: Instant,
    per_s: f64,
    number: u64,
    random: Random,
    due: Instant,
}

impl Schedule {
    /// The first departure lies within the first `1 / per_s` seconds after `start`; `per_s` is above zero.
    pub fn new(start: Instant, per_s: f64, seed: u64) -> Self {
        let mut schedule = Self { start, per_s, number: 0, random: Random::new(seed), due: start };
        schedule.due = schedule.next_due();
        schedule
    }

    /// When the next request leaves.
    pub fn due(&self) -> Instant {
        self.due
    }

    /// Takes the next departure if it is due at `now`; tells when it was due.
    pub fn take(&mut self, now: Instant) -> Option<Instant> {
        let due = self.due;
        if due > now {
            return None;
        }
        self.number += 1;
        self.due = self.next_due();
        Some(due)
    }

    fn next_due(&mut self) -> Instant {
        self.start + Duration::from_secs_f64((self.number as f64 + self.random.unit()) / self.per_s)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const TOKEN_MS: f64 = 20.0;

    /// Seconds after the start at which requests leave, up to `until_s`.
    fn departures(per_s: f64, seed: u64, until_s: f64) -> Vec<f64> {
        let start = Instant::now();
        let mut schedule = Schedule::new(start, per_s, seed);
        let end = start + Duration::from_secs_f64(until_s);
        std::iter::from_fn(|| schedule.take(end)).map(|due| (due - start).as_secs_f64()).collect()
    }

    #[test]
    fn every_share_of_time_has_one_departure() {
        let due_s = departures(250.0, 1, 4.0);
        assert_eq!(due_s.len(), 1000);
        for (number, at_s) in due_s.iter().enumerate() {
            assert_eq!((at_s * 250.0) as usize, number, "departure at {at_s} s");
        }
    }

    #[test]
    fn the_tokens_of_streams_that_begin_so_are_spread_over_their_period() {
        let mut counts = [0_u32; 10];
        for at_s in departures(250.0, 1, 4.0) {
            counts[(at_s * 1000.0 % TOKEN_MS / TOKEN_MS * 10.0) as usize] += 1;
        }
        assert!(counts.iter().all(|count| (60..140).contains(count)), "{counts:?}");
    }

    #[test]
    fn nothing_leaves_before_it_is_due_and_what_is_late_keeps_its_time() {
        let start = Instant::now();
        let mut schedule = Schedule::new(start, 10.0, 3);
        let first = schedule.due();
        assert_eq!(schedule.take(start), None);
        assert_eq!(schedule.take(first + Duration::from_secs(1)), Some(first));
        assert!(schedule.due() > first);
    }

    #[test]
    fn a_seed_repeats_its_departures() {
        assert_eq!(departures(50.0, 7, 1.0), departures(50.0, 7, 1.0));
        assert_ne!(departures(50.0, 7, 1.0), departures(50.0, 8, 1.0));
    }
}
