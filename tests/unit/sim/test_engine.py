"""The engine model step by step; the core's and the reference's behave alike."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from random import Random
from zlib import crc32

import pytest
from warmfront.errors import ConfigError
from warmfront.reference import engine as reference
from warmfront.reference.request import Cleared, EngineRequest, Removed, Sequence, State, StepResult, Stored
from warmfront.sim.engine import Engine, EngineConfig
from warmfront.sim.hashing import chain_hashes
from warmfront.sim.latency import LatencyModel

AnyEngine = Engine | reference.Engine
Make = Callable[[EngineConfig], AnyEngine]

LATENCY = LatencyModel(
    base_s=1.0, prefill_token_s=0.01, attention_pair_s=0.0, decode_sequence_s=0.1, context_token_s=0.001
)
CONFIG = EngineConfig(
    latency=LATENCY, blocks=101, block_size=4, max_model_tokens=200, max_batched_tokens=64, max_sequences=16
)


@pytest.fixture(params=[Engine, reference.Engine], ids=["core", "reference"])
def make(request: pytest.FixtureRequest) -> Make:
    return request.param  # type: ignore[no-any-return]


def request(name: str, prompt: int, output: int, *, tokens: list[int] | None = None) -> EngineRequest:
    """A request with tokens of its own, or with those given at the front."""
    own = [crc32(name.encode()) % 10_000 + position for position in range(prompt + output)]
    everything = [*(tokens or []), *own][: prompt + output]
    return EngineRequest(name, prompt, output, chain_hashes(everything, block_size=4), everything)


def run(engine: AnyEngine, *, steps_max: int = 10_000) -> list[StepResult]:
    results: list[StepResult] = []
    while engine.has_work:
        results.append(engine.step())
        assert len(results) <= steps_max
    return results


def sampled_counts(results: list[StepResult]) -> Counter[Sequence]:
    return Counter(sequence for result in results for sequence in result.sampled)


def test_a_request_gets_exactly_its_answer_one_token_a_step(make: Make) -> None:
    engine = make(CONFIG)
    sequence = engine.submit(request("a", 10, 5))
    results = run(engine)
    assert len(results) == 5
    assert sampled_counts(results) == {sequence: 5}
    assert results[-1].finished == [sequence]
    assert sequence.state is State.ENDED


def test_the_last_token_never_gets_kv(make: Make) -> None:
    engine = make(CONFIG)
    engine.submit(request("a", 6, 2))  # 8 tokens would fill two blocks, but only 7 have KV.
    assert sum(len(engine_event.hashes) for engine_event in stored(run(engine))) == 1
    engine.submit(request("b", 6, 3))
    assert sum(len(engine_event.hashes) for engine_event in stored(run(engine))) == 2


def stored(results: list[StepResult]) -> list[Stored]:
    return [event for result in results for event in result.events if isinstance(event, Stored)]


def test_a_decode_step_that_fills_a_block_announces_it_with_its_parent(make: Make) -> None:
    engine = make(CONFIG)
    asked = request("a", 6, 8)
    engine.submit(asked)
    events = stored(run(engine))
    assert [(event.first, event.count, event.parent) for event in events] == [
        (0, 1, None),
        (1, 1, asked.hashes[0]),
        (2, 1, asked.hashes[1]),
    ]


def test_a_long_prompt_is_computed_in_chunks_beside_decodes(make: Make) -> None:
    engine = make(CONFIG)
    engine.submit(request("short", 4, 20))
    engine.step()
    long = engine.submit(request("long", 150, 1))
    first, second, third = (engine.step() for _ in range(3))
    assert [first.prefill_tokens, second.prefill_tokens, third.prefill_tokens] == [63, 63, 24]
    assert [len(step.sampled) for step in (first, second, third)] == [1, 1, 2]
    assert third.finished == [long]


def test_duration_is_the_formula_of_what_the_step_did(make: Make) -> None:
    engine = make(CONFIG)
    engine.submit(request("a", 10, 3))
    prefill, decode = engine.step(), engine.step()
    assert prefill.duration_s == pytest.approx(1.0 + 10 * 0.01)
    assert decode.duration_s == pytest.approx(1.0 + 0.1 + 11 * 0.001)


def test_a_repeated_prompt_hits_all_but_its_last_token(make: Make) -> None:
    engine = make(CONFIG)
    for _ in range(2):
        exact = engine.submit(request("exact", 8, 1))
        ragged = engine.submit(request("ragged", 9, 1))
        run(engine)
    assert exact.cached_tokens == 4  # A multiple of the block size computes its last block again.
    assert ragged.cached_tokens == 8


def test_equal_prompts_admitted_in_one_step_share_blocks(make: Make) -> None:
    engine = make(CONFIG)
    first, second = engine.submit(request("a", 21, 4)), engine.submit(request("a", 21, 4))
    engine.step()
    assert (first.cached_tokens, second.cached_tokens) == (0, 20)
    assert engine.blocks(first)[:5] == engine.blocks(second)[:5]


def test_head_of_line_that_does_not_fit_blocks_those_behind_it(make: Make) -> None:
    engine = make(replace(CONFIG, blocks=51))
    engine.submit(request("running", 120, 8))
    engine.step()
    engine.step()
    engine.submit(request("large", 150, 1))
    small = engine.submit(request("small", 4, 1))
    result = engine.step()
    assert result.admitted == []
    assert small.state is State.WAITING
    order = [sequence.request.id for result in run(engine) for sequence in result.admitted]
    assert order == ["large", "small"]


def test_the_sequence_admitted_last_is_preempted_and_still_answers_in_full(make: Make) -> None:
    engine = make(replace(CONFIG, blocks=51))
    sequences = [engine.submit(request(name, 56, 40)) for name in "abc"]
    results = run(engine)
    assert [sequence.preemptions for sequence in sequences] == [0, 0, 1]
    assert sampled_counts(results) == dict.fromkeys(sequences, 40)
    preempting = next(result for result in results if result.preempted)
    assert preempting.admitted == []
    assert engine.counters.prompt_tokens == 3 * 56  # A second admission is not counted again.


def test_aborted_sequences_leave_their_full_blocks_cached(make: Make) -> None:
    engine = make(CONFIG)
    gone = engine.submit(request("a", 20, 50))
    engine.step()
    engine.abort(gone)
    assert not engine.has_work
    assert engine.kv_usage == 0
    again = engine.submit(request("a", 20, 1))
    engine.step()
    assert again.cached_tokens == 16


def test_aborting_what_waits_or_has_ended_is_harmless(make: Make) -> None:
    engine = make(CONFIG)
    ended, waiting = engine.submit(request("a", 4, 1)), engine.submit(request("b", 4, 1))
    engine.abort(waiting)
    run(engine)
    engine.abort(ended)
    assert engine.counters.aborted == 1


def test_reset_is_refused_while_blocks_are_held_and_told_with_the_next_step(make: Make) -> None:
    engine = make(CONFIG)
    engine.submit(request("a", 20, 4))
    engine.step()
    assert not engine.reset()
    run(engine)
    assert engine.reset()
    engine.submit(request("a", 20, 1))
    events = engine.step().events
    assert isinstance(events[0], Cleared)
    assert isinstance(events[1], Stored)


def test_reset_with_running_requests_preempts_them_and_they_finish(make: Make) -> None:
    engine = make(CONFIG)
    sequences = [engine.submit(request(name, 20, 9)) for name in "ab"]
    before = [engine.step() for _ in range(3)]
    assert engine.reset(preempt_running=True)
    assert sampled_counts(before + run(engine)) == dict.fromkeys(sequences, 9)


def test_events_replayed_give_exactly_what_the_pool_holds(make: Make) -> None:
    random = Random(7)
    engine = make(replace(CONFIG, blocks=61))
    shared = [[random.randrange(1000) for _ in range(60)] for _ in range(4)]
    held: Counter[int] = Counter()
    for number in range(300):
        prompt = random.randint(1, 120)
        engine.submit(request(f"r{number}", prompt, random.randint(1, 30), tokens=random.choice(shared)))
        while engine.waiting > 3:
            apply_events(engine.step(), held)
    for result in run(engine):
        apply_events(result, held)
    assert engine.counters.preemptions > 0
    assert +held == engine.resident
    assert engine.free_blocks == engine.config.blocks - 1


def apply_events(result: StepResult, held: Counter[int]) -> None:
    for event in result.events:
        match event:
            case Stored():
                held.update(event.hashes)
            case Removed():
                held[event.hash] -= 1
                assert held[event.hash] >= 0
            case Cleared():
                held.clear()


def test_equal_calls_give_equal_steps(make: Make) -> None:
    def history() -> list[tuple[float, int, int, int]]:
        random = Random(3)
        engine = make(replace(CONFIG, blocks=61))
        for number in range(60):
            engine.submit(request(f"r{number % 20}", random.randint(1, 120), random.randint(1, 30)))
        return [(step.duration_s, step.prefill_tokens, step.decode_tokens, len(step.events)) for step in run(engine)]

    assert history() == history()


def test_requests_that_could_never_run_are_refused(make: Make) -> None:
    engine = make(CONFIG)
    for prompt, output in ((0, 1), (1, 0), (200, 1)):
        with pytest.raises(ValueError, match="tokens"):
            engine.submit(request("a", prompt, output))


def test_configurations_that_could_stall_are_refused() -> None:
    with pytest.raises(ConfigError, match="do not fit"):
        replace(CONFIG, blocks=20)
    with pytest.raises(ConfigError, match="max_sequences"):
        replace(CONFIG, max_sequences=65)
