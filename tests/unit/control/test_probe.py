from __future__ import annotations

import random
from collections.abc import Iterator

import aiohttp
import msgspec
import pytest
import zmq
from conftest import RecordedEngine, card, recorded
from warmfront.clock import ManualClock
from warmfront.config import ControlConfig, EventsConfig, ServerConfig
from warmfront.control.facts import ROUNDS_TIMED_MIN, Answer, Round, ServerFacts
from warmfront.control.probe import IDENTITY_EVERY, ROUNDS_TIMED, ServerProbe, advance
from warmfront.engines import DIALECTS, VLLM, EventDefaults
from warmfront.types import EventSource


@pytest.fixture
def publisher() -> Iterator[zmq.Socket[bytes]]:
    """A ZeroMQ publisher at some free port."""
    with zmq.Context() as context, context.socket(zmq.PUB) as socket:
        socket.bind_to_random_port("tcp://127.0.0.1")
        yield socket


def probe_of(recorded_engine: RecordedEngine, http: aiohttp.ClientSession, **options: object) -> ServerProbe:
    return ServerProbe(
        ServerConfig(url=recorded_engine.url, **options),  # type: ignore[arg-type]
        http=http,
        config=ControlConfig(probe_timeout_s=2.0, unready_after=3),
        clock=ManualClock(100.0),
        rng=random.Random(1),
        on_round=lambda _before, _after: None,
    )


async def rounds(probe: ServerProbe, count: int = 1) -> ServerFacts:
    for _ in range(count):
        await probe.ask_once()
    return probe.facts


@pytest.mark.bug(47)
async def test_one_round_learns_everything_that_vllm_tells(engine: RecordedEngine, http: aiohttp.ClientSession) -> None:
    engine.models = [card("tiny"), card("alias", root="/models/tiny"), card("adapter-a", parent="tiny", length=None)]
    facts = await rounds(probe_of(engine, http))
    assert facts.ready
    assert (facts.engine, facts.version) == ("vllm", "0.32.0")
    assert [(known.id, known.parent, known.max_model_len) for known in facts.cards] == [
        ("tiny", None, 4096),
        ("alias", None, 4096),
        ("adapter-a", "tiny", None),
    ]
    assert msgspec.json.decode(facts.cards[0].raw) == engine.models[0]
    assert facts.sources == {
        0: EventSource("tcp://127.0.0.1:5640", replay="tcp://127.0.0.1:5650", topic="kv-events", origin="engine")
    }
    assert facts.incarnation == 179602178543
    assert facts.scraped_s == 100.0


@pytest.mark.bug(162)
async def test_ranks_come_from_metrics_and_event_sources(engine: RecordedEngine, http: aiohttp.ClientSession) -> None:
    engine.metrics, engine.sources = recorded("metrics_dp2.txt"), None
    assert (await rounds(probe_of(engine, http))).ranks == [0, 1]


async def test_a_server_with_nothing_but_models_is_a_ready_generic_one(
    engine: RecordedEngine, http: aiohttp.ClientSession
) -> None:
    engine.health, engine.metrics, engine.version, engine.sources = 404, None, None, None
    facts = await rounds(probe_of(engine, http))
    assert (facts.ready, facts.engine, facts.ranks, facts.sources) == (True, "generic", [0], {})
    assert facts.sources_note is not None
    assert "publishes no KV events" in facts.sources_note


async def test_a_server_configured_as_generic_is_asked_for_its_models_alone(
    engine: RecordedEngine, http: aiohttp.ClientSession
) -> None:
    facts = await rounds(probe_of(engine, http, engine="generic"))
    assert (facts.ready, facts.engine) == (True, "generic")
    assert set(engine.asked) == {"/v1/models"}


async def test_failures_count_and_only_enough_of_them_in_a_row_matter(
    engine: RecordedEngine, http: aiohttp.ClientSession
) -> None:
    probe = probe_of(engine, http)
    await rounds(probe)
    engine.health = 503
    assert [(await rounds(probe)).ready for _ in range(3)] == [True, True, False]
    assert probe.facts.reason == "/health answers 503"
    assert probe.facts.cards, "what was learned stays"
    engine.health = 200
    assert (await rounds(probe)).ready


async def test_a_server_that_never_answered_says_why(engine: RecordedEngine, http: aiohttp.ClientSession) -> None:
    await engine.stop()
    facts = await rounds(probe_of(engine, http))
    assert (facts.ready, facts.reason) == (False, "connection refused")


async def test_an_api_key_that_is_missing_is_named(engine: RecordedEngine, http: aiohttp.ClientSession) -> None:
    engine.models_status = 401
    facts = await rounds(probe_of(engine, http))
    assert not facts.ready
    assert "API key" in facts.reason


@pytest.mark.bug(133)
async def test_configured_headers_go_with_every_question(engine: RecordedEngine, http: aiohttp.ClientSession) -> None:
    await rounds(probe_of(engine, http, headers={"authorization": "Bearer key"}))
    assert {headers.get("authorization") for headers in engine.headers} == {"Bearer key"}


async def test_a_new_start_time_is_a_new_incarnation(engine: RecordedEngine, http: aiohttp.ClientSession) -> None:
    probe = probe_of(engine, http)
    before = await rounds(probe)
    assert engine.metrics is not None
    engine.metrics = engine.metrics.replace("1.79602178543e+09", "1.79602199999e+09")
    engine.models = [card("other")]
    after = await rounds(probe)
    assert after.incarnation != before.incarnation
    assert [known.id for known in after.cards] == ["other"], "identity is asked at once"


async def test_the_same_process_after_an_outage_is_the_same_incarnation(
    engine: RecordedEngine, http: aiohttp.ClientSession
) -> None:
    probe = probe_of(engine, http)
    before = await rounds(probe)
    await engine.stop()
    await rounds(probe)
    await engine.start()
    assert (await rounds(probe)).incarnation == before.incarnation


def without_start_time(page: str) -> str:
    return "\n".join(line for line in page.splitlines() if not line.startswith("process_start_time_seconds"))


async def test_without_start_time_a_refused_connection_means_a_restart(
    engine: RecordedEngine, http: aiohttp.ClientSession
) -> None:
    engine.metrics = without_start_time(recorded("metrics.txt"))
    probe = probe_of(engine, http)
    before = await rounds(probe, 2)
    await engine.stop()
    await rounds(probe)
    await engine.start()
    after = await rounds(probe)
    assert after.incarnation == before.incarnation + 1
    assert (await rounds(probe, 2)).incarnation == after.incarnation


async def test_without_start_time_counters_that_go_back_mean_a_restart(
    engine: RecordedEngine, http: aiohttp.ClientSession
) -> None:
    engine.metrics = without_start_time(recorded("metrics.txt"))
    probe = probe_of(engine, http)
    before = await rounds(probe)
    engine.metrics = engine.metrics.replace(" 62243.0", " 12.0")
    assert (await rounds(probe)).incarnation == before.incarnation + 1


async def test_a_failed_scrape_is_no_restart_and_keeps_the_last_load(
    engine: RecordedEngine, http: aiohttp.ClientSession
) -> None:
    probe = probe_of(engine, http)
    before = await rounds(probe)
    engine.metrics = None
    after = await rounds(probe)
    assert after.incarnation == before.incarnation
    assert after.metrics == before.metrics


async def test_identity_is_asked_now_and_then_and_load_each_round(
    engine: RecordedEngine, http: aiohttp.ClientSession
) -> None:
    await rounds(probe_of(engine, http), IDENTITY_EVERY + 1)
    assert engine.asked.count("/metrics") == IDENTITY_EVERY + 1
    assert engine.asked.count("/v1/models") == 2


async def test_an_adapter_loaded_later_is_noticed(engine: RecordedEngine, http: aiohttp.ClientSession) -> None:
    probe = probe_of(engine, http)
    await rounds(probe)
    engine.models.append(card("adapter-b", parent="tiny"))
    facts = await rounds(probe, IDENTITY_EVERY)
    assert [known.id for known in facts.cards] == ["tiny", "adapter-b"]


async def test_an_error_at_the_source_question_keeps_the_source(
    engine: RecordedEngine, http: aiohttp.ClientSession
) -> None:
    probe = probe_of(engine, http)
    before = await rounds(probe)
    engine.statuses["/kv_event_sources"] = 503
    assert (await rounds(probe, IDENTITY_EVERY)).sources == before.sources
    assert engine.asked.count("/kv_event_sources") == 2


async def test_a_publisher_seen_at_the_default_port_stays_until_the_process_is_another(
    publisher: zmq.Socket[bytes], engine: RecordedEngine, http: aiohttp.ClientSession, monkeypatch: pytest.MonkeyPatch
) -> None:
    endpoint = publisher.getsockopt_string(zmq.LAST_ENDPOINT)
    port = int(endpoint.rpartition(":")[2])
    monkeypatch.setitem(
        DIALECTS, "vllm", msgspec.structs.replace(VLLM, events=EventDefaults("/kv_event_sources", port))
    )
    engine.sources = None
    probe = probe_of(engine, http)
    assert (await rounds(probe)).sources == {0: EventSource(endpoint, origin="default_port")}
    publisher.close()
    assert (await rounds(probe, IDENTITY_EVERY)).sources
    assert engine.metrics is not None
    engine.metrics = engine.metrics.replace("1.79602178543e+09", "1.79602199999e+09")
    assert (await rounds(probe)).sources == {}


async def test_configured_events_come_before_what_the_engine_says(
    engine: RecordedEngine, http: aiohttp.ClientSession
) -> None:
    facts = await rounds(probe_of(engine, http, events=EventsConfig(endpoint="tcp://10.1.1.1:9")))
    assert facts.sources == {0: EventSource("tcp://10.1.1.1:9", origin="configuration")}


async def test_events_that_are_off_stay_off(engine: RecordedEngine, http: aiohttp.ClientSession) -> None:
    facts = await rounds(probe_of(engine, http, events="off"))
    assert facts.sources == {}
    assert facts.sources_note == "KV events are switched off in the configuration"


@pytest.mark.bug(38)
async def test_an_engine_that_publishes_nothing_gets_advice(
    engine: RecordedEngine, http: aiohttp.ClientSession
) -> None:
    engine.sources = {}
    note = (await rounds(probe_of(engine, http))).sources_note
    assert note is not None
    assert "--kv-events-config" in note


@pytest.mark.parametrize("body", ["", "[]", '{"data": 5}', '{"data": [{"no": "id"}]}'])
async def test_a_model_list_that_cannot_be_read_leaves_the_server_unready(
    body: str, engine: RecordedEngine, http: aiohttp.ClientSession
) -> None:
    engine.raw["/v1/models"] = body.encode()
    facts = await rounds(probe_of(engine, http))
    assert (facts.ready, facts.reason) == (False, "/v1/models names no model")


async def test_an_answer_without_end_is_cut_off(
    engine: RecordedEngine, http: aiohttp.ClientSession, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("warmfront.control.probe.ANSWER_BYTES_MAX", 1000)
    engine.raw["/health"] = b"x" * 200_000
    facts = await rounds(probe_of(engine, http))
    assert (facts.ready, facts.reason) == (False, "/health: answer of more than 1000 bytes")


class Dawdling(ManualClock):
    """A clock by which every answer takes as long as was set: it moves when it is read for the second time."""

    def __init__(self) -> None:
        super().__init__(100.0)
        self.took_s = 0.0
        self._reads = 0

    def now_s(self) -> float:
        self._reads += 1
        return super().now_s() + (0.0 if self._reads % 2 else self.took_s)


async def test_the_way_to_a_server_is_its_quickest_answer_of_late(
    engine: RecordedEngine, http: aiohttp.ClientSession
) -> None:
    probe = probe_of(engine, http, engine="generic")
    clock = probe._clock = Dawdling()
    for took_s in [0.2, 0.05, *[0.3] * (ROUNDS_TIMED_MIN - 2)]:
        assert probe.facts.rtt_s is None, "the first answers are late for reasons of their own"
        clock.took_s = took_s
        probe.facts = advance(probe.facts, Round(health=await probe._get("/health")), unready_after=3, now_s=0.0)
    assert probe.facts.rtt_s == pytest.approx(0.05)
    for _ in range(ROUNDS_TIMED):
        probe.facts = advance(probe.facts, Round(health=await probe._get("/health")), unready_after=3, now_s=0.0)
    assert probe.facts.rtt_s == pytest.approx(0.3)
    engine.health = 500
    answer = await probe._get("/health")
    assert advance(probe.facts, Round(health=answer), unready_after=3, now_s=0.0).took_s == probe.facts.took_s
    assert (await probe._get(None)).took_s is None


async def test_a_round_is_as_quick_as_its_quickest_answer(engine: RecordedEngine, http: aiohttp.ClientSession) -> None:
    slow, quick = Answer(status=200, took_s=0.09), Answer(status=200, took_s=0.08)
    facts = advance(ServerFacts(ServerConfig(url=engine.url)), Round(slow, models=quick), unready_after=3, now_s=0.0)
    assert facts.took_s == (0.08,)
