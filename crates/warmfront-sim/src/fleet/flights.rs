//! Requests from their arrival to their end.

use std::sync::Arc;

use warmfront_core::block::SeqHash;
use warmfront_core::error::CoreError;
use warmfront_core::kv::wire::{EngineHash, EventBatch, KvEvent, Removed, Stored, Tier};
use warmfront_core::mailbox::{Basis, Event, Failure, RequestFacts, RequestId, Route, Slot, Usage};
use warmfront_core::requests::{Prompt, prefix_key};

use super::member::Work;
use super::post::Letter;
use super::{Fleet, POOL};
use crate::content::{self, Segment};
use crate::engine::{CacheEvent, EngineRequest, StepResult};

/// Times that the router is asked about one request when none of its choices can be reached; as in the live core.
const DECISIONS_MAX: usize = 3;
/// What a refused connection is called, as the live core calls it.
const UNREACHED: &str = "connect";
/// What a stream that broke is called.
const MIDSTREAM: &str = "midstream";

/// A request as it reaches the router.
#[derive(Clone, Debug)]
pub struct Arrival {
    pub id: RequestId,
    pub prompt: Vec<Segment>,
    /// Length of the answer, at least 1.
    pub output_tokens: u32,
    /// What the request says.
    pub output_tokens_max: Option<u32>,
    /// Content of the answer, when a later prompt contains it.
    pub answer: Option<u64>,
    pub adapter: Option<String>,
    pub flow: String,
    pub priority: i64,
    pub turn: u32,
    pub affinity_key: Option<u64>,
}

#[derive(Debug)]
pub(super) struct Flight {
    /// Prompt and answer.
    segments: Vec<Segment>,
    request: EngineRequest,
    slot: Option<Slot>,
    tried: Vec<Slot>,
    decisions: usize,
    cached_tokens: u32,
    has_begun: bool,
    /// When a pre-empted one produced its last token.
    paused_s: f64,
}

impl Fleet {
    /// A request reaches the router now.
    pub fn arrive(&mut self, arrival: Arrival) {
        let prompt_tokens = content::length(&arrival.prompt) as u32;
        let block_size = self.options.index.block_size;
        let mut segments = arrival.prompt;
        let answer = arrival.answer.unwrap_or_else(|| content::own_answer(arrival.id));
        segments.push(Segment { content: answer, tokens: arrival.output_tokens });
        let adapter: Option<Arc<str>> = arrival.adapter.as_deref().map(Into::into);
        let hashes = content::chain(&segments, adapter.as_deref(), self.index.hasher(), &mut self.scratch);
        let blocks = prompt_tokens / block_size;
        let of_prompt: Arc<[SeqHash]> = hashes[..blocks as usize].into();
        let hashes_by_size = vec![(block_size, of_prompt)];
        let facts = RequestFacts {
            id: arrival.id,
            time_s: self.now_s,
            pool: POOL.into(),
            model: arrival.adapter.clone().unwrap_or_else(|| POOL.into()),
            adapter: arrival.adapter,
            flow: arrival.flow,
            priority: arrival.priority,
            route: Route::Prefix,
            basis: Basis::Tokens,
            prompt_tokens,
            blocks,
            turn: arrival.turn,
            output_tokens_max: arrival.output_tokens_max,
            affinity_key: arrival.affinity_key,
            prefix_key: prefix_key(&hashes_by_size),
            stream: true,
            fallback: None,
            deadline_s: None,
        };
        let prompt = Prompt { pool: POOL.into(), tokens: prompt_tokens, reads_cache: true, hashes: hashes_by_size };
        self.table.insert(arrival.id, Arc::new(prompt));
        let request = EngineRequest {
            prompt_tokens,
            output_tokens: arrival.output_tokens,
            hashes: hashes.iter().map(|hash| hash.0).collect(),
            adapter,
            reads_cache: true,
        };
        let flight = Flight {
            segments,
            request,
            slot: None,
            tried: Vec::new(),
            decisions: 0,
            cached_tokens: 0,
            has_begun: false,
            paused_s: 0.0,
        };
        self.flights.insert(arrival.id, flight);
        self.note_imbalance();
        self.events.push(Event::Arrived(facts));
    }

    fn note_imbalance(&mut self) {
        let (mut most, mut all, mut replicas) = (0, 0, 0_u64);
        for member in self.members.iter().filter(|member| member.accepts()) {
            most = most.max(member.in_flight);
            all += member.in_flight;
            replicas += 1;
        }
        self.imbalance.push(if all == 0 { 1.0 } else { (most * replicas) as f64 / all as f64 });
    }

    /// Carries out a decision: the request goes to the first of `slots` that can be reached.
    pub fn dispatch(&mut self, id: RequestId, slots: &[Slot]) -> Result<(), CoreError> {
        self.catch_up();
        for (row, slot) in slots.iter().enumerate() {
            if row > 0 {
                self.table.dispatched_at(id, *slot, self.now_s)?;
                self.events.push(Event::Moved { id, time_s: self.now_s, slot: *slot });
            }
            let flight = self.flights.get_mut(&id).ok_or(CoreError::UnknownRequest(id))?;
            flight.tried.push(*slot);
            if self.members.get(*slot as usize).is_some_and(super::Member::accepts) {
                self.send(id, *slot);
                return Ok(());
            }
        }
        self.unreached(id)
    }

    /// The router has refused the request.
    pub fn shed(&mut self, id: RequestId) {
        self.forget(id);
        self.flights.remove(&id);
    }

    fn send(&mut self, id: RequestId, slot: Slot) {
        let member = &mut self.members[slot as usize];
        let Some(flight) = self.flights.get_mut(&id) else { return };
        flight.slot = Some(slot);
        member.in_flight += 1;
        if member.spec.rtt_s > 0.0 {
            let at_s = self.now_s + 0.5 * member.spec.rtt_s;
            self.post.send(at_s, Letter::Request { id, slot });
        } else {
            self.submit(id, slot);
        }
    }

    /// A letter has come.
    pub(super) fn arrived_at_last(&mut self) {
        match self.post.take() {
            Some(Letter::Request { id, slot }) if self.is_at(id, slot) => self.submit(id, slot),
            Some(Letter::Event { id, event }) if self.flights.contains_key(&id) => self.tell(id, *event),
            _ => {} // the engine has died meanwhile, and the request with it
        }
    }

    fn is_at(&self, id: RequestId, slot: Slot) -> bool {
        self.flights.get(&id).is_some_and(|flight| flight.slot == Some(slot))
    }

    /// The request is at its engine.
    fn submit(&mut self, id: RequestId, slot: Slot) {
        let member = &mut self.members[slot as usize];
        let (Some(flight), Some(engine)) = (self.flights.get_mut(&id), &mut member.engine) else { return };
        let request = EngineRequest { reads_cache: member.spec.caching, ..flight.request.clone() };
        if engine.submit(id, request).is_err() {
            member.in_flight -= 1;
            self.refused(id, slot);
            return;
        }
        let begins_s = match member.work {
            Work::Idle => {
                member.work = Work::Starting;
                Some(self.now_s)
            }
            Work::Quiet(_) => member.cut(self.now_s, &mut self.tally),
            Work::Starting | Work::Step(_) => None,
        };
        if let Some(at_s) = begins_s {
            self.appoint(slot, at_s);
        }
    }

    /// The engine answers that the request is longer than it takes.
    fn refused(&mut self, id: RequestId, slot: Slot) {
        self.table.withdrawn(id);
        self.forget(id);
        self.flights.remove(&id);
        self.events.push(Event::Finished { id, time_s: self.now_s, slot, status: 400, usage: None, chunks: 0 });
    }

    fn unreached(&mut self, id: RequestId) -> Result<(), CoreError> {
        let flight = self.flights.get_mut(&id).ok_or(CoreError::UnknownRequest(id))?;
        flight.decisions += 1;
        let began = flight.decisions >= DECISIONS_MAX;
        let tried = flight.tried.clone();
        self.table.withdrawn(id);
        if began {
            self.forget(id);
            self.flights.remove(&id);
        }
        let failure = Failure { error: UNREACHED.into(), ..Failure::default() };
        self.events.push(Event::Failed { id, time_s: self.now_s, failure, tried, began });
        Ok(())
    }

    /// Ends everything that a dead process was working on.
    pub(super) fn fail_all_at(&mut self, slot: Slot) {
        let lost = self.flights.iter().filter(|(_, flight)| flight.slot == Some(slot));
        let mut ids: Vec<RequestId> = lost.map(|(id, _)| *id).collect();
        ids.sort_unstable(); // the order of a map is not ours
        for id in ids {
            let Some(flight) = self.flights.remove(&id) else { continue };
            self.forget(id);
            let failure = Failure { error: MIDSTREAM.to_owned(), accepted: true, ..Failure::default() };
            self.events.push(Event::Failed { id, time_s: self.now_s, failure, tried: flight.tried, began: true });
        }
        self.members[slot as usize].in_flight = 0;
    }

    /// Lets out what a step did: events first, then tokens.
    pub(super) fn deliver(&mut self, slot: Slot, result: &StepResult) {
        let member = &self.members[slot as usize];
        if self.options.publish && member.present && !result.events.is_empty() {
            let batch = self.batch(&result.events);
            self.feed.publish(slot, batch, self.now_s);
        }
        for admitted in &result.admitted {
            if let Some(flight) = self.flights.get_mut(&admitted.sequence) {
                flight.cached_tokens = admitted.cached_tokens;
            }
        }
        for id in &result.preempted {
            if let Some(flight) = self.flights.get_mut(id) {
                flight.paused_s = self.now_s - result.duration_s;
            }
        }
        for id in &result.complete {
            self.token_after_prefill(*id, slot);
        }
        for id in &result.finished {
            self.finished(*id, slot);
        }
    }

    /// The first token, or the first after a pre-emption.
    fn token_after_prefill(&mut self, id: RequestId, slot: Slot) {
        let Some(flight) = self.flights.get_mut(&id) else { return };
        if flight.has_begun {
            let seconds = self.now_s - flight.paused_s;
            self.members[slot as usize].note_gaps(seconds, 1, &mut self.tally);
            return;
        }
        flight.has_begun = true;
        self.say(id, slot, |time_s| Event::FirstToken { id, time_s, slot });
    }

    /// Lets the router know, once the word has come that far.
    fn say(&mut self, id: RequestId, slot: Slot, event: impl FnOnce(f64) -> Event) {
        let way_s = 0.5 * self.members[slot as usize].spec.rtt_s;
        let event = event(self.now_s + way_s);
        if way_s > 0.0 {
            self.post.send(self.now_s + way_s, Letter::Event { id, event: Box::new(event) });
        } else {
            self.tell(id, event);
        }
    }

    fn tell(&mut self, id: RequestId, event: Event) {
        if matches!(event, Event::Finished { .. }) {
            self.flights.remove(&id);
            self.forget(id);
        }
        self.events.push(event);
    }

    fn finished(&mut self, id: RequestId, slot: Slot) {
        let Some(flight) = self.flights.get(&id) else { return };
        self.members[slot as usize].in_flight -= 1;
        let usage = Usage {
            prompt_tokens: Some(flight.request.prompt_tokens),
            cached_tokens: Some(flight.cached_tokens),
            output_tokens: Some(flight.request.output_tokens),
        };
        let chunks = flight.request.output_tokens - 1;
        self.say(id, slot, |time_s| Event::Finished { id, time_s, slot, status: 200, usage: Some(usage), chunks });
    }

    /// What a step changed, as an engine publishes it.
    fn batch(&self, events: &[CacheEvent]) -> EventBatch {
        let events = events.iter().map(|event| self.published(event)).collect();
        EventBatch { ts: self.now_s, events, rank: None, unknown_events: 0 }
    }

    fn published(&self, event: &CacheEvent) -> KvEvent {
        match *event {
            CacheEvent::Stored { sequence, first, count } => self.stored(sequence, first as usize, count as usize),
            CacheEvent::Removed { hash } => removed(Tier::Gpu, hash),
            CacheEvent::Dropped { tier, hash } => removed(tier, hash),
            CacheEvent::Offloaded { tier, hash } => {
                let block_hashes = vec![EngineHash(hash)];
                KvEvent::Stored(Box::new(Stored { block_hashes, tier, ..Stored::default() }))
            }
            CacheEvent::Cleared => KvEvent::Cleared,
        }
    }

    fn stored(&self, id: RequestId, first: usize, count: usize) -> KvEvent {
        let flight = self.flights.get(&id).expect("a request lives at least until its last step is let out");
        let block_size = self.options.index.block_size;
        let size = block_size as usize;
        let mut token_ids = Vec::with_capacity(count * size);
        content::write(&flight.segments, first * size..(first + count) * size, &mut token_ids);
        let hashes = &flight.request.hashes;
        KvEvent::Stored(Box::new(Stored {
            block_hashes: hashes[first..first + count].iter().map(|hash| EngineHash(*hash)).collect(),
            parent: first.checked_sub(1).map(|parent| EngineHash(hashes[parent])),
            token_ids,
            block_size,
            lora_name: flight.request.adapter.as_deref().map(Into::into),
            ..Stored::default()
        }))
    }
}

fn removed(tier: Tier, hash: u64) -> KvEvent {
    KvEvent::Removed(Removed { block_hashes: vec![EngineHash(hash)], tier, group: None })
}
