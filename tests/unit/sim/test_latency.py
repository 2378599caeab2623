from __future__ import annotations

import pytest
from warmfront.sim.latency import PRESETS, preset


def test_presets_are_of_the_published_order_of_magnitude() -> None:
    """Llama-3.1-8B in bf16: tens of thousands of prompt tokens/s on an H100, a few thousand on an L4."""
    rates = {name: 1 / found.latency.prefill_token_s for name, found in PRESETS.items() if "8b" in name}
    assert 15_000 < rates["llama-3.1-8b-h100"] < 60_000
    assert 5_000 < rates["llama-3.1-8b-a100"] < 20_000
    assert 1_500 < rates["llama-3.1-8b-l4"] < 8_000
    assert 5e-3 < PRESETS["llama-3.1-8b-h100"].latency.base_s < 12e-3
    assert 50e-3 < PRESETS["llama-3.1-8b-l4"].latency.base_s < 100e-3


def test_kv_capacity_is_what_memory_leaves() -> None:
    assert 380_000 < PRESETS["llama-3.1-8b-h100"].kv_tokens < 460_000
    assert 15_000 < PRESETS["llama-3.1-8b-l4"].kv_tokens < 40_000


def test_speed_divides_every_constant() -> None:
    work = {"prefill_tokens": 100, "attention_pairs": 5000.0, "decode_sequences": 3, "context_tokens": 1000}
    slow, fast = preset("llama-3.1-8b-l4").latency, preset("llama-3.1-8b-l4", speed=4.0).latency
    assert fast.step_s(**work) == pytest.approx(slow.step_s(**work) / 4)  # type: ignore[arg-type]


def test_the_two_gpu_preset_prefills_a_chunk_as_fast_as_published() -> None:
    """llm-d: about 15,900 prompt tokens/s for 8,192 tokens at an unloaded Qwen3-32B on two H100."""
    chunk_s = preset("qwen3-32b-tp2-h100").latency.step_s(
        prefill_tokens=8192, attention_pairs=8192 * 4096.5, decode_sequences=0, context_tokens=0
    )
    assert 8192 / chunk_s == pytest.approx(15_900, rel=0.03)


def test_a_step_is_bound_by_weights_until_its_arithmetic_takes_longer() -> None:
    latency = preset("llama3.3-70b-fp8-tp2-h100").latency
    few, some, many = (
        latency.step_s(prefill_tokens=tokens, attention_pairs=0.0, decode_sequences=1, context_tokens=0)
        for tokens in (0, 100, 1000)
    )
    assert few == some
    assert many == pytest.approx(latency.base_s + 1001 * latency.linear_token_s)
