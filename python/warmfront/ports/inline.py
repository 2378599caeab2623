"""The inline port: a host calls the router in its own loop and gets the answer as a return value.

For hosts that carry out dispatches themselves and have no core beside them. They tell what happens with the same events
as everybody else; a request that had to wait is answered by a later call, so every call returns all that was decided.
Used from one thread; the host serialises calls.
"""

from __future__ import annotations

from collections.abc import Callable

from warmfront.clock import Clock
from warmfront.router.record import Stepper
from warmfront.types import (
    Answered,
    Arrived,
    Asked,
    Command,
    Deliver,
    Dispatch,
    Event,
    FleetChanged,
    FleetState,
    Request,
    RequestId,
    Shed,
    Standing,
    Tick,
)

Decision = Dispatch | Shed | Deliver
"""`Deliver` answers a `Failed` only: what the last attempt left is the answer."""


class InlinePort:
    """A router that is called."""

    def __init__(self, router: Stepper, clock: Clock, *, on_decision: Callable[[Decision], None] | None = None) -> None:
        """Wrap a router.

        Args:
            router: Not used by anybody else.
            clock: For the times of events made here.
            on_decision: Receives decisions about requests that had to wait.
        """
        self._router = router
        self._clock = clock
        self._on_decision = on_decision
        self._questions = 0

    def decide(self, request: Request) -> Decision | None:
        """Ask for a decision; `None` when the request has to wait for one (see `on_decision`)."""
        decided = self._split(self._router.step([Arrived(request)]), request.id)
        return decided

    def tell(self, event: Event) -> None:
        """Report anything that happened: `FirstToken`, `Finished`, `Failed`, `Cancelled` and the rest."""
        self._split(self._router.step([event]), None)

    def fleet(self, state: FleetState) -> None:
        """Say which replicas there are now."""
        self.tell(FleetChanged(self._clock.now_s(), state))

    def tick(self) -> None:
        """Let time pass; call it now and then while something waits."""
        self.tell(Tick(self._clock.now_s()))

    def ask(self, question: str, request: Request | None = None) -> Answered:
        """Ask what the admin API asks: `explain`, `fleet` or `policy`."""
        self._questions += 1
        asked = Asked(RequestId(-self._questions), self._clock.now_s(), question, request, b"")
        commands = self._router.step([asked])
        self._split([command for command in commands if not isinstance(command, Answered)], None)
        (answer,) = (command for command in commands if isinstance(command, Answered))
        return answer

    def _split(self, commands: list[Command], own: RequestId | None) -> Decision | None:
        """Return the decision about `own`; hand the others on."""
        mine: Decision | None = None
        for command in commands:
            if isinstance(command, Answered | Standing):
                continue
            if command.id == own:
                mine = command
            elif self._on_decision is not None:
                self._on_decision(command)
        return mine
