"""Decides which node runs the controller after the controller of node 0 is lost; no clock, no socket.

The first controller is on node 0. The controllers of later terms are on the standby nodes, 1 to `STANDBYS`;
after an online recovery they may be on any node up to `STANDBYS` (`node_of`). An agent repeats to a new
controller all reports about its own ranks. No agent can repeat the layouts of lost ranks:
`StandbyReplicator`, at each controller, passes the layouts on to the standby nodes beforehand.

`Succession`, at each agent, has the addresses of the controllers. When an agent has lost its controller,
`ControllerClient` (`launchers/control/controller_client.py`) connects to the next controller and repeats all
messages of the agent, or runs the controller itself where `is_mine` is True.

Invariants: an agent obeys one controller at a time, and afterwards no controller of an earlier term. An agent
obeys the first verdict that arrives, and no other. All agents go through the same terms in the same order: an
agent that does not know the addresses yet connects to no controller, and no worker starts before.

`AwaitedNodes`, at the new controller, has the nodes that have not repeated their reports. Nothing is decided
while a node is awaited: the node may know of a death, of the beginning of training, or of the verdict, which
stands.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable

import msgspec

from adaptor.protocol.messages import (
    Addressed,
    AgentHello,
    AgentLost,
    AgentTerminationRequested,
    ControllerToAgent,
    Corruption,
    Died,
    Dying,
    Endpoint,
    Freeze,
    FromAgent,
    Hello,
    Layout,
    Prepare,
    PresenceProbe,
    Proceed,
    Publish,
    Raised,
    Recovered,
    Refused,
    Replace,
    ReplayComplete,
    StandbyState,
    TerminationRequested,
    ToController,
    Unprotected,
    Verdict,
    Welcome,
)

# The nodes 1 to STANDBYS. Each gets the layouts of all ranks, some 100 bytes for each rank. The controller is
# lost for good only if all of the first four nodes are lost within one incident.
STANDBYS = 3


def stands_by(node: int) -> bool:
    """Return True if `node` stands by for the controller, where another node has the controller."""
    return node <= STANDBYS


def node_of(term: int, nodes: int) -> int:
    """Return the node, of `nodes`, with the controller of `term`."""
    return term % min(nodes, STANDBYS + 1)


def may_go_on(nodes: int, lost: Collection[int]) -> bool:
    """Return True if the nodes that are left may go on without node 0: at least half of `nodes` are left.

    A node that is cut off from all others must not keep them from going on. Of two sides the first that says
    so in the save folder goes on (`lease.go_on_without`), and the other side ends.
    """
    return 2 * (nodes - len(set(lost))) >= nodes


def empty_places_after(lost: Iterable[int], successor: int) -> tuple[int, ...]:
    """Return the empty places after the loss of node 0 and others; `successor` becomes node 0."""
    return tuple(sorted({*lost, successor} - {0}))


class StandbyReplicator:
    """Passes the state on to standby nodes; used by the controller on node `home`."""

    def __init__(self, home: int = 0) -> None:
        self._home = home
        self._here: dict[int, None] = {}
        self._hellos: dict[int, AgentHello] = {}
        self._layouts: dict[int, Layout] = {}

    def succeed(self, standby_state: Iterable[StandbyState]) -> None:
        """Keep the layouts that the lost controller has passed on: no agent repeats those of lost ranks."""
        for message in standby_state:
            if isinstance(message, Layout):
                self._layouts[message.rank] = message

    def replicate(self, message: ToController) -> list[tuple[int, StandbyState]]:
        """Return the messages to pass on, each with its node, after the controller has received `message`."""
        match message:
            case AgentHello(node=node):
                orders: list[tuple[int, StandbyState]] = [
                    (node, known_message) for known_message in self._known_to(node)
                ]
                self._hellos[node] = message
                standby_nodes = self._here if stands_by(node) else self._standing
                orders += [(standby_node, message) for standby_node in standby_nodes]
                if node != self._home:
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
        return [node for node in range(STANDBYS + 1) if node in self._here]

    def _known_to(self, newcomer: int) -> list[StandbyState]:
        if stands_by(newcomer):
            # Not of the agent that had this place before.
            other_hellos = [hello for node, hello in self._hellos.items() if node != newcomer]
            return [*other_hellos, *self._layouts.values()]
        standbys = set(range(STANDBYS + 1)) - {self._home}
        return [self._hellos[node] for node in sorted(standbys & self._hellos.keys())]


# Orders to workers that change nothing but the door.
_HARMLESS = (Freeze, PresenceProbe, Proceed)
# The messages that are repeated to a new controller: all but answers to the lost controller and frequent
# reports.
LASTING = (
    AgentHello
    | Hello
    | Layout
    | Refused
    | Raised
    | Corruption
    | TerminationRequested
    | AgentTerminationRequested
    | Dying
    | Died
    | Unprotected
)


class Succession:
    """The controllers, one after the other, as the agent of `node` of `nodes` knows them.

    Args:
        term: of the first controller that the agent meets.

    Attributes:
        said: all messages that a controller must know
    """

    def __init__(self, node: int, nodes: int, term: int = 0) -> None:
        self._node = node
        self._nodes = nodes
        self.said: list[FromAgent] = []
        self._standby_state: dict[tuple[type, int], StandbyState] = {}
        self._endpoints: dict[int, Endpoint] = {}
        self._heard_in: dict[int, int] = {}  # by node, the newest term in which its hello came
        self.term = term
        # The term of the newest controller after whose recovery no node was lost.
        self._base = term
        self._has_acted = False
        self.verdict: Verdict | None = None

    @property
    def _terms(self) -> range:
        """Return the later terms; their nodes have agents as far as known."""
        return range(self._base + 1, self._base + min(self._nodes, STANDBYS + 1))

    @property
    def lost_homes(self) -> list[int]:
        """Return the nodes of the controllers that were lost since all nodes had agents.

        Without places that spare nodes have taken since: their agents have come to a later controller.
        """
        homes = {node_of(term, self._nodes): term for term in range(self._base, self.term)}
        return [node for node, term in homes.items() if self._heard_in.get(node, term) <= term]

    @property
    def standby_state(self) -> list[StandbyState]:
        """Return the state of a standby: the newest message of each kind and rank."""
        return list(self._standby_state.values())

    def keep(self, message: FromAgent) -> None:
        """Keep a message that is being sent, if the next controller must know the message, too."""
        if isinstance(message, LASTING):
            self.said.append(message)

    @property
    def all_again(self) -> list[FromAgent]:
        """Return the messages for a new controller."""
        return [*self.said, ReplayComplete(self._node, self.verdict, self._has_acted)]

    def accept(self, order: ControllerToAgent) -> bool:
        """Return True if the agent has to obey `order`; False if it is for this class, or outdated."""
        match order:
            case Welcome():
                return False
            case AgentHello(node=node, endpoint=endpoint):
                self._standby_state[AgentHello, node] = order
                self._heard_in[node] = self.term
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
                self._base, self._has_acted = self.term, False
            case Replace() | Prepare() | Publish():
                self._has_acted = True
            case Addressed(message=message) if not isinstance(message, _HARMLESS):
                self._has_acted = True
        return True

    @property
    def knows_standby_endpoints(self) -> bool:
        """Return True if the addresses of all standbys, or of all earlier ones, are known."""
        standbys = {node_of(term, self._nodes) for term in self._terms}
        home = node_of(self._base, self._nodes)
        endpoints = standbys - {self._node} <= self._endpoints.keys()
        return endpoints and (self._node not in standbys or (AgentHello, home) in self._standby_state)

    def go_on(self) -> bool:
        """Go to the next term; return False where none is left, or an address is not known yet."""
        if not self.knows_standby_endpoints or self.term + 1 not in self._terms:
            return False
        self.term += 1
        return True

    @property
    def home(self) -> int:
        """Return the node of the controller of this term."""
        return node_of(self.term, self._nodes)

    @property
    def is_mine(self) -> bool:
        """Return True if the controller of this term runs in this agent."""
        return self.home == self._node

    @property
    def endpoint(self) -> Endpoint | None:
        """Return the address of the controller of this term."""
        return self._endpoints.get(self.home)


def _without_what_is_over(messages: list[FromAgent], end: Recovered) -> list[FromAgent]:
    """Return the messages that a next controller must know after an online recovery.

    Of replaced ranks only the messages of their new processes stay, of other ranks all messages but the
    recovered exceptions and corruptions. Later failures stay.
    """
    hellos = {message.rank: at for at, message in enumerate(messages) if isinstance(message, Hello)}
    kept: list[FromAgent] = []
    for at, message in enumerate(messages):
        rank = getattr(message, "rank", -1)
        of_before = rank in end.replaced and at < hellos.get(rank, 0)
        recovered = isinstance(message, Corruption) or (rank in end.retried and isinstance(message, Raised))
        if isinstance(message, AgentHello):  # all agents have come to its store
            message = msgspec.structs.replace(message, store=None)
        if not of_before and not recovered:
            kept.append(message)
    return kept


# The time for which a new controller waits for further nodes after the newest one. A live agent has noticed
# the loss a second later at most (`wire`), and connects at once; the rest is for a busy machine. Connected
# ranks have been told to freeze meanwhile.
RECONNECT_S = 3.0
# The further time for each standby before this node: an agent tries to connect there first, and may get no
# answer. A live standby answers within this time: a lost first packet is sent again after a second. Where
# only the agent is gone, the kernel of its machine refuses at once.
TRY_CONNECT_TIMEOUT_S = 2.0


class AwaitedNodes:
    """The nodes that one controller awaits; empty for the first controller of a job."""

    def __init__(self) -> None:
        self.awaited: set[int] = set()
        self._until = 0.0

    def begin(self, nodes: Iterable[int], term: int, time_now: float) -> None:
        """Wait for `nodes` to repeat their reports to the controller of `term`."""
        self.awaited.update(nodes)
        self._until = time_now + RECONNECT_S + TRY_CONNECT_TIMEOUT_S * (term - 1)

    def has_told(self, node: int, time_now: float) -> bool:
        """Note that `node` has repeated its reports; return True if `node` was awaited."""
        if node not in self.awaited:
            return False
        self.awaited.discard(node)
        self._until = max(self._until, time_now + RECONNECT_S)
        return True

    def lose(self, node: int) -> None:
        """Do not wait for `node` any more, which is lost."""
        self.awaited.discard(node)

    def overdue(self, time_now: float) -> list[int]:
        """Return the nodes that count as lost, because no node has come for too long."""
        return sorted(self.awaited) if time_now >= self._until else []
