"""The spares of a node: processes with the imports of its workers, which wait to replace a worker.

Spares belong to one generation of workers. A spare is only faster: after any failure of a spare a cold
process can be started in its place.
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

# The number of spares of a generation that may end by themselves before the agent gives up.
MOST_DEATHS = 3
# A killed process that takes longer hangs in the kernel, and is left behind.
END_S = 2.0
# A waiting spare reads at once; the sockets' buffers take the whole message in any case.
SEND_S = 1.0


class Spare:
    """A process that has imported the modules of the workers, and waits to become a worker.

    Args:
        command: starts `spare_main.py`, with the arguments of the workers.
        environment: of the workers, without variables that differ between ranks.

    Attributes:
        told: the imports were sent
        ready: everything is imported
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
        """Let the process import the modules of `order`, and wait.

        Returns:
            The first module that is left out, if any, and why the first attempt left out modules; or why the
                process cannot
            become a worker.

        Raises:
            EOFError, OSError: the process has ended.
        """
        self.told = True
        reason = ""
        reader, writer = await asyncio.open_unix_connection(sock=self._ours.dup())
        try:
            while True:  # each attempt imports fewer modules
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
        """Let the process be a worker with `environment`.

        Args:
            stdout, stderr: of the worker; None: the streams of the agent.

        Raises:
            OSError: the process has ended.
        """
        streams = [0, 1 if stdout is None else stdout.fileno(), 2 if stderr is None else stderr.fileno()]
        with self._ours:
            self._ours.settimeout(SEND_S)
            self._ours.sendall(wire.frame(Become(dict(environment))))
            socket.send_fds(self._ours, [b"\0"], streams)
        return self.process

    async def ended(self) -> None:
        """Return after the end of the process."""
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
        """End the process and its children, without waiting."""
        self._ours.close()
        procfs.end_group(self.process.pid)

    async def end(self) -> None:
        """End the process and its children, and wait."""
        self.kill()
        with contextlib.suppress(asyncio.TimeoutError, OSError):
            async with deadline(END_S):
                await self.ended()
            self.process.wait()


def _settle(ended_future: asyncio.Future[None]) -> None:
    if not ended_future.done():  # otherwise the waiting task has not run yet
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
        """Return whether a spare with complete imports waits."""
        return any(spare.ready for spare in self._waiting)

    @property
    def wanted(self) -> bool:
        """Return whether spares are wanted, and their imports are still unknown."""
        return self._count > 0 and self._imports is None

    def begin(self, start: Callable[[], Spare], imports: Import) -> None:
        """Keep spares from now on, with `imports`."""
        self._start, self._imports = start, imports
        self.fill()

    def fill(self) -> None:
        """Start missing spares; not during an incident, which they would disturb."""
        while self._start is not None and len(self._waiting) < self._count:
            try:
                spare = self._start()
            except OSError as error:  # no process, descriptor or memory: tried again after an incident
                self._tell(f"no more can be started ({error.strerror})")
                return
            self._waiting.append(spare)
            task = asyncio.get_running_loop().create_task(self._keep(spare))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

    def take(self) -> Spare | None:
        """Return a spare with complete imports; None without one."""
        for spare in self._waiting:
            if spare.ready:
                self._waiting.remove(spare)
                return spare
        return None

    async def end(self) -> None:
        """End the generation."""
        self._start = self._imports = None
        self._deaths, self._told = 0, ""
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        waiting, self._waiting = self._waiting, []
        await asyncio.gather(*(spare.end() for spare in waiting))

    async def _keep(self, spare: Spare) -> None:
        """Watch a spare from its start to its end; replace the spare up to MOST_DEATHS times."""
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
                if self._imports is order:  # the next spare leaves the same modules out at its first attempt
                    self._imports = msgspec.structs.replace(order, stop_before=ready.stop_before)
                await spare.ended()
        except (EOFError, OSError, msgspec.DecodeError):
            pass
        if spare not in self._waiting:  # the spare has become a worker
            return
        self._waiting.remove(spare)
        await spare.end()
        self._deaths += 1
        if unfit:
            self._stop(unfit)
        elif self._deaths == MOST_DEATHS:
            end_text = ending(spare.process.returncode or 0)
            self._stop(
                f"{MOST_DEATHS} have ended, the last one {end_text} (each takes the memory of its imports:"
                " dmesg says whether the kernel has ended it)"
            )
        else:
            self.fill()

    def _stop(self, reason: str) -> None:
        """Stop making spares."""
        if self._start is not None:
            self._start = None
            self._tell(reason)

    def _tell(self, reason: str) -> None:
        """Print the number of spares, once for each reason."""
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
    """Return the line for the user about modules that a spare leaves out."""
    return (
        f"spare processes import no module from {ready.stop_before} on, so a replacement takes longer:"
        f" {ready.unfit}"
    )
