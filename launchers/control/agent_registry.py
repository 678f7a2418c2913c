"""The nodes that have registered with the controller, and their ranks: no agent may report for another one.

An agent that has proved the secret can still be wrong: two agents were given the same node rank, or one is
left from an earlier start.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from types import MappingProxyType

from adaptor.protocol.messages import AgentHello, FromAgent, Frozen, StandbyState

_FOREIGN_RANK = "spoke for a rank of another node"


class AgentRegistry:
    """The registry of one generation of workers.

    Args:
        lost: the nodes that the controller counts as lost.
        expected: those of them whose places were given to spare nodes, with their new owners; all other
            places stay lost.
    """

    def __init__(
        self,
        world_size: int,
        nodes: int,
        lost: Collection[int] = (),
        expected: Mapping[int, str] = MappingProxyType({}),
    ) -> None:
        self._lost = lost
        self._expected = expected
        self._world_size = world_size
        self._nodes = nodes
        self._owners: dict[int, str] = {}  # of places, as the controller before this one knew them
        self._homes: dict[int, int] = {}  # ranks, and their nodes
        self._here: set[int] = set()

    def succeed(self, standby_state: Iterable[StandbyState]) -> None:
        """Know from the controller before this one which places spare nodes have taken.

        An agent that was taken for lost may live on, and come before the one that has its place.
        """
        for message in standby_state:
            if isinstance(message, AgentHello):
                self._owners[message.node] = message.owner

    def rejection_reason(self, node: int, message: FromAgent) -> str:
        """Return why `message` is rejected from the agent of `node`; empty if it is accepted.

        The reason is the predicate of a sentence. A hello that is accepted registers the node and its ranks.
        """
        if isinstance(message, AgentHello):
            return self._enter(message) if message.node == node else "came as another node"
        if node not in self._here:
            return "began with something else than a hello"
        if node in self._lost:
            return "spoke for a node that is lost"
        if isinstance(message, Frozen):  # as many of them come as there are ranks, and a dump waits for all
            return "" if self._homes.get(message.rank) == node else _FOREIGN_RANK
        if getattr(message, "node", node) != node:
            return "spoke for another node"
        rank = getattr(message, "rank", None)
        if rank is not None and self._homes.get(rank) != node:
            return _FOREIGN_RANK
        return ""

    def is_here(self, node: int) -> bool:
        """Return whether the agent of `node` has come, and be it that it is lost again."""
        return node in self._here

    def _enter(self, hello: AgentHello) -> str:
        if hello.node >= self._nodes:
            return "came as a node that the job does not have"
        if hello.owner and hello.owner == self._expected.get(hello.node):
            ranks = {rank for rank, node in self._homes.items() if node == hello.node}
            return "" if ranks == set(hello.ranks) else "came with other ranks than the node that is lost"
        if hello.owner != self._owners.get(hello.node, hello.owner):
            return "came as a node whose place another one has"
        if hello.node in self._here:
            return "came as a node that was there already"
        if any(rank >= self._world_size or rank in self._homes for rank in hello.ranks):
            return "came with ranks that the job does not have, or another node has"
        self._here.add(hello.node)
        self._homes.update(dict.fromkeys(hello.ranks, hello.node))
        return ""
