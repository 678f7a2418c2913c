"""Waking a main thread that hangs in a broken gloo collective.

Nothing in torch aborts a gloo operation (pytorch#130345), and a rank that is not connected to the dead one
waits for as long as its neighbours live. Shutting down the process's own gloo sockets makes every waiting
operation raise at once. The process is about to end, so nothing is lost by it.
"""

from __future__ import annotations

import os
import socket
import stat
from pathlib import Path


def shut_collectives(keep_ports: frozenset[int]) -> int:
    """Shut down this process's connected TCP sockets; returns how many.

    Args:
        keep_ports: ports that are no collectives: the stores of the job, at the other end or at this one.
    """
    count = 0
    for entry in Path("/proc/self/fd").iterdir():
        try:
            fd = int(entry.name)
            if not stat.S_ISSOCK(os.fstat(fd).st_mode):
                continue
            # A duplicate: closing it leaves the original, which torch owns, as it is.
            with socket.socket(fileno=os.dup(fd)) as connection:
                if connection.family not in (socket.AF_INET, socket.AF_INET6):
                    continue
                if connection.type != socket.SOCK_STREAM:
                    continue
                if not keep_ports.isdisjoint((connection.getpeername()[1], connection.getsockname()[1])):
                    continue
                connection.shutdown(socket.SHUT_RDWR)
                count += 1
        except OSError:  # closed meanwhile, or listening, not connected
            continue
    return count
