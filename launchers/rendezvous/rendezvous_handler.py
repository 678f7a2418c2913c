"""Wraps torch's rendezvous: a wait names the missing nodes, and a signal ends it.

The loss of the node with the store does not end an agent: the survivors are still to save.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

from torch.distributed import PrefixStore, TCPStore
from torch.distributed.elastic.rendezvous.api import (
    RendezvousClosedError,
    RendezvousConnectionError,
    RendezvousTimeoutError,
)

from adaptor.launchers.rendezvous import c10d_store, node_order, rendezvous_liveness
from adaptor.launchers.rendezvous.rendezvous_errors import NotTakenInError, plain_node
from adaptor.launchers.rendezvous.waiting import AGAIN_S, FIRST_S, Interrupted, wait_for

# How often node 0 checks which nodes have come: the store's own wait writes two warnings at each time-out.
_LOOK_S = 0.1
# How often the agent with the store looks whether the others have left, which is a matter of milliseconds;
# and for how long at most: one may be lost since, and on a busy machine an agent takes seconds to end.
_LOOK_FOR_END_S = 0.02
_OTHERS_LEAVE_S = 10.0
_LEFT, _ALL_LEFT = "ttp/left", "ttp/all have left"
# The most nodes that are named in a line.
_NAMED = 4
_ALL = "all are here"
_OWN_STORE = "the rendezvous store of this node"
# Backends whose store is in the process of an agent.
_STORE_OF_AN_AGENT = ("static", "c10d")


class Registry:
    """Wraps torch's registry of rendezvous handlers: making one connects to its store, which may wait."""

    def __init__(self, registry: Any) -> None:
        self._registry = registry

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
            handler, has_store = c10d_store.connect(self._registry, params, note)
            rendezvous = Rendezvous(handler, params.endpoint, params.max_nodes, has_store=has_store)
            if params.backend != "static":
                node_order.put_in_order(handler, has_store=has_store)
            return rendezvous

        return wait_for(
            connect,
            lambda: _with(trouble, rendezvous_name),
            limit=lambda: c10d_store.limit(params),
            first_s=AGAIN_S if is_alone else FIRST_S,
        )


class Rendezvous:
    """Wraps a rendezvous handler of torch, and passes on all of its methods.

    torch is told of nodes that wait to join only when the job is saved (`take_in`). While the store does not
    answer, none counts as waiting: it may be on the node that is lost.

    Args:
        handler: torch's.
        endpoint: the address at which the nodes meet.
        most_nodes: the number of nodes that may come.
        has_store: whether the store ends with this agent; a static rendezvous has it on node 0.
    """

    def __init__(
        self, handler: Any, endpoint: str = "", most_nodes: int = 1, *, has_store: bool = False
    ) -> None:
        self._handler = handler
        self._where = endpoint
        self._most = most_nodes
        self._static = _Static(handler) if handler.get_backend() == "static" else None
        self._signs = rendezvous_liveness.watch(handler)
        self._has_store = self._static.is_host if self._static is not None else has_store
        self._tell_of_end: Callable[[], None] | None = None
        self._interrupted = False
        self._takes_in = False
        self._has_met = False

    def __getattr__(self, name: str) -> Any:
        return getattr(self._handler, name)

    @property
    def nodes(self) -> str:
        """Return MIN:MAX, where the job may train with fewer nodes than may come; else ''."""
        settings = getattr(self._handler, "settings", None)
        if self._static is not None or settings is None or settings.min_nodes == settings.max_nodes:
            return ""
        return f"{settings.min_nodes}:{settings.max_nodes}"

    @property
    def last_call_s(self) -> float:
        """Return how long nodes wait for more of them, in seconds, where their number may change."""
        return float(self._handler.settings.timeout.last_call.total_seconds())

    @property
    def has_met_before(self) -> bool:
        """Return whether the job had workers before the nodes met last, on whichever nodes."""
        holder = getattr(self._handler, "_state_holder", None)
        return self._static is None and holder is not None and holder.state.round > 0

    @property
    def store_of_all_rounds(self) -> Any:
        """Return the store that a node can read before it joins (c10d); None: there is none of that kind."""
        return getattr(self._handler, "_store", None) if self._handler.get_backend() == "c10d" else None

    @property
    def nodes_that_wait(self) -> int:
        """Return how many nodes wait to be taken in."""
        try:
            waiting = int(self._handler.num_nodes_waiting())
        except RendezvousConnectionError:
            return 0
        return waiting + (self._signs.nodes_that_meet if self._signs is not None else 0)

    def take_in(self) -> None:
        """Let torch start all workers again, with the nodes that wait: the job is saved for that."""
        self._takes_in = True

    def num_nodes_waiting(self) -> int:
        """Return for torch whether it is to start all workers again, which counts as no restart.

        It would do so as soon as a node waits, and lose the steps since the last checkpoint.
        """
        return int(self._takes_in)

    def meet(self, work: Callable[[], None]) -> None:
        """Run `work`, which meets the other nodes.

        Raises:
            Interrupted: a signal came first.
        """
        try:
            first_s = AGAIN_S if self._most == 1 else FIRST_S
            wait_for(work, lambda: self.missing, limit=lambda: self.limit, first_s=first_s)
        except Interrupted:
            self._interrupted = True
            raise

    def stay_for_others(self, store: Any, nodes: int) -> None:
        """Let the agent with the store leave last, at the end of a job that needs no other start.

        torch's exit barrier lets it leave as soon as the last agent has entered, and another agent that is
        still to ask the store prints a traceback. So each of the others counts itself in the store when it
        uses it last (`shutdown`), and the agent with the store returns from here when all have, or after
        `_OTHERS_LEAVE_S`.

        Args:
            store: of the last round.
            nodes: that were in it.
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
        """End the rendezvous for all nodes, but not if a signal has ended this one alone (as torchrun)."""
        has_ended = self._interrupted or bool(self._handler.shutdown())
        if self._tell_of_end is not None:
            with contextlib.suppress(RuntimeError):  # the store is lost: nobody is left who waits
                self._tell_of_end()
        return has_ended

    def next_rendezvous(self) -> Any:
        if self._static is not None and not self._static.met:
            # Before torch makes its own store, which does not tell which nodes are missing.
            self._handler._store = self._static.meet()
        self._takes_in = False
        if self._signs is not None:
            self._signs.leave()
        while True:
            # torch keeps the address at which workers meet from its first round on: a node that was not there
            # then would wait for it in vain, and others would go to a node that may be lost.
            self._handler._bootstrap_store_info = None
            try:
                info = self._handler.next_rendezvous()
                self._has_met = True
                if self._signs is not None:
                    self._signs.enter(int(info.rank))
                return info
            except RendezvousTimeoutError:
                if not self._trains_without_this_node:
                    raise
            except (RendezvousClosedError, RendezvousConnectionError) as error:
                if not self._is_outside:
                    raise
                lost = ", or has lost the node with the rendezvous store"
                lost_note = "" if isinstance(error, RendezvousClosedError) else lost
                raise NotTakenInError(
                    f"the job at {self._where} has ended{lost_note}; it has not taken this node in"
                ) from None

    @property
    def _trains_without_this_node(self) -> bool:
        """Return whether the job is there, and has not yet taken this node in: it may wait for any time.

        A node that was in the job waits for others that are to leave the last round, and for no longer than
        torch says.
        """
        return self._is_outside and not self._handler._state_holder.state.closed

    @property
    def _is_outside(self) -> bool:
        """Return whether there is a job, or was one, which has not taken this node in."""
        holder = getattr(self._handler, "_state_holder", None)
        if self._static is not None or holder is None or self._has_met:
            return False
        return holder.state.complete and self._handler._this_node not in holder.state.participants

    @property
    def limit(self) -> str:
        """Return for how long this node waits for others at most, in words; empty: for any time."""
        if self._static is not None:
            return f"{self._handler.timeout.total_seconds():g} s at most (--rdzv-conf timeout)"
        settings = getattr(self._handler, "settings", None)
        if settings is None or self._trains_without_this_node:
            return ""
        return f"{settings.timeout.join.total_seconds():g} s at most (--rdzv-conf join_timeout)"

    @property
    def missing(self) -> str:
        """Return the nodes that this one waits for, in words."""
        trouble = self._static.trouble if self._static is not None else ""
        if self._most == 1:
            return _with(trouble, _OWN_STORE)
        if self._trains_without_this_node:
            return f"the job at {self._where}, which trains, to take this node in"
        missing_text = self._static.missing if self._static is not None else _missing_of(self._handler)
        return _with(trouble, f"{missing_text or 'the other nodes'} at {self._where}")


class _Static:
    """The first meeting of nodes that each have a number (--node-rank), over the store on node 0.

    Attributes:
        is_host: this node has the store
        met: all have come
        missing: which of them are awaited, in words
        trouble: why the address of node 0 cannot be reached, in words; '' where that is not known
    """

    def __init__(self, handler: Any) -> None:
        self._node, self._nodes = int(handler.rank), int(handler.world_size)
        self._run_id = str(handler.run_id)
        self.is_host = self._node == 0
        self._timeout = handler.timeout
        self._address, self._port = str(handler.master_addr), int(handler.master_port)
        self.met = False
        self.missing = self.trouble = ""
        self._name_missing([0] if self._node else range(1, self._nodes))

    def meet(self) -> TCPStore:
        """Return the store, once all nodes have come to it.

        Raises:
            RendezvousConnectionError: the store on node 0 has not answered in the time that torch gives.
            RendezvousTimeoutError: some have not come in the time that torch gives them.
        """
        deadline = time.monotonic() + self._timeout.total_seconds()
        if self._node:
            c10d_store.wait_until_it_answers(self._address, self._port, deadline, self._note)
        else:
            c10d_store.wait_until_it_resolves(self._address, deadline, self._note)
        store = TCPStore(
            self._address,
            self._port,
            self._nodes,
            self.is_host,
            self._timeout,
            wait_for_workers=False,
            multi_tenant=True,
        )
        keys = PrefixStore(f"{self._run_id}/ttp/met", store)
        keys.set(_here(self._node), "")
        if self._node == 0:
            self._wait_for_all(keys, PrefixStore(self._run_id, store), deadline)
            keys.set(_ALL, "")
        else:
            self.missing = f"the other nodes of {self._nodes}"
            try:
                keys.wait([_ALL], timedelta(seconds=max(deadline - time.monotonic(), 0.001)))
            except RuntimeError:  # a store that is gone raises the same as one whose time is over
                if time.monotonic() < deadline:
                    raise
                raise RendezvousTimeoutError(self.missing) from None
        self.met, self.missing = True, ""
        return store

    def _note(self, trouble: str) -> None:
        self.trouble = trouble

    def _wait_for_all(self, keys: PrefixStore, torchs: PrefixStore, deadline: float) -> None:
        awaited = list(range(1, self._nodes))
        while awaited:
            if not keys.check([_here(awaited[0])]):
                self._require_ours(awaited[0], keys, torchs)
                if time.monotonic() >= deadline:
                    raise RendezvousTimeoutError(self.missing)
                time.sleep(_LOOK_S)
                continue
            awaited = [node for node in awaited if not keys.check([_here(node)])]
            self._name_missing(awaited)

    def _require_ours(self, node: int, keys: PrefixStore, torchs: PrefixStore) -> None:
        """Refuse a node that is in torch's rendezvous, and has not said before that it is here."""
        if torchs.check([f"torchelastic/role_info/{node}"]) and not keys.check([_here(node)]):
            raise plain_node(f"node {self._node}", f"node {node}")

    def _name_missing(self, nodes: Sequence[int]) -> None:
        named = ", ".join(map(str, nodes[:_NAMED]))
        omitted = f" and {len(nodes) - _NAMED} more" if len(nodes) > _NAMED else ""
        self.missing = (
            f"node{'s' if len(nodes) > 1 else ''} {named}{omitted} of {self._nodes}" if nodes else ""
        )


def _with(trouble: str, what: str) -> str:
    return f"{what} ({trouble})" if trouble else what


def _here(node: int) -> str:
    return f"here/{node}"


def _missing_of(handler: Any) -> str:
    """Return how many nodes are missing, in words; with c10d they have no numbers before all have met."""
    settings, holder = getattr(handler, "settings", None), getattr(handler, "_state_holder", None)
    if settings is None or holder is None:
        return ""
    nodes_here, least, most_nodes = len(holder.state.participants), settings.min_nodes, settings.max_nodes
    wanted_text = str(most_nodes) if least == most_nodes else f"{least} to {most_nodes}"
    if nodes_here < least:
        return f"{least - nodes_here} more of {wanted_text} nodes"
    return f"more nodes ({nodes_here} of {wanted_text} are there)" if nodes_here < most_nodes else ""
