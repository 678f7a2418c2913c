"""The processes of a node: the programs of an agent, /proc, the threads that wait for lifelines, stacks.

Programs are started by their paths: with `python -m` the working directory would be on `sys.path`.

A lifeline is a robust mutex on a rank's board (`Lifeline` in `adaptor.protocol.board`), which the kernel
releases at a death before the memory is freed; one thread waits for each lifeline.

A worker of a job that hangs writes its stacks by itself when asked to freeze (`adaptor.worker.stacks`). The
agent adds native frames, if py-spy is installed, and the stacks of workers that do not answer: by a signal,
whose handler needs no interpreter lock. Invariants: py-spy reads a worker before the worker gets any order,
because an answer may wake its main thread; no worker is ended before its stacks are in the folder. Each of
the two steps takes at most `LOOK_S`.
"""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import os
import re
import shutil
import signal
import subprocess
import sysconfig
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

from adaptor.protocol import environment
from adaptor.protocol.board import BoardMemory

_LAUNCHERS = Path(__file__).absolute().parents[1]
# The first program of a worker.
WORKER = _LAUNCHERS / "agent" / "worker_main.py"
# Waits to become a worker.
SPARE = _LAUNCHERS / "spares" / "spare_main.py"
# Serves the files of a job.
SERVE = _LAUNCHERS / "operations" / "job_server.py"
# Works with object stores.
STORE = _LAUNCHERS / "store" / "store_main.py"

# Fields of /proc/PID/stat after the name, which is in parentheses and may contain any character.
_STATE, _PARENT, _SESSION, _FLAGS, _USER_TIME, _SYSTEM_TIME, _STARTED = 0, 1, 3, 6, 11, 12, 19
_EXITING = 0x4  # the kernel's flag PF_EXITING
_PR_GET_CHILD_SUBREAPER = 37
# Each look finds processes forked during the previous look; a process that is being killed forks no more.
_LOOKS = 20
# py-spy takes half a second, and up to LOOK_S on a busy machine. py-spy and the worker's answer must be done
# before the rank counts as silent (`controller.freeze.HANG_ANSWER_S`).
LOOK_S = 2.0
# A process that is stopped or hangs in the kernel cannot be attached to, but its memory can be read.
_WAYS = ("--native", "--nonblocking")
_NOT_ATTACHED = "TtD"  # the states of such a process


def started(pid: int) -> int:
    """Return when a process began, in ticks of the kernel; -1 for no process or an unreadable file."""
    fields = _stat(pid)
    return int(fields[_STARTED]) if fields else -1


def main_thread_ticks(pid: int) -> int:
    """Return the CPU time of the main thread of a process, in ticks of the kernel; 0 if unreadable."""
    fields = _stat(pid, f"task/{pid}/stat")
    return int(fields[_USER_TIME]) + int(fields[_SYSTEM_TIME]) if fields else 0


def parent(pid: int) -> int:
    """Return the parent of a process; -1 for no process or an unreadable file."""
    fields = _stat(pid)
    return int(fields[_PARENT]) if fields else -1


def is_stopped(pid: int) -> bool:
    """Return whether a process is stopped, by SIGSTOP or from a terminal."""
    return _stat(pid)[_STATE : _STATE + 1] == [b"T"]


def end_group(leader: int) -> None:
    """End every process of a worker's process group (torch elastic starts each worker in a session)."""
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(leader, signal.SIGKILL)


def end_sessions(leaders: Mapping[int, int]) -> None:
    """End every process in the sessions of dead workers, whatever its process group.

    The kernel reuses the number of a session leader only after the last process of the session. A later
    process with the number leads a session of its own and is left alone.

    An agent that is a subreaper, or the first process of a container, becomes the parent of orphans.
    Orphans count as processes until their status is taken: the function takes it.

    Args:
        leaders: the start of each worker (ticks of the kernel), by process number.
    """
    known_processes: set[tuple[int, int]] = set()
    for _ in range(_LOOKS):
        reused = {leader for leader, at in leaders.items() if started(leader) not in (-1, at)}
        new = {
            member
            for member in _members(leaders.keys() - reused)
            if member not in known_processes and member[0] not in leaders
        }
        if not new:
            return
        for pid, at in new:
            _end(pid, at)
        known_processes |= new


def _members(sessions: set[int]) -> Iterator[tuple[int, int]]:
    """Yield number and start of each living process of the sessions; take the status of orphans."""
    try:
        names = os.listdir("/proc")  # noqa: PTH208  (thousands of names, and no paths)
    except OSError:  # no descriptors; at least the group has been ended
        return
    has_orphans = _gets_orphans()
    for pid in (int(name) for name in names if name.isdigit()):
        # A file of /proc takes 50 times as long as the call, and a machine has thousands of processes.
        with contextlib.suppress(OSError):
            if not has_orphans and os.getsid(pid) not in sessions:
                continue
        fields = _stat(pid)
        if not fields or fields[_STATE] == b"X":
            continue
        if fields[_STATE] == b"Z":
            _take_status(pid, int(fields[_PARENT]), int(fields[_SESSION]))
        elif int(fields[_SESSION]) in sessions:
            yield pid, int(fields[_STARTED])


def _gets_orphans() -> bool:
    """Return whether the kernel makes this process the parent of orphans."""
    is_reaper = ctypes.c_int(0)
    ctypes.CDLL(None).prctl(_PR_GET_CHILD_SUBREAPER, ctypes.byref(is_reaper), 0, 0, 0)
    return os.getpid() == 1 or bool(is_reaper)


def _take_status(pid: int, parent: int, session: int) -> None:
    """Take the status of an orphan that has ended.

    The parent of a process takes its status. Processes started by the agent are in the agent's session or
    lead a session; so any other child is an orphan, possibly from an earlier generation of workers.
    """
    if parent == os.getpid() and session not in (pid, os.getsid(0)):
        with contextlib.suppress(ChildProcessError):
            os.waitpid(pid, os.WNOHANG)


def _end(pid: int, at: int) -> None:
    """End a process by a descriptor: its number may already belong to another process."""
    with contextlib.suppress(OSError):
        descriptor = os.pidfd_open(pid)
        try:
            if started(pid) == at:
                signal.pidfd_send_signal(descriptor, signal.SIGKILL)
        finally:
            os.close(descriptor)


def _stat(pid: int, file: str = "stat") -> list[bytes]:
    try:
        return Path(f"/proc/{pid}/{file}").read_bytes().rpartition(b")")[2].split()
    except OSError:
        return []


def is_exiting(pid: int) -> bool:
    """Return whether the process has ended or is exiting; an exec also releases the lifeline."""
    if fields := _stat(pid):
        return bool(int(fields[_FLAGS]) & _EXITING)
    return not Path(f"/proc/{pid}").exists()  # if no file can be opened, the pidfd reports the end


def is_traced(pid: int) -> bool:
    """Return True if a debugger holds the process."""
    with contextlib.suppress(OSError):
        return bool(re.search(r"^TracerPid:\t[1-9]", _status(pid), re.MULTILINE))
    return False


class WorkerLifelines:
    """The lifelines of the workers of one agent, on its control thread.

    Args:
        on_dying: is called on the thread with rank and process number of a dying worker, and the Unix time.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop, on_dying: Callable[[int, int, float], None]) -> None:
        self._loop = loop
        self._on_dying = on_dying
        self._boards: BoardMemory | None = None
        self._ended: dict[int, asyncio.Future[None]] = {}  # by rank; done after the waiting thread
        self._replaced: Counter[int] = Counter()  # the replaced processes of each rank
        self.held: set[int] = set()  # ranks whose process still holds its lifeline (it has not exec-ed)

    def begin(self, boards: BoardMemory) -> None:
        """Begin a generation, with its boards."""
        self._boards = boards

    def watch(self, rank: int, pid: int) -> None:
        """Wait for the lifeline of the process `pid`, which is the worker of `rank`."""
        boards = self._boards
        assert boards is not None
        lifeline, process = boards.lifelines[rank], self._replaced[rank]

        ended_future: asyncio.Future[None] = self._loop.create_future()

        def wait() -> None:
            try:
                if not lifeline.wait(lambda: self._boards is boards and self._replaced[rank] == process):
                    return
                if is_exiting(pid):
                    self._loop.call_soon_threadsafe(self._on_dying, rank, pid, time.time())
                else:
                    self.held.discard(rank)
            finally:
                self._loop.call_soon_threadsafe(ended_future.set_result, None)

        thread = threading.Thread(target=wait, name=f"ttp-lifeline-{rank}", daemon=True)
        try:
            thread.start()
        except RuntimeError:  # no more threads: the pidfd reports the death a moment later
            return
        self.held.add(rank)
        self._ended[rank] = ended_future

    async def let_go(self, rank: int) -> None:
        """Stop waiting for the lifeline of `rank`, which gets another process."""
        self._replaced[rank] += 1  # ends the waiting thread
        if rank in self._ended:
            await asyncio.shield(self._ended[rank])
        self.held.discard(rank)

    async def end(self) -> None:
        """End the generation and all waiting threads."""
        self._boards = None
        self.held = set()
        await asyncio.gather(*self._ended.values())
        self._ended = {}
        self._replaced.clear()


def end(process: subprocess.Popen[bytes], within_s: float) -> None:
    """Close the stdin of a program, which ends the program.

    Args:
        within_s: the seconds after which the process is killed.
    """
    assert process.stdin is not None
    process.stdin.close()
    try:
        process.wait(within_s)
    except subprocess.TimeoutExpired:
        process.kill()


class StackCollector:
    """The collector of the stacks of a generation of workers.

    Args:
        folder: the stack folder of the first incident; `environment.stack_folder_of` names the others.
        scratch: the agent's folder, to which workers write stacks after the signal.
    """

    def __init__(self, folder: Path, scratch: Path) -> None:
        self._first = self._folder = folder
        self._scratch = scratch
        self._py_spy = find_py_spy()
        self._called = False
        self._asked_at: dict[int, tuple[int, int]] = {}  # process, and its written bytes when asked

    def begin_incident(self, incident: int) -> None:
        """Begin an incident in which the job hangs."""
        self._folder = environment.stack_folder_of(self._first, incident)

    def end_incident(self) -> None:
        """End an incident after which all ranks train on."""
        self._called = False

    async def look(self, processes: Mapping[int, int]) -> None:
        """Read native stacks with py-spy, before any order.

        Args:
            processes: process numbers by rank.
        """
        self._called = True
        if self._py_spy is not None:
            await _for_each(processes, self._look_at)

    async def ask(self, processes: Mapping[int, int]) -> None:
        """Send the signal to workers that have not written their stacks."""
        if self._called:
            await _for_each(processes, self._ask)

    async def keep(self, processes: Mapping[int, int]) -> None:
        """Keep the stacks written after the signal; the workers are about to be ended."""
        if self._called:
            await _for_each(processes, self._keep)

    async def take(self, rank: int, pid: int) -> None:
        """Have one worker write its stacks, and keep them: only this worker is about to be ended."""
        if self._called:
            await _for_each({rank: pid}, self._ask)
            await _for_each({rank: pid}, self._await)
            await _for_each({rank: pid}, self._keep)

    def _look_at(self, rank: int, pid: int) -> None:
        for way in _WAYS[_state(pid)[0] in _NOT_ATTACHED :]:
            command = [str(self._py_spy), "dump", way, "--pid", str(pid)]
            completed = subprocess.run(command, capture_output=True, text=True, timeout=LOOK_S, check=False)
            if completed.returncode == 0:
                break
        self._write(self._folder / f"rank{rank}.native.txt", completed.stdout or completed.stderr)

    def _ask(self, rank: int, pid: int) -> None:
        if not self._of(rank).exists() and _handles(pid, environment.STACK_SIGNAL):
            self._asked_at[rank] = pid, self._size(rank)
            os.kill(pid, environment.STACK_SIGNAL)

    def _await(self, rank: int, pid: int) -> None:
        """Wait until a worker has written stacks after the signal; a stopped worker writes nothing."""
        until = time.monotonic() + LOOK_S
        size_before = self._written_before(rank, pid)
        size_now = self._size(rank)
        while not self._of(rank).exists() and time.monotonic() < until:
            time.sleep(0.05)
            size = self._size(rank)
            if size > size_before and size == size_now:
                return
            size_now = size

    def _size(self, rank: int) -> int:
        return environment.stack_scratch(self._scratch, rank).stat().st_size

    def _written_before(self, rank: int, pid: int) -> int:
        """Return the bytes written by a process in earlier incidents."""
        asked_pid, size = self._asked_at.get(rank, (pid, 0))
        return size if asked_pid == pid else 0

    def _keep(self, rank: int, pid: int) -> None:
        if not self._of(rank).exists():
            written = environment.stack_scratch(self._scratch, rank).read_bytes()
            stack_text = written[self._written_before(rank, pid) :].decode(errors="replace")
            self._write(self._of(rank), stack_text or f"Nothing was written. State: {_state(pid)}\n")

    def _of(self, rank: int) -> Path:
        return self._folder / f"rank{rank}.txt"

    def _write(self, path: Path, text: str) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)


async def _for_each(processes: Mapping[int, int], act: Callable[[int, int], None]) -> None:
    """Call `act` for each rank in its own thread, so that a file system that hangs blocks no event loop."""

    def safely(rank: int, pid: int) -> None:
        # Stacks are for people: after any error the incident goes on without stacks.
        with contextlib.suppress(OSError, subprocess.TimeoutExpired):
            act(rank, pid)

    threads = [
        threading.Thread(target=safely, args=process, name="ttp-stack-collector", daemon=True)
        for process in processes.items()
    ]
    until = time.monotonic() + LOOK_S
    with contextlib.suppress(RuntimeError):  # no more threads: the incident goes on without stacks
        for thread in threads:
            thread.start()
        for thread in threads:
            await asyncio.to_thread(thread.join, max(0.0, until - time.monotonic()))


def find_py_spy() -> str | None:
    """Return the path of py-spy in this environment or on PATH, None without one."""
    return shutil.which("py-spy", path=sysconfig.get_path("scripts")) or shutil.which("py-spy")


def _handles(pid: int, number: int) -> bool:
    """Return whether a process has a handler for a signal, which otherwise would end the process."""
    caught = re.search(r"^SigCgt:\s*([0-9a-f]+)$", _status(pid), re.MULTILINE)
    return caught is not None and bool(int(caught[1], 16) >> (number - 1) & 1)


def _state(pid: int) -> str:
    """Return the state of a process in the kernel's words: T (stopped), D (disk sleep)."""
    state = re.search(r"^State:\s*(.+)$", _status(pid), re.MULTILINE)
    return state[1] if state is not None else "gone"


def _status(pid: int) -> str:
    return Path(f"/proc/{pid}/status").read_text()
