"""What pages tell people to type exists: links, commands with their flags, configuration files."""

from __future__ import annotations

import re
from pathlib import Path

import click
import msgspec
import pytest
import yaml
from warmfront.cli import COMMANDS, main
from warmfront.config import Config

ROOT = Path(__file__).resolve().parents[2]
PAGES = sorted([*ROOT.glob("docs/**/*.md"), *ROOT.glob("*.md")])
LINK = re.compile(r"\]\((?!https?://|#)([^)#\s]+)")
BLOCK = re.compile(r"^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
COMMAND = re.compile(r"\bwarmfront (\w+)((?: [^\n`|&;()#<>]*)?)")
FLAG = re.compile(r"(?:^| )(--[a-z][a-z-]*)")


def pages() -> pytest.MarkDecorator:
    return pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))


@pages()
def test_links_to_files_lead_somewhere(page: Path) -> None:
    missing = [link for link in LINK.findall(page.read_text(encoding="utf-8")) if not (page.parent / link).exists()]
    assert missing == []


@pages()
def test_yaml_on_a_page_is_a_valid_configuration(page: Path) -> None:
    for language, block in BLOCK.findall(page.read_text(encoding="utf-8")):
        if language == "yaml":
            msgspec.convert(yaml.safe_load(block), Config)


@pages()
def test_commands_on_a_page_exist_with_their_flags(page: Path) -> None:
    text = page.read_text(encoding="utf-8").replace("\\\n", " ")
    typed = [code for _, code in BLOCK.findall(text)] + re.findall(r"`(warmfront [^`\n]+)`", text)
    for name, arguments in (found for code in typed for found in COMMAND.findall(code)):
        if name not in COMMANDS:
            continue
        assert set(FLAG.findall(arguments)) <= flags(name), f"warmfront {name}{arguments}"


def flags(name: str) -> set[str]:
    command = main.get_command(click.Context(main), name)
    assert command is not None
    parts = command.commands.values() if isinstance(command, click.Group) else ()
    return {option for part in (command, *parts) for parameter in part.params for option in parameter.opts} | {"--help"}
