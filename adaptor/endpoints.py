"""Reads from text the address at which a job is served, and the targets of notices."""

from __future__ import annotations

import ipaddress
import re
import shlex
from typing import NamedTuple
from urllib.parse import urlsplit

_HOST = re.compile(r"[\w.-]{1,253}")


class HostPort(NamedTuple):
    """An address of this machine: a name or IP address, and a TCP port."""

    host: str
    port: int

    def __str__(self) -> str:
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"

    @property
    def is_loopback(self) -> bool:
        """Return whether only this machine reaches the address."""
        try:
            return ipaddress.ip_address(self.host).is_loopback
        except ValueError:
            return self.host == "localhost"


def address(text: str) -> HostPort | None:
    """Return the address named by `[HOST:]PORT`; the default HOST is 127.0.0.1; None for ''.

    Raises:
        ValueError: the text names no address.
    """
    if not text:
        return None
    host, colon, port = text.rpartition(":")
    if not re.fullmatch(r"[0-9]{1,5}", port) or not 1 <= int(port) < 1 << 16:
        raise ValueError
    if not colon:
        return HostPort("127.0.0.1", int(port))
    if host.startswith("[") and host.endswith("]"):
        host = str(ipaddress.IPv6Address(host[1:-1]))
    elif not _HOST.fullmatch(host):
        raise ValueError
    return HostPort(host, int(port))


TARGETS = "https://..., slack:https://..., exec:COMMAND or file:PATH"


class NoticeTarget(NamedTuple):
    """The targets of notices of incidents.

    Attributes:
        kind: json, slack: an URL; exec: a command line; file: a file with a target in each line
    """

    kind: str
    where: str

    def __str__(self) -> str:
        """Return the printable part: paths of URLs and arguments of commands may be secrets and are left
        out.
        """
        if self.kind == "exec":
            return f"exec:{shlex.split(self.where)[0]}"
        if self.kind not in ("json", "slack"):
            return f"{self.kind}:{self.where}"
        parts = urlsplit(self.where)
        return f"{parts.scheme}://{parts.netloc}"


def target(text: str) -> NoticeTarget | None:
    """Return the target named by a text; None for ''.

    Raises:
        ValueError: the text names no target.
    """
    if not text:
        return None
    kind, _, target_place = text.partition(":")
    if kind == "exec":
        if not shlex.split(target_place):
            raise ValueError
        return NoticeTarget(kind, target_place)
    if kind == "file":
        if not target_place:
            raise ValueError
        return NoticeTarget(kind, target_place)
    if kind != "slack":
        kind, target_place = "json", text
    parts = urlsplit(target_place)
    parts.port  # noqa: B018  # raises where it is none
    if parts.scheme not in ("http", "https") or not parts.hostname or "@" in parts.netloc:
        raise ValueError
    if not target_place.isascii() or not target_place.isprintable() or " " in target_place:
        raise ValueError
    return NoticeTarget(kind, target_place)
