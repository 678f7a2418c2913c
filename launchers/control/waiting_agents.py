"""The agents that have come to a standby before it is this node's turn to run the controller.

Invariant: of each node one agent waits, the one that has come last; so an agent that comes again and again
takes one place.
"""

from __future__ import annotations

import asyncio


class WaitingAgents:
    """Lets agents wait for the turn of this node; used on the control thread."""

    def __init__(self) -> None:
        self._turn = asyncio.Event()
        self._superseded: dict[int, asyncio.Event] = {}  # by node, of those that wait

    def __len__(self) -> int:
        return len(self._superseded)

    @property
    def is_my_turn(self) -> bool:
        """Return whether nobody has to wait any more."""
        return self._turn.is_set()

    def begin_turn(self) -> None:
        """Let all go on."""
        self._turn.set()

    async def wait(self, node: int) -> bool:
        """Wait until it is this node's turn; return False if the same agent connects again meanwhile."""
        event_before, own_event = self._superseded.get(node), asyncio.Event()
        self._superseded[node] = own_event
        if event_before is not None:
            event_before.set()
        superseded = asyncio.ensure_future(own_event.wait())
        turn = asyncio.ensure_future(self._turn.wait())
        try:
            await asyncio.wait((superseded, turn), return_when=asyncio.FIRST_COMPLETED)
            return not own_event.is_set()
        finally:
            superseded.cancel()
            turn.cancel()
            if self._superseded.get(node) is own_event:
                del self._superseded[node]
