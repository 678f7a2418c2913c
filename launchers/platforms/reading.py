"""The readings of all platforms: the layout of a job, checked values, and what this machine knows."""

from __future__ import annotations

import ipaddress
import re
import socket
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Generic, TypeVar

from adaptor import output, text
from adaptor.errors import ConfigError

T = TypeVar("T", int, str)

# Far above any cluster; with more digits a number is a mistake.
_NUMBER = re.compile(r"[0-9]{1,7}", re.ASCII)
_HOST = re.compile(r"[A-Za-z0-9._:-]{1,253}", re.ASCII)
_MAX_PORT = 65535
# The most characters of a wrong value in a line.
_SHOWN = 80


class PlatformError(ConfigError):
    """The data of a platform is wrong or incomplete."""


@dataclass(frozen=True)
class Value(Generic[T]):
    """A value, and the variable or file of its origin."""

    value: T
    source: str


@dataclass(frozen=True)
class Card:
    """The place of a process that the platform starts once for each card of a node.

    Attributes:
        index: among the processes of the node, from 0; process 0 runs the agent
        job: distinguishes the processes of this job and node from those of others
    """

    index: int
    count: int
    job: str


@dataclass(frozen=True)
class Reading:
    """The data of one platform; None: unknown.

    Attributes:
        platform: its name, as in TTP_PLATFORM
        nodes: the number of `ttprun` processes
        per_node: processes on each node
        address: the meeting address: a host name or IP address of node 0
        card: the card of this process, where the platform starts a process for each card
        may_come: the name `address` may be published after the processes start, as in Kubernetes
    """

    platform: str
    nodes: Value[int]
    node_rank: Value[int] | None = None
    per_node: Value[int] | None = None
    address: Value[str] | None = None
    port: Value[int] | None = None
    card: Card | None = None
    may_come: bool = False


def number(environ: Mapping[str, str], name: str, least: int = 0) -> Value[int]:
    """Return the variable `name` of `environ` as a number.

    Raises:
        PlatformError: the variable is not set, is no number, or is less than `least`.
    """
    if name not in environ:
        raise PlatformError(f"{name} is not set")
    raw_text = environ[name].strip()
    if _NUMBER.fullmatch(raw_text) is None or int(raw_text) < least:
        raise PlatformError(f"{name} is {shown(environ[name])}: it must be a number from {least} on")
    return Value(int(raw_text), name)


def rank(environ: Mapping[str, str], name: str, nodes: Value[int]) -> Value[int]:
    """Return the variable `name` of `environ` as the number of one of the `nodes`.

    Raises:
        PlatformError: no node has the number, or `name` is no number.
    """
    read = number(environ, name)
    if read.value >= nodes.value:
        raise PlatformError(
            f"{name} is {read.value}, but there are {nodes.value} nodes ({nodes.source}), which count from 0"
        )
    return read


def port(environ: Mapping[str, str], name: str) -> Value[int]:
    """Return the variable `name` as a port. Raises PlatformError for other values."""
    read = number(environ, name, least=1)
    if read.value > _MAX_PORT:
        raise PlatformError(f"{name} is {read.value}: it must be a port from 1 to {_MAX_PORT}")
    return read


def host(raw_text: object, source: str) -> str:
    """Return `raw_text`, from `source`, as the name or address of a host.

    Raises:
        PlatformError: `raw_text` cannot be a host.
    """
    if not isinstance(raw_text, str) or _HOST.fullmatch(raw_text) is None:
        raise PlatformError(f"{source} has {shown(raw_text)} as a host: it must be a name or an IP address")
    return raw_text


def hosts(environ: Mapping[str, str], name: str) -> list[str]:
    """Return the hosts in the variable `name`, separated by commas.

    Raises:
        PlatformError: the variable is not set or empty, an entry is no host, or a host appears twice.
    """
    if not environ.get(name, "").strip():
        raise PlatformError(f"{name} is {'empty' if name in environ else 'not set'}: it must list the hosts")
    host_names = [host(entry.strip(), name) for entry in environ[name].split(",")]
    require_different(host_names, name)
    return host_names


def require_different(host_names: list[str], source: str) -> None:
    """Refuse a host that appears twice. Raises PlatformError."""
    if len(set(host_names)) < len(host_names):
        twice = next(host_name for n, host_name in enumerate(host_names) if host_name in host_names[:n])
        raise PlatformError(f"{source} has the host {twice} twice")


def shown(value: object) -> str:
    """Return `value` for a message: one line, and short."""
    return text.encodable(repr(value), _SHOWN)


# Nodes of a job start at different times; torch's static rendezvous waits equally long for the last node.
LIMIT_S = 600.0
# Seconds between two looks at a file or name; before the first line for the user, and between two lines.
LOOK_S = 0.2
FIRST_S = 1.5
AGAIN_S = 10.0


@dataclass(frozen=True)
class Machine:
    """This machine, and how a wait passes.

    Attributes:
        owns: whether an IP address belongs to this machine
        resolves: whether a host name has an address
        now: seconds of a monotonic clock
        pause: sleeps for some seconds
        tell: shows a line to the user
    """

    hostname: str
    owns: Callable[[str], bool]
    resolves: Callable[[str], bool]
    now: Callable[[], float]
    pause: Callable[[float], None]
    tell: Callable[[str], None]

    def wait(self, awaited: Callable[[], str], limit_s: float = LIMIT_S) -> None:
        """Wait until `awaited` returns "".

        Args:
            awaited: returns what is still missing, in words.
            limit_s: seconds before giving up.

        Raises:
            PlatformError: the time is over.
        """
        begun_at = self.now()
        next_line = begun_at + FIRST_S
        while awaited_text := awaited():
            time_now = self.now()
            if time_now - begun_at >= limit_s:
                raise PlatformError(f"waited {limit_s:g} s for {awaited_text}")
            if time_now >= next_line:
                self.tell(f"[ttp] waiting for {awaited_text}")
                next_line = time_now + AGAIN_S
            self.pause(LOOK_S)


def this_machine() -> Machine:
    """Return the machine that this process runs on."""
    return Machine(socket.gethostname(), owns, _resolves, time.monotonic, time.sleep, output.tell)


def owns(address: str) -> bool:
    """Return whether a socket can bind `address`; only addresses of this machine allow it."""
    try:
        ip = ipaddress.ip_address(address)
        if ip.is_unspecified or ip.is_multicast:  # any socket can have these
            return False
        family = socket.AF_INET6 if ip.version == 6 else socket.AF_INET
        with socket.socket(family, socket.SOCK_DGRAM) as probe:
            probe.bind((address, 0))
    except (OSError, ValueError):
        return False
    return True


def _resolves(host: str) -> bool:
    try:
        socket.getaddrinfo(host, None)
    except (OSError, UnicodeError):  # a label of more than 63 characters raises the second
        return False
    return True
