//! Blocks of running sequences: taking, announcing and giving them back.

use super::{CacheEvent, Engine, SequenceId, State};

impl Engine {
    /// Adds blocks, pre-empting from the end of the running order; false when the sequence itself had to go.
    pub(super) fn grow(&mut self, id: SequenceId, count: usize, preempted: &mut Vec<SequenceId>) -> bool {
        while self.pool.free() < count {
            let victim = self.last_running();
            self.preempt(victim);
            preempted.push(victim);
            if victim == id {
                return false;
            }
        }
        self.allocate(id, count);
        true
    }

    /// Takes `count` free blocks for a sequence. What they cached goes down a tier, where there is one.
    pub(super) fn allocate(&mut self, id: SequenceId, count: usize) {
        let sequence = self.sequences.get_mut(&id).expect("a running sequence");
        for _ in 0..count {
            let (block, evicted) = self.pool.take();
            sequence.blocks.push(block);
            let Some(evicted) = evicted else { continue };
            if evicted.last {
                self.tiers.keep(evicted.hash, &mut self.events);
            }
            self.events.push(CacheEvent::Removed { hash: evicted.hash });
        }
    }

    /// Puts blocks that became full into the cache and announces them.
    pub(super) fn register(&mut self, id: SequenceId, computed: u64) {
        let sequence = self.sequences.get_mut(&id).expect("a running sequence");
        let first = sequence.registered;
        let full = (computed / u64::from(self.config.block_size)) as usize;
        let full = full.min(sequence.request.hashes.len());
        if full <= first {
            return;
        }
        self.pool.register(&sequence.blocks[first..full], &sequence.request.hashes[first..full]);
        sequence.registered = full;
        self.events.push(CacheEvent::Stored { sequence: id, first: first as u32, count: (full - first) as u32 });
    }

    /// The sequence admitted last: an unfinished prefill, or the newest that decodes.
    fn last_running(&self) -> SequenceId {
        let last = self.prefilling.last_key_value().or_else(|| self.decoding.last_key_value());
        *last.expect("blocks are missing, so somebody holds them").1
    }

    pub(super) fn preempt(&mut self, id: SequenceId) {
        self.leave(id);
        self.counters.preemptions += 1;
        let sequence = self.sequences.get_mut(&id).expect("a running sequence");
        sequence.state = State::Waiting;
        sequence.computed = 0;
        self.waiting.push_front(id);
    }

    /// Takes a sequence out of the running ones and gives its blocks back.
    pub(super) fn leave(&mut self, id: SequenceId) {
        let sequence = self.sequences.get_mut(&id).expect("a running sequence");
        if sequence.state == State::Decode {
            let passed = sequence.passed(self.tick);
            self.decoding.remove(&sequence.order);
            self.context_tokens -= sequence.computed + passed;
            sequence.emitted += passed;
        } else {
            self.prefilling.remove(&sequence.order);
        }
        self.adapters.leave(sequence.request.adapter.as_ref());
        self.pool.release(&sequence.blocks);
        sequence.blocks.clear();
        sequence.registered = 0;
    }
}
