from __future__ import annotations

import hashlib
import json
import re
import stat
from pathlib import Path

import pytest
from click.testing import CliRunner
from warmfront.cli import main


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return tmp_path / "keys.json"


def run(*arguments: str | Path) -> tuple[int, str]:
    result = CliRunner().invoke(main, ["keys", *map(str, arguments)])
    return result.exit_code, result.output


def test_a_key_is_printed_once_and_only_its_hash_is_kept(file: Path) -> None:
    code, output = run("add", "team-a", "--file", file, "--flow", "acme", "--priority", "3")
    key = output.strip()
    assert code == 0
    assert re.fullmatch(r"wfk_[A-Za-z0-9_-]{43}", key)
    text = file.read_text(encoding="utf-8")
    assert key not in text
    (entry,) = json.loads(text)["keys"]
    assert entry["sha256"] == hashlib.sha256(key.encode()).hexdigest()
    assert (entry["name"], entry["flow"], entry["priority"]) == ("team-a", "acme", 3)
    assert key.startswith(entry["prefix"])
    assert len(entry["prefix"]) == 8
    assert stat.S_IMODE(file.stat().st_mode) == 0o600


def test_keys_are_listed_without_telling_them_and_revoked_by_name(file: Path) -> None:
    keys = [run("add", name, "--file", file)[1].strip() for name in ("a", "b")]
    assert keys[0] != keys[1]
    _, listed = run("list", "--file", file)
    assert all(name in listed for name in "ab")
    assert all(key not in listed for key in keys)
    assert run("revoke", "a", "--file", file) == (0, "revoked a\n")
    assert [key["name"] for key in json.loads(run("list", "--json", "--file", file)[1])["keys"]] == ["b"]


def test_a_replaced_file_keeps_its_mode_and_follows_a_link(file: Path, tmp_path: Path) -> None:
    run("add", "a", "--file", file)
    file.chmod(0o640)
    link = tmp_path / "link.json"
    link.symlink_to(file)
    assert run("add", "b", "--file", link)[0] == 0
    assert link.is_symlink()
    assert stat.S_IMODE(file.stat().st_mode) == 0o640
    assert len(json.loads(file.read_text(encoding="utf-8"))["keys"]) == 2
    assert sorted(path.name for path in tmp_path.iterdir()) == ["keys.json", "link.json"]


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("add", "a"), "has a key 'a' already"),
        (("add", "two words"), "plain characters without spaces"),
        (("add", "b", "--flow", ""), None),
        (("revoke", "nobody"), "has no key 'nobody'"),
    ],
)
def test_a_mistake_is_one_line_and_changes_nothing(file: Path, arguments: tuple[str, ...], words: str | None) -> None:
    run("add", "a", "--file", file)
    before = file.read_bytes()
    code, output = run(*arguments, "--file", file)
    if words is None:
        assert code == 0
        return
    assert (code, words in output) == (2, True), output
    assert file.read_bytes() == before


def test_what_is_no_file_of_keys_is_named(file: Path) -> None:
    file.write_text("keys: []", encoding="utf-8")
    code, output = run("list", "--file", file)
    assert (code, "is not a file of keys" in output) == (2, True)
