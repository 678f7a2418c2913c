"""The spares of a node: processes with the imports of its workers, which wait to replace a worker.

At a restart all workers are forks of one spare. A spare is only faster: after any failure of a spare a cold
process can be started in its place.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
import subprocess
from collections.abc import Callable, Coroutine, Iterator, Mapping, Sequence
from typing import IO, TYPE_CHECKING, Any

import msgspec

from adaptor import output
from adaptor.controller.failures import ending
from adaptor.launchers.agent import processes
from adaptor.launchers.agent.processes import SPARE, WORKER
from adaptor.launchers.spares import worker_forks
from adaptor.protocol import wire
from adaptor.protocol.spare_messages import Become, Forked, Import, Ready, from_spare
from adaptor.protocol.wire import deadline

if TYPE_CHECKING:
    from torch.distributed.elastic.multiprocessing.subprocess_handler import SubprocessHandler

_Stream = IO[str] | IO[bytes]

# The number of spares of a generation that may end by themselves before the agent gives up.
MOST_DEATHS = 3
# A killed process that takes longer hangs in the kernel, and is left behind.
END_S = 2.0
# A waiting spare reads at once; the sockets' buffers take the whole message in any case.
SEND_S = 1.0
# The time for which a restart waits for a spare that still imports: workers that all import by themselves
# would take longer than the rest of these imports.
IMPORTS_S = 120.0
# The imports of a spare hang if no main thread of a spare has used CPU time for so long: a disk answers in
# seconds, and the processors are free, as the workers have ended.
STANDSTILL_S = 10.0
# CPU time of the main threads in STANDSTILL_S, in ticks of the kernel (10 ms), that counts as progress.
_PROGRESS_TICKS = 5
# A fork takes milliseconds; on a machine that starts the workers of many jobs, seconds.
FORK_S = 10.0


class Spare:
    """A process that has imported the modules of the workers, and waits to become a worker.

    Args:
        command: starts `spare_main.py`, with the arguments of the workers.
        environment: of the workers, without variables that differ between ranks.

    Attributes:
        told: the imports were sent
        ready: everything is imported
        no_forks: why forks of the process cannot be workers; "": they can
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
        worker_forks.stand_back(self.process.pid)
        self.told = False
        self.ready = False
        self.no_forks = ""

    async def imports(self, order: Import) -> Ready:
        """Let the process import the modules of `order`, and wait.

        Returns:
            The first module that is left out, or "", and why; or why the process cannot become a worker.

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
                if not isinstance(ready, Ready):
                    raise EOFError
                if not ready.stop_before:
                    break
                reason = reason or ready.unfit
                order = msgspec.structs.replace(order, stop_before=ready.stop_before)
        finally:
            writer.transport.abort()
        self.ready, self.no_forks = not ready.unfit, ready.no_forks
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
        with self._ours:
            self._ours.settimeout(SEND_S)
            self._ours.sendall(wire.frame(Become(dict(environment))))
            _send_streams(self._ours, stdout, stderr)
        return self.process

    def fork(
        self, environment: Mapping[str, str], stdout: _Stream | None, stderr: _Stream | None
    ) -> subprocess.Popen[bytes]:
        """Let a fork of the process be a worker; the process waits on. The arguments are those of `become`.

        Raises:
            OSError: there is no fork, and the process is killed.
        """
        try:
            # The control thread closes the socket when the process ends.
            with self._ours.dup() as ours:
                ours.settimeout(FORK_S)
                with worker_forks.adopting():
                    ours.sendall(wire.frame(Become(dict(environment), fork=True)))
                    answer = wire.receive(ours, from_spare)
                if (
                    not isinstance(answer, Forked)
                    or not answer.pid
                    or processes.parent(answer.pid) != os.getpid()
                ):
                    raise OSError(getattr(answer, "reason", "") or "the spare process cannot fork")
                worker = worker_forks.ForkedWorker(self.process.args, answer.pid)
                _send_streams(ours, stdout, stderr)
        except (EOFError, OSError, msgspec.DecodeError) as error:
            problem = ""
            if isinstance(error, TimeoutError):
                problem = f"has not answered for {FORK_S:g} s"
            elif isinstance(error, EOFError | ConnectionError) or self._ours.fileno() < 0:
                problem = "has ended"
            self.kill()
            text = f"the spare process {self.process.pid} {problem}" if problem else str(error)
            raise OSError(text) from error
        return worker

    @property
    def may_fork(self) -> bool:
        """Return whether forks of the process can be workers."""
        return self.ready and not self.no_forks

    def is_of(self, command: Sequence[object]) -> bool:
        """Return whether the process can run `command` of a worker."""
        return command_of_spare(command) == self.process.args

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
        processes.end_group(self.process.pid)

    async def end(self) -> None:
        """End the process and its children, and wait."""
        self.kill()
        with contextlib.suppress(asyncio.TimeoutError, OSError):
            async with deadline(END_S):
                await self.ended()
            self.process.wait()


def _send_streams(process: socket.socket, stdout: _Stream | None, stderr: _Stream | None) -> None:
    streams = [0, 1 if stdout is None else stdout.fileno(), 2 if stderr is None else stderr.fileno()]
    socket.send_fds(process, [b"\0"], streams)


def command_of_spare(command: Sequence[object]) -> list[str]:
    """Return the command of a spare for workers that `command` starts."""
    return [str(SPARE) if str(word) == str(WORKER) else str(word) for word in command]


def _settle(ended_future: asyncio.Future[None]) -> None:
    if not ended_future.done():  # otherwise the waiting task has not run yet
        ended_future.set_result(None)


class Spares:
    """`count` spares of a node, on its agent's control thread, from `begin` to `end`."""

    def __init__(self, count: int) -> None:
        self._count = count
        self._start: Callable[[], Spare] | None = None
        self.imports: Import | None = None
        self._waiting: list[Spare] = []
        self._tasks: set[asyncio.Task[None]] = set()
        self._deaths = 0
        self._told = ""
        self._beside_workers = True  # workers of the node train, or start
        self._change = asyncio.Event()  # a spare has imported everything, or is none any more

    @property
    def are_ready(self) -> bool:
        """Return whether a spare with complete imports waits."""
        return any(spare.ready for spare in self._waiting)

    @property
    def wanted(self) -> bool:
        """Return whether spares are wanted, and their imports are still unknown."""
        return self._count > 0 and self.imports is None

    def begin(self, start: Callable[[], Spare], imports: Import) -> None:
        """Keep spares from now on, with `imports`."""
        self._start, self.imports, self._beside_workers = start, imports, True
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
        self._kill_stopped()
        for spare in self._waiting:
            if spare.ready:
                self._waiting.remove(spare)
                return spare
        return None

    def _kill_stopped(self) -> None:
        """Kill spares that are stopped: a job would wait for them in vain."""
        for spare in self._waiting:
            if processes.is_stopped(spare.process.pid):
                spare.ready = False
                spare.kill()

    def end_generation(self) -> None:
        """Keep the spares for the next generation: no worker is left, and a spare may import meanwhile."""
        self._beside_workers = False
        self.fill()
        self._start = None
        self._deaths = 0

    async def spare_to_fork(self) -> Spare | None:
        """Return a spare of the last generation that can fork workers, when it has imported everything; the
        spare waits on.

        Returns:
            None without such a spare. Then the next spares import what the new workers import.
        """
        self._kill_stopped()
        await self._await_imports()
        for spare in self._waiting:
            if spare.may_fork:
                return spare
            if spare.no_forks:
                output.tell(f"[ttp] all workers of this node import by themselves: {spare.no_forks}")
        await self.end()
        return None

    async def _await_imports(self) -> None:
        """Return when a spare has imported everything, or when none will; tell of a long wait."""
        loop = asyncio.get_running_loop()
        until, ticks = loop.time() + IMPORTS_S, self._ticks()
        # Spares had the lowest priority beside the workers, which have ended.
        for spare in self._waiting:
            worker_forks.come_forward(spare.process.pid, os.nice(0))
        while self._waiting and not any(spare.ready for spare in self._waiting):
            self._change.clear()
            try:
                async with deadline(STANDSTILL_S):
                    await self._change.wait()
            except asyncio.TimeoutError:
                ticks_before, ticks = ticks, self._ticks()
                hangs = ticks < ticks_before + _PROGRESS_TICKS
                if hangs or loop.time() >= until:
                    problem = f"hangs ({STANDSTILL_S:g} s)" if hangs else f"takes more than {IMPORTS_S:g} s"
                    processes_text = ", ".join(str(spare.process.pid) for spare in self._waiting)
                    output.tell(
                        "[ttp] all workers of this node import by themselves: the import in the spare process"
                        f" {processes_text} {problem}"
                    )
                    return
                output.tell("[ttp] the start of the workers waits for a spare process that still imports")

    def _ticks(self) -> int:
        """Return the CPU time of the spares' main threads, in ticks of the kernel."""
        return sum(processes.main_thread_ticks(spare.process.pid) for spare in self._waiting)

    async def end(self) -> None:
        """End all spares."""
        self._start = self.imports = None
        self._deaths, self._told = 0, ""
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        waiting, self._waiting = self._waiting, []
        await asyncio.gather(*(spare.end() for spare in waiting))

    async def _keep(self, spare: Spare) -> None:
        """Watch a spare from its start to its end; replace the spare up to MOST_DEATHS times."""
        order = self.imports
        assert order is not None
        unfit = ""
        try:
            ready = await spare.imports(msgspec.structs.replace(order, is_alone=not self._beside_workers))
            self._change.set()
            if not spare.ready:
                unfit = ready.unfit
            else:
                if ready.unfit:
                    self._tell_once(partial_imports(ready))
                if self.imports is order:  # the next spare leaves the same modules out at its first attempt
                    self.imports = msgspec.structs.replace(order, stop_before=ready.stop_before)
                await spare.ended()
        except (EOFError, OSError, msgspec.DecodeError):
            pass
        if spare not in self._waiting:  # the spare has become a worker
            return
        self._waiting.remove(spare)
        self._change.set()
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
            f"{count} on this node: {reason}; {condition}new processes import by themselves", reason
        )

    def _tell_once(self, line: str, why: str = "") -> None:
        if self._told != (why or line):
            self._told = why or line
            output.tell(f"[ttp] {line}")


@contextlib.contextmanager
def start_workers_by(
    start: Callable[[SubprocessHandler, Sequence[object], dict[str, str]], subprocess.Popen[bytes] | None],
) -> Iterator[None]:
    """Let torch's agent use the processes of `start` as workers meanwhile.

    Args:
        start: returns a process with the command and the environment of a worker; None: torch starts a new
            process.
    """
    from torch.distributed.elastic.multiprocessing.subprocess_handler import SubprocessHandler

    cold = SubprocessHandler._popen

    def popen(
        handler: SubprocessHandler, command: tuple[str, ...], environment: dict[str, str]
    ) -> subprocess.Popen[bytes]:
        process: subprocess.Popen[bytes] = start(handler, command, environment) or cold(
            handler, command, environment
        )
        return process

    SubprocessHandler._popen = popen  # type: ignore[method-assign, assignment]
    try:
        yield
    finally:
        SubprocessHandler._popen = cold  # type: ignore[method-assign]


@contextlib.contextmanager
def workers_are_forks(spare: Spare | None) -> Iterator[list[str]]:
    """Let torch's agent use forks of `spare` as workers meanwhile; None: new processes.

    Yields:
        Why forks failed, if forks failed: the further workers are new processes.
    """
    failures: list[str] = []

    def start(
        handler: SubprocessHandler, command: Sequence[object], environment: dict[str, str]
    ) -> subprocess.Popen[bytes] | None:
        if spare is None or failures or not spare.is_of(command):
            return None
        try:
            return spare.fork(environment, handler._stdout, handler._stderr)
        except OSError as error:
            failures.append(str(error))
            output.tell(f"[ttp] workers of this node import by themselves: {error}")
            return None

    with start_workers_by(start):
        yield failures


@contextlib.contextmanager
def workers_from_spares(
    spares: Spares, wait_for: Callable[[Coroutine[object, None, Any]], Any]
) -> Iterator[None]:
    """Let torch's agent start workers as forks of one of `spares` meanwhile; without a spare, new processes.

    Args:
        wait_for: runs work on the agent's control thread and waits for the result.
    """
    with workers_are_forks(wait_for(spares.spare_to_fork())) as failures:
        yield
    if failures:  # the next spares import what the new workers import
        wait_for(spares.end())


def partial_imports(ready: Ready) -> str:
    """Return the line for the user about modules that a spare leaves out."""
    return (
        f"spare processes import no module from {ready.stop_before} on, so a replacement takes longer:"
        f" {ready.unfit}"
    )
