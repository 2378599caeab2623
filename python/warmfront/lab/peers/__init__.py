"""The policies of other routers and papers, re-stated from their published rules and named for what they are.

Each is a `Policy` that runs behind this router, so differences in results are differences of rules. Constants, sources
and known deviations are in `docs/reference/peer-policies.md`. Plain policies that everybody ships (`least_loaded`,
`power_of_two`, `session`, `prefix_hash`, `random`, `round_robin`) are built-ins.
"""

from __future__ import annotations

from importlib import import_module
from typing import cast

from warmfront.lab.peers.base import PeerFactory, View
from warmfront.policy.base import Policy

__all__ = ["PEERS", "PeerFactory", "View"]


def _lazily(module: str, name: str) -> PeerFactory:
    def make(view: View) -> Policy:
        return cast(Policy, getattr(import_module(f"{__name__}.{module}"), name)(view))

    return make


PEERS: dict[str, PeerFactory] = {
    "aibrix_prefix_cache": _lazily("aibrix", "PrefixCache"),
    "cacheroute": _lazily("cacheroute", "CacheRoute"),
    "dualmap": _lazily("dualmap", "DualMap"),
    "dynamo_kv": _lazily("dynamo", "Kv"),
    "dynamo_kv_ais": _lazily("dynamo", "KvAis"),
    "dynamo_kv_decay": _lazily("dynamo", "KvDecay"),
    "dynamo_kv_tiers": _lazily("dynamo", "KvTiers"),
    "dynamo_kv_tuned": _lazily("dynamo", "KvTuned"),
    "llmd_affinity_filter": _lazily("llmd", "AffinityFilter"),
    "llmd_default": _lazily("llmd", "Default"),
    "llmd_precise": _lazily("llmd", "Precise"),
    "lmetric": _lazily("lmetric", "LMetric"),
    "min_ttft": _lazily("mooncake", "MinTtft"),
    "preble": _lazily("preble", "E2"),
    "productionstack_loadaware": _lazily("productionstack", "LoadAware"),
    "productionstack_prefixaware": _lazily("productionstack", "PrefixAware"),
    "ray_prefix_affinity": _lazily("ray", "PrefixAffinity"),
    "sglang_cache_aware": _lazily("sglang", "CacheAware"),
    "smetric": _lazily("lmetric", "SMetric"),
    "vllm_router_kv_aware": _lazily("vllm_router", "KvAware"),
}
"""Name → what makes the policy; its module is imported on the first call."""
