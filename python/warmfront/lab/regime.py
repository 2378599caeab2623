"""Regimes: one declarative TOML file each, by name from this package or by path.

A file says a title, what a good policy does, a workload, a fleet, targets and loads; fields are those of `Regime`. With
`extends = "rag"` it begins as another regime and says only what differs: tables are merged key by key, everything else,
lists among it, is replaced whole.
"""

from __future__ import annotations

import tomllib
from pathlib import Path
from typing import Any

from warmfront.config import merged_with
from warmfront.errors import ConfigError
from warmfront.lab import workloads
from warmfront.lab.model import EngineSpec, EventSpec, Regime, Source
from warmfront.lab.workloads.registry import convert

DIRECTORY = Path(__file__).parent / "regimes"
EXTENDS_MAX = 4
"""Longest chain of `extends`."""


def names() -> list[str]:
    """Return the regimes that ship with the package, sorted."""
    return sorted(path.stem for path in DIRECTORY.glob("*.toml"))


def load(name_or_path: str) -> Regime:
    """Return a regime that has been checked in full.

    Args:
        name_or_path: One of `names()`, or the path of a TOML file.

    Raises:
        ConfigError: Names the file and the field.
    """
    path = _path(name_or_path)
    try:
        content = _content(path, EXTENDS_MAX)
        regime: Regime = convert({**content, "name": path.stem}, Regime, "")
        _check(regime)
        workloads.read(regime.workload)
    except ConfigError as error:
        raise ConfigError(f"{path}: {str(error).removeprefix('.')}") from error
    return regime


def source(regime: Regime, load: float, seed: int) -> Source:
    """Return the running workload at one load.

    Raises:
        ConfigError: The workload's table is wrong, or its trace file is.
    """
    if load <= 0:
        raise ConfigError(f"load: expected more than 0, got {load:g}")
    draw = workloads.Draw(seed=seed, load=load, requests=regime.requests)
    return workloads.read(regime.workload).source(draw)


def _path(name_or_path: str) -> Path:
    path = Path(name_or_path)
    if path.suffix == ".toml":
        return path
    if name_or_path not in names():
        raise ConfigError(f"no regime is called {name_or_path}; there are {', '.join(names())}, or give a .toml file")
    return DIRECTORY / f"{name_or_path}.toml"


def _content(path: Path, depth: int) -> dict[str, Any]:
    """Read a file and what it extends."""
    try:
        content = tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(error.strerror or str(error)) from error
    except ValueError as error:  # not TOML, or not UTF-8
        raise ConfigError(str(error)) from error
    content["workload"] = _located(content.get("workload", {}), path.parent)
    base = content.pop("extends", None)
    if base is None:
        return content
    if not isinstance(base, str) or depth == 0:
        raise ConfigError(f"extends: expected the name of a regime, at most {EXTENDS_MAX} deep, got {base!r}")
    return merged_with(_content(_path(base), depth - 1), content)


def _located(table: Any, directory: Path) -> Any:
    """Make the path of a trace absolute, as seen from the regime's file; names of shipped traces stay."""
    file = table.get("file") if isinstance(table, dict) else None
    if isinstance(file, str) and (Path(file).suffix or Path(file).name != file):
        return {**table, "file": str((directory / file).absolute())}
    return table


def _check(regime: Regime) -> None:
    """Check what the types alone do not say."""
    loads = regime.loads
    rules = {
        "loads": bool(loads) and loads[0] > 0 and list(loads) == sorted(set(loads)),
        "requests": regime.requests >= 1,
        "warmup": 0 <= regime.warmup < 1,
        "slo.ttft_s": regime.slo.ttft_s > 0,
        "slo.tpot_s": regime.slo.tpot_s > 0,
        "fleet.engines": bool(regime.fleet.engines),
        "fleet.block_size": regime.fleet.block_size >= 1,
        "fleet.scrape_s": regime.fleet.scrape_s > 0,
        **_event_rules(regime.fleet.events),
    }
    for number, engine in enumerate(regime.fleet.engines):
        rules |= {f"fleet.engines[{number}].{name}": is_right for name, is_right in _engine_rules(engine).items()}
    for field, is_right in rules.items():
        if not is_right:
            raise ConfigError(f"{field}: {_EXPECTED[field.rpartition('.')[2]]}")


def _event_rules(events: EventSpec) -> dict[str, bool]:
    return {"fleet.events.delay_s": events.delay_s >= 0, "fleet.events.loss": 0 <= events.loss <= 1}


def _engine_rules(engine: EngineSpec) -> dict[str, bool]:
    return {
        "count": engine.count >= 1,
        "speed": engine.speed > 0,
        "kv_tokens": engine.kv_tokens is None or engine.kv_tokens >= 1,
        "host_tokens": engine.host_tokens >= 0,
        "disk_tokens": engine.disk_tokens >= 0,
        "joins_s": engine.joins_s >= 0,
        "startup_s": engine.startup_s >= 0,
        "leaves_s": engine.leaves_s is None or engine.leaves_s > engine.joins_s,
        "crashes_s": engine.crashes_s is None or engine.crashes_s > engine.joins_s,
        "restart_s": engine.restart_s >= 0,
    }


_POSITIVE, _NATURAL, _COUNT = "expected more than 0", "expected 0 or more", "expected at least 1"
_EXPECTED = {
    "loads": "expected at least one positive number, each larger than the one before",
    "requests": _COUNT,
    "warmup": "expected a share from 0 to below 1",
    "ttft_s": _POSITIVE,
    "tpot_s": _POSITIVE,
    "engines": "expected at least one",
    "block_size": _COUNT,
    "scrape_s": _POSITIVE,
    "delay_s": _NATURAL,
    "loss": "expected a share from 0 to 1",
    "count": _COUNT,
    "speed": _POSITIVE,
    "kv_tokens": _COUNT,
    "host_tokens": _NATURAL,
    "disk_tokens": _NATURAL,
    "joins_s": _NATURAL,
    "startup_s": _NATURAL,
    "leaves_s": "expected later than joins_s",
    "crashes_s": "expected later than joins_s",
    "restart_s": _NATURAL,
}
