"""An agent's jobs on the save folder, each in a thread: the disk may be slow, the event loop must not be."""

from __future__ import annotations

import asyncio
import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

from adaptor.checkpoint import publish
from adaptor.control.messages import Prepare, Prepared, Publish, Published, PublishFailed
from adaptor.errors import CheckpointError


class Filing:
    """Does what the controller orders; whatever goes wrong is an answer, because one is waited for."""

    def __init__(self) -> None:
        self._running: set[Callable[[], Any]] = set()

    @property
    def busy(self) -> bool:
        """Whether a thread is at work, even if nobody waits for it any longer."""
        return bool(self._running)

    async def prepare(self, order: Prepare) -> Prepared:
        try:
            folder = await self._in_thread(publish.prepare, Path(order.save), order.step, order.term)
        except Exception as error:
            return Prepared(order.incident, "", _line(error))
        return Prepared(order.incident, str(folder), "")

    async def publish(self, order: Publish, generation: str) -> Published | PublishFailed:
        """`generation`: of the workers that the incident is of."""
        root = Path(order.save)
        rest = (order.files, order.writers, order.world_size, generation, order.term)

        def act() -> int:
            publish.publish(root, order.step, *rest)
            # The other side of a cut network may have saved a later step.
            return max(order.step, publish.tracked_step(root) or 0)

        try:
            step = await self._in_thread(act)
        except Exception as error:
            return PublishFailed(order.incident, _line(error))
        return Published(order.incident, step, order.save)

    async def _in_thread(self, act: Callable[..., Any], *args: Any) -> Any:
        job = functools.partial(act, *args)

        def run() -> Any:
            try:
                return job()
            finally:
                self._running.discard(job)

        self._running.add(job)
        return await asyncio.get_running_loop().run_in_executor(None, run)


def _line(error: Exception) -> str:
    return str(error) if isinstance(error, CheckpointError) else f"{type(error).__name__}: {error}"
