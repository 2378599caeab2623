//! One step: decodes, then prompts under way, then admissions.

use super::{Admitted, CacheEvent, Engine, SequenceId, State, StepResult};

/// Prefill work of one step, as it adds up.
#[derive(Default)]
struct Prefill {
    room: u64,
    tokens: u64,
    pairs: f64,
    complete: Vec<SequenceId>,
}

impl Prefill {
    /// Takes note of `chunk` tokens computed behind `context` earlier ones.
    fn add(&mut self, chunk: u64, context: u64) {
        self.room -= chunk;
        self.tokens += chunk;
        self.pairs += chunk as f64 * (context as f64 + 0.5 * (chunk as f64 + 1.0));
    }
}

impl Engine {
    /// Schedules once and accounts for it. Without work the result is empty and has the base duration.
    pub fn step(&mut self) -> StepResult {
        let mut preempted = Vec::new();
        let mut load_s = 0.0;
        let ending = self.advance_decodes(&mut preempted);
        let decodes = self.decoding.len() as u64;
        let room = u64::from(self.config.max_batched_tokens) - decodes;
        let mut prefill = Prefill { room, ..Prefill::default() };
        self.continue_prefills(&mut prefill, &mut preempted);
        let admitted = if preempted.is_empty() { self.admit(&mut prefill, &mut load_s) } else { Vec::new() };
        self.tick += 1;
        self.context_tokens += decodes;
        let context_tokens = self.context_tokens;
        let finished = self.finish(ending, &prefill.complete);
        self.counters.steps += 1;
        self.counters.generated_tokens += decodes + prefill.complete.len() as u64;
        self.counters.computed_tokens += prefill.tokens;
        self.counters.finished += finished.len() as u64;
        let duration_s = self.config.latency.step_s(prefill.tokens, prefill.pairs, decodes, context_tokens) + load_s;
        StepResult {
            duration_s,
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

    // Prefill. At most one prompt is unfinished between steps: a chunk ends early only when the budget is used up.

    fn continue_prefills(&mut self, prefill: &mut Prefill, preempted: &mut Vec<SequenceId>) {
        if self.prefilling.is_empty() {
            return;
        }
        let ids: Vec<SequenceId> = self.prefilling.values().copied().collect();
        for id in ids {
            if prefill.room > 0 && self.sequences[&id].state == State::Prefill {
                self.compute(id, prefill, preempted);
            }
        }
    }

    /// Admits waiting sequences in order until something is used up or the first does not fit. One that finds all adapter
    /// slots in use lets those behind it pass.
    fn admit(&mut self, prefill: &mut Prefill, load_s: &mut f64) -> Vec<Admitted> {
        let mut admitted = Vec::new();
        let size = u64::from(self.config.block_size);
        let mut place = 0;
        while let Some(id) = self.waiting.get(place).copied()
            && prefill.room > 0
            && self.running() < self.config.max_sequences as usize
        {
            let sequence = &self.sequences[&id];
            if !self.adapters.has_room(sequence.request.adapter.as_ref()) {
                place += 1;
                continue;
            }
            let total = sequence.known_tokens();
            // At least one token is always computed: that is why an exact multiple hits one block less.
            let limit = if sequence.request.reads_cache { (total - 1) / size } else { 0 } as usize;
            let hashes = &sequence.request.hashes[..limit.min(sequence.request.hashes.len())];
            let hits = self.pool.lookup(hashes);
            let loads = self.tiers.lookup(&hashes[hits.len()..]);
            let needed = total.div_ceil(size) as usize - hits.len();
            if needed > self.pool.free() - self.pool.idle(&hits) {
                break;
            }
            self.waiting.remove(place);
            let on_device = hits.len();
            let cached_tokens = self.enter(id, hits, on_device + loads.blocks());
            let latency = self.config.latency;
            *load_s += latency.host_token_s * (loads.host as u64 * size) as f64;
            *load_s += latency.disk_token_s * (loads.disk as u64 * size) as f64;
            self.load(id, on_device, loads.blocks());
            if self.adapters.enter(self.sequences[&id].request.adapter.as_ref()) {
                self.counters.adapter_loads += 1;
                *load_s += latency.adapter_s;
            }
            admitted.push(Admitted { sequence: id, cached_tokens });
            self.compute(id, prefill, &mut Vec::new());
        }
        admitted
    }

    /// Lets a sequence run on blocks found in the cache; `cached` blocks will be, once it has loaded the others. Returns the
    /// cached tokens of its first admission.
    fn enter(&mut self, id: SequenceId, hits: Vec<u32>, cached: usize) -> u32 {
        self.pool.touch(&hits);
        self.admissions += 1;
        let sequence = self.sequences.get_mut(&id).expect("a waiting sequence");
        sequence.order = self.admissions;
        sequence.state = State::Prefill;
        sequence.registered = hits.len();
        sequence.computed = hits.len() as u64 * u64::from(self.config.block_size);
        sequence.blocks = hits;
        self.prefilling.insert(sequence.order, id);
        if let Some(known) = sequence.cached_tokens {
            return known; // Pre-empted before: only the first admission is reported and counted.
        }
        let cached_tokens = cached as u32 * self.config.block_size;
        sequence.cached_tokens = Some(cached_tokens);
        let total = sequence.known_tokens();
        self.counters.prompt_tokens += total;
        if sequence.request.reads_cache {
            self.counters.queried_tokens += total;
            self.counters.hit_tokens += u64::from(cached_tokens);
        }
        cached_tokens
    }

    /// Brings `count` blocks behind the first `first` of a sequence from a slower tier onto the device.
    fn load(&mut self, id: SequenceId, first: usize, count: usize) {
        if count == 0 {
            return;
        }
        let hashes = std::sync::Arc::clone(&self.sequences[&id].request.hashes);
        self.tiers.used(&hashes[first..first + count]);
        self.allocate(id, count);
        let tokens = (first + count) as u64 * u64::from(self.config.block_size);
        self.sequences.get_mut(&id).expect("an admitted sequence").computed = tokens;
        self.register(id, tokens);
        self.counters.loaded_tokens += count as u64 * u64::from(self.config.block_size);
    }

    /// Computes the next chunk of a prompt, unless the sequence finds no block and loses its own instead.
    fn compute(&mut self, id: SequenceId, prefill: &mut Prefill, preempted: &mut Vec<SequenceId>) {
        let sequence = &self.sequences[&id];
        let (total, context) = (sequence.known_tokens(), sequence.computed);
        let chunk = (total - context).min(prefill.room);
        let after = context + chunk;
        let blocks = after.div_ceil(u64::from(self.config.block_size)) as usize;
        let missing = blocks.saturating_sub(sequence.blocks.len());
        if missing > 0 && !self.grow(id, missing, preempted) {
            return;
        }
        prefill.add(chunk, context);
        self.sequences.get_mut(&id).expect("a running sequence").computed = after;
        self.register(id, after);
        if after == total {
            prefill.complete.push(id);
        }
    }

    // Blocks

    /// Adds blocks, pre-empting from the end of the running order; false when the sequence itself had to go.
    fn grow(&mut self, id: SequenceId, count: usize, preempted: &mut Vec<SequenceId>) -> bool {
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
    fn allocate(&mut self, id: SequenceId, count: usize) {
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
    fn register(&mut self, id: SequenceId, computed: u64) {
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
