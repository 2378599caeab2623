from __future__ import annotations

from warmfront.engines import DIALECTS, VLLM


def test_dialects_are_found_by_the_name_that_configuration_uses() -> None:
    assert set(DIALECTS) == {"vllm", "generic"}
    assert all(name == dialect.name for name, dialect in DIALECTS.items())


def test_newest_metric_names_come_first() -> None:
    assert VLLM.metrics.kv_usage == ("vllm:kv_cache_usage_perc", "vllm:gpu_cache_usage_perc")
    assert VLLM.metrics.prefix_queries[-1].startswith("vllm:gpu_")


def test_event_ports_are_counted_from_the_first_rank() -> None:
    assert VLLM.events is not None
    assert VLLM.events.port == 5557
    assert VLLM.events.sources_path == "/kv_event_sources"
