"""Who came and did not belong to the job, counted: a line a minute at most, and one in the end."""

from __future__ import annotations

import asyncio
import logging
from collections import Counter

_log = logging.getLogger("adaptor")

# A port scan or a flood comes by thousands; a log that it fills would be its success.
LINE_S = 60.0


class Strangers:
    """On the agent's control thread. `where` they came to, in words."""

    def __init__(self, where: str) -> None:
        self._where = where
        self.counted: Counter[str] = Counter()
        self._timer: asyncio.TimerHandle | None = None

    def count(self, what: str) -> None:
        """One more that `what`: the predicate of a sentence."""
        self.counted[what] += 1
        if self._timer is None:
            self._timer = asyncio.get_running_loop().call_later(LINE_S, self._say)

    def close(self) -> None:
        """Say what has not been said."""
        if self._timer is not None:
            self._timer.cancel()
            self._say()

    def _say(self) -> None:
        self._timer = None
        each = ", ".join(f"{number} {what}" for what, number in self.counted.most_common())
        _log.warning("%d strangers at %s so far: %s", sum(self.counted.values()), self._where, each)
