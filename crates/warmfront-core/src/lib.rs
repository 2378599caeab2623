//! The part of warmfront that handles bytes, tokens, blocks and chunks.
//!
//! Knows no Python: everything that happens leaves through [`mailbox`] as an event, everything it should do comes back
//! as a command. One idea a module; see `docs/explanation/architecture.md`.

pub mod backoff;
pub mod block;
pub mod clock;
pub mod config;
pub mod control;
pub mod cost;
pub mod error;
pub mod fleet;
mod handover;
pub mod http;
pub mod index;
pub mod kv;
pub mod log;
pub mod mailbox;
pub mod memory;
pub mod meter;
pub mod metrics;
pub mod overlap;
mod redact;
pub mod rendezvous;
pub mod requests;
pub mod runtime;
pub mod tokenize;
