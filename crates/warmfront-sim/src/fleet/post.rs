//! What is on its way between the router and engines that are far from it.

use std::collections::BTreeMap;

use warmfront_core::mailbox::{Event, RequestId, Slot};

/// Half of a way there and back.
#[derive(Debug)]
pub(super) enum Letter {
    /// A request, towards its engine.
    Request { id: RequestId, slot: Slot },
    /// What an engine says of a request, towards the router.
    Event { id: RequestId, event: Box<Event> },
}

/// Letters by the time at which they arrive, equal ones in the order in which they were sent.
#[derive(Debug, Default)]
pub(super) struct Post {
    letters: BTreeMap<(u64, u64), Letter>,
    sent: u64,
}

impl Post {
    /// Sends a letter that arrives at `at_s`, a time from zero on.
    pub(super) fn send(&mut self, at_s: f64, letter: Letter) {
        self.sent += 1;
        self.letters.insert((at_s.to_bits(), self.sent), letter); // bits of positive numbers are ordered as they are
    }

    /// When the next letter arrives.
    pub(super) fn next_s(&self) -> Option<f64> {
        self.letters.first_key_value().map(|(key, _)| f64::from_bits(key.0))
    }

    /// Takes the next letter out.
    pub(super) fn take(&mut self) -> Option<Letter> {
        self.letters.pop_first().map(|(_, letter)| letter)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn letters_arrive_in_order_of_time_and_equal_ones_in_order_of_sending() {
        let mut post = Post::default();
        for (id, at_s) in [(1, 0.3), (2, 0.0), (3, 0.3), (4, 12.0)] {
            post.send(at_s, Letter::Request { id, slot: 0 });
        }
        let mut taken = Vec::new();
        while let (Some(at_s), Some(Letter::Request { id, .. })) = (post.next_s(), post.take()) {
            taken.push((id, at_s));
        }
        assert_eq!(taken, [(2, 0.0), (1, 0.3), (3, 0.3), (4, 12.0)]);
    }
}
