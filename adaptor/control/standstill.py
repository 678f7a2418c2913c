"""Which nodes' work on the save folder stands still; pure, the time comes in as an argument.

A disk may hang on one node alone while all processes there answer: asking them (`roll_call`) tells nothing.
"""

from __future__ import annotations

from collections.abc import Iterable


class Standstill:
    """Of one incident.

    Args:
        patience_s: so long the work of a node may stand still.
    """

    def __init__(self, patience_s: float) -> None:
        self._patience_s = patience_s
        self._since: dict[int, float | None] = {}  # None: it has moved since it was last looked at

    def expect(self, nodes: Iterable[int]) -> None:
        """These have just been given work, and no others have any."""
        self._since = dict.fromkeys(nodes)

    def moved(self, node: int) -> None:
        if node in self._since:
            self._since[node] = None

    def overdue(self, now: float) -> set[int]:
        """The nodes whose work has stood still for too long."""
        self._since = {node: now if since is None else since for node, since in self._since.items()}
        latest = now - self._patience_s
        return {node for node, since in self._since.items() if since is not None and since <= latest}
