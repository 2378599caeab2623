"""Make the faults of real fleets on real processes, warmfront's and its peers', and render what was seen.

    python benchmarks/fault_suite.py run                     everything, about half an hour
    python benchmarks/fault_suite.py run engine-killed,cut   these cases
    python benchmarks/fault_suite.py virtual                 the faults on virtual time
    python benchmarks/fault_suite.py render                  the page again from the figures that are there

Figures go to docs/reference/faults.json as they come, so a run can be stopped and continued case by case. Peers are
installed from PyPI on first use, as for `make bench`.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import logging
import sys
from typing import Any

from faults import page, virtual
from faults.cases import CASES, Case
from faults.run import as_json, observe
from lab_check import about
from places import RESULTS, ROOT

PEERS = ("vllm-router cache_aware", "smg cache_aware")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("action", choices=["run", "virtual", "render"])
    parser.add_argument("cases", nargs="?", default="all", help="names with commas between them")
    parser.add_argument("--routers", default="all", help="warmfront, or names of peers, with commas between them")
    parser.add_argument("--jobs", type=int, default=2, help="worlds at once; each is five processes")
    arguments = parser.parse_args()
    logging.basicConfig(level=logging.WARNING, stream=sys.stderr)
    logging.getLogger("warmfront").setLevel(logging.ERROR)  # the simulated router's warnings are for who runs a fleet
    failures = 0
    if arguments.action == "run":
        failures = asyncio.run(_run(_pairs(arguments.cases, arguments.routers), arguments.jobs))
        arguments.action = "virtual" if arguments.cases == "all" else "render"
    if arguments.action == "virtual":
        _write(page.read(ROOT) | {"virtual": list(virtual.observe())})
    (ROOT / page.PAGE).write_text(page.render(page.read(ROOT)), encoding="utf-8")
    return 1 if failures else 0


def _pairs(cases: str, routers: str) -> list[tuple[Case, str]]:
    names = {case.name for case in CASES}
    wanted = names if cases == "all" else set(cases.split(","))
    if wanted - names:
        raise SystemExit(f"no cases named {', '.join(sorted(wanted - names))}")
    chosen = ("warmfront", *PEERS) if routers == "all" else tuple(routers.split(","))
    return [
        (case, router)
        for case in CASES
        for router in chosen
        if case.name in wanted and (case.peers or router == "warmfront")
    ]


async def _run(pairs: list[tuple[Case, str]], jobs: int) -> int:
    """Run several worlds at once, each in an interpreter of its own; return how many did not come about."""
    places = asyncio.Semaphore(jobs)
    failures = 0

    async def one(case: Case, router: str) -> None:
        nonlocal failures
        async with places:
            folder = RESULTS / "faults" / f"{case.name}-{router.replace(' ', '-')}"
            await asyncio.to_thread(folder.mkdir, parents=True, exist_ok=True)
            try:
                observation = await observe(case, router, folder)
            except TimeoutError as error:
                failures += 1
                print(f"{case.name}, {router}: {error}", file=sys.stderr, flush=True)
                return
            print(f"{case.name}, {router}: {observation.seen}, recovered {observation.recovered_s} s", flush=True)
            _keep(as_json(observation) | {"about": about()})

    await asyncio.gather(*(one(case, router) for case, router in pairs))
    return failures


def _keep(row: dict[str, Any]) -> None:
    data = page.read(ROOT)
    rows = [each for each in data["rows"] if (each["case"], each["router"]) != (row["case"], row["router"])]
    order = {case.name: number for number, case in enumerate(CASES)}
    routers = {name: number for number, name in enumerate(("warmfront", *PEERS))}
    rows = sorted([*rows, row], key=lambda each: (order[each["case"]], routers[each["router"]]))
    _write(data | {"rows": rows})


def _write(data: dict[str, Any]) -> None:
    (ROOT / page.DATA).write_text(json.dumps(data, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    sys.exit(main())
