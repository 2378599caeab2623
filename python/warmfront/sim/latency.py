"""How long an engine step takes: one formula, and where its constants come from.

    step = base + max(weights, linear_token · (P + B))
         + prefill_token · P + attention_pair · A + decode_sequence · B + context_token · K
         + prefill_step · [P > 0] + prefill_square · P² + decode_step · [B > 0] + context_square · K²

P: prompt tokens computed in the step; A: (query, key) pairs of their attention; B: sequences that decode; K: tokens
of context these read. The maximum says that a step is bound either by one pass over the weights or by the arithmetic
of its linear layers. The third line is for a model that others fitted by polynomials, which bounds K too; it is zero
in the other presets. Where both constants of the maximum are zero as well the formula is linear, `base` holds the pass
over the weights, and `P, A, B, K` of timed probes determine the constants by least squares. What is loaded before a
step (KV from slower tiers, an adapter) is added at its own price.

The presets are *estimates, not measurements of ours*. Those of Llama 3.1 8B are rooflines: compute and bandwidth of the
GPU's data sheet, the shape of the model's published `config.json`, and two efficiencies (half of peak FLOPS, 80 % of
peak bandwidth) that published serving benchmarks reach within a factor of about two. The two-GPU presets are fitted to
published serving figures, named beside them. Read all as orders of magnitude; calibrate for more.
"""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from pathlib import Path

import msgspec
from msgspec import Struct

from warmfront.errors import ConfigError

SUFFIX = ".json"
"""How the name of a preset file ends."""
MAY_BE_NEGATIVE = ("context_square_s",)
"""A polynomial bends either way."""

HOST_TOKEN_S = 5.5e-6
"""256 KiB of KV a token over PCIe 5 at 48 GB/s, of the 63 GB/s of its specification."""
DISK_TOKEN_S = 4.4e-5
"""The same at 6 GB/s, a data-centre NVMe drive's sequential reads."""
ADAPTER_S = 0.02
"""A rank-16 adapter of a 30B model, a few hundred MB, from host memory."""


@dataclass(frozen=True, slots=True)
class LatencyModel:
    """Constants of the formula, in seconds per unit."""

    base_s: float
    prefill_token_s: float
    attention_pair_s: float
    decode_sequence_s: float
    context_token_s: float
    weights_s: float = 0.0
    """One pass over the weights, where it hides behind the linear layers' arithmetic once that takes longer."""
    linear_token_s: float = 0.0
    """That arithmetic, for each token of the step."""
    prefill_step_s: float = 0.0
    """A step with prompt tokens at all."""
    prefill_square_s: float = 0.0
    """Square of the step's prompt tokens."""
    decode_step_s: float = 0.0
    """A step with decoding sequences at all."""
    context_square_s: float = 0.0
    """Square of the context read; negative where decoding grows slower than its context."""
    context_tokens_most: float = 0.0
    """More context than this costs no more; 0: there is no such bound."""
    host_token_s: float = HOST_TOKEN_S
    """Loading a token of KV from host memory."""
    disk_token_s: float = DISK_TOKEN_S
    """Loading a token of KV from disk."""
    adapter_s: float = ADAPTER_S
    """Bringing an adapter onto the device."""

    def step_s(
        self, *, prefill_tokens: int, attention_pairs: float, decode_sequences: int, context_tokens: int
    ) -> float:
        """Return the duration of one step."""
        context = min(context_tokens, self.context_tokens_most) if self.context_tokens_most else context_tokens
        linear = (
            self.base_s
            + max(self.weights_s, self.linear_token_s * (prefill_tokens + decode_sequences))
            + self.prefill_token_s * prefill_tokens
            + self.attention_pair_s * attention_pairs
            + self.decode_sequence_s * decode_sequences
            + self.context_token_s * context
        )
        begun = (self.prefill_step_s if prefill_tokens else 0.0) + (self.decode_step_s if decode_sequences else 0.0)
        return (
            linear
            + begun
            + self.prefill_square_s * prefill_tokens * prefill_tokens
            + self.context_square_s * context * context
        )

    def faster(self, factor: float) -> LatencyModel:
        """Return this model with every constant divided by `factor`."""
        seconds = [each.name for each in fields(self) if each.name.endswith("_s")]
        return replace(self, **{name: getattr(self, name) / factor for name in seconds})


@dataclass(frozen=True, slots=True)
class ModelShape:
    """A dense transformer, from its published configuration."""

    parameters: float
    layers: int
    hidden: int
    kv_heads: int
    head_dim: int
    bytes_per_weight: int = 2

    @property
    def kv_bytes_per_token(self) -> int:
        """Keys and values of all layers at 16 bits."""
        return 2 * self.layers * self.kv_heads * self.head_dim * 2


@dataclass(frozen=True, slots=True)
class Gpu:
    """One accelerator, from its data sheet: dense 16-bit FLOP/s, bytes/s, bytes."""

    flops: float
    bandwidth: float
    memory: float


@dataclass(frozen=True, slots=True)
class Preset:
    """A model on a GPU: its speed and the size of its KV cache."""

    latency: LatencyModel
    kv_tokens: int
    max_batched_tokens: int
    max_sequences: int


COMPUTE_EFFICIENCY = 0.5
"""Share of peak FLOPS that a long prefill reaches."""
BANDWIDTH_EFFICIENCY = 0.8
"""Share of peak bandwidth that reading weights and KV reaches."""
STEP_OVERHEAD_S = 1.5e-3
"""Scheduling, launch and sampling of one step in vLLM; milliseconds, by its own published profiles."""
SEQUENCE_OVERHEAD_S = 8e-6
"""Sampling and output handling of one sequence in a step."""
MEMORY_UTILISATION = 0.9
"""vLLM's default share of GPU memory."""
ACTIVATION_BYTES = 2e9
"""Set aside beside weights and KV."""

LLAMA_3_1_8B = ModelShape(parameters=8.03e9, layers=32, hidden=4096, kv_heads=8, head_dim=128)
"""config.json of meta-llama/Llama-3.1-8B."""
H100_SXM = Gpu(flops=989e12, bandwidth=3.35e12, memory=80e9)
"""NVIDIA H100 data sheet, SXM, bf16 without sparsity."""
A100_SXM_80GB = Gpu(flops=312e12, bandwidth=2.039e12, memory=80e9)
"""NVIDIA A100 data sheet, SXM 80 GB, bf16 without sparsity."""
L4 = Gpu(flops=121e12, bandwidth=300e9, memory=24e9)
"""NVIDIA L4 data sheet, bf16 without sparsity."""

MOCKER_KV_TOKENS = 16_384 * 64
"""The mocker's decode time depends on the share of its KV cache that is read; the constants hold for this size."""


def roofline(model: ModelShape, gpu: Gpu) -> LatencyModel:
    """Derive the constants from shapes and data sheet.

    Linear layers cost 2 FLOP per parameter and token; attention 4 · hidden FLOP per layer and (query, key) pair; a step
    reads all weights once and, for each decoding sequence, its whole context.
    """
    flops = gpu.flops * COMPUTE_EFFICIENCY
    bandwidth = gpu.bandwidth * BANDWIDTH_EFFICIENCY
    return LatencyModel(
        base_s=STEP_OVERHEAD_S + model.parameters * model.bytes_per_weight / bandwidth,
        prefill_token_s=2 * model.parameters / flops,
        attention_pair_s=4 * model.layers * model.hidden / flops,
        decode_sequence_s=SEQUENCE_OVERHEAD_S + 2 * model.parameters / flops,
        context_token_s=model.kv_bytes_per_token / bandwidth,
    )


def kv_capacity(model: ModelShape, gpu: Gpu) -> int:
    """Return the tokens of KV that fit beside the weights."""
    room = gpu.memory * MEMORY_UTILISATION - model.parameters * model.bytes_per_weight - ACTIVATION_BYTES
    return int(room / model.kv_bytes_per_token)


def _preset(gpu: Gpu, *, max_batched_tokens: int, max_sequences: int) -> Preset:
    return Preset(roofline(LLAMA_3_1_8B, gpu), kv_capacity(LLAMA_3_1_8B, gpu), max_batched_tokens, max_sequences)


PRESETS: dict[str, Preset] = {
    # Batch limits: vLLM's own defaults for a GPU of this size.
    "llama-3.1-8b-h100": _preset(H100_SXM, max_batched_tokens=8192, max_sequences=1024),
    "llama-3.1-8b-a100": _preset(A100_SXM_80GB, max_batched_tokens=2048, max_sequences=256),
    "llama-3.1-8b-l4": _preset(L4, max_batched_tokens=2048, max_sequences=256),
    # Qwen3-32B in bf16 on two H100 80 GB: 65.6 GFLOP a token, fitted to the 15,900 prompt tokens/s that the llm-d
    # project publishes for an unloaded server; 64 layers of 8 KV heads of 128, so 256 KiB of KV a token; KV size as
    # llm-d reports it.
    "qwen3-32b-tp2-h100": Preset(
        LatencyModel(
            base_s=2.0e-3,
            prefill_token_s=0.0,
            attention_pair_s=1.8e-9,
            decode_sequence_s=0.0,
            context_token_s=52e-9,
            weights_s=12.2e-3,
            linear_token_s=55.6e-6,
        ),
        kv_tokens=301_808,
        max_batched_tokens=8192,
        max_sequences=256,
    ),
    # Llama 3.3 70B in fp8 on two H100 80 GB: 141 GFLOP a token at 45 % of peak, 160 KiB of fp8 KV a token, and the
    # 40,071 blocks of 16 tokens that the CacheRoute paper reports.
    "llama3.3-70b-fp8-tp2-h100": Preset(
        LatencyModel(
            base_s=3.0e-3,
            prefill_token_s=0.0,
            attention_pair_s=2.2e-9,
            decode_sequence_s=0.0,
            context_token_s=33e-9,
            weights_s=13.2e-3,
            linear_token_s=80e-6,
        ),
        kv_tokens=641_136,
        max_batched_tokens=8192,
        max_sequences=256,
    ),
    # The mocker of NVIDIA Dynamo 1.6.1 in its vLLM mode with polynomial timing, for comparing simulators: constants and
    # limits as its replay was measured to have them (16,384 blocks of 64 tokens), not those of a GPU that we know.
    "dynamo-mocker": Preset(
        LatencyModel(
            base_s=0.0,
            prefill_token_s=1.518344e-5,
            attention_pair_s=0.0,
            decode_sequence_s=0.0,
            context_token_s=54.01e-3 / MOCKER_KV_TOKENS,
            prefill_step_s=16.50142e-3,
            prefill_square_s=4.209989e-10,
            decode_step_s=5.74e-3,
            context_square_s=-25.74e-3 / MOCKER_KV_TOKENS**2,
            context_tokens_most=MOCKER_KV_TOKENS,
        ),
        kv_tokens=MOCKER_KV_TOKENS,
        max_batched_tokens=8192,
        max_sequences=256,
    ),
    # Made up: slow enough that a prefill is seen by eye and that four engines fit on two CPU cores.
    "demo": Preset(
        LatencyModel(
            base_s=18e-3,
            prefill_token_s=220e-6,
            attention_pair_s=6e-9,
            decode_sequence_s=0.15e-3,
            context_token_s=30e-9,
        ),
        kv_tokens=24_576,
        max_batched_tokens=1024,
        max_sequences=64,
    ),
}
"""By name, as `warmfront engine --preset` takes it."""


def preset(name: str, *, speed: float = 1.0) -> Preset:
    """Return a preset, made `speed` times as fast.

    Args:
        name: A key of `PRESETS`, or the path of a file that `save_preset` wrote; a path ends with `.json`.
        speed: Above 1 is faster.

    Raises:
        ConfigError: There is none of this name, or the file is not a preset.
    """
    found = load_preset(Path(name)) if name.endswith(SUFFIX) else PRESETS.get(name)
    if found is None:
        raise ConfigError(f"no preset {name!r}; known: {', '.join(sorted(PRESETS))}, or the path of a {SUFFIX} file")
    return replace(found, latency=found.latency.faster(speed))


class PresetFile(Struct, frozen=True, forbid_unknown_fields=True):
    """What `save_preset` writes."""

    source: str
    """Where the constants come from, for whoever reads the file."""
    preset: Preset


def save_preset(path: Path, preset: Preset, *, source: str) -> None:
    """Write a preset as JSON.

    Raises:
        ConfigError: The path would not be taken for a file, see `preset`.
        OSError: It cannot be written.
    """
    if path.suffix != SUFFIX:
        raise ConfigError(f"{path}: a preset file ends with {SUFFIX}")
    path.write_bytes(msgspec.json.format(msgspec.json.encode(PresetFile(source, preset)), indent=2) + b"\n")


def load_preset(path: Path) -> Preset:
    """Read what `save_preset` wrote.

    Raises:
        ConfigError: The file cannot be read, is not a preset, or has a constant that cannot be.
    """
    try:
        found = msgspec.json.decode(path.read_bytes(), type=PresetFile).preset
    except OSError as error:
        raise ConfigError(f"cannot read preset {path}: {error.strerror}") from error
    except msgspec.DecodeError as error:
        raise ConfigError(f"{path} is not a preset: {error}") from error
    constants = [each.name for each in fields(found.latency) if each.name not in MAY_BE_NEGATIVE]
    negative = [name for name in constants if getattr(found.latency, name) < 0]
    negative += [name for name in ("kv_tokens", "max_batched_tokens", "max_sequences") if getattr(found, name) < 1]
    if negative:
        raise ConfigError(f"{path}: {negative[0]} is too small")
    return found
