//! What requests see of the fleet: an immutable snapshot, swapped whole.
//!
//! A request takes one snapshot and keeps it to its end, so slots, names and indexes it looks up belong together. What
//! changes more often than the fleet itself (event state) sits behind locks inside and is shared by all snapshots.

use std::collections::{BTreeMap, HashMap};
use std::sync::Arc;

use parking_lot::Mutex;

use super::{EventState, PoolState, PoolUpdate, ReplicaState, ReplicaUpdate};
use crate::index::{Feed, Index};
use crate::mailbox::Slot;
use crate::tokenize::Tokenizer;

/// All pools as they are served now.
#[derive(Debug, Default)]
pub struct FleetView {
    pub version: u64,
    pub pools: Vec<Arc<Pool>>,
    /// Served name → place in `pools` and adapter name.
    pub by_model: HashMap<String, (usize, Option<String>)>,
    /// Discovery sources that are down, with the reason.
    pub degraded: Vec<String>,
}

/// How the pool's prompts become blocks.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Tokens {
    /// The tokenizer is being read; until then prompts count as bytes.
    Loading,
    Exact,
    /// Bytes are hashed instead of tokens, for the reason given.
    Approximate(String),
}

/// One pool.
#[derive(Debug)]
pub struct Pool {
    pub update: Arc<PoolUpdate>,
    pub tokens: Tokens,
    pub tokenizer: Option<Arc<Tokenizer>>,
    /// By slot; `None`: the slot is free.
    pub replicas: Vec<Option<Arc<Replica>>>,
    /// By block size in tokens. A pool without a tokenizer has one, keyed by the default block size, whose blocks are
    /// `index.block_bytes` bytes of the prompt.
    pub indexes: BTreeMap<u32, Arc<Index>>,
}

/// One replica in its slot.
#[derive(Debug)]
pub struct Replica {
    pub slot: Slot,
    pub update: Arc<ReplicaUpdate>,
    /// Key of its index in [`Pool::indexes`]: told by the engine, seen in its events, or the default.
    pub block_size: u32,
    pub feed: Feed,
    pub events: Arc<Mutex<EventState>>,
}

impl FleetView {
    /// The pool that serves a model name, and the adapter the name stands for.
    pub fn pool_of(&self, model: &str) -> Option<(&Arc<Pool>, Option<&str>)> {
        let (place, adapter) = self.by_model.get(model)?;
        Some((self.pools.get(*place)?, adapter.as_deref()))
    }

    pub fn pool(&self, name: &str) -> Option<&Arc<Pool>> {
        self.pools.iter().find(|pool| pool.name() == name)
    }

    /// Whether any pool can take requests.
    pub fn is_ready(&self) -> bool {
        self.pools.iter().any(|pool| pool.is_ready())
    }
}

impl Pool {
    pub fn name(&self) -> &str {
        &self.update.name
    }

    /// The replica in `slot`, unless the slot is free.
    pub fn replica(&self, slot: Slot) -> Option<&Arc<Replica>> {
        self.replicas.get(slot as usize)?.as_ref()
    }

    /// The index that knows about the replica in `slot`.
    pub fn index_of(&self, slot: Slot) -> Option<&Arc<Index>> {
        self.indexes.get(&self.replica(slot)?.block_size)
    }

    /// A ready replica exists and the tokenizer, if there is one, is loaded.
    pub fn is_ready(&self) -> bool {
        self.tokens != Tokens::Loading && self.occupied().any(|replica| replica.update.ready)
    }

    pub fn occupied(&self) -> impl Iterator<Item = &Arc<Replica>> {
        self.replicas.iter().flatten()
    }

    /// The pool as the router is told about it.
    pub fn state(&self) -> PoolState {
        PoolState {
            name: self.update.name.clone(),
            models: self.update.models.clone(),
            tokens: self.tokens.name().into(),
            tokens_reason: self.tokens.reason().map(Into::into),
            replicas: self.occupied().map(|replica| replica.state()).collect(),
        }
    }
}

impl Replica {
    /// The replica as the router is told about it.
    pub fn state(&self) -> ReplicaState {
        let mut replica = ReplicaUpdate::clone(&self.update);
        replica.block_size = Some(self.block_size);
        ReplicaState { slot: self.slot, replica, events: self.events.lock().clone() }
    }
}

impl Tokens {
    /// `loading`, `exact` or `approximate`.
    pub fn name(&self) -> &'static str {
        match self {
            Self::Loading => "loading",
            Self::Exact => "exact",
            Self::Approximate(_) => "approximate",
        }
    }

    pub fn reason(&self) -> Option<&str> {
        match self {
            Self::Approximate(reason) => Some(reason),
            _ => None,
        }
    }
}
