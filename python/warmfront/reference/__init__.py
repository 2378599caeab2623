"""The core's rules in plain Python: blocks, events, index.

An executable specification. It is slow and obvious on purpose; differential tests run it beside the Rust core on
generated and recorded inputs. Nothing on the serving path imports it; the simulator and the in-process port may.
"""

from warmfront.reference.blocks import Extras, chain
from warmfront.reference.events import Batch, Cleared, Removed, Stored, decode
from warmfront.reference.index import Index

__all__ = ["Batch", "Cleared", "Extras", "Index", "Removed", "Stored", "chain", "decode"]
