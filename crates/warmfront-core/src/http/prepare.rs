//! From bytes to facts: which model, which pool, which blocks, and everything else the router is told of a request.
//!
//! Small bodies are prepared where they are read; a large one would hold up every stream on its I/O thread, so it goes to
//! a compute thread. Work that has not begun ends with the client.

use std::hash::RandomState;
use std::sync::Arc;

use bytes::Bytes;
use http::HeaderMap;
use http::header::CONTENT_TYPE;
use memchr::memmem;
use tokio::sync::Semaphore;

use super::headers::{self, SessionRules};
use super::request::{self, Endpoint, ParsedBody};
use crate::block::{BlockExtras, BlockHasher, SeqHash};
use crate::clock::Clock;
use crate::config::{IndexConfig, SessionConfig};
use crate::error::{Face, INTERNAL_ERROR, INVALID_BODY, MODEL_NOT_FOUND, NO_READY_REPLICA};
use crate::fleet::{FleetView, Pool, Tokens};
use crate::mailbox::{Basis, RequestFacts, RequestId, Route};
use crate::metrics::Metrics;
use crate::requests::{Prompt, prefix_key};
use crate::tokenize::{Fallback, Prompts, Tokenizer};

/// Bodies up to this are prepared on the I/O thread: below about 0.2 ms of work, a hop to another thread costs more than
/// it saves, and streams on the thread do not notice.
const INLINE_BYTES_MAX: usize = 16 * 1024;
/// Where tokens cannot be had: bytes of English and of code a token.
const BYTES_PER_TOKEN: usize = 4;
/// Reason of a fallback while the pool's tokenizer is being read.
const TOKENIZER_LOADING: &str = "tokenizer_loading";
/// How much of an unknown model's name is repeated to the client.
const NAME_CHARS_SHOWN_MAX: usize = 128;

/// A request as it came.
#[derive(Clone, Debug)]
pub struct Ask {
    pub id: RequestId,
    pub time_s: f64,
    /// `None`: routed by load.
    pub endpoint: Option<Endpoint>,
    pub headers: Arc<HeaderMap>,
    pub body: Bytes,
}

/// A request as the router is told of it, and its blocks.
#[derive(Debug)]
pub struct Prepared {
    pub facts: RequestFacts,
    pub prompt: Arc<Prompt>,
    /// The caller asked for more urgency than it may have, or may have done so in a way that only engines read: the
    /// engine must be told the priority that counts.
    pub is_priority_overruled: bool,
}

/// Why a request does not reach the router.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Refusal {
    pub face: Face,
    pub message: String,
}

impl Refusal {
    pub(super) fn new(face: Face, message: impl Into<String>) -> Self {
        Self { face, message: message.into() }
    }

    /// It is the fleet that lacks something, and another fleet may not.
    pub(super) fn is_of_fleet(&self) -> bool {
        matches!(self.face, NO_READY_REPLICA | MODEL_NOT_FOUND)
    }
}

/// Prepares requests. One for the process.
#[derive(Debug)]
pub struct Preparer {
    seed: u64,
    block_size_default: u32,
    sessions: SessionRules,
    /// Makes names of flows out of credentials.
    secret: RandomState,
    compute: Arc<Semaphore>,
    clock: Clock,
    metrics: Arc<Metrics>,
}

impl Preparer {
    /// `compute_threads`: large bodies prepared at the same time.
    #[must_use]
    pub fn new(
        (index, session): (&IndexConfig, &SessionConfig),
        compute_threads: usize,
        clock: Clock,
        metrics: Arc<Metrics>,
    ) -> Self {
        Self {
            seed: index.seed,
            block_size_default: index.block_size_default,
            sessions: SessionRules::new(session),
            secret: RandomState::new(),
            compute: Arc::new(Semaphore::new(compute_threads.max(1))),
            clock,
            metrics,
        }
    }

    /// Prepares one request. Dropping the future drops work that has not begun.
    pub async fn prepare(self: &Arc<Self>, fleet: Arc<FleetView>, ask: Ask) -> Result<Prepared, Refusal> {
        if ask.body.len() <= INLINE_BYTES_MAX {
            return self.compute(&fleet, &ask);
        }
        let permit = Arc::clone(&self.compute).acquire_owned().await.map_err(|_| internal())?;
        let this = Arc::clone(self);
        let work = tokio::task::spawn_blocking(move || {
            let result = this.compute(&fleet, &ask);
            drop(permit);
            result
        });
        work.await.map_err(|_| internal())?
    }

    fn compute(&self, fleet: &FleetView, ask: &Ask) -> Result<Prepared, Refusal> {
        let parsed = parse(ask)?;
        let (pool, model, adapter) = resolve(fleet, parsed.model.as_deref())?;
        let blocks = match ask.endpoint {
            Some(endpoint) => self.blocks(pool, endpoint, &ask.body, &parsed, (&model, adapter.as_deref())),
            None => Blocks::none(ask.body.len()),
        };
        let in_body = (parsed.priority, parsed.may_hide_priority);
        let (priority, is_priority_overruled) = headers::bounded_priority(&ask.headers, in_body);
        let facts = RequestFacts {
            id: ask.id,
            time_s: ask.time_s,
            pool: pool.name.clone(),
            model,
            adapter,
            flow: headers::flow(&ask.headers, &self.secret),
            priority,
            route: if ask.endpoint.is_some() { Route::Prefix } else { Route::Load },
            basis: blocks.basis,
            prompt_tokens: blocks.prompt_tokens,
            blocks: blocks.hashes.first().map_or(0, |(_, hashes)| hashes.len() as u32),
            turn: parsed.turns,
            output_tokens_max: parsed.output_tokens_max,
            affinity_key: self.affinity_key(ask, &parsed),
            prefix_key: prefix_key(&blocks.hashes),
            stream: parsed.stream,
            fallback: blocks.fallback.map(str::to_owned),
            deadline_s: headers::timeout_s(&ask.headers).map(|timeout_s| ask.time_s + timeout_s),
        };
        if let Some(reason) = blocks.fallback {
            self.metrics.inc("warmfront_fallbacks_total", &[reason], 1);
        }
        let prompt = Prompt {
            pool: pool.name.clone(),
            tokens: blocks.first_tokens,
            reads_cache: parsed.reads_cache,
            hashes: blocks.hashes,
        };
        Ok(Prepared { facts, prompt: Arc::new(prompt), is_priority_overruled })
    }

    /// The key of the conversation, from a header or else from the body.
    fn affinity_key(&self, ask: &Ask, parsed: &ParsedBody) -> Option<u64> {
        let in_body = || parsed.session.as_ref().map(|session| ("body", session.key.as_bytes()));
        let found = self.sessions.find(&ask.headers).or_else(in_body);
        if ask.endpoint.is_some() {
            let source = found.map_or("none", |(source, _)| source);
            self.metrics.inc("warmfront_session_keys_total", &[source], 1);
        }
        found.map(|(_, session)| headers::session_key(&ask.headers, session))
    }

    fn blocks(
        &self,
        pool: &Pool,
        endpoint: Endpoint,
        body: &Bytes,
        parsed: &ParsedBody,
        (model, adapter): (&str, Option<&str>),
    ) -> Blocks {
        let extras = BlockExtras {
            adapter: adapter.map(str::to_owned),
            salt: parsed.cache_salt.as_deref().map(str::to_owned),
            media: Vec::new(),
        };
        let fallback = match (&pool.tokenizer, &pool.tokens) {
            (Some(tokenizer), _) => match self.tokenize(tokenizer, endpoint, parsed, model) {
                Ok(prompts) => return self.token_blocks(pool, &prompts, &extras),
                Err(fallback) => Some(fallback.reason()),
            },
            (None, Tokens::Loading) => Some(TOKENIZER_LOADING),
            (None, _) => None, // told once for the pool, not for each request
        };
        let bytes = prompt_bytes(endpoint, body);
        let hashes = self.each_block_size(pool, |hasher, block_size| {
            hasher.chain_bytes(bytes, block_size as usize * BYTES_PER_TOKEN, &extras)
        });
        let tokens = estimate(bytes.len());
        Blocks { basis: Basis::Bytes, prompt_tokens: tokens, first_tokens: tokens, hashes, fallback }
    }

    fn tokenize(
        &self,
        tokenizer: &Tokenizer,
        endpoint: Endpoint,
        parsed: &ParsedBody,
        model: &str,
    ) -> Result<Prompts, Fallback> {
        let started_s = self.clock.now_s();
        let prompts = tokenizer.prompt(endpoint, parsed)?;
        let seconds = self.clock.now_s() - started_s;
        self.metrics.observe("warmfront_tokenize_duration_seconds", &[model], seconds);
        Ok(prompts)
    }

    /// All prompts of the request are computed, the first one routes.
    fn token_blocks(&self, pool: &Pool, prompts: &Prompts, extras: &BlockExtras) -> Blocks {
        let tokens: usize = prompts.ids.iter().map(Vec::len).sum();
        let first = prompts.ids.first().map_or(&[][..], Vec::as_slice);
        let hashes = self.each_block_size(pool, |hasher, _| hasher.chain(first, extras));
        let prompt_tokens = u32::try_from(tokens).unwrap_or(u32::MAX);
        let first_tokens = u32::try_from(first.len()).unwrap_or(u32::MAX);
        Blocks { basis: Basis::Tokens, prompt_tokens, first_tokens, hashes, fallback: None }
    }

    fn each_block_size(
        &self,
        pool: &Pool,
        chain: impl Fn(&BlockHasher, u32) -> Vec<SeqHash>,
    ) -> Vec<(u32, Arc<[SeqHash]>)> {
        let default = BlockHasher::new(self.seed, self.block_size_default);
        if pool.block_sizes.is_empty() {
            return vec![(self.block_size_default, chain(&default, self.block_size_default).into())]; // no replica yet
        }
        let hash = |size: &u32| {
            let hasher = pool.indexes.get(size).map_or(&default, |index| index.hasher());
            (*size, chain(hasher, *size).into())
        };
        pool.block_sizes.iter().map(hash).collect()
    }
}

/// The blocks of a prompt and what is known of it.
struct Blocks {
    basis: Basis,
    /// Of all prompts of the request.
    prompt_tokens: u32,
    /// Of the one that routes.
    first_tokens: u32,
    hashes: Vec<(u32, Arc<[SeqHash]>)>,
    fallback: Option<&'static str>,
}

impl Blocks {
    fn none(body_bytes: usize) -> Self {
        Self {
            basis: Basis::None,
            prompt_tokens: estimate(body_bytes),
            first_tokens: 0,
            hashes: Vec::new(),
            fallback: None,
        }
    }
}

fn estimate(bytes: usize) -> u32 {
    u32::try_from(bytes / BYTES_PER_TOKEN).unwrap_or(u32::MAX)
}

fn internal() -> Refusal {
    Refusal::new(INTERNAL_ERROR, "The request could not be prepared.")
}

/// Reads the body. On paths routed by load only the model matters, and a body that is no JSON is the engine's business.
fn parse(ask: &Ask) -> Result<ParsedBody, Refusal> {
    if let Some(endpoint) = ask.endpoint {
        return request::parse(endpoint, &ask.body).map_err(|error| Refusal::new(INVALID_BODY, error.to_string()));
    }
    let content_type = ask.headers.get(CONTENT_TYPE).map_or(&b""[..], |value| value.as_bytes());
    if content_type.starts_with(b"multipart/form-data") {
        let model = form_model(&ask.body).map(Arc::from);
        return Ok(ParsedBody { model, ..unread_body() });
    }
    Ok(request::parse(Endpoint::Other, &ask.body).unwrap_or_else(|_| unread_body()))
}

/// Of a body that only engines can read, nothing is known.
fn unread_body() -> ParsedBody {
    let empty = request::parse(Endpoint::Other, &Bytes::from_static(b"{}")).expect("an empty object is a body");
    ParsedBody { may_hide_priority: true, ..empty }
}

/// The value of a form's `model` part.
fn form_model(body: &[u8]) -> Option<&str> {
    let part = &body[memmem::find(body, b"name=\"model\"")?..];
    let value = &part[memmem::find(part, b"\r\n\r\n")? + 4..];
    std::str::from_utf8(&value[..memmem::find(value, b"\r\n")?]).ok()
}

/// The pool that serves a model, the name to account it under, and the adapter.
fn resolve<'a>(fleet: &'a FleetView, model: Option<&str>) -> Result<(&'a Pool, String, Option<String>), Refusal> {
    if fleet.pools.is_empty() {
        return Err(Refusal::new(NO_READY_REPLICA, "No engine is known yet."));
    }
    let Some(model) = model else {
        return match &fleet.pools[..] {
            [pool] => Ok((pool, default_model(fleet, pool), None)),
            _ => Err(Refusal::new(INVALID_BODY, "The request names no model, and several are served here.")),
        };
    };
    if let Some((pool, adapter)) = fleet.pool_of(model) {
        return Ok((pool, model.to_owned(), adapter.map(str::to_owned)));
    }
    let shown: String = model.chars().take(NAME_CHARS_SHOWN_MAX).collect();
    Err(Refusal::new(MODEL_NOT_FOUND, format!("The model `{shown}` does not exist.")))
}

/// What a pool's engine takes when no model is named: its base model, whose name is the pool's where both are served.
fn default_model(fleet: &FleetView, pool: &Pool) -> String {
    if fleet.by_model.contains_key(&pool.name) {
        return pool.name.clone();
    }
    let base = fleet.by_model.iter().filter(|(_, (_, adapter))| adapter.is_none()).map(|(name, _)| name).min();
    base.unwrap_or(&pool.name).clone()
}

/// The part of a body that holds the prompt: from its first prompt field on. Fields before it (model, temperature) would
/// otherwise make every prompt different.
fn prompt_bytes(endpoint: Endpoint, body: &[u8]) -> &[u8] {
    let fields: &[&[u8]] = match endpoint {
        Endpoint::Chat => &[b"\"messages\"", b"\"tools\""],
        Endpoint::Completions => &[b"\"prompt\""],
        Endpoint::Responses => &[b"\"instructions\"", b"\"input\"", b"\"tools\""],
        Endpoint::Messages => &[b"\"system\"", b"\"messages\"", b"\"tools\""],
        Endpoint::Other => &[],
    };
    let start = fields.iter().filter_map(|field| memmem::find(body, field)).min().unwrap_or(0);
    &body[start..]
}
