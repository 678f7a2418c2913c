"""The user on the other side of a unix socket, as the kernel knows it.

Abstract sockets have no permissions. Both sides are known: who accepts sees who has connected, and who
connects sees who has called `listen`.
"""

from __future__ import annotations

import os
import socket
import struct
from typing import Protocol


class Socket(Protocol):
    """A socket, or the part of one that asyncio shows."""

    def getsockopt(self, level: int, option: int, size: int, /) -> bytes: ...


_CREDENTIALS = "3i"  # pid, uid, gid


def is_same_user(connection: Socket) -> bool:
    """Return whether the process on the other side of `connection` has this process's user."""
    peer_credentials = connection.getsockopt(
        socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize(_CREDENTIALS)
    )
    return bool(struct.unpack(_CREDENTIALS, peer_credentials)[1] == os.getuid())
