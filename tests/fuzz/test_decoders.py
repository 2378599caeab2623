"""What Python reads from engines, from the core and from operators: read, or refused in the words made for it."""

from __future__ import annotations

import asyncio
import math
from pathlib import Path
from typing import Any, cast

import msgspec
import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from support.fuzz import SETTINGS, near, text_near
from warmfront import config, core, types
from warmfront.control import engine_metrics
from warmfront.control.link import Link, LinkClosedError
from warmfront.errors import ConfigError, WarmfrontError

ROOT = Path(__file__).resolve().parents[2]
PAGES = [(ROOT / "tests/fixtures/vllm" / name).read_text() for name in ("metrics.txt", "metrics_dp2.txt")]
CORPUS = [path.read_bytes() for path in sorted((ROOT / "tests/fuzz/corpus/kv").iterdir())]
WANTED = ("vllm:num_requests", "vllm:kv_cache", "vllm:cache_config", "vllm:prefix_cache", "process_start")
SHORT_PAGES = ["\n".join(line for line in page.splitlines() if line.startswith(WANTED)) for page in PAGES]
HUGE = "9" * 5000
SETTINGS_FILE = """\
front: {listen: 127.0.0.1:8080, io_threads: 2}
fleet:
  servers:
    - url: http://10.0.0.1:8000
      headers: {authorization: Bearer k}
  models: {m: {template_kwargs: {a: [1, 2.5, null, off]}}}
router: {policy: {name: marginal_cost, cost: {ttft_target_s: 1e-3}}}
"""


@SETTINGS
@given(page=text_near(*SHORT_PAGES))
@example(page=SHORT_PAGES[0].replace('block_size="', f'block_size="{HUGE}'))
@example(page=SHORT_PAGES[1].replace('engine="', f'engine="{HUGE}'))
def test_any_metrics_page_gives_finite_figures(page: str) -> None:
    for figures in engine_metrics.parse(page).ranks.values():
        for value in msgspec.structs.astuple(figures):
            assert value is None or isinstance(value, bool) or math.isfinite(value)


def framed(*frames: dict[str, Any]) -> bytes:
    payloads = [msgspec.msgpack.encode(frame) for frame in frames]
    return b"".join(len(payload).to_bytes(4, "big") + payload for payload in payloads)


CONVERSATION = framed(
    {"type": "hello", "serving": "127.0.0.1:8080", "pid": 7},
    {"type": "state", "state": {"version": 1, "pools": []}},
    {"type": "answer", "id": 1, "status": 200, "body": b"{}"},
    {"type": "from the future", "x": [1]},
    {"type": "stop"},
)


@SETTINGS
@given(said=near(CONVERSATION))
def test_any_bytes_of_the_data_process_are_taken_or_end_the_link(said: bytes) -> None:
    async def listen() -> None:
        reader = asyncio.StreamReader()
        reader.feed_data(said)
        reader.feed_eof()
        await Link(reader, cast(asyncio.StreamWriter, None)).read()

    try:
        asyncio.run(listen())
    except LinkClosedError:
        return


@SETTINGS
@given(events=near(core.sample_events()))
def test_any_batch_of_events_is_read_or_refused(events: bytes) -> None:
    try:
        read = msgspec.msgpack.decode(events, type=list[types.Event])
    except (msgspec.DecodeError, RecursionError):
        return
    assert isinstance(read, list)


@SETTINGS
@given(payload=near(*CORPUS))
def test_any_payload_of_kv_events_is_read_or_refused_by_the_core(payload: bytes) -> None:
    try:
        assert isinstance(core.decode_batch(payload), list)
    except (ValueError, WarmfrontError):
        return


@SETTINGS
@given(commands=near(msgspec.msgpack.encode([types.Shed(types.RequestId(1), "queue_timeout")])))
def test_any_batch_of_commands_is_read_or_refused_by_the_core(commands: bytes) -> None:
    try:
        assert isinstance(core.read_commands(commands), list)
    except (ValueError, WarmfrontError):
        return


@SETTINGS
@given(text=text_near(SETTINGS_FILE))
@example(text="front: &front {listen: *front}")
@example(text="fleet: {models: {m: &m {template_kwargs: {a: *m}}}}")
@example(text="? [front]\n: {}")
@example(text="1: 2")
@example(text=f"front: {{io_threads: {HUGE}}}")
def test_any_file_is_a_configuration_or_one_clear_error(tmp_path_factory: pytest.TempPathFactory, text: str) -> None:
    path = tmp_path_factory.getbasetemp() / "any.yaml"
    path.write_text(text, encoding="utf-8")
    load(path=path, environment={})


@SETTINGS
@given(
    name=st.text(max_size=30),
    value=text_near("[1, {a: b}]", "off", "1e400", "{a: &a [1]}"),
    by_environment=st.booleans(),
)
@example(name="FRONT__LISTEN", value="&a [*a]", by_environment=True)
@example(name="FRONT__IO_THREADS", value=HUGE, by_environment=True)
def test_any_environment_or_option_is_a_configuration_or_one_clear_error(
    name: str, value: str, *, by_environment: bool
) -> None:
    load(
        environment={f"WARMFRONT_{name}": value} if by_environment else {},
        overrides=[] if by_environment else [f"{name}={value}"],
    )


def load(**sources: Any) -> None:
    """Load; a refusal is one line."""
    refusal = ""
    try:
        config.load(**sources)
    except ConfigError as error:
        refusal = str(error)
    assert "\n" not in refusal
