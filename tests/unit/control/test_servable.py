"""What is refused before a start and before a reload, with the field that is wrong."""

from __future__ import annotations

from pathlib import Path

import pytest
from warmfront.config import Config, load
from warmfront.control.servable import require_servable
from warmfront.errors import ConfigError

SERVER = "fleet.servers=[{url: 'http://e:1'}]"


def config(*overrides: str) -> Config:
    return load(environment={}, overrides=[SERVER, *overrides])


@pytest.mark.parametrize("field", ["fleet.tokenizer", "fleet.models.m.tokenizer", "fleet.models.m.chat_template"])
def test_a_file_that_is_not_there_is_refused(tmp_path: Path, field: str) -> None:
    with pytest.raises(ConfigError, match=f"^{field}: .*nowhere is not there; expected"):
        require_servable(config(f"{field}={tmp_path}/nowhere"))
    require_servable(config(f"{field}={tmp_path}"))


def test_a_policy_that_nobody_has_is_refused() -> None:
    with pytest.raises(ConfigError, match="no policy named 'nope'"):
        require_servable(config("router.policy.name=nope"))


@pytest.mark.parametrize("kind", ["{type: dns, name: e, port: 1", "{type: srv, name: e"])
def test_an_engine_that_nobody_knows_is_refused_where_discovery_names_it(kind: str) -> None:
    with pytest.raises(ConfigError, match=r"fleet.discovery\[0\].engine: no engine named 'tgi'"):
        require_servable(config(f"fleet.discovery=[{kind}, engine: tgi}}]"))


def test_a_header_of_discovery_that_none_could_be_is_refused() -> None:
    with pytest.raises(ConfigError, match="the name of a header"):
        config("fleet.discovery=[{type: dns, name: e, port: 1, headers: {'a b': c}}]")
