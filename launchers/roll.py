"""Which nodes have come to a job, and with which ranks: nobody speaks for another.

An agent that has proved the secret is still not believed whatever it says. It may be confused: two were given
the same node rank, say, or it is left from an earlier start.
"""

from __future__ import annotations

from adaptor.control.messages import AgentHello, FromAgent


class Roll:
    """Of one generation of workers."""

    def __init__(self, world_size: int, nodes: int) -> None:
        self._world_size = world_size
        self._nodes = nodes
        self._homes: dict[int, int] = {}  # ranks, and their nodes
        self._here: set[int] = set()

    def objection(self, node: int, message: FromAgent) -> str:
        """Why the agent of `node` may not say `message`: the predicate of a sentence; empty: it may.

        A hello without objection is on the roll from then on.
        """
        if isinstance(message, AgentHello):
            return self._enter(message) if message.node == node else "came as another node"
        if node not in self._here:
            return "began with something else than a hello"
        if getattr(message, "node", node) != node:
            return "spoke for another node"
        rank = getattr(message, "rank", None)
        if rank is not None and self._homes.get(rank) != node:
            return "spoke for a rank of another node"
        return ""

    def _enter(self, hello: AgentHello) -> str:
        if hello.node >= self._nodes:
            return "came as a node that the job does not have"
        if hello.node in self._here:
            return "came as a node that was there already"
        if any(rank >= self._world_size or rank in self._homes for rank in hello.ranks):
            return "came with ranks that the job does not have, or another node has"
        self._here.add(hello.node)
        self._homes.update(dict.fromkeys(hello.ranks, hello.node))
        return ""
