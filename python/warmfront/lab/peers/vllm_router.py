"""The KV-aware policy of vllm-router 0.1.17.

Rule: the smallest sum of prompt tokens not credited on a replica, its active prefill tokens and its decode load.
Credits come from KV events by tier: device 1.0, host memory 0.8, disk 0.3. Temperature 0: the exact minimum, ties to
the first replica by position.

Source: the launcher's help and defaults of the 0.1.17 wheel. Run for real, that version credited no block with
vLLM 0.32; this is the rule as meant. What it counts as decode load is not published: here the distinct tokens in use by
requests in flight, this prompt's included, as in Dynamo, whose terms the others are. The external tier (0.6) does not
exist in the lab.
"""

from __future__ import annotations

from collections.abc import Sequence

from warmfront.lab.peers.base import View, choices, events_only
from warmfront.policy.base import Fleet
from warmfront.types import Choice, Overlap, Request

HOST_CREDIT = 0.8
DISK_CREDIT = 0.3


class KvAware:
    """Uncredited tokens plus active load."""

    def __init__(self, _view: View) -> None:
        """Need nothing of the run."""

    def choose(self, request: Request, overlap: Overlap, fleet: Fleet) -> Sequence[Choice]:
        """Rank by cost."""
        device = events_only(overlap, fleet)
        costs = {}
        for slot in fleet.eligible:
            credit = float(device[slot])
            credit += HOST_CREDIT * (overlap.host[slot] - overlap.device[slot])
            credit += DISK_CREDIT * (overlap.disk[slot] - overlap.host[slot])
            decode = overlap.active_tokens[slot] + request.prompt_tokens - overlap.active[slot]
            costs[slot] = max(0.0, request.prompt_tokens - credit) + fleet.pending_tokens[slot] + decode
        return choices(sorted(fleet.eligible, key=lambda slot: costs[slot]), device, request, fleet)
