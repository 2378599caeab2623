"""Another configuration while the router runs.

Read and checked whole before anything changes: a bad file leaves the one before in charge. What only a start can bring
keeps its value, and the answer names it. What one would get wrong: the answer must say what is true afterwards, so the
effective configuration is put together from both, and the core is asked before anything here changes.
"""

from __future__ import annotations

from typing import Any

import msgspec
from msgspec import Struct

from warmfront.config import Config
from warmfront.errors import ConfigError

LIVE = (
    "front.body_bytes_max",
    "front.header_bytes_max",
    "front.headers_max",
    "front.header_timeout_s",
    "front.body_timeout_s",
    "front.idle_timeout_s",
    "front.write_timeout_s",
    "front.connections_max",
    "front.streams_per_client_max",
    "front.expose_headers",
    "front.grace_s",
    "front.keep_alive_s",
    "front.settle_s",
    "upstream",
    "fleet",
    "router.policy",
    "router.flow",
    "router.choices_max",
    "router.retries_max",
    "router.retries",
    "router.health",
    "control.probe_interval_s",
    "control.probe_timeout_s",
    "control.unready_after",
    "control.answer_timeout_s",
)
"""Values, and sections with all their values, that take effect while the router runs; all others need a restart."""

FIXED = (
    "router.policy.seed",
    "router.policy.cost.regret_prior",
    "router.policy.cost.regret_prior_evictions",
    "router.policy.cost.copy_horizon_s",
    "router.policy.cost.future_turns_max",
    "router.policy.cost.adapter_load_s",
    "router.policy.cost.adapters_resident_max",
    "router.policy.cost.prefill_prior_s",
    "router.policy.cost.decode_prior_s",
    "router.policy.cost.decode_prior_token_s",
)
"""Among those, values that what a pool has learned began with: with others it would have to begin again."""


class Change(Struct, frozen=True):
    """What becomes of a new configuration."""

    effective: Config
    """In force afterwards."""
    applied: list[str]
    """Paths of values that are others now."""
    restart_needed: list[str]
    """Paths of values that are others in the new configuration and stay as they are."""


def change(before: Config, wanted: Config) -> Change:
    """Compare two configurations and decide what can change.

    Raises:
        ConfigError: What would be in force afterwards contradicts itself.
    """
    applied: list[str] = []
    restart_needed: list[str] = []
    tree = _merge("", msgspec.to_builtins(before), msgspec.to_builtins(wanted), applied, restart_needed)
    try:
        return Change(msgspec.convert(tree, Config), applied, restart_needed)
    except msgspec.ValidationError as error:
        raise ConfigError(f"what may change does not go with what needs a restart: {error}") from error


def _merge(path: str, before: Any, wanted: Any, applied: list[str], restart_needed: list[str]) -> Any:
    """Return the value in force afterwards, and note which paths differ."""
    if before == wanted:
        return before
    if isinstance(before, dict) and isinstance(wanted, dict) and before.keys() == wanted.keys():
        return {
            name: _merge(f"{path}.{name}".lstrip("."), before[name], wanted[name], applied, restart_needed)
            for name in before
        }
    if _is_live(path):
        applied.append(path)
        return wanted
    restart_needed.append(path)
    return before


def _is_live(path: str) -> bool:
    return path not in FIXED and any(path == live or path.startswith(f"{live}.") for live in LIVE)
