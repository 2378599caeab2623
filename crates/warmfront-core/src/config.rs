//! The part of the configuration that the core needs, handed over by Python as one JSON object.
//!
//! Defaults, ranges and reasons live in `python/warmfront/config.py` (`CoreConfig`); here is only the shape. Field names
//! are equal on both sides; unknown fields are refused so that the two cannot drift apart.

use std::collections::BTreeMap;

use serde::Deserialize;

/// Everything the data process has to know at start.
#[derive(Clone, Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct CoreConfig {
    pub front: FrontConfig,
    pub upstream: UpstreamConfig,
    pub session: SessionConfig,
    pub index: IndexConfig,
    pub kv: KvConfig,
    pub queues: QueueConfig,
    pub control: ControlConfig,
    #[serde(default)]
    pub snapshot: SnapshotConfig,
    pub log: LogConfig,
    /// The metric catalogue: one list feeds registration here, the reference page and the dashboards.
    pub metrics: Vec<MetricConfig>,
    pub label_values_max: usize,
}

#[derive(Clone, Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct FrontConfig {
    /// `host:port`; port 0 picks a free one.
    pub listen: String,
    pub io_threads: usize,
    pub compute_threads: usize,
    pub body_bytes_max: usize,
    pub header_bytes_max: usize,
    pub headers_max: usize,
    pub header_timeout_s: f64,
    pub body_timeout_s: f64,
    pub idle_timeout_s: f64,
    /// A client that takes no byte for so long loses its stream.
    pub write_timeout_s: f64,
    pub connections_max: usize,
    pub expose_headers: bool,
    /// From the termination signal to the end, whatever still runs.
    pub grace_s: f64,
    /// How long connections are still taken after a termination signal; within `grace_s`.
    pub settle_s: f64,
    /// Unix socket over which the next process takes the listening socket.
    pub handover: Option<String>,
    /// How long the next process may take to be ready.
    pub handover_timeout_s: f64,
    /// From the first accepted connection on, how long requests wait for a fleet that serves them.
    pub fleet_wait_s: f64,
    /// `None`: clients speak plain HTTP.
    pub tls: Option<TlsConfig>,
    /// Hashed keys of clients; `None`: nobody needs one.
    pub keys_file: Option<String>,
    pub metrics_without_key: bool,
    pub forward_authorization: ForwardAuthorization,
    /// `None`: loopback, or nobody where clients have keys.
    pub trusted_networks: Option<Vec<String>>,
    pub trusted_secret_file: Option<String>,
    pub headers: HeaderRules,
    pub streams_per_client_max: usize,
    /// Silence of a stream after which its client gets a comment; 0: never.
    pub keep_alive_s: f64,
}

/// PEM files of a listening port.
#[derive(Clone, Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct TlsConfig {
    /// The certificate and those between it and its authority.
    pub cert: String,
    pub key: String,
    /// Clients must show a certificate of one of these authorities.
    pub client_ca: Option<String>,
}

/// Whether engines get a client's `Authorization` and `x-api-key`.
#[derive(Clone, Copy, Debug, Deserialize, PartialEq, Eq)]
#[serde(rename_all = "lowercase")]
pub enum ForwardAuthorization {
    /// Only where they are not checked here.
    Auto,
    Always,
    Never,
}

/// Which client headers reach engines.
#[derive(Clone, Debug, Default, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct HeaderRules {
    pub remove: Vec<String>,
    /// `None`: all.
    pub allow: Option<Vec<String>>,
}

#[derive(Clone, Debug, PartialEq, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct UpstreamConfig {
    pub connect_timeout_s: f64,
    /// From the request sent to the first byte of the answer.
    pub first_byte_timeout_s: f64,
    pub idle_connections_per_server: usize,
    pub idle_timeout_s: f64,
}

/// Where a request says which conversation it belongs to.
#[derive(Clone, Debug, Default, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct SessionConfig {
    /// Header names in lower case, most specific first; each may hold one `*`.
    pub headers: Vec<String>,
    /// Member of the W3C `baggage` header; empty: not looked at.
    pub baggage: String,
}

#[derive(Clone, Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct IndexConfig {
    /// Upper bound of (replica, block) facts over all pools.
    pub facts_max: usize,
    /// Seed of the sequence hashes. Routers that exchange facts must agree on it.
    pub seed: u64,
    pub predicted_ttl_s: f64,
    /// For replicas without KV events.
    pub approximate_ttl_s: f64,
    /// Block size assumed until an engine tells its own.
    pub block_size_default: u32,
    pub segment_cache_bytes: usize,
}

#[derive(Clone, Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct KvConfig {
    pub message_bytes_max: usize,
    pub replay_timeout_s: f64,
    pub replay_check_interval_s: f64,
    pub reconnect_delay_s: f64,
    pub reconnect_delay_s_max: f64,
    pub unknown_parents_max: u64,
}

#[derive(Clone, Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct QueueConfig {
    pub events_max: usize,
    pub commands_max: usize,
    pub batch_max: usize,
    pub tick_interval_s: f64,
}

#[derive(Clone, Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct ControlConfig {
    /// Command line of the control process; empty: none is started (tests, embedding).
    pub command: Vec<String>,
    /// Path of the Unix socket on which the control process reports.
    pub socket: String,
    pub restart_delay_s: f64,
    pub restart_delay_s_max: f64,
}

/// What is kept for the time after a restart.
#[derive(Clone, Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct SnapshotConfig {
    /// File; `None`: nothing is written.
    pub path: Option<String>,
    pub interval_s: f64,
    /// Older snapshots are not used.
    pub max_age_s: f64,
    /// How long predictions are believed of an engine that may be another process by now.
    pub unverified_ttl_s: f64,
    /// Admin address of a router to ask for its snapshot: `http://host:port` or `https://host:port`.
    pub seed_from: Option<String>,
    /// PEM files for TLS with it, as for servers.
    pub seed_ca: Option<String>,
    pub seed_client_cert: Option<String>,
    pub seed_client_key: Option<String>,
    pub seed_timeout_s: f64,
    /// Sent with that question.
    pub seed_headers: BTreeMap<String, String>,
    /// Name → file that holds the value.
    pub seed_headers_from_file: BTreeMap<String, String>,
}

impl Default for SnapshotConfig {
    fn default() -> Self {
        Self {
            path: None,
            interval_s: 60.0,
            max_age_s: 3600.0,
            unverified_ttl_s: 30.0,
            seed_from: None,
            seed_ca: None,
            seed_client_cert: None,
            seed_client_key: None,
            seed_timeout_s: 10.0,
            seed_headers: BTreeMap::new(),
            seed_headers_from_file: BTreeMap::new(),
        }
    }
}

#[derive(Clone, Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct LogConfig {
    /// `error`, `warn`, `info`, `debug` or `trace`.
    pub level: String,
}

#[derive(Clone, Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct MetricConfig {
    pub name: String,
    pub kind: MetricKind,
    pub help: String,
    pub labels: Vec<String>,
    /// Upper bounds of a histogram's buckets, in the metric's unit.
    #[serde(default)]
    pub buckets: Vec<f64>,
}

#[derive(Clone, Copy, Debug, Deserialize, PartialEq, Eq)]
#[serde(rename_all = "lowercase")]
pub enum MetricKind {
    Counter,
    Gauge,
    Histogram,
}
