from __future__ import annotations

import io
import logging
from collections.abc import Iterator
from datetime import UTC, datetime

import msgspec
import pytest
from warmfront.obs import logs


@pytest.fixture
def stream() -> Iterator[io.StringIO]:
    """Logs of this test; the root logger is put back after it."""
    root = logging.getLogger()
    handlers, level = root.handlers[:], root.level
    root.handlers = []
    text = io.StringIO()
    yield text
    root.handlers, root.level = handlers, level


def lines(stream: io.StringIO) -> list[dict[str, str]]:
    return [msgspec.json.decode(line) for line in stream.getvalue().splitlines()]


def test_a_record_is_one_json_line_with_the_keys_of_the_core(stream: io.StringIO) -> None:
    logs.configure("info", stream)
    logging.getLogger("warmfront.x").warning("lost %s", "b", extra={"replica": "http://a:1", "request_id": 7})
    (line,) = lines(stream)
    assert list(line) == ["time", "level", "logger", "message", "request_id", "replica"]
    assert (line["level"], line["logger"], line["message"]) == ("warning", "warmfront.x", "lost b")
    assert (line["replica"], line["request_id"]) == ("http://a:1", "7")
    assert datetime.fromisoformat(line["time"]).tzinfo == UTC


@pytest.mark.bug(165)
def test_records_below_the_level_are_left_out(stream: io.StringIO) -> None:
    logs.configure("warn", stream)
    logging.getLogger("warmfront.x").info("ready")
    assert lines(stream) == []


def test_a_traceback_stays_on_its_line(stream: io.StringIO) -> None:
    logs.configure("error", stream)
    try:
        raise ValueError("two\nlines")
    except ValueError:
        logging.getLogger("warmfront.x").exception("failed")
    (line,) = lines(stream)
    assert line["message"] == "failed"
    assert "ValueError: two\nlines" in line["error"]


@pytest.mark.parametrize("level", sorted(logs.LEVELS))
def test_every_configured_level_is_known(level: str, stream: io.StringIO) -> None:
    logs.configure(level, stream)
    assert logging.getLogger().level == logs.LEVELS[level]
