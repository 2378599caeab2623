"""The decision function between two queues: `Router.step(events) -> commands`."""

from warmfront.router.index import Index
from warmfront.router.meter import Meter, NullMeter
from warmfront.router.router import Router

__all__ = ["Index", "Meter", "NullMeter", "Router"]
