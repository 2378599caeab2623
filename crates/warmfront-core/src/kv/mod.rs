//! KV events: decode, order, apply.

pub mod replay;
pub mod sequence;
pub mod subscribe;
pub mod zmtp;
