//! What the benchmark programs share: a small HTTP/1.1 reader, a client, bodies, and CPU accounting.
//!
//! The programs run on one core beside the router under test, so everything here is single-threaded, reuses its buffers
//! and does no more than the measurement needs. None of it is fit for production.

pub mod client;
mod connection;
pub mod flags;
pub mod http;
pub mod process;
pub mod samples;
mod schedule;
pub mod text;
