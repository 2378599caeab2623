"""What users send: one kind of workload a function, with its parameters as a struct.

A regime file names a kind and says its parameters; `read` checks them and `Workload.source` runs them. All randomness
comes from the seed and is drawn before anything is sent, so that no policy can change what is asked of it.
"""

from __future__ import annotations

from warmfront.lab.workloads import bursts, mixtures, prompts, recorded, sessions
from warmfront.lab.workloads.draw import Draw
from warmfront.lab.workloads.registry import KINDS, Kind, Workload, read

__all__ = ["KINDS", "Draw", "Kind", "Workload", "bursts", "mixtures", "prompts", "read", "recorded", "sessions"]
