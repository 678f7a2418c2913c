"""Wakes a main thread that hangs in a collective with a dead rank.

gloo: torch cannot abort a gloo operation (pytorch#130345), and a rank without a connection to the dead rank
waits for as long as its neighbours live. Shutting down the process's own gloo sockets makes every waiting
operation raise at once, except operations that gloo forgets (`adaptor.waits`): few operations are forgotten
when no data is in flight, so the ranks come to rest first, and the wait for a forgotten operation is ended.

Invariant: a main thread whose waits go through `adaptor.waits` (the barrier before an update; with TTP_ONLINE
all waits of the framework, except waits with a time-out of their own) leaves a gloo collective as long as its
`Waker` is called, whatever was in flight, whoever has died, and whichever end was shut first.

NCCL and HCCL: a collective is ended on the device (`devices.accelerator`). Then the device goes on: the
main thread's wait returns as if it had succeeded, and the framework would log, or continue with, unreduced
numbers. So an exception is set in the main thread first. The main thread meets the exception on return from
its current call, like the exception of a broken gloo connection.

Invariant: the exception is set only while the main thread stands still in a call made by the framework, torch
or the script. In the adaptor's code, or in a module of Python, the main thread may hold a lock; a main thread
that waits there comes to the door.
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import os
import socket
import stat
import struct
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FrameType

from adaptor import context
from adaptor.waits import Wait, Waits
from adaptor.worker import stacks

# Per connection: bytes sent and not yet received by the other kernel; bytes not read yet.
_SIOCOUTQ = 0x5411
_FIONREAD = 0x541B
# Ranks stand still when nothing has moved for so long. gloo's thread reads arrived data within some
# milliseconds on a loaded machine.
_STILL_S = 0.012
# Between two looks.
_LOOK_S = 0.002
# The longest wait for a rank that goes on sending: such a rank does not wait for the lost rank.
_PATIENCE_S = 0.5
# Between two calls of a `Waker`: gloo's threads have seen that their connections are shut.
LOOK_S = 0.2
# gloo's threads in which collectives run, by the name that torch gives them.
_RUNNERS = "pt_gloo_runloop"
# Between two looks. A thread at the same instruction in both stands in a call; running code moves on.
_STANDS_STILL_S = 0.02
# The longest wait for a main thread that still queues work for the device: the controller waits for the
# answer to a freeze, too (`devices.accelerator`).
_INTERRUPTION_S = 0.5
_OURS = ("adaptor", "wrapt")


class Waker:
    """Lets the main thread leave a broken collective; call the waker again and again until the main thread
    has left.

    A wait is ended only when no work of gloo can touch the wait's tensors any more: at two calls in a row
    there was no connection to shut, the main thread was in the same wait, and none of gloo's threads has run.

    Args:
        keep_ports: ports of the stores, which carry no collectives.
    """

    def __init__(self, keep_ports: frozenset[int]) -> None:
        self._keep_ports = keep_ports
        self._shut: frozenset[int] = frozenset()
        self._before: tuple[Wait, frozenset[tuple[str, int]]] | None = None
        self._since = 0.0

    def __call__(self, inodes: frozenset[int] | None = None) -> int:
        """Shut all connections that can be shut, and end a wait for work that gloo has forgotten.

        Args:
            inodes: inodes of the sockets that may be shut; None: all, because the process is about to end.

        Returns:
            The number of shut connections.
        """
        shut_inodes = frozenset(
            os.fstat(connection.fileno()).st_ino for connection in _collectives(self._keep_ports, inodes)
        )
        count = shut_collectives(self._keep_ports, inodes)
        fresh = not shut_inodes <= self._shut
        self._shut |= shut_inodes
        wait, runs = context.part(Waits).current, None if fresh else _runs()
        time_now = time.monotonic()
        if wait is None or runs is None or self._before != (wait, runs):
            self._before = None if wait is None or runs is None else (wait, runs)
            self._since = time_now
        elif time_now - self._since >= LOOK_S:
            wait.end()
        return count


def _runs() -> frozenset[tuple[str, int]] | None:
    """Return how often each of gloo's threads in which collectives run has stopped; None: a thread runs."""
    runs_by_thread = set()
    for task in Path("/proc/self/task").iterdir():
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):  # the thread has ended meanwhile
            lines = (line.partition(":\t") for line in (task / "status").read_text().splitlines())
            status = {name: value for name, _, value in lines}
            if status["Name"] == _RUNNERS:
                if not status["State"].startswith("S"):
                    return None
                stops = int(status["voluntary_ctxt_switches"]) + int(status["nonvoluntary_ctxt_switches"])
                runs_by_thread.add((task.name, stops))
    return frozenset(runs_by_thread)


def shut_collectives(keep_ports: frozenset[int], inodes: frozenset[int] | None = None) -> int:
    """Shut down this process's connected TCP sockets, once nothing moves on them; returns how many.

    Args:
        keep_ports: ports that carry no collectives: ports of the stores of the job, at either end.
        inodes: inodes of the sockets that may be shut; None: all, because the process is about to end.
    """
    _come_to_rest(keep_ports, inodes)
    count = 0
    for connection in _collectives(keep_ports, inodes):
        try:
            connection.shutdown(socket.SHUT_RDWR)
            count += 1
        except OSError:  # closed meanwhile
            continue
    return count


def _come_to_rest(keep_ports: frozenset[int], inodes: frozenset[int] | None) -> None:
    """Return when no data is in flight in either direction, or after `_PATIENCE_S`."""
    until = time.monotonic() + _PATIENCE_S
    traffic_before, since = None, time.monotonic()
    while (time_now := time.monotonic()) < until:
        traffic = _traffic(keep_ports, inodes)
        if traffic != traffic_before or any(sent for _, sent, _ in traffic):
            traffic_before, since = traffic, time_now
        elif time_now - since >= _STILL_S:
            return
        time.sleep(_LOOK_S)


def _traffic(keep_ports: frozenset[int], inodes: frozenset[int] | None) -> list[tuple[int, int, int]]:
    """Return port, bytes in flight and bytes unread of each busy connection."""
    busy_connections = []
    for connection in _collectives(keep_ports, inodes):
        try:
            sent, unread = _count(connection, _SIOCOUTQ), _count(connection, _FIONREAD)
            if sent or unread:
                busy_connections.append((connection.getsockname()[1], sent, unread))
        except OSError:
            continue
    return sorted(busy_connections)


def _count(connection: socket.socket, request: int) -> int:
    (count,) = struct.unpack("i", fcntl.ioctl(connection.fileno(), request, bytes(4)))
    return int(count)


def sockets() -> frozenset[int]:
    """Return the inodes of all sockets of this process."""
    inodes = set()
    for entry in Path("/proc/self/fd").iterdir():
        with contextlib.suppress(OSError):  # closed meanwhile
            status = os.fstat(int(entry.name))
            if stat.S_ISSOCK(status.st_mode):
                inodes.add(status.st_ino)
    return frozenset(inodes)


def _collectives(keep_ports: frozenset[int], inodes: frozenset[int] | None) -> Iterator[socket.socket]:
    """Yield a duplicate of each connected TCP socket: closing it leaves the original, which torch owns."""
    for entry in Path("/proc/self/fd").iterdir():
        try:
            fd = int(entry.name)
            status = os.fstat(fd)
            if not stat.S_ISSOCK(status.st_mode) or (inodes is not None and status.st_ino not in inodes):
                continue
            with socket.socket(fileno=os.dup(fd)) as connection:
                if connection.family not in (socket.AF_INET, socket.AF_INET6):
                    continue
                if connection.type != socket.SOCK_STREAM:
                    continue
                if keep_ports.isdisjoint((connection.getpeername()[1], connection.getsockname()[1])):
                    yield connection
        except OSError:  # closed meanwhile, or listening, not connected
            continue


class CollectiveEndedError(RuntimeError):
    """The collective was ended on the device. As NCCL's own errors, it only follows from a fault."""

    def __init__(self) -> None:
        super().__init__("the collective of NCCL or HCCL was ended, as a rank that takes part in it is gone")


def interrupt(may: Callable[[], bool] = lambda: True) -> bool:
    """Set CollectiveEndedError in the main thread once it stands still in a call of others.

    From another thread; takes half a second at most.

    Args:
        may: called once the main thread stands still; False: no exception is set.

    Returns:
        Whether the exception was set.
    """
    until = time.monotonic() + _INTERRUPTION_S
    main = threading.main_thread().ident or 0
    place = _place(main)
    while time.monotonic() < until:
        time.sleep(_STANDS_STILL_S)
        position_before, place = place, _place(main)
        if place is None:
            return False
        if place == position_before:
            return may() and _may_raise(place[0]) and _raise_in(main)
    return False


def _place(thread: int) -> tuple[FrameType, int] | None:
    frame = stacks.frame_of(thread)
    return None if frame is None else (frame, frame.f_lasti)


def _may_raise(frame: FrameType) -> bool:
    module = str(frame.f_globals.get("__name__")).partition(".")[0]
    return module not in _OURS and module not in sys.stdlib_module_names


def _raise_in(thread: int) -> bool:
    error = ctypes.py_object(CollectiveEndedError)
    changed: int = ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(thread), error)
    return changed == 1
