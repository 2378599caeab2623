//! KV events: decode, order, apply.

pub mod sequence;
