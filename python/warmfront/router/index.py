"""What the router asks of the index. The core's and the reference's both satisfy it."""

from __future__ import annotations

from typing import Protocol

from warmfront.types import Overlap, Request, RequestId, Slot


class Index(Protocol):
    """Which replica of a pool holds which leading blocks of a request."""

    def overlap(self, request: Request) -> Overlap:
        """Count what each replica of `request.pool` holds of the prompt.

        Columns shorter than the pool's slots read as "holds nothing" for the rest.

        Raises:
            LookupError: The client has left and the request is no longer known.
        """

    def predict(self, request: Request, slot: Slot) -> None:
        """Note that `slot` will hold the prompt's blocks soon and that the request uses them from now on.

        Raises:
            LookupError: The client has left and the request is no longer known.
        """

    def release(self, request_id: RequestId) -> None:
        """Note that the request no longer uses its blocks. Only for hosts whose core does not see the end itself."""
