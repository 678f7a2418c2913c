"""Decides which nodes of a rendezvous are lost (c10d): by the clock of the agent that looks.

torch compares the time that a node wrote with the clock of the agent that reads it. Clocks of machines
differ, and after a pause of a machine the times of all nodes are too old at once. A node that lives and is
taken for lost trains on, and sends no more signs of life. A node that comes then finds nobody, begins the
next round alone, and waits there for nodes that know nothing of it.

Invariant: an agent takes another node for lost when that one's sign of life has not changed for as long as
torch says (`keep_alive_interval` times `keep_alive_max_attempt`); from one look to the next a third of that
counts at most, so that a node which was paused hears of the others before it judges them. No agent takes its
own node for lost, and where another one has removed it from its round, it comes back.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from datetime import datetime, timedelta, timezone
from typing import Any, NamedTuple


class _Seen(NamedTuple):
    """The last sign of life of a node, as that node wrote it, and for how long there was no other one."""

    sign: datetime
    silent_s: float


class SignsOfLife:
    """Decides for one agent which nodes of its rendezvous are lost.

    Args:
        handler: torch's, which has not looked yet.
        clock: seconds, monotonic.
    """

    def __init__(self, handler: Any, clock: Callable[[], float] = time.monotonic) -> None:
        self._handler = handler
        self._holder: Any = handler._state_holder
        interval_s = float(handler.settings.keep_alive_interval.total_seconds())
        self._most_s = min(interval_s, interval_s * int(handler.settings.keep_alive_max_attempt) / 3)
        self._clock = clock
        self._looked = clock()
        self._seen: dict[Any, _Seen] = {}
        self._round: int | None = None  # in which this node is, once that is complete
        self._rank = 0
        self._remove_silent: Callable[[], None] = self._holder._sanitize
        self._holder._sanitize = self._look

    @property
    def _node(self) -> Any:
        return self._handler._this_node  # it is put in order after the first look

    @property
    def nodes_that_meet(self) -> int:
        """Return how many nodes have begun to meet without this one, which is in an earlier round."""
        state = self._holder.state
        if self._round is None or state.round <= self._round or state.complete:
            return 0
        return len(state.participants)

    def enter(self, rank: int) -> None:
        """Keep this node in the round that is complete now, in which it has `rank`."""
        self._round, self._rank = self._holder.state.round, rank

    def leave(self) -> None:
        """Let this node leave its round."""
        self._round = None

    def _look(self) -> None:
        """Remove nodes that are lost from what was just read; torch calls it each time."""
        state, time_now, wall_clock = self._holder.state, self._clock(), datetime.now(timezone.utc)
        passed_s, self._looked = min(time_now - self._looked, self._most_s), time_now
        signs: dict[Any, datetime] = state.last_heartbeats
        self._stay(state, wall_clock)
        self._seen = {node: self._see(node, sign, passed_s) for node, sign in signs.items()}
        state.last_heartbeats = {
            node: wall_clock - timedelta(seconds=node_signs.silent_s)
            for node, node_signs in self._seen.items()
        }
        self._remove_silent()
        state.last_heartbeats = {node: signs[node] for node in state.last_heartbeats}

    def _see(self, node: Any, sign: datetime, passed_s: float) -> _Seen:
        signs_before = self._seen.get(node)
        is_silent = node != self._node and signs_before is not None and signs_before.sign == sign
        return _Seen(
            sign, signs_before.silent_s + passed_s if is_silent and signs_before is not None else 0.0
        )

    def _stay(self, state: Any, wall_clock: datetime) -> None:
        """Put this node back where another one has removed it, and let torch renew its sign of life."""
        if self._node in state.last_heartbeats:  # it is in the future where this machine's clock was set back
            state.last_heartbeats[self._node] = min(state.last_heartbeats[self._node], wall_clock)
        if state.complete and state.round == self._round and self._node not in state.participants:
            state.participants[self._node] = self._rank
            state.last_heartbeats[self._node] = wall_clock
            self._holder.mark_dirty()


def watch(handler: Any) -> SignsOfLife | None:
    """Let `SignsOfLife` decide for a handler of torch; None where that has another form, and decides."""
    is_known = all(hasattr(handler, name) for name in ("_this_node", "_state_holder", "settings"))
    return SignsOfLife(handler) if is_known and hasattr(handler._state_holder, "_sanitize") else None
