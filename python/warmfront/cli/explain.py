"""`warmfront explain`: where a request would go, and what each replica would cost."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, BinaryIO
from urllib.parse import quote

import click
from rich.table import Table

from warmfront.cli import client, options
from warmfront.cli.output import number, show, show_json, table


@click.command(name="explain")
@click.argument("file", type=click.File("rb"), default="-")
@options.admin
@click.option("--path", default="/v1/chat/completions", show_default=True, help="Path the request would come to.")
@options.as_json
def command(file: BinaryIO, admin: str, path: str, as_json: bool) -> None:
    """Show where a request would go, and why.

    FILE holds the request body as a client would send it; `-` or nothing reads standard input. Nothing is dispatched.
    """
    explanation = client.ask(admin, f"/admin/explain?path={quote(path, safe='/')}", file.read())
    if as_json:
        show_json(explanation)
        return
    show(_headline(explanation), _costs(explanation))
    show("▶ the choice · cached: tokens expected to be found there · total: the smallest wins")


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


def _costs(explanation: Mapping[str, Any]) -> Table:
    replicas: Sequence[Mapping[str, Any]] = explanation["replicas"]
    terms = _terms(replicas)
    rows = table(
        "",
        "replica",
        "#device",
        "#confirmed",
        "#host",
        "#disk",
        "#cached",
        *(f"#{name} {unit}".rstrip() for name, unit in terms),
        "#total",
    )
    for replica in replicas:
        overlap, values = replica["overlap"], {term["name"]: term["value"] for term in replica["terms"]}
        rows.add_row(
            "▶" if replica["id"] == explanation["choice"] else "",
            replica["id"] + ("" if replica["ready"] else " (not ready)"),
            *(number(overlap[tier]) for tier in ("device", "confirmed", "host", "disk")),
            number(replica["predicted_cached_tokens"]),
            *(number(values.get(name), 4) for name, _ in terms),
            number(replica["total"], 4),
        )
    return rows


def _terms(replicas: Sequence[Mapping[str, Any]]) -> list[tuple[str, str]]:
    """Names and units of all cost terms, in the order in which the policy gives them."""
    named = {term["name"]: term["unit"] for replica in replicas for term in replica["terms"]}
    return list(named.items())
