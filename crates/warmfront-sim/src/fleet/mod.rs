//! Many engines on virtual time, with the router's index between them.
//!
//! The host moves time with [`Fleet::advance`], which stops at the first moment at which something happens that the router
//! must see, and takes the events that happened. They are the very events of the live core, and the index, the table of
//! requests and the fleet's view are the live core's too; only sockets and clocks are missing.
//!
//! What one would get wrong: requests that are sent at one moment are all queued before an engine's next step begins, as in
//! an engine that empties its queue between steps.

mod feed;
mod flights;
mod member;
mod post;
mod tally;
mod view;

use std::collections::BinaryHeap;
use std::sync::Arc;

use arc_swap::ArcSwap;
use warmfront_core::clock::Clock;
use warmfront_core::error::CoreError;
use warmfront_core::fleet::FleetView;
use warmfront_core::index::{FastMap, Index, IndexOptions};
use warmfront_core::mailbox::{Event, RequestId, Slot};
use warmfront_core::overlap::PoolOverlap;
use warmfront_core::requests::{Prompt, RequestTable};

use crate::engine::{Engine, EngineConfig, EngineError};
use feed::Feed;
use flights::Flight;
use member::{Appointment, Member, Spec, Work};
use post::Post;
use tally::Tally;

pub use flights::Arrival;
pub use tally::Traced;

/// Name of the only pool.
pub const POOL: &str = "lab";

/// How a fleet is seen.
#[derive(Clone, Debug)]
pub struct FleetOptions {
    pub index: IndexOptions,
    /// Whether engines publish KV events.
    pub publish: bool,
    /// Seconds from the end of a step until its events are applied.
    pub delay_s: f64,
    /// Share of batches that never arrive.
    pub loss: f64,
    /// Of what is random here: which batches are lost.
    pub seed: u64,
    /// Whether every step is written down, for comparisons.
    pub trace: bool,
    /// Names under which adapters are served, besides the base model's, which is the pool's.
    pub adapters: Vec<String>,
}

/// Load of one engine at this moment.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Load {
    pub running: u64,
    pub waiting: u64,
    /// Share of KV blocks held by running requests.
    pub kv_usage: f64,
}

/// Engines, index and clock.
#[derive(Debug)]
pub struct Fleet {
    options: FleetOptions,
    now_s: f64,
    members: Vec<Member>,
    appointments: BinaryHeap<Appointment>,
    appointed: u64,
    post: Post,
    index: Arc<Index>,
    feed: Feed,
    view: Arc<ArcSwap<FleetView>>,
    version: u64,
    table: RequestTable,
    flights: FastMap<RequestId, Flight>,
    /// What has happened and was not taken yet.
    events: Vec<Event>,
    /// Prompts of requests that ended since time last moved.
    ended: FastMap<RequestId, Arc<Prompt>>,
    tally: Tally,
    imbalance: Vec<f64>,
    scratch: Vec<u32>,
}

impl Fleet {
    /// Without engines, at time zero.
    pub fn new(options: FleetOptions) -> Self {
        let view = Arc::new(ArcSwap::from_pointee(FleetView::default()));
        Self {
            now_s: 0.0,
            members: Vec::new(),
            appointments: BinaryHeap::new(),
            appointed: 0,
            post: Post::default(),
            index: Arc::new(Index::new(options.index)),
            feed: Feed::new(options.delay_s, options.loss, options.seed),
            // The table reads its clock only for callers that do not say what time it is.
            table: RequestTable::new(Arc::clone(&view), Clock::start()),
            view,
            version: 0,
            flights: FastMap::default(),
            events: Vec::new(),
            ended: FastMap::default(),
            tally: Tally::new(options.trace),
            imbalance: Vec::new(),
            scratch: Vec::new(),
            options,
        }
    }

    pub fn now_s(&self) -> f64 {
        self.now_s
    }

    // -- who is there. The router learns of it with the next `probe`.

    /// Adds a replica whose process does not run yet, `rtt_s` there and back from the router. Slots are never given
    /// twice.
    pub fn join(
        &mut self,
        config: EngineConfig,
        caching: bool,
        lacks: Vec<String>,
        rtt_s: f64,
    ) -> Result<Slot, EngineError> {
        Engine::new(config.clone())?;
        let slot = self.members.len() as Slot;
        let id = format!("http://engine-{slot}:8000");
        self.members.push(Member::new(slot, Spec { id, config, caching, lacks, rtt_s }));
        Ok(slot)
    }

    /// Whether the replica reuses what it holds, from the next request on. What it publishes stays the same.
    pub fn set_caching(&mut self, slot: Slot, caching: bool) {
        if let Some(member) = self.members.get_mut(slot as usize) {
            member.spec.caching = caching;
        }
    }

    /// The replica's process runs from now on, with an empty cache.
    pub fn start(&mut self, slot: Slot) {
        let Some(member) = self.members.get_mut(slot as usize).filter(|member| member.present) else { return };
        member.engine = Some(Engine::new(member.spec.config.clone()).expect("checked when it joined"));
        member.incarnation += 1;
        let blocks = u64::from(member.spec.config.blocks - 1);
        let (feed, incarnation) = (self.options.kind_of_feed(), member.incarnation);
        self.index.add_slot(slot, feed, Some(blocks));
        if self.options.publish {
            self.feed.connect(slot, incarnation);
        }
    }

    /// The replica leaves the fleet: nothing is sent there any more, what runs there ends in peace.
    pub fn leave(&mut self, slot: Slot) {
        self.catch_up();
        if let Some(member) = self.members.get_mut(slot as usize) {
            member.present = false;
            self.feed.disconnect(slot);
            self.index.remove_slot(slot);
        }
    }

    /// The replica's process dies, and all requests there with it.
    pub fn crash(&mut self, slot: Slot) {
        self.catch_up();
        let Some(member) = self.members.get_mut(slot as usize) else { return };
        member.settle(self.now_s, &mut self.tally);
        if let Some(engine) = member.engine.take() {
            member.preemptions += engine.counters().preemptions;
        }
        member.work = Work::Idle;
        member.epoch += 1;
        if self.options.publish {
            self.index.set_stale(slot, true);
        }
        self.fail_all_at(slot);
    }

    /// Slots ever given.
    pub fn slots(&self) -> usize {
        self.members.len()
    }

    /// Load of every slot; zeros where no process runs.
    pub fn loads(&self) -> Vec<Load> {
        self.members.iter().map(|member| member.engine.as_ref().map_or_else(Load::default, Load::of)).collect()
    }

    // -- time

    /// Moves time to `until_s`, or to the first moment before it at which there are events to take. Returns that time.
    pub fn advance(&mut self, until_s: f64) -> f64 {
        self.ended.clear();
        loop {
            let work = self.appointments.peek().copied().filter(|next| next.at_s <= until_s);
            let post_s = self.post.next_s().filter(|at_s| *at_s <= until_s);
            // What arrives at the moment at which a step begins is there when it does.
            let is_post = post_s.is_some_and(|at_s| work.is_none_or(|next| at_s <= next.at_s));
            let Some(at_s) = (if is_post { post_s } else { work.map(|next| next.at_s) }) else { break };
            if !self.events.is_empty() && at_s > self.now_s {
                return self.now_s;
            }
            if is_post {
                self.now_s = self.now_s.max(at_s);
                self.arrived_at_last();
                continue;
            }
            let Some(next) = self.appointments.pop() else { break };
            if self.members[next.slot as usize].epoch == next.epoch {
                self.now_s = self.now_s.max(next.at_s);
                self.work_ended(next.slot);
            }
        }
        if self.events.is_empty() {
            self.now_s = self.now_s.max(until_s);
        }
        self.now_s
    }

    /// What has happened since the last call, in order.
    pub fn take_events(&mut self) -> Vec<Event> {
        std::mem::take(&mut self.events)
    }

    /// Reports the gaps between tokens since the last report, as streams of the live core do.
    pub fn pace(&mut self) {
        let (mut slots, mut gaps, mut gap_seconds) = (Vec::new(), Vec::new(), Vec::new());
        for (slot, member) in self.members.iter_mut().enumerate() {
            member.settle(self.now_s, &mut self.tally);
            let pace = std::mem::take(&mut member.pace);
            if pace.gaps > 0 {
                slots.push(slot as Slot);
                gaps.push(u32::try_from(pace.gaps).unwrap_or(u32::MAX));
                gap_seconds.push(pace.seconds);
            }
        }
        if !slots.is_empty() {
            self.events.push(Event::Paced { time_s: self.now_s, pool: POOL.into(), slots, gaps, gap_seconds });
        }
    }

    // -- the router's index

    /// What each replica holds of a request's prompt, as the live core answers it.
    pub fn overlap(&mut self, id: RequestId) -> Result<PoolOverlap, CoreError> {
        self.catch_up();
        let prompt = self.table.get(id)?;
        let view = self.view.load();
        let pool = view.pool(&prompt.pool).ok_or(CoreError::UnknownRequest(id))?;
        Ok(PoolOverlap::of(&prompt, pool, self.now_s))
    }

    /// The router has chosen `slot`.
    pub fn predict(&mut self, id: RequestId, slot: Slot) -> Result<(), CoreError> {
        self.catch_up();
        self.table.dispatched_at(id, slot, self.now_s)
    }

    /// Hashes of the full blocks of a request's prompt; still known while time stands at its end.
    pub fn blocks(&self, id: RequestId) -> Result<Vec<u64>, CoreError> {
        let ended = self.ended.get(&id).cloned();
        let prompt = ended.map_or_else(|| self.table.get(id), Ok)?;
        Ok(prompt.at(self.options.index.block_size).iter().map(|hash| hash.0).collect())
    }

    // -- results

    /// All gaps between two tokens: upper bound of each bin in seconds, and count.
    pub fn gaps(&self) -> Vec<(f64, u64)> {
        self.tally.gaps.bins()
    }

    /// Every step that has ended, when the fleet was told to write them down.
    pub fn trace(&self) -> &[Traced] {
        self.tally.trace.as_deref().unwrap_or_default()
    }

    /// Seconds in which each engine computed.
    pub fn busy_s(&self) -> Vec<f64> {
        self.members.iter().map(|member| member.busy_s).collect()
    }

    /// Most requests in flight at a replica over the mean, at each arrival.
    pub fn imbalance(&self) -> &[f64] {
        &self.imbalance
    }

    pub fn preemptions(&self) -> u64 {
        let running = |member: &Member| member.engine.as_ref().map_or(0, |engine| engine.counters().preemptions);
        self.members.iter().map(|member| member.preemptions + running(member)).sum()
    }

    /// Event batches that never arrived.
    pub fn lost_batches(&self) -> u64 {
        self.feed.lost()
    }

    // -- within

    fn catch_up(&mut self) {
        self.feed.catch_up(&self.index, self.now_s);
    }

    /// The request has ended: its blocks are not in use any more.
    fn forget(&mut self, id: RequestId) {
        if let Ok(prompt) = self.table.get(id) {
            self.ended.insert(id, prompt);
        }
        self.table.remove(id);
    }

    fn appoint(&mut self, slot: Slot, at_s: f64) {
        let member = &mut self.members[slot as usize];
        member.epoch += 1;
        self.appointed += 1;
        self.appointments.push(Appointment { at_s, number: self.appointed, slot, epoch: member.epoch });
    }

    /// What a member did has ended, or it may begin.
    fn work_ended(&mut self, slot: Slot) {
        let member = &mut self.members[slot as usize];
        match std::mem::replace(&mut member.work, Work::Idle) {
            Work::Idle | Work::Starting => {}
            Work::Step(result) => {
                member.ended(self.now_s, &result, &mut self.tally);
                self.deliver(slot, &result);
            }
            Work::Quiet(quiet) => {
                member.work = Work::Quiet(quiet);
                member.close(self.now_s, &mut self.tally);
            }
        }
        if let Some(end_s) = self.members[slot as usize].begin(self.now_s) {
            self.appoint(slot, end_s);
        }
    }
}

impl Load {
    fn of(engine: &Engine) -> Self {
        Self { running: engine.running() as u64, waiting: engine.waiting() as u64, kv_usage: engine.pool().usage() }
    }
}
