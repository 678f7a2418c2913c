"""Ports for what a test starts."""

from __future__ import annotations

import itertools
import random
import socket
from pathlib import Path


def free_ports(count: int) -> list[int]:
    """Below those that the kernel gives away: until somebody binds them nobody else gets them by chance."""
    first, _ = Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()
    candidates = random.sample(range(10_000, max(int(first), 20_000)), 100)
    return list(itertools.islice(filter(_free, candidates), count))


def free_port() -> int:
    (port,) = free_ports(1)
    return port


def _free(port: int) -> bool:
    with socket.socket() as probe:
        try:
            probe.bind(("127.0.0.1", port))
        except OSError:
            return False
    return True
