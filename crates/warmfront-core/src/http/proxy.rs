//! One request through the router: read, prepare, ask, send, relay.
//!
//! The whole life is one future in the client's connection task. Dropping it at any point (the client left) drops the
//! guard of the request and the engine's connection, and nothing else is needed to cancel. What one would get wrong: a
//! request goes to at most one engine. Only where not a byte has been written may the next choice be tried.

use std::hash::{BuildHasher as _, Hasher as _, RandomState};
use std::sync::Arc;
use std::time::Duration;

use arc_swap::ArcSwap;
use bytes::Bytes;
use http::header::{ALLOW, CONTENT_LENGTH, HOST, HeaderName, HeaderValue};
use http::request::Parts;
use http::response::Parts as Answered;
use http::{HeaderMap, Method, Request, Response, StatusCode, Uri};
use http_body_util::Full;
use hyper::body::Incoming;

use super::account::{Account, End};
use super::answer::{self, Reply, Shape};
use super::body::{self, BodyError};
use super::prepare::{Ask, Prepared, Preparer, Refusal};
use super::relay::{Relay, Route};
use super::request::Endpoint;
use super::routes::{self, Target};
use super::upstream::{Exchange, Upstream, UpstreamError};
use super::{headers, overview};
use crate::config::{FrontConfig, UpstreamConfig};
use crate::error::{
    BODY_TOO_LARGE, FLEET_SATURATED, Face, HEADERS_TOO_LARGE, INVALID_BODY, METHOD_NOT_ALLOWED, NO_READY_REPLICA,
    PATH_NOT_FOUND, QUEUE_TIMEOUT, REQUEST_TIMEOUT, ROUTER_OVERLOADED, UPSTREAM_TIMEOUT, UPSTREAM_UNREACHABLE,
};
use crate::fleet::{FleetView, Replica};
use crate::mailbox::{Choice, Decision, InFlight, Mailbox, Outcome, Slot};
use crate::metrics::Metrics;
use crate::requests::RequestTable;

/// Times that the router is asked about one request when none of its choices can be reached.
const DECISIONS_MAX: usize = 3;
/// What a client is told to wait when a queue of ours is full.
const OVERLOAD_PAUSE_S: f64 = 1.0;

/// What the front works with. One for the process.
#[derive(Debug)]
pub struct Front {
    pub(super) config: FrontConfig,
    pub(super) metrics: Arc<Metrics>,
    pub(super) upstream: Upstream,
    fleet: Arc<ArcSwap<FleetView>>,
    mailbox: Arc<Mailbox>,
    requests: Arc<RequestTable>,
    preparer: Arc<Preparer>,
    /// Makes request ids that differ between runs of the process.
    id_seed: RandomState,
}

impl Front {
    #[must_use]
    pub fn new(
        (config, upstream): (FrontConfig, UpstreamConfig),
        fleet: Arc<ArcSwap<FleetView>>,
        (mailbox, requests): (Arc<Mailbox>, Arc<RequestTable>),
        preparer: Arc<Preparer>,
        metrics: Arc<Metrics>,
    ) -> Self {
        let upstream = Upstream::new(upstream, Arc::clone(&metrics));
        Self { config, metrics, upstream, fleet, mailbox, requests, preparer, id_seed: RandomState::new() }
    }

    pub(super) fn mailbox(&self) -> &Arc<Mailbox> {
        &self.mailbox
    }
}

/// Answers one request.
pub(super) async fn answer(front: Arc<Front>, request: Request<Incoming>) -> Response<Reply> {
    let path = request.uri().path();
    let Some(found) = routes::find(path) else {
        return answer::error(Shape::OpenAi, PATH_NOT_FOUND, "There is no such path.");
    };
    if !found.accepts(request.method()) {
        return other_method(request.method(), found.allow);
    }
    match found.target {
        Target::ByPrefix(endpoint) => forward(&front, request, Some(endpoint)).await,
        Target::ByLoad => forward(&front, request, None).await,
        Target::Models => overview::models(&front.fleet.load()),
        Target::Model => overview::model(&front.fleet.load(), routes::model_name(path).unwrap_or_default()),
        Target::Health => answer::json(200, "{}"),
        Target::Ready => overview::ready(&front.fleet.load()),
        Target::Backlog => overview::backlog(&front.fleet.load(), &front.metrics),
        Target::Metrics => answer::with_type(200, "text/plain; version=0.0.4; charset=utf-8", front.metrics.render()),
        Target::Version => overview::version(),
    }
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

impl Journey<'_> {
    async fn run(&mut self, id: u64, incoming: Incoming) -> Result<Response<Reply>, Refused> {
        let front = self.front;
        self.check_headers()?;
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
        let Prepared { facts, prompt } = front.preparer.prepare(front.fleet.load_full(), ask).await?;
        if let Some(account) = &mut self.account {
            account.of_model(&facts.model);
        }
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

    fn check_headers(&self) -> Result<(), Refused> {
        let bytes: usize = self.headers.iter().map(|(name, value)| name.as_str().len() + value.len() + 4).sum();
        if bytes > self.front.config.header_bytes_max {
            return Err(Refused::new(HEADERS_TOO_LARGE, "The request header is too large.", End::Invalid));
        }
        Ok(())
    }

    /// Asks the router, and again if none of its choices can be reached.
    async fn decide_and_send(&mut self, mut flight: InFlight, sent: &Sent) -> Result<Response<Reply>, Refused> {
        let clock = self.front.mailbox.clock();
        for round in 1..=DECISIONS_MAX {
            let asked_s = clock.now_s();
            let decision = flight.decision().await;
            let model = self.account.as_ref().map_or("", Account::model);
            self.front.metrics.observe("warmfront_queue_duration_seconds", &[model], clock.now_s() - asked_s);
            let choices = match decision {
                Some(Decision::Dispatch { choices, .. }) => choices,
                Some(Decision::Shed { face, retry_after_s }) => return Err(Refused::shed(face, retry_after_s)),
                None => return Err(Refused::overloaded("The router is stopping.")),
            };
            match self.walk(&choices, &flight, sent).await {
                Ok((choice, replica, answered)) => return Ok(self.relay(flight, choice, &replica, answered, sent)),
                Err(error) if error.is_before_sending() && round < DECISIONS_MAX => {
                    flight.unreached(error.kind().to_owned(), self.tried.clone());
                }
                Err(error) => {
                    let tried = std::mem::take(&mut self.tried);
                    flight.ends(Outcome::Failed { error: error.kind().to_owned(), tried });
                    return Err(unreachable_engine(&error));
                }
            }
        }
        Err(Refused::new(UPSTREAM_UNREACHABLE, "No engine could be reached.", End::Failed))
    }

    /// Tries the choices in order until one takes the request. The error is the last one's.
    async fn walk<'c>(
        &mut self,
        choices: &'c [Choice],
        flight: &InFlight,
        sent: &Sent,
    ) -> Result<(&'c Choice, Arc<Replica>, (Response<()>, Exchange)), UpstreamError> {
        let mut last = UpstreamError::Unsent;
        for (row, choice) in choices.iter().enumerate() {
            if row > 0 {
                flight.moved(choice.slot);
            }
            self.tried.push(choice.slot);
            let Some(replica) = self.replica(&sent.pool, choice.slot) else { continue };
            let request = || self.engine_request(&replica, &sent.body);
            match self.front.upstream.exchange(&replica.authority, request).await {
                Ok(answered) => return Ok((choice, replica, answered)),
                Err(error) => {
                    self.note_failure(&replica, &error);
                    if !error.is_before_sending() {
                        return Err(error);
                    }
                    last = error;
                }
            }
        }
        Err(last)
    }

    fn note_failure(&self, replica: &Replica, error: &UpstreamError) {
        let request_id = self.request_id.to_str().unwrap_or_default();
        tracing::warn!(request_id, replica = replica.id, "the request failed: {error}");
        self.front.metrics.inc("warmfront_upstream_failures_total", &[&replica.id, error.kind()], 1);
    }

    /// The replica in a slot of a pool, if it is still there.
    fn replica(&self, pool: &str, slot: Slot) -> Option<Arc<Replica>> {
        self.front.fleet.load().pool(pool)?.replica(slot).cloned()
    }

    /// The client's request as this replica gets it: the same bytes under the headers of the next hop.
    fn engine_request(&self, replica: &Replica, body: &Bytes) -> Request<Full<Bytes>> {
        let mut headers = headers::for_engine(&self.headers);
        set(&mut headers, HOST, HeaderValue::try_from(replica.authority.as_str()).ok());
        set(&mut headers, headers::REQUEST_ID, Some(self.request_id.clone()));
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
    fn relay(
        &mut self,
        flight: InFlight,
        choice: &Choice,
        replica: &Replica,
        (answered, exchange): (Response<()>, Exchange),
        sent: &Sent,
    ) -> Response<Reply> {
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
        let relay = Relay::new(exchange, (status.as_u16(), &headers), (flight, account, route), (clock, pace));
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
