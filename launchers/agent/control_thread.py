"""The thread of an agent with its event loop.

All decisions on the node are made on the control thread. So an uncaught error is handed to `AgentControl`,
which has the job saved, and a loop that breaks off is run once more for the remaining tasks.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
import threading
from collections.abc import Callable, Coroutine
from functools import partial
from typing import TypeVar, cast

from adaptor import output, text, threads
from adaptor.errors import AdaptorError
from adaptor.launchers.control.agent_connections import EXHAUSTED
from adaptor.launchers.records.log import tell_error
from adaptor.threads import Reserve

T = TypeVar("T")

# Seconds between two checks of a waiting thread that the control thread lives.
ALIVE_S = 1.0
# A control thread without an answer for this time hangs: in the kernel, on a silent disk, or in an error.
# In a large job the thread may be busy for seconds, for instance when all other agents end.
HANGS_S = 30.0
# The same limit after this process was told to end.
HANGS_AT_END_S = 2.0


class ControlThreadError(AdaptorError):
    """The control thread of the agent has ended early, or hangs."""


class ControlThread:
    """An event loop in a thread.

    Args:
        on_failure: is called on the thread with each uncaught error, once per error.
        on_broken_off: is called on the thread after its loop has ended before `stop`, with the reason;
            nothing runs on the thread afterwards.
    """

    def __init__(
        self, on_failure: Callable[[BaseException], None], on_broken_off: Callable[[str], None]
    ) -> None:
        self._on_failure = on_failure
        self._on_broken_off = on_broken_off
        self._tasks: set[asyncio.Task[None]] = set()
        self._failure: BaseException | None = None  # the last error of the thread
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
        """Return whether the living thread does not answer for `limit_s`; called from another thread."""
        if not self._thread.is_alive():
            return False
        answered = threading.Event()
        self.loop.call_soon_threadsafe(answered.set)
        return threads.wait(answered, limit_s) < 0.0

    def wait_for(self, work: Coroutine[object, None, T], limit_s: float = math.inf) -> T:
        """Run `work` on the control thread, called from another thread; return the result.

        Args:
            work: also done after `limit_s`, if the thread goes on later.
            limit_s: the seconds to wait.

        Raises:
            ControlThreadError: the thread has ended, or was too slow.
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
        """End the thread, called from another thread."""
        self._stopping = True
        with contextlib.suppress(RuntimeError):
            self.loop.call_soon_threadsafe(self.loop.stop)
        self._thread.join()
        self.loop.close()

    # on the thread

    def spawn(self, work: Coroutine[object, None, None]) -> None:
        """Run `work` as a task, until `cancel_tasks`."""
        task = self.loop.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._on_done)

    async def cancel_tasks(self) -> None:
        """Cancel all tasks and wait for their ends."""
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
        """Run a loop that has broken off again: the remaining tasks may save the job."""
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
        if isinstance(error, ConnectionError):  # the loss of a connection is noticed elsewhere
            return
        # asyncio only reports these errors, and tries again without descriptors or memory.
        exhausted = isinstance(error, OSError) and error.errno in EXHAUSTED
        if error is None or exhausted or isinstance(error, asyncio.CancelledError):
            reason = "" if error is None else f" ({text.describe(error)})"
            output.tell(f"[ttp] the control thread of ttprun: {context.get('message')}{reason}")
            return
        self._fail(error)

    def _fail(self, error: BaseException) -> None:
        if error is self._failure:  # the loop or the task has handed the error on
            return
        self._failure = error
        self._on_failure(error)
        # Last, because a traceback reads source files, and their disk may hang.
        tell_error("an error in ttprun itself", error)


async def call_in_thread(threads: Reserve, name: str, act: Callable[[], T]) -> T:
    """Return the result of `act`, called in a thread that nobody joins.

    The interpreter would wait at its end for a thread of a pool, and `act` may hang, on a disk or a store.

    Raises:
        RuntimeError: no thread can be started.
    """
    loop = asyncio.get_running_loop()
    answer: asyncio.Future[T] = loop.create_future()

    def settle(report: Callable[[], None]) -> None:
        if not answer.done():  # otherwise the wait was cancelled
            report()

    def run() -> None:
        try:
            report = partial(answer.set_result, act())
        except BaseException as error:  # a task waits for an answer
            report = partial(
                answer.set_exception, error if isinstance(error, Exception) else OSError(text.describe(error))
            )
        with contextlib.suppress(RuntimeError):  # the loop is closed: the job is over
            loop.call_soon_threadsafe(settle, report)

    threads.run(name, run)
    return await answer
