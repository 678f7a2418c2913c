"""Free ports for processes of a test."""

from __future__ import annotations

import itertools
import os
import random
import socket
from pathlib import Path

_FIRST = 10_000
_TRIED = 100
_returned: set[int] = set()  # of those some may not be bound yet


def free_ports(count: int) -> list[int]:
    """Return free ports below the range from which the kernel assigns ports.

    Each port is returned once, until hardly any is left, so that no other process binds it by chance.
    """
    unused = [port for port in _own() if port not in _returned]
    if len(unused) < _TRIED:
        _returned.clear()
        unused = list(_own())
    free = list(itertools.islice(filter(_free, random.sample(unused, min(_TRIED, len(unused)))), count))
    _returned.update(free)
    return free


def free_port() -> int:
    (port,) = free_ports(1)
    return port


def _own() -> range:
    """Return the ports of this process: each worker of pytest-xdist has its share."""
    first, _ = Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()
    workers = int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", "1"))
    number = int(os.environ.get("PYTEST_XDIST_WORKER", "gw0").removeprefix("gw")) % workers
    share = (max(int(first), 2 * _FIRST) - _FIRST) // workers
    return range(_FIRST + number * share, _FIRST + (number + 1) * share)


def _free(port: int) -> bool:
    with socket.socket() as probe:
        try:
            probe.bind(("127.0.0.1", port))
        except OSError:
            return False
    return True
