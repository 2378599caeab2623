//! HTTP towards clients and engines. See `docs/explanation/architecture.md`, life of a request.

mod access;
mod account;
mod answer;
mod body;
mod front;
mod headers;
pub mod json;
mod keys;
mod outset;
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
pub(crate) mod tls;
mod upstream;
mod verdict;
mod watched;
mod worded;

pub(crate) use access::read_secret;
pub use front::{Fronts, serve};
pub use outset::Outset;
pub use prepare::{Ask, Prepared, Preparer, Refusal};
pub use proxy::Front;
pub use stop::Stop;
