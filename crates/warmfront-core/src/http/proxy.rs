//! One request through the router: read, prepare, ask, send, relay.
//!
//! The whole life is one future in the client's connection task. Dropping it at any point (the client left) drops the
//! guard of the request and the engine's connection, and nothing else is needed to cancel. What one would get wrong: a
//! request that an engine may have worked on goes to no other one by itself: the next choice is tried only where not a
//! byte has been written. Any other failure before the client has seen a byte is told to the router, which names another
//! engine or has what the last attempt left delivered; it waits here, see [`Held`].

use std::hash::{BuildHasher as _, Hasher as _, RandomState};
use std::sync::Arc;
use std::time::Duration;

use arc_swap::ArcSwap;
use bytes::Bytes;
use http::header::{
    ACCEPT_ENCODING, ALLOW, CONNECTION, CONTENT_ENCODING, CONTENT_LENGTH, HOST, HeaderName, HeaderValue, RETRY_AFTER,
    WWW_AUTHENTICATE,
};
use http::request::Parts;
use http::response::Parts as Answered;
use http::{HeaderMap, Method, Request, Response, StatusCode, Uri};
use http_body_util::Full;
use hyper::body::Incoming;
use tokio::time::Instant;

use super::access::{Access, Caller, Denied, Peer};
use super::account::{Account, End};
use super::answer::{self, Reply, Shape};
use super::body::{self, BodyError};
use super::outset::Outset;
use super::prepare::{Ask, Prepared, Preparer, Refusal};
use super::relay::{Relay, Route, Source};
use super::request::Endpoint;
use super::routes::{self, Target};
use super::tls::ServerTls;
use super::upstream::{Exchange, Upstream, UpstreamError};
use super::verdict::{self, Verdict};
use super::{headers, overview};
use crate::config::{FrontConfig, UpstreamConfig};
use crate::error::{
    BODY_TOO_LARGE, CoreError, FLEET_SATURATED, Face, HEADERS_TOO_LARGE, INVALID_API_KEY, INVALID_BODY,
    METHOD_NOT_ALLOWED, NO_READY_REPLICA, PATH_NOT_FOUND, QUEUE_TIMEOUT, RATE_LIMIT_EXCEEDED, REQUEST_TIMEOUT,
    ROUTER_OVERLOADED, UNSUPPORTED_ENCODING, UPSTREAM_TIMEOUT, UPSTREAM_UNREACHABLE,
};
use crate::fleet::{FleetView, Replica};
use crate::mailbox::{Choice, Decision, Failure, InFlight, Mailbox, Slot};
use crate::metrics::Metrics;
use crate::requests::RequestTable;

/// Times that the router is asked about one request that no engine has answered.
const DECISIONS_MAX: usize = 3;
/// What a client is told to wait when a queue of ours is full.
const OVERLOAD_PAUSE_S: f64 = 1.0;

/// What the front works with. One for each configuration that was in force: a request ends under the one it began with.
#[derive(Debug)]
pub struct Front {
    pub(super) config: FrontConfig,
    pub(super) metrics: Arc<Metrics>,
    pub(super) upstream: Arc<Upstream>,
    pub(super) access: Arc<Access>,
    /// `None`: clients speak plain HTTP.
    pub(super) tls: Option<Arc<ServerTls>>,
    pub(super) outset: Arc<Outset>,
    fleet: Arc<ArcSwap<FleetView>>,
    mailbox: Arc<Mailbox>,
    requests: Arc<RequestTable>,
    preparer: Arc<Preparer>,
    /// Makes request ids that differ between runs of the process.
    id_seed: RandomState,
}

impl Front {
    /// # Errors
    ///
    /// A file of keys, a secret or a certificate cannot be read, or a field that only the core reads is wrong.
    pub fn new(
        (config, upstream): (FrontConfig, UpstreamConfig),
        (fleet, outset): (Arc<ArcSwap<FleetView>>, Arc<Outset>),
        (mailbox, requests): (Arc<Mailbox>, Arc<RequestTable>),
        preparer: Arc<Preparer>,
        metrics: Arc<Metrics>,
    ) -> Result<Self, CoreError> {
        let upstream = Arc::new(Upstream::new(upstream, Arc::clone(&metrics)));
        let access = Arc::new(Access::new(&config)?);
        let tls = config.tls.as_ref().map(ServerTls::new).transpose()?.map(Arc::new);
        let id_seed = RandomState::new();
        Ok(Self { config, metrics, upstream, access, tls, outset, fleet, mailbox, requests, preparer, id_seed })
    }

    /// Whether anything is read from files that may change.
    pub(super) fn has_files(&self) -> bool {
        self.tls.is_some() || self.access.has_files() || self.upstream.has_files()
    }

    /// Reads keys, secrets and certificates again that have changed. Blocks on the file system.
    pub(super) fn refresh(&self) {
        self.access.refresh();
        self.upstream.refresh();
        if let Some(tls) = &self.tls {
            tls.refresh();
        }
    }

    /// The same front under another configuration. Connections to engines stay open unless theirs is another one too; who
    /// may come in and with which certificates stays as it was at the start.
    #[must_use]
    pub fn reconfigured(&self, config: FrontConfig, upstream: UpstreamConfig) -> Self {
        let upstream = if *self.upstream.config() == upstream {
            Arc::clone(&self.upstream)
        } else {
            Arc::new(Upstream::new(upstream, Arc::clone(&self.metrics)))
        };
        Self {
            config,
            metrics: Arc::clone(&self.metrics),
            upstream,
            access: Arc::clone(&self.access),
            tls: self.tls.clone(),
            outset: Arc::clone(&self.outset),
            fleet: Arc::clone(&self.fleet),
            mailbox: Arc::clone(&self.mailbox),
            requests: Arc::clone(&self.requests),
            preparer: Arc::clone(&self.preparer),
            id_seed: self.id_seed.clone(),
        }
    }

    pub fn config(&self) -> &FrontConfig {
        &self.config
    }

    pub(super) fn mailbox(&self) -> &Arc<Mailbox> {
        &self.mailbox
    }

    /// How long a stream may be silent before the client gets a comment; `None`: as long as it likes.
    fn keep_alive(&self) -> Option<Duration> {
        (self.config.keep_alive_s > 0.0).then(|| Duration::from_secs_f64(self.config.keep_alive_s))
    }
}

/// Answers one request: refused at the door, or what its path leads to.
pub(super) async fn answer(front: Arc<Front>, peer: Peer, request: Request<Incoming>) -> Response<Reply> {
    let caller = match front.access.admit(peer, request.uri().path(), request.headers()) {
        Ok(caller) => caller,
        Err(denied) => return turned_away(&front, request.uri().path(), denied),
    };
    let must_close = caller.must_close(request.headers());
    let mut response = route(&front, &caller, request).await;
    if must_close {
        response.headers_mut().insert(CONNECTION, HeaderValue::from_static("close"));
    }
    response
}

/// The answer to a request that is not let in.
fn turned_away(front: &Front, path: &str, denied: Denied) -> Response<Reply> {
    front.metrics.inc("warmfront_refused_clients_total", &[denied.reason()], 1);
    let (face, message) = match denied {
        Denied::NoKey => (INVALID_API_KEY, "An API key is needed: send it as `Authorization: Bearer` or `x-api-key`."),
        Denied::UnknownKey => (INVALID_API_KEY, "The API key is not valid."),
        Denied::Framing => (INVALID_BODY, "A request has either a Content-Length or the Transfer-Encoding `chunked`."),
        Denied::TooManyStreams => (RATE_LIMIT_EXCEEDED, "Too many requests of this client are running."),
    };
    let mut response = answer::error(Shape::of(Endpoint::of(routes::canonical(path))), face, message);
    let headers = response.headers_mut();
    match denied {
        Denied::NoKey | Denied::UnknownKey => headers.insert(WWW_AUTHENTICATE, HeaderValue::from_static("Bearer")),
        Denied::Framing => headers.insert(CONNECTION, HeaderValue::from_static("close")),
        Denied::TooManyStreams => headers.insert(RETRY_AFTER, HeaderValue::from_static("1")),
    };
    response
}

async fn route(front: &Arc<Front>, caller: &Caller, request: Request<Incoming>) -> Response<Reply> {
    let path = request.uri().path();
    let Some(found) = routes::find(path) else {
        return answer::error(Shape::OpenAi, PATH_NOT_FOUND, "There is no such path.");
    };
    if !found.accepts(request.method()) {
        return other_method(request.method(), found.allow);
    }
    match found.target {
        Target::ByPrefix(endpoint) => forward_for(front, caller, request, Some(endpoint)).await,
        Target::ByLoad => forward_for(front, caller, request, None).await,
        Target::Models => overview::models(&*front.outset.whole(&front.fleet).await),
        Target::Model => {
            let fleet = front.outset.whole(&front.fleet).await;
            overview::model(&fleet, routes::model_name(path).unwrap_or_default())
        }
        Target::Health => answer::json(200, "{}"),
        Target::Ready => overview::ready(&front.fleet.load(), &front.mailbox.standings()),
        Target::Backlog => overview::backlog(&front.fleet.load(), &front.metrics),
        Target::Metrics => answer::with_type(200, "text/plain; version=0.0.4; charset=utf-8", front.metrics.render()),
        Target::Version => overview::version(),
    }
}

/// Forwards a request as one of its caller's, with the headers that its caller may send.
async fn forward_for(
    front: &Arc<Front>,
    caller: &Caller,
    mut request: Request<Incoming>,
    endpoint: Option<Endpoint>,
) -> Response<Reply> {
    let share = match front.access.share(caller, front.config.streams_per_client_max) {
        Ok(share) => share,
        Err(denied) => return turned_away(front, request.uri().path(), denied),
    };
    front.access.clean(caller, request.headers_mut());
    let mut response = forward(front, request, endpoint).await;
    response.body_mut().count(share);
    response
}

/// The answer to a request whose turn does not come before the process ends.
pub(super) fn shutting_down(path: &str) -> Response<Reply> {
    let shape = match routes::find(path).map(|found| found.target) {
        Some(Target::ByPrefix(endpoint)) => Shape::of(endpoint),
        _ => Shape::default(),
    };
    let mut response = answer::error(shape, ROUTER_OVERLOADED, "The router is shutting down.");
    answer::retry_after(&mut response, OVERLOAD_PAUSE_S);
    response
}

fn other_method(method: &Method, allow: &'static str) -> Response<Reply> {
    let mut response = if method == Method::OPTIONS {
        let mut response = Response::new(Reply::whole(""));
        *response.status_mut() = StatusCode::NO_CONTENT;
        response
    } else {
        answer::error(Shape::OpenAi, METHOD_NOT_ALLOWED, "The path does not take this method.")
    };
    response.headers_mut().insert(ALLOW, HeaderValue::from_static(allow));
    response
}

/// Why a request ends without an engine's answer.
struct Refused {
    face: Face,
    message: String,
    retry_after_s: Option<f64>,
    end: End,
}

impl Refused {
    fn new(face: Face, message: impl Into<String>, end: End) -> Self {
        Self { face, message: message.into(), retry_after_s: None, end }
    }

    fn overloaded(message: &str) -> Self {
        let retry_after_s = Some(OVERLOAD_PAUSE_S);
        Self { face: ROUTER_OVERLOADED, message: message.to_owned(), retry_after_s, end: End::Overloaded }
    }

    fn shed(face: Face, retry_after_s: Option<f64>) -> Self {
        let message = match face {
            FLEET_SATURATED => "All engines are busy. Try again later.",
            QUEUE_TIMEOUT => "The request waited too long for an engine.",
            NO_READY_REPLICA => "No engine is ready to serve this model.",
            UPSTREAM_UNREACHABLE => "No engine could be reached.",
            _ => "The request was refused.",
        };
        Self { face, message: message.to_owned(), retry_after_s, end: End::Shed }
    }
}

impl From<Refusal> for Refused {
    fn from(refusal: Refusal) -> Self {
        if refusal.face == NO_READY_REPLICA {
            let retry_after_s = Some(OVERLOAD_PAUSE_S);
            return Self { face: refusal.face, message: refusal.message, retry_after_s, end: End::Shed };
        }
        Self::new(refusal.face, refusal.message, End::Invalid)
    }
}

impl From<BodyError> for Refused {
    fn from(error: BodyError) -> Self {
        let (face, end) = match error {
            BodyError::TooLarge(_) => (BODY_TOO_LARGE, End::Invalid),
            BodyError::Timeout => (REQUEST_TIMEOUT, End::Invalid),
            BodyError::Broken => (INVALID_BODY, End::Cancelled),
        };
        Self::new(face, error.to_string(), end)
    }
}

/// Sends a request to an engine and gives back its answer, or an error of our own.
async fn forward(front: &Arc<Front>, request: Request<Incoming>, endpoint: Option<Endpoint>) -> Response<Reply> {
    let account = Account::open(&front.metrics, front.mailbox.clock());
    let (Parts { method, uri, headers, .. }, incoming) = request.into_parts();
    let id = front.mailbox.next_id();
    let request_id = headers::request_id(&headers, fresh_id(&front.id_seed, id));
    let shape = endpoint.map_or_else(Shape::default, Shape::of);
    let mut journey = Journey {
        front,
        method,
        uri,
        headers: Arc::new(headers),
        endpoint,
        shape,
        request_id: request_id.clone(),
        priority: None,
        account: Some(account),
        tried: vec![],
    };
    let mut response = match journey.run(id, incoming).await {
        Ok(response) => response,
        Err(refused) => {
            if let Some(account) = &mut journey.account {
                account.ends(refused.end);
            }
            let mut response = answer::error(shape, refused.face, &refused.message);
            if let Some(seconds) = refused.retry_after_s {
                answer::retry_after(&mut response, seconds);
            }
            if refused.face == UNSUPPORTED_ENCODING {
                response.headers_mut().insert(ACCEPT_ENCODING, HeaderValue::from_static("identity"));
            }
            response
        }
    };
    response.headers_mut().insert(headers::REQUEST_ID, request_id);
    response
}

fn fresh_id(seed: &RandomState, id: u64) -> u64 {
    let mut hasher = seed.build_hasher();
    hasher.write_u64(id);
    hasher.finish()
}

/// One request on its way.
struct Journey<'a> {
    front: &'a Arc<Front>,
    method: Method,
    uri: Uri,
    headers: Arc<HeaderMap>,
    endpoint: Option<Endpoint>,
    shape: Shape,
    request_id: HeaderValue,
    /// What the engine is told instead of what the client asked for.
    priority: Option<i64>,
    /// Handed on to the relay with the answer.
    account: Option<Account>,
    /// Slots that could not be reached, over all decisions.
    tried: Vec<Slot>,
}

/// What the router is told, and what is kept of it.
struct Sent {
    pool: String,
    body: Bytes,
    block_size: u32,
    prompt_tokens: u32,
}

/// An answer that may go to the client.
struct Begun<'c> {
    choice: &'c Choice,
    replica: Arc<Replica>,
    answered: Response<()>,
    exchange: Exchange,
    /// What was read of the body already.
    first: Bytes,
}

/// An attempt that gave the client nothing.
struct Attempt {
    failure: Failure,
    held: Held,
}

impl Attempt {
    fn of(error: &UpstreamError) -> Self {
        let failure =
            Failure { error: error.kind().to_owned(), accepted: !error.is_before_sending(), ..Failure::default() };
        Self { failure, held: Held::Error(unreachable_engine(error)) }
    }
}

/// Why a replica's attempt gave nothing.
enum Unanswered {
    Answer(Box<Attempt>),
    Error(UpstreamError),
}

impl From<UpstreamError> for Unanswered {
    fn from(error: UpstreamError) -> Self {
        Self::Error(error)
    }
}

/// What the client gets when nobody else takes its request.
enum Held {
    Answer(Box<HeldAnswer>),
    Error(Refused),
}

/// An engine's error in full: at most [`verdict::HELD_BYTES_MAX`] bytes.
struct HeldAnswer {
    /// Its id, where clients may see it.
    replica: Option<String>,
    answered: Response<Bytes>,
}

impl Held {
    fn nothing() -> Self {
        Self::Error(Refused::new(UPSTREAM_UNREACHABLE, "No engine could be reached.", End::Failed))
    }

    /// Takes what a later attempt left; an engine's own words are worth more than ours.
    fn replace(&mut self, later: Self) {
        if matches!((&*self, &later), (_, Self::Answer(_)) | (Self::Error(_), _)) {
            *self = later;
        }
    }
}

impl Journey<'_> {
    async fn run(&mut self, id: u64, incoming: Incoming) -> Result<Response<Reply>, Refused> {
        let front = self.front;
        self.check_headers()?;
        self.check_encoding()?;
        let pause = Duration::from_secs_f64(front.config.body_timeout_s);
        let body = body::read(incoming, front.config.body_bytes_max, pause).await?;
        front.metrics.inc("warmfront_relayed_bytes_total", &["up"], body.len() as u64);
        let ask = Ask {
            id,
            time_s: front.mailbox.clock().now_s(),
            endpoint: self.endpoint,
            headers: Arc::clone(&self.headers),
            body: body.clone(),
        };
        let Prepared { facts, prompt, is_priority_overruled } = self.prepare(ask).await?;
        if let Some(account) = &mut self.account {
            account.of_model(&facts.model);
        }
        self.priority = is_priority_overruled.then_some(facts.priority);
        let sent = Sent {
            pool: facts.pool.clone(),
            body,
            block_size: prompt.hashes.first().map_or(1, |(size, _)| *size),
            prompt_tokens: facts.prompt_tokens,
        };
        let flight = InFlight::enter(&front.mailbox, &front.requests, facts, prompt)
            .map_err(|_full| Refused::overloaded("The router has too many requests waiting."))?;
        self.decide_and_send(flight, &sent).await
    }

    /// Prepares by the fleet that is known; in the first seconds, by the first one that serves the request.
    async fn prepare(&self, ask: Ask) -> Result<Prepared, Refused> {
        let front = self.front;
        let Some(mut wait) = front.outset.wait(headers::timeout_s(&self.headers)) else {
            return Ok(front.preparer.prepare(front.fleet.load_full(), ask).await?);
        };
        loop {
            if let Some(view) = wait.look(&front.fleet) {
                let is_partial = view.is_partial;
                match front.preparer.prepare(view, ask.clone()).await {
                    Err(refusal) if is_partial && refusal.is_of_fleet() => {}
                    prepared => return Ok(prepared?),
                }
            }
            if !wait.news().await {
                return Err(Refusal::new(NO_READY_REPLICA, "No engine for this model is known yet.").into());
            }
        }
    }

    fn check_headers(&self) -> Result<(), Refused> {
        let bytes: usize = self.headers.iter().map(|(name, value)| name.as_str().len() + value.len() + 4).sum();
        if bytes > self.front.config.header_bytes_max {
            return Err(Refused::new(HEADERS_TOO_LARGE, "The request header is too large.", End::Invalid));
        }
        Ok(())
    }

    /// A compressed prompt cannot be routed by, and engines do not read it either. Other bodies are the engines' business.
    fn check_encoding(&self) -> Result<(), Refused> {
        let is_none = |coding: &HeaderValue| coding.as_bytes().eq_ignore_ascii_case(b"identity");
        if self.endpoint.is_none() || self.headers.get_all(CONTENT_ENCODING).iter().all(is_none) {
            return Ok(());
        }
        Err(Refused::new(
            UNSUPPORTED_ENCODING,
            "No Content-Encoding is taken here: send the body as it is.",
            End::Invalid,
        ))
    }

    /// Asks the router, and again while no engine has answered.
    async fn decide_and_send(&mut self, mut flight: InFlight, sent: &Sent) -> Result<Response<Reply>, Refused> {
        let clock = self.front.mailbox.clock();
        let mut held = Held::nothing();
        for round in 1..=DECISIONS_MAX {
            let asked_s = clock.now_s();
            let decision = flight.decision().await;
            let model = self.account.as_ref().map_or("", Account::model);
            self.front.metrics.observe("warmfront_queue_duration_seconds", &[model], clock.now_s() - asked_s);
            let choices = match decision {
                Some(Decision::Dispatch { choices, .. }) => choices,
                Some(Decision::Shed { face, retry_after_s }) => return Err(Refused::shed(face, retry_after_s)),
                Some(Decision::Deliver) => return self.deliver(held),
                None => return Err(Refused::overloaded("The router is stopping.")),
            };
            match self.walk(&choices, &flight, sent).await {
                Ok(begun) => return Ok(self.relay(flight, begun, sent)),
                Err(attempt) => {
                    held.replace(attempt.held);
                    flight.unanswered(attempt.failure, self.tried.clone(), round == DECISIONS_MAX);
                }
            }
        }
        self.deliver(held)
    }

    /// Tries the choices in order until one takes the request. The failure is the last one's. A replica that left the fleet
    /// meanwhile was not tried: its slot may be another one's by the time of the next decision.
    async fn walk<'c>(&mut self, choices: &'c [Choice], flight: &InFlight, sent: &Sent) -> Result<Begun<'c>, Attempt> {
        let mut last = UpstreamError::Left;
        for (row, choice) in choices.iter().enumerate() {
            let Some(replica) = self.replica(&sent.pool, choice.slot) else { continue };
            if row > 0 {
                flight.moved(choice.slot);
            }
            self.tried.push(choice.slot);
            match self.attempt(choice, &replica, sent).await {
                Ok(begun) => return Ok(begun),
                Err(Unanswered::Answer(attempt)) => return Err(*attempt),
                Err(Unanswered::Error(error)) => {
                    self.note_failure(&replica, error.kind(), &error);
                    if !error.is_before_sending() {
                        return Err(Attempt::of(&error));
                    }
                    last = error;
                }
            }
        }
        Err(Attempt::of(&last))
    }

    /// Sends the request to one replica and looks at the beginning of its answer.
    async fn attempt<'c>(
        &self,
        choice: &'c Choice,
        replica: &Arc<Replica>,
        sent: &Sent,
    ) -> Result<Begun<'c>, Unanswered> {
        let started = Instant::now();
        let upstream = &self.front.upstream;
        let request = || self.engine_request(replica, &sent.body);
        let (answered, mut exchange) =
            upstream.exchange(&replica.authority, replica.update.tls.as_ref(), request).await?;
        let quiet_from = self.front.keep_alive().map(|pause| started + pause);
        let deadline = started + upstream.first_byte_timeout();
        match verdict::look(&answered, &mut exchange, deadline, quiet_from).await? {
            Verdict::Passes(first) => Ok(Begun { choice, replica: Arc::clone(replica), answered, exchange, first }),
            Verdict::Failed { failure, body } => {
                let status = answered.status().as_u16();
                self.note_failure(replica, &failure.error, &format_args!("answered with status {status}"));
                let replica = self.front.config.expose_headers.then(|| replica.id.clone());
                let held = Held::Answer(Box::new(HeldAnswer { replica, answered: answered.map(|()| body) }));
                Err(Unanswered::Answer(Box::new(Attempt { failure, held })))
            }
        }
    }

    fn note_failure(&self, replica: &Replica, kind: &str, words: &dyn std::fmt::Display) {
        let request_id = self.request_id.to_str().unwrap_or_default();
        if matches!(kind, "rejected" | "stream_rejected") {
            tracing::debug!(request_id, replica = replica.id, "the engine has no room: {words}"); // many in an overload
        } else {
            tracing::warn!(request_id, replica = replica.id, "the request failed: {words}");
        }
        self.front.metrics.inc("warmfront_upstream_failures_total", &[&replica.id, kind], 1);
    }

    /// Ends the request with what its last attempt left: the engine's own answer, byte for byte, or an error of ours.
    fn deliver(&mut self, held: Held) -> Result<Response<Reply>, Refused> {
        let HeldAnswer { replica, answered } = match held {
            Held::Error(refused) => return Err(refused),
            Held::Answer(answer) => *answer,
        };
        let (Answered { status, headers, .. }, body) = answered.into_parts();
        if let Some(account) = &mut self.account {
            account.ends(End::EngineError);
            account.metrics().inc("warmfront_relayed_bytes_total", &["down"], body.len() as u64);
        }
        let mut response = Response::new(Reply::whole(body));
        *response.status_mut() = status;
        *response.headers_mut() = headers::for_client(status, headers);
        let replica = replica.and_then(|id| HeaderValue::try_from(id).ok());
        set(response.headers_mut(), headers::REPLICA, replica);
        Ok(response)
    }

    /// The replica in a slot of a pool, if it is still there.
    fn replica(&self, pool: &str, slot: Slot) -> Option<Arc<Replica>> {
        self.front.fleet.load().pool(pool)?.replica(slot).cloned()
    }

    /// The client's request as this replica gets it: the same bytes under the headers of the next hop.
    fn engine_request(&self, replica: &Replica, body: &Bytes) -> Request<Full<Bytes>> {
        let mut headers = headers::for_engine(&self.headers, self.front.access.engine_headers());
        set(&mut headers, HOST, HeaderValue::try_from(replica.authority.as_str()).ok());
        set(&mut headers, headers::REQUEST_ID, Some(self.request_id.clone()));
        set(&mut headers, headers::PRIORITY, self.priority.map(HeaderValue::from));
        set(&mut headers, headers::RANK, replica.rank.map(HeaderValue::from));
        set(&mut headers, CONTENT_LENGTH, Some(HeaderValue::from(body.len())));
        for (name, value) in &replica.headers {
            headers.insert(name, value.clone());
        }
        let mut request = Request::new(Full::new(body.clone()));
        *request.method_mut() = self.method.clone();
        *request.uri_mut() = self.engine_uri();
        *request.headers_mut() = headers;
        request
    }

    /// Path and query alone, the path as the table spells it.
    fn engine_uri(&self) -> Uri {
        let uri = &self.uri;
        let path = routes::canonical(uri.path());
        if uri.authority().is_none() && path.len() == uri.path().len() {
            return uri.clone(); // as almost every client writes it
        }
        let text = match uri.query() {
            Some(query) => format!("{path}?{query}"),
            None => path.to_owned(),
        };
        Uri::try_from(text).expect("a part of a URI is a URI")
    }

    /// Hands the answer and everything that ends with it to the body of the response.
    fn relay(&mut self, flight: InFlight, begun: Begun<'_>, sent: &Sent) -> Response<Reply> {
        let Begun { choice, replica, answered, exchange, first } = begun;
        let account = self.account.take().expect("handed on once");
        note_dispatch(&account, choice, sent);
        let front = self.front;
        let (Answered { status, headers, .. }, ()) = answered.into_parts();
        let mut headers = headers::for_client(status, headers);
        if front.config.expose_headers {
            set(&mut headers, headers::REPLICA, HeaderValue::try_from(replica.id.as_str()).ok());
            set(&mut headers, headers::PREDICTED, Some(HeaderValue::from(choice.cached_tokens)));
        }
        let route = Route {
            slot: choice.slot,
            replica: replica.id.clone(),
            tried: std::mem::take(&mut self.tried),
            shape: self.shape,
            request_id: self.request_id.to_str().unwrap_or_default().to_owned(),
        };
        let pace = front.mailbox.pace(&sent.pool, choice.slot);
        let clock = front.mailbox.clock();
        let source = Source { exchange, first, keep_alive: front.keep_alive() };
        let relay = Relay::new(source, (status.as_u16(), &headers), (flight, account, route), (clock, pace));
        let mut response = Response::new(Reply::relay(relay));
        *response.status_mut() = status;
        *response.headers_mut() = headers;
        response
    }
}

fn set(headers: &mut HeaderMap, name: HeaderName, value: Option<HeaderValue>) {
    if let Some(value) = value {
        headers.insert(name, value);
    }
}

/// Counts what the router expects of this dispatch.
fn note_dispatch(account: &Account, choice: &Choice, sent: &Sent) {
    let metrics = account.metrics();
    metrics.inc("warmfront_prompt_tokens_total", &[account.model()], u64::from(sent.prompt_tokens));
    let blocks = choice.cached_tokens / sent.block_size;
    metrics.observe("warmfront_overlap_blocks", &[account.model()], f64::from(blocks));
}

/// What the client learns of a failed engine: neither address nor cause, which are in the log.
fn unreachable_engine(error: &UpstreamError) -> Refused {
    let (face, message) = match error {
        UpstreamError::FirstByteTimeout => (UPSTREAM_TIMEOUT, "The engine did not answer in time."),
        _ if error.is_before_sending() => (UPSTREAM_UNREACHABLE, "No engine could be reached."),
        _ if error.is_nonsense() => (UPSTREAM_UNREACHABLE, "The engine's answer could not be understood."),
        _ => (UPSTREAM_UNREACHABLE, "The engine closed the connection without an answer."),
    };
    Refused::new(face, message, End::Failed)
}
