"""The spares of a node: processes that have imported what its workers have, and wait to replace one.

They belong to one generation of workers. A spare is for convenience: whatever becomes of it, a cold process
can be started in its place.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
import subprocess
from collections.abc import Callable, Mapping
from typing import IO

import msgspec

from adaptor import output
from adaptor.controller.failures import ending
from adaptor.launchers.agent import procfs
from adaptor.protocol import wire
from adaptor.protocol.deadline import deadline
from adaptor.protocol.spare_messages import Become, Import, Ready, from_spare

_Stream = IO[str] | IO[bytes]

# Spares of a generation that may end by themselves before no more are made.
MOST_DEATHS = 3
# Who is killed and has not ended after this hangs in the kernel, and is left to the end of this process.
END_S = 2.0
# A spare that waits reads at once what it is told; the sockets' buffers take all of it in any case.
SEND_S = 1.0


class Spare:
    """A process that has imported what the workers have, and waits to become one.

    Args:
        command: starts `spare_main.py`, with the arguments of the workers.
        environment: that of the workers, without what is another one's for each rank.

    Attributes:
        told: it has been told what to import
        ready: it has imported everything
    """

    def __init__(self, command: list[str], environment: Mapping[str, str]) -> None:
        self._ours, theirs = socket.socketpair()
        with theirs:
            try:
                self.process: subprocess.Popen[bytes] = subprocess.Popen(
                    command,
                    env=dict(environment),
                    stdin=theirs.fileno(),
                    stdout=subprocess.DEVNULL,
                    stderr=subprocess.DEVNULL,
                    start_new_session=True,
                )
            except BaseException:
                self._ours.close()
                raise
        self.told = False
        self.ready = False

    async def imports(self, order: Import) -> Ready:
        """Let the process import the modules of `order`, and return when it has.

        Returns:
            The first module that is left out, if any, and why the first attempt left out modules; or why this
            process cannot become a worker.

        Raises:
            EOFError, OSError: the process has ended.
        """
        self.told = True
        reason = ""
        reader, writer = await asyncio.open_unix_connection(sock=self._ours.dup())
        try:
            while True:  # each time it imports fewer modules
                writer.write(wire.frame(order))
                ready = await wire.read(reader, from_spare)
                if not ready.stop_before:
                    break
                reason = reason or ready.unfit
                order = msgspec.structs.replace(order, stop_before=ready.stop_before)
        finally:
            writer.transport.abort()
        self.ready = not ready.unfit
        return Ready(reason, order.stop_before) if self.ready else ready

    def become(
        self, environment: Mapping[str, str], stdout: _Stream | None, stderr: _Stream | None
    ) -> subprocess.Popen[bytes]:
        """Let it be a worker with this `environment`.

        It writes to `stdout` and `stderr`; None: to those of this process.

        Raises:
            OSError: it has ended.
        """
        streams = [0, 1 if stdout is None else stdout.fileno(), 2 if stderr is None else stderr.fileno()]
        with self._ours:
            self._ours.settimeout(SEND_S)
            self._ours.sendall(wire.frame(Become(dict(environment))))
            socket.send_fds(self._ours, [b"\0"], streams)
        return self.process

    async def ended(self) -> None:
        """Return when it has ended."""
        loop = asyncio.get_running_loop()
        ended_future: asyncio.Future[None] = loop.create_future()
        descriptor = os.pidfd_open(self.process.pid)
        try:
            loop.add_reader(descriptor, _settle, ended_future)
            await ended_future
        finally:
            loop.remove_reader(descriptor)
            os.close(descriptor)

    def kill(self) -> None:
        """End the process and those that it has started, without waiting for their end."""
        self._ours.close()
        procfs.end_group(self.process.pid)

    async def end(self) -> None:
        """End it, and what it has started."""
        self.kill()
        with contextlib.suppress(asyncio.TimeoutError, OSError):
            async with deadline(END_S):
                await self.ended()
            self.process.wait()


def _settle(ended_future: asyncio.Future[None]) -> None:
    if not ended_future.done():  # else it is about to be noticed
        ended_future.set_result(None)


class Spares:
    """`count` spares of a node, on its agent's control thread; from `begin` to `end` in each generation."""

    def __init__(self, count: int) -> None:
        self._count = count
        self._start: Callable[[], Spare] | None = None
        self._imports: Import | None = None
        self._waiting: list[Spare] = []
        self._tasks: set[asyncio.Task[None]] = set()
        self._deaths = 0
        self._told = ""

    @property
    def are_ready(self) -> bool:
        """Return whether one waits that has imported everything."""
        return any(spare.ready for spare in self._waiting)

    @property
    def wanted(self) -> bool:
        """Return whether there are to be spares, and nobody has said yet what they import."""
        return self._count > 0 and self._imports is None

    def begin(self, start: Callable[[], Spare], imports: Import) -> None:
        """Keep spares from now on, which import `imports`."""
        self._start, self._imports = start, imports
        self.fill()

    def fill(self) -> None:
        """Start as many as are missing: not in an incident, which they would disturb."""
        while self._start is not None and len(self._waiting) < self._count:
            try:
                spare = self._start()
            except OSError as error:  # no process, no descriptor, no memory: tried again after an incident
                self._tell(f"no more can be started ({error.strerror})")
                return
            self._waiting.append(spare)
            task = asyncio.get_running_loop().create_task(self._keep(spare))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

    def take(self) -> Spare | None:
        """Return one that has imported everything; None where there is none."""
        for spare in self._waiting:
            if spare.ready:
                self._waiting.remove(spare)
                return spare
        return None

    async def end(self) -> None:
        """The generation is over."""
        self._start = self._imports = None
        self._deaths, self._told = 0, ""
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        waiting, self._waiting = self._waiting, []
        await asyncio.gather(*(spare.end() for spare in waiting))

    async def _keep(self, spare: Spare) -> None:
        """Watch a spare from its start to its end; replace it, up to MOST_DEATHS times."""
        order = self._imports
        assert order is not None
        unfit = ""
        try:
            ready = await spare.imports(order)
            if not spare.ready:
                unfit = ready.unfit
            else:
                if ready.unfit:
                    self._tell_once(partial_imports(ready))
                if self._imports is order:  # the next spare leaves out the same modules at its first attempt
                    self._imports = msgspec.structs.replace(order, stop_before=ready.stop_before)
                await spare.ended()
        except (EOFError, OSError, msgspec.DecodeError):
            pass
        if spare not in self._waiting:  # it is a worker
            return
        self._waiting.remove(spare)
        await spare.end()
        self._deaths += 1
        if unfit:
            self._stop(unfit)
        elif self._deaths == MOST_DEATHS:
            how = ending(spare.process.returncode or 0)
            self._stop(
                f"{MOST_DEATHS} have ended, the last one {how} (each takes the memory of its imports: dmesg"
                " says whether the kernel has ended it)"
            )
        else:
            self.fill()

    def _stop(self, reason: str) -> None:
        """Make no more of them."""
        if self._start is not None:
            self._start = None
            self._tell(reason)

    def _tell(self, reason: str) -> None:
        """Print how many spares there are, once for each reason."""
        count, condition = "no spare process waits", ""
        if self._waiting:
            count = f"only {len(self._waiting)} of {self._count} spare processes wait"
            condition = "once they are used up, "
        self._tell_once(
            f"{count} on this node: {reason}; {condition}a rank that fails is replaced by a new process",
            reason,
        )

    def _tell_once(self, line: str, why: str = "") -> None:
        if self._told != (why or line):
            self._told = why or line
            output.tell(f"[ttp] {line}")


def partial_imports(ready: Ready) -> str:
    """Return the line for the user about modules that a spare does not import."""
    return (
        f"spare processes import no module from {ready.stop_before} on, so a replacement takes longer:"
        f" {ready.unfit}"
    )
