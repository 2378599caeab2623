"""Settings and declarations that let users down elsewhere."""

from __future__ import annotations

import pytest
from warmfront import config
from warmfront.errors import ConfigError
from warmfront.obs.catalog import METRICS

HOUR_S = 3600.0


@pytest.mark.bug(97)
@pytest.mark.parametrize("url", ["10.0.0.1:8000", "engine", "ftp://10.0.0.1:8000", "http://", "http://a b:80"])
def test_a_server_whose_url_cannot_work_is_refused_at_the_start_and_named(url: str) -> None:
    with pytest.raises(ConfigError, match=r"fleet\.servers\[0\]\.url"):
        config.load(environment={}, flags={"fleet": {"servers": [{"url": url}]}})


@pytest.mark.bug(163)
@pytest.mark.parametrize("name", ["request_duration_seconds"])
def test_requests_that_take_an_hour_still_fall_into_a_bucket(name: str) -> None:
    (metric,) = (metric for metric in METRICS if metric.name == f"warmfront_{name}")
    assert metric.buckets[-1] >= HOUR_S


@pytest.mark.bug(159)
def test_no_metric_has_a_label_that_a_client_can_write_freely() -> None:
    labels = {label for metric in METRICS for label in metric.labels}
    assert labels.isdisjoint({"path", "route", "url", "method", "user", "session", "flow", "request_id"})
