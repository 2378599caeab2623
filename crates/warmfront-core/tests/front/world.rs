//! A small world on loopback: scripted engines, a deciding thread, the real front between them.

use std::collections::BTreeMap;
use std::future::Future;
use std::net::SocketAddr;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use arc_swap::ArcSwap;
use parking_lot::Mutex;
use serde_json::Value;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{TcpListener, TcpStream};
use tokio::task::JoinHandle;
use warmfront_core::clock::Clock;
use warmfront_core::config::{
    ForwardAuthorization, FrontConfig, HeaderRules, IndexConfig, MetricConfig, MetricKind, QueueConfig, SessionConfig,
    UpstreamConfig,
};
use warmfront_core::fleet::{EventState, FleetView, Pool, Replica, ReplicaUpdate, Tokens};
use warmfront_core::http::{Front, Fronts, Outset, Preparer, Stop, serve};
use warmfront_core::index::Feed;
use warmfront_core::mailbox::{Mailbox, Received};
use warmfront_core::metrics::Metrics;
use warmfront_core::requests::RequestTable;

/// Longest that a test waits for anything.
pub const PATIENCE: Duration = Duration::from_secs(20);

/// A free port of one of this machine's own addresses, of each in turn: a long run would have every port of a single one
/// in `TIME_WAIT`.
pub fn loopback() -> String {
    static NEXT: AtomicUsize = AtomicUsize::new(0);
    format!("127.0.0.{}:0", 1 + NEXT.fetch_add(1, Ordering::Relaxed) % 250)
}

/// What a scripted engine does with one request.
pub enum Act {
    /// Writes these pieces, each by itself, and keeps the connection.
    Say(Vec<Vec<u8>>),
    /// The same, then closes.
    SayAndClose(Vec<Vec<u8>>),
    /// Reads on until the router closes, saying nothing more after these pieces.
    SayAndHang(Vec<Vec<u8>>),
    /// Writes stream events as fast as the socket takes them.
    Flood,
}

#[derive(Clone, Debug)]
pub struct Heard {
    pub head: String,
    pub body: Vec<u8>,
}

#[derive(Clone)]
pub struct Engine {
    pub address: SocketAddr,
    pub heard: Arc<Mutex<Vec<Heard>>>,
    /// Connections that the router has closed while the engine was still speaking or hanging.
    pub dropped: Arc<AtomicUsize>,
    pub flooded: Arc<AtomicUsize>,
}

impl Engine {
    pub async fn start(script: impl Fn(&Heard) -> Act + Send + Sync + 'static) -> Self {
        let listener = TcpListener::bind(loopback()).await.unwrap();
        let engine = Self {
            address: listener.local_addr().unwrap(),
            heard: Arc::default(),
            dropped: Arc::default(),
            flooded: Arc::default(),
        };
        let (script, shared) = (Arc::new(script), engine.clone());
        tokio::spawn(async move {
            loop {
                let (socket, _) = listener.accept().await.unwrap();
                socket.set_nodelay(true).unwrap();
                tokio::spawn(shared.clone().converse(socket, Arc::clone(&script)));
            }
        });
        engine
    }

    async fn converse(self, mut socket: TcpStream, script: Arc<impl Fn(&Heard) -> Act + Send + Sync>) {
        while let Some(heard) = read_message(&mut socket).await {
            let act = script(&heard);
            self.heard.lock().push(heard);
            let (pieces, then) = match act {
                Act::Say(pieces) => (pieces, 'k'),
                Act::SayAndClose(pieces) => (pieces, 'c'),
                Act::SayAndHang(pieces) => (pieces, 'h'),
                Act::Flood => (vec![SSE_HEAD.as_bytes().to_vec()], 'f'),
            };
            for piece in pieces {
                if socket.write_all(&piece).await.is_err() {
                    self.dropped.fetch_add(1, Ordering::Relaxed);
                    return;
                }
                tokio::task::yield_now().await;
            }
            match then {
                'c' => return,
                'h' => {
                    let mut rest = [0; 64];
                    while matches!(socket.read(&mut rest).await, Ok(1..)) {}
                    self.dropped.fetch_add(1, Ordering::Relaxed);
                    return;
                }
                'f' => {
                    let block = chunk(&format!("data: {}\n\n", "x".repeat(1000))).repeat(20);
                    while socket.write_all(&block).await.is_ok() {
                        self.flooded.fetch_add(block.len(), Ordering::Relaxed);
                    }
                    self.dropped.fetch_add(1, Ordering::Relaxed);
                    return;
                }
                _ => {}
            }
        }
    }

    pub fn requests(&self) -> usize {
        self.heard.lock().len()
    }
}

pub const SSE_HEAD: &str =
    "HTTP/1.1 200 OK\r\ncontent-type: text/event-stream; charset=utf-8\r\ntransfer-encoding: chunked\r\n\r\n";

pub fn chunk(text: &str) -> Vec<u8> {
    format!("{:x}\r\n{text}\r\n", text.len()).into_bytes()
}

pub fn say(text: &str) -> Vec<Vec<u8>> {
    vec![text.as_bytes().to_vec()]
}

pub fn json_reply(body: &str) -> Vec<Vec<u8>> {
    say(&format!("HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: {}\r\n\r\n{body}", body.len()))
}

/// A whole stream of these events, each in a chunk of its own.
pub fn stream_reply(events: &[&str]) -> Vec<Vec<u8>> {
    let mut pieces = say(SSE_HEAD);
    pieces.extend(events.iter().map(|event| chunk(event)));
    pieces.push(b"0\r\n\r\n".to_vec());
    pieces
}

async fn read_message(socket: &mut TcpStream) -> Option<Heard> {
    let mut bytes = Vec::new();
    let mut buffer = vec![0; 64 * 1024];
    loop {
        if let Some(end) = bytes.windows(4).position(|window| window == b"\r\n\r\n") {
            let head = String::from_utf8_lossy(&bytes[..end + 4]).into_owned(); // a field may hold any byte above 0x7f
            let length = header(&head, "content-length").map_or(0, |length| length.parse().unwrap());
            if bytes.len() >= end + 4 + length {
                return Some(Heard { head, body: bytes[end + 4..end + 4 + length].to_vec() });
            }
        }
        match socket.read(&mut buffer).await {
            Ok(count @ 1..) => bytes.extend_from_slice(&buffer[..count]),
            _ => return None,
        }
    }
}

pub fn header<'a>(head: &'a str, name: &str) -> Option<&'a str> {
    let lines = head.lines().filter_map(|line| line.split_once(':'));
    lines
        .map(|(key, value)| (key, value.trim()))
        .find(|(key, _)| key.eq_ignore_ascii_case(name))
        .map(|(_, value)| value)
}

/// What the deciding thread does with an event; `None`: nothing.
pub type Decide = Box<dyn FnMut(&[Value]) -> Option<Vec<u8>> + Send>;

/// Every arrival goes to these slots, in this order; what fails is delivered.
pub fn always(slots: &[u32]) -> Decide {
    let slots = slots.to_vec();
    Box::new(move |event| match event[0].as_str().unwrap() {
        "arrived" => Some(dispatch(&event[1][0], &slots)),
        "failed" if event[5] == false => Some(deliver(&event[1])),
        _ => None,
    })
}

/// Every arrival goes to the first slot, then, while it fails, to the next one; in the end it is delivered.
pub fn one_after_another(slots: u32) -> Decide {
    Box::new(move |event| match event[0].as_str().unwrap() {
        "arrived" => Some(dispatch(&event[1][0], &[0])),
        "failed" if event[5] == false => {
            let tried = event[4].as_array().unwrap().len() as u32;
            Some(if tried < slots { dispatch(&event[1], &[tried]) } else { deliver(&event[1]) })
        }
        _ => None,
    })
}

pub fn never() -> Decide {
    Box::new(|_| None)
}

pub fn dispatch(id: &Value, slots: &[u32]) -> Vec<u8> {
    let choices: Vec<(u32, u32, Option<u32>)> = slots.iter().map(|slot| (*slot, 32, None)).collect();
    rmp_serde::to_vec(&[("dispatch", id.as_u64().unwrap(), choices, "test")]).unwrap()
}

pub fn deliver(id: &Value) -> Vec<u8> {
    rmp_serde::to_vec(&[("deliver", id.as_u64().unwrap())]).unwrap()
}

pub fn shed(id: &Value, code: &str, retry_after_s: Option<f64>) -> Vec<u8> {
    rmp_serde::to_vec(&[("shed", id.as_u64().unwrap(), code, retry_after_s)]).unwrap()
}

pub struct Options {
    pub engines: Vec<SocketAddr>,
    pub decide: Decide,
    pub front: FrontConfig,
    pub upstream: UpstreamConfig,
    pub queues: QueueConfig,
}

impl Options {
    pub fn new(engines: &[&Engine]) -> Self {
        Self {
            engines: engines.iter().map(|engine| engine.address).collect(),
            decide: always(&[0]),
            front: FrontConfig {
                listen: String::new(),
                io_threads: 1,
                compute_threads: 1,
                body_bytes_max: 1024 * 1024,
                header_bytes_max: 16 * 1024,
                headers_max: 64,
                header_timeout_s: 10.0,
                body_timeout_s: 10.0,
                idle_timeout_s: 20.0,
                write_timeout_s: 20.0,
                connections_max: 1000,
                expose_headers: true,
                grace_s: 10.0,
                tls: None,
                keys_file: None,
                metrics_without_key: false,
                forward_authorization: ForwardAuthorization::Auto,
                trusted_networks: None,
                trusted_secret_file: None,
                headers: HeaderRules::default(),
                streams_per_client_max: 1000,
                settle_s: 0.0,
                handover: None,
                handover_timeout_s: 10.0,
                fleet_wait_s: 10.0,
                keep_alive_s: 0.0,
            },
            upstream: UpstreamConfig {
                connect_timeout_s: 2.0,
                first_byte_timeout_s: 10.0,
                idle_connections_per_server: 16,
                idle_timeout_s: 4.0,
            },
            queues: QueueConfig { events_max: 1000, commands_max: 1000, batch_max: 16, tick_interval_s: 0.05 },
        }
    }
}

pub struct World {
    pub address: SocketAddr,
    pub metrics: Arc<Metrics>,
    pub mailbox: Arc<Mailbox>,
    pub requests: Arc<RequestTable>,
    pub stop: Stop,
    pub fronts: Fronts,
    pub served: JoinHandle<()>,
    pub fleet: Arc<ArcSwap<FleetView>>,
    pub outset: Arc<Outset>,
    events: Arc<Mutex<Vec<Vec<Value>>>>,
}

impl World {
    /// One pool `m` with a replica for each engine.
    pub async fn start(options: Options) -> Self {
        let clock = Clock::start();
        let metrics = Arc::new(Metrics::new(&catalogue(), 100));
        let mailbox = Arc::new(Mailbox::new(clock, options.queues, &metrics));
        let fleet = Arc::new(ArcSwap::from_pointee(fleet_of(&options.engines)));
        let outset = Arc::<Outset>::default();
        let requests = Arc::new(RequestTable::new(Arc::clone(&fleet), clock));
        let preparer = Arc::new(Preparer::new((&index_config(), &session_config()), 1, clock, Arc::clone(&metrics)));
        let listener = TcpListener::bind(loopback()).await.unwrap();
        let address = listener.local_addr().unwrap();
        let front = Front::new(
            (options.front, options.upstream),
            (Arc::clone(&fleet), Arc::clone(&outset)),
            (Arc::clone(&mailbox), Arc::clone(&requests)),
            preparer,
            Arc::clone(&metrics),
        )
        .expect("a front");
        let stop = Stop::default();
        let fronts = Fronts::from(Arc::new(front));
        let served = tokio::spawn(serve(listener, fronts.clone(), stop.clone()));
        let events = Arc::default();
        decide_on_a_thread(Arc::clone(&mailbox), Arc::clone(&events), options.decide);
        Self { address, metrics, mailbox, requests, stop, fronts, served, fleet, outset, events }
    }

    /// One pool, one engine.
    pub async fn with(script: impl Fn(&Heard) -> Act + Send + Sync + 'static) -> (Self, Engine) {
        let engine = Engine::start(script).await;
        (Self::start(Options::new(&[&engine])).await, engine)
    }

    pub async fn client(&self) -> Client {
        Client { socket: TcpStream::connect(self.address).await.unwrap(), read: Vec::new() }
    }

    /// Sends one chat request on a connection of its own and reads the answer to the end.
    pub async fn chat(&self, body: &str) -> Answer {
        let mut client = self.client().await;
        client.send(&post("/v1/chat/completions", body)).await;
        client.answer().await
    }

    pub fn events(&self, tag: &str) -> Vec<Vec<Value>> {
        self.events.lock().iter().filter(|event| event[0] == tag).cloned().collect()
    }

    /// Ends of requests, by tag.
    pub fn ends(&self) -> Vec<String> {
        let events = self.events.lock();
        let is_end = |event: &&Vec<Value>| {
            event[0] == "finished" || event[0] == "cancelled" || (event[0] == "failed" && event[5] == true)
        };
        events.iter().filter(is_end).map(|event| event[0].as_str().unwrap().to_owned()).collect()
    }

    /// Waits until the requests so far have ended so, and nothing of them is left.
    pub async fn expect_ends(&self, ends: &[&str]) {
        eventually(|| self.ends().len() >= ends.len() && self.requests.is_empty()).await;
        assert_eq!(self.ends(), ends);
        assert_eq!(self.mailbox.undecided(), 0);
    }
}

impl Drop for World {
    fn drop(&mut self) {
        self.stop.set();
        self.mailbox.close();
        self.served.abort();
    }
}

fn decide_on_a_thread(mailbox: Arc<Mailbox>, events: Arc<Mutex<Vec<Vec<Value>>>>, mut decide: Decide) {
    std::thread::spawn(move || {
        loop {
            match mailbox.receive(Duration::from_millis(100)) {
                Received::Closed => return,
                Received::Nothing => {}
                Received::Events(bytes) => {
                    let batch: Vec<Vec<Value>> = rmp_serde::from_slice(&bytes).unwrap();
                    for event in batch {
                        let command = decide(&event);
                        events.lock().push(event);
                        if let Some(command) = command {
                            mailbox.command(&command).unwrap();
                        }
                    }
                }
            }
        }
    });
}

fn fleet_of(engines: &[SocketAddr]) -> FleetView {
    let replica = |(slot, address): (usize, &SocketAddr)| {
        Some(Arc::new(Replica {
            slot: slot as u32,
            id: format!("http://{address}"),
            authority: address.to_string(),
            rank: None,
            headers: http::HeaderMap::new(),
            ready: true,
            block_size: 16,
            feed: Feed::Approximate,
            events: Arc::new(Mutex::new(EventState { state: "none".to_owned(), ..EventState::default() })),
            place: Arc::default(),
            update: ReplicaUpdate::default(),
        }))
    };
    let models = BTreeMap::from([("m".to_owned(), None), ("lora".to_owned(), Some("lora".to_owned()))]);
    let by_model = models.iter().map(|(name, adapter)| (name.clone(), (0, adapter.clone()))).collect();
    let pool = Pool {
        name: "m".to_owned(),
        models,
        model_cards: vec![r#"{"id":"m","object":"model","max_model_len":4096}"#.to_owned()],
        tokens: Tokens::Approximate("no tokenizer".to_owned()),
        tokenizer: None,
        replicas: engines.iter().enumerate().map(replica).collect(),
        block_sizes: vec![16],
        indexes: BTreeMap::new(),
    };
    FleetView { pools: vec![Arc::new(pool)], by_model, ..FleetView::default() }
}

fn index_config() -> IndexConfig {
    IndexConfig {
        facts_max: 1000,
        seed: 0,
        predicted_ttl_s: 10.0,
        approximate_ttl_s: 10.0,
        block_size_default: 16,
        segment_cache_bytes: 0,
    }
}

fn session_config() -> SessionConfig {
    SessionConfig { headers: vec!["x-session-id".into(), "x-*-session-id".into()], baggage: "session.id".into() }
}

fn catalogue() -> Vec<MetricConfig> {
    use MetricKind::{Counter, Gauge, Histogram};
    let families: BTreeMap<&str, (MetricKind, &[&str])> = BTreeMap::from([
        ("warmfront_requests_total", (Counter, &["model", "outcome"][..])),
        ("warmfront_request_duration_seconds", (Histogram, &["model"])),
        ("warmfront_ttft_seconds", (Histogram, &["model"])),
        ("warmfront_itl_seconds", (Histogram, &["model"])),
        ("warmfront_decision_duration_seconds", (Histogram, &[])),
        ("warmfront_queue_duration_seconds", (Histogram, &["model"])),
        ("warmfront_prompt_tokens_total", (Counter, &["model"])),
        ("warmfront_predicted_cached_tokens_total", (Counter, &["replica"])),
        ("warmfront_reported_cached_tokens_total", (Counter, &["replica"])),
        ("warmfront_cached_tokens_error", (Histogram, &["replica"])),
        ("warmfront_overlap_blocks", (Histogram, &["model"])),
        ("warmfront_fallbacks_total", (Counter, &["reason"])),
        ("warmfront_session_keys_total", (Counter, &["source"])),
        ("warmfront_waiting_requests", (Gauge, &["pool"])),
        ("warmfront_waiting_band_requests", (Gauge, &["pool", "band"])),
        ("warmfront_oldest_wait_seconds", (Gauge, &["pool"])),
        ("warmfront_pool_requests", (Gauge, &["pool"])),
        ("warmfront_flow_limit", (Gauge, &["limit"])),
        ("warmfront_held_total", (Counter, &["pool", "reason"])),
        ("warmfront_shed_total", (Counter, &["pool", "reason"])),
        ("warmfront_event_queue_depth", (Gauge, &[])),
        ("warmfront_command_queue_depth", (Gauge, &[])),
        ("warmfront_upstream_failures_total", (Counter, &["replica", "kind"])),
        ("warmfront_upstream_connections", (Gauge, &["replica"])),
        ("warmfront_connections", (Gauge, &[])),
        ("warmfront_refused_clients_total", (Counter, &["reason"])),
        ("warmfront_streams", (Gauge, &[])),
        ("warmfront_relayed_bytes_total", (Counter, &["direction"])),
        ("warmfront_tokenize_duration_seconds", (Histogram, &["model"])),
    ]);
    let family = |(name, (kind, labels)): (&str, (MetricKind, &[&str]))| MetricConfig {
        name: name.to_owned(),
        kind,
        help: String::new(),
        labels: labels.iter().map(|label| (*label).to_owned()).collect(),
        buckets: vec![0.1, 1.0, 10.0],
    };
    families.into_iter().map(family).collect()
}

/// A raw client: bytes out, bytes in.
pub struct Client {
    pub socket: TcpStream,
    read: Vec<u8>,
}

#[derive(Debug)]
pub struct Answer {
    pub status: u16,
    pub head: String,
    /// Without the framing.
    pub body: Vec<u8>,
    /// The body ended as announced.
    pub is_whole: bool,
}

impl Answer {
    pub fn text(&self) -> &str {
        std::str::from_utf8(&self.body).unwrap()
    }

    pub fn json(&self) -> Value {
        serde_json::from_slice(&self.body).unwrap()
    }

    pub fn header(&self, name: &str) -> Option<&str> {
        header(&self.head, name)
    }
}

impl Client {
    pub async fn send(&mut self, bytes: impl AsRef<[u8]>) {
        self.socket.write_all(bytes.as_ref()).await.unwrap();
    }

    /// Reads more; false at the end.
    async fn more(&mut self) -> bool {
        let read =
            tokio::time::timeout(PATIENCE, self.socket.read_buf(&mut self.read)).await.expect("an answer in time");
        matches!(read, Ok(1..))
    }

    /// Reads until the bytes so far contain `wanted`.
    pub async fn until(&mut self, wanted: &str) -> String {
        loop {
            let text = String::from_utf8_lossy(&self.read).into_owned();
            if text.contains(wanted) {
                return text;
            }
            assert!(self.more().await, "closed before {wanted:?}: {text}");
        }
    }

    /// Whether the router closes the connection without a word.
    pub async fn is_closed(&mut self) -> bool {
        while self.more().await {}
        self.read.is_empty()
    }

    /// Reads one answer to its end.
    pub async fn answer(&mut self) -> Answer {
        let end = loop {
            if let Some(end) = self.read.windows(4).position(|window| window == b"\r\n\r\n") {
                break end + 4;
            }
            assert!(self.more().await, "closed before a header: {:?}", String::from_utf8_lossy(&self.read));
        };
        let head = String::from_utf8(self.read.drain(..end).collect()).unwrap();
        let status = head.split(' ').nth(1).unwrap().parse().unwrap();
        let (body, is_whole) = if header(&head, "transfer-encoding").is_some() {
            self.chunked().await
        } else if let Some(length) = header(&head, "content-length") {
            self.exactly(length.parse().unwrap()).await
        } else if status == 204 || status == 100 {
            (Vec::new(), true)
        } else {
            while self.more().await {}
            (std::mem::take(&mut self.read), true)
        };
        Answer { status, head, body, is_whole }
    }

    async fn exactly(&mut self, length: usize) -> (Vec<u8>, bool) {
        while self.read.len() < length {
            if !self.more().await {
                return (std::mem::take(&mut self.read), false);
            }
        }
        (self.read.drain(..length).collect(), true)
    }

    async fn chunked(&mut self) -> (Vec<u8>, bool) {
        let mut body = Vec::new();
        loop {
            let Some(end) = self.read.windows(2).position(|window| window == b"\r\n") else {
                if !self.more().await {
                    return (body, false);
                }
                continue;
            };
            let length = usize::from_str_radix(std::str::from_utf8(&self.read[..end]).unwrap(), 16).unwrap();
            let (data, is_whole) = self.exactly(end + 2 + length + 2).await;
            if !is_whole {
                return (body, false);
            }
            if length == 0 {
                return (body, true);
            }
            body.extend_from_slice(&data[end + 2..end + 2 + length]);
        }
    }
}

pub fn post(path: &str, body: &str) -> String {
    format!(
        "POST {path} HTTP/1.1\r\nhost: router\r\ncontent-type: application/json\r\ncontent-length: {}\r\n\r\n{body}",
        body.len()
    )
}

pub const CHAT: &str = r#"{"model":"m","messages":[{"role":"user","content":"hello"}]}"#;
pub const CHAT_STREAM: &str = r#"{"model":"m","stream":true,"messages":[{"role":"user","content":"hello"}]}"#;

/// Waits for a condition.
pub async fn eventually(condition: impl Fn() -> bool) {
    let deadline = Instant::now() + PATIENCE;
    while !condition() {
        assert!(Instant::now() < deadline, "the condition did not come true");
        tokio::time::sleep(Duration::from_millis(2)).await;
    }
}

pub async fn in_time<T>(future: impl Future<Output = T>) -> T {
    tokio::time::timeout(PATIENCE, future).await.expect("done in time")
}
