"""`warmfront fleet`: the replicas of a running router, one line each."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import click

from warmfront.cli import client, options
from warmfront.cli.output import number, show, show_json, table


@click.command(name="fleet")
@options.admin
@options.as_json
def command(admin: str, as_json: bool) -> None:
    """Show the replicas of a running router."""
    report = client.ask(admin, "/admin/fleet")
    report["snapshot"] = client.ask(admin, "/admin/snapshot/state")
    if as_json:
        show_json(report)
        return
    for pool in report["pools"]:
        _show_pool(pool)
    for line in _memory(report["snapshot"]):
        show(line)
    for problem in report["degraded"]:
        show(f"! {problem}")
    if not report["pools"]:
        show("No server has named a model yet.")


def _memory(state: Mapping[str, Any]) -> list[str]:
    """Say what came from a former process, and how the router's own snapshots are doing; empty when there are none."""
    lines, restored = [], state["restored"]
    if restored["from"] is not None:
        replicas = f"{number(restored['replicas_restored'])} of {number(restored['replicas'])} replicas"
        source = "file" if restored["from"] == "file" else f"snapshot of {restored['from']}"
        lines.append(f"memory: {number(restored['facts'])} facts of {replicas} restored from the {source}")
    if state["age_s"] is not None:
        size = f"{number(state['bytes'])} bytes, {number(state['facts'])} facts"
        lines.append(f"snapshot {state['path']}: {number(state['age_s'])} s old, {size}")
    lines += [f"! not restored: {refused}" for refused in restored["refused"]]
    if state["failure"] is not None:
        lines.append(f"! the snapshot cannot be written ({number(state['failures'])} times): {state['failure']}")
    return lines


def _show_pool(pool: Mapping[str, Any]) -> None:
    tokens = pool["tokens"] or "not reported yet"
    reason = f" ({pool['tokens_reason']})" if pool["tokens_reason"] else ""
    names = ", ".join(name for name in pool["models"] if name != pool["name"])
    show(f"pool {pool['name']}{f' · also {names}' if names else ''} · tokens {tokens}{reason}")
    guard = (pool.get("router") or {}).get("guard")
    if guard is not None and guard["enabled"]:
        show(_affinity(guard))
    rows = table(
        "replica",
        "ready",
        "#in flight",
        "#running",
        "#waiting",
        "#KV used",
        "events",
        "#lag s",
        "#predicted",
        "#reported",
    )
    for replica in pool["replicas"]:
        rows.add_row(*_row(replica))
    show(rows)
    for replica in pool["replicas"]:
        for note in replica["notes"]:
            show(f"  {replica['id']}: {note}")
    show("")


def _affinity(guard: Mapping[str, Any]) -> str:
    """Say whether sending prompts to their caches pays, as far as it was measured."""
    differing = f"{number(guard['differing'])} of {number(guard['decisions'])} decisions differ from load alone"
    if not guard["rivals"]:
        return f"affinity credit {number(guard['credit'], 2)} · {differing}, none compared yet"
    compared = f"{number(guard['rivals'])} compared: {number(guard['gain_s'], 3)} s gained by each that differs"
    against = f" · evidence against {100 * guard['evidence']:.0f} %" if guard["evidence"] else ""
    return f"affinity credit {number(guard['credit'], 2)} · {differing}, {compared}{against}"


def _service(replica: Mapping[str, Any], router: Mapping[str, Any]) -> str:
    """Say whether the replica gets new work."""
    if not replica["ready"]:
        return "no"
    standing = str(router.get("standing", "serving"))
    return "yes" if standing == "serving" else standing.replace("_", " ")


def _row(replica: Mapping[str, Any]) -> list[str]:
    router, load, events = replica["router"] or {}, replica["load"], replica["events"] or {}
    accuracy = router.get("accuracy") or {}
    usage = load["kv_usage"]
    return [
        replica["id"],
        _service(replica, router),
        number(router.get("in_flight")),
        number(load["running"]),
        number(load["waiting"]),
        "-" if usage is None else f"{100 * usage:.0f} %",
        events.get("state", "-"),
        number(events.get("lag_s"), 3),
        number(accuracy.get("predicted_cached_tokens")),
        number(accuracy.get("reported_cached_tokens")),
    ]
