"""Reads from text at which address a job is served, and where it sends notices."""

from __future__ import annotations

import ipaddress
import re
from typing import NamedTuple

_HOST = re.compile(r"[\w.-]{1,253}")


class Address(NamedTuple):
    """An address of this machine: a name or IP address, and a TCP port."""

    host: str
    port: int

    def __str__(self) -> str:
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"

    @property
    def is_loopback(self) -> bool:
        """Return whether only this machine reaches it."""
        try:
            return ipaddress.ip_address(self.host).is_loopback
        except ValueError:
            return self.host == "localhost"


def address(text: str) -> Address | None:
    """Return the address that `[HOST:]PORT` names; without HOST it is on 127.0.0.1; None for ''.

    Raises:
        ValueError: it names none.
    """
    if not text:
        return None
    host, colon, port = text.rpartition(":")
    if not re.fullmatch(r"[0-9]{1,5}", port) or not 1 <= int(port) < 1 << 16:
        raise ValueError
    if not colon:
        return Address("127.0.0.1", int(port))
    if host.startswith("[") and host.endswith("]"):
        host = str(ipaddress.IPv6Address(host[1:-1]))
    elif not _HOST.fullmatch(host):
        raise ValueError
    return Address(host, int(port))
