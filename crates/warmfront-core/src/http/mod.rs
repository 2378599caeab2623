//! HTTP towards clients and engines. See `docs/explanation/architecture.md`, life of a request.

mod account;
mod answer;
mod body;
mod front;
mod headers;
pub mod json;
mod overview;
mod patience;
mod prepare;
mod proxy;
mod quiet;
mod relay;
pub mod request;
mod routes;
mod sse;
mod upstream;
mod verdict;

pub use front::{Stop, serve};
pub use prepare::{Ask, Prepared, Preparer, Refusal};
pub use proxy::Front;
