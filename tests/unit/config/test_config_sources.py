from __future__ import annotations

from pathlib import Path

import msgspec
import pytest
from warmfront.config import Config, EventsConfig, ServerConfig, load, load_with_sources, redacted
from warmfront.errors import ConfigError


def write(path: Path, text: str) -> Path:
    path.write_text(text, encoding="utf-8")
    return path


def test_the_defaults_alone_are_a_valid_configuration() -> None:
    assert load(environment={}) == Config()


def test_stronger_sources_win(tmp_path: Path) -> None:
    path = write(
        tmp_path / "w.yaml", "router: {choices_max: 1, retries_max: 1, flow: {queue_max: 1}}\nlog: {level: warn}"
    )
    config, sources = load_with_sources(
        path=path,
        environment={"WARMFRONT_ROUTER__RETRIES_MAX": "2", "WARMFRONT_ROUTER__FLOW__QUEUE_MAX": "2", "PATH": "/bin"},
        overrides=["router.flow.queue_max=3"],
        flags={"log": {"level": "debug"}},
    )
    assert (config.router.choices_max, config.router.retries_max, config.router.flow.queue_max) == (1, 2, 3)
    assert config.log.level == "debug"
    assert sources == {
        "router.choices_max": str(path),
        "router.retries_max": "environment",
        "router.flow.queue_max": "--set",
        "log.level": "command line",
    }


def test_lists_are_replaced_whole(tmp_path: Path) -> None:
    path = write(tmp_path / "w.yaml", "fleet: {servers: [{url: 'http://a:1'}, {url: 'http://b:1'}]}")
    config = load(path=path, environment={}, overrides=["fleet.servers=[{url: 'http://c:1'}]"])
    assert [server.url for server in config.fleet.servers] == ["http://c:1"]


def test_an_empty_file_changes_nothing(tmp_path: Path) -> None:
    assert load(path=write(tmp_path / "w.yaml", "# nothing\n"), environment={}) == Config()


def test_names_without_a_path_in_the_environment_are_not_ours() -> None:
    assert load(environment={"WARMFRONT_PLUGINS": "a", "OTHER__THING": "b"}) == Config()


@pytest.mark.parametrize(
    ("setting", "message"),
    [
        ("router.flow.queue_timeout_s=-1", "router.flow.queue_timeout_s: expected `float` > 0.0 (--set)"),
        ("front.grace_s=1e10", "front.grace_s: expected `float` <= 1000000000.0 (--set)"),
        ("front.grace_s=1e999", "front.grace_s: '1e999' is not YAML: 1e999 is beyond every number"),
        ("front.headers_max=100000", "front.headers_max: expected `int` <= 4096 (--set)"),
        ("front.io_threads=many", "front.io_threads: expected `int`, got `str` (--set)"),
        ("front.listen=8080", "front.listen: expected `str`, got `int` (--set)"),
        ("front.listen=everywhere", "front.listen: expected `host:port` (--set)"),
        ("front.listen=:8080", "front.listen: expected `host:port` (--set)"),
        ("fleet.servers=[{url: 'http://a'}]", "fleet.servers[0].url: expected `http://host:port` or"),
        ("fleet.servers=[{url: 'ftp://a:1'}]", "fleet.servers[0].url: expected `http://host:port` or"),
        (
            "fleet.servers=[{url: 'a:1'}]",
            "fleet.servers[0].url: expected `http://host:port` or `https://host:port`, without path",
        ),
        ("fleet.servers=[{url: 'http://u:pw@a:1'}]", "fleet.servers[0].url: expected `http://host:port` or"),
        ("fleet.servers=[{url: 'http://a:1'}, {url: 'http://a:1/'}]", "fleet: servers are listed twice: http://a:1"),
        ("fleet.servers=[{url: 'http://a:1', ca: x}]", "fleet.servers[0]: ca is for https:// servers (--set)"),
        ("fleet.servers=[{url: 'https://a:1', client_cert: x}]", "fleet.servers[0]: client_cert and client_key go"),
        ("fleet.servers=[{url: 'http://a:1', headers: {'a b': c}}]", "fleet.servers[0].headers: expected the name"),
        ("front.trusted_networks=[10.0.0.0/40]", "front: trusted_networks: '10.0.0.0/40' is no network like"),
        ("front.headers.remove=[a b]", "front.headers.remove[0]: expected the name of a header"),
        ("kv.reconnect_delay_s=60", "kv: reconnect_delay_s is above reconnect_delay_s_max (--set)"),
        ("control.restart_delay_s=60", "control: restart_delay_s is above restart_delay_s_max (--set)"),
        ("nothing.here=1", "configuration: object contains unknown field `nothing` (--set)"),
        ("front.port=1", "front: object contains unknown field `port` (--set)"),
        ("front=[", "front: '[' is not YAML"),
        ("front.listen", "--set front.listen: expected path.to.field=value"),
        ("=1", "--set =1: expected path.to.field=value"),
    ],
)
def test_an_error_names_path_and_source(setting: str, message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load(environment={}, overrides=[setting])
    assert str(caught.value).startswith(message)


@pytest.mark.parametrize(
    ("text", "message"),
    [("[1, 2]", "expected a mapping, got list"), ("a: [", "is not YAML"), ("log: {level: loud}", "log.level: ")],
)
def test_a_wrong_file_names_itself(text: str, message: str, tmp_path: Path) -> None:
    path = write(tmp_path / "w.yaml", text)
    with pytest.raises(ConfigError) as caught:
        load(path=path, environment={})
    assert message in str(caught.value)
    assert str(path) in str(caught.value)


def test_a_missing_file_is_one_clear_error(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cannot read"):
        load(path=tmp_path / "none.yaml", environment={})


def test_a_bad_value_in_the_environment_is_named_as_such() -> None:
    with pytest.raises(ConfigError, match=r"front\.io_threads: .* \(environment\)"):
        load(environment={"WARMFRONT_FRONT__IO_THREADS": "0"})


def test_events_of_a_server_are_a_word_or_an_address() -> None:
    settings = "fleet.servers=[{url: 'http://a:1', events: off}, {url: 'http://b:1', events: {endpoint: 'tcp://b:5'}}]"
    servers = load(environment={}, overrides=[settings]).fleet.servers
    assert [server.events for server in servers] == ["off", EventsConfig(endpoint="tcp://b:5")]


@pytest.mark.parametrize(
    ("text", "value"),
    [("1e-3", 0.001), ("5", 5.0), (".5", 0.5), ("2.", 2.0), ("1E+1", 10.0)],
)
def test_numbers_are_read_as_people_write_them(text: str, value: float) -> None:
    assert load(environment={}, overrides=[f"kv.replay_timeout_s={text}"]).kv.replay_timeout_s == value


def test_only_true_and_false_are_truth_values_and_times_are_text() -> None:
    texts = "{a: off, b: no, c: true, d: 1:30, e: 2026-11-30, f: null, g: ~, h: , i: 0x10, j: -3}"
    kwargs = load(environment={}, overrides=[f"fleet.models={{m: {{template_kwargs: {texts}}}}}"]).fleet.models["m"]
    assert kwargs.template_kwargs == {
        "a": "off",
        "b": "no",
        "c": True,
        "d": "1:30",
        "e": "2026-11-30",
        "f": None,
        "g": None,
        "h": None,
        "i": 16,
        "j": -3,
    }


def test_keys_are_hidden_and_nothing_else_is() -> None:
    servers = [ServerConfig(url="http://a:1", headers={"authorization": "Bearer key"})]
    config = msgspec.structs.replace(Config(), fleet=msgspec.structs.replace(Config().fleet, servers=servers))
    tree = redacted(config)
    assert tree["fleet"]["servers"][0]["headers"] == {"authorization": "***"}
    tree["fleet"]["servers"][0]["headers"] = {"authorization": "Bearer key"}
    assert msgspec.convert(tree, Config) == config
