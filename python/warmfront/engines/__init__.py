"""Engines as data: one `Dialect` each."""

from warmfront.engines.dialect import CacheLabels, Dialect, EventDefaults, MetricNames
from warmfront.engines.generic import GENERIC
from warmfront.engines.vllm import VLLM

DIALECTS = {dialect.name: dialect for dialect in (VLLM, GENERIC)}
"""By name, as `fleet.servers[].engine` spells it; probing for `auto` tries them in this order."""

__all__ = ["DIALECTS", "GENERIC", "VLLM", "CacheLabels", "Dialect", "EventDefaults", "MetricNames"]
