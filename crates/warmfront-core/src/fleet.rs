//! The fleet as the control process reports it and as the core serves it.
//!
//! The control process sends the whole [`FleetUpdate`] each time anything changed (level-triggered: a lost update heals
//! with the next). The core gives each replica a slot, adjusts subscriptions, indexes and connection pools, and passes a
//! [`FleetState`] to the router. Both are `MessagePack` maps, so that either side may learn fields before the other.

mod feed;
mod live;
mod pool;
mod view;

use std::collections::BTreeMap;

use bytes::Bytes;
use serde::{Deserialize, Serialize};

use crate::mailbox::Slot;

pub use live::{Fleet, Load, Means, Tell};
pub use view::{FleetView, Pool, Replica, Tokens};

/// The `MessagePack` map that the router and the control process read.
///
/// # Panics
///
/// Never: writing to memory does not fail.
#[must_use]
pub fn encode(state: &FleetState) -> Bytes {
    rmp_serde::to_vec_named(state).expect("writing to memory does not fail").into()
}

/// Control process → core: all servers that exist now.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct FleetUpdate {
    pub version: u64,
    pub pools: Vec<PoolUpdate>,
    /// Names of discovery sources that are down, with the reason; shown by `/ready`.
    #[serde(default)]
    pub degraded: Vec<String>,
    /// How each discovery source does.
    #[serde(default)]
    pub sources: Vec<SourceState>,
    /// Servers exist that nobody has asked yet: what they serve is not known.
    #[serde(default)]
    pub is_partial: bool,
}

/// One discovery source, for metrics.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct SourceState {
    pub name: String,
    /// Servers in its last list.
    pub servers: u64,
    /// Seconds since it last gave a list; `None`: it never did.
    pub age_s: Option<f64>,
    /// Why it gave none when it was last asked.
    pub error: Option<String>,
}

/// All replicas that serve one model with one tokenizer.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct PoolUpdate {
    pub name: String,
    /// Served name → adapter name (`None`: the base model).
    pub models: BTreeMap<String, Option<String>>,
    /// `/v1/models` entries as the engines gave them (JSON), merged by name.
    #[serde(default)]
    pub model_cards: Vec<String>,
    /// Directory or file with the tokenizer; `None`: unknown, bytes are hashed instead.
    pub tokenizer: Option<String>,
    #[serde(default)]
    pub template: TemplateOptions,
    pub replicas: Vec<ReplicaUpdate>,
}

/// What the engine was told about rendering; it changes the token ids.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(default)]
pub struct TemplateOptions {
    /// File or literal that replaces the tokenizer's own template.
    pub chat_template: Option<String>,
    /// `auto`, `string` or `openai`.
    pub content_format: Option<String>,
    /// JSON object.
    pub default_kwargs: Option<String>,
    pub exclude_tools_when_none: bool,
    pub trust_request_template: bool,
    /// Version of the engine, for rules that changed; `None`: the newest known.
    pub engine_version: Option<String>,
    pub max_model_len: Option<u32>,
}

/// One KV cache that can be chosen.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct ReplicaUpdate {
    /// Stable and unique: the server's URL, with `#rank` behind it when it has several ranks.
    pub id: String,
    /// `http://host:port` or `https://host:port` of the server, without a path.
    pub url: String,
    /// Data-parallel rank, sent as `X-data-parallel-rank` when the server has several.
    pub rank: Option<u32>,
    pub engine: String,
    /// Changes whenever the engine process is another one (restart).
    #[serde(default)]
    pub incarnation: u64,
    pub ready: bool,
    /// Why it is not ready, or what is missing: short words.
    #[serde(default)]
    pub notes: Vec<String>,
    pub block_size: Option<u32>,
    /// KV capacity in tokens.
    pub capacity_tokens: Option<u64>,
    pub events: Option<EventSource>,
    #[serde(default)]
    pub headers: BTreeMap<String, String>,
    #[serde(default)]
    pub load: EngineLoad,
    /// Names of the pool's models that this replica does not serve (an adapter not loaded there): not to be chosen.
    #[serde(default)]
    pub lacks: Vec<String>,
    /// Takes no new requests because an operator said so; it is not `ready` then.
    #[serde(default)]
    pub draining: bool,
    /// How to speak TLS with it; `None`: plain HTTP.
    #[serde(default)]
    pub tls: Option<TlsOptions>,
}

/// PEM files for TLS towards one server.
#[derive(Clone, Debug, Default, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(default)]
pub struct TlsOptions {
    /// Authorities; `None`: the system's.
    pub ca: Option<String>,
    /// Our certificate and its key, where the server asks for one.
    pub cert: Option<String>,
    pub key: Option<String>,
}

/// Where a replica publishes KV events.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct EventSource {
    /// `tcp://host:port` or `ipc://path` to connect to.
    pub endpoint: String,
    pub replay: Option<String>,
    #[serde(default)]
    pub topic: String,
    /// How it was found: `engine`, `configuration` or `default_port`.
    #[serde(default)]
    pub origin: String,
}

/// Last scrape of the engine's own metrics; `None`: not known.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(default)]
pub struct EngineLoad {
    pub running: Option<f64>,
    pub waiting: Option<f64>,
    pub kv_usage: Option<f64>,
    pub age_s: Option<f64>,
    /// Tokens of prompts and answers since its start: while it works, they move.
    pub worked_tokens: Option<f64>,
    /// Seconds there and back, as the control process measures them.
    pub rtt_s: Option<f64>,
}

/// Core → router: pools with slots, and what the core knows about their events.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct FleetState {
    pub version: u64,
    pub pools: Vec<PoolState>,
}

#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct PoolState {
    pub name: String,
    pub models: BTreeMap<String, Option<String>>,
    /// `exact`, `approximate` or `loading`.
    pub tokens: String,
    /// Why not exact, in words.
    pub tokens_reason: Option<String>,
    /// In slot order; a freed slot is absent until it is given again.
    pub replicas: Vec<ReplicaState>,
}

#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct ReplicaState {
    pub slot: Slot,
    pub replica: ReplicaUpdate,
    pub events: EventState,
}

/// What is known about one replica's KV events.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(default)]
pub struct EventState {
    /// `live`, `connecting`, `catching_up`, `stale`, `lossy` or `none`.
    pub state: String,
    /// Why it is not live, or what is missing although it is, in words.
    pub reason: Option<String>,
    pub last_sequence: Option<u64>,
    /// Seconds between an event's own time stamp and its arrival (last batch); `None` before the first.
    pub lag_s: Option<f64>,
    pub batches: u64,
    pub blocks_stored: u64,
    pub blocks_removed: u64,
    pub gaps: u64,
    pub replays: u64,
    pub restarts: u64,
    pub malformed: u64,
    pub unknown_parents: u64,
    /// Predicted blocks that no event ever confirmed: tokens or templates differ.
    pub unconfirmed: u64,
    /// Share of the engine's life that the index has seen: false when the start of the stream could not be replayed.
    pub complete: bool,
    pub block_size: Option<u32>,
}

#[cfg(test)]
mod tests;
