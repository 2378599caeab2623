"""The fit gives back the constants of an engine that follows the model, and says so when one does not."""

from __future__ import annotations

from dataclasses import replace

import pytest
from warmfront.lab.calibrate.fit import fit
from warmfront.lab.calibrate.probes import DecodeProbe, Measured, PrefillProbe, decode_probes, plan
from warmfront.reference.request import EngineRequest, StepResult
from warmfront.sim.engine import Engine, EngineConfig
from warmfront.sim.latency import LatencyModel, preset

BATCHED_TOKENS = 512
OUTPUT_TOKENS = 128
REQUEST_S = 0.004
TRUE = LatencyModel(
    base_s=0.012, prefill_token_s=90e-6, attention_pair_s=8e-9, decode_sequence_s=0.2e-3, context_token_s=60e-9
)


def probed(latency: LatencyModel) -> Measured:
    """Time the engine model itself, on virtual time."""
    todo = plan(tokens_max=4096, sequences_max=16, output_tokens=OUTPUT_TOKENS, repeats=1)
    prefills = [
        PrefillProbe(tokens, 0, REQUEST_S + sum(step.duration_s for step in _steps(latency, tokens, 1, sequences=1)))
        for tokens in todo.prompt_tokens
    ]
    decodes = []
    for sequences in todo.sequences:
        for tokens in todo.contexts:
            decodes.append(_decode(latency, tokens, sequences))
    return Measured("m", prefills, decodes, None)


def _decode(latency: LatencyModel, prompt_tokens: int, sequences: int) -> DecodeProbe:
    steps = _steps(latency, prompt_tokens, OUTPUT_TOKENS, sequences=sequences)
    alone = [number for number, step in enumerate(steps) if step.decode_tokens == sequences and not step.prefill_tokens]
    durations = [steps[number].duration_s for number in alone]
    ended = sum(step.decode_tokens for step in steps[: alone[0]])
    context = sequences * prompt_tokens + ended + sequences * (len(alone) + 1) / 2
    return DecodeProbe(sequences, context, sum(durations) / len(durations))


def _steps(latency: LatencyModel, prompt_tokens: int, output_tokens: int, *, sequences: int) -> list[StepResult]:
    engine = Engine(EngineConfig(latency, blocks=8192, max_model_tokens=8192, max_batched_tokens=BATCHED_TOKENS))
    for number in range(sequences):
        engine.submit(EngineRequest(str(number), prompt_tokens, output_tokens, hashes=[]))
    steps = []
    while engine.has_work:
        steps.append(engine.step())
    return steps


def test_constants_of_an_engine_that_follows_the_model_are_found() -> None:
    found = fit(probed(TRUE), batched_tokens=BATCHED_TOKENS)
    assert found.residual_worst < 0.01
    assert found.request_s == pytest.approx(REQUEST_S, rel=0.1)
    assert found.latency.base_s == pytest.approx(TRUE.base_s, rel=0.02)
    assert found.latency.prefill_token_s == pytest.approx(TRUE.prefill_token_s, rel=0.02)
    assert found.latency.attention_pair_s == pytest.approx(TRUE.attention_pair_s, rel=0.05)
    assert found.latency.decode_sequence_s == pytest.approx(TRUE.decode_sequence_s, rel=0.05)
    assert found.latency.context_token_s == pytest.approx(TRUE.context_token_s, rel=0.05)
    assert found.undetermined == []


def test_a_constant_that_is_zero_is_named_and_never_negative() -> None:
    found = fit(probed(replace(TRUE, attention_pair_s=0.0)), batched_tokens=BATCHED_TOKENS)
    assert found.latency.attention_pair_s < 1e-12
    assert found.latency.prefill_token_s == pytest.approx(TRUE.prefill_token_s, rel=0.02)


def test_the_residual_names_the_probe_that_does_not_fit() -> None:
    measured = probed(TRUE)
    slow = replace(measured.prefills[2], ttft_s=10 * measured.prefills[2].ttft_s)
    measured.prefills[2] = slow
    found = fit(measured, batched_tokens=BATCHED_TOKENS)
    assert found.residual_worst > 0.5
    assert f"{slow.new_tokens:,} tokens" in found.worst


def test_both_kinds_of_probe_are_needed() -> None:
    measured = probed(preset("demo").latency)
    with pytest.raises(ValueError, match="need prefill and decode"):
        fit(replace(measured, decodes=[]), batched_tokens=BATCHED_TOKENS)


def test_a_plan_grows_to_the_limits_it_is_given() -> None:
    todo = plan(tokens_max=1000, sequences_max=20, output_tokens=8, repeats=2)
    assert todo.prompt_tokens == (125, 250, 500, 1000)
    assert todo.sequences == (1, 4, 16, 20)
    assert todo.contexts == (125, 500)


def test_decode_probes_are_shortened_until_they_fit_the_cache() -> None:
    todo = plan(tokens_max=4096, sequences_max=16, output_tokens=64, repeats=1)
    assert decode_probes(todo, None) == [(1, 64), (1, 2048), (4, 64), (4, 2048), (16, 64), (16, 2048)]
    assert decode_probes(todo, 24_576) == [(1, 64), (1, 2048), (4, 64), (4, 2048), (16, 64), (16, 704)]
    assert decode_probes(todo, 2048) == [(1, 64), (1, 960), (4, 64), (4, 192)]
