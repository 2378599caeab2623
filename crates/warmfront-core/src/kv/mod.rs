//! KV events: decode, order, apply.
