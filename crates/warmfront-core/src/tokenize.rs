//! Chat template and tokenizer, giving the token ids that the engine computes.

use std::path::Path;

use thiserror::Error;

use crate::fleet::TemplateOptions;

/// Why a tokenizer cannot be used.
#[derive(Debug, Error)]
#[error("{0}")]
pub struct TokenizeError(String);

/// A loaded tokenizer with its chat template.
#[derive(Debug)]
pub struct Tokenizer;

impl Tokenizer {
    /// Reads a model directory or a `tokenizer.json`. Slow: not for I/O threads.
    pub fn load(path: &Path, _options: &TemplateOptions) -> Result<Self, TokenizeError> {
        Err(TokenizeError(format!("{}: this build has no tokenizer", path.display())))
    }
}
