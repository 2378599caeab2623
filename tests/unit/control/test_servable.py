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


@pytest.mark.parametrize(
    ("value", "words"), [(None, "is not set"), (" ", "is not set"), ("two\nlines", "holds more than one line")]
)
def test_a_variable_that_is_no_secret_is_refused_without_being_quoted(
    monkeypatch: pytest.MonkeyPatch, value: str | None, words: str
) -> None:
    monkeypatch.delenv("ENGINE_KEY", raising=False)
    if value is not None:
        monkeypatch.setenv("ENGINE_KEY", value)
    servers = "fleet.servers=[{url: 'http://e:1', headers_from_env: {x-api-key: '${ENGINE_KEY}'}}]"
    with pytest.raises(ConfigError) as caught:
        require_servable(config(servers))
    assert str(caught.value).startswith(
        "fleet.servers[0].headers_from_env.x-api-key: the environment variable ENGINE_KEY"
    )
    assert words in str(caught.value)
    assert "two" not in str(caught.value)


@pytest.mark.parametrize(
    ("server", "words"),
    [
        ("headers: {a: b}, headers_from_env: {A: '${B}'}", "set a twice"),
        ("headers_from_file: {a: /b}, headers_from_env: {a: '${B}'}", "set a twice"),
        ("headers_from_env: {a: B}", "a names no variable"),
    ],
)
def test_headers_that_are_set_twice_or_name_no_variable_are_refused(server: str, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        config(f"fleet.servers=[{{url: 'http://e:1', {server}}}]")


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
