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
    platform_setting: str,
    machine: Machine,
) -> Filled | None:
    """Set in `parsed` what neither a flag nor `PET_*` has set; return what was read, None if nothing.

    Args:
        parsed: torchrun's arguments.
        flags: the names of those that came from the command line.
        environ: of this process.
        platform_setting: TTP_PLATFORM.
        machine: this one.

    Raises:
        ConfigError: the platform that is there, or `platform_setting`, tells too little or what makes no
        sense, or two
            contradict each other.
    """
    flags_given = {name for name in vars(parsed) if name in flags or _pet(name) in environ}
    if platform_setting == NONE or parsed.standalone or not _missing(parsed, flags_given):
        return None
    readings = _readings(environ, platform_setting, machine)
    if not readings:
        return None
    best = readings[0]
    try:
        for other_reading in readings[1:]:
            _require_agreement(best, other_reading)
            best = _joined(best, other_reading)
        if not ("nnodes" in flags and _is_alone(parsed.nnodes)):  # one node has no number
            _require_agreement(best, _of_torchrun(parsed, flags, environ), per_node=False)
    except PlatformError as error:
        raise ConfigError(f"{error}; {_remedy(readings)}") from None
    try:
        value_texts = _apply(parsed, flags_given, best, machine)
    except PlatformError as error:
        raise ConfigError(f"{_title(best.platform)}: {error}; {_remedy(readings)}") from None
    titles = " and ".join(_title(reading.platform) for reading in readings)
    return Filled(f"[ttp] read from {titles}: {', '.join(value_texts)}", best.card)


def _readings(environ: Mapping[str, str], platform_setting: str, machine: Machine) -> list[Reading]:
    if platform_setting != AUTO:
        named_platforms = [platform for platform in PLATFORMS if platform_setting == platform.NAME]
    elif _IN_A_WORKER in environ:
        named_platforms = []
    else:
        named_platforms = [platform for platform in PLATFORMS if platform.is_here(environ)]
    readings = []
    for platform in named_platforms:
        try:
            readings.append(platform.read(environ, machine))
        except PlatformError as error:
            other_names = [
                other_platform.NAME for other_platform in named_platforms if other_platform is not platform
            ]
            raise ConfigError(f"{platform.TITLE}: {error}; {_choice(other_names)}") from None
    return readings


def _missing(parsed: argparse.Namespace, flags_given: Collection[str]) -> bool:
    """Return whether the job's layout is not complete without a platform."""
    if "nnodes" not in flags_given or "nproc_per_node" not in flags_given:
        return True
    if _is_alone(parsed.nnodes):
        return False
    return (parsed.rdzv_backend == "static" and "node_rank" not in flags_given) or not _has_address(
        flags_given
    )


def _is_alone(nnodes: str) -> bool:
    return nnodes.rpartition(":")[2].strip() == "1"


def _has_address(flags_given: Collection[str]) -> bool:
    return any(name in flags_given for name in _ADDRESSES)


def _require_agreement(reading: Reading, other_reading: Reading | None, per_node: bool = True) -> None:
    """Refuse two that say different things of the same; names of hosts may differ."""
    if other_reading is None:
        return
    compared = [
        ("nodes", reading.nodes, other_reading.nodes if other_reading.nodes.value else None),
        ("node number", reading.node_rank, other_reading.node_rank),
        ("processes on each node", reading.per_node, other_reading.per_node if per_node else None),
    ]
    for subject, first, second in compared:
        if first is not None and second is not None and first.value != second.value:
            raise PlatformError(
                f"{_title(reading.platform)} and {_title(other_reading.platform)} contradict each other: "
                f"{subject}"
                f" {first.value} ({first.source}) and {second.value} ({second.source})"
            )


def _joined(first: Reading, second: Reading) -> Reading:
    """Return all that is known from both; what the first says counts."""
    return Reading(
        first.platform,
        first.nodes,
        first.node_rank or second.node_rank,
        first.per_node or second.per_node,
        first.address or second.address,
        first.port if first.address else second.port,
        first.card or second.card,
        first.may_come if first.address else second.may_come,
    )


def _of_torchrun(
    parsed: argparse.Namespace, flags: Collection[str], environ: Mapping[str, str]
) -> Reading | None:
    """Return what torchrun's own variables say that no flag replaces; 0 nodes: they do not say how many."""

    def said(name: str) -> Value[int] | None:
        text = str(getattr(parsed, name)).strip()
        is_known = name not in flags and _pet(name) in environ and text.isascii() and text.isdigit()
        return Value(int(text), _pet(name)) if is_known else None

    nodes = said("nnodes")
    node_rank = said("node_rank") if parsed.rdzv_backend == "static" else None
    if nodes is None and node_rank is None:
        return None
    return Reading("", nodes or Value(0, ""), node_rank)


def _apply(
    parsed: argparse.Namespace, flags_given: Collection[str], reading: Reading, machine: Machine
) -> list[str]:
    """Set what is missing; return for each value where it is from, in words."""
    value_texts = []
    if "nnodes" in flags_given:
        value_texts.append(_words(parsed.nnodes, "node", _origin("nnodes")))
    else:
        parsed.nnodes = str(reading.nodes.value)
        value_texts.append(_words(parsed.nnodes, "node", reading.nodes.source))
    if not _is_alone(parsed.nnodes):
        value_texts += _place(parsed, flags_given, reading)
    if "nproc_per_node" in flags_given or reading.per_node is None:
        value_texts.append(_words(parsed.nproc_per_node, "process", _origin("nproc_per_node")))
    else:
        parsed.nproc_per_node = str(reading.per_node.value)
        value_texts.append(_words(parsed.nproc_per_node, "process", reading.per_node.source))
    if not _is_alone(parsed.nnodes) and not _has_address(flags_given):
        value_texts.append(_meeting(parsed, flags_given, reading, machine))
    return value_texts


def _place(parsed: argparse.Namespace, flags_given: Collection[str], reading: Reading) -> list[str]:
    if parsed.rdzv_backend != "static":  # the nodes number themselves
        return []
    if "node_rank" not in flags_given:
        if reading.node_rank is None:
            raise PlatformError("it does not tell the number of this node: give --node-rank")
        parsed.node_rank = reading.node_rank.value
        return [f"this is node {parsed.node_rank} ({reading.node_rank.source})"]
    return [f"this is node {parsed.node_rank} ({_origin('node_rank')})"]


def _meeting(
    parsed: argparse.Namespace, flags_given: Collection[str], reading: Reading, machine: Machine
) -> str:
    address, port = reading.address, reading.port
    if address is None:
        raise PlatformError("it does not tell an address of node 0: give --master-addr")
    _require_name(address, reading.may_come, machine)
    if parsed.rdzv_backend == "static":
        parsed.master_addr = address.value
        if port is not None and "master_port" not in flags_given:
            parsed.master_port = port.value
        endpoint_text = f"{address.value} port {parsed.master_port or _STATIC_PORT}"
    else:
        number = port.value if port is not None else _C10D_PORT
        host = f"[{address.value}]" if ":" in address.value else address.value
        parsed.rdzv_endpoint = endpoint_text = f"{host}:{number}"
    return f"they meet at {endpoint_text} ({address.source})"


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


def _words(count: str, noun: str, source: str) -> str:
    several = noun if count.strip() in ("1", "1:1") else f"{noun}es" if noun.endswith("s") else f"{noun}s"
    on_each = " on each" if noun == "process" else ""
    return f"{count} {several}{on_each} ({source})"


def _origin(name: str) -> str:
    return f"--{name.replace('_', '-')}"


def _pet(name: str) -> str:
    return f"PET_{name.upper()}"


def _title(name: str) -> str:
    return next((platform.TITLE for platform in PLATFORMS if name == platform.NAME), "torchrun's variables")


def _remedy(readings: list[Reading]) -> str:
    return _choice([reading.platform for reading in readings] if len(readings) > 1 else [])


def _choice(other_names: list[str]) -> str:
    named = "".join(f"--ttp-platform {other_name}, or " for other_name in other_names)
    return f"else give {named}--ttp-platform none and torchrun's flags"
