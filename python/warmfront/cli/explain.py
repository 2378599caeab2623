"""`warmfront explain`: where a request would go, and what each replica would cost."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, BinaryIO
from urllib.parse import quote

import click
from rich.table import Table

from warmfront.cli import client, options
from warmfront.cli.output import number, show, show_json, table
from warmfront.config import PolicyConfig


@click.command(name="explain")
@click.argument("file", type=click.File("rb"), default="-")
@options.admin
@click.option("--path", default="/v1/chat/completions", show_default=True, help="Path the request would come to.")
@click.option("--factors", is_flag=True, help="Show what the cost terms were made of, too.")
@options.as_json
def command(file: BinaryIO, admin: str, path: str, factors: bool, as_json: bool) -> None:
    """Show where a request would go, and why.

    FILE holds the request body as a client would send it; `-` or nothing reads standard input. Nothing is dispatched.
    """
    explanation = client.ask(admin, f"/admin/explain?path={quote(path, safe='/')}", file.read())
    if as_json:
        show_json(explanation)
        return
    show(_headline(explanation), _overlaps(explanation))
    if any(replica["terms"] for replica in explanation["replicas"]):
        show("", _costs(explanation))
    if factors:
        show("", _factors(explanation))
    if explanation["policy"] == PolicyConfig().name:
        show("", "▶ the choice: the smallest total of those that are ready")


def _headline(explanation: Mapping[str, Any]) -> str:
    basis = {"tokens": "exact tokens", "bytes": "blocks of bytes", "none": "no blocks"}[explanation["basis"]]
    fallback = f", {explanation['fallback']}" if explanation["fallback"] else ""
    chosen = explanation["choice"] or "held: no replica is ready"
    return (
        f"{explanation['model']} in pool {explanation['pool']} · "
        f"{number(explanation['prompt_tokens'])} prompt tokens, {number(explanation['blocks'])} blocks "
        f"({basis}{fallback}) · policy {explanation['policy']}\n"
        f"choice: {chosen} ({explanation['reason']})"
    )


def _overlaps(explanation: Mapping[str, Any]) -> Table:
    tiers = ("device", "confirmed", "host", "disk", "active")
    rows = table("", "prompt tokens held by", *(f"#{tier}" for tier in tiers), "#expected cached")
    for replica in explanation["replicas"]:
        held = [number(replica["overlap"][tier]) for tier in tiers]
        rows.add_row(*_name(explanation, replica), *held, number(replica["predicted_cached_tokens"]))
    return rows


def _costs(explanation: Mapping[str, Any]) -> Table:
    """One row a replica, one column for each cost term, in the order in which the policy gives them."""
    units = _units(explanation, "terms")
    rows = table("", "cost", *(f"#{name} ({unit})" for name, unit in units.items()), "#total")
    for replica in explanation["replicas"]:
        values = {term["name"]: number(term["value"], 4) for term in replica["terms"]}
        total = number(replica["total"], 4)
        rows.add_row(*_name(explanation, replica), *(values.get(name, "-") for name in units), total)
    return rows


def _factors(explanation: Mapping[str, Any]) -> Table:
    """One row a factor, one column a replica: names of factors are long."""
    replicas: Sequence[Mapping[str, Any]] = explanation["replicas"]
    rows = table("made of", *(f"#{' '.join(_name(explanation, replica)).strip()}" for replica in replicas))
    values = [{factor["name"]: number(factor["value"], 4) for factor in replica["factors"]} for replica in replicas]
    for name, unit in _units(explanation, "factors").items():
        rows.add_row(f"{name} ({unit})", *(column.get(name, "-") for column in values))
    return rows


def _units(explanation: Mapping[str, Any], kind: str) -> dict[str, str]:
    return {term["name"]: term["unit"] for replica in explanation["replicas"] for term in replica[kind]}


def _name(explanation: Mapping[str, Any], replica: Mapping[str, Any]) -> tuple[str, str]:
    is_chosen = replica["id"] == explanation["choice"]
    return "▶" if is_chosen else "", replica["id"] + ("" if replica["ready"] else " (not ready)")
