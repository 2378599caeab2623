//! Chat template and tokenizer, giving the token ids that the engine computes.
