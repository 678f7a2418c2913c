"""An agent's tasks on the save folder, in threads as in the launcher's: nobody ends one that hangs."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from adaptor.protocol.messages import Find, FromAgent, Prepare, Prepared, Publish, Published, PublishFailed
from tests.simulation.clock import Body, Process

if TYPE_CHECKING:
    from tests.simulation.world import World


class SaveFolderTasks(Process):
    """Of the agent of `node` in one generation; its threads live on into the next ones, with the agent.

    before  of the same agent, in the generation before
    """

    def __init__(self, world: World, node: int, machine: int, before: SaveFolderTasks | None) -> None:
        super().__init__(world.clock)
        self._machine = machine
        self.world = world
        self.before = before
        self._node = node
        self._running = 0
        self.moved = 0

    @property
    def busy(self) -> bool:
        return self._running > 0 or (self.before is not None and self.before.busy)

    def end(self) -> None:
        """The agent ends, with all of its threads."""
        self.alive = False
        if self.before is not None:
            self.before.end()

    def prepare(self, order: Prepare, answer: Callable[[FromAgent], None]) -> None:
        def work() -> Body[None]:
            try:
                folder = yield from self.world.disk.prepare(order, self._machine, self.world.generation)
                said = Prepared(self._node, order.incident, f"{order.save_folder}/{folder}", "", order.number)
            except Exception as error:
                said = Prepared(self._node, order.incident, "", str(error), order.number)
            answer(said)

        self._run(work())

    def publish(self, order: Publish | Find, answer: Callable[[FromAgent], None]) -> None:
        def work() -> Body[None]:
            disk = self.world.disk
            said: Published | PublishFailed
            try:
                if isinstance(order, Find):
                    step = yield from disk.find(order, self._machine, self.world.generation)
                else:
                    step = yield from disk.publish(order, self, self._machine)
                said = Published(self._node, order.incident, step, order.save_folder, order.number)
            except Exception as error:
                said = PublishFailed(self._node, order.incident, str(error), order.number)
            answer(said)

        self._run(work())

    def clean(self, term: int) -> None:
        self._run(self.world.disk.clean(self._machine, term, self.world.generation))

    def _run(self, work: Body[None]) -> None:
        def run() -> Body[None]:
            self._running += 1
            yield from work
            self._running -= 1

        self.thread(run())
