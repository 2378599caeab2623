//! The fleet's supervisor: one task that turns updates into slots, indexes, subscriptions and snapshots.
//!
//! Updates carry the whole state, so only the newest counts and a missed one does no harm. Everything that can happen ends
//! in the same few steps: adjust the pools, swap the snapshot, tell the router. Tokenizers are read on blocking threads;
//! until one is there its pool is `loading` and already follows events. Runs on the single-threaded background runtime:
//! a subscription that was aborted there is never polled again, so nothing reaches a slot after it was freed.

use std::collections::{BTreeMap, HashMap, HashSet};
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use arc_swap::ArcSwap;
use tokio::sync::{Notify, watch};
use tokio::task::{JoinError, JoinSet};
use tokio::time::MissedTickBehavior;

use super::pool::LivePool;
use super::view::{FleetView, Pool, Tokens};
use super::{FleetState, FleetUpdate, PoolUpdate, Replica, SourceState, TemplateOptions};
use crate::clock::Clock;
use crate::config::{IndexConfig, KvConfig};
use crate::memory::Memory;
use crate::meter::Meter;
use crate::tokenize::{SegmentCache, Tokenizer};

/// How often counters and loads are passed on at most.
const TELL_INTERVAL: Duration = Duration::from_millis(500);
/// Changes of state that come closer together than this are told as one.
const SETTLE: Duration = Duration::from_millis(20);
/// How often one replica's unconfirmed predictions are said again while they go on.
const MISMATCH_WARNING_INTERVAL_S: f64 = 60.0;
/// Ticks between two looks for series of replicas that are gone: a stream that outlives its replica may write some.
const TICKS_PER_SWEEP: u32 = 20;

/// What pools need to work.
#[derive(Clone)]
pub struct Means {
    pub clock: Clock,
    pub index: IndexConfig,
    pub kv: KvConfig,
    pub meter: Arc<dyn Meter>,
    /// Shared by all tokenizers; measured here.
    pub segments: Arc<SegmentCache>,
    /// Told when the state of an event stream changes, or what is known about the shape of its blocks.
    pub changed: Arc<Notify>,
    /// What a former process knew about replicas.
    pub memory: Arc<Memory>,
}

/// Gets every new state of the fleet.
pub type Tell = Box<dyn FnMut(&FleetState) + Send>;
/// Reads a tokenizer; runs on a blocking thread. The error goes to operators.
pub type Load = dyn Fn(&Path, &TemplateOptions) -> Result<Tokenizer, String> + Send + Sync;

/// The supervisor; see the module's text.
pub struct Fleet {
    means: Means,
    view: Arc<ArcSwap<FleetView>>,
    load: Arc<Load>,
    tell: Tell,
    pools: BTreeMap<String, LivePool>,
    version: u64,
    degraded: Vec<String>,
    is_partial: bool,
    sources: Vec<SourceState>,
    ticks: u32,
    loading: JoinSet<Loaded>,
    told: Option<FleetState>,
    updated_s: f64,
    evicted: HashMap<String, u64>,
    unconfirmed: HashMap<String, Unconfirmed>,
    segment_hits: u64,
}

/// Predictions of one replica that no event ever confirmed.
#[derive(Clone, Copy, Debug, Default)]
struct Unconfirmed {
    blocks: u64,
    warned_s: Option<f64>,
}

/// What became of one attempt to read a tokenizer.
struct Loaded {
    pool: String,
    /// What was read, to tell whether it is still wanted.
    path: String,
    template: TemplateOptions,
    result: Result<Tokenizer, String>,
}

impl Fleet {
    /// A fleet without pools. `view` is where snapshots appear.
    pub fn new(means: Means, view: Arc<ArcSwap<FleetView>>, load: Arc<Load>, tell: Tell) -> Self {
        let updated_s = means.clock.now_s();
        Self {
            means,
            view,
            load,
            tell,
            pools: BTreeMap::new(),
            version: 0,
            degraded: Vec::new(),
            is_partial: true,
            sources: Vec::new(),
            ticks: 0,
            loading: JoinSet::new(),
            told: None,
            updated_s,
            evicted: HashMap::new(),
            unconfirmed: HashMap::new(),
            segment_hits: 0,
        }
    }

    /// Supervises until the sender of updates is gone.
    pub async fn run(mut self, mut updates: watch::Receiver<FleetUpdate>) {
        let mut ticks = tokio::time::interval(TELL_INTERVAL);
        ticks.set_missed_tick_behavior(MissedTickBehavior::Delay);
        let changed = Arc::clone(&self.means.changed);
        loop {
            tokio::select! {
                result = updates.changed() => match result {
                    Ok(()) => {
                        let update = updates.borrow_and_update().clone();
                        self.update(update);
                    }
                    Err(_) => return,
                },
                Some(result) = self.loading.join_next() => self.loaded(result),
                () = changed.notified() => {
                    tokio::time::sleep(SETTLE).await;
                    self.reconcile();
                }
                _ = ticks.tick() => {
                    self.ticks = self.ticks.wrapping_add(1);
                    if self.ticks.is_multiple_of(TICKS_PER_SWEEP) {
                        self.sweep();
                    }
                    self.measure();
                    self.tell_if_new();
                }
            }
        }
    }

    fn update(&mut self, update: FleetUpdate) {
        self.updated_s = self.means.clock.now_s();
        self.version = update.version;
        self.degraded = update.degraded;
        self.is_partial = update.is_partial;
        self.sources = update.sources;
        self.pools.retain(|name, _| update.pools.iter().any(|pool| pool.name == *name));
        let lives = |id: &String| update.pools.iter().any(|pool| pool.replicas.iter().any(|replica| replica.id == *id));
        self.unconfirmed.retain(|id, _| lives(id));
        for pool in update.pools {
            self.update_pool(pool);
        }
        self.reconcile();
        self.sweep();
    }

    /// Drops the series of everything that is not in the fleet any more. Level-triggered, as the fleet itself is: who
    /// wrote a series, and whether before or after its replica left, makes no difference.
    fn sweep(&self) {
        let meter = &self.means.meter;
        let updates = || self.pools.values().flat_map(|live| &live.update.replicas);
        let replicas = updates().flat_map(|replica| [replica.id.as_str(), replica.url.as_str()]).collect();
        meter.retain("replica", &replicas);
        let pools: HashSet<&str> = self.pools.keys().map(String::as_str).collect();
        meter.retain("pool", &pools);
        let sources: HashSet<&str> = self.sources.iter().map(|source| source.name.as_str()).collect();
        meter.retain("source", &sources);
    }

    fn update_pool(&mut self, update: PoolUpdate) {
        let update = Arc::new(update);
        let live = self.pools.entry(update.name.clone());
        let is_new = matches!(live, std::collections::btree_map::Entry::Vacant(_));
        let live = live.or_insert_with(|| LivePool::new(Arc::clone(&update)));
        let before = std::mem::replace(&mut live.update, Arc::clone(&update));
        if !is_new && before.tokenizer == update.tokenizer && before.template == update.template {
            return;
        }
        live.tokenizer = None;
        let Some(path) = update.tokenizer.clone() else {
            live.become_approximate("no tokenizer is known for this pool".into());
            return;
        };
        live.tokens = Tokens::Loading;
        let (pool, template, load) = (update.name.clone(), update.template.clone(), Arc::clone(&self.load));
        self.loading.spawn_blocking(move || {
            let result = load(Path::new(&path), &template);
            Loaded { pool, path, template, result }
        });
    }

    fn loaded(&mut self, result: Result<Loaded, JoinError>) {
        let loaded = match result {
            Ok(loaded) => loaded,
            Err(error) => {
                tracing::error!("reading a tokenizer panicked: {error}");
                return;
            }
        };
        let Some(live) = self.pools.get_mut(&loaded.pool) else { return };
        if live.update.tokenizer.as_ref() != Some(&loaded.path) || live.update.template != loaded.template {
            return; // another one is wanted meanwhile, and is being read
        }
        match loaded.result {
            Ok(tokenizer) => {
                tracing::info!(pool = loaded.pool, path = loaded.path, "tokenizer loaded");
                live.tokenizer = Some(Arc::new(tokenizer));
                live.tokens = Tokens::Exact;
            }
            Err(reason) => live.become_approximate(format!("the tokenizer cannot be used: {reason}")),
        }
        self.reconcile();
    }

    fn reconcile(&mut self) {
        for live in self.pools.values_mut() {
            live.reconcile(&self.means);
        }
        let view = self.snapshot();
        self.view.store(Arc::new(view));
        self.tell_if_new(); // at once: a request may see a pool that the router does not know
        self.measure();
    }

    fn snapshot(&self) -> FleetView {
        let pools: Vec<Arc<Pool>> = self.pools.values().map(|live| Arc::new(live.view())).collect();
        let mut by_model = HashMap::new();
        for (place, pool) in pools.iter().enumerate() {
            for (model, adapter) in &pool.models {
                if by_model.insert(model.clone(), (place, adapter.clone())).is_some() {
                    tracing::warn!(model, pool = pool.name, "two pools serve this model; the last one gets it");
                }
            }
        }
        let (degraded, is_partial) = (self.degraded.clone(), self.is_partial);
        FleetView { version: self.version, pools, by_model, degraded, is_partial }
    }

    fn tell_if_new(&mut self) {
        let view = self.view.load();
        let state = FleetState { version: self.version, pools: view.pools.iter().map(|pool| pool.state()).collect() };
        if self.told.as_ref() != Some(&state) {
            (self.tell)(&state);
            self.told = Some(state);
        }
    }

    fn measure(&mut self) {
        let meter = Arc::clone(&self.means.meter);
        let view = self.view.load_full();
        let approximate = view.pools.iter().filter(|pool| matches!(pool.tokens, Tokens::Approximate(_))).count();
        meter.set("warmfront_approximate_pools", &[], approximate as f64);
        meter.set("warmfront_fleet_age_seconds", &[], self.means.clock.now_s() - self.updated_s);
        self.measure_segments();
        self.measure_sources();
        for pool in &view.pools {
            self.measure_index(pool);
            for replica in pool.occupied() {
                self.compare_predictions(pool, replica);
            }
        }
    }

    fn measure_sources(&self) {
        let meter = &self.means.meter;
        for source in &self.sources {
            let labels = [source.name.as_str()];
            meter.set("warmfront_discovery_up", &labels, f64::from(u8::from(source.error.is_none())));
            meter.set("warmfront_discovery_servers", &labels, source.servers as f64);
            if let Some(age_s) = source.age_s {
                let since_s = self.means.clock.now_s() - self.updated_s;
                meter.set("warmfront_discovery_age_seconds", &labels, age_s + since_s);
            }
        }
    }

    fn measure_segments(&mut self) {
        let stats = self.means.segments.stats();
        self.means.meter.set("warmfront_segment_cache_bytes", &[], stats.bytes as f64);
        self.means.meter.add("warmfront_segment_cache_hits_total", &[], stats.hits.saturating_sub(self.segment_hits));
        self.segment_hits = stats.hits;
    }

    /// Blocks that we expected and the engine never announced: it computes other tokens than we do.
    fn compare_predictions(&mut self, pool: &Pool, replica: &Replica) {
        let stats = pool.indexes.get(&replica.block_size).and_then(|index| index.slot_stats(replica.slot));
        let Some(stats) = stats else { return };
        let known = self.unconfirmed.entry(replica.id.clone()).or_default();
        let new = stats.unconfirmed.saturating_sub(known.blocks);
        known.blocks = stats.unconfirmed;
        replica.events.lock().unconfirmed = stats.unconfirmed;
        if new == 0 {
            return;
        }
        self.means.meter.add("warmfront_unconfirmed_predictions_total", &[&replica.id], new);
        let now_s = self.means.clock.now_s();
        if known.warned_s.is_none_or(|warned_s| now_s - warned_s > MISMATCH_WARNING_INTERVAL_S) {
            known.warned_s = Some(now_s);
            tracing::warn!(
                replica = replica.id,
                blocks = stats.unconfirmed,
                "predicted blocks were never confirmed by the engine's events: its tokenizer, chat template or block \
                 size differs from ours, or it refuses these requests"
            );
        }
    }

    fn measure_index(&mut self, pool: &Pool) {
        let stats: Vec<_> = pool.indexes.values().map(|index| index.stats()).collect();
        let sum = |count: fn(&crate::index::IndexStats) -> u64| stats.iter().map(count).sum::<u64>();
        let (name, meter) = (pool.name.as_str(), &self.means.meter);
        meter.set("warmfront_index_blocks", &[name], sum(|stats| stats.blocks) as f64);
        meter.set("warmfront_index_facts", &[name, "confirmed"], sum(|stats| stats.confirmed_facts) as f64);
        meter.set("warmfront_index_facts", &[name, "predicted"], sum(|stats| stats.predicted_facts) as f64);
        meter.set("warmfront_index_facts", &[name, "offloaded"], sum(|stats| stats.offloaded_facts) as f64);
        meter.set("warmfront_index_bytes", &[name], sum(|stats| stats.bytes) as f64);
        let evicted = sum(|stats| stats.evicted_for_room);
        let before = self.evicted.insert(name.to_owned(), evicted).unwrap_or(0);
        meter.add("warmfront_index_room_evictions_total", &[name], evicted.saturating_sub(before));
    }
}

impl LivePool {
    /// Bytes are hashed from now on. Said loudly: the overlap it gives is coarse.
    fn become_approximate(&mut self, reason: String) {
        tracing::warn!(pool = self.update.name, reason, "this pool is routed by bytes instead of tokens");
        self.tokens = Tokens::Approximate(reason);
    }
}
