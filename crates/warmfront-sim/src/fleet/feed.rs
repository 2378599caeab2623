//! KV events on their way from engines to the index: late, and some lost.
//!
//! What is lost shows as a gap in the numbers, and the core's own rule says what a gap costs ([`Sequence`] without a replay
//! endpoint). Batches are applied no earlier than anybody looks: nothing but a
//! lookup or a dispatch can tell the difference.

use std::collections::VecDeque;

use bytes::Bytes;
use warmfront_core::index::{FastMap, Index};
use warmfront_core::kv::sequence::{Action, Input, Sequence};
use warmfront_core::kv::wire::EventBatch;
use warmfront_core::mailbox::Slot;

/// One replica's stream as the router receives it.
#[derive(Debug)]
struct Stream {
    sequence: Sequence,
    /// Number of the next batch that the engine publishes.
    next: u64,
    /// Arrived batches that are not applied yet.
    batches: FastMap<u64, EventBatch>,
}

#[derive(Debug)]
struct Delivery {
    at_s: f64,
    slot: Slot,
    /// Process that sent it: what a crashed engine sent last still arrives, a restarted one begins anew.
    incarnation: u64,
    number: u64,
    batch: EventBatch,
}

/// All streams.
#[derive(Debug)]
pub(super) struct Feed {
    delay_s: f64,
    loss: f64,
    random: u64,
    streams: FastMap<Slot, (u64, Stream)>,
    /// In order of arrival, since all are equally late.
    under_way: VecDeque<Delivery>,
    lost: u64,
}

impl Feed {
    pub(super) fn new(delay_s: f64, loss: f64, seed: u64) -> Self {
        Self { delay_s, loss, random: seed, streams: FastMap::default(), under_way: VecDeque::new(), lost: 0 }
    }

    /// Batches that never arrived.
    pub(super) fn lost(&self) -> u64 {
        self.lost
    }

    /// Connects to a replica whose process has this number.
    pub(super) fn connect(&mut self, slot: Slot, incarnation: u64) {
        let mut sequence = Sequence::new(false);
        sequence.take(Input::Connected);
        self.streams.insert(slot, (incarnation, Stream { sequence, next: 0, batches: FastMap::default() }));
    }

    /// The replica is gone for good.
    pub(super) fn disconnect(&mut self, slot: Slot) {
        self.streams.remove(&slot);
    }

    pub(super) fn last_sequence(&self, slot: Slot) -> Option<u64> {
        self.streams.get(&slot)?.1.sequence.last()
    }

    pub(super) fn gaps(&self, slot: Slot) -> u64 {
        self.streams.get(&slot).map_or(0, |(_, stream)| stream.sequence.counts().gaps)
    }

    /// Publishes what one step changed.
    pub(super) fn publish(&mut self, slot: Slot, batch: EventBatch, now_s: f64) {
        let Some((incarnation, stream)) = self.streams.get_mut(&slot) else { return };
        let (incarnation, number) = (*incarnation, stream.next);
        stream.next += 1;
        if self.loss > 0.0 && self.draw() < self.loss {
            self.lost += 1;
            return;
        }
        self.under_way.push_back(Delivery { at_s: now_s + self.delay_s, slot, incarnation, number, batch });
    }

    /// Applies what has arrived by now.
    pub(super) fn catch_up(&mut self, index: &Index, now_s: f64) {
        while self.under_way.front().is_some_and(|delivery| delivery.at_s <= now_s)
            && let Some(delivery) = self.under_way.pop_front()
        {
            let slot = delivery.slot;
            let Some((incarnation, stream)) = self.streams.get_mut(&slot) else { continue };
            if *incarnation == delivery.incarnation {
                stream.receive(delivery, index);
                index.note_lag(slot, self.delay_s);
            }
        }
    }

    /// A number from 0 to 1; splitmix64.
    fn draw(&mut self) -> f64 {
        self.random = self.random.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut mixed = self.random;
        mixed = (mixed ^ (mixed >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        mixed = (mixed ^ (mixed >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        ((mixed ^ (mixed >> 31)) >> 11) as f64 / (1_u64 << 53) as f64
    }
}

impl Stream {
    fn receive(&mut self, delivery: Delivery, index: &Index) {
        // The rule compares payloads of one number; the number itself serves, since nothing here sends it twice.
        let payload = Bytes::copy_from_slice(&delivery.number.to_be_bytes());
        self.batches.insert(delivery.number, delivery.batch);
        for action in self.sequence.take(Input::Live { number: delivery.number, payload }) {
            match action {
                Action::Apply { number, .. } => {
                    let batch = self.batches.remove(&number).expect("it arrived and was not applied before");
                    index.apply(delivery.slot, &batch, delivery.at_s);
                }
                Action::Forget => index.forget_confirmed(delivery.slot),
                Action::Doubt => index.doubt(delivery.slot),
                Action::Trust(trusted) => index.set_stale(delivery.slot, !trusted),
                Action::Replay { .. } => unreachable!("there is no replay endpoint"),
            }
        }
    }
}
