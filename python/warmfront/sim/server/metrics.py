"""`/metrics` under vLLM's names: what a router or a dashboard reads from an engine.

Gauges are read from the model at the moment of the scrape; histograms are filled as steps end.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter
from collections.abc import Iterator, Sequence

from warmfront.reference.request import StepResult
from warmfront.sim.engine import Engine
from warmfront.sim.server.job import Choice

SHORT_BOUNDS_S = (
    0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0, 160.0,
    640.0, 2560.0,
)  # fmt: skip
TOKEN_BOUNDS_S = (
    0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0,
)  # fmt: skip
LONG_BOUNDS_S = (
    0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0, 40.0, 50.0, 60.0, 120.0, 240.0, 480.0, 960.0,
    1920.0, 7680.0,
)  # fmt: skip
SIZE_BOUNDS = (1.0, 2.0, 5.0, 10.0, 20.0, 50.0, 100.0, 200.0, 500.0, 1000.0, 2000.0, 5000.0, 10000.0)
STEP_BOUNDS = (1.0, 8.0, 16.0, 32.0, 64.0, 128.0, 256.0, 512.0, 1024.0, 2048.0, 4096.0, 8192.0, 16384.0)


class Histogram:
    """Counts of observations by upper bound."""

    def __init__(self, bounds: Sequence[float]) -> None:
        self.bounds = bounds
        self.counts = [0] * (len(bounds) + 1)
        self.sum = 0.0

    def observe(self, value: float) -> None:
        """Count one observation."""
        self.counts[bisect_left(self.bounds, value)] += 1
        self.sum += value

    def lines(self, name: str, labels: str) -> Iterator[str]:
        """Yield the lines of the text format."""
        total = 0
        for bound, count in zip((*(repr(bound) for bound in self.bounds), "+Inf"), self.counts, strict=True):
            total += count
            yield f'{name}_bucket{{{labels},le="{bound}"}} {total}.0'
        yield f"{name}_count{{{labels}}} {total}.0"
        yield f"{name}_sum{{{labels}}} {self.sum!r}"


class EngineMetrics:
    """All metrics of one engine."""

    def __init__(self, engine: Engine, *, model: str) -> None:
        """Watch an engine that serves `model`."""
        self._engine = engine
        escaped = model.replace("\\", "\\\\").replace('"', '\\"')
        self._labels = f'engine="0",model_name="{escaped}"'
        self.rejections: Counter[str] = Counter()
        self.finish_reasons: Counter[str] = Counter({"stop": 0, "length": 0, "abort": 0, "error": 0})
        self.ttft = Histogram(SHORT_BOUNDS_S)
        self.itl = Histogram(TOKEN_BOUNDS_S)
        self.e2e = Histogram(LONG_BOUNDS_S)
        self.queue = Histogram(LONG_BOUNDS_S)
        self.prompt = Histogram(SIZE_BOUNDS)
        self.output = Histogram(SIZE_BOUNDS)
        self.step = Histogram(STEP_BOUNDS)

    def stepped(self, result: StepResult) -> None:
        """Take note of a step."""
        self.step.observe(result.prefill_tokens + result.decode_tokens)

    def finished(self, choice: Choice, *, seconds: float) -> None:
        """Take note of a complete answer, `seconds` after its request arrived."""
        self.e2e.observe(seconds)
        self.prompt.observe(len(choice.prompt))
        self.output.observe(choice.emitted)
        self.finish_reasons[choice.answer.reason] += 1

    def render(self) -> str:
        """Return the text format."""
        lines: list[str] = []
        for name, value in self._gauges().items():
            lines += [f"# TYPE {name} gauge", f"{name}{{{self._labels}}} {float(value)!r}"]
        for name, value in self._counters().items():
            lines += [f"# TYPE {name}_total counter", f"{name}_total{{{self._labels}}} {float(value)!r}"]
        lines += self._labelled("vllm:request_success", "finished_reason", self.finish_reasons)
        lines += self._labelled("vllm:prompt_tokens_by_source", "source", self._sources())
        lines.append("# TYPE vllm:admission_rejections_total counter")
        lines += [
            f'vllm:admission_rejections_total{{reason="{reason}"}} {count}.0'
            for reason, count in self.rejections.items()
        ]
        for name, histogram in self._histograms().items():
            lines += [f"# TYPE {name} histogram", *histogram.lines(name, self._labels)]
        lines += ["# TYPE vllm:cache_config_info gauge", self._cache_config()]
        return "\n".join(lines) + "\n"

    def _gauges(self) -> dict[str, float]:
        engine = self._engine
        return {
            "vllm:num_requests_running": engine.running,
            "vllm:num_requests_waiting": engine.waiting,
            "vllm:kv_cache_usage_perc": engine.kv_usage,
        }

    def _counters(self) -> dict[str, float]:
        counters = self._engine.counters
        return {
            "vllm:prefix_cache_queries": counters.queried_tokens,
            "vllm:prefix_cache_hits": counters.hit_tokens,
            "vllm:prompt_tokens": counters.prompt_tokens,
            "vllm:prompt_tokens_cached": counters.hit_tokens,
            "vllm:generation_tokens": counters.generated_tokens,
            "vllm:num_preemptions": counters.preemptions,
        }

    def _sources(self) -> dict[str, int]:
        counters = self._engine.counters
        computed = counters.prompt_tokens - counters.hit_tokens
        return {"local_compute": computed, "local_cache_hit": counters.hit_tokens, "external_kv_transfer": 0}

    def _histograms(self) -> dict[str, Histogram]:
        return {
            "vllm:time_to_first_token_seconds": self.ttft,
            "vllm:inter_token_latency_seconds": self.itl,
            "vllm:e2e_request_latency_seconds": self.e2e,
            "vllm:request_queue_time_seconds": self.queue,
            "vllm:request_prompt_tokens": self.prompt,
            "vllm:request_generation_tokens": self.output,
            "vllm:iteration_tokens_total": self.step,
        }

    def _labelled(self, name: str, label: str, values: dict[str, int] | Counter[str]) -> list[str]:
        lines = [f'{name}_total{{{self._labels},{label}="{value}"}} {count}.0' for value, count in values.items()]
        return [f"# TYPE {name}_total counter", *lines]

    def _cache_config(self) -> str:
        config = self._engine.config
        tokens = config.blocks * config.block_size
        return (
            f'vllm:cache_config_info{{block_size="{config.block_size}",enable_prefix_caching="True",engine="0",'
            f'kv_cache_size_tokens="{tokens}",num_gpu_blocks="{config.blocks}",'
            f'prefix_caching_hash_algo="sha256"}} 1.0'
        )
