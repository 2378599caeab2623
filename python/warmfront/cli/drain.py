"""`warmfront drain`: out of service, and into it again."""

from __future__ import annotations

from urllib.parse import quote

import click

from warmfront.cli import client, options
from warmfront.cli.output import number, show, show_json


@click.command(name="drain")
@click.argument("replica", required=False)
@click.option("--undo", is_flag=True, help="Into service again.")
@options.admin
@options.as_json
def command(replica: str | None, undo: bool, admin: str, as_json: bool) -> None:
    """Take a replica, or the whole router, out of service.

    REPLICA is an id as `warmfront fleet` shows it, or the URL of a server: it gets no new requests, and its streams go
    on. Without it the router itself takes leave: `/ready` says 503 and each answer closes its connection, while
    requests are still served.
    """
    verb = "undrain" if undo else "drain"
    path = f"/admin/{verb}" if replica is None else f"/admin/replicas/{quote(replica, safe='')}/{verb}"
    answer = client.ask(admin, path, b"")
    if as_json:
        show_json(answer)
    elif replica is None:
        state = "draining" if answer["draining"] else "in service"
        show(f"{state}: {answer['connections']} connections, {answer['requests']} requests in flight")
    else:
        for row in answer["replicas"]:
            state = "draining" if row["draining"] else "in service"
            show(f"{row['id']}: {state}, {number(row['in_flight'])} requests in flight")
