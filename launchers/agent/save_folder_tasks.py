"""Runs an agent's work in the save folder in threads, because the disk may be slow or hang."""

from __future__ import annotations

import asyncio
import contextlib
import functools
from collections.abc import Callable
from pathlib import Path
from typing import ParamSpec, TypeVar

from adaptor import text
from adaptor.checkpoint import disk, left_overs, publish, tracker
from adaptor.errors import CheckpointError
from adaptor.protocol import naming
from adaptor.protocol.deadline import deadline
from adaptor.protocol.messages import Find, FromAgent, Prepare, Prepared, Publish, Published, PublishFailed
from adaptor.threads import Reserve

P = ParamSpec("P")
T = TypeVar("T")

# The time to remove what was not published; the next start removes what is left.
CLEAN_S = 30.0
# Threads that are there before an incident: one for the job, one where that hangs.
RESERVE = 2


class SaveFolderTasks:
    """Carries out the controller's orders; an error becomes an answer, because the controller waits for one.

    Attributes:
        moved: a count of progress, like that on the workers' boards
        saves: the save folders that workers of this node train for; an order for another folder is refused
    """

    def __init__(self) -> None:
        self._threads = Reserve("ttp-save-folder")
        self._threads.prepare(RESERVE)
        self._running: set[Callable[[], object]] = set()
        self.moved = 0
        self.saves: set[str] = set()
        self._expects_parts = False

    def close(self) -> None:
        self._threads.close()

    @property
    def busy(self) -> bool:
        """Return True while a thread is at work, even if nobody waits for it any more."""
        return bool(self._running)

    def expect_parts(self) -> None:
        """Get ready, in a thread and once, to join last words of parts: a fault leaves no time for it."""
        if not self._expects_parts:
            self._expects_parts = True
            with contextlib.suppress(RuntimeError):  # without a thread the publish does it itself
                self._threads.run("ttp-get-ready", publish.get_ready)

    async def do(self, order: Prepare | Publish | Find, node: int, generation: str) -> FromAgent:
        """Carry out `order` and return the answer.

        Args:
            order: of the controller.
            node: this node.
            generation: of the workers of the incident; it is part of folder names.
        """
        root = Path(order.save)
        match order:
            case Prepare():
                make = functools.partial(
                    publish.prepare, root, order.step, order.term, order.number, generation, first=order.first
                )
                try:
                    folder = await self._in_thread(self._below, root, make)
                except Exception as error:
                    return Prepared(node, order.incident, "", _line(error), order.number)
                return Prepared(node, order.incident, str(folder), "", order.number)
            case Publish():
                act = functools.partial(self._publish, root, order, generation)
            case Find():
                act = functools.partial(publish.find, root, order.step, generation)
        try:
            step = await self._in_thread(self._below, root, act)
            path = str(root / naming.final_name(step))
            return Published(node, order.incident, step, path, order.number)
        except Exception as error:
            return PublishFailed(node, order.incident, _line(error), order.number)

    def _below(self, root: Path, act: Callable[[], T]) -> T:
        """Call `act`, after making sure that `root` is a folder that this node's workers save to."""
        if not any(disk.is_same(root, Path(save)) for save in self.saves):
            known_folders = " or ".join(sorted(self.saves)) or "none yet"
            raise CheckpointError(f"{root}: is not the save folder of this node's workers ({known_folders})")
        return act()

    def _publish(self, root: Path, order: Publish, generation: str) -> int:
        publish_arguments = (order.step, order.files, order.writers, order.world_size, generation)
        publish.publish(root, *publish_arguments, order.term, order.number, order.written, self._move)
        # The other side of a cut network may have saved a later step.
        return max(order.step, tracker.tracked_step(root) or 0)

    def _move(self) -> None:
        self.moved += 1

    async def clean(
        self, root: Path, term: int | None = None, generation: str = "", *, saves: bool = True
    ) -> None:
        """Call `left_overs.clean`, and wait for it CLEAN_S at most: the disk may hang.

        `saves`: see there.
        """
        with contextlib.suppress(asyncio.TimeoutError):
            async with deadline(CLEAN_S):
                await self._in_thread(left_overs.clean, root, term, generation, saves=saves)

    async def _in_thread(self, act: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """Run `act` in a thread that is not joined: a thread that hangs must not keep ttprun from its end."""
        job = functools.partial(act, *args, **kwargs)
        loop = asyncio.get_running_loop()
        answer: asyncio.Future[T] = loop.create_future()

        def end(tell: Callable[[], None]) -> None:
            self._running.discard(job)
            if not answer.done():  # else nobody waits any longer
                tell()

        def run() -> None:
            try:
                tell = functools.partial(answer.set_result, job())
            except BaseException as error:  # an answer is waited for, whatever it is
                job_error = error if isinstance(error, Exception) else OSError(_line(error))
                tell = functools.partial(answer.set_exception, job_error)
            with contextlib.suppress(RuntimeError):  # the loop is closed: the job is over
                loop.call_soon_threadsafe(end, tell)

        self._running.add(job)
        try:
            self._threads.run("ttp-save-folder", run)
        except RuntimeError:
            self._running.discard(job)
            raise
        return await answer


def _line(error: BaseException) -> str:
    return text.encodable(str(error)) if isinstance(error, CheckpointError) else text.describe(error)
