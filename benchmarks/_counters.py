"""Counters that the kernel keeps of this process: instructions, and bytes given to sockets."""

from __future__ import annotations

import ctypes
import os
import platform
import socket
import struct
from pathlib import Path

_libc = ctypes.CDLL(None, use_errno=True)
# perf_event_open(2): numbers of the call, kinds of events, and bits of perf_event_attr.
_CALLS = {"x86_64": 298, "aarch64": 241}
HARDWARE, SOFTWARE = 0, 1
INSTRUCTIONS = 1  # of HARDWARE
PAGE_FAULTS = 2  # of SOFTWARE
_ATTRIBUTES = struct.Struct("=IIQQQQQ")
_ATTRIBUTES_SIZE = 112
_EXCLUDE_KERNEL, _EXCLUDE_HYPERVISOR = 1 << 5, 1 << 6
# tcp(7), `struct tcp_info` of linux/tcp.h: bytes that are not sent yet, that were sent, and those sent again.
_NOT_SENT, _SENT = struct.Struct("=144xI"), struct.Struct("=200xQQ")
_TCP_INFO_SIZE = _SENT.size


class Counter:
    """A counter of events in user space, of the thread that makes it.

    Args:
        kind, event: as perf_event_open(2) numbers them.

    Raises:
        OSError: the machine has no such counter, or it is not allowed.
    """

    def __init__(self, kind: int, event: int) -> None:
        number = _CALLS.get(platform.machine())
        if number is None:
            raise OSError(f"perf_event_open has no number here for {platform.machine()}")
        bits = _EXCLUDE_KERNEL | _EXCLUDE_HYPERVISOR
        packed = _ATTRIBUTES.pack(kind, _ATTRIBUTES_SIZE, event, 0, 0, 0, bits)
        attributes = ctypes.create_string_buffer(packed, _ATTRIBUTES_SIZE)
        self._fd = int(_libc.syscall(number, attributes, 0, -1, -1, 0))
        if self._fd < 0:
            error = ctypes.get_errno()
            raise OSError(error, f"perf_event_open: {os.strerror(error)}")

    def read(self) -> int:
        """Return how many events there have been."""
        return int.from_bytes(os.read(self._fd, 8), "little")


def why_no_instructions() -> str:
    """Return why instructions are not counted on this machine; empty where they are."""
    try:
        Counter(HARDWARE, INSTRUCTIONS)
    except OSError as error:
        return str(error.strerror or error)
    return ""


class SentBytes:
    """The bytes that this process has given to its TCP connections, those of gloo's threads included."""

    def __init__(self) -> None:
        self._connections: list[int] = []

    def find(self) -> None:
        """Take the connections that there are now: none may be closed before the next `find`."""
        open_now = [int(path.name) for path in Path("/proc/self/fd").iterdir()]
        self._connections = [one for one in open_now if _given(one) is not None]

    def read(self) -> int:
        """Return their number since the connections were made."""
        return sum(_given(one) or 0 for one in self._connections)


def _given(descriptor: int) -> int | None:
    """Return how many bytes a connection has got; None: it is none of TCP."""
    info, size = ctypes.create_string_buffer(_TCP_INFO_SIZE), ctypes.c_uint32(_TCP_INFO_SIZE)
    if _libc.getsockopt(descriptor, socket.IPPROTO_TCP, socket.TCP_INFO, info, ctypes.byref(size)):
        return None
    (waits,) = _NOT_SENT.unpack_from(info)
    sent, again = _SENT.unpack_from(info)
    return int(waits + sent - again)
