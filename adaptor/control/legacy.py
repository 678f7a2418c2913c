"""What the first controller passes on, so that others can take its place, one after the other; pure.

An agent tells a new controller all about its own ranks again. What it cannot tell is what the lost ones held:
the nodes that stand by know that from before. All nodes know where these are to be found.
"""

from __future__ import annotations

from adaptor.control.messages import AgentHello, AgentLost, Layout, Legacy, ToController

# The nodes 1 to STANDBYS. Each is told the layouts of all ranks, some 100 bytes for each; of so many that are
# lost within one incident all would have to be among the first four.
STANDBYS = 3


def stands_by(node: int) -> bool:
    return 0 < node <= STANDBYS


class Heirs:
    """Who is told what, by the controller on node 0."""

    def __init__(self) -> None:
        self._here: dict[int, None] = {}
        self._hellos: dict[int, AgentHello] = {}
        self._layouts: dict[int, Layout] = {}

    def hear(self, message: ToController) -> list[tuple[int, Legacy]]:
        """What is passed on, and to which nodes, now that the controller has heard `message`."""
        match message:
            case AgentHello(node=node):
                orders: list[tuple[int, Legacy]] = [(node, known) for known in self._known_to(node)]
                self._hellos[node] = message
                told = self._here if stands_by(node) else self._standing
                orders += [(other, message) for other in told]
                if node:
                    self._here[node] = None
                return orders
            case Layout(rank=rank):
                self._layouts[rank] = message
                return [(node, message) for node in self._standing]
            case AgentLost(node=node):
                self._here.pop(node, None)
        return []

    @property
    def _standing(self) -> list[int]:
        return [node for node in range(1, STANDBYS + 1) if node in self._here]

    def _known_to(self, newcomer: int) -> list[Legacy]:
        if stands_by(newcomer):
            return [*self._hellos.values(), *self._layouts.values()]
        return [self._hellos[node] for node in range(1, STANDBYS + 1) if node in self._hellos]
