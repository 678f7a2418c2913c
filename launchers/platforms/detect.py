"""Fills in what the command line leaves out: nodes, the number of this one, processes, and where nodes meet.

Flags come first, then torchrun's own variables (`PET_*`), then the platform. A job that gives everything
itself, and one whose environment is of no platform, is as torchrun has it.
"""

from __future__ import annotations

import argparse
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Protocol

from adaptor.errors import ConfigError
from adaptor.launchers.platforms import ascend_operator, modelarts, openmpi, rank_table, slurm, volcano
from adaptor.launchers.platforms.machine import Machine
from adaptor.launchers.platforms.reading import Card, PlatformError, Reading, Value


class Platform(Protocol):
    """The interface of the modules of platforms.

    NAME   as in TTP_PLATFORM
    TITLE  for lines
    """

    NAME: str
    TITLE: str

    def is_here(self, environ: Mapping[str, str]) -> bool:
        """Return whether this platform has made the environment."""

    def read(self, environ: Mapping[str, str], machine: Machine) -> Reading:
        """Return what the platform tells. Raises PlatformError where that makes no sense."""


# The one that knows more comes first: where two agree, its values are taken.
PLATFORMS: tuple[Platform, ...] = (modelarts, ascend_operator, volcano, rank_table, slurm, openmpi)
NONE = "none"
AUTO = "auto"
# A ttprun that a worker starts is a job of its own, in the environment of the first.
_IN_A_WORKER = "TORCHELASTIC_RUN_ID"
# torch's own defaults.
_STATIC_PORT = 29500
_C10D_PORT = 29400
_ADDRESSES = ("master_addr", "rdzv_endpoint")


@dataclass(frozen=True)
class Filled:
    """The result of reading a platform.

    Attributes:
        line: for the user
        card: where the platform starts a process for each card: which one this is
    """

    line: str
    card: Card | None


def fill(
    parsed: argparse.Namespace,
    flags: Collection[str],
    environ: Mapping[str, str],
    wanted: str,
    machine: Machine,
) -> Filled | None:
    """Set in `parsed` what neither a flag nor `PET_*` has set; return what was read, None if nothing.

    Args:
        parsed: torchrun's arguments.
        flags: the names of those that came from the command line.
        environ: of this process.
        wanted: TTP_PLATFORM.
        machine: this one.

    Raises:
        ConfigError: the platform that is there, or `wanted`, tells too little or what makes no sense, or two
            contradict each other.
    """
    given = {name for name in vars(parsed) if name in flags or _pet(name) in environ}
    if wanted == NONE or parsed.standalone or not _missing(parsed, given):
        return None
    readings = _readings(environ, wanted, machine)
    if not readings:
        return None
    best = readings[0]
    try:
        for other in readings[1:]:
            _require_agreement(best, other)
            best = _joined(best, other)
        if not ("nnodes" in flags and _is_alone(parsed.nnodes)):  # one node has no number
            _require_agreement(best, _of_torchrun(parsed, flags, environ), per_node=False)
    except PlatformError as error:
        raise ConfigError(f"{error}; {_remedy(readings)}") from None
    try:
        words = _apply(parsed, given, best, machine)
    except PlatformError as error:
        raise ConfigError(f"{_title(best.platform)}: {error}; {_remedy(readings)}") from None
    titles = " and ".join(_title(reading.platform) for reading in readings)
    return Filled(f"[ttp] read from {titles}: {', '.join(words)}", best.card)


def _readings(environ: Mapping[str, str], wanted: str, machine: Machine) -> list[Reading]:
    if wanted != AUTO:
        here = [platform for platform in PLATFORMS if wanted == platform.NAME]
    elif _IN_A_WORKER in environ:
        here = []
    else:
        here = [platform for platform in PLATFORMS if platform.is_here(environ)]
    found = []
    for platform in here:
        try:
            found.append(platform.read(environ, machine))
        except PlatformError as error:
            others = [other.NAME for other in here if other is not platform]
            raise ConfigError(f"{platform.TITLE}: {error}; {_choice(others)}") from None
    return found


def _missing(parsed: argparse.Namespace, given: Collection[str]) -> bool:
    """Return whether the job's layout is not complete without a platform."""
    if "nnodes" not in given or "nproc_per_node" not in given:
        return True
    if _is_alone(parsed.nnodes):
        return False
    return (parsed.rdzv_backend == "static" and "node_rank" not in given) or not _has_address(given)


def _is_alone(nnodes: str) -> bool:
    return nnodes.rpartition(":")[2].strip() == "1"


def _has_address(given: Collection[str]) -> bool:
    return any(name in given for name in _ADDRESSES)


def _require_agreement(one: Reading, other: Reading | None, per_node: bool = True) -> None:
    """Refuse two that say different things of the same; names of hosts may differ."""
    if other is None:
        return
    compared = [
        ("nodes", one.nodes, other.nodes if other.nodes.value else None),
        ("node number", one.node_rank, other.node_rank),
        ("processes on each node", one.per_node, other.per_node if per_node else None),
    ]
    for what, first, second in compared:
        if first is not None and second is not None and first.value != second.value:
            raise PlatformError(
                f"{_title(one.platform)} and {_title(other.platform)} contradict each other: {what}"
                f" {first.value} ({first.source}) and {second.value} ({second.source})"
            )


def _joined(one: Reading, other: Reading) -> Reading:
    """Return all that is known from both; what the first says counts."""
    return Reading(
        one.platform,
        one.nodes,
        one.node_rank or other.node_rank,
        one.per_node or other.per_node,
        one.address or other.address,
        one.port if one.address else other.port,
        one.card or other.card,
        one.may_come if one.address else other.may_come,
    )


def _of_torchrun(
    parsed: argparse.Namespace, flags: Collection[str], environ: Mapping[str, str]
) -> Reading | None:
    """Return what torchrun's own variables say that no flag replaces; 0 nodes: they do not say how many."""

    def said(name: str) -> Value[int] | None:
        text = str(getattr(parsed, name)).strip()
        known = name not in flags and _pet(name) in environ and text.isascii() and text.isdigit()
        return Value(int(text), _pet(name)) if known else None

    nodes = said("nnodes")
    node_rank = said("node_rank") if parsed.rdzv_backend == "static" else None
    if nodes is None and node_rank is None:
        return None
    return Reading("", nodes or Value(0, ""), node_rank)


def _apply(
    parsed: argparse.Namespace, given: Collection[str], reading: Reading, machine: Machine
) -> list[str]:
    """Set what is missing; return for each value where it is from, in words."""
    words = []
    if "nnodes" in given:
        words.append(_words(parsed.nnodes, "node", _origin("nnodes")))
    else:
        parsed.nnodes = str(reading.nodes.value)
        words.append(_words(parsed.nnodes, "node", reading.nodes.source))
    if not _is_alone(parsed.nnodes):
        words += _place(parsed, given, reading)
    if "nproc_per_node" in given or reading.per_node is None:
        words.append(_words(parsed.nproc_per_node, "process", _origin("nproc_per_node")))
    else:
        parsed.nproc_per_node = str(reading.per_node.value)
        words.append(_words(parsed.nproc_per_node, "process", reading.per_node.source))
    if not _is_alone(parsed.nnodes) and not _has_address(given):
        words.append(_meeting(parsed, given, reading, machine))
    return words


def _place(parsed: argparse.Namespace, given: Collection[str], reading: Reading) -> list[str]:
    if parsed.rdzv_backend != "static":  # the nodes number themselves
        return []
    if "node_rank" not in given:
        if reading.node_rank is None:
            raise PlatformError("it does not tell the number of this node: give --node-rank")
        parsed.node_rank = reading.node_rank.value
        return [f"this is node {parsed.node_rank} ({reading.node_rank.source})"]
    return [f"this is node {parsed.node_rank} ({_origin('node_rank')})"]


def _meeting(parsed: argparse.Namespace, given: Collection[str], reading: Reading, machine: Machine) -> str:
    address, port = reading.address, reading.port
    if address is None:
        raise PlatformError("it does not tell an address of node 0: give --master-addr")
    _require_name(address, reading.may_come, machine)
    if parsed.rdzv_backend == "static":
        parsed.master_addr = address.value
        if port is not None and "master_port" not in given:
            parsed.master_port = port.value
        where = f"{address.value} port {parsed.master_port or _STATIC_PORT}"
    else:
        number = port.value if port is not None else _C10D_PORT
        host = f"[{address.value}]" if ":" in address.value else address.value
        parsed.rdzv_endpoint = where = f"{host}:{number}"
    return f"they meet at {where} ({address.source})"


def _require_name(address: Value[str], may_come: bool, machine: Machine) -> None:
    """Refuse a name without an address; in Kubernetes wait for it, as it is published when that pod runs."""

    def unknown() -> str:
        if machine.resolves(address.value):
            return ""
        return f"the address of {address.value} ({address.source}), which does not resolve"

    if may_come:
        machine.wait(unknown)
    elif missing := unknown():
        raise PlatformError(f"no address: {missing}")


def _words(count: str, what: str, source: str) -> str:
    several = what if count.strip() in ("1", "1:1") else f"{what}es" if what.endswith("s") else f"{what}s"
    each = " on each" if what == "process" else ""
    return f"{count} {several}{each} ({source})"


def _origin(name: str) -> str:
    return f"--{name.replace('_', '-')}"


def _pet(name: str) -> str:
    return f"PET_{name.upper()}"


def _title(name: str) -> str:
    return next((platform.TITLE for platform in PLATFORMS if name == platform.NAME), "torchrun's variables")


def _remedy(readings: list[Reading]) -> str:
    return _choice([reading.platform for reading in readings] if len(readings) > 1 else [])


def _choice(others: list[str]) -> str:
    named = "".join(f"--ttp-platform {other}, or " for other in others)
    return f"else give {named}--ttp-platform none and torchrun's flags"
