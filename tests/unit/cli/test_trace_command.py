"""`warmfront trace`: files out of regimes and logs, and what is in them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from click.testing import CliRunner, Result
from warmfront.cli import main
from warmfront.sim.tokens import MODEL_DIRECTORY


def run(*arguments: str) -> Result:
    return CliRunner().invoke(main, ["trace", *arguments])


@pytest.fixture
def log(tmp_path: Path) -> Path:
    path = tmp_path / "log.jsonl"
    content = "The password is hunter2, and the ship leaves at dawn. " * 30
    lines = [
        {
            "time": number,
            "body": {"model": "m", "user": "ann", "messages": [{"role": "user", "content": content + str(number)}]},
            "answer": "Understood: hunter2 at dawn.",
        }
        for number in range(3)
    ]
    path.write_text("\n".join(map(json.dumps, lines)), encoding="utf-8")
    return path


def test_make_writes_what_inspect_describes(tmp_path: Path) -> None:
    path = str(tmp_path / "w.jsonl")
    assert run("make", "hot-prefix", "--load", "5", "--requests", "200", "--out", path).exit_code == 0
    summary = json.loads(run("inspect", path, "--json").stdout)
    assert summary["requests"] == 200
    assert summary["rate"] == pytest.approx(5, rel=0.2)
    assert summary["reusable_share"] == pytest.approx(8000 / 8500, abs=0.01)
    assert summary["prefixes"] == 1


def test_make_is_the_same_for_the_same_seed_and_writes_to_standard_output() -> None:
    first, again, other = (
        run("make", "chat", "--load", "7", "--requests", "50", "--seed", seed).stdout for seed in ("1", "1", "2")
    )
    assert first == again != other
    assert len(first.splitlines()) == 51
    assert json.loads(first.splitlines()[0])["origin"] == "regime chat, load 7, seed 1"


def test_inspect_reads_shipped_traces_and_prints_a_table() -> None:
    shown = run("inspect", "mooncake_synthetic").stdout
    assert "3,993" in shown
    assert "65.0 %" in shown


@pytest.mark.parametrize("tokenizer", [(), ("--tokenizer", str(MODEL_DIRECTORY))], ids=["bytes", "tokens"])
def test_an_imported_file_holds_no_text_and_no_names(log: Path, tmp_path: Path, tokenizer: tuple[str, ...]) -> None:
    path = tmp_path / "w.jsonl"
    done = run("import", str(log), "--out", str(path), *tokenizer)
    assert done.exit_code == 0
    assert "3 requests" in done.stderr
    text = path.read_text(encoding="utf-8")
    for word in ("hunter2", "password", "dawn", "ann", "user", "role"):
        assert word not in text
    summary = json.loads(run("inspect", str(path), "--json").stdout)
    assert summary["requests"] == 3
    assert summary["reusable_share"] > 0.5


def test_a_random_salt_differs_each_time_and_a_given_one_does_not(log: Path) -> None:
    assert run("import", str(log)).stdout != run("import", str(log)).stdout
    assert run("import", str(log), "--salt", "s").stdout == run("import", str(log), "--salt", "s").stdout


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("make", "nonsense"), "no regime is called nonsense"),
        (("make", "chat-closed"), "its users wait for answers"),
        (("make", "rag", "--out", "/no/such/directory/file"), "/no/such/directory/file: No such file or directory"),
        (("inspect", "no-such-file.jsonl"), "no-such-file.jsonl is not there"),
        (("import", "no-such-log.jsonl"), "no-such-log.jsonl: No such file or directory"),
        (("import", "LOG", "--salt", ""), "--salt: expected 1 to 64 bytes, got 0"),
        (("import", "LOG", "--tokenizer", "/no/such/model"), "--tokenizer /no/such/model: "),
        (("inspect", "LOG"), "expected a workload file, Mooncake's JSONL or Azure's CSV"),
    ],
)
def test_a_wrong_argument_is_one_line_and_exit_code_2(log: Path, arguments: tuple[str, ...], message: str) -> None:
    done = run(*(str(log) if argument == "LOG" else argument for argument in arguments))
    assert done.exit_code == 2
    assert message in done.stderr
    assert "Traceback" not in done.output
