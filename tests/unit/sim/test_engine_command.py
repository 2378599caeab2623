from __future__ import annotations

import socket

import pytest
from click.testing import CliRunner
from warmfront.cli.engine import command


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--num-gpu-blocks-override", "5"], "8192 tokens do not fit 4 blocks of 16"),
        (["--max-num-seqs", "64", "--max-num-batched-tokens", "32"], "max_sequences must not exceed"),
        (["--lora-modules", "nameless"], "expected NAME=PATH"),
        (["--speed", "0"], "0.0 is not in the range x>0"),
        (["--preset", "abacus"], "no preset 'abacus'"),
    ],
)
def test_options_that_cannot_work_are_refused_with_a_reason(arguments: list[str], message: str) -> None:
    result = CliRunner().invoke(command, arguments)
    assert result.exit_code == 2
    assert message in result.output


@pytest.mark.parametrize("option", ["--port", "--kv-events-endpoint", "--kv-events-replay-endpoint"])
def test_an_address_in_use_is_one_line(option: str) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        free = {
            "--port": "0",
            "--kv-events-endpoint": "tcp://127.0.0.1:0",
            "--kv-events-replay-endpoint": "tcp://127.0.0.1:0",
        }
        free[option] = str(port) if option == "--port" else f"tcp://127.0.0.1:{port}"
        result = CliRunner().invoke(command, [part for pair in free.items() for part in pair])
    assert result.exit_code == 1
    assert "ddress already in use" in result.output
    assert "Traceback" not in result.output
