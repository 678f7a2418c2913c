"""Numbers the nodes of a rendezvous without fixed ranks (c10d): those that were there first come first.

torch sorts the nodes that have met by their address. So a node that comes later could become node 0, whose
agent has the job's history: incidents, their files, the restarts that are used up. And node 0 would be
another one than the node with the rendezvous store, so that the loss of either ended the job.

Invariant: where an agent has the store, it is node 0 as long as it lives. Which one has it is known by who
could open its port (`c10d_store.py`), not by names: several agents may run on the machine of --rdzv-endpoint,
and that machine may have other names.

All agents of a job number nodes alike: what they are sorted by travels with them in torch's own state.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch.distributed.elastic.rendezvous.dynamic_rendezvous import _NodeDesc

from adaptor.launchers.rendezvous.rendezvous_errors import plain_node


@dataclass(frozen=True, repr=False)
class OrderedNode(_NodeDesc):
    """A node, as torch describes it, with what comes before its address in the order of nodes.

    Attributes:
        since: the round of the rendezvous in which it may be for the first time, from 0
        is_apart: whether another agent has the store
    """

    since: int = 0
    is_apart: bool = True

    def __lt__(self, other_node: object) -> bool:
        return self._order < self._require_ours(other_node)._order

    def __gt__(self, other: object) -> bool:
        return self._order > self._require_ours(other)._order

    def _require_ours(self, other: object) -> OrderedNode:
        """Return `other`, a node of this job.

        Raises:
            ConfigError: it runs plain torchrun; torch would raise a TypeError.
        """
        if isinstance(other, OrderedNode):
            return other
        raise plain_node(self.addr, str(getattr(other, "addr", other)))

    @property
    def _order(self) -> tuple[int, bool, str, int, int]:
        return self.since, self.is_apart, self.addr, self.pid, self.local_id


def put_in_order(handler: Any, *, has_store: bool) -> None:
    """Let the node of a handler come behind those that were there before it.

    Nothing is changed where torch's handler has another form: its own order is right, too.

    Args:
        handler: torch's, which has met nobody yet.
        has_store: whether what the nodes meet at ends with this agent.

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
        node.addr,
        node.pid,
        node.local_id,
        since=state.round + int(state.complete),
        is_apart=not has_store,
    )
    handler._this_node = executor._node = ordered
