from __future__ import annotations

from typing import Any

import msgspec
import pytest
from warmfront.config import FleetConfig, ModelConfig, ServerConfig
from warmfront.control.engine_metrics import EngineMetrics, RankMetrics
from warmfront.control.facts import ROUNDS_TIMED_MIN, ModelCard, ServerFacts
from warmfront.control.pools import awaited, fleet_update
from warmfront.control.verify import TokenCheck
from warmfront.types import EngineLoad, EventSource, FleetUpdate, PoolUpdate

RANK = RankMetrics(running=2.0, waiting=1.0, kv_usage=0.5, block_size=16, capacity_tokens=1600, prefix_caching=True)


def server(url: str = "http://a:1", **changes: Any) -> ServerFacts:
    """A healthy vLLM server that publishes events."""
    facts = ServerFacts(
        server=ServerConfig(url=url),
        ready=True,
        reason="",
        engine="vllm",
        version="0.32.0",
        incarnation=7,
        cards=(ModelCard("m", root="/models/m", max_model_len=4096),),
        sources={0: EventSource(f"tcp://{url[7:].partition(':')[0]}:5557", origin="engine")},
        metrics=EngineMetrics(ranks={0: RANK}),
        scraped_s=90.0,
        took_s=(0.021, 0.012, *[0.4] * ROUNDS_TIMED_MIN),
    )
    return msgspec.structs.replace(facts, **changes)


def build(*servers: ServerFacts, fleet: FleetConfig | None = None, **changes: Any) -> FleetUpdate:
    options: dict[str, Any] = {"version": 1, "now_s": 100.0, "is_tokenizer": lambda path: True, "checks": {}}
    return fleet_update(servers, fleet or FleetConfig(), **(options | changes))


def pool(*servers: ServerFacts, **options: Any) -> PoolUpdate:
    (only,) = build(*servers, **options).pools
    return only


def notes(*servers: ServerFacts, **options: Any) -> list[list[str]]:
    return [replica.notes for replica in pool(*servers, **options).replicas]


def test_a_healthy_server_becomes_one_replica_without_notes() -> None:
    (replica,) = pool(server()).replicas
    assert (replica.id, replica.url, replica.rank) == ("http://a:1", "http://a:1", None)
    assert (replica.ready, replica.engine, replica.incarnation) == (True, "vllm", 7)
    assert (replica.block_size, replica.capacity_tokens) == (16, 1600)
    assert replica.events == EventSource("tcp://a:5557", origin="engine")
    assert replica.load == EngineLoad(running=2.0, waiting=1.0, kv_usage=0.5, age_s=10.0, rtt_s=0.012)
    assert replica.notes == []


def test_servers_with_the_same_base_model_form_a_pool() -> None:
    other = server("http://c:1", cards=(ModelCard("n", root="/models/n"),))
    pools = build(server(), server("http://b:1"), other).pools
    assert [(made.name, [replica.id for replica in made.replicas]) for made in pools] == [
        ("m", ["http://a:1", "http://b:1"]),
        ("n", ["http://c:1"]),
    ]


@pytest.mark.bug(18)
def test_each_rank_is_a_replica_of_its_own() -> None:
    sources = {0: EventSource("tcp://a:5557", origin="engine"), 1: EventSource("tcp://a:5558", origin="engine")}
    replicas = pool(server(metrics=EngineMetrics(ranks={0: RANK, 1: RANK}), sources=sources)).replicas
    assert [(replica.id, replica.rank) for replica in replicas] == [("http://a:1#0", 0), ("http://a:1#1", 1)]
    assert [replica.events.endpoint for replica in replicas if replica.events] == ["tcp://a:5557", "tcp://a:5558"]


def test_a_single_rank_other_than_zero_is_not_addressed_by_rank() -> None:
    (replica,) = pool(server(metrics=EngineMetrics(ranks={3: RANK}), sources={})).replicas
    assert (replica.id, replica.rank) == ("http://a:1", None)


def test_aliases_are_base_names_and_adapters_map_to_themselves() -> None:
    cards = (ModelCard("m"), ModelCard("alias"), ModelCard("lora", parent="m"))
    assert pool(server(cards=cards)).models == {"m": None, "alias": None, "lora": "lora"}


def test_an_adapter_that_one_replica_lacks_is_said_and_kept_away_from_it() -> None:
    with_adapter = server(cards=(ModelCard("m", root="/models/m", max_model_len=4096), ModelCard("lora", parent="m")))
    replicas = pool(with_adapter, server("http://b:1")).replicas
    assert [replica.lacks for replica in replicas] == [[], ["lora"]]
    assert replicas[1].notes == ["does not serve lora, which others of its pool do"]


def test_an_unready_replica_stays_in_its_pool_and_says_why() -> None:
    (replica,) = pool(server(ready=False, reason="connection refused")).replicas
    assert (replica.ready, replica.notes) == (False, ["connection refused"])


def test_a_server_whose_models_are_unknown_is_reported_as_degraded() -> None:
    update = build(server(cards=(), ready=False, reason="connection refused"))
    assert (update.pools, update.degraded) == ([], ["http://a:1: connection refused"])


def test_a_missing_event_source_is_said_with_advice() -> None:
    assert notes(server(sources={}, sources_note="publishes no KV events: start it with …")) == [
        ["publishes no KV events: start it with …"]
    ]


def test_missing_load_and_disabled_prefix_caching_are_said() -> None:
    silent = server(metrics=None)
    uncached = server(
        "http://b:1", metrics=EngineMetrics(ranks={0: msgspec.structs.replace(RANK, prefix_caching=False)})
    )
    assert notes(silent, uncached) == [
        ["reports no load: /metrics has none of the known names"],
        ["prefix caching is off: start it with --enable-prefix-caching"],
    ]


def test_the_configured_tokenizer_of_the_model_wins_then_the_one_for_all() -> None:
    fleet = FleetConfig(tokenizer="/all", models={"m": ModelConfig(tokenizer="/mine")})
    assert pool(server(), fleet=fleet).tokenizer == "/mine"
    assert pool(server(), fleet=FleetConfig(tokenizer="/all")).tokenizer == "/all"


def test_otherwise_the_engines_model_directory_is_used_when_it_can_be_read_here() -> None:
    assert pool(server()).tokenizer == "/models/m"
    served_by_path = server(cards=(ModelCard("/models/x", root="elsewhere"),))
    assert pool(served_by_path, is_tokenizer=lambda path: path == "/models/x").tokenizer == "/models/x"


def test_without_any_tokenizer_every_replica_says_so() -> None:
    made = pool(server(), is_tokenizer=lambda path: False)
    assert made.tokenizer is None
    assert made.replicas[0].notes == ["tokenizer unknown: routed by bytes; give --tokenizer with the model's directory"]


def test_a_mismatch_of_tokens_is_a_note_and_agreement_is_silent() -> None:
    checks = {
        "http://a:1": TokenCheck("mismatch", "ours differ at token 3"),
        "http://b:1": TokenCheck("verified", "3 requests compared"),
    }
    assert notes(server(), server("http://b:1"), checks=checks) == [["tokens mismatch: ours differ at token 3"], []]


def test_what_the_engine_was_told_about_templates_reaches_the_core() -> None:
    model = ModelConfig(
        chat_template="/t.jinja",
        content_format="openai",
        template_kwargs={"enable_thinking": False},
        exclude_tools_when_none=True,
    )
    template = pool(server(), fleet=FleetConfig(models={"m": model})).template
    assert (template.chat_template, template.content_format) == ("/t.jinja", "openai")
    assert template.default_kwargs == '{"enable_thinking":false}'
    assert template.exclude_tools_when_none
    assert (template.engine_version, template.max_model_len) == ("0.32.0", 4096)


def test_servers_that_contradict_each_other_about_a_model_are_loud() -> None:
    longer = server("http://b:1", cards=(ModelCard("m", root="/other/m", max_model_len=8192),))
    update = build(server(), longer)
    assert update.degraded == [
        "pool m: m has different root: http://a:1 says /models/m, http://b:1 says /other/m",
        "pool m: m has different max_model_len: http://a:1 says 4096, http://b:1 says 8192",
    ]
    assert all(len(replica.notes) == 2 for replica in update.pools[0].replicas)
    assert update.pools[0].template.max_model_len == 4096, "the shorter one is safe everywhere"


def test_a_name_that_two_pools_serve_is_loud_and_stays_with_the_pool_of_that_name() -> None:
    other = server("http://b:1", cards=(ModelCard("n", raw='"n"'), ModelCard("m", raw='"m of n"')))
    for servers in ([server(), other], [other, server()]):
        update = build(*servers)
        (words,) = update.degraded
        assert words.endswith(": m gets it")
        assert {made.name: made.models for made in update.pools} == {"m": {"m": None}, "n": {"n": None}}
        assert [made.model_cards for made in update.pools if made.name == "n"] == [['"n"']]


def test_a_name_that_is_no_pools_own_goes_to_the_first_that_serves_it() -> None:
    late, early = (ModelCard("z"), ModelCard("alias")), (ModelCard("a"), ModelCard("alias"))
    update = build(server(cards=late), server("http://b:1", cards=early))
    assert update.degraded == ["alias is served by pools z, a: z gets it"]
    assert {made.name: made.models for made in update.pools} == {"z": {"z": None, "alias": None}, "a": {"a": None}}
    assert [each.lacks for made in update.pools for each in made.replicas] == [[], []]


def test_a_pool_that_lost_its_last_server_stays_while_another_server_was_not_asked_yet() -> None:
    before = build(server(), server("http://c:1", cards=(ModelCard("n"),)))
    unasked = server("http://b:1", cards=(), ready=False, reason="not yet probed")
    now = msgspec.structs.replace(build(unasked), is_partial=True)
    kept = awaited(before, now)
    assert [(made.name, made.models, made.replicas) for made in kept.pools] == [
        ("m", {"m": None}, []),
        ("n", {"n": None}, []),
    ]
    assert kept.degraded[1:] == [f"pool {name}: its last server left, others were not asked yet" for name in "mn"]
    assert awaited(kept, now) == kept, "until all were asked"
    assert awaited(kept, build(unasked)) == build(unasked), "all were asked: nobody takes their place"
    heir = msgspec.structs.replace(build(server("http://b:1", cards=(ModelCard("x"), ModelCard("m")))), is_partial=True)
    assert [made.name for made in awaited(before, heir).pools] == ["x", "n"], "another pool serves it now"


def test_one_stream_of_events_is_never_attributed_to_two_servers() -> None:
    shared = {0: EventSource("tcp://host:5557", origin="default_port")}
    told = {0: EventSource("tcp://host:5557", origin="engine")}
    replicas = pool(server("http://host:1", sources=told), server("http://host:2", sources=shared)).replicas
    assert [replica.events is not None for replica in replicas] == [True, False]
    assert "claimed by http://host:1 too" in replicas[1].notes[0]


def test_two_equal_claims_to_one_stream_are_both_dropped() -> None:
    shared = {0: EventSource("tcp://host:5557", origin="default_port")}
    replicas = pool(server("http://host:1", sources=shared), server("http://host:2", sources=shared)).replicas
    assert [replica.events for replica in replicas] == [None, None]


def test_a_server_that_is_down_claims_no_stream() -> None:
    told = {0: EventSource("tcp://host:5557", origin="engine")}
    down = server("http://host:1", sources=told, ready=False, reason="connection refused")
    replicas = pool(down, server("http://host:2", sources=told)).replicas
    assert replicas[1].events is not None


def test_the_block_size_of_the_configuration_wins() -> None:
    facts = server()
    facts = msgspec.structs.replace(facts, server=ServerConfig(url="http://a:1", block_size=32))
    assert pool(facts).replicas[0].block_size == 32


def test_headers_of_a_server_reach_its_replicas() -> None:
    facts = msgspec.structs.replace(server(), server=ServerConfig(url="http://a:1", headers={"authorization": "k"}))
    assert pool(facts).replicas[0].headers == {"authorization": "k"}
