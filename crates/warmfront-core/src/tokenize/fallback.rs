//! Reasons for hashing the bytes of a request instead of its tokens.

/// Why the tokens of a request cannot be reproduced. The caller hashes its bytes instead and counts the reason.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Fallback {
    /// Images, audio, video or prompt embeddings.
    Media,
    /// The template raised an error, or ran out of bounds.
    TemplateError,
    /// The request brings a template and the engine does not take it.
    UntrustedTemplate,
    /// The tokenizer has no chat template.
    NoTemplate,
    /// The engine renders this model's prompts by code.
    OwnRenderer,
    /// The engine will refuse the request.
    InvalidRequest,
    /// A kind of item or tool whose conversion is not known here.
    UnsupportedContent,
    /// Lone surrogates or bytes that are not UTF-8.
    UnreadableText,
    /// The conversation so far is stored in the engine.
    StoredHistory,
    /// The path has no prompt that is cached by blocks.
    NoPrompt,
    /// The tokenizer failed on this text.
    TokenizerError,
}

impl Fallback {
    /// All of them, for registering labels.
    pub const ALL: &[Self] = &[
        Self::Media,
        Self::TemplateError,
        Self::UntrustedTemplate,
        Self::NoTemplate,
        Self::OwnRenderer,
        Self::InvalidRequest,
        Self::UnsupportedContent,
        Self::UnreadableText,
        Self::StoredHistory,
        Self::NoPrompt,
        Self::TokenizerError,
    ];

    /// A short fixed word, usable as a label.
    #[must_use]
    pub fn reason(self) -> &'static str {
        match self {
            Self::Media => "media",
            Self::TemplateError => "template_error",
            Self::UntrustedTemplate => "untrusted_template",
            Self::NoTemplate => "no_template",
            Self::OwnRenderer => "own_renderer",
            Self::InvalidRequest => "invalid_request",
            Self::UnsupportedContent => "unsupported_content",
            Self::UnreadableText => "unreadable_text",
            Self::StoredHistory => "stored_history",
            Self::NoPrompt => "no_prompt",
            Self::TokenizerError => "tokenizer_error",
        }
    }
}
