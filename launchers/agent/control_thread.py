"""The thread of an agent that runs its event loop.

Nobody else decides anything on this node. So an error that nobody has caught is handed to `AgentControl`,
which has the job saved, and a loop that has broken off is run once more for what is still at work in it.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
import threading
from collections.abc import Callable, Coroutine
from typing import TypeVar, cast

from adaptor import output, text, threads
from adaptor.errors import AdaptorError
from adaptor.launchers.control.agent_listener import EXHAUSTED
from adaptor.launchers.records.log import tell_error

T = TypeVar("T")

# How often a thread that waits for a result checks that the control thread lives.
ALIVE_S = 1.0
# A thread that does nothing for so long hangs: in the kernel, on a disk that does not answer, or in an error.
# In a large job it may be busy for seconds, for instance when all other agents end.
HANGS_S = 30.0
# The same where this process was told to end, which has no such time.
HANGS_AT_END_S = 2.0


class ControlThreadError(AdaptorError):
    """The control thread of the agent has ended before it was to, or hangs."""


class ControlThread:
    """An event loop in a thread of its own.

    Args:
        on_failure: is called on the thread with an uncaught error, each once.
        on_broken_off: is called on the thread when its loop has ended before `stop`, with the reason; nothing
            runs on it afterwards.
    """

    def __init__(
        self, on_failure: Callable[[BaseException], None], on_broken_off: Callable[[str], None]
    ) -> None:
        self._on_failure = on_failure
        self._on_broken_off = on_broken_off
        self._tasks: set[asyncio.Task[None]] = set()
        self._failure: BaseException | None = None  # the last error of the thread's own
        self._stopping = False
        self.loop = asyncio.new_event_loop()
        self.loop.set_exception_handler(self._on_error)
        self._thread = threading.Thread(target=self._run, name="ttp-agent", daemon=True)

    def start(self) -> None:
        self._thread.start()

    @property
    def has_broken_off(self) -> bool:
        """Return whether the thread has ended by itself."""
        return not self._stopping and not self._thread.is_alive()

    def hangs(self, limit_s: float) -> bool:
        """Return whether the thread is there and does nothing for `limit_s`; called from another one."""
        if not self._thread.is_alive():
            return False
        answered = threading.Event()
        self.loop.call_soon_threadsafe(answered.set)
        return threads.wait(answered, limit_s) < 0.0

    def wait_for(self, work: Coroutine[object, None, T], limit_s: float = math.inf) -> T:
        """Run `work` on the control thread, called from another one; return its result.

        Args:
            work: is done there; also after `limit_s`, where the thread goes on later.
            limit_s: how long it is waited for, in seconds.

        Raises:
            ControlThreadError: the thread has ended, or has not done it in time.
        """
        future = asyncio.run_coroutine_threadsafe(work, self.loop)
        finished = threading.Event()
        future.add_done_callback(lambda _: finished.set())
        while threads.wait(finished, min(ALIVE_S, limit_s)) < 0.0:
            if not self._thread.is_alive() and not future.done():
                work.close()
                raise ControlThreadError("the control thread of ttprun has ended")
            limit_s -= ALIVE_S
            if limit_s <= 0.0:
                raise ControlThreadError("the control thread of ttprun does not answer")
        return future.result()

    def stop(self) -> None:
        """End the thread, called from another one."""
        self._stopping = True
        with contextlib.suppress(RuntimeError):
            self.loop.call_soon_threadsafe(self.loop.stop)
        self._thread.join()
        self.loop.close()

    # on the thread

    def spawn(self, work: Coroutine[object, None, None]) -> None:
        """Run `work` as a task of its own, until `cancel_tasks`."""
        task = self.loop.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._on_done)

    async def cancel_tasks(self) -> None:
        """Cancel all tasks, and wait for their ends."""
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def _on_done(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        error = None if task.cancelled() else task.exception()
        if error is not None:
            self._fail(error)

    def _run(self) -> None:
        try:
            self.loop.run_forever()
        except BaseException as error:  # SystemExit: asyncio hands all others to `_on_error`
            self.loop.call_soon(self._fail, error)
        if not self._stopping:
            self._run_again()

    def _run_again(self) -> None:
        """Go on in a loop that has broken off: what is still at work there may save the job."""
        reason = "it was stopped"
        try:
            self.loop.run_forever()
        except BaseException as error:
            reason = text.describe(error)
            tell_error("an error in ttprun itself", error)
        if not self._stopping:
            self._on_broken_off(reason)

    def _on_error(self, loop: asyncio.AbstractEventLoop, context: dict[str, object]) -> None:
        """Handle an uncaught error of a task or a callback."""
        error = cast("BaseException | None", context.get("exception"))
        if isinstance(error, ConnectionError):  # of a connection that is gone, which is noticed elsewhere
            return
        # asyncio only reports these: it tries again if there was no descriptor or no memory.
        exhausted = isinstance(error, OSError) and error.errno in EXHAUSTED
        if error is None or exhausted or isinstance(error, asyncio.CancelledError):
            reason = "" if error is None else f" ({text.describe(error)})"
            output.tell(f"[ttp] the control thread of ttprun: {context.get('message')}{reason}")
            return
        self._fail(error)

    def _fail(self, error: BaseException) -> None:
        if error is self._failure:  # handed on already, by the loop or by the task
            return
        self._failure = error
        self._on_failure(error)
        # Afterwards: it reads sources, and their disk may hang.
        tell_error("an error in ttprun itself", error)
