//! Chat template and tokenizer, giving the token ids that the engine computes.
//!
//! A body goes through three steps: its fields become a conversation (`chat`, `responses`, `messages`), the template
//! renders the conversation as text (`template`), the text becomes ids (`encode`), with pieces seen before taken from the
//! [`SegmentCache`]. Either the ids are exactly the engine's or there is a [`Fallback`]: a wrong guess would look like a
//! prefix that nobody holds. `docs/explanation/tokens.md` lists the rules and how they are checked.

mod cache;
mod chat;
mod cut;
mod detect;
mod encode;
mod fallback;
mod load;
mod messages;
mod python;
mod responses;
mod rules;
mod template;
mod templates;
mod version;

use std::path::{Path, PathBuf};
use std::sync::{Arc, OnceLock};

use minijinja::value::Value;

use crate::clock::CivilTime;
use crate::fleet::TemplateOptions;
use crate::http::json::{self, Json};
use crate::http::request::{Endpoint, ParsedBody};

pub use cache::{SegmentCache, SegmentCacheStats};
pub use fallback::Fallback;
pub use load::TokenizeError;
pub use template::LocalTime;

use chat::{Continuation, Conversation, Pairs};
use detect::ContentFormat;
use encode::{Encoder, Surround};
use messages::TemplateFacts;
use rules::{Side, TokenRules};
use template::Template;
use templates::Templates;
use version::Version;

/// Cache of a tokenizer that is loaded without one of its own being handed in.
const CACHE_BYTES_DEFAULT: usize = 64 << 20;

/// A text so many times longer than the context is cut by the engine before it tokenizes.
const TEXT_BYTES_PER_TOKEN_MIN: usize = 8;

/// Arguments of `apply_chat_template` that are no variables of the template.
const CONSUMED_KWARGS: &[&str] = &[
    "add_generation_prompt",
    "continue_final_message",
    "documents",
    "max_length",
    "padding",
    "return_dict",
    "return_tensors",
    "tokenizer_kwargs",
    "tools",
    "truncation",
];

/// Token ids of a request: one list a prompt, at least one. The first decides where the request goes.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Prompts {
    pub ids: Vec<Vec<u32>>,
}

/// A request to the engine's `/tokenize` and what it must answer if our tokens are the engine's.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct AgreementSample {
    /// JSON for `POST /tokenize`, without `model`.
    pub body: String,
    pub expected: Vec<u32>,
}

/// What may differ between two loads of the same files.
#[derive(Clone)]
pub struct LoadOptions {
    /// Shared between tokenizers, or one of its own.
    pub cache: Arc<SegmentCache>,
    pub local_time: LocalTime,
}

impl Default for LoadOptions {
    fn default() -> Self {
        Self { cache: Arc::new(SegmentCache::new(CACHE_BYTES_DEFAULT)), local_time: Arc::new(CivilTime::now_utc) }
    }
}

/// Tokenizer and templates of one model under one engine's options. Safe to share; loading is slow.
pub struct Tokenizer {
    path: PathBuf,
    encoder: Encoder,
    templates: Templates,
    /// `bos_token` and so on, as variables.
    named_tokens: Vec<(Arc<str>, Value)>,
    default_kwargs: Pairs,
    options: TemplateOptions,
    version: Version,
    own_renderer: bool,
    facts: OnceLock<TemplateFacts>,
}

impl std::fmt::Debug for Tokenizer {
    fn fmt(&self, out: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        out.debug_struct("Tokenizer").finish_non_exhaustive()
    }
}

impl Tokenizer {
    /// Loads a model directory or a `tokenizer.json`, with a cache of its own.
    ///
    /// # Errors
    /// A file is missing or broken, a template is no Jinja, an option is not understood. The error names which.
    pub fn load(path: &Path, options: &TemplateOptions) -> Result<Self, TokenizeError> {
        Self::load_with(path, options, LoadOptions::default())
    }

    /// The same with a shared cache and a clock for templates that print the date.
    pub fn load_with(path: &Path, options: &TemplateOptions, load: LoadOptions) -> Result<Self, TokenizeError> {
        let files = load::Files::read(path)?;
        let version = options.engine_version.as_deref().map_or_else(Version::default, Version::parse);
        let templates = Templates::compile(&files, options, &load.local_time, version)?;
        let mut encoder = Encoder::new(files.tokenizer, load.cache)
            .map_err(|reason| TokenizeError::Tokenizer { path: files.path.clone(), reason })?;
        if let Some(adds) = files.adds {
            let surround = added_surround(&encoder, &files.named_tokens, adds);
            encoder.set_surround(surround);
        }
        let loaded = Self {
            path: path.to_owned(),
            encoder,
            templates,
            named_tokens: files.named_tokens.into_iter().map(|(name, text)| (name, Value::from(text))).collect(),
            default_kwargs: default_kwargs(options)?,
            options: options.clone(),
            version,
            own_renderer: files.own_renderer,
            facts: OnceLock::new(),
        };
        tracing::info!(
            path = %files.path.display(),
            fast = loaded.encoder.is_fast(),
            cut = loaded.encoder.is_cut(),
            template = loaded.templates.choose(false).is_some(),
            "tokenizer loaded"
        );
        Ok(loaded)
    }

    /// What it was loaded from, as it was named.
    #[must_use]
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// What the engine was told about rendering.
    #[must_use]
    pub fn options(&self) -> &TemplateOptions {
        &self.options
    }

    /// Token ids of every prompt in a body.
    ///
    /// # Errors
    /// The reason why they cannot be reproduced.
    pub fn prompt(&self, endpoint: Endpoint, body: &ParsedBody) -> Result<Prompts, Fallback> {
        if let Some(flaw) = body.flaw {
            return Err(flaw);
        }
        if endpoint == Endpoint::Completions {
            return self.completion_prompts(body);
        }
        let conversation = self.conversation(endpoint, body)?;
        let rules = TokenRules::of(endpoint, body)?;
        let ids = match conversation.token_ids {
            Some(ids) => ids,
            None => self.tokens(&self.render_conversation(&conversation)?, rules)?,
        };
        Ok(Prompts { ids: vec![ids] })
    }

    /// The text that the template makes of a body, before it is tokenized.
    ///
    /// # Errors
    /// The reason why it cannot be reproduced; [`Fallback::NoPrompt`] for a path without a template.
    pub fn render(&self, endpoint: Endpoint, body: &ParsedBody) -> Result<String, Fallback> {
        match body.flaw {
            Some(flaw) => Err(flaw),
            None => self.render_conversation(&self.conversation(endpoint, body)?),
        }
    }

    /// Ids of a plain text.
    ///
    /// # Errors
    /// The tokenizer failed on it.
    pub fn encode(&self, text: &str, add_special_tokens: bool) -> Result<Vec<u32>, Fallback> {
        self.tokens(text, TokenRules { add_special_tokens, truncate: None, side: None, wants_output: false })
    }

    /// Ids of a plain text by the slow way: in one piece, without cache. For tests of the fast way.
    ///
    /// # Errors
    /// The tokenizer failed on it.
    pub fn encode_whole(&self, text: &str) -> Result<Vec<u32>, Fallback> {
        self.encoder.encode_whole(text).map_err(|_| Fallback::TokenizerError)
    }

    /// Ids that the engine's `/tokenize` gives for these messages (a JSON list). It ignores several fields of a chat
    /// request, and up to 0.32 it leaves `reasoning_content` alone.
    ///
    /// # Errors
    /// The reason why they cannot be reproduced.
    pub fn tokenize_like_engine_endpoint(&self, messages: &str) -> Result<Vec<u32>, Fallback> {
        let (Json::List(mut list), None) = json::parse(messages).map_err(|_| Fallback::InvalidRequest)? else {
            return Err(Fallback::UnreadableText);
        };
        if self.version < Version::TOKENIZE_IS_CHAT {
            for message in &mut list {
                if let Json::Map(pairs) = message {
                    pairs.retain(|(key, _)| &**key != "reasoning_content");
                }
            }
        }
        let messages = list.iter().map(chat::in_schema_order).collect();
        let kwargs = vec![(Arc::from("add_generation_prompt"), Json::Bool(true))];
        let text = self.render_conversation(&Conversation { messages, kwargs, ..Conversation::default() })?;
        self.encode(&text, false)
    }

    /// A few requests for the engine's `/tokenize` with the answers it should give.
    #[must_use]
    pub fn agreement_samples(&self) -> Vec<AgreementSample> {
        let conversations = [
            r#"[{"role":"user","content":"Hello, Grüße & 日本語 😀 <b>1234567</b>"}]"#,
            r#"[{"role":"system","content":"You answer in one line."},{"role":"user","content":"What is 2+2?\n\n  Say it."}]"#,
            r#"[{"role":"user","content":"a"},{"role":"assistant","content":"b"},{"role":"user","content":[{"type":"text","text":"c"},{"type":"text","text":"d"}]}]"#,
        ];
        let chats = conversations.iter().filter_map(|messages| {
            let expected = self.tokenize_like_engine_endpoint(messages).ok()?;
            Some(AgreementSample { body: format!(r#"{{"messages":{messages}}}"#), expected })
        });
        let plain = "The quick brown fox.\n\tdef f(x):\n        return x ** 2  # ½ ﬁ e\u{301}";
        let plain = self.encode(plain, true).ok().map(|expected| AgreementSample {
            body: format!(r#"{{"prompt":{}}}"#, python::dumps(&Json::text(plain), true)),
            expected,
        });
        chats.chain(plain).collect()
    }

    /// Counters of the segment cache.
    #[must_use]
    pub fn cache_stats(&self) -> SegmentCacheStats {
        self.encoder.cache().stats()
    }

    /// Whether the fast library does the work.
    #[must_use]
    pub fn is_fast(&self) -> bool {
        self.encoder.is_fast()
    }

    fn conversation(&self, endpoint: Endpoint, body: &ParsedBody) -> Result<Conversation, Fallback> {
        if self.own_renderer && matches!(endpoint, Endpoint::Chat | Endpoint::Responses | Endpoint::Messages) {
            return Err(Fallback::OwnRenderer);
        }
        let exclude = self.options.exclude_tools_when_none;
        match endpoint {
            Endpoint::Chat => chat::conversation(body, self.version, exclude),
            Endpoint::Responses => responses::conversation(body, self.version, exclude),
            Endpoint::Messages => messages::conversation(body, self.facts(), self.version, exclude),
            Endpoint::Completions | Endpoint::Other => Err(Fallback::NoPrompt),
        }
    }

    fn completion_prompts(&self, body: &ParsedBody) -> Result<Prompts, Fallback> {
        if body.some("prompt_embeds").is_some() {
            return Err(Fallback::Media);
        }
        if body.some("suffix").is_some() {
            return Err(Fallback::UnsupportedContent);
        }
        let rules = TokenRules::of(Endpoint::Completions, body)?;
        let prompt = body.some("prompt").ok_or(Fallback::InvalidRequest)?;
        let one = |prompt: &Json| match prompt {
            Json::Str(text) => self.tokens(text, rules),
            Json::List(_) => {
                let ids = chat::token_ids(prompt).ok_or(Fallback::InvalidRequest)?;
                self.truncated(ids, TokenRules { side: rules.side.or(Some(Side::Left)), ..rules })
            }
            _ => Err(Fallback::InvalidRequest),
        };
        let ids = match prompt {
            Json::List(items) if items.is_empty() => return Err(Fallback::InvalidRequest),
            Json::List(items) if !matches!(items[0], Json::Int(_)) => {
                items.iter().map(one).collect::<Result<Vec<_>, _>>()?
            }
            single => vec![one(single)?],
        };
        Ok(Prompts { ids })
    }

    fn render_conversation(&self, conversation: &Conversation) -> Result<String, Fallback> {
        let tools = conversation.tools.clone().map(|tools| (Arc::from("tools"), Json::List(tools)));
        let defaults = chat::merge(self.default_kwargs.clone(), tools.into_iter().collect());
        let kwargs = chat::merge(defaults, conversation.kwargs.clone());
        let find = |key: &str| kwargs.iter().find(|(name, _)| &**name == key).map(|(_, value)| value);
        let has_tools = find("tools").is_some_and(|tools| !matches!(tools, Json::Null));
        let requested;
        let template = match &conversation.request_template {
            Some(_) if !self.options.trust_request_template => {
                return Err(Fallback::UntrustedTemplate);
            }
            Some(source) => {
                requested = self.templates.of_request(source, self.version)?;
                &*requested
            }
            None => self.templates.choose(has_tools).ok_or(Fallback::NoTemplate)?,
        };
        let format = self.format_of(template);
        let mut shown = chat::messages(&conversation.messages, format, template.knows_developer, self.version)?;
        let continues = find("continue_final_message").is_some_and(Json::is_truthy);
        let prompts = find("add_generation_prompt").is_some_and(Json::is_truthy);
        if continues && prompts {
            return Err(Fallback::InvalidRequest);
        }
        let continuation = if continues { Some(Continuation::mark(&mut shown, &template.source)?) } else { None };
        let bytes = shown.iter().flatten().filter_map(|(_, value)| value.as_str()).map(str::len).sum::<usize>();
        let mut variables = self.named_tokens.clone();
        for (key, value) in kwargs.iter().filter(|(key, _)| !CONSUMED_KWARGS.contains(&&**key)) {
            variables.retain(|(name, _)| name != key);
            variables.push((Arc::clone(key), python::value(value)));
        }
        let or_none = |key: &str| find(key).map_or_else(|| Value::from(()), python::value);
        if find("documents").is_some_and(|documents| !is_list_of_objects(documents)) {
            return Err(Fallback::InvalidRequest);
        }
        variables.push((Arc::from("messages"), python::list(shown.into_iter().map(python::dict).collect())));
        variables.push((Arc::from("tools"), or_none("tools")));
        variables.push((Arc::from("documents"), or_none("documents")));
        variables.push((Arc::from("add_generation_prompt"), Value::from(prompts)));
        let rendered = template.render(python::dict(variables), bytes + bytes / 8 + 1024)?;
        match continuation {
            Some(continuation) => continuation.cut(rendered),
            None => Ok(rendered),
        }
    }

    fn format_of(&self, template: &Template) -> ContentFormat {
        match self.options.content_format.as_deref() {
            Some("string") => ContentFormat::String,
            Some("openai") => ContentFormat::Parts,
            _ => template.format,
        }
    }

    /// Ids of a text with what is added around it and cut from it.
    fn tokens(&self, text: &str, rules: TokenRules) -> Result<Vec<u32>, Fallback> {
        let is_cut_before = rules.truncate.is_some()
            && rules.side.is_some()
            && self.options.max_model_len.is_none_or(|limit| text.len() / TEXT_BYTES_PER_TOKEN_MIN > limit as usize);
        if is_cut_before {
            return Err(Fallback::UnsupportedContent);
        }
        let ids = self.encoder.encode(text).map_err(|_| Fallback::TokenizerError)?;
        let Surround { before, after } = self.encoder.surround();
        if !rules.add_special_tokens || (before.is_empty() && after.is_empty()) {
            return self.truncated(ids, TokenRules { side: rules.side.or(Some(Side::Left)), ..rules });
        }
        let surrounded = |ids: &[u32]| [before.as_slice(), ids, after.as_slice()].concat();
        match (rules.side, self.limit(rules)?) {
            // Without a side the tokenizer itself truncates, and leaves room for what is added afterwards.
            (None, Some(limit)) => {
                let room = limit.checked_sub(before.len() + after.len()).ok_or(Fallback::InvalidRequest)?;
                Ok(surrounded(&ids[ids.len().saturating_sub(room)..]))
            }
            _ => self.truncated(surrounded(&ids), rules),
        }
    }

    fn truncated(&self, mut ids: Vec<u32>, rules: TokenRules) -> Result<Vec<u32>, Fallback> {
        if let Some(limit) = self.limit(rules)?.filter(|limit| *limit < ids.len()) {
            match rules.side {
                Some(Side::Right) => ids.truncate(limit),
                _ => drop(ids.drain(..ids.len() - limit)),
            }
        }
        Ok(ids)
    }

    /// Tokens to keep. A negative number means the context, less one token if any output is asked for.
    fn limit(&self, rules: TokenRules) -> Result<Option<usize>, Fallback> {
        match rules.truncate {
            None => Ok(None),
            Some(limit) if limit >= 0 => Ok(Some(limit as usize)),
            Some(_) => {
                let context = self.options.max_model_len.ok_or(Fallback::UnsupportedContent)? as usize;
                Ok(Some(context.saturating_sub(usize::from(rules.wants_output))))
            }
        }
    }

    /// What the engine finds out by rendering probes at start, found out at the first Messages request.
    fn facts(&self) -> &TemplateFacts {
        self.facts.get_or_init(|| TemplateFacts {
            merges_systems: [false, true]
                .iter()
                .any(|tools| self.templates.choose(*tools).is_none_or(|template| !template.takes_inline_systems())),
            disabled_effort: self.disabled_effort(),
        })
    }

    fn disabled_effort(&self) -> &'static str {
        let probe = |effort: &str| {
            let messages = vec![Json::map([("role", Json::text("user")), ("content", Json::text("Hi"))])];
            let explicit = vec![(Arc::from("add_generation_prompt"), Json::Bool(true))];
            let effort = chat::effort(&Vec::new(), Some(&Json::text(effort)), self.version);
            let kwargs = chat::merge(explicit, effort);
            self.render_conversation(&Conversation { messages, kwargs, ..Conversation::default() })
        };
        match probe("none") {
            Ok(none) => {
                let is_ignored =
                    ["low", "medium", "high", "xhigh", "max"].iter().any(|effort| probe(effort).as_ref() == Ok(&none));
                if is_ignored { "low" } else { "none" }
            }
            Err(_) => "low",
        }
    }
}

fn default_kwargs(options: &TemplateOptions) -> Result<Pairs, TokenizeError> {
    let Some(text) = &options.default_kwargs else {
        return Ok(Pairs::new());
    };
    match json::parse(text) {
        Ok((Json::Map(pairs), None)) => Ok(pairs),
        _ => Err(TokenizeError::Option { option: "default_kwargs", reason: "expected a JSON object".to_owned() }),
    }
}

/// What `add_bos_token` and `add_eos_token` put around a text.
fn added_surround(encoder: &Encoder, named: &[(Arc<str>, Arc<str>)], (bos, eos): (bool, bool)) -> Surround {
    let ids = |name: &str, wanted: bool| {
        let token = named.iter().find(|(key, _)| wanted && &**key == name).map(|(_, token)| token);
        token.and_then(|token| encoder.id_of(token)).into_iter().collect()
    };
    Surround { before: ids("bos_token", bos), after: ids("eos_token", eos) }
}

fn is_list_of_objects(documents: &Json) -> bool {
    match documents {
        Json::Null => true,
        Json::List(items) => items.iter().all(|item| matches!(item, Json::Map(_))),
        _ => false,
    }
}

#[cfg(test)]
mod tests;
