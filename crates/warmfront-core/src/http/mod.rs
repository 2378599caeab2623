//! HTTP towards clients and engines. See `docs/explanation/architecture.md`, life of a request.

mod access;
mod account;
mod answer;
mod body;
mod front;
mod headers;
pub mod json;
mod keys;
mod overview;
mod patience;
mod precedence;
mod prepare;
mod proxy;
mod quiet;
mod relay;
pub mod request;
mod routes;
mod sse;
mod stop;
mod tls;
mod upstream;
mod verdict;
mod watched;

pub use front::{Fronts, serve};
pub use prepare::{Ask, Prepared, Preparer, Refusal};
pub use proxy::Front;
pub use stop::Stop;
