//! Tokens or bytes → blocks → sequence hashes.
