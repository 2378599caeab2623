"""What a new configuration may change, and what it may not."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
from warmfront import config_schema
from warmfront.config import Config, ConfigSources
from warmfront.control import reload
from warmfront.control.reload import FIXED, LIVE, change
from warmfront.errors import ConfigError


def config(**tree: Any) -> Config:
    return msgspec.convert(tree, Config)


def test_live_values_are_taken_and_others_are_kept_and_named() -> None:
    wanted = config(front={"listen": "127.0.0.1:9", "grace_s": 7.0}, kv={"unknown_parents_max": 3})
    changed = change(config(), wanted)
    assert changed.applied == ["front.grace_s"]
    assert changed.restart_needed == ["front.listen", "kv.unknown_parents_max"]
    assert changed.effective == config(front={"grace_s": 7.0})


def test_what_needs_a_restart_is_named_again_at_the_next_reload() -> None:
    wanted = config(index={"seed": 1})
    first = change(config(), wanted)
    assert change(first.effective, wanted).restart_needed == ["index.seed"]


def test_lists_and_names_chosen_by_people_are_values_of_their_own() -> None:
    before = config(fleet={"servers": [{"url": "http://a:1"}], "models": {"org/m.1": {"tokenizer": "/a"}}})
    wanted = config(fleet={"servers": [{"url": "http://b:1"}], "models": {"org/m.2": {}}})
    changed = change(before, wanted)
    assert changed.applied == ["fleet.servers", "fleet.models"]
    assert changed.effective == wanted


def test_what_a_pool_has_learned_from_is_not_exchanged_under_it() -> None:
    policy = {"name": "least_loaded", "seed": 3, "cost": {"price_max": 9.0, "prefill_prior_s": 1e-4}}
    changed = change(config(), config(router={"policy": policy}))
    assert changed.applied == ["router.policy.name", "router.policy.cost.price_max"]
    assert changed.restart_needed == ["router.policy.seed", "router.policy.cost.prefill_prior_s"]


def test_the_same_configuration_changes_nothing() -> None:
    assert change(config(), config()).applied == []


def test_what_would_contradict_itself_afterwards_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reload, "LIVE", tuple(path for path in LIVE if path != "front.settle_s"))
    running = config(front={"grace_s": 5.0, "settle_s": 5.0})
    with pytest.raises(ConfigError, match="settle_s is above grace_s"):
        change(running, config(front={"grace_s": 1.0, "settle_s": 1.0}))


def test_every_live_path_exists() -> None:
    paths = {field.path for section in config_schema.sections() for field in section.fields}
    paths |= {section.path for section in config_schema.sections()}
    assert {*LIVE, *FIXED} <= paths


def test_sources_are_read_again_as_they_are_then(tmp_path: Any) -> None:
    path = tmp_path / "c.yaml"
    path.write_text("front: {grace_s: 1.0}")
    flags = {"fleet": {"servers": [{"url": "http://a:1"}]}}
    sources = ConfigSources(path=str(path), overrides=["log.level=debug"], flags=flags)
    assert sources.load()[0] == config(front={"grace_s": 1.0}, log={"level": "debug"}, **flags)
    path.write_text("front: {grace_s: 2.0}")
    assert sources.load()[0].front.grace_s == 2.0
    path.write_text("front: {grace_s: x}")
    with pytest.raises(ConfigError, match="grace_s"):
        sources.load()
