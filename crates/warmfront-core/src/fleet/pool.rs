//! One pool while it lives: slots, indexes and subscriptions, adjusted to each update.
//!
//! A replica keeps its slot while its id is in the updates; a freed slot is given again, lowest first. A replica whose event
//! source, incarnation, block size or feed changes leaves its slot and enters it again at once: all its facts go, and its
//! subscription starts from nothing.

use std::collections::BTreeMap;
use std::sync::Arc;

use tokio::task::JoinHandle;

use super::feed::{Shape, SlotSink};
use super::view::{Pool, Replica, Tokens};
use super::{EventState, PoolUpdate, ReplicaUpdate};
use crate::index::{Feed, Index, IndexOptions, SLOTS_MAX};
use crate::kv::subscribe::{Subscription, Watched};
use crate::mailbox::Slot;
use crate::memory::{Wanted, basis, recall};
use crate::tokenize::Tokenizer;

use super::live::Means;

/// A pool with what works for it.
pub(super) struct LivePool {
    pub(super) update: Arc<PoolUpdate>,
    pub(super) tokens: Tokens,
    pub(super) tokenizer: Option<Arc<Tokenizer>>,
    slots: Vec<Option<LiveReplica>>,
    indexes: BTreeMap<u32, Arc<Index>>,
    /// Lookahead of the engines' hashes, learned from events, by block size.
    lookaheads: BTreeMap<u32, u32>,
    /// Block sizes learned from events, by replica id.
    learned: BTreeMap<String, u32>,
}

struct LiveReplica {
    replica: Arc<Replica>,
    shape: Arc<Shape>,
    /// What puts facts into the index: from a former process, then from events, if the engine publishes any.
    feeding: Running,
}

/// A task that ends when this is dropped.
struct Running(JoinHandle<()>);

impl Drop for Running {
    fn drop(&mut self) {
        self.0.abort();
    }
}

/// What a replica must not change without starting over.
#[derive(PartialEq)]
struct Identity<'a> {
    incarnation: u64,
    events: Option<&'a super::EventSource>,
    block_size: u32,
    feed: Feed,
}

impl<'a> Identity<'a> {
    fn of(update: &'a ReplicaUpdate, block_size: u32, feed: Feed) -> Self {
        Self { incarnation: update.incarnation, events: update.events.as_ref(), block_size, feed }
    }
}

impl LivePool {
    pub(super) fn new(update: Arc<PoolUpdate>) -> Self {
        Self {
            update,
            tokens: Tokens::Loading,
            tokenizer: None,
            slots: Vec::new(),
            indexes: BTreeMap::new(),
            lookaheads: BTreeMap::new(),
            learned: BTreeMap::new(),
        }
    }

    /// The pool's snapshot.
    pub(super) fn view(&self) -> Pool {
        Pool {
            name: self.update.name.clone(),
            models: self.update.models.clone(),
            model_cards: self.update.model_cards.clone(),
            tokens: self.tokens.clone(),
            tokenizer: self.tokenizer.clone(),
            replicas: self.slots.iter().map(|slot| Some(Arc::clone(&slot.as_ref()?.replica))).collect(),
            block_sizes: self.block_sizes(),
            indexes: self.indexes.clone(),
        }
    }

    /// All block sizes, the one of most replicas first.
    fn block_sizes(&self) -> Vec<u32> {
        let mut sizes: Vec<u32> = self.indexes.keys().copied().collect();
        let replicas_of =
            |size: u32| self.slots.iter().flatten().filter(|live| live.replica.block_size == size).count();
        sizes.sort_by_key(|&size| std::cmp::Reverse(replicas_of(size)));
        sizes
    }

    /// Brings slots, indexes and subscriptions in line with the update and with what events have taught.
    pub(super) fn reconcile(&mut self, means: &Means) {
        self.learn();
        let update = Arc::clone(&self.update);
        for slot in 0..self.slots.len() {
            let gone = self.slots[slot].as_ref().filter(|live| !update.replicas.iter().any(|r| r.id == live.id()));
            if let Some(id) = gone.map(|live| live.id().to_owned()) {
                self.leave(slot);
                self.learned.remove(&id);
            }
        }
        for replica in &update.replicas {
            self.place(replica, means);
        }
        let used: Vec<u32> = self.slots.iter().flatten().map(|live| live.replica.block_size).collect();
        self.indexes.retain(|block_size, _| used.contains(block_size));
    }

    fn learn(&mut self) {
        for live in self.slots.iter().flatten() {
            if let Some(tokens) = live.shape.block_size() {
                self.learned.insert(live.id().to_owned(), tokens);
            }
            if let Some(tokens) = live.shape.lookahead() {
                self.lookaheads.entry(live.replica.block_size).or_insert(tokens);
            }
        }
    }

    /// Gives a replica its slot, or updates what is in it.
    fn place(&mut self, update: &ReplicaUpdate, means: &Means) {
        let (block_size, feed) = self.shape_of(update, means);
        let found = self.slots.iter().position(|slot| slot.as_ref().is_some_and(|live| live.id() == update.id));
        let slot = found.unwrap_or_else(|| self.free_slot());
        if slot >= SLOTS_MAX as usize {
            tracing::error!(replica = update.id, "the pool has more than {SLOTS_MAX} replicas; this one is left out");
            return;
        }
        let index = self.index(block_size, means);
        let wanted = Identity::of(update, block_size, feed);
        if let Some(live) = self.slots.get_mut(slot).and_then(Option::as_mut) {
            let current = Identity::of(&live.replica.update, live.replica.block_size, live.replica.feed);
            if current == wanted && live.is_fed_into(&index) {
                if live.replica.update != *update {
                    live.replica = Arc::new(live.replica.updated(update));
                }
                return;
            }
            tracing::info!(replica = update.id, "starting over: restarted, or its events or block size changed");
            self.leave(slot);
        }
        self.enter(slot as Slot, update, &index, feed, means);
    }

    /// Block size and feed of a replica in this pool.
    fn shape_of(&self, update: &ReplicaUpdate, means: &Means) -> (u32, Feed) {
        if matches!(self.tokens, Tokens::Approximate(_)) {
            return (means.index.block_size_default, Feed::Approximate);
        }
        let told = self.learned.get(&update.id).copied().or(update.block_size).filter(|&tokens| tokens > 0);
        let feed = if update.events.is_some() { Feed::Exact } else { Feed::Approximate };
        (told.unwrap_or(means.index.block_size_default), feed)
    }

    fn free_slot(&mut self) -> usize {
        self.slots.iter().position(Option::is_none).unwrap_or_else(|| {
            self.slots.push(None);
            self.slots.len() - 1
        })
    }

    /// The index of a block size; a new one when there is none, or when the one there hashes with another lookahead.
    fn index(&mut self, block_size: u32, means: &Means) -> Arc<Index> {
        let lookahead = self.lookaheads.get(&block_size).copied().unwrap_or(0);
        let known = self.indexes.get(&block_size).filter(|index| index.options().lookahead == lookahead);
        if let Some(index) = known {
            return Arc::clone(index);
        }
        let index = Arc::new(Index::new(IndexOptions {
            block_size,
            seed: means.index.seed,
            lookahead,
            facts_max: means.index.facts_max as u64,
            predicted_ttl_s: means.index.predicted_ttl_s,
            approximate_ttl_s: means.index.approximate_ttl_s,
        }));
        self.indexes.insert(block_size, Arc::clone(&index));
        index
    }

    fn enter(&mut self, slot: Slot, update: &ReplicaUpdate, index: &Arc<Index>, feed: Feed, means: &Means) {
        let block_size = index.options().block_size;
        let capacity = update.capacity_tokens.map(|tokens| tokens / u64::from(block_size));
        index.add_slot(slot, feed, capacity);
        let reason = match (feed, &update.events) {
            (Feed::Exact, _) => None,
            (Feed::Approximate, Some(_)) => Some("the pool has no tokenizer, so events cannot be matched to prompts"),
            (Feed::Approximate, None) => Some("the engine publishes no KV events, or where is not known"),
        };
        let state = EventState { state: "none".into(), reason: reason.map(Into::into), ..EventState::default() };
        let replica = Arc::new(Replica::new(slot, update, block_size, feed, state));
        let shape = Arc::new(Shape::default());
        let wanted = self.wanted(&replica, index);
        let subscription = (feed == Feed::Exact).then(|| subscription(&replica, index, &shape, means)).flatten();
        let feeding = follow(wanted, subscription, means);
        self.slots[slot as usize] = Some(LiveReplica { replica, shape, feeding });
    }

    /// What the memory of a former process is asked for.
    fn wanted(&self, replica: &Replica, index: &Arc<Index>) -> Wanted {
        Wanted {
            pool: self.update.name.clone(),
            replica: replica.id.clone(),
            slot: replica.slot,
            index: Arc::clone(index),
            basis: basis(&self.tokens),
            feed: replica.feed,
            incarnation: replica.update.incarnation,
            can_replay: replica.update.events.as_ref().is_some_and(|events| events.replay.is_some()),
        }
    }

    /// Frees a slot: ends the subscription first, so that nothing is applied to a slot that is gone.
    fn leave(&mut self, slot: usize) {
        let Some(live) = self.slots[slot].take() else { return };
        drop(live.feeding);
        if let Some(index) = self.indexes.get(&live.replica.block_size) {
            index.remove_slot(live.replica.slot);
        }
    }
}

impl LiveReplica {
    fn id(&self) -> &str {
        &self.replica.id
    }

    /// Whether its facts are in this very index, and not in one that was replaced.
    fn is_fed_into(&self, index: &Index) -> bool {
        index.slot_stats(self.replica.slot).is_some()
    }
}

/// Gives the slot back what a former process knew of it, then keeps its event stream, if it has one.
fn follow(wanted: Wanted, subscription: Option<Subscription>, means: &Means) -> Running {
    let memory = Arc::clone(&means.memory);
    Running(tokio::spawn(async move {
        let position = recall(&memory, &wanted).await;
        match (subscription, position) {
            (Some(subscription), Some(position)) => subscription.resumed(position).await.run().await,
            (Some(subscription), None) => subscription.run().await,
            (None, _) => {}
        }
    }))
}

fn subscription(replica: &Replica, index: &Arc<Index>, shape: &Arc<Shape>, means: &Means) -> Option<Subscription> {
    let source = replica.update.events.clone()?;
    let sink = SlotSink::new(Arc::clone(index), replica.slot, Arc::clone(shape), Arc::clone(&means.changed));
    let watched = Watched {
        replica: replica.update.id.clone(),
        state: Arc::clone(&replica.events),
        changed: Arc::clone(&means.changed),
        meter: Arc::clone(&means.meter),
        place: Arc::clone(&replica.place),
    };
    Some(Subscription::new(source, means.kv.clone(), means.clock, Arc::new(sink), watched))
}
