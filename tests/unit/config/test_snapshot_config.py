from __future__ import annotations

from typing import Any

import msgspec
import pytest
from warmfront.config import Config, SnapshotConfig, core_config, load, redacted
from warmfront.errors import ConfigError


def test_nothing_is_written_unless_a_path_is_given() -> None:
    assert Config().snapshot.path is None
    assert load(environment={}, overrides=["snapshot.path=/var/lib/warmfront/snapshot"]).snapshot.path is not None


def test_the_core_is_told_all_of_it() -> None:
    config = Config(snapshot=SnapshotConfig(path="/s", interval_s=5.0, seed_from="http://peer:8081"))
    assert msgspec.json.decode(core_config(config))["snapshot"] == msgspec.to_builtins(config.snapshot)


@pytest.mark.parametrize(
    "setting", ["seed_from=https://peer:8081/admin", "seed_from=peer:8081", "interval_s=0", "max_age_s=0"]
)
def test_a_setting_that_cannot_work_is_refused(setting: str) -> None:
    with pytest.raises(ConfigError, match=f"snapshot.{setting.split('=')[0]}"):
        load(environment={}, overrides=[f"snapshot.{setting}"])


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"seed_from": "http://peer:8081", "seed_ca": "/ca.pem"}, "seed_ca is for an https:// address"),
        ({"seed_client_cert": "/cert.pem"}, "seed_client_cert and seed_client_key go together"),
        ({"seed_headers": {"a": "x"}, "seed_headers_from_file": {"a": "/x"}}, "both set a"),
    ],
)
def test_settings_that_do_not_fit_together_are_refused(settings: dict[str, Any], words: str) -> None:
    with pytest.raises(msgspec.ValidationError, match=words):
        msgspec.convert(settings, SnapshotConfig)


def test_headers_for_the_other_router_are_never_shown() -> None:
    config = Config(snapshot=SnapshotConfig(seed_headers={"authorization": "Bearer very-secret"}))
    assert "very-secret" not in str(redacted(config))
