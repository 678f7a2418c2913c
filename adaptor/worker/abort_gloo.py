"""Waking a main thread that hangs in a broken gloo collective.

Nothing in torch aborts a gloo operation (pytorch#130345), and a rank that is not connected to the dead one
waits for as long as its neighbours live. Shutting down the process's own gloo sockets makes every waiting
operation raise at once.

But gloo forgets a send that is half written when its connection breaks (pair.cc, signalException: of an
unbound buffer it does not tell), and who waits for it waits to the time-out of the group. So nothing may be
on its way: when all ranks stand still, what was sent has been received, or nobody reads it.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import socket
import stat
import struct
import time
from collections.abc import Iterator
from pathlib import Path

# Of a connection: bytes that are sent and not yet received by the other kernel; bytes that nobody has read.
_SIOCOUTQ = 0x5411
_FIONREAD = 0x541B
# Ranks stand still when nothing has moved for so long. gloo's thread reads what is there within some
# milliseconds on a loaded machine.
_STILL_S = 0.012
# Between two looks.
_LOOK_S = 0.002
# A rank that goes on sending is not waited for longer: it does not wait for the lost one.
_PATIENCE_S = 0.5


def shut_collectives(keep_ports: frozenset[int], inodes: frozenset[int] | None = None) -> int:
    """Shut down this process's connected TCP sockets, once nothing moves on them; returns how many.

    Args:
        keep_ports: ports that are no collectives: the stores of the job, at the other end or at this one.
        inodes: of the sockets that may be shut; None: all, because the process is about to end.
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
    """Return when nothing is on its way from here and nothing arrives, or after `_PATIENCE_S`."""
    until = time.monotonic() + _PATIENCE_S
    before, since = None, time.monotonic()
    while (now := time.monotonic()) < until:
        traffic = _traffic(keep_ports, inodes)
        if traffic != before or any(sent for _, sent, _ in traffic):
            before, since = traffic, now
        elif now - since >= _STILL_S:
            return
        time.sleep(_LOOK_S)


def _traffic(keep_ports: frozenset[int], inodes: frozenset[int] | None) -> list[tuple[int, int, int]]:
    """Return the port of each connection on which something is, bytes on their way and bytes unread."""
    found = []
    for connection in _collectives(keep_ports, inodes):
        try:
            sent, unread = _count(connection, _SIOCOUTQ), _count(connection, _FIONREAD)
            if sent or unread:
                found.append((connection.getsockname()[1], sent, unread))
        except OSError:
            continue
    return sorted(found)


def _count(connection: socket.socket, request: int) -> int:
    (count,) = struct.unpack("i", fcntl.ioctl(connection.fileno(), request, bytes(4)))
    return int(count)


def sockets() -> frozenset[int]:
    """Return the inodes of all sockets of this process."""
    found = set()
    for entry in Path("/proc/self/fd").iterdir():
        with contextlib.suppress(OSError):  # closed meanwhile
            status = os.fstat(int(entry.name))
            if stat.S_ISSOCK(status.st_mode):
                found.add(status.st_ino)
    return frozenset(found)


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
