"""The core's engine against the reference: every step of generated histories, events and all."""

from __future__ import annotations

from dataclasses import dataclass

from hypothesis import given, settings
from hypothesis import strategies as st
from warmfront.reference import engine as reference
from warmfront.reference.request import CacheEvent, EngineRequest, Sequence, StepResult, Stored
from warmfront.sim.engine import Engine, EngineConfig
from warmfront.sim.latency import LatencyModel

BLOCK_SIZE = 4
AnyEngine = Engine | reference.Engine

configs = st.builds(
    EngineConfig,
    latency=st.builds(
        LatencyModel,
        base_s=st.just(0.002),
        prefill_token_s=st.sampled_from([0.0, 3e-5]),
        attention_pair_s=st.just(1.7e-9),
        decode_sequence_s=st.sampled_from([0.0, 1e-5]),
        context_token_s=st.just(5.1e-8),
        weights_s=st.sampled_from([0.0, 0.012]),
        linear_token_s=st.sampled_from([0.0, 5.6e-4]),
    ),
    blocks=st.integers(21, 40),
    block_size=st.just(BLOCK_SIZE),
    max_model_tokens=st.just(80),
    max_batched_tokens=st.integers(12, 64),
    max_sequences=st.integers(1, 12),
)


@dataclass(frozen=True)
class Submit:
    """A prompt that begins as others do, of a family of contents."""

    family: int
    shared: int
    own: int
    output: int
    reads_cache: bool

    def request(self, number: int) -> EngineRequest:
        tokens = min(self.shared + self.own, 60)
        blocks = (tokens + self.output) // BLOCK_SIZE
        hashes = [
            self.family * 1000 + block if (block + 1) * BLOCK_SIZE <= self.shared else 10_000 + number * 100 + block
            for block in range(blocks)
        ]
        return EngineRequest(f"r{number}", tokens, self.output, hashes, reads_cache=self.reads_cache)


@dataclass(frozen=True)
class Steps:
    count: int


@dataclass(frozen=True)
class Abort:
    """One of the requests submitted so far, counted from the last."""

    back: int


@dataclass(frozen=True)
class Reset:
    preempt_running: bool


operations = st.one_of(
    st.builds(
        Submit,
        family=st.integers(0, 2),
        shared=st.integers(0, 40),
        own=st.integers(1, 20),
        output=st.integers(1, 20),
        reads_cache=st.sampled_from([True, True, True, False]),
    ),
    st.builds(Steps, st.integers(1, 12)),
    st.builds(Abort, st.integers(1, 6)),
    st.builds(Reset, st.booleans()),
)


class History:
    """What one engine did, in plain values."""

    def __init__(self, engine: AnyEngine) -> None:
        self.engine = engine
        self.seen: list[object] = []
        self.submitted: list[Sequence] = []

    def do(self, operation: Submit | Steps | Abort | Reset) -> None:
        match operation:
            case Submit():
                self.submitted.append(self.engine.submit(operation.request(len(self.submitted))))
            case Steps():
                for _ in range(operation.count):
                    if self.engine.has_work:
                        self.seen.append(plain(self.engine.step()))
            case Abort() if operation.back <= len(self.submitted):
                self.engine.abort(self.submitted[-operation.back])
            case Reset():
                self.seen.append(self.engine.reset(preempt_running=operation.preempt_running))
        self.seen.append((self.engine.running, self.engine.waiting, self.engine.kv_usage, self.engine.free_blocks))


def plain(result: StepResult) -> tuple[object, ...]:
    return (
        result.duration_s,
        names(result.sampled),
        names(result.finished),
        [(each.request.id, each.cached_tokens) for each in result.admitted],
        names(result.preempted),
        [plain_event(event) for event in result.events],
        result.prefill_tokens,
        result.decode_tokens,
    )


def names(sequences: object) -> list[str]:
    assert isinstance(sequences, list)
    return [sequence.request.id for sequence in sequences]


def plain_event(event: CacheEvent) -> object:
    return (event.request.id, event.first, event.count) if isinstance(event, Stored) else event


@settings(max_examples=300, deadline=None)
@given(config=configs, history=st.lists(operations, max_size=40))
def test_core_engine_agrees_with_reference(config: EngineConfig, history: list[Submit | Steps | Abort | Reset]) -> None:
    fast, plainly = History(Engine(config)), History(reference.Engine(config))
    for operation in [*history, Steps(500)]:
        fast.do(operation)
        plainly.do(operation)
        assert fast.seen == plainly.seen, operation
    assert fast.engine.counters == plainly.engine.counters
    assert fast.engine.resident == plainly.engine.resident
    states = [(each.state, each.cached_tokens, each.preemptions) for each in fast.submitted]
    assert states == [(each.state, each.cached_tokens, each.preemptions) for each in plainly.submitted]
