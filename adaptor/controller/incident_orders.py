"""Makes the messages that an incident orders, and notes which nodes have work then."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from adaptor.controller.incident_state import IncidentState
from adaptor.controller.outcome import Order, Orders
from adaptor.controller.publish_target import PublishTarget
from adaptor.controller.reassignment import Reassignment
from adaptor.controller.save_attempts import Writing
from adaptor.protocol.messages import (
    Addressed,
    EndScript,
    FillPlaces,
    Find,
    Freeze,
    Prepare,
    PresenceProbe,
    Publish,
    Regroup,
    Rename,
    Replace,
    Replacement,
    ToWorker,
)


@dataclass(frozen=True)
class IncidentOrders:
    """The orders of incident `number` of the controller of `term`; `node_of`: of all ranks of the job."""

    number: int
    term: int
    world_size: int
    node_of: Mapping[int, int]
    store: tuple[str, int, bytes]
    state: IncidentState
    writing: Writing
    target: PublishTarget
    reassignment: Reassignment

    def freeze(self, ranks: Iterable[int], *, stacks: bool = False) -> Orders:
        order, node_of = Freeze(self.number, stacks), self.node_of
        return [(node_of[rank], Addressed(rank, order)) for rank in ranks]

    def prepare(self) -> Order:
        self.reassignment.io_stalls.expect([self.target.publisher])
        order = Prepare(
            self.number,
            self.writing.save,
            self.writing.step,
            self.term,
            self.target.number,
            first=self.term == 0 and self.target.is_first,
        )
        return self._ask(order, self.target.publisher)

    def dump(self) -> Orders:
        """A new attempt."""
        writing = self.writing
        self.reassignment.liveness.moved()
        if not writing.uses_script_handlers:  # handlers do not tell how far they are
            self.reassignment.io_stalls.expect(
                self.state.nodes[order.writer] for order in writing.pending.values()
            )
        orders = writing.orders(self.number, self.target.path, self.store, self.state.timeout_s)
        node_of = self.node_of
        return [(node_of[rank], Addressed(rank, order)) for rank, order in orders.items()]

    def publish(self) -> Order:
        """Return the order to check the files, rename the folder and replace the tracker."""
        writing, target = self.writing, self.target
        self.reassignment.io_stalls.expect([target.publisher])
        order = Publish(
            incident=self.number,
            save=writing.save,
            step=writing.step,
            files=writing.all_files,
            writers=writing.holders,
            world_size=self.world_size,
            term=self.term,
            number=target.number,
            written=target.written,
        )
        return self._ask(order, target.publisher)

    def rename(self, rename_rank: int) -> Order:
        """Return the order to have the script's handler on `rename_rank` give the checkpoint its name."""
        return self._to(rename_rank, Rename(self.number, self.writing.step))

    def end_scripts(self, ranks: Iterable[int]) -> Orders:
        """Return an order to each of `ranks` to let its script come to its end."""
        return [self._to(rank, EndScript(self.number)) for rank in ranks]

    def find(self, step: int) -> Order:
        """The agent of this controller looks for `step`, or a later one."""
        return self._ask(Find(self.number, self.writing.save, step, self.target.number), self.term)

    def ask_for(self, ranks: Iterable[int]) -> Orders:
        """Return an order to each of `ranks` to answer that its worker is there."""
        return [self._to(rank, PresenceProbe(self.number)) for rank in ranks]

    def replace(self, ranks: Iterable[int], *, cold: bool) -> Orders:
        """Their agents start a new process for each."""
        attempt = self.writing.attempt
        return [(self.node_of[rank], Replace(self.number, attempt, rank, cold)) for rank in ranks]

    def fill(self, nodes: tuple[int, ...]) -> Orders:
        """The agent of this controller gives the places of lost nodes to spare nodes, if there are any."""
        return [(self.term, FillPlaces(self.number, nodes))] if nodes else []

    def regroup(self, ranks: Iterable[int], replaced: tuple[Replacement, ...], timeout_s: float) -> Orders:
        """Of the newest attempt."""
        host, port, secret = self.store
        order = Regroup(
            incident=self.number,
            attempt=self.writing.attempt,
            step=self.writing.step,
            origin=self.writing.origin,
            replaced=replaced,
            store_host=host,
            store_port=port,
            timeout_s=timeout_s,
            store_secret=secret,
        )
        return [self._to(rank, order) for rank in ranks]

    def _to(self, rank: int, message: ToWorker) -> Order:
        return self.node_of[rank], Addressed(rank, message)

    def _ask(self, order: Prepare | Publish | Find, node: int) -> Order:
        self.target.ask(order, node)
        return node, order
