"""Wraps torch's rendezvous, which decides the number of nodes: waits name missing nodes, later nodes come in.

The loss of the node with the store does not end an agent: the survivors are still to save.
"""

from __future__ import annotations

import contextlib
import math
import threading
import time
from collections.abc import Callable
from typing import Any

from torch.distributed import Store
from torch.distributed.elastic.rendezvous.api import (
    RendezvousClosedError,
    RendezvousConnectionError,
    RendezvousTimeoutError,
)

from adaptor import output
from adaptor.launchers.rendezvous import dynamic_nodes, rendezvous_store
from adaptor.launchers.rendezvous.dynamic_nodes import SignsOfLife
from adaptor.launchers.rendezvous.rendezvous_store import FixedNodes, NextStore
from adaptor.launchers.rendezvous.waiting import (
    ABANDONED,
    AGAIN_S,
    ANSWERS_S,
    FIRST_S,
    FullJobError,
    Interrupted,
    NotTakenInError,
    StoreLostError,
    require_awaited,
    wait_for,
)
from adaptor.protocol.messages import Endpoint
from adaptor.protocol.spare_messages import Gate

# Seconds between two checks of the agent with the store whether the others have left, which takes
# milliseconds; and the limit: another agent may be lost, and on a busy machine an agent takes seconds to
# end.
_LOOK_FOR_END_S = 0.02
_OTHERS_LEAVE_S = 10.0
_LEFT, _ALL_LEFT = "ttp/left", "ttp/all have left"
# The key in a store of c10d that is in the process of an agent, which is node 0 (`dynamic_nodes.py`).
_OF_AN_AGENT = "ttp/store of an agent"
_OWN_STORE = "the rendezvous store of this node"
# Backends whose store is in the process of an agent.
_STORE_OF_AN_AGENT = ("static", "c10d")


class Registry:
    """Wraps torch's registry of rendezvous handlers, whose constructors connect to the store and may
    wait.

    Args:
        look: raises MovedError if the job has gone on elsewhere; called, as `wait_for` does, while this node
            waits for its first meeting.
    """

    def __init__(self, registry: Any, look: Callable[[], float | None] | None = None) -> None:
        self._registry = registry
        self._look = look

    def __getattr__(self, name: str) -> Any:
        return getattr(self._registry, name)

    def get_rendezvous_handler(self, params: Any) -> Rendezvous:
        """Return torch's handler for `params`, wrapped."""
        is_alone = params.max_nodes == 1
        rendezvous_name = _OWN_STORE if is_alone else f"the rendezvous at {params.endpoint}"
        trouble = ""

        def note(text: str) -> None:
            nonlocal trouble
            trouble = text

        def connect() -> Rendezvous:
            handler, has_store = rendezvous_store.connect(self._registry, params, note)
            next_store = NextStore(self._registry, params)
            rendezvous = Rendezvous(
                handler,
                params.endpoint,
                params.max_nodes,
                has_store=has_store,
                next_store=next_store,
                look=self._look,
            )
            if params.backend != "static":
                dynamic_nodes.put_in_order(handler, has_store=has_store)
            return rendezvous

        return wait_for(
            connect,
            lambda: _with(trouble, rendezvous_name),
            limit=lambda: rendezvous_store.limit(params),
            first_s=AGAIN_S if is_alone else FIRST_S,
            look=self._look,
        )


class Rendezvous:
    """Wraps a rendezvous handler of torch, and passes on all of its methods.

    Args:
        endpoint: the meeting address of the nodes.
        most_nodes: the largest number of nodes.
        has_store: whether the store ends with this agent; a static rendezvous has the store on node 0.
        next_store: takes the place of a store that is lost with node 0; None: no store does.
        look: as in `Registry`.

    Attributes:
        ends_with_node_0: the store is in the process of node 0; with c10d known after a meeting
        is_fixed: nodes have the numbers that they were given
        most_nodes: as the argument
    """

    def __init__(
        self,
        handler: Any,
        endpoint: str = "",
        most_nodes: int = 1,
        *,
        has_store: bool = False,
        next_store: NextStore | None = None,
        look: Callable[[], float | None] | None = None,
    ) -> None:
        self._handler = handler
        self._look = look
        self._next_store = next_store
        self._where = endpoint
        self.most_nodes = most_nodes
        self._static = FixedNodes(handler) if handler.get_backend() == "static" else None
        self.is_fixed = self._static is not None
        self._signs = dynamic_nodes.watch(handler)
        self._has_store = self._static.is_host if self._static is not None else has_store
        self.ends_with_node_0 = self._static is not None
        if has_store and handler.get_backend() == "c10d":
            handler._store.set(_OF_AN_AGENT, "")
        self._has_lost_store = False
        self._tell_of_end: Callable[[], None] | None = None
        self._interrupted = False
        self._has_met = False
        self._place: int | None = None
        self._find_gate: Callable[[Store], Gate | None] = lambda store: None

    def __getattr__(self, name: str) -> Any:
        return getattr(self._handler, name)

    @property
    def nodes(self) -> str:
        """Return MIN:MAX if the number of nodes may change; else ''."""
        settings = getattr(self._handler, "settings", None)
        if self._static is not None or settings is None or settings.min_nodes == settings.max_nodes:
            return ""
        return f"{settings.min_nodes}:{settings.max_nodes}"

    @property
    def last_call_s(self) -> float:
        """Return the seconds for which nodes wait for more nodes, where their number may change."""
        return float(self._handler.settings.timeout.last_call.total_seconds())

    @property
    def has_met_before(self) -> bool:
        """Return whether the job had workers, on any node, before the last meeting."""
        holder = getattr(self._handler, "_state_holder", None)
        return self._static is None and holder is not None and holder.state.round > 0

    @property
    def store_of_all_rounds(self) -> Any:
        """Return the store that a node can read before joining (c10d); None for other backends."""
        return getattr(self._handler, "_store", None) if self._handler.get_backend() == "c10d" else None

    @property
    def nodes_that_wait(self) -> int:
        """Return the number of nodes that wait to join; 0 while the store does not answer.

        The store may be on a lost node.
        """
        try:
            waiting = int(self._handler.num_nodes_waiting())
        except RendezvousConnectionError:
            return 0
        return waiting + (self._signs.nodes_that_meet if self._signs is not None else 0)

    # the places of lost nodes

    def look_for_gate(self, find_gate: Callable[[Store], Gate | None]) -> None:
        """Let this node wait as a spare node (`FullJobError`), where the job trains without it.

        Args:
            find_gate: returns the gate for spare nodes from the store of a round; None if there is no gate.
        """
        self._find_gate = find_gate
        if self._signs is not None and self.store_of_all_rounds is not None:
            self._signs.look_outside = self._go_to_gate

    def _go_to_gate(self) -> None:
        if self._is_outside and (gate := self._find_gate(self._handler._get_store())) is not None:
            raise FullJobError(gate)

    def take_place(self, number: int) -> None:
        """Let the next meeting be none: this spare node joins training as node `number`."""
        self._place = number

    def _join(self, number: int) -> Any:
        """Let torch's handler find this node in the present round, in place of waiting for the next round."""
        assert self._signs is not None
        handler = self._handler
        executor, handler._op_executor = handler._op_executor, _TakesPlace(self._signs, number)
        try:
            info = handler.next_rendezvous()
        finally:
            handler._op_executor = executor
        # Other nodes may be lost, too, or may not have come to the new store yet.
        return type(info)(info.store, info.rank, self.most_nodes, info.bootstrap_store_info)

    def own_store(self, address: str) -> tuple[Endpoint, Store] | None:
        """Open the store of this spare node, in the place of node 0; return the address, and the store.

        Args:
            address: of this node.
        """
        if not self.is_fixed:  # open since the start of this node (`rendezvous_store.go_to_store`)
            endpoint = Endpoint(address, int(self._handler._store.port))
            self._where = f"{endpoint.address}:{endpoint.port}"
            return endpoint, self._handler._get_store()
        opened = self.open_store(address)
        if opened is None:
            return None
        store = self.store_at(opened)
        self.move(opened, 0)
        return opened, store

    def come_to(self, endpoint: Endpoint, number: int) -> tuple[Store, str, int]:
        """Come to the store of a spare node in the place of node 0, while workers train.

        Args:
            number: of this node.

        Returns:
            The store of the present round, and the address of the workers' store.
        """
        if self.is_fixed:
            store = self.store_at(endpoint)
            self.move(endpoint, number)
            return store, endpoint.address, endpoint.port
        self.move(endpoint, number)
        self.take_place(number)
        info = self.next_rendezvous()
        workers_store = info.bootstrap_store_info
        return info.store, workers_store.master_addr, int(workers_store.master_port)

    # after the loss of node 0

    def open_store(self, address: str) -> Endpoint | None:
        """Open a store in the place of the store of node 0, which is lost; None if that cannot be.

        Args:
            address: of this node.
        """
        return self._next_store.open(address) if self._next_store and self.ends_with_node_0 else None

    def store_at(self, endpoint: Endpoint) -> Store:
        """Return the store that another node, or this node, has opened in the place of that of node 0."""
        assert self._next_store is not None
        return self._next_store.connect(endpoint)

    def lose_store(self) -> None:
        """Stop torch's heartbeats if the store is lost with node 0: each would print a C++ stack.

        Their thread may wait for the store until the connection ends.
        """
        if self._static is None and self.ends_with_node_0 and not (self._has_store or self._has_lost_store):
            self._has_lost_store = True
            threading.Thread(target=self._handler._stop_heartbeats, name=ABANDONED, daemon=True).start()

    def move(self, endpoint: Endpoint, number: int) -> None:
        """Let the next meeting be at the store at `endpoint`.

        Args:
            number: the number of this node from now on, with fixed numbers; 0: of the node with the store.
        """
        assert self._next_store is not None
        is_here = self._has_store and self._where == f"{endpoint.address}:{endpoint.port}"
        self._where = f"{endpoint.address}:{endpoint.port}"
        self._has_store = number == 0
        if self._static is not None:
            self._static.move(self._handler, self._next_store.store_of_agents, endpoint, number)
        elif not is_here:
            self.lose_store()
            handler = self._next_store.handler(self._handler, endpoint, has_store=self._has_store)
            require_awaited()
            self._handler = handler
            self._signs = dynamic_nodes.watch(self._handler)
            self._has_lost_store = False

    def meet(self, work: Callable[[], None], look_again: Callable[[], None] | None = None) -> None:
        """Run `work`, which meets the other nodes. Raises Interrupted: a signal came first.

        Args:
            look_again: is called as `look` of the registry is, but for a node that has met others before.
        """
        try:
            first_s = AGAIN_S if self.most_nodes == 1 else FIRST_S
            look = look_again if self._has_met else self._look
            wait_for(
                work,
                lambda: self.missing,
                limit=lambda: self.limit,
                first_s=first_s,
                look=look,
                limit_s=self._longest_meeting_s,
            )
        except Interrupted:
            self._interrupted = True
            raise

    def stay_for_others(self, store: Any, nodes: int) -> None:
        """Let the agent with the store leave last, at the end of a job without another start.

        torch's exit barrier lets the agent leave as soon as the last agent has entered, and an agent that
        then still asks the store prints a traceback. So each other agent counts itself in the store after
        its last use (`shutdown`), and the agent with the store waits for all others here, at most
        `_OTHERS_LEAVE_S`.

        Args:
            store: of the last round.
            nodes: the number of nodes of the round.
        """
        if self._handler.get_backend() not in _STORE_OF_AN_AGENT:
            return
        if not self._has_store:

            def tell() -> None:
                if store.add(_LEFT, 1) == nodes - 1:
                    store.set(_ALL_LEFT, "")

            self._tell_of_end = tell
            return
        deadline = time.monotonic() + _OTHERS_LEAVE_S
        with contextlib.suppress(RuntimeError):  # of the store
            while nodes > 1 and not store.check([_ALL_LEFT]) and time.monotonic() < deadline:
                time.sleep(_LOOK_FOR_END_S)

    def shutdown(self) -> bool:
        """End the rendezvous for all nodes, unless the others go on; return whether that was done in time.

        As torchrun, do nothing after a signal to this node alone. A store behind a cut network delays this
        node by `ANSWERS_S`: torch would wait until the kernel gives up the connection, a quarter of an hour.
        """

        def end() -> None:
            if not (self._interrupted or self._is_left_out or self._has_lost_store):
                self._handler.shutdown()
            if self._tell_of_end is not None:
                with contextlib.suppress(RuntimeError):  # the store is lost: nobody waits
                    self._tell_of_end()

        ending = threading.Thread(target=end, name=ABANDONED, daemon=True)
        ending.start()
        ending.join(ANSWERS_S)
        return not ending.is_alive()

    def next_rendezvous(self) -> Any:
        if self._static is not None and not self._static.met:
            # Replaces torch's own store, which does not tell which nodes are missing.
            self._handler._store = self._static.meet()
        if self._signs is not None:
            self._signs.leave()
        while True:
            # torch keeps the workers' meeting address of its first round: a later node would wait in vain,
            # and the others would go to a node that may be lost.
            self._handler._bootstrap_store_info = None
            try:
                place, self._place = self._place, None
                info = self._handler.next_rendezvous() if place is None else self._join(place)
                require_awaited()
                self._has_met = True
                if self.store_of_all_rounds is not None:
                    self.ends_with_node_0 = bool(self.store_of_all_rounds.check([_OF_AN_AGENT]))
                if self._signs is not None:
                    self._signs.enter(int(info.rank))
                return info
            except RendezvousTimeoutError:
                if not self._trains_without_this_node:
                    raise
            except (RendezvousClosedError, RendezvousConnectionError) as error:
                if not self._is_outside:
                    raise
                has_ended = f"the job at {self._where} has ended"
                if isinstance(error, RendezvousClosedError):
                    raise NotTakenInError(f"{has_ended}; it has not taken this node in") from None
                lost_text = ", or has lost the node with the rendezvous store; it has not taken this node in"
                raise StoreLostError(f"{has_ended}{lost_text}") from None

    @property
    def _trains_without_this_node(self) -> bool:
        """Return whether a job trains and has not yet taken this node in; the wait may take any time.

        A node that was in the job waits for others to leave the last round, at most for torch's limit.
        """
        return self._is_outside and not self._handler._state_holder.state.closed

    @property
    def _is_outside(self) -> bool:
        """Return whether a job exists, or existed, that has not taken this node in."""
        holder = getattr(self._handler, "_state_holder", None)
        if self._static is not None or holder is None or self._has_met:
            return False
        return holder.state.complete and self._handler._this_node not in holder.state.participants

    @property
    def _is_left_out(self) -> bool:
        """Return whether other nodes train without this node, which has lost its place, or had none."""
        if self._signs is None:
            return False
        state = self._handler._state_holder.state
        goes_on = bool(state.participants) if self._has_met else state.complete or state.round > 0
        return goes_on and self._handler._this_node not in state.participants

    @property
    def _longest_meeting_s(self) -> float:
        """Return the longest meeting, in seconds; infinite: a job that trains may take this node in later.

        torch waits once for the nodes, and once for the workers of each node.
        """
        if self._static is not None:
            return 2 * float(self._handler.timeout.total_seconds())
        settings = getattr(self._handler, "settings", None)
        if settings is None or not self._has_met:
            return math.inf
        return 2 * float(settings.timeout.join.total_seconds())

    @property
    def limit(self) -> str:
        """Return the longest wait of this node for others, in words; empty: no limit."""
        if self._static is not None:
            return f"{self._handler.timeout.total_seconds():g} s at most (--rdzv-conf timeout)"
        settings = getattr(self._handler, "settings", None)
        if settings is None or self._trains_without_this_node:
            return ""
        return f"{settings.timeout.join.total_seconds():g} s at most (--rdzv-conf join_timeout)"

    @property
    def missing(self) -> str:
        """Return the nodes that this node waits for, in words."""
        trouble = self._static.trouble if self._static is not None else ""
        if self.most_nodes == 1:
            return _with(trouble, _OWN_STORE)
        if self._trains_without_this_node:
            return f"the job at {self._where}, which trains, to take this node in"
        missing_text = self._static.missing if self._static is not None else _missing_of(self._handler)
        return _with(trouble, f"{missing_text or 'the other nodes'} at {self._where}")


class _TakesPlace:
    """In the place of torch's operations for a meeting: takes the place of a lost node."""

    def __init__(self, signs: SignsOfLife, rank: int) -> None:
        self._signs, self._rank = signs, rank

    def run(self, *operation: object) -> None:
        """Take the place, at the first of torch's two operations."""
        self._signs.take(self._rank)


class LaterNodes:
    """The nodes that come to a job with `--nnodes MIN:MAX` during training, on node 0.

    The job is asked to take the nodes in after their number has not changed for `last_call_timeout`, torch's
    limit for nodes that meet: nodes that come one after the other cost one start, not one start each.

    Invariant: only a verdict takes a node in, after a save of the newest step, so no step is lost; and only
    if the job can train on the new number of nodes, so that a new node ends no job.

    Args:
        rendezvous: counts the nodes that wait.
        fits: returns whether the job could train on a number of nodes; None if unknown.
        ask: has the job saved and started again with some more nodes.
        clock: seconds, monotonic.
    """

    def __init__(
        self,
        rendezvous: Rendezvous,
        fits: Callable[[int], bool | None],
        ask: Callable[[int], None],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._rendezvous = rendezvous
        self._fits = fits
        self._ask = ask
        self._clock = clock
        self._count = 0
        self._since = 0.0
        self._refused = 0  # the number of nodes that does not fit, as the user was told

    def begin(self) -> None:
        """Begin again: workers are about to start."""
        self._count = self._refused = 0

    def look(self, nodes_here: int) -> None:
        """Ask for the nodes that wait, if their number is stable.

        Args:
            nodes_here: the number of nodes that train.
        """
        count, time_now = self._rendezvous.nodes_that_wait, self._clock()
        if count != self._count:
            self._count, self._since = count, time_now
        if not count or time_now - self._since < self._rendezvous.last_call_s:
            return
        fits = self._fits(nodes_here + count)
        if fits:
            self._since = time_now  # asked again, if an incident was open
            self._ask(count)
        elif fits is False and self._refused != nodes_here + count:
            self._refused = nodes_here + count
            waiting_text = "1 more node waits" if count == 1 else f"{count} more nodes wait"
            output.tell(
                f"[ttp] {waiting_text}: {nodes_here + count} nodes cannot train this job (parallel sizes, "
                "global batch,"
                f" TTP_REPLICA); it goes on with {nodes_here}"
            )


def _with(trouble: str, what: str) -> str:
    return f"{what} ({trouble})" if trouble else what


def _missing_of(handler: Any) -> str:
    """Return the number of missing nodes, in words; with c10d nodes have no numbers before all have met."""
    settings, holder = getattr(handler, "settings", None), getattr(handler, "_state_holder", None)
    if settings is None or holder is None:
        return ""
    nodes_here, least, most_nodes = len(holder.state.participants), settings.min_nodes, settings.max_nodes
    wanted_text = str(most_nodes) if least == most_nodes else f"{least} to {most_nodes}"
    if nodes_here < least:
        return f"{least - nodes_here} more of {wanted_text} nodes"
    return f"more nodes ({nodes_here} of {wanted_text} are there)" if nodes_here < most_nodes else ""
