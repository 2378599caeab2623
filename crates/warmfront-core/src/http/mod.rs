//! HTTP towards clients and engines.

pub mod json;
pub mod request;
