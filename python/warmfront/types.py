"""The nouns: requests, choices, events and commands.

Events and commands are MessagePack arrays `[tag, field, ...]`; field order is the wire format. The Rust half is
`crates/warmfront-core/src/mailbox.rs`; a contract test sends every variant through both. All times are seconds on the
router's own monotonic clock, never wall time.
"""

from __future__ import annotations

from typing import Literal, NewType

from msgspec import Struct

RequestId = NewType("RequestId", int)
"""Number of one request, unique in one router process."""

Slot = NewType("Slot", int)
"""Dense row number of a replica inside its pool."""


class Request(Struct, frozen=True, array_like=True):
    """A request as the router sees it. Its body and its hashes stay in the core under `id`."""

    id: RequestId
    time_s: float
    pool: str
    model: str
    adapter: str | None
    flow: str
    priority: int
    route: Literal["prefix", "load"]
    basis: Literal["tokens", "bytes", "none"]
    prompt_tokens: int
    """Exact when `basis` is tokens, estimated from bytes otherwise."""
    blocks: int
    """Full blocks at the pool's first block size."""
    turn: int
    """Assistant messages already in the conversation."""
    output_tokens_max: int | None
    affinity_key: int | None
    """Hash of the session key, when the request carries one."""
    prefix_key: int
    """Equal for requests that begin alike (hash over the first blocks)."""
    stream: bool
    fallback: str | None
    """Why the prompt could not be reproduced, as a short fixed word."""
    deadline_s: float | None = None
    """When the client gives up, if it said so; on the router's clock."""


class Usage(Struct, frozen=True, array_like=True):
    """Usage as the engine reported it; `None`: not reported."""

    prompt_tokens: int | None = None
    cached_tokens: int | None = None
    output_tokens: int | None = None


class Arrived(Struct, frozen=True, array_like=True, tag="arrived"):
    """A request waits for a decision."""

    request: Request


class Moved(Struct, frozen=True, array_like=True, tag="moved"):
    """The choice before could not be reached; `slot` is tried now."""

    id: RequestId
    time_s: float
    slot: Slot


class FirstToken(Struct, frozen=True, array_like=True, tag="first_token"):
    """The engine began to answer."""

    id: RequestId
    time_s: float
    slot: Slot


class Finished(Struct, frozen=True, array_like=True, tag="finished"):
    """The answer is complete. `chunks` counts the events of a stream after the first."""

    id: RequestId
    time_s: float
    slot: Slot
    status: int
    usage: Usage | None
    chunks: int


class Failed(Struct, frozen=True, array_like=True, tag="failed"):
    """No choice answered.

    With `began` this is the end: the client has seen bytes, or the core asks no more. Otherwise the core holds what the
    last attempt left, and the answer is one `Dispatch`, `Shed` or `Deliver`.
    """

    id: RequestId
    time_s: float
    error: str
    """What happened, a short fixed word: `connect`, `rejected`, `midstream`, …"""
    tried: list[Slot]
    """Every replica tried so far; the last one failed last."""
    began: bool
    status: int | None = None
    """Of the engine's answer, or what an error inside its stream stands for."""
    retry_after_s: float | None = None
    """How long the engine wants to be left alone."""
    accepted: bool = False
    """The engine may have worked on the request."""


class Cancelled(Struct, frozen=True, array_like=True, tag="cancelled"):
    """The client left."""

    id: RequestId
    time_s: float


class EngineLoad(Struct, frozen=True):
    """Last scrape of an engine's own metrics; `None`: not known."""

    running: float | None = None
    waiting: float | None = None
    kv_usage: float | None = None
    """Share of KV blocks in use by running requests, 0 to 1."""
    age_s: float | None = None
    worked_tokens: float | None = None
    """Tokens of prompts and answers since its start: while it works, they move."""
    rtt_s: float | None = None
    """The way to the server and back: the shortest of its recent answers to probes."""


class EventSource(Struct, frozen=True):
    """Where a replica publishes KV events."""

    endpoint: str
    replay: str | None = None
    topic: str = ""
    origin: str = ""
    """`engine`, `configuration` or `default_port`."""


class TlsOptions(Struct, frozen=True):
    """PEM files for TLS towards one server."""

    ca: str | None = None
    """Authorities; `None`: the system's."""
    cert: str | None = None
    """Our certificate, where the server asks for one."""
    key: str | None = None


class ReplicaUpdate(Struct, frozen=True):
    """One KV cache that can be chosen, as the control process reports it."""

    id: str
    url: str
    rank: int | None
    engine: str
    ready: bool
    incarnation: int = 0
    notes: list[str] = []
    block_size: int | None = None
    capacity_tokens: int | None = None
    events: EventSource | None = None
    headers: dict[str, str] = {}
    load: EngineLoad = EngineLoad()
    lacks: list[str] = []
    """Names of the pool's models that this replica does not serve (an adapter not loaded there): not to be chosen."""
    tls: TlsOptions | None = None
    """How to speak TLS with it; `None`: plain HTTP."""
    draining: bool = False
    """Takes no new requests because an operator said so; it is not `ready` then."""


class TemplateOptions(Struct, frozen=True):
    """What the engine was told about rendering; it changes the token ids."""

    chat_template: str | None = None
    content_format: str | None = None
    default_kwargs: str | None = None
    exclude_tools_when_none: bool = False
    trust_request_template: bool = False
    engine_version: str | None = None
    max_model_len: int | None = None


class PoolUpdate(Struct, frozen=True):
    """All replicas that serve one model with one tokenizer."""

    name: str
    models: dict[str, str | None]
    """Served name → adapter name; `None`: the base model."""
    tokenizer: str | None
    replicas: list[ReplicaUpdate]
    model_cards: list[str] = []
    template: TemplateOptions = TemplateOptions()


class SourceState(Struct, frozen=True):
    """How one discovery source does."""

    name: str
    servers: int = 0
    """Servers in its last list."""
    age_s: float | None = None
    """Seconds since it last gave a list; `None`: it never did."""
    error: str | None = None
    """Why it gave none when it was last asked."""


class FleetUpdate(Struct, frozen=True):
    """Control process → core: the whole fleet as it is now."""

    version: int
    pools: list[PoolUpdate]
    degraded: list[str] = []
    sources: list[SourceState] = []
    """Discovery sources other than the configuration."""
    is_partial: bool = False
    """Servers exist that nobody has asked yet: which models they serve is not known."""


class EventState(Struct, frozen=True):
    """What the core knows about one replica's KV events."""

    state: str = "none"
    """`live`, `connecting`, `catching_up`, `stale`, `lossy` or `none`."""
    reason: str | None = None
    last_sequence: int | None = None
    lag_s: float | None = None
    batches: int = 0
    blocks_stored: int = 0
    blocks_removed: int = 0
    gaps: int = 0
    replays: int = 0
    restarts: int = 0
    malformed: int = 0
    unknown_parents: int = 0
    unconfirmed: int = 0
    """Predicted blocks that no event ever confirmed: tokens or templates differ."""
    complete: bool = False
    block_size: int | None = None


class ReplicaState(Struct, frozen=True):
    """A replica with its slot."""

    slot: Slot
    replica: ReplicaUpdate
    events: EventState


class PoolState(Struct, frozen=True):
    """A pool as the core serves it."""

    name: str
    models: dict[str, str | None]
    tokens: str
    """`exact`, `approximate` or `loading`."""
    tokens_reason: str | None
    replicas: list[ReplicaState]


class FleetState(Struct, frozen=True):
    """Core → router: every pool with slots and event states."""

    version: int
    pools: list[PoolState]


class FleetChanged(Struct, frozen=True, array_like=True, tag="fleet_changed"):
    """The fleet is another one now. `fleet` is a MessagePack map."""

    time_s: float
    fleet: FleetState


class ConfigChanged(Struct, frozen=True, array_like=True, tag="config_changed"):
    """A new configuration, already validated, as JSON."""

    time_s: float
    config: bytes


class Paced(Struct, frozen=True, array_like=True, tag="paced"):
    """Gaps between two tokens since the last such event, one row per replica that streamed."""

    time_s: float
    pool: str
    slots: list[Slot]
    gaps: list[int]
    gap_seconds: list[float]


class Tick(Struct, frozen=True, array_like=True, tag="tick"):
    """Time passes; sent only while requests are in flight."""

    time_s: float


class Asked(Struct, frozen=True, array_like=True, tag="asked"):
    """The admin API asks; answer with `Answered` of the same id."""

    id: RequestId
    time_s: float
    question: str
    request: Request | None
    payload: bytes


class Stopping(Struct, frozen=True, array_like=True, tag="stopping"):
    """The process takes leave, and ends when the last stream has, or after `grace_s`."""

    time_s: float
    grace_s: float


Event = (
    Arrived
    | Moved
    | FirstToken
    | Finished
    | Failed
    | Cancelled
    | FleetChanged
    | ConfigChanged
    | Paced
    | Tick
    | Asked
    | Stopping
)


class Choice(Struct, frozen=True, array_like=True):
    """One candidate of a dispatch."""

    slot: Slot
    cached_tokens: int
    """What the replica is expected to find in its cache, already capped as the engine caps it."""
    prefill_slot: Slot | None = None


class Dispatch(Struct, frozen=True, array_like=True, tag="dispatch"):
    """Send to the first choice that can be reached."""

    id: RequestId
    choices: list[Choice]
    reason: str


class Shed(Struct, frozen=True, array_like=True, tag="shed"):
    """Refuse, with the code of an error in `errors.py`."""

    id: RequestId
    code: str
    retry_after_s: float | None = None


class Answered(Struct, frozen=True, array_like=True, tag="answered"):
    """Answer of an `Asked`: JSON."""

    id: RequestId
    status: int
    body: bytes


class Deliver(Struct, frozen=True, array_like=True, tag="deliver"):
    """Nobody else takes the request: pass on what the core holds of its last attempt."""

    id: RequestId


class Standing(Struct, frozen=True, array_like=True, tag="standing"):
    """The replicas of a pool that are not in full service, by what the router has seen of them. Shown by `/ready`."""

    pool: str
    rows: list[tuple[Slot, str, str]]
    """Slot; `open`, `half_open`, `paused` or `slow_start`; the reason in words."""


Command = Dispatch | Shed | Answered | Deliver | Standing


class Overlap(Struct, frozen=True, array_like=True):
    """What each replica of a pool holds of one prompt. Every column has one row per slot.

    Depths are leading prompt tokens (full blocks times the replica's block size). Weighing tiers is the policy's
    business. `device`, `host` and `disk` end where the engine's reuse ends: it computes at least one token of a prompt,
    and all of some prompts.
    """

    device: list[int]
    """Depth on the device: confirmed by events or predicted from our own dispatches."""
    confirmed: list[int]
    """Depth on the device by events alone: what the replica holds, whether or not it may be reused."""
    host: list[int]
    """Depth when blocks in host memory count too; never below `device`."""
    disk: list[int]
    """Depth when any tier counts; never below `host`."""
    active: list[int]
    """Depth of blocks that requests in flight are using right now."""
    active_tokens: list[int]
    """Tokens of all distinct blocks in use by requests in flight, whoever's prompt they are."""
    resident_tokens: list[int]
    """Tokens of all blocks on the device."""
    evicted_blocks: list[int]
    """Blocks removed by the engine since the start."""
    regretted_blocks: list[int]
    """Evicted blocks that were asked for again later (ghost hits)."""
    age_s: list[float]
    """Seconds since a request of this prefix was last sent there; negative: never."""
    frontier_key: int | None
    """Sequence hash at the deepest device or host depth of any replica; `None` when nothing is held."""
