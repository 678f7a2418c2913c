"""Decides which node runs the controller after the one of node 0 is lost; no clock, no socket.

The first controller is on node 0; those of later terms are on the nodes that stand by, 1 to `STANDBYS`. An
agent tells a new controller all about its own ranks again. What it cannot tell is what the lost ranks held:
`StandbyReplicator`, at the first controller, passes that on to the nodes that stand by beforehand.

`Succession`, at each agent, has the addresses of the controllers. When an agent has lost its controller,
`ControllerClient` (`launchers/control/controller_client.py`) connects to the next controller and repeats all
messages of the agent, or runs the controller itself where `is_mine` is True.
Invariants: an agent obeys one controller at a time, and no controller of an earlier term afterwards. An agent
obeys the first verdict that it receives, and no other. All agents go through
the same terms in the same order: an agent that does not know yet where those are goes nowhere, and no worker
starts before.

`AwaitedNodes`, at the new controller, knows which nodes are still to come. Nothing is decided while a node is
awaited: it may know that a rank has died, that training has begun, or the verdict, which stands.
"""

from __future__ import annotations

from collections.abc import Iterable

from adaptor.protocol.messages import (
    AgentHello,
    AgentLost,
    AgentTerminationRequested,
    ControllerToAgent,
    Died,
    Dying,
    Endpoint,
    FromAgent,
    Hello,
    Layout,
    Raised,
    Recovered,
    Refused,
    ReplayComplete,
    StandbyState,
    TerminationRequested,
    ToController,
    Unprotected,
    Verdict,
    Welcome,
)

# The nodes 1 to STANDBYS. Each is told the layouts of all ranks, some 100 bytes for each; of so many that are
# lost within one incident all would have to be among the first four.
STANDBYS = 3


def stands_by(node: int) -> bool:
    """Return whether `node` stands by for a controller on node 0."""
    return 0 < node <= STANDBYS


class StandbyReplicator:
    """Passes on what a next controller must know; used by the controller on node 0."""

    def __init__(self) -> None:
        self._here: dict[int, None] = {}
        self._hellos: dict[int, AgentHello] = {}
        self._layouts: dict[int, Layout] = {}

    def replicate(self, message: ToController) -> list[tuple[int, StandbyState]]:
        """Return what is passed on, and to which nodes, now that the controller has heard `message`."""
        match message:
            case AgentHello(node=node):
                orders: list[tuple[int, StandbyState]] = [
                    (node, known_message) for known_message in self._known_to(node)
                ]
                self._hellos[node] = message
                standby_nodes = self._here if stands_by(node) else self._standing
                orders += [(standby_node, message) for standby_node in standby_nodes]
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

    def _known_to(self, newcomer: int) -> list[StandbyState]:
        if stands_by(newcomer):
            # Not of the agent that had this place before it.
            other_hellos = [hello for node, hello in self._hellos.items() if node != newcomer]
            return [*other_hellos, *self._layouts.values()]
        return [self._hellos[node] for node in range(1, STANDBYS + 1) if node in self._hellos]


# What is said to a new controller again: all but answers to the one that is lost, and what is said often.
LASTING = (
    AgentHello
    | Hello
    | Layout
    | Refused
    | Raised
    | TerminationRequested
    | AgentTerminationRequested
    | Dying
    | Died
    | Unprotected
)


class Succession:
    """The controllers, one after the other, as the agent of `node` of `nodes` knows them.

    Attributes:
        term: of the controller that it obeys, or looks for
        said: all that a controller must know
        standby_state: what the first controller has passed on
        verdict: the one that a controller has given
    """

    def __init__(self, node: int, nodes: int) -> None:
        self._node = node
        self._terms = range(1, min(nodes, STANDBYS + 1))
        self.said: list[FromAgent] = []
        self._standby_state: dict[tuple[type, int], StandbyState] = {}
        self._endpoints: dict[int, Endpoint] = {}
        self.term = 0
        self.verdict: Verdict | None = None

    @property
    def standby_state(self) -> list[StandbyState]:
        """Return what a standby has to know: the newest message of each kind and rank."""
        return list(self._standby_state.values())

    def keep(self, message: FromAgent) -> None:
        """Keep a message that is being sent, if the next controller must know it, too."""
        if isinstance(message, LASTING):
            self.said.append(message)

    @property
    def all_again(self) -> list[FromAgent]:
        """Return what a new controller is told."""
        return [*self.said, ReplayComplete(self._node, self.verdict)]

    def accept(self, order: ControllerToAgent) -> bool:
        """Return whether it is to be obeyed; else it was for this class, or for nobody."""
        match order:
            case Welcome():
                return False
            case AgentHello(node=node, endpoint=endpoint):
                self._standby_state[AgentHello, node] = order
                if endpoint is not None:
                    self._endpoints[node] = endpoint
                return False
            case Layout(rank=rank):
                self._standby_state[Layout, rank] = order
                return False
            case Verdict():
                if self.verdict is not None:
                    return False
                self.verdict = order
            case Recovered():
                self.said = _without_what_is_over(self.said, order)
        return True

    @property
    def knows_standby_endpoints(self) -> bool:
        """Return True if the addresses of all standbys are known; on a standby those of earlier ones, too."""
        endpoints = all(term in self._endpoints for term in self._terms if term != self._node)
        return endpoints and (self._node not in self._terms or (AgentHello, 0) in self._standby_state)

    def go_on(self) -> bool:
        """To the next term; False: there is none, or this agent does not know the way: nobody trains yet."""
        if not self.knows_standby_endpoints or self.term + 1 not in self._terms:
            return False
        self.term += 1
        return True

    @property
    def is_mine(self) -> bool:
        """Return whether the controller of this term is this agent's to have."""
        return self.term == self._node

    @property
    def endpoint(self) -> Endpoint | None:
        """Return where the controller of this term would be found."""
        return self._endpoints.get(self.term)


def _without_what_is_over(messages: list[FromAgent], end: Recovered) -> list[FromAgent]:
    """Return what a next controller must know after an online recovery.

    Of replaced ranks it is what their new processes have said, or what became of these; of others nothing of
    the exceptions that were recovered from. What has failed since stays.
    """
    hellos = {message.rank: at for at, message in enumerate(messages) if isinstance(message, Hello)}
    kept: list[FromAgent] = []
    for at, message in enumerate(messages):
        rank = getattr(message, "rank", -1)
        of_before = rank in end.replaced and at < hellos.get(rank, 0)
        recovered = rank in end.retried and isinstance(message, Raised)
        if not of_before and not recovered:
            kept.append(message)
    return kept


# So long a new controller waits for nodes while none comes, before it decides without those that have not.
# One that lives has noticed the loss a second later at most (`wire`), and comes at once; this leaves a busy
# machine time. Whoever is there has been told to freeze meanwhile.
RECONNECT_S = 3.0
# And so much longer for each node that stood by before this one: an agent tries there first, and nothing may
# answer. Who lives answers within this time: a first packet that is lost is sent again after a second. Where
# only the agent is gone, its kernel says so at once.
TRY_CONNECT_TIMEOUT_S = 2.0


class AwaitedNodes:
    """The nodes that one controller awaits; the first one of a job awaits nobody."""

    def __init__(self) -> None:
        self.awaited: set[int] = set()
        self._until = 0.0

    def begin(self, nodes: Iterable[int], term: int, time_now: float) -> None:
        """Wait for these nodes to repeat to the controller of `term` what they know."""
        self.awaited.update(nodes)
        self._until = time_now + RECONNECT_S + TRY_CONNECT_TIMEOUT_S * (term - 1)

    def has_told(self, node: int, time_now: float) -> bool:
        """`node` has told all; whether it was awaited."""
        if node not in self.awaited:
            return False
        self.awaited.discard(node)
        self._until = max(self._until, time_now + RECONNECT_S)
        return True

    def lose(self, node: int) -> None:
        """Do not wait for `node` any more: it is lost."""
        self.awaited.discard(node)

    def overdue(self, time_now: float) -> list[int]:
        """The nodes that count as lost, because nobody has come for too long."""
        return sorted(self.awaited) if time_now >= self._until else []
