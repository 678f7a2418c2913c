"""Counts rejected connections, and logs them in at most one line a minute, and one at the end."""

from __future__ import annotations

import asyncio
import logging
from collections import Counter

_log = logging.getLogger("adaptor")

# A port scan or a flood makes thousands of connections; they must not fill the log.
LINE_S = 60.0


class RejectedConnections:
    """The counter of a listener; used on the agent's control thread.

    Args:
        listener_place: the listener, in words for the log.

    Attributes:
        counted: the number of rejected connections for each reason
    """

    def __init__(self, listener_place: str) -> None:
        self._where = listener_place
        self.counted: Counter[str] = Counter()
        self._timer: asyncio.TimerHandle | None = None

    def count(self, rejection: str) -> None:
        """Count a connection that was rejected; `rejection`: the reason, as the predicate of a sentence."""
        self.counted[rejection] += 1
        if self._timer is None:
            self._timer = asyncio.get_running_loop().call_later(LINE_S, self._log_counts)

    def close(self) -> None:
        """Log what has not been logged."""
        if self._timer is not None:
            self._timer.cancel()
            self._log_counts()

    def _log_counts(self) -> None:
        self._timer = None
        counts_text = ", ".join(f"{number} {rejection}" for rejection, number in self.counted.most_common())
        _log.warning(
            "%d rejected connections at %s so far: %s", sum(self.counted.values()), self._where, counts_text
        )
