"""An agent's tasks on the save folder, in threads as in the launcher: a thread that hangs is not ended."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from adaptor.protocol.messages import Find, FromAgent, Prepare, Prepared, Publish, Published, PublishFailed
from tests.simulation.clock import Body, Process

if TYPE_CHECKING:
    from tests.simulation.world import World


class SaveFolderTasks(Process):
    """Tasks of an agent in one generation; the threads live on into later generations, with the agent.

    Attributes:
        before: the tasks of the same agent in the previous generation.
    """

    def __init__(self, world: World, node: int, machine: int, previous: SaveFolderTasks | None) -> None:
        super().__init__(world.clock)
        self._machine = machine
        self.world = world
        self.before = previous
        self._node = node
        self._running = 0
        self.progress = 0

    @property
    def busy(self) -> bool:
        return self._running > 0 or (self.before is not None and self.before.busy)

    def end(self) -> None:
        """End all threads, with the agent."""
        self.alive = False
        if self.before is not None:
            self.before.end()

    def prepare(self, order: Prepare, answer: Callable[[FromAgent], None]) -> None:
        def work() -> Body[None]:
            try:
                folder = yield from self.world.disk.prepare(order, self._machine, self.world.generation)
                result = Prepared(
                    self._node, order.incident, f"{order.save_folder}/{folder}", "", order.number
                )
            except Exception as error:
                result = Prepared(self._node, order.incident, "", str(error), order.number)
            answer(result)

        self._run(work())

    def publish(self, order: Publish | Find, answer: Callable[[FromAgent], None]) -> None:
        def work() -> Body[None]:
            disk = self.world.disk
            result: Published | PublishFailed
            try:
                if isinstance(order, Find):
                    step = yield from disk.find(order, self._machine, self.world.generation)
                else:
                    step = yield from disk.publish(order, self, self._machine)
                result = Published(self._node, order.incident, step, order.save_folder, order.number)
            except AssertionError:
                raise
            except Exception as error:
                result = PublishFailed(self._node, order.incident, str(error), order.number)
            answer(result)

        self._run(work())

    def clean(self, term: int) -> None:
        self._run(self.world.disk.clean(self._machine, term, self.world.generation))

    def _run(self, work: Body[None]) -> None:
        def run() -> Body[None]:
            self._running += 1
            yield from work
            self._running -= 1

        self.thread(run())
