//! Growing pauses between attempts.

use std::time::Duration;

/// Doubles from the first pause up to the last; starts over after a success.
#[derive(Clone, Copy, Debug)]
pub struct Backoff {
    first: Duration,
    last: Duration,
    next: Duration,
}

impl Backoff {
    /// Pauses in seconds, finite and positive as the configuration has checked; anything else counts as no pause.
    pub fn new(first_s: f64, last_s: f64) -> Self {
        let first = seconds(first_s);
        Self { first, last: seconds(last_s).max(first), next: first }
    }

    /// The pause to make now; the next one is longer.
    pub fn grow(&mut self) -> Duration {
        let pause = self.next;
        self.next = (pause * 2).min(self.last);
        pause
    }

    pub fn reset(&mut self) {
        self.next = self.first;
    }
}

/// A configured number of seconds as a duration.
pub fn seconds(seconds: f64) -> Duration {
    Duration::try_from_secs_f64(seconds).unwrap_or_default()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pauses_double_up_to_the_last_and_start_over_after_a_success() {
        let mut backoff = Backoff::new(0.5, 2.0);
        let pauses: Vec<f64> = (0..4).map(|_| backoff.grow().as_secs_f64()).collect();
        assert_eq!(pauses, [0.5, 1.0, 2.0, 2.0]);
        backoff.reset();
        assert_eq!(backoff.grow(), seconds(0.5));
    }
}
