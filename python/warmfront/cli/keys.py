"""`warmfront keys`: API keys of clients. A key is shown once, when it is made; its hash is all that is kept.

The file is replaced whole and is private to its owner; a running router reads it again by itself. A key has 256 random
bits, so a plain SHA-256 of it cannot be turned back; passwords chosen by people would need a slow hash instead.
"""

from __future__ import annotations

import hashlib
import secrets
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated

import click
import msgspec
from msgspec import Meta, Struct

from warmfront.cli.output import show, show_json, table
from warmfront.control.files import write_private
from warmfront.errors import ConfigError

PREFIX = "wfk_"
"""Tells a key of ours from other secrets: scanners and the log's redaction look for it."""

KEY_BYTES = 32
SHOWN_CHARS = len(PREFIX) + 4
"""Of a key, kept readable so that people can tell which is which."""

Name = Annotated[str, Meta(pattern=r"^[\x21-\x7e]{1,128}$")]


class Key(Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """One entry; read by `crates/warmfront-core/src/http/keys.rs`."""

    name: Name
    flow: Name
    """The flow its requests queue in."""
    sha256: Annotated[str, Meta(pattern=r"^[0-9a-f]{64}$")]
    prefix: str
    """First letters of the key."""
    created: str
    """When it was made, RFC 3339."""
    priority: int | None = None
    """Its requests are never more urgent than this (lower numbers are more urgent); `None`: than 0."""


class KeyFile(Struct, frozen=True, forbid_unknown_fields=True):
    """The whole file."""

    keys: list[Key] = []


@click.group(name="keys")
def command() -> None:
    """Make, list and revoke the API keys of clients (`front.keys_file`)."""


_file = click.option(
    "--file", "path", type=click.Path(path_type=Path), required=True, metavar="FILE", help="The file of hashed keys."
)


@command.command()
@click.argument("name")
@_file
@click.option(
    "--flow", metavar="NAME", help="Flow its requests queue in, for example a tenant; default: the key's name."
)
@click.option("--priority", type=int, help="Its requests are never more urgent than this (lower is more); default 0.")
def add(name: str, path: Path, flow: str | None, priority: int | None) -> None:
    """Make a key called NAME and print it. It cannot be shown again."""
    file = read(path) if path.exists() else KeyFile()
    if any(key.name == name for key in file.keys):
        raise ConfigError(f"{path} has a key {name!r} already; revoke it first, or choose another name")
    secret = PREFIX + secrets.token_urlsafe(KEY_BYTES)
    entry = {
        "name": name,
        "flow": flow or name,
        "sha256": hashlib.sha256(secret.encode()).hexdigest(),
        "prefix": secret[:SHOWN_CHARS],
        "created": datetime.now(UTC).isoformat(timespec="seconds").replace("+00:00", "Z"),
        "priority": priority,
    }
    try:
        key = msgspec.convert(entry, Key)
    except msgspec.ValidationError as error:
        raise ConfigError(f"{error}: up to 128 plain characters without spaces") from error
    write(path, KeyFile([*file.keys, key]))
    click.echo(secret)


@command.command(name="list")
@_file
@click.option("--json", "as_json", is_flag=True, help="Print the entries as JSON.")
def list_keys(path: Path, as_json: bool) -> None:
    """List the keys: names and first letters, never the keys."""
    file = read(path)
    if as_json:
        show_json(msgspec.to_builtins(file))
        return
    rows = table("name", "flow", "begins", "#priority", "created")
    for key in file.keys:
        priority = "-" if key.priority is None else str(key.priority)
        rows.add_row(key.name, key.flow, f"{key.prefix}…", priority, key.created)
    show(rows)


@command.command()
@click.argument("name")
@_file
def revoke(name: str, path: Path) -> None:
    """Remove the key called NAME. A running router refuses it within about a second; streams that run go on."""
    file = read(path)
    kept = [key for key in file.keys if key.name != name]
    if len(kept) == len(file.keys):
        raise ConfigError(f"{path} has no key {name!r}")
    write(path, KeyFile(kept))
    click.echo(f"revoked {name}")


def read(path: Path) -> KeyFile:
    """Read a file of keys.

    Raises:
        ConfigError: It cannot be read.
    """
    try:
        return msgspec.json.decode(path.read_bytes(), type=KeyFile)
    except OSError as error:
        raise ConfigError(f"cannot read {path}: {error.strerror}") from error
    except msgspec.DecodeError as error:
        raise ConfigError(f"{path} is not a file of keys: {error}") from error


def write(path: Path, file: KeyFile) -> None:
    """Replace a file of keys: a reader sees the old one or the new one, and nobody else may read it.

    Raises:
        ConfigError: It cannot be written.
    """
    try:
        write_private(path, msgspec.json.format(msgspec.json.encode(file), indent=2) + b"\n")
    except OSError as error:
        raise ConfigError(f"cannot write {path}: {error.strerror}") from error
