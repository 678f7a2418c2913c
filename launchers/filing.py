"""An agent's jobs on the save folder, each in a thread: the disk may be slow, the event loop must not be."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

from adaptor.checkpoint import publish
from adaptor.control.deadline import deadline
from adaptor.control.messages import (
    Find,
    FromAgent,
    Prepare,
    Prepared,
    Publish,
    Published,
    PublishFailed,
)
from adaptor.errors import CheckpointError

# What was not published is removed within it, or by the next start: some files, on a disk that answers.
CLEAN_S = 30.0


class Filing:
    """Does what the controller orders; whatever goes wrong is an answer, because one is waited for.

    moved  how far it has come, as the boards of workers tell it of theirs
    """

    def __init__(self) -> None:
        self._running: set[Callable[[], Any]] = set()
        self.moved = 0

    @property
    def busy(self) -> bool:
        """Whether a thread is at work, even if nobody waits for it any longer."""
        return bool(self._running)

    async def do(self, order: Prepare | Publish | Find, generation: str) -> FromAgent:
        """Returns the answer; `generation`: of the workers that the incident is of."""
        root = Path(order.save)
        match order:
            case Prepare():
                where = (root, order.step, order.term, order.number, generation)
                try:
                    folder = await self._in_thread(publish.prepare, *where)
                except Exception as error:
                    return Prepared(order.incident, "", _line(error), order.number)
                return Prepared(order.incident, str(folder), "", order.number)
            case Publish():
                act = functools.partial(self._publish, root, order, generation)
            case Find():
                act = functools.partial(publish.find, root, order.step, generation)
        try:
            return Published(order.incident, await self._in_thread(act), order.save)
        except Exception as error:
            return PublishFailed(order.incident, _line(error), order.number)

    def _publish(self, root: Path, order: Publish, generation: str) -> int:
        what = (order.step, order.files, order.writers, order.world_size, generation)
        publish.publish(root, *what, order.term, order.number, order.written, self._move)
        # The other side of a cut network may have saved a later step.
        return max(order.step, publish.tracked_step(root) or 0)

    def _move(self) -> None:
        self.moved += 1

    async def clean(self, root: Path, term: int, generation: str) -> None:
        """See `publish.clean`; a disk that hangs is not waited for for ever."""
        with contextlib.suppress(asyncio.TimeoutError):
            async with deadline(CLEAN_S):
                await self._in_thread(publish.clean, root, term, generation)

    async def _in_thread(self, act: Callable[..., Any], *args: Any) -> Any:
        """A thread of its own: one that hangs must not keep ttprun from its end, as one of a pool would."""
        job = functools.partial(act, *args)
        loop = asyncio.get_running_loop()
        done: asyncio.Future[Any] = loop.create_future()

        def tell(tell_it: Callable[[Any], None], what: Any) -> None:
            self._running.discard(job)
            if not done.done():  # else nobody waits any longer
                tell_it(what)

        def run() -> None:
            try:
                answer = done.set_result, job()
            except Exception as error:
                answer = done.set_exception, error
            with contextlib.suppress(RuntimeError):  # the loop is closed: the job is over
                loop.call_soon_threadsafe(tell, *answer)

        self._running.add(job)
        threading.Thread(target=run, name="ttp-filing", daemon=True).start()
        return await done


def _line(error: Exception) -> str:
    return str(error) if isinstance(error, CheckpointError) else f"{type(error).__name__}: {error}"
