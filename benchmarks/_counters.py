"""The kernel's counters of this process: instructions, and bytes given to sockets."""

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
INSTRUCTIONS = 1  # a HARDWARE event
PAGE_FAULTS = 2  # a SOFTWARE event
_ATTRIBUTES = struct.Struct("=IIQQQQQ")
_ATTRIBUTES_SIZE = 112
_EXCLUDE_KERNEL, _EXCLUDE_HYPERVISOR = 1 << 5, 1 << 6
# tcp(7), `struct tcp_info` of linux/tcp.h: bytes not sent yet, bytes sent, and bytes sent again.
_NOT_SENT, _SENT = struct.Struct("=144xI"), struct.Struct("=200xQQ")
_TCP_INFO_SIZE = _SENT.size


class Counter:
    """A counter of user-space events of the thread that makes it.

    Args:
        kind: the type of perf_event_open(2).
        event: the event of this type.

    Raises:
        OSError: the machine has no such counter, or the user may not use it.
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
        """Return the number of events so far."""
        return int.from_bytes(os.read(self._fd, 8), "little")


def why_no_instructions() -> str:
    """Return why instructions are not counted on this machine; empty if they are."""
    try:
        Counter(HARDWARE, INSTRUCTIONS)
    except OSError as error:
        return str(error.strerror or error)
    return ""


class SentBytes:
    """The bytes that this process has given to its TCP connections, also by gloo's threads."""

    def __init__(self) -> None:
        self._connections: list[int] = []

    def find(self) -> None:
        """Use the connections that are open now; none of them may be closed before the next `find`."""
        open_now = [int(path.name) for path in Path("/proc/self/fd").iterdir()]
        self._connections = [descriptor for descriptor in open_now if _bytes_given(descriptor) is not None]

    def read(self) -> int:
        """Return the bytes since the connections were made."""
        return sum(_bytes_given(descriptor) or 0 for descriptor in self._connections)


def _bytes_given(descriptor: int) -> int | None:
    """Return the bytes given to a connection; None if the descriptor is no TCP connection."""
    info, size = ctypes.create_string_buffer(_TCP_INFO_SIZE), ctypes.c_uint32(_TCP_INFO_SIZE)
    if _libc.getsockopt(descriptor, socket.IPPROTO_TCP, socket.TCP_INFO, info, ctypes.byref(size)):
        return None
    (unsent,) = _NOT_SENT.unpack_from(info)
    sent, resent = _SENT.unpack_from(info)
    return int(unsent + sent - resent)
