//! Appointments of decoding sequences: at which step each must be looked at again.

use super::SequenceId;

/// Order of admission, and the sequence: appointments of one step are served in this order.
pub(super) type Appointment = (u64, SequenceId);

/// A ring with one bucket a step. No appointment lies further ahead than a block has tokens.
#[derive(Debug)]
pub(super) struct Due {
    buckets: Vec<Vec<Appointment>>,
}

impl Due {
    pub(super) fn new(block_size: u32) -> Self {
        Self { buckets: vec![Vec::new(); block_size as usize + 1] }
    }

    fn place(&self, tick: u64) -> usize {
        (tick % self.buckets.len() as u64) as usize
    }

    pub(super) fn add(&mut self, tick: u64, appointment: Appointment) {
        let place = self.place(tick);
        self.buckets[place].push(appointment);
    }

    /// Takes the appointments of a step, in order. Some may be stale.
    pub(super) fn take(&mut self, tick: u64) -> Vec<Appointment> {
        let place = self.place(tick);
        let mut bucket = std::mem::take(&mut self.buckets[place]);
        bucket.sort_unstable();
        bucket
    }

    /// Gives the memory of a served bucket back.
    pub(super) fn recycle(&mut self, tick: u64, mut bucket: Vec<Appointment>) {
        bucket.clear();
        let place = self.place(tick);
        self.buckets[place] = bucket;
    }

    /// Steps from `tick` on without any appointment.
    pub(super) fn free_run(&self, tick: u64) -> u64 {
        let ahead = 0..self.buckets.len() as u64;
        ahead.take_while(|ahead| self.buckets[self.place(tick + ahead)].is_empty()).count() as u64
    }
}
