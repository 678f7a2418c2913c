"""The nodes of a rendezvous without fixed ranks (c10d): their order, and which nodes are lost.

Order: torch sorts nodes by address, so a late node could become node 0, whose agent has the job's history
(incidents, files, used restarts), and node 0 could differ from the node with the rendezvous store, so that
the loss of either would end the job. Here earlier nodes come first. Invariant: an agent with the store is
node 0 as long as it lives. The owner of the store is known by who opened its port (`rendezvous_store.py`),
not by names: several agents may run on the machine of --rdzv-endpoint. All agents order nodes alike: the sort
keys travel in torch's own state.

Losses: torch compares the time written by a node with the clock of the reading agent. Clocks of machines
differ, and after a pause of a machine the times of all nodes are too old at once. A living node that is
taken for lost trains on without further heartbeats; a new node then begins the next round alone. Invariant:
an agent takes another node for lost when its heartbeat has not changed for torch's limit
(`keep_alive_interval` times `keep_alive_max_attempt`) on the agent's own clock; between two looks at most a
third of the limit counts, so that a paused agent reads new heartbeats before judging. No agent takes its own
node for lost, and a node that was removed from its round comes back, unless a spare node has its number.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import datetime, timedelta, timezone
from typing import Any, NamedTuple

from torch.distributed.elastic.rendezvous.dynamic_rendezvous import _NodeDesc

from adaptor.launchers.rendezvous.waiting import MEETS, MovedError, plain_node


@dataclass(frozen=True, repr=False)
class OrderedNode(_NodeDesc):
    """A node as torch describes it, with the sort keys before its address.

    Attributes:
        since: the first possible round of the node, from 0
        is_apart: whether another agent has the store
    """

    since: int = 0
    is_apart: bool = True

    def __lt__(self, other_node: object) -> bool:
        return self._order < self._require_ours(other_node)._order

    def __gt__(self, other: object) -> bool:
        return self._order > self._require_ours(other)._order

    def _require_ours(self, other: object) -> OrderedNode:
        """Return `other`, a node of the job.

        Raises:
            ConfigError: `other` runs plain torchrun; torch would raise a TypeError.
        """
        if isinstance(other, OrderedNode):
            return other
        raise plain_node(self.addr, str(getattr(other, "addr", other)))

    @property
    def _order(self) -> tuple[int, bool, str, int, int]:
        return self.since, self.is_apart, self.addr, self.pid, self.local_id


def put_in_order(handler: Any, *, has_store: bool) -> None:
    """Sort the node of a handler after earlier nodes.

    Handlers of another form stay unchanged: torch's own order is valid, too.

    Args:
        handler: torch's, before its first meeting.
        has_store: whether the store of the rendezvous ends with this agent.

    Raises:
        RendezvousConnectionError: the store does not answer.
    """
    node: Any = getattr(handler, "_this_node", None)
    holder: Any = getattr(handler, "_state_holder", None)
    executor: Any = getattr(handler, "_op_executor", None)
    if not hasattr(node, "local_id") or holder is None or getattr(executor, "_node", None) != node:
        return
    holder.sync()
    state = holder.state
    ordered = OrderedNode(
        node.addr, node.pid, node.local_id, since=state.round + int(state.complete), is_apart=not has_store
    )
    handler._this_node = executor._node = ordered


class _Heartbeat(NamedTuple):
    """The last heartbeat of a node, and the seconds without a change."""

    sign: datetime
    silent_s: float


class SignsOfLife:
    """Decides for one agent which nodes of its rendezvous are lost.

    Args:
        handler: torch's, before its first look.
        clock: seconds, monotonic.

    Attributes:
        look_outside: is called after each look; an exception ends torch's wait for a meeting.
    """

    def __init__(self, handler: Any, clock: Callable[[], float] = time.monotonic) -> None:
        self._handler = handler
        self._holder: Any = handler._state_holder
        interval_s = float(handler.settings.keep_alive_interval.total_seconds())
        self._most_s = min(interval_s, interval_s * int(handler.settings.keep_alive_max_attempt) / 3)
        self._clock = clock
        self._looked = clock()
        self._seen: dict[Any, _Heartbeat] = {}
        self._round: int | None = None  # the complete round of this node
        self._rank = 0
        self.look_outside: Callable[[], None] | None = None
        self._remove_silent: Callable[[], None] = self._holder._sanitize
        self._holder._sanitize = self._look

    @property
    def _node(self) -> Any:
        return self._handler._this_node  # `put_in_order` replaces the node after the first look

    @property
    def nodes_that_meet(self) -> int:
        """Return the number of nodes that meet in a later round than the round of this node."""
        state = self._holder.state
        if self._round is None or state.round <= self._round or state.complete:
            return 0
        return len(state.participants)

    def enter(self, rank: int) -> None:
        """Keep the node in the current complete round, in which it has `rank`."""
        self._round, self._rank = self._holder.state.round, rank

    def take(self, rank: int) -> None:
        """Put the node into the present round with the `rank` of a lost node: nobody meets.

        Raises:
            MovedError: the nodes meet again meanwhile.
            RendezvousConnectionError: the store does not answer.
        """
        self._holder.sync()
        has_written: bool | None = False
        while not has_written:
            state = self._holder.state
            if not state.complete and state.round:
                raise MovedError(MEETS)
            for node in [node for node, number in state.participants.items() if number == rank]:
                del state.participants[node]
                state.last_heartbeats.pop(node, None)
            state.complete = True  # in the new store of a spare node in the place of node 0 no node has met
            state.participants[self._node] = rank
            state.last_heartbeats[self._node] = datetime.now(timezone.utc)
            self.enter(rank)
            self._holder.mark_dirty()
            has_written = self._holder.sync()

    def leave(self) -> None:
        """Let the node leave its round."""
        self._round = None

    def _look(self) -> None:
        """Remove lost nodes from the state just read; torch calls the method after each read."""
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
        if self.look_outside is not None:
            self.look_outside()

    def _see(self, node: Any, sign: datetime, passed_s: float) -> _Heartbeat:
        signs_before = self._seen.get(node)
        is_silent = node != self._node and signs_before is not None and signs_before.sign == sign
        return _Heartbeat(
            sign, signs_before.silent_s + passed_s if is_silent and signs_before is not None else 0.0
        )

    def _stay(self, state: Any, wall_clock: datetime) -> None:
        """Put the node back after another agent has removed it, and let torch renew the heartbeat."""
        if self._node in state.last_heartbeats:  # in the future after this machine's clock was set back
            state.last_heartbeats[self._node] = min(state.last_heartbeats[self._node], wall_clock)
        is_out = state.round == self._round and self._node not in state.participants
        if state.complete and is_out and self._rank not in state.participants.values():
            state.participants[self._node] = self._rank
            state.last_heartbeats[self._node] = wall_clock
            self._holder.mark_dirty()


def watch(handler: Any) -> SignsOfLife | None:
    """Let `SignsOfLife` decide for a handler of torch; None for a handler of another form."""
    is_known = all(hasattr(handler, name) for name in ("_this_node", "_state_holder", "settings"))
    return SignsOfLife(handler) if is_known and hasattr(handler._state_holder, "_sanitize") else None
