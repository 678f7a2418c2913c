"""Who is still to come to a controller that has taken the place of one that is lost; pure, without a clock.

Nothing is decided while a node is awaited: it may know that a rank has died, that training has begun, or the
verdict, which stands.
"""

from __future__ import annotations

from collections.abc import Iterable

# So long a new controller waits for nodes while none comes, before it decides without those that have not.
# One that lives has noticed the loss half a second later at most (`wire`), and comes at once; this leaves a
# busy machine time. Whoever is there has been told to freeze meanwhile.
ROLL_S = 2.0
# And so much longer for each node that stood by before this one: an agent knocks there first, and nothing may
# answer. Who lives answers within this time: a first packet that is lost is sent again after a second. Where
# only the agent is gone, its kernel says so at once.
REACH_S = 2.0


class TakeOver:
    """Of one controller; the first one of a job awaits nobody."""

    def __init__(self) -> None:
        self.awaited: set[int] = set()
        self._until = 0.0

    def begin(self, nodes: Iterable[int], term: int, now: float) -> None:
        """These are to say again what they know, to the controller of `term`."""
        self.awaited.update(nodes)
        self._until = now + ROLL_S + REACH_S * (term - 1)

    def has_told(self, node: int, now: float) -> bool:
        """`node` has told all; whether it was awaited."""
        if node not in self.awaited:
            return False
        self.awaited.discard(node)
        self._until = max(self._until, now + ROLL_S)
        return True

    def lose(self, node: int) -> None:
        self.awaited.discard(node)

    def overdue(self, now: float) -> list[int]:
        """The nodes that count as lost, because nobody has come for too long."""
        return sorted(self.awaited) if now >= self._until else []
