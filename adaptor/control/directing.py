"""What an incident orders, in messages; and who is expected to move then."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from adaptor.control.detour import Detour
from adaptor.control.messages import Find, Freeze, Prepare, Publish, Rename
from adaptor.control.place import Place
from adaptor.control.stages import Directive
from adaptor.control.writing import Writing


@dataclass(frozen=True)
class Directing:
    """Of the incident of this `number`, of the controller of `term`; `nodes`: of the ranks that are alive."""

    number: int
    term: int
    nodes: dict[int, int]
    world_size: int
    store: tuple[str, int]
    timeout_s: float
    writing: Writing
    place: Place
    detour: Detour

    def freeze(self, ranks: Iterable[int], *, stacks: bool = False) -> list[Directive]:
        order = Freeze(self.number, stacks)
        return [Directive(order, rank=rank) for rank in ranks]

    def prepare(self) -> Directive:
        self.detour.standstill.expect([self.place.publisher])
        order = Prepare(self.number, self.writing.save, self.writing.step, self.term, self.place.number)
        return Directive(order, node=self.place.publisher)

    def dump(self) -> list[Directive]:
        """A new attempt."""
        writing = self.writing
        self.detour.roll_call.moved()
        if not writing.handled:  # handlers do not tell how far they are
            self.detour.standstill.expect(self.nodes[order.writer] for order in writing.pending.values())
        orders = writing.orders(self.number, self.place.path, self.store, self.timeout_s)
        return [Directive(order, rank=rank) for rank, order in orders.items()]

    def publish(self) -> Directive:
        writing, place = self.writing, self.place
        self.detour.standstill.expect([place.publisher])
        order = Publish(
            *(self.number, writing.save, writing.step, writing.all_files, writing.holders),
            *(self.world_size, self.term, place.number, place.written),
        )
        return Directive(order, node=place.publisher)

    def rename(self, namer: int) -> Directive:
        return Directive(Rename(self.number, self.writing.step), rank=namer)

    def find(self, step: int) -> Directive:
        """The agent of this controller looks for `step`, or a later one."""
        return Directive(Find(self.number, self.writing.save, step, self.place.number), node=self.term)
