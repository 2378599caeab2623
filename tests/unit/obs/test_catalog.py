from __future__ import annotations

import pytest
from warmfront.obs.catalog import METRICS, Metric, problems


def test_the_catalogue_keeps_its_own_rules() -> None:
    assert problems(METRICS) == []


@pytest.mark.parametrize(
    ("metric", "problem"),
    [
        (Metric("requests_total", "counter", "Requests answered."), "does not begin with warmfront_"),
        (Metric("warmfront_Requests_total", "counter", "Requests answered."), "characters outside"),
        (Metric("warmfront_requests", "counter", "Requests answered."), "a counter ends in _total"),
        (Metric("warmfront_streams_total", "gauge", "Streams open now."), "only a counter ends in _total"),
        (Metric("warmfront_ttft", "histogram", "Time to first token.", (), (1.0,)), "names its unit"),
        (Metric("warmfront_ttft_seconds", "histogram", "Time to first token."), "needs ascending buckets"),
        (Metric("warmfront_a_seconds", "histogram", "Time to first token.", (), (2.0, 1.0)), "needs ascending buckets"),
        (Metric("warmfront_streams", "gauge", "Streams open now.", (), (1.0,)), "only a histogram has buckets"),
        (Metric("warmfront_streams", "gauge", "Streams"), "the help is not a sentence"),
        (Metric("warmfront_streams", "gauge", "Streams open now.", ("request_id",)), "a label without bound"),
        (Metric("warmfront_streams", "gauge", "Streams open now.", ("Model",)), "not a plain name"),
    ],
)
def test_each_rule_finds_what_breaks_it(metric: Metric, problem: str) -> None:
    assert any(problem in found for found in problems([metric]))


def test_a_name_declared_twice_is_found() -> None:
    metric = Metric("warmfront_streams", "gauge", "Streams open now.")
    assert problems([metric, metric]) == ["warmfront_streams: declared 2 times"]


def test_units_are_read_from_names() -> None:
    units = {metric.name: metric.unit for metric in METRICS}
    assert units["warmfront_ttft_seconds"] == "seconds"
    assert units["warmfront_prompt_tokens_total"] == "tokens"
    assert units["warmfront_connections"] is None
