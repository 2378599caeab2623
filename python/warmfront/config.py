"""One tree of configuration, from defaults to what the core is handed.

Sources, weakest first: default, YAML file, environment (`WARMFRONT_FRONT__LISTEN=…`), `--set front.listen=…`. An error
names the path and the source. Only this module reads the environment; code receives the sub-struct it needs.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal

import msgspec
import yaml
from msgspec import Meta, Struct

from warmfront.errors import ConfigError
from warmfront.obs.catalog import METRICS

Positive = Annotated[float, Meta(gt=0)]
Count = Annotated[int, Meta(ge=1)]

_ADDRESS = r"^(\[[0-9A-Fa-f:.]+\]|[^:\s]+):[0-9]{1,5}$"
_URL = r"^http://(\[[0-9A-Fa-f:.]+\]|[^/?#@:\s]+):[0-9]{1,5}/?$"
_PATTERN_WORDS = {_ADDRESS: "`host:port`", _URL: "`http://host:port` without path, query or password"}

Address = Annotated[str, Meta(pattern=_ADDRESS)]
Url = Annotated[str, Meta(pattern=_URL)]


class FrontConfig(Struct, frozen=True, forbid_unknown_fields=True):
    """The port that clients talk to."""

    listen: Address = "127.0.0.1:8080"
    """Address and port for clients. Loopback by default: exposing it is a decision. Port 0 picks a free one."""
    io_threads: Count = 1
    """Threads that accept, relay and receive KV events. One carries about 1,000 streams at 50 tokens/s."""
    compute_threads: Annotated[int, Meta(ge=0)] = 0
    """Threads that render and tokenize long prompts; 0: one for each core."""
    body_bytes_max: Count = 64 * 1024 * 1024
    """Larger request bodies are answered with 413."""
    header_bytes_max: Annotated[int, Meta(ge=8192)] = 64 * 1024
    """Larger header blocks are answered with 431."""
    headers_max: Annotated[int, Meta(ge=16)] = 128
    """More header lines are answered with 431."""
    header_timeout_s: Positive = 10.0
    """How long a client may take to send a request's header."""
    body_timeout_s: Positive = 60.0
    """How long a client may pause while it sends a body."""
    idle_timeout_s: Positive = 75.0
    """How long a connection may stay open between requests. Longer than the 60 s of common load balancers."""
    write_timeout_s: Positive = 120.0
    """A client that takes no byte for so long loses its stream: its buffers are bounded, its patience is not."""
    connections_max: Count = 16384
    """Connections beyond this are closed at once. Lowered at start to what the limit of open files carries."""
    expose_headers: bool = True
    """Add `x-warmfront-replica` and `x-warmfront-predicted-cached-tokens` to responses."""
    grace_s: Annotated[float, Meta(ge=0)] = 30.0
    """After a termination signal, how long streams may take to end. Kubernetes kills after 30 s by default."""


class UpstreamConfig(Struct, frozen=True, forbid_unknown_fields=True):
    """Connections to engines."""

    connect_timeout_s: Positive = 2.0
    """A server that does not accept within this is skipped: the next choice is tried."""
    first_byte_timeout_s: Positive = 600.0
    """From the request sent to the first byte of the answer. Long: a non-streaming answer comes only at its end."""
    idle_connections_per_server: Count = 256
    """Kept-alive connections for reuse."""
    idle_timeout_s: Positive = 4.0
    """Below the 5 s after which vLLM's HTTP server closes an idle connection, so that reuse never races with it."""


class IndexConfig(Struct, frozen=True, forbid_unknown_fields=True):
    """The index of which replica holds which block."""

    facts_max: Count = 20_000_000
    """Bound on (replica, block) facts of one index (pool and block size), 16 to 80 bytes each. Predicted go first."""
    seed: Annotated[int, Meta(ge=0)] = 0
    """Seed of the sequence hashes. Routers that exchange facts must agree on it."""
    predicted_ttl_s: Positive = 10.0
    """How long a dispatch counts as cached before an event confirms it, where the engine publishes events."""
    approximate_ttl_s: Positive = 600.0
    """The same where the engine publishes none."""
    block_size_default: Count = 16
    """Tokens a block until an engine tells its own (vLLM on GPU: 16). Without a tokenizer: four bytes a token."""
    segment_cache_bytes: Annotated[int, Meta(ge=0)] = 256 * 1024 * 1024
    """Memory for already tokenized prompt segments."""


class KvConfig(Struct, frozen=True, forbid_unknown_fields=True):
    """KV event streams."""

    message_bytes_max: Count = 64 * 1024 * 1024
    """Larger messages are dropped and counted; the stream is treated as after a gap."""
    replay_timeout_s: Positive = 5.0
    """How long a replay may pause before it counts as failed. Malformed requests are never answered by the engine."""
    replay_check_interval_s: Positive = 10.0
    """How often a quiet stream is asked for what may have been lost at its end."""
    reconnect_delay_s: Positive = 0.2
    """First pause before an event socket is opened again; doubles up to `reconnect_delay_s_max`."""
    reconnect_delay_s_max: Positive = 5.0
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
    tick_interval_s: Positive = 0.25
    """How often time is told while something waits, and how often token gaps are reported."""


class ControlConfig(Struct, frozen=True, forbid_unknown_fields=True):
    """The control process: discovery, probing, admin API."""

    admin_listen: Address = "127.0.0.1:8081"
    """Address of the admin API. Loopback by default."""
    probe_interval_s: Positive = 1.0
    """How often each server is asked for health and load."""
    probe_timeout_s: Positive = 2.0
    """How long such a question may take."""
    unready_after: Count = 3
    """Failed probes in a row before a server counts as not ready."""
    answer_timeout_s: Positive = 10.0
    """How long the admin API waits for the data process. Explaining a long prompt means tokenizing it."""
    restart_delay_s: Positive = 0.5
    """First pause before a dead control process is started again; doubles up to `restart_delay_s_max`."""
    restart_delay_s_max: Positive = 30.0
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
    """`http://host:port`, without a path. Engines are reached without TLS."""
    engine: str = "auto"
    """`vllm`, `generic` or `auto`: found out by probing."""
    events: EventsConfig | Literal["auto", "off"] = "auto"
    """`auto`: ask the server, then try the engine's default port."""
    headers: dict[str, str] = {}
    """Added to every request to this server, for example its API key."""
    block_size: Annotated[int, Meta(ge=1)] | None = None
    """Overrides what the engine says."""


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
    """As `--trust-request-chat-template` of the engine."""


class FleetConfig(Struct, frozen=True, forbid_unknown_fields=True):
    """The servers and models."""

    servers: list[ServerConfig] = []
    """Static list of engine servers."""
    tokenizer: str | None = None
    """For all models without one of their own."""
    models: dict[str, ModelConfig] = {}
    """By served name."""

    def __post_init__(self) -> None:
        urls = [server.url.rstrip("/") for server in self.servers]
        twice = sorted({url for url in urls if urls.count(url) > 1})
        if twice:
            raise ValueError(f"servers are listed twice: {', '.join(twice)}")


class CostConfig(Struct, frozen=True, forbid_unknown_fields=True):
    """`marginal_cost`. Only the two targets are the operator's; the rest moves results by less than 5 %."""

    ttft_target_s: Positive = 2.0
    """S_ttft: how a second of first-token delay trades against decode slowness."""
    tpot_target_s: Positive = 0.1
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
    ttft_limit_s: Annotated[float, Meta(gt=0)] | None = None
    """A request of priority 0 or below that would wait longer than this goes where it waits less than half of it, if
    such a replica exists and the fleet has room. Unset: no limit."""
    memory_threshold: Annotated[float, Meta(ge=0, lt=1)] = 0.65
    """u0: share of KV memory in use above which memory costs."""
    memory_weight: Annotated[float, Meta(ge=0)] = 1.0
    """k_M: how much memory pressure costs above the threshold; 0 ignores memory."""
    eviction_weight: Annotated[float, Meta(ge=0)] = 1.0
    """k_E: how much an expected eviction costs; 0 ignores evictions."""
    regret_prior: Annotated[float, Meta(ge=0, le=1)] = 0.4
    """g0: probability that an evicted token is wanted again, before anything is known."""
    regret_prior_evictions: Positive = 2000.0
    """k: pseudo-evictions behind that prior."""
    copy_horizon_s: Annotated[float, Meta(ge=0)] = 10.0
    """T_h: horizon over which a new copy of a hot prefix is paid off."""
    future_weight: Annotated[float, Meta(ge=0)] = 0.5
    """k_D: weight of the conversation's later turns."""
    future_turns_max: Annotated[float, Meta(ge=0)] = 60.0
    """Cap of N_T, the later turns that a conversation is expected to have."""
    host_load_s: Annotated[float, Meta(ge=0)] = 5e-6
    """Seconds to load one token's KV from host memory: about 100 kB at 20 GB/s."""
    disk_load_s: Annotated[float, Meta(ge=0)] = 40e-6
    """The same from local disk: about 100 kB at 2.5 GB/s."""
    adapter_load_s: Annotated[float, Meta(ge=0)] = 0.05
    """Seconds to load an adapter that a replica has not in its memory: about 100 MB from host memory, with stalls."""
    adapters_resident_max: Annotated[int, Meta(ge=1)] = 8
    """Adapters a replica keeps loaded (`--max-loras`, or `--max-cpu-loras` where that is larger)."""
    fleet_mix: Annotated[float, Meta(ge=0, le=1)] = 0.5
    """Share of the fleet mean in the rates of arrivals and work that price prefill."""
    prefill_prior_s: Positive = 110e-6
    """Seconds a prefill token before anything was measured; wrong by up to 2× is harmless."""
    decode_prior_s: Positive = 25e-3
    """Seconds a decode step before anything was measured."""
    decode_prior_token_s: Positive = 20e-9
    """Seconds a token of context in a decode step before anything was measured."""


class GuardConfig(Struct, frozen=True, forbid_unknown_fields=True):
    """The guard of `marginal_cost`: it measures whether cache affinity pays and lowers its credit where it does not."""

    enabled: bool = True
    """Unset it to choose by the cost alone, without comparing."""
    share: Annotated[float, Meta(gt=0, le=0.2)] = 0.01
    """Share of the decisions on which cost and load differ that is made by load, at random, to compare."""
    margin: Annotated[float, Meta(ge=0, lt=1)] = 0.03
    """Part of a request's usual cost by which load alone must be better before the credit is lowered."""
    hold_s: Positive = 300.0
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
    """Requests that wait for a ready replica."""

    queue_max: Annotated[int, Meta(ge=0)] = 1024
    """Waiting requests; the newest beyond it is shed."""
    queue_timeout_s: Positive = 30.0
    """How long a request may wait before it is shed. Clients usually give up after 60 s."""


class RouterConfig(Struct, frozen=True, forbid_unknown_fields=True):
    """The deciding part."""

    policy: PolicyConfig = PolicyConfig()
    """How a replica is chosen."""
    flow: FlowConfig = FlowConfig()
    """Requests that wait."""
    choices_max: Count = 3
    """Candidates of one dispatch: the first plus fallbacks for failed connections."""
    retries_max: Annotated[int, Meta(ge=0)] = 1
    """New decisions for a request whose choices could all not be reached."""
    record: str | None = None
    """File that receives every event, command and overlap answer; no prompt text."""


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
    index: IndexConfig = IndexConfig()
    """Which replica holds which block."""
    kv: KvConfig = KvConfig()
    """KV event streams."""
    queues: QueueConfig = QueueConfig()
    """The two queues around the router."""
    control: ControlConfig = ControlConfig()
    """Discovery, probing, admin API."""
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
        _check(layer, source)
        merged = _merge(merged, layer)
        sources |= dict.fromkeys(_leaves(layer), source)
    return _convert(merged, "merged configuration"), sources


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
            "front": config.front,
            "upstream": config.upstream,
            "index": config.index,
            "kv": config.kv,
            "queues": config.queues,
            "control": control,
            "log": config.log,
            "metrics": METRICS,
            "label_values_max": config.metrics.label_values_max,
        }
    )


def redacted(config: Config) -> dict[str, Any]:
    """Return the configuration as a tree in which header values, the one place for secrets, read `***`."""
    tree: dict[str, Any] = msgspec.to_builtins(config)
    for server in tree["fleet"]["servers"]:
        server["headers"] = dict.fromkeys(server["headers"], "***")
    return tree


class _Loader(yaml.SafeLoader):
    """Plain scalars as YAML 1.2 reads them: `off` is a word, `1e-3` a number, `1:30` and dates are text."""


_Loader.yaml_implicit_resolvers = {}
for _kind, _pattern, _first in (
    ("bool", r"true|True|TRUE|false|False|FALSE", "tTfF"),
    ("int", r"[-+]?[0-9]+|0x[0-9a-fA-F]+", "-+0123456789"),
    ("float", r"[-+]?([0-9]+(\.[0-9]*)?|\.[0-9]+)([eE][-+]?[0-9]+)?", "-+.0123456789"),
    ("null", r"~|null|Null|NULL|", "~nN"),
):
    _Loader.add_implicit_resolver(f"tag:yaml.org,2002:{_kind}", re.compile(rf"^(?:{_pattern})$"), [*_first, ""])


def _parse_yaml(text: str) -> Any:
    return yaml.load(text, Loader=_Loader)


def _in_one_line(error: Exception) -> str:
    return " ".join(str(error).split())


def _file_layer(path: Path | None) -> list[tuple[str, dict[str, Any]]]:
    if path is None:
        return []
    try:
        content = _parse_yaml(path.read_text(encoding="utf-8"))
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
        value: Any = _parse_yaml(text)
    except (yaml.YAMLError, RecursionError, ValueError) as error:
        raise ConfigError(f"{'.'.join(path)}: {text!r} is not YAML: {_in_one_line(error)}") from error
    for name in reversed(path):
        value = {name: value}
    assert isinstance(value, dict)
    return value


def _merge(weak: dict[str, Any], strong: dict[str, Any]) -> dict[str, Any]:
    """Merge mappings key by key; everything else, lists among it, is replaced whole."""
    merged = dict(weak)
    for name, value in strong.items():
        below = merged.get(name)
        merged[name] = _merge(below, value) if isinstance(below, dict) and isinstance(value, dict) else value
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
        message, _, where = str(error).partition(" - at `$.")
        path = where.rstrip("`") or "configuration"
        raise ConfigError(f"{path}: {_in_words(message)} ({source})") from error


def _in_words(message: str) -> str:
    """Say what a pattern means instead of printing it."""
    if "matching regex" in message:
        fitting = (words for pattern, words in _PATTERN_WORDS.items() if repr(pattern) in message)
        message = f"expected {next(fitting)}"
    return message[:1].lower() + message[1:]
