//! KV events: decode, order, apply.

pub mod apply;
mod msgpack;
pub mod replay;
pub mod sequence;
pub mod subscribe;
pub mod wire;
pub mod zmtp;
