//! Events to the router, commands from it, and the two bounded queues between.
//!
//! On the wire both are `MessagePack` arrays `[tag, field, ...]`: the same bytes cross to Python, go into a recording and
//! come back in a replay. The Python half is `python/warmfront/types.py`; a contract test sends every variant through
//! both. Pushing never blocks: a full event queue is an error of the request that wanted in. Ends of requests (`Finished`,
//! `Failed`, `Cancelled`) are always taken, since they are bounded by the requests in flight.

mod in_flight;
mod pace;
mod queue;
mod wire;

#[cfg(test)]
mod tests;

use bytes::Bytes;
use serde::{Deserialize, Serialize};

pub use in_flight::{Failure, InFlight, Outcome};
pub use pace::PaceCell;
pub use queue::{Answer, Decision, Full, Mailbox, Received, Standings};
pub use wire::{decode_commands, encode_events};

/// Number of one request, unique in this process.
pub type RequestId = u64;
/// Dense row number of a replica inside its pool.
pub type Slot = u32;

/// How a request is routed.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Route {
    /// By what replicas hold of its prompt.
    Prefix,
    /// By load alone: the path has no prompt that an engine would cache.
    Load,
}

/// What the blocks of a request are made of.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Basis {
    /// The very token ids that the engine computes.
    Tokens,
    /// Bytes of the body, since no tokenizer is configured or this request cannot be reproduced.
    Bytes,
    /// No blocks: nothing in the request can be cached.
    None,
}

/// A request as the router sees it. Body and hashes stay in the core under `id`.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct RequestFacts {
    pub id: RequestId,
    pub time_s: f64,
    pub pool: String,
    /// Name the client used, at most 256 bytes.
    pub model: String,
    pub adapter: Option<String>,
    pub flow: String,
    pub priority: i64,
    pub route: Route,
    pub basis: Basis,
    /// Exact for tokens, estimated from bytes otherwise.
    pub prompt_tokens: u32,
    /// Full blocks at the pool's first block size.
    pub blocks: u32,
    /// Assistant messages already in the conversation.
    pub turn: u32,
    pub output_tokens_max: Option<u32>,
    /// Hash of the session key, if the request carries one.
    pub affinity_key: Option<u64>,
    /// Hash over the first blocks, equal for requests that begin alike; for consistent hashing and ties.
    pub prefix_key: u64,
    pub stream: bool,
    /// Why the prompt could not be reproduced, if so: a short fixed word, usable as a label.
    pub fallback: Option<String>,
    /// When the client gives up, if it said so.
    pub deadline_s: Option<f64>,
}

/// Usage as the engine reported it.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Usage {
    pub prompt_tokens: Option<u32>,
    pub cached_tokens: Option<u32>,
    pub output_tokens: Option<u32>,
}

/// Everything that can happen. Serialised as `[tag, fields...]` by [`encode_events`].
#[derive(Clone, Debug, PartialEq)]
pub enum Event {
    /// `["arrived", request]`
    Arrived(RequestFacts),
    /// `["moved", id, time_s, slot]`: the choice before could not be reached, this one is tried now.
    Moved { id: RequestId, time_s: f64, slot: Slot },
    /// `["first_token", id, time_s, slot]`
    FirstToken { id: RequestId, time_s: f64, slot: Slot },
    /// `["finished", id, time_s, slot, status, usage, chunks]`: `chunks` counts the events of a stream after the first.
    Finished { id: RequestId, time_s: f64, slot: Slot, status: u16, usage: Option<Usage>, chunks: u32 },
    /// `["failed", id, time_s, error, tried, began, status, retry_after_s, accepted]`: `tried` are the slots already
    /// tried, the last of them is the one that failed; `began`: bytes reached the client, or the core asks no more, so
    /// this is the end. Otherwise the core holds what the engine answered and waits for a command.
    Failed { id: RequestId, time_s: f64, failure: Failure, tried: Vec<Slot>, began: bool },
    /// `["cancelled", id, time_s]`
    Cancelled { id: RequestId, time_s: f64 },
    /// `["fleet_changed", time_s, fleet]`: the state after it, see `fleet::FleetState`; already encoded.
    FleetChanged { time_s: f64, fleet: Bytes },
    /// `["config_changed", time_s, config]`: JSON of the new, already validated configuration.
    ConfigChanged { time_s: f64, config: Bytes },
    /// `["paced", time_s, pool, slots, gaps, gap_seconds]`: per replica with streams since the last one, the number of
    /// gaps between two tokens and their sum.
    Paced { time_s: f64, pool: String, slots: Vec<Slot>, gaps: Vec<u32>, gap_seconds: Vec<f64> },
    /// `["tick", time_s]`
    Tick { time_s: f64 },
    /// `["asked", id, time_s, question, request, payload]`: the admin API asks; answered by `Command::Answered`.
    Asked { id: RequestId, time_s: f64, question: String, request: Option<RequestFacts>, payload: Bytes },
    /// `["stopping", time_s, grace_s]`
    Stopping { time_s: f64, grace_s: f64 },
}

/// One candidate of a dispatch.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Choice {
    pub slot: Slot,
    /// What the router expects the replica to find in its cache, already capped as the engine caps it.
    pub cached_tokens: u32,
    pub prefill_slot: Option<Slot>,
}

/// Why a replica gets no or little new work, by what the router has seen of it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Standing {
    pub slot: Slot,
    /// `open`, `half_open`, `paused` or `slow_start`.
    pub state: String,
    /// In words.
    pub reason: String,
}

/// Everything the router can want.
#[derive(Clone, Debug, PartialEq)]
pub enum Command {
    /// `["dispatch", id, choices, reason]`, best choice first.
    Dispatch { id: RequestId, choices: Vec<Choice>, reason: String },
    /// `["shed", id, code, retry_after_s]`
    Shed { id: RequestId, code: String, retry_after_s: Option<f64> },
    /// `["answered", id, status, body]`: JSON for the admin API.
    Answered { id: RequestId, status: u16, body: Bytes },
    /// `["deliver", id]`: nobody else takes the request; pass on what the core holds of its last attempt.
    Deliver { id: RequestId },
    /// `["standing", pool, [[slot, state, reason], ...]]`: the replicas of a pool that are not in full service.
    Standing { pool: String, rows: Vec<Standing> },
}
