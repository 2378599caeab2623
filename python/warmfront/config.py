"""One tree of configuration, from defaults to what the core is handed.

Sources, weakest first: default, YAML file, environment (`WARMFRONT_FRONT__LISTEN=…`), `--set front.listen=…`. An error
names the path and the source. Only this module reads the environment; code receives the sub-struct it needs.
"""

from __future__ import annotations

import ipaddress
import math
import os
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal

import msgspec
import yaml
from msgspec import Meta, Struct

from warmfront.errors import ConfigError
from warmfront.obs.catalog import METRICS

SECONDS_MAX = 1e9
"""About 30 years: as good as never, and every clock can still add it to its own time."""
COUNT_MAX = 10**15
"""More than any machine has of anything, and sums of it fit into 64 bits."""
THREADS_MAX = 1024

Positive = Annotated[float, Meta(gt=0)]
Seconds = Annotated[float, Meta(gt=0, le=SECONDS_MAX)]
SecondsOrZero = Annotated[float, Meta(ge=0, le=SECONDS_MAX)]
Count = Annotated[int, Meta(ge=1, le=COUNT_MAX)]
CountOrZero = Annotated[int, Meta(ge=0, le=COUNT_MAX)]

_ADDRESS = r"^(\[[0-9A-Fa-f:.]+\]|[^:\s]+):[0-9]{1,5}$"
_URL = r"^https?://(\[[0-9A-Fa-f:.]+\]|[^/?#@:\s]+):[0-9]{1,5}/?$"
_HEADER = r"^[!#$%&'*+.^_`|~0-9A-Za-z-]+$"
_VARIABLE = re.compile(r"\$\{([A-Za-z_][A-Za-z0-9_]*)\}")
_PATTERN_WORDS = {
    _ADDRESS: "`host:port`",
    _URL: "`http://host:port` or `https://host:port`, without path, query or password",
    _HEADER: "the name of a header",
}

KUBERNETES_SETTLE_S = 5.0
"""How long load balancers in Kubernetes go on sending after a pod has failed its readiness."""

Address = Annotated[str, Meta(pattern=_ADDRESS)]
Url = Annotated[str, Meta(pattern=_URL)]
HeaderName = Annotated[str, Meta(pattern=_HEADER)]


class TlsConfig(Struct, frozen=True, forbid_unknown_fields=True):
    """PEM files of a port that speaks TLS. Read again when they change; a bad file leaves the old one in charge."""

    cert: str
    """The certificate, followed by those between it and its authority."""
    key: str
    """Its private key, not encrypted."""
    client_ca: str | None = None
    """Authorities of client certificates: a client without one is not let in. Unset: no certificate is asked for."""


class HeaderRules(Struct, frozen=True, forbid_unknown_fields=True):
    """Which headers of clients reach engines. Hop-by-hop headers and `x-warmfront-…` never do."""

    remove: list[HeaderName] = []
    """Not passed on, for example `cookie`."""
    allow: list[HeaderName] | None = None
    """Only these are passed on, with `accept`, `accept-encoding`, `content-type`, `content-encoding`. Unset: all."""


class FrontConfig(Struct, frozen=True, forbid_unknown_fields=True):
    """The port that clients talk to."""

    listen: Address = "127.0.0.1:8080"
    """Address and port for clients. Loopback by default: exposing it is a decision. Port 0 picks a free one."""
    io_threads: Annotated[int, Meta(ge=1, le=THREADS_MAX)] = 1
    """Threads that accept, relay and receive KV events. One carries about 1,000 streams at 50 tokens/s."""
    compute_threads: Annotated[int, Meta(ge=0, le=THREADS_MAX)] = 0
    """Threads that render and tokenize long prompts; 0: one for each core."""
    body_bytes_max: Count = 64 * 1024 * 1024
    """Larger request bodies are answered with 413."""
    header_bytes_max: Annotated[int, Meta(ge=8192, le=COUNT_MAX)] = 32 * 1024
    """Larger header blocks are answered with 431. About twice as much may wait for a client that does not read."""
    headers_max: Annotated[int, Meta(ge=16, le=4096)] = 128
    """More header lines are answered with 431."""
    header_timeout_s: Seconds = 10.0
    """How long a client may take to send a request's header."""
    body_timeout_s: Seconds = 60.0
    """How long a client may pause while it sends a body."""
    idle_timeout_s: Seconds = 75.0
    """How long a connection may stay open between requests. Longer than the 60 s of common load balancers."""
    write_timeout_s: Seconds = 120.0
    """A client that takes no byte for so long loses its stream: its buffers are bounded, its patience is not."""
    connections_max: Count = 16384
    """Connections beyond this are closed at once. Lowered at start to what the limit of open files carries."""
    expose_headers: bool = True
    """Add `x-warmfront-replica` and `x-warmfront-predicted-cached-tokens` to responses."""
    grace_s: SecondsOrZero = 30.0
    """After a termination signal, how long streams may take to end. Kubernetes kills after 30 s by default."""
    settle_s: SecondsOrZero | None = None
    """After a termination signal, how long connections are still taken while `/ready` says 503: load balancers go on
    sending for a while. A part of `grace_s`. Unset: 5 s inside Kubernetes, where `KUBERNETES_SERVICE_HOST` is set, and
    no time elsewhere."""
    handover: str | None = None
    """Unix socket over which the next process of this router takes the listening socket, so that an upgrade loses no
    connection. Only this user may connect. Unset: none."""
    handover_timeout_s: Seconds = 120.0
    """How long the next process may take to have a ready pool; then it gives up, and the one before serves on."""
    fleet_wait_s: SecondsOrZero = 5.0
    """After the start, how long requests wait for a fleet that serves their model, before they are answered with 503:
    engines are asked about themselves only then. Counted from the first accepted connection on. 0: not at all."""
    tls: TlsConfig | None = None
    """Speak TLS with clients. Unset: plain HTTP, for a port that only a gateway or this machine can reach."""
    keys_file: str | None = None
    """Hashed API keys of clients, as `warmfront keys` writes them. Set: every path but `/health` and `/ready` wants a
    key."""
    metrics_without_key: bool = False
    """Answer `/metrics` without a key although clients need one: for a scraper that cannot send any."""
    forward_authorization: Literal["auto", "always", "never"] = "auto"
    """Whether engines get a client's `authorization` and `x-api-key`. `auto`: where they are not checked here."""
    trusted_networks: list[str] | None = None
    """Peers that speak for their clients: their `x-warmfront-flow`, `x-vllm-priority` and `x-forwarded-…` count, and
    are removed where others send them. Unset: this machine; nobody where `keys_file` is set."""
    trusted_secret_file: str | None = None
    """A request that carries this file's content as `x-warmfront-gateway-secret` is trusted as well."""
    headers: HeaderRules = HeaderRules()
    """Which headers of clients reach engines."""
    streams_per_client_max: Count = 4096
    """Requests of one key, or of one address without a key, that run at once; more are answered with 429. A trusted
    peer without a key stands for many clients and has no such limit."""
    keep_alive_s: SecondsOrZero = 0.0
    """Silence of a stream after which its client gets an SSE comment, for proxies that cut idle streams in long
    prefills. 0: never, and every byte is the engine's. A stream that began with a comment is not tried elsewhere."""

    def __post_init__(self) -> None:
        if self.settle_s is not None and self.settle_s > self.grace_s:
            raise ValueError("settle_s is above grace_s, of which it is a part")
        for network in self.trusted_networks or []:
            try:
                ipaddress.ip_network(network, strict=False)
            except ValueError as error:
                raise ValueError(f"trusted_networks: {network!r} is no network like 10.0.0.0/8") from error


class UpstreamConfig(Struct, frozen=True, forbid_unknown_fields=True):
    """Connections to engines."""

    connect_timeout_s: Seconds = 2.0
    """A server that does not accept within this is skipped: the next choice is tried."""
    first_byte_timeout_s: Seconds = 600.0
    """From the request sent to the first byte of the answer. Long: a non-streaming answer comes only at its end."""
    idle_connections_per_server: Count = 256
    """Kept-alive connections for reuse."""
    idle_timeout_s: Seconds = 4.0
    """Below the 5 s after which vLLM's HTTP server closes an idle connection, so that reuse never races with it."""


class SessionConfig(Struct, frozen=True, forbid_unknown_fields=True):
    """Where a request says which conversation it belongs to. Only used where nothing is known of its prompt."""

    headers: tuple[str, ...] = ("x-session-id", "x-*-session-id")
    """Header names, the most specific first; each may hold one `*`. Fields of the body come after them."""
    baggage: str = "session.id"
    """Member of the W3C `baggage` header; empty: not looked at."""

    def __post_init__(self) -> None:
        for name in self.headers:
            if not re.fullmatch(r"[a-z0-9_-]+(\*[a-z0-9_-]+)?", name):
                raise ValueError(f"headers: {name!r} is no header name in lower case with at most one * inside")


class IndexConfig(Struct, frozen=True, forbid_unknown_fields=True):
    """The index of which replica holds which block."""

    facts_max: Count = 20_000_000
    """Bound on (replica, block) facts of one index (pool and block size), 16 to 80 bytes each. Predicted go first."""
    seed: Annotated[int, Meta(ge=0)] = 0
    """Seed of the sequence hashes. Routers that exchange facts must agree on it."""
    predicted_ttl_s: Seconds = 10.0
    """How long a dispatch counts as cached before an event confirms it, where the engine publishes events. Longer by as
    much as its events are late, up to 60 s."""
    approximate_ttl_s: Seconds = 600.0
    """The same where the engine publishes none."""
    block_size_default: Annotated[int, Meta(ge=1, le=65536)] = 16
    """Tokens a block until an engine tells its own (vLLM on GPU: 16). Without a tokenizer: four bytes a token."""
    segment_cache_bytes: CountOrZero = 256 * 1024 * 1024
    """Memory for already tokenized prompt segments."""


class KvConfig(Struct, frozen=True, forbid_unknown_fields=True):
    """KV event streams."""

    message_bytes_max: Count = 64 * 1024 * 1024
    """Larger messages are dropped and counted; the stream is treated as after a gap."""
    replay_timeout_s: Seconds = 5.0
    """How long a replay may pause before it counts as failed. Malformed requests are never answered by the engine."""
    replay_check_interval_s: Seconds = 10.0
    """How often a quiet stream is asked for what may have been lost at its end."""
    reconnect_delay_s: Seconds = 0.2
    """First pause before an event socket is opened again; doubles up to `reconnect_delay_s_max`."""
    reconnect_delay_s_max: Seconds = 5.0
    """Longest such pause."""
    unknown_parents_max: Count = 64
    """Stores with unknown parents in a row before the stream is treated as after a gap."""

    def __post_init__(self) -> None:
        if self.reconnect_delay_s > self.reconnect_delay_s_max:
            raise ValueError("reconnect_delay_s is above reconnect_delay_s_max")


class QueueConfig(Struct, frozen=True, forbid_unknown_fields=True):
    """The two queues around the router."""

    events_max: Count = 65536
    """Arrivals beyond this are answered with 503."""
    commands_max: Count = 65536
    """The deciding thread waits beyond this."""
    batch_max: Count = 256
    """Events handed to the router at once."""
    tick_interval_s: Seconds = 0.25
    """How often time is told while something waits, and how often token gaps are reported."""


class ControlConfig(Struct, frozen=True, forbid_unknown_fields=True):
    """The control process: discovery, probing, admin API."""

    admin_listen: Address = "127.0.0.1:8081"
    """Address of the admin API. Loopback by default; any other needs `admin_token_file`."""
    admin_token_file: str | None = None
    """File with the token that the admin API asks for as `Authorization: Bearer`. Read again when it changes."""
    admin_tls: TlsConfig | None = None
    """Speak TLS on the admin port."""
    probe_interval_s: Seconds = 1.0
    """How often each server is asked for health and load."""
    probe_timeout_s: Seconds = 2.0
    """How long such a question may take."""
    unready_after: Count = 3
    """Failed probes in a row before a server counts as not ready."""
    answer_timeout_s: Seconds = 10.0
    """How long the admin API waits for the data process. Explaining a long prompt means tokenizing it."""
    restart_delay_s: Seconds = 0.5
    """First pause before a dead control process is started again; doubles up to `restart_delay_s_max`."""
    restart_delay_s_max: Seconds = 30.0
    """Longest such pause."""

    def __post_init__(self) -> None:
        if self.restart_delay_s > self.restart_delay_s_max:
            raise ValueError("restart_delay_s is above restart_delay_s_max")


class EventsConfig(Struct, frozen=True, forbid_unknown_fields=True):
    """Where one server publishes KV events, when it cannot tell by itself."""

    endpoint: str
    """`tcp://host:port` of rank 0; rank r is expected at port + r."""
    replay: str | None = None
    """The same for replay."""
    topic: str = ""
    """Topic prefix to subscribe to; empty: all."""


class ServerConfig(Struct, frozen=True, forbid_unknown_fields=True):
    """One engine server."""

    url: Url
    """`http://host:port` or `https://host:port`, without a path."""
    engine: str = "auto"
    """`vllm`, `generic` or `auto`: found out by probing."""
    events: EventsConfig | Literal["auto", "off"] = "auto"
    """`auto`: ask the server, then try the engine's default port."""
    headers: dict[HeaderName, str] = {}
    """Added to every request to this server, for example its API key; they replace the client's."""
    headers_from_file: dict[HeaderName, str] = {}
    """The same, the value being a file's content without the white space around it. Read again when it changes."""
    headers_from_env: dict[HeaderName, str] = {}
    """The same with environment variables of the router in it, for example `Bearer ${ENGINE_KEY}`. As they were at its
    start; shown nowhere."""
    ca: str | None = None
    """PEM file of the authorities of an `https` server, or its self-signed certificate. Unset: those of the system."""
    client_cert: str | None = None
    """PEM file of our certificate, where the server asks for one."""
    client_key: str | None = None
    """Its private key."""
    block_size: Annotated[int, Meta(ge=1, le=65536)] | None = None
    """Overrides what the engine says."""
    id: str | None = None
    """Who is behind the address, for example the uid of a pod: with another id it is another server, and nothing
    learned about the one before counts. Unset: told by the engine's start time."""

    def __post_init__(self) -> None:
        if (self.client_cert is None) != (self.client_key is None):
            raise ValueError("client_cert and client_key go together")
        if self.ca is not None and not self.url.startswith("https://"):
            raise ValueError("ca is for https:// servers")
        twice = [name for name, count in Counter(self._header_names()).items() if count > 1]
        if twice:
            raise ValueError(f"headers, headers_from_file and headers_from_env set {', '.join(sorted(twice))} twice")
        for name, text in self.headers_from_env.items():
            if not _VARIABLE.search(text):
                raise ValueError(f"headers_from_env: {name} names no variable as ${{NAME}}")

    def _header_names(self) -> list[str]:
        return [
            name.lower() for names in (self.headers, self.headers_from_file, self.headers_from_env) for name in names
        ]


class ModelConfig(Struct, frozen=True, forbid_unknown_fields=True):
    """What is known about one served model."""

    tokenizer: str | None = None
    """Directory or `tokenizer.json`; the engine's own model directory is used when it is readable here."""
    chat_template: str | None = None
    """File that replaces the tokenizer's own template, as `--chat-template` of the engine."""
    content_format: Literal["auto", "string", "openai"] = "auto"
    """As `--chat-template-content-format` of the engine."""
    template_kwargs: dict[str, Any] = {}
    """As `--default-chat-template-kwargs` of the engine."""
    exclude_tools_when_none: bool = False
    """As `--exclude-tools-when-tool-choice-none` of the engine."""
    trust_request_template: bool = False
    """As `--trust-request-chat-template` of the engine. Its time is bounded, its memory is not: trust every client."""


class FileSource(Struct, frozen=True, forbid_unknown_fields=True, tag="file"):
    """A file with a list of servers: URLs, or mappings as in `fleet.servers`. YAML, or JSON when it ends in `.json`."""

    path: str
    """The file. Replace it by renaming another one to its name, so that no half of it is ever read."""
    interval_s: Seconds = 1.0
    """How often it is looked at."""


class DnsSource(Struct, frozen=True, forbid_unknown_fields=True, tag="dns"):
    """The addresses of a name (A and AAAA records), for example of a headless service."""

    name: str
    """The name to resolve."""
    port: Annotated[int, Meta(ge=1, le=65535)]
    """Port of the engine at every address."""
    family: Literal["auto", "ipv4", "ipv6"] = "auto"
    """`auto`: IPv4 addresses, or IPv6 where there are none; never both, since they are the same servers twice."""
    interval_s: Seconds = 5.0
    """How often it is resolved, whatever the records' time to live says."""
    timeout_s: Seconds = 3.0
    """How long that may take."""
    nameservers: list[str] = []
    """`address` or `address:port` of the servers to ask; empty: those of the system."""
    engine: str = "auto"
    """As `fleet.servers[].engine`, for every server found."""
    headers: dict[HeaderName, str] = {}
    """As `fleet.servers[].headers`, for every server found."""


class SrvSource(Struct, frozen=True, forbid_unknown_fields=True, tag="srv"):
    """The SRV records of a name; priorities and weights do not count, since load is measured."""

    name: str
    """The name to resolve, for example `_http._tcp.engines.default.svc.cluster.local`."""
    interval_s: Seconds = 5.0
    """How often it is resolved, whatever the records' time to live says."""
    timeout_s: Seconds = 3.0
    """How long that may take."""
    nameservers: list[str] = []
    """`address` or `address:port` of the servers to ask; empty: those of the system."""
    engine: str = "auto"
    """As `fleet.servers[].engine`, for every server found."""
    headers: dict[HeaderName, str] = {}
    """As `fleet.servers[].headers`, for every server found."""


class HttpSource(Struct, frozen=True, forbid_unknown_fields=True, tag="http"):
    """A URL that answers a JSON list of servers: URLs, or mappings as in `fleet.servers`."""

    url: Annotated[str, Meta(pattern=r"^https?://[^/@]+(/.*)?$")]
    """Asked by GET, with `if-none-match` once the answer had an `etag`. Redirections are not followed."""
    interval_s: Seconds = 5.0
    """How often it is asked."""
    timeout_s: Seconds = 3.0
    """How long the answer may take."""
    headers: dict[HeaderName, str] = {}
    """Added to the question, for example a key."""


class FleetConfig(Struct, frozen=True, forbid_unknown_fields=True):
    """The servers and models."""

    servers: list[ServerConfig] = []
    """Static list of engine servers."""
    discovery: list[FileSource | DnsSource | SrvSource | HttpSource] = []
    """Where further servers are found; `type` says how. A server that several sources name counts once, as the first
    one names it."""
    tokenizer: str | None = None
    """For all models without one of their own."""
    models: dict[str, ModelConfig] = {}
    """By served name."""

    def __post_init__(self) -> None:
        urls = [server.url.rstrip("/") for server in self.servers]
        twice = sorted({url for url in urls if urls.count(url) > 1})
        if twice:
            raise ValueError(f"servers are listed twice: {', '.join(twice)}")
        places = [_place(source) for source in self.discovery]
        if len(set(places)) < len(places):
            raise ValueError("a discovery source is listed twice")


def _place(source: FileSource | DnsSource | SrvSource | HttpSource) -> tuple[object, ...]:
    """What a source is told apart by."""
    match source:
        case FileSource():
            return (FileSource, source.path)
        case DnsSource():
            return (DnsSource, source.name, source.port)
        case SrvSource():
            return (SrvSource, source.name)
        case HttpSource():
            return (HttpSource, source.url.partition("?")[0])


class CostConfig(Struct, frozen=True, forbid_unknown_fields=True):
    """`marginal_cost`. Only the two targets are the operator's; the rest moves results by less than 5 %."""

    ttft_target_s: Seconds = 2.0
    """S_ttft: how a second of first-token delay trades against decode slowness."""
    tpot_target_s: Seconds = 0.1
    """S_tpot: how a second a token trades against first-token delay."""
    arrival_weight: Annotated[float, Meta(ge=0)] = 1.0
    """k_F: delay imposed on future arrivals."""
    price_max: Annotated[float, Meta(ge=1)] = 60.0
    """X_max: how many times a recomputation may be worth."""
    utilisation_max: Annotated[float, Meta(gt=0, lt=1)] = 0.95
    """Cap of the utilisation in the price."""
    priority_step: Annotated[float, Meta(ge=1)] = 2.0
    """How much more a request weighs than one whose `priority` is 1 higher (lower numbers are more urgent, as in vLLM).
    1 makes all equal."""
    fairness_weight: Annotated[float, Meta(ge=0)] = 3.0
    """How much more what others wait counts against a flow that uses all of the fleet, in proportion down to its fair
    share: 3 makes it four times as much. Fair shares follow `router.flow.weights`. 0: flows do not matter."""
    ttft_limit_s: Seconds | None = None
    """A request of priority 0 or below that would wait longer than this goes where it waits less than half of it, if
    such a replica exists and the fleet has room. Unset: no limit."""
    memory_threshold: Annotated[float, Meta(ge=0, lt=1)] = 0.65
    """u0: share of KV memory in use up to which memory costs nothing. Beyond, it costs by the chance that it fills."""
    memory_weight: Annotated[float, Meta(ge=0)] = 1.0
    """k_M: how much memory pressure costs above the threshold; 0 ignores memory."""
    eviction_weight: Annotated[float, Meta(ge=0)] = 1.0
    """k_E: how much an expected eviction costs; 0 ignores evictions."""
    regret_prior: Annotated[float, Meta(ge=0, le=1)] = 0.4
    """g0: probability that an evicted token is wanted again, before anything is known."""
    regret_prior_evictions: Positive = 2000.0
    """k: pseudo-evictions behind that prior."""
    copy_horizon_s: SecondsOrZero = 10.0
    """T_h: horizon over which a new copy of a hot prefix is paid off."""
    future_weight: Annotated[float, Meta(ge=0)] = 0.5
    """k_D: weight of the conversation's later turns."""
    future_turns_max: Annotated[float, Meta(ge=0)] = 60.0
    """Cap of N_T, the later turns that a conversation is expected to have."""
    host_load_s: SecondsOrZero = 5e-6
    """Seconds to load one token's KV from host memory, before anything was measured: 100 kB at 20 GB/s. 0: always 0."""
    disk_load_s: SecondsOrZero = 40e-6
    """The same from disk: 100 kB at 2.5 GB/s."""
    adapter_load_s: SecondsOrZero = 0.05
    """Seconds to load an adapter that a replica has not in its memory, before anything was measured: about 100 MB from
    host memory, with stalls. 0: always 0."""
    adapters_resident_max: Count = 8
    """Adapters a replica keeps loaded (`--max-loras`, or `--max-cpu-loras` where that is larger)."""
    fleet_mix: Annotated[float, Meta(ge=0, le=1)] = 0.5
    """Share of the fleet mean in the rates of arrivals and work that price prefill."""
    prefill_prior_s: Seconds = 110e-6
    """Seconds a prefill token before anything was measured; wrong by up to 2× is harmless."""
    decode_prior_s: Seconds = 25e-3
    """Seconds a decode step before anything was measured."""
    decode_prior_token_s: Seconds = 20e-9
    """Seconds a token of context in a decode step before anything was measured."""


class GuardConfig(Struct, frozen=True, forbid_unknown_fields=True):
    """The guard of `marginal_cost`: it measures whether cache affinity pays and lowers its credit where it does not."""

    enabled: bool = True
    """Unset it to choose by the cost alone, without comparing."""
    share: Annotated[float, Meta(gt=0, le=0.2)] = 0.01
    """Share of the decisions on which cost and load differ that is made by load, at random, to compare."""
    margin: Annotated[float, Meta(ge=0, lt=1)] = 0.03
    """Part of a request's usual cost by which load alone must be better before the credit is lowered."""
    hold_s: Seconds = 300.0
    """Wait before a lowered credit is raised by a step without proof; doubles with each relapse, up to 16 times."""


class PolicyConfig(Struct, frozen=True, forbid_unknown_fields=True):
    """How a replica is chosen."""

    name: str = "marginal_cost"
    """One of `marginal_cost`, `least_loaded`, `power_of_two`, `round_robin`, `random`, `session`, `prefix_hash`; or a
    plugin."""
    seed: int = 0
    """Seed of everything random in decisions."""
    load_bound: Annotated[float, Meta(ge=1)] = 1.25
    """`prefix_hash`: no replica takes more than this multiple of the mean load."""
    cost: CostConfig = CostConfig()
    """Constants of `marginal_cost`."""
    guard: GuardConfig = GuardConfig()
    """Whether affinity pays, measured."""


class FlowConfig(Struct, frozen=True, forbid_unknown_fields=True):
    """Requests that wait for a replica. All bounds are per pool, so that one never blocks another."""

    queue_max: CountOrZero = 1024
    """Waiting requests; beyond it see `overflow`."""
    queue_max_per_flow: Count | None = None
    """Waiting requests of one flow; its newest beyond it is shed. Unset: `queue_max` alone bounds it."""
    queue_timeout_s: Seconds = 30.0
    """How long a request may wait; then it is shed, or see `overflow`. Clients usually give up after 60 s."""
    overflow: Literal["send", "shed"] = "send"
    """What happens at the two bounds above while only estimates hold requests back: `send` them to an engine all the
    same (the next one, the one whose time is up), or `shed` (the newest of the least urgent, the one whose time is up).
    With nothing ready, at the limits below, or when the client's own time is up, they are shed in any case."""
    weights: dict[str, Positive] = {}
    """Shares of flows (`x-warmfront-flow`) while they compete: weight 2 gets twice the tokens of weight 1. Flows not
    named here have 1."""
    late_binding: bool = True
    """Hold a request while every replica would make it wait, and decide with the facts of the moment. Only for policies
    that estimate waits (`marginal_cost`)."""
    kv_usage_max: Annotated[float, Meta(gt=0, le=1)] = 0.95
    """With `late_binding`, an engine that reports waiting requests and at least this share of its KV memory in use has
    no room: the queue holds requests while all are so, and others are chosen while only a few are."""
    in_flight_max: Count | None = None
    """Requests in flight of one pool. Unset: no limit; engines queue by themselves."""
    in_flight_max_per_replica: Count | None = None
    """Requests in flight at one replica when it is chosen. Unset: no limit."""


class RetryConfig(Struct, frozen=True, forbid_unknown_fields=True):
    """Requests that an engine refused or failed before the client saw a byte."""

    budget_share: Annotated[float, Meta(ge=0, le=1)] = 0.1
    """Retries as a share of all requests: more would multiply an overload. Refused connections cost nothing."""
    budget_min_per_s: SecondsOrZero = 1.0
    """Retries a second that are always allowed: a quiet fleet earns too little from its share."""
    after_accept: bool = False
    """Send a request elsewhere although an engine may have worked on it (500, a reset, a time-out): a prompt is then
    perhaps computed twice, and a request with effects has them twice."""
    remember_s: SecondsOrZero = 10.0
    """How long the same prompt of the same flow is kept away from a replica that failed it: clients try again within
    seconds. 0: not at all."""


class HealthConfig(Struct, frozen=True, forbid_unknown_fields=True):
    """When a replica gets no new work, judged by the requests sent to it."""

    failures_in_a_row: Count = 5
    """Failures without a success between them that open a replica's circuit. Client errors (4xx) and refusals (429,
    503) are no failures."""
    failure_share: Annotated[float, Meta(gt=0, le=1)] = 0.5
    """Share of failures, over about 30 s, that opens it."""
    failures_min: Count = 10
    """Failures in that time before their share counts."""
    open_s: Seconds = 2.0
    """How long a circuit stays open before one request is let through; doubles while that fails."""
    open_s_max: Seconds = 60.0
    """Longest such time."""
    ejected_share_max: Annotated[float, Meta(ge=0, lt=1)] = 0.5
    """Share of a pool's ready replicas that may be taken away at once: the others have to carry their load. The last
    one is never taken away; 0 switches ejection off."""
    pause_s: SecondsOrZero = 1.0
    """How long a replica is left alone that answered 429 or 503 without `Retry-After`."""
    pause_s_max: SecondsOrZero = 30.0
    """Longest `Retry-After` that is believed."""
    slow_start_s: Seconds = 10.0
    """Time in which a replica that joins or comes back grows to its full share of requests in flight."""
    frozen_after_s: Seconds = 10.0
    """Time without a token on any stream of a replica, while another replica could take over, after which it counts as
    frozen. Three times that while its speed is not known, and where no answer is a stream: then it must also report
    counters of its work that do not move."""
    frozen_prefill_factor: Annotated[float, Meta(ge=1)] = 5.0
    """The same as a multiple of the prefill time predicted for what it has in hand; the longer of the two counts."""

    def __post_init__(self) -> None:
        if self.open_s > self.open_s_max:
            raise ValueError("open_s is above open_s_max")


class RouterConfig(Struct, frozen=True, forbid_unknown_fields=True):
    """The deciding part."""

    policy: PolicyConfig = PolicyConfig()
    """How a replica is chosen."""
    flow: FlowConfig = FlowConfig()
    """Requests that wait."""
    choices_max: Count = 3
    """Candidates of one dispatch: the first plus fallbacks for failed connections."""
    retries_max: Annotated[int, Meta(ge=0, le=2)] = 1
    """New decisions for a request that no choice has answered."""
    retries: RetryConfig = RetryConfig()
    """What may be tried again, and how much of it."""
    health: HealthConfig = HealthConfig()
    """When a replica gets no new work."""
    record: str | None = None
    """File that receives every event, command and overlap answer; no prompt text."""


class SnapshotConfig(Struct, frozen=True, forbid_unknown_fields=True):
    """What the router keeps for the time after its restart: facts about replicas, and what it has learned."""

    path: str | None = None
    """File for snapshots, in a folder that outlives the process; nothing is written without it. Holds hashes, counts
    and the addresses of replicas, and neither prompts nor keys."""
    interval_s: Annotated[float, Meta(ge=1, le=SECONDS_MAX)] = 60.0
    """Time between two snapshots; more when one takes over a twentieth of it. An engine that replays the events of this
    time and of the restart lets the router catch up in full."""
    max_age_s: Seconds = 3600.0
    """Older snapshots are not used: prefixes of an hour ago have mostly gone."""
    unverified_ttl_s: Seconds = 30.0
    """How long restored predictions are believed where nothing can tell whether the engine has restarted meanwhile: it
    publishes no events and no start time."""
    seed_from: Url | None = None
    """Admin address of another router of the same fleet, `http://…` or `https://…`. Its snapshot is fetched at start
    unless the own file is younger than two intervals."""
    seed_ca: str | None = None
    """PEM file of the authorities of an `https` address, or its self-signed certificate. Unset: those of the system."""
    seed_client_cert: str | None = None
    """PEM file of our certificate, where the other router asks for one (`control.admin_tls.client_ca`)."""
    seed_client_key: str | None = None
    """Its private key."""
    seed_timeout_s: Seconds = 10.0
    """Time for that; afterwards the own file is used, or none. Requests are served meanwhile, without memory."""
    seed_headers: dict[HeaderName, str] = {}
    """Sent to the other router, for its admin authentication. Values are secrets."""
    seed_headers_from_file: dict[HeaderName, str] = {}
    """The same, the value being a file's content without the white space around it."""

    def __post_init__(self) -> None:
        if (self.seed_client_cert is None) != (self.seed_client_key is None):
            raise ValueError("seed_client_cert and seed_client_key go together")
        if self.seed_ca is not None and not (self.seed_from or "").startswith("https://"):
            raise ValueError("seed_ca is for an https:// address in seed_from")
        twice = self.seed_headers.keys() & self.seed_headers_from_file.keys()
        if twice:
            raise ValueError(f"seed_headers and seed_headers_from_file both set {', '.join(sorted(twice))}")


class LogConfig(Struct, frozen=True, forbid_unknown_fields=True):
    """Logs: one JSON line each, to stderr."""

    level: Literal["error", "warn", "info", "debug"] = "info"
    """`info` is for state changes an operator acts on, `debug` for single requests."""


class MetricsConfig(Struct, frozen=True, forbid_unknown_fields=True):
    """Metrics on the clients' port under `/metrics`."""

    label_values_max: Count = 256
    """Values a label may take in one metric; the rest count under `other`."""


class Config(Struct, frozen=True, forbid_unknown_fields=True):
    """Everything."""

    front: FrontConfig = FrontConfig()
    """The port that clients talk to."""
    upstream: UpstreamConfig = UpstreamConfig()
    """Connections to engines."""
    fleet: FleetConfig = FleetConfig()
    """Servers and models."""
    router: RouterConfig = RouterConfig()
    """The deciding part."""
    session: SessionConfig = SessionConfig()
    """How conversations are told apart."""
    index: IndexConfig = IndexConfig()
    """Which replica holds which block."""
    kv: KvConfig = KvConfig()
    """KV event streams."""
    queues: QueueConfig = QueueConfig()
    """The two queues around the router."""
    control: ControlConfig = ControlConfig()
    """Discovery, probing, admin API."""
    snapshot: SnapshotConfig = SnapshotConfig()
    """Memory of the router beyond its own restart."""
    log: LogConfig = LogConfig()
    """Logs."""
    metrics: MetricsConfig = MetricsConfig()
    """Metrics."""


def load(
    *,
    path: Path | None = None,
    environment: Mapping[str, str] | None = None,
    overrides: Sequence[str] = (),
    flags: Mapping[str, Any] | None = None,
) -> Config:
    """Merge all sources, weakest first, and validate.

    Args:
        path: YAML file.
        environment: Defaults to the process's own. Only names that begin with `WARMFRONT_` and hold `__` count.
        overrides: `path.to.field=value`, the value in YAML.
        flags: What other flags of the command line say, as a tree; the strongest source.

    Raises:
        ConfigError: Names the path inside the configuration and the source of the bad value.
    """
    return load_with_sources(path=path, environment=environment, overrides=overrides, flags=flags)[0]


def load_with_sources(
    *,
    path: Path | None = None,
    environment: Mapping[str, str] | None = None,
    overrides: Sequence[str] = (),
    flags: Mapping[str, Any] | None = None,
) -> tuple[Config, dict[str, str]]:
    """Do as `load`, and return with it where each value that is not a default came from, by its path."""
    layers = [*_file_layer(path), *_environment_layers(os.environ if environment is None else environment)]
    layers += [_override_layer(text) for text in overrides]
    layers += [("command line", dict(flags))] if flags else []
    merged: dict[str, Any] = {}
    sources: dict[str, str] = {}
    for source, layer in layers:
        try:
            _check(layer, source)
            merged = merged_with(merged, layer)
            sources |= dict.fromkeys(_leaves(layer), source)
        except RecursionError as error:
            raise ConfigError(f"{source}: a value contains itself, or is nested too deeply") from error
    return _convert(merged, "merged configuration"), sources


class ConfigSources(Struct, frozen=True):
    """Where a configuration came from, to read it again."""

    path: str | None = None
    """YAML file."""
    overrides: list[str] = []
    """`path.to.field=value`, each."""
    flags: dict[str, Any] = {}
    """What other flags of the command line said, as a tree."""

    def load(self) -> tuple[Config, dict[str, str]]:
        """Return the configuration as it is now, and where each value that is not a default came from.

        Raises:
            ConfigError: Some source is wrong.
        """
        path = None if self.path is None else Path(self.path)
        return load_with_sources(path=path, overrides=self.overrides, flags=self.flags)


def core_config(config: Config, *, control_command: Sequence[str] = (), control_socket: str = "") -> bytes:
    """Return the JSON object that the core takes at start: `CoreConfig` of `crates/warmfront-core/src/config.rs`.

    Args:
        config: The whole configuration; the core gets only what it needs.
        control_command: Command line of the control process; empty: none is started.
        control_socket: Unix socket on which the control process reports.
    """
    control = {
        "command": list(control_command),
        "socket": control_socket,
        "restart_delay_s": config.control.restart_delay_s,
        "restart_delay_s_max": config.control.restart_delay_s_max,
    }
    return msgspec.json.encode(
        {
            "front": _core_front(config.front),
            "upstream": config.upstream,
            "session": config.session,
            "index": config.index,
            "kv": config.kv,
            "queues": config.queues,
            "control": control,
            "snapshot": config.snapshot,
            "log": config.log,
            "metrics": METRICS,
            "label_values_max": config.metrics.label_values_max,
        }
    )


def reload_request(config: Config) -> bytes:
    """Return the JSON object with which the core takes another configuration while it runs."""
    return msgspec.json.encode({"front": _core_front(config.front), "upstream": config.upstream, "config": config})


def _core_front(front: FrontConfig) -> FrontConfig:
    """Decide what the core is not asked to."""
    if front.settle_s is not None:
        return front
    settle_s = min(KUBERNETES_SETTLE_S, front.grace_s) if "KUBERNETES_SERVICE_HOST" in os.environ else 0.0
    return msgspec.structs.replace(front, settle_s=settle_s)


def with_variables(text: str, environment: Mapping[str, str] | None = None) -> str:
    """Return a text with environment variables in place of `${NAME}`.

    Args:
        text: From the configuration.
        environment: Defaults to the process's own.

    Raises:
        ConfigError: A variable is not set, or no header could carry its value. The value is not told.
    """
    known = os.environ if environment is None else environment

    def value(found: re.Match[str]) -> str:
        name = found[1]
        secret = known.get(name, "").strip()
        if not secret or not all(0x20 <= ord(character) < 0x7F for character in secret):
            what = "holds more than one line of plain characters" if secret else "is not set"
            raise ConfigError(f"the environment variable {name} {what}")
        return secret

    return _VARIABLE.sub(value, text)


def redacted(config: Config) -> dict[str, Any]:
    """Return the configuration as a tree in which what may hold secrets reads `***`: header values, queries of URLs."""
    tree: dict[str, Any] = msgspec.to_builtins(config)
    for holder in [*tree["fleet"]["servers"], *tree["fleet"]["discovery"]]:
        holder["headers"] = dict.fromkeys(holder.get("headers", {}), "***")
        if "?" in holder.get("url", ""):
            holder["url"] = holder["url"].partition("?")[0] + "?***"
    tree["snapshot"]["seed_headers"] = dict.fromkeys(tree["snapshot"]["seed_headers"], "***")
    return tree


class _Loader(yaml.SafeLoader):
    """Plain scalars as YAML 1.2 reads them: `off` is a word, `1e-3` a number, `1:30` and dates are text."""

    def construct_yaml_float(self, node: yaml.ScalarNode) -> float:
        """Refuse `1e999`, which Python reads as infinite."""
        number = float(super().construct_yaml_float(node))
        if not math.isfinite(number):
            raise ValueError(f"{node.value} is beyond every number")
        return number


_Loader.add_constructor("tag:yaml.org,2002:float", _Loader.construct_yaml_float)
_Loader.yaml_implicit_resolvers = {}
for _kind, _pattern, _first in (
    ("bool", r"true|True|TRUE|false|False|FALSE", "tTfF"),
    ("int", r"[-+]?[0-9]+|0x[0-9a-fA-F]+", "-+0123456789"),
    ("float", r"[-+]?([0-9]+(\.[0-9]*)?|\.[0-9]+)([eE][-+]?[0-9]+)?", "-+.0123456789"),
    ("null", r"~|null|Null|NULL|", "~nN"),
):
    _Loader.add_implicit_resolver(f"tag:yaml.org,2002:{_kind}", re.compile(rf"^(?:{_pattern})$"), [*_first, ""])


def parse_yaml(text: str) -> Any:
    """Return what a text in YAML says.

    Raises:
        yaml.YAMLError, RecursionError, ValueError: It is not YAML.
    """
    return yaml.load(text, Loader=_Loader)


def _in_one_line(error: Exception) -> str:
    return " ".join(str(error).split())


def _file_layer(path: Path | None) -> list[tuple[str, dict[str, Any]]]:
    if path is None:
        return []
    try:
        content = parse_yaml(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"cannot read {path}: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path} is not text in UTF-8: {error.reason} at byte {error.start}") from error
    except (yaml.YAMLError, RecursionError, ValueError) as error:
        raise ConfigError(f"{path} is not YAML: {_in_one_line(error)}") from error
    if content is None:
        return []
    if not isinstance(content, dict):
        raise ConfigError(f"{path}: expected a mapping, got {type(content).__name__}")
    return [(str(path), content)]


def _environment_layers(environment: Mapping[str, str]) -> list[tuple[str, dict[str, Any]]]:
    names = sorted(name for name in environment if name.startswith("WARMFRONT_") and "__" in name)
    return [
        ("environment", _nest(name.removeprefix("WARMFRONT_").lower().split("__"), environment[name])) for name in names
    ]


def _override_layer(text: str) -> tuple[str, dict[str, Any]]:
    path, equals, value = text.partition("=")
    if not equals or not path:
        raise ConfigError(f"--set {text}: expected path.to.field=value")
    return "--set", _nest(path.strip().split("."), value)


def _nest(path: Sequence[str], text: str) -> dict[str, Any]:
    try:
        value: Any = parse_yaml(text)
    except (yaml.YAMLError, RecursionError, ValueError) as error:
        raise ConfigError(f"{'.'.join(path)}: {text!r} is not YAML: {_in_one_line(error)}") from error
    for name in reversed(path):
        value = {name: value}
    assert isinstance(value, dict)
    return value


def merged_with(weak: dict[str, Any], strong: dict[str, Any]) -> dict[str, Any]:
    """Merge mappings key by key; everything else, lists among it, is replaced whole."""
    merged = dict(weak)
    for name, value in strong.items():
        below = merged.get(name)
        merged[name] = merged_with(below, value) if isinstance(below, dict) and isinstance(value, dict) else value
    return merged


def _leaves(tree: Mapping[str, Any], prefix: str = "") -> list[str]:
    """Paths of all values that are not mappings."""
    paths: list[str] = []
    for name, value in tree.items():
        paths += _leaves(value, f"{prefix}{name}.") if isinstance(value, dict) and value else [prefix + name]
    return paths


def _check(layer: dict[str, Any], source: str) -> None:
    _convert(layer, source)


def _convert(tree: dict[str, Any], source: str) -> Config:
    try:
        return msgspec.convert(tree, Config)
    except msgspec.ValidationError as error:
        message, _, where = str(error).replace(" - at `key` in `$.", " - at `$.").partition(" - at `$.")
        path = where.rstrip("`") or "configuration"
        raise ConfigError(f"{path}: {in_words(message)} ({source})") from error


def in_words(message: str) -> str:
    """Say what went wrong with a value: patterns are said in words instead of printed."""
    if "matching regex" in message:
        fitting = (words for pattern, words in _PATTERN_WORDS.items() if repr(pattern) in message)
        message = f"expected {next(fitting)}"
    return message[:1].lower() + message[1:]
