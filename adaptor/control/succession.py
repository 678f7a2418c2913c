"""What one agent knows of the controllers of its generation, one after the other; no clock, no socket.

The first controller is on node 0; those of later terms are on the nodes that stand by (`legacy`), once the
agent there has lost all before. Who has lost one goes to the next, and says all again that it had said.

Invariants: an agent obeys one controller at a time, and after it none of an earlier term; it obeys one
verdict, the first that it is given. All go through the same terms in the same order: who does not know yet
where those are to be found goes nowhere, and no worker starts before it does.
"""

from __future__ import annotations

from adaptor.control.legacy import STANDBYS
from adaptor.control.messages import (
    AgentHello,
    Beat,
    ControllerToAgent,
    Died,
    Dying,
    FromAgent,
    Hello,
    Layout,
    Leave,
    Legacy,
    Place,
    Raised,
    Recalled,
    Refused,
    Told,
    Verdict,
)

# What is said to a new controller again: all but answers to the one that is lost, and what is said often.
LASTING = AgentHello | Hello | Layout | Refused | Raised | Told | Leave | Dying | Died


class Succession:
    """Of the agent of `node`, in a job of so many `nodes`.

    term     of the controller that it obeys, or looks for
    said     all that a controller must know
    legacy   what the first controller has passed on
    verdict  the one that a controller has given
    """

    def __init__(self, node: int, nodes: int) -> None:
        self._node = node
        self._terms = range(1, min(nodes, STANDBYS + 1))
        self.said: list[FromAgent] = []
        self._legacy: dict[tuple[type, int], Legacy] = {}
        self._gates: dict[int, Place] = {}
        self.term = 0
        self.verdict: Verdict | None = None

    @property
    def legacy(self) -> list[Legacy]:
        return list(self._legacy.values())

    def keep(self, message: FromAgent) -> None:
        """It is being said; what a controller must know is said to the next one, too."""
        if isinstance(message, LASTING):
            self.said.append(message)

    @property
    def all_again(self) -> list[FromAgent]:
        """What a new controller is told."""
        return [*self.said, Recalled(self._node, self.verdict)]

    def hear(self, order: ControllerToAgent) -> bool:
        """Whether it is to be obeyed; else it was for this class, or for nobody."""
        match order:
            case Beat():
                return False
            case AgentHello(node=node, gate=gate):
                self._legacy[AgentHello, node] = order
                if gate is not None:
                    self._gates[node] = gate
                return False
            case Layout(rank=rank):
                self._legacy[Layout, rank] = order
                return False
            case Verdict():
                if self.verdict is not None:
                    return False
                self.verdict = order
        return True

    @property
    def knows_the_way(self) -> bool:
        """Whether it knows of all that may ever have the controller; of node 0, too, if it may itself."""
        gates = all(term in self._gates for term in self._terms if term != self._node)
        return gates and (self._node not in self._terms or (AgentHello, 0) in self._legacy)

    def go_on(self) -> bool:
        """To the next term; False: there is none, or this agent does not know the way: nobody trains yet."""
        if not self.knows_the_way or self.term + 1 not in self._terms:
            return False
        self.term += 1
        return True

    @property
    def is_mine(self) -> bool:
        """Whether the controller of this term is this agent's to have."""
        return self.term == self._node

    @property
    def gate(self) -> Place | None:
        """Where the controller of this term would be found."""
        return self._gates.get(self.term)
