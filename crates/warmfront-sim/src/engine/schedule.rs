//! One step: decodes, then prompts under way, then admissions.

use super::prefill::Prefill;
use super::{Engine, SequenceId, State, StepResult};

impl Engine {
    /// Schedules once and accounts for it. Without work the result is empty and has the base duration.
    pub fn step(&mut self) -> StepResult {
        let mut preempted = Vec::new();
        let ending = self.advance_decodes(&mut preempted);
        let decodes = self.decoding.len() as u64;
        let room = u64::from(self.config.max_batched_tokens) - decodes;
        let mut prefill = Prefill::new(room);
        self.continue_prefills(&mut prefill, &mut preempted);
        let admitted = if preempted.is_empty() { self.admit(&mut prefill) } else { Vec::new() };
        self.tick += 1;
        self.context_tokens += decodes;
        let context_tokens = self.context_tokens;
        let finished = self.finish(ending, &prefill.complete);
        self.counters.steps += 1;
        self.counters.generated_tokens += decodes + prefill.complete.len() as u64;
        self.counters.computed_tokens += prefill.tokens;
        self.counters.finished += finished.len() as u64;
        let compute_s = self.config.latency.step_s(prefill.tokens, prefill.pairs, decodes, context_tokens);
        StepResult {
            duration_s: compute_s + prefill.load_s,
            decodes,
            complete: prefill.complete,
            finished,
            admitted,
            preempted,
            events: std::mem::take(&mut self.events),
            prefill_tokens: prefill.tokens,
        }
    }

    /// Steps that follow in which nothing happens but one more token for every decoding sequence; at most a block's.
    pub fn quiet_steps(&self) -> u64 {
        let quiet = self.waiting.is_empty() && self.prefilling.is_empty() && self.events.is_empty();
        if quiet && !self.decoding.is_empty() { self.due.free_run(self.tick + 1) } else { 0 }
    }

    /// Duration of the quiet step `ahead`, from 1 for the next.
    pub fn quiet_step_s(&self, ahead: u64) -> f64 {
        let decodes = self.decoding.len() as u64;
        self.config.latency.step_s(0, 0.0, decodes, self.context_tokens + ahead * decodes)
    }

    /// Does `steps` quiet steps at once: what as many calls of [`Engine::step`] would do.
    pub fn skip(&mut self, steps: u64) {
        let tokens = steps * self.decoding.len() as u64;
        self.tick += steps;
        self.context_tokens += tokens;
        self.counters.steps += steps;
        self.counters.generated_tokens += tokens;
    }

    /// Gives every decoding sequence the slot of one token; returns those whose answer this token completes.
    fn advance_decodes(&mut self, preempted: &mut Vec<SequenceId>) -> Vec<SequenceId> {
        let now = self.tick + 1;
        let size = u64::from(self.config.block_size);
        let mut ending = Vec::new();
        let bucket = self.due.take(now);
        for (order, id) in &bucket {
            let Some(sequence) = self.sequences.get(id) else { continue };
            if sequence.state != State::Decode || sequence.due != now || sequence.order != *order {
                continue; // It came back with another appointment.
            }
            let passed = sequence.passed(self.tick);
            let (computed, emitted) = (sequence.computed + passed + 1, sequence.emitted + passed + 1);
            let output_tokens = u64::from(sequence.request.output_tokens);
            if computed > sequence.blocks.len() as u64 * size && !self.grow(*id, 1, preempted) {
                continue;
            }
            if computed % size == 0 {
                self.register(*id, computed);
            }
            if emitted >= output_tokens {
                ending.push(*id);
            } else {
                self.appoint(*id, now, computed, emitted);
            }
        }
        self.due.recycle(now, bucket);
        ending
    }

    /// Notes when a sequence, so far after `tick`, must be looked at again: new block, full block or end.
    fn appoint(&mut self, id: SequenceId, tick: u64, computed: u64, emitted: u64) {
        let size = u64::from(self.config.block_size);
        let Some(sequence) = self.sequences.get_mut(&id) else { return };
        let to_new_block = (size - computed % size) % size;
        let to_full_block = size - 1 - computed % size;
        let to_end = u64::from(sequence.request.output_tokens) - emitted - 1;
        sequence.due = tick + 1 + to_new_block.min(to_full_block).min(to_end);
        let (due, order) = (sequence.due, sequence.order);
        self.due.add(due, (order, id));
    }

    /// Ends answers, and lets sequences with a computed prompt sample their next token, which may end them too.
    fn finish(&mut self, mut finished: Vec<SequenceId>, complete: &[SequenceId]) -> Vec<SequenceId> {
        for id in &finished {
            self.end(*id);
        }
        let begun = finished.len();
        for id in complete {
            let sequence = self.sequences.get_mut(id).expect("a sequence of this step");
            sequence.emitted += 1;
            sequence.tick = self.tick;
            sequence.state = State::Decode;
            let (computed, emitted, order) = (sequence.computed, sequence.emitted, sequence.order);
            let ends = emitted >= u64::from(sequence.request.output_tokens);
            self.prefilling.remove(&order);
            self.decoding.insert(order, *id);
            self.context_tokens += computed;
            if ends {
                finished.push(*id);
            } else {
                self.appoint(*id, self.tick, computed, emitted);
            }
        }
        for id in &finished[begun..] {
            self.end(*id);
        }
        finished
    }

    fn end(&mut self, id: SequenceId) {
        self.leave(id);
        self.sequences.remove(&id);
    }
}
