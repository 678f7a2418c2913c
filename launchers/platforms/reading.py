"""The shape in which every platform tells how a job is laid out, and how its values are read."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Generic, TypeVar

from adaptor import text
from adaptor.errors import ConfigError

T = TypeVar("T", int, str)

# Far above any cluster; with more digits a number is a mistake.
_NUMBER = re.compile(r"[0-9]{1,7}", re.ASCII)
_HOST = re.compile(r"[A-Za-z0-9._:-]{1,253}", re.ASCII)
_MAX_PORT = 65535
# The most characters of a wrong value in a line.
_SHOWN = 80


class PlatformError(ConfigError):
    """The data of a platform makes no sense, or is not enough."""


@dataclass(frozen=True)
class Value(Generic[T]):
    """A value, and the variable or file that it was read from."""

    value: T
    source: str


@dataclass(frozen=True)
class Card:
    """The place of a process that the platform starts once for each card of a node.

    Attributes:
        index: among the processes of its node, from 0; number 0 runs the agent
        count: of these processes on the node
        job: what tells the processes of this job and node from those of others
    """

    index: int
    count: int
    job: str


@dataclass(frozen=True)
class Reading:
    """The data of one platform; None: it does not tell.

    Attributes:
        platform: its name, as in TTP_PLATFORM
        nodes: how many `ttprun` there are
        node_rank: the number of this one
        per_node: processes on each node
        address: where the nodes meet: a host name or IP address of node 0
        port: the port there
        card: this process, where it is started for one card
        may_come: the name `address` may be published later than processes start, as in Kubernetes
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
        PlatformError: it is not set, is no number, or is less than `least`.
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
        PlatformError: there is no such node, or `name` is no number.
    """
    read = number(environ, name)
    if read.value >= nodes.value:
        raise PlatformError(
            f"{name} is {read.value}, but there are {nodes.value} nodes ({nodes.source}), which count from 0"
        )
    return read


def port(environ: Mapping[str, str], name: str) -> Value[int]:
    """Return the variable `name` as a port. Raises PlatformError where it is none."""
    read = number(environ, name, least=1)
    if read.value > _MAX_PORT:
        raise PlatformError(f"{name} is {read.value}: it must be a port from 1 to {_MAX_PORT}")
    return read


def host(raw_text: object, source: str) -> str:
    """Return `raw_text`, which `source` has, as the name or address of a host.

    Raises:
        PlatformError: it cannot be one.
    """
    if not isinstance(raw_text, str) or _HOST.fullmatch(raw_text) is None:
        raise PlatformError(f"{source} has {shown(raw_text)} as a host: it must be a name or an IP address")
    return raw_text


def hosts(environ: Mapping[str, str], name: str) -> list[str]:
    """Return the hosts in the variable `name`, which has commas between them.

    Raises:
        PlatformError: it is not set or empty, an entry is no host, or one comes twice.
    """
    if not environ.get(name, "").strip():
        raise PlatformError(f"{name} is {'empty' if name in environ else 'not set'}: it must list the hosts")
    host_names = [host(entry.strip(), name) for entry in environ[name].split(",")]
    require_different(host_names, name)
    return host_names


def require_different(host_names: list[str], source: str) -> None:
    """Refuse a host that is there twice. Raises PlatformError."""
    if len(set(host_names)) < len(host_names):
        twice = next(host_name for n, host_name in enumerate(host_names) if host_name in host_names[:n])
        raise PlatformError(f"{source} has the host {twice} twice")


def shown(value: object) -> str:
    """Return `value` for a line: one line, and short."""
    return text.encodable(repr(value), _SHOWN)
