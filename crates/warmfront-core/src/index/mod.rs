//! One index, two feeds: which replica holds which block.
