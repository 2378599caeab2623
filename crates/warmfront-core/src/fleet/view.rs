//! What requests see of the fleet: an immutable snapshot, swapped whole.
//!
//! A request takes one snapshot and keeps it to its end, so slots, names and indexes it looks up belong together. What
//! changes more often than the fleet itself (event state) sits behind locks inside and is shared by all snapshots.

use std::collections::{BTreeMap, HashMap};
use std::sync::Arc;

use http::header::{HeaderMap, HeaderName, HeaderValue};
use parking_lot::Mutex;

use super::{EventState, PoolState, ReplicaState, ReplicaUpdate};
use crate::index::{Feed, Index};
use crate::kv::subscribe::Place;
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
    /// Servers exist that nobody has asked yet.
    pub is_partial: bool,
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

/// All replicas that serve one model, as requests see them.
#[derive(Debug)]
pub struct Pool {
    pub name: String,
    pub models: BTreeMap<String, Option<String>>,
    /// `/v1/models` entries as the engines gave them (JSON).
    pub model_cards: Vec<String>,
    pub tokens: Tokens,
    pub tokenizer: Option<Arc<Tokenizer>>,
    /// By slot; `None`: the slot is free.
    pub replicas: Vec<Option<Arc<Replica>>>,
    /// Keys of `indexes`, the size of most replicas first.
    pub block_sizes: Vec<u32>,
    /// By block size in tokens. A pool without a tokenizer has one, keyed by the default block size, whose blocks are
    /// bytes of the prompt.
    pub indexes: BTreeMap<u32, Arc<Index>>,
}

/// One KV cache that can be chosen, in its slot.
#[derive(Debug)]
pub struct Replica {
    pub slot: Slot,
    pub id: String,
    /// `host:port` of its server.
    pub authority: String,
    pub rank: Option<u32>,
    /// Sent with every request to it.
    pub headers: HeaderMap,
    pub ready: bool,
    /// Key of its index in [`Pool::indexes`]: told by the engine, seen in its events, or the default.
    pub block_size: u32,
    pub feed: Feed,
    pub events: Arc<Mutex<EventState>>,
    /// Where its event stream is.
    pub place: Place,
    /// As the control process told it.
    pub update: ReplicaUpdate,
}

impl FleetView {
    /// Before the control process has said anything.
    #[must_use]
    pub fn unknown() -> Self {
        Self { is_partial: true, ..Self::default() }
    }

    /// The pool that serves a model name, and the adapter the name stands for.
    pub fn pool_of(&self, model: &str) -> Option<(&Arc<Pool>, Option<&str>)> {
        let (place, adapter) = self.by_model.get(model)?;
        Some((self.pools.get(*place)?, adapter.as_deref()))
    }

    pub fn pool(&self, name: &str) -> Option<&Arc<Pool>> {
        self.pools.iter().find(|pool| pool.name == name)
    }
}

impl Pool {
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
        self.tokens != Tokens::Loading && self.occupied().any(|replica| replica.ready)
    }

    pub fn occupied(&self) -> impl Iterator<Item = &Arc<Replica>> {
        self.replicas.iter().flatten()
    }

    /// The pool as the router is told about it.
    pub fn state(&self) -> PoolState {
        PoolState {
            name: self.name.clone(),
            models: self.models.clone(),
            tokens: self.tokens.name().into(),
            tokens_reason: self.tokens.reason().map(Into::into),
            replicas: self.occupied().map(|replica| replica.state()).collect(),
        }
    }
}

impl Replica {
    /// A replica as an update tells it.
    pub fn new(slot: Slot, update: &ReplicaUpdate, block_size: u32, feed: Feed, events: EventState) -> Self {
        let events = Arc::new(Mutex::new(events));
        Self::with_events(slot, update, (block_size, feed), (events, Place::default()))
    }

    /// The same replica with what a new update says of it.
    pub(super) fn updated(&self, update: &ReplicaUpdate) -> Self {
        let shared = (Arc::clone(&self.events), Arc::clone(&self.place));
        Self::with_events(self.slot, update, (self.block_size, self.feed), shared)
    }

    fn with_events(
        slot: Slot,
        update: &ReplicaUpdate,
        (block_size, feed): (u32, Feed),
        (events, place): (Arc<Mutex<EventState>>, Place),
    ) -> Self {
        Self {
            slot,
            id: update.id.clone(),
            authority: authority(&update.url),
            rank: update.rank,
            headers: headers(update),
            ready: update.ready,
            block_size,
            feed,
            events,
            place,
            update: update.clone(),
        }
    }

    /// The replica as the router is told about it, without its headers: they hold keys, and a recording keeps what the
    /// router is told.
    pub fn state(&self) -> ReplicaState {
        let mut replica = ReplicaUpdate { block_size: Some(self.block_size), ..self.update.clone() };
        replica.headers.clear();
        ReplicaState { slot: self.slot, replica, events: self.events.lock().clone() }
    }
}

/// `host:port` of `http://host:port/`; the scheme's port when none is named.
fn authority(url: &str) -> String {
    let port = if url.starts_with("https://") { 443 } else { 80 };
    let rest = url.split_once("://").map_or(url, |(_, rest)| rest);
    let host = rest.split('/').next().unwrap_or(rest);
    let has_port = host.rsplit_once(':').is_some_and(|(_, port)| port.bytes().all(|byte| byte.is_ascii_digit()));
    if has_port { host.to_owned() } else { format!("{host}:{port}") }
}

/// Headers as configured; what HTTP does not allow is left out and said.
fn headers(update: &ReplicaUpdate) -> HeaderMap {
    let mut headers = HeaderMap::new();
    for (name, value) in &update.headers {
        if let (Ok(name), Ok(value)) = (HeaderName::try_from(name), HeaderValue::try_from(value)) {
            headers.insert(name, value);
        } else {
            tracing::warn!(replica = update.id, header = name, "a configured header is not valid and not sent");
        }
    }
    headers
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_authority_is_host_and_port_of_the_url() {
        assert_eq!(authority("http://10.0.0.1:8000"), "10.0.0.1:8000");
        assert_eq!(authority("http://engine/"), "engine:80");
        assert_eq!(authority("http://[::1]:8000/v1"), "[::1]:8000");
        assert_eq!(authority("http://[::1]"), "[::1]:80");
        assert_eq!(authority("https://engine"), "engine:443");
    }
}
