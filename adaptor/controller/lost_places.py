"""Notes which places of lost nodes spare nodes take while the other nodes keep their processes.

Node 0 is asked for spare nodes (`FillPlaces`), once for each loss. The agent of a spare node that has got a
place connects to the controller (`AgentHello`), and starts new processes for the ranks of the lost node.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from adaptor.protocol.messages import PlacesFilled


@dataclass
class LostPlaces:
    """The places of one incident.

    Attributes:
        taken: the places in which spare nodes have come
    """

    taken: set[int] = field(default_factory=set)
    _asked: set[int] = field(default_factory=set)
    _refused: dict[int, str] = field(default_factory=dict)

    def why_not(self, lost: Iterable[int]) -> str:
        """Return why the places of the `lost` nodes stay empty; '' while spare nodes may take them."""
        return next((self._refused[node] for node in sorted(lost) if node in self._refused), "")

    def ask(self, nodes: Sequence[int]) -> tuple[int, ...]:
        """Return those of `nodes` for which node 0 is to be asked, and note that it is."""
        unasked = tuple(node for node in nodes if node not in self._asked)
        self._asked.update(unasked)
        return unasked

    def answer(self, answer: PlacesFilled) -> str:
        """Take the answer of node 0; return why the places stay empty, '' where spare nodes come."""
        if answer.owners:
            return ""
        reason = f"node {min(answer.nodes)} is lost, and {answer.reason}"
        self._refused.update(dict.fromkeys(answer.nodes, reason))
        return reason

    def come(self, node: int) -> None:
        """Note that the agent of a spare node has come in the place of `node`."""
        self.taken.add(node)

    def lose(self, node: int) -> None:
        """Note that `node` is lost, or the spare node that had its place: node 0 may be asked again."""
        self._asked.discard(node)
        self.taken.discard(node)
