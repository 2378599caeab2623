from __future__ import annotations

import shlex
from pathlib import Path

from warmfront.demo.processes import DEFAULT_PORTS, Fleet
from warmfront.demo.run import look_around_commands

SAMPLE = Path("request.json")


def test_commands_leave_the_admin_address_out_where_it_is_the_default() -> None:
    fleet = Fleet("http://127.0.0.1:8080", f"http://127.0.0.1:{DEFAULT_PORTS[1]}", ())
    assert "warmfront fleet" in look_around_commands(fleet, SAMPLE)
    assert "warmfront explain request.json" in look_around_commands(fleet, SAMPLE)


def test_commands_name_the_admin_address_where_it_is_another() -> None:
    fleet = Fleet("http://127.0.0.1:4000", "http://127.0.0.1:4001", ())
    commands = [shlex.split(line) for line in look_around_commands(fleet, SAMPLE)]
    assert ["warmfront", "fleet", "--admin", "http://127.0.0.1:4001"] in commands
    assert all("8081" not in word for command in commands for word in command)
