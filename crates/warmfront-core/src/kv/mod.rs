//! KV events: decode, order, apply.

pub mod apply;
mod msgpack;
pub mod wire;
