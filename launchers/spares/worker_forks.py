"""Forks of a waiting spare, which become the workers of a node at a restart: one import serves all workers.

A fork must be like a new process. So the spare has one thread, no child process, no descriptor besides the
streams, and no memory that forks share, such as a lock of `multiprocessing`; the imports have not changed the
random numbers; and no environment variable read by an import has another value in the worker.

The agent must be the parent of each worker. So the spare forks twice, and the kernel gives the orphan to the
agent (PR_SET_CHILD_SUBREAPER). The agent sends the streams afterwards. If the agent gives up, the socket
ends, and the fork ends without running the script.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import pickle
import random
import socket
import subprocess
import sys
import threading
import warnings
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

_PR_SET_CHILD_SUBREAPER, _PR_GET_CHILD_SUBREAPER = 36, 37
_SPARE_STREAMS = 3
# The added niceness of a spare until its imports are over, where the process may lower its niceness again.
NICER = 10


# in the agent


class ForkedWorker(subprocess.Popen[bytes]):
    """A child of this process that another process has forked.

    Args:
        command: of the process, for messages.
        pid: of the process.
    """

    def __init__(self, command: object, pid: int) -> None:
        self._forked_pid = pid
        super().__init__(command)  # type: ignore[call-overload]

    def _execute_child(self, *_args: object) -> None:
        self.pid = self._forked_pid
        self._child_created = True


def stand_back(pid: int) -> None:
    """Give training the processors first: for a process that has just been started, and its threads."""
    with contextlib.suppress(OSError):  # the process has ended
        os.sched_setscheduler(pid, os.SCHED_BATCH, os.sched_param(0))  # wakes up behind others
        if _may_come_back():
            os.setpriority(os.PRIO_PROCESS, pid, os.nice(0) + NICER)


def _may_come_back() -> bool:
    """Return whether a thread may lower its niceness again: most users may not."""
    allowed = []

    def attempt() -> None:  # niceness belongs to a thread: the change ends with the thread
        with contextlib.suppress(OSError):
            nice = os.getpriority(os.PRIO_PROCESS, 0)
            os.setpriority(os.PRIO_PROCESS, 0, nice + 1)
            os.setpriority(os.PRIO_PROCESS, 0, nice)
            allowed.append(True)

    thread = threading.Thread(target=attempt)
    with contextlib.suppress(RuntimeError):  # no more threads
        thread.start()
        thread.join()
    return bool(allowed)


def come_forward(pid: int, nice: int) -> None:
    """Give all threads of a process the usual scheduling and, where permitted, the niceness `nice`."""
    with contextlib.suppress(FileNotFoundError):  # the process has ended
        for thread in (int(path.name) for path in Path(f"/proc/{pid}/task").iterdir()):
            with contextlib.suppress(OSError):
                os.sched_setscheduler(thread, os.SCHED_OTHER, os.sched_param(0))
                os.setpriority(os.PRIO_PROCESS, thread, nice)


@contextlib.contextmanager
def adopting() -> Iterator[None]:
    """Let the kernel make this process the parent of orphans of its descendants meanwhile."""
    prctl = ctypes.CDLL(None, use_errno=True).prctl
    before = ctypes.c_int()
    prctl(_PR_GET_CHILD_SUBREAPER, ctypes.byref(before), 0, 0, 0)
    prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    try:
        yield
    finally:
        prctl(_PR_SET_CHILD_SUBREAPER, before.value, 0, 0, 0)


# in the spare


class Forks:
    """Forks this process, and checks that a fork is like a new process; created before the imports."""

    def __init__(self) -> None:
        self._descriptors, self._shared_memory = _descriptors(), _shared_memory()
        self._python_state = random.getstate()
        self._numpy_state = b""
        import wrapt  # ttprun, which has the other half of this module, starts without wrapt

        wrapt.register_post_import_hook(self._note_numpy, "numpy.random")

    def _note_numpy(self, module: ModuleType) -> None:
        self._numpy_state = _state_of(module)

    def why_not(self) -> str:
        """Return why forks of this process may not be workers; '': forks may be workers."""
        # Not without need: after a fork the first write to each page of this process costs a page fault.
        if _has_threads():
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # Python warns of other threads
                child = os.fork()  # libraries that prepare for forks, such as OpenBLAS, end their threads
            if child == 0:
                os._exit(0)
            os.waitpid(child, 0)
        if _has_threads():
            return "an import starts a thread"
        with contextlib.suppress(ChildProcessError):
            os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
            return "an import starts a process"
        opened = _descriptors() - self._descriptors
        if opened:
            return f"an import opens {min(opened)}"
        shared = _shared_memory() - self._shared_memory
        if shared:
            return f"an import makes shared memory ({min(shared)})"
        numpy_random = sys.modules.get("numpy.random")
        if self._python_state != random.getstate() or (
            numpy_random is not None and self._numpy_state != _state_of(numpy_random)
        ):
            return "an import draws random numbers, or sets their seed"
        return ""

    def fork(self, agent: socket.socket) -> tuple[int, list[int]]:
        """Fork a process that becomes a child of the agent.

        Returns:
            In this process the pid of the fork, 0 without a fork, and no streams; in the fork 0 and the
            streams that the agent has sent.

        Raises:
            EOFError, OSError: in the fork, if the agent has given the fork up.
        """
        reader, writer = os.pipe()  # for the pid; ends when the fork has its streams
        try:
            parent = os.fork()
        except OSError:
            os.close(reader)
            os.close(writer)
            return 0, []
        if parent == 0:
            os.close(reader)
            self._fork_and_exit_parent()
            os.setsid()
            os.write(writer, str(os.getpid()).encode())
            streams = take_streams(agent)
            os.close(writer)
            if (numpy_random := sys.modules.get("numpy.random")) is not None:
                numpy_random.seed()  # Python itself seeds `random` anew after each fork
            return 0, streams
        os.close(writer)
        os.waitpid(parent, 0)
        pid_text = os.read(reader, 32)
        self._reader = reader
        return int(pid_text or b"0"), []

    def wait(self, agent: socket.socket) -> None:
        """Wait for the next order: the newest fork, which reads the same socket, has its streams by then.

        A fork that has died before has left the streams in the socket; they are dropped.
        """
        os.read(self._reader, 1)
        os.close(self._reader)
        _, _, flags, _ = agent.recvmsg(1, 0, socket.MSG_PEEK)
        if flags & socket.MSG_CTRUNC:  # with descriptors, for which this read has no place
            agent.recv(1)

    @staticmethod
    def _fork_and_exit_parent() -> None:
        try:
            if os.fork() == 0:
                return
        except OSError:
            pass
        os._exit(0)


def take_streams(agent: socket.socket) -> list[int]:
    """Return the streams of a worker, which the agent sends.

    Raises:
        EOFError: the agent sends none.
    """
    _, streams, _, _ = socket.recv_fds(agent, 1, _SPARE_STREAMS)
    if len(streams) != _SPARE_STREAMS:
        raise EOFError
    return streams


def _has_threads() -> bool:
    return len(os.listdir("/proc/self/task")) > 1  # noqa: PTH208


def _descriptors() -> set[str]:
    """Return the targets of the open descriptors of this process, without the streams."""
    targets = set()
    for descriptor in os.listdir("/proc/self/fd"):  # noqa: PTH208  (most are no paths)
        if int(descriptor) >= _SPARE_STREAMS:
            with contextlib.suppress(OSError):  # the descriptor of the list itself
                targets.add(os.readlink(f"/proc/self/fd/{descriptor}"))  # noqa: PTH115
    return targets


def _shared_memory() -> set[str]:
    """Return the names of the memory that this process would share with its forks, and could write to."""
    mappings = (line.split(maxsplit=5) for line in Path("/proc/self/maps").read_text().splitlines())
    return {mapping[-1] for mapping in mappings if mapping[1].startswith("rw") and mapping[1].endswith("s")}


def _state_of(numpy_random: ModuleType) -> bytes:
    return pickle.dumps(numpy_random.get_state())
