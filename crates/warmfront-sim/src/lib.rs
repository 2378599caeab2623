//! The engine model, and a fleet of engines in virtual time.
//!
//! [`engine`] is one engine: continuous batching over a paged prefix cache, step by step, without a clock. `warmfront
//! engine` runs it on the wall clock; [`fleet`] runs many of them on virtual time, with the index that serves. One model,
//! two clocks. Nothing here reads a clock; the only random numbers are seeded (lost event batches).

pub mod content;
pub mod engine;
pub mod fleet;
pub mod histogram;
