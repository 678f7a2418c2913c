"""Fills in what the command line leaves out: nodes, the number of this node, processes, and the meeting
address.

Flags come first, then torchrun's own variables (`PET_*`), then the platform. A job with all flags, or in an
environment of no platform, starts as torchrun starts it.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from typing import NamedTuple

from adaptor.errors import ConfigError
from adaptor.launchers.platforms import ascend_cards, schedulers
from adaptor.launchers.platforms.reading import Card, Machine, PlatformError, Reading, Value


class Platform(NamedTuple):
    """A platform.

    Attributes:
        name: as in TTP_PLATFORM
        title: for lines
        is_here: returns whether the platform has made an environment
        read: returns the data of the platform; raises PlatformError for values that are wrong or disagree
    """

    name: str
    title: str
    is_here: Callable[[Mapping[str, str]], bool]
    read: Callable[[Mapping[str, str], Machine], Reading]


# The platform that knows more comes first: where two platforms agree, the values of the first are taken.
PLATFORMS = (
    Platform("modelarts", "ModelArts", schedulers.is_modelarts, schedulers.read_modelarts),
    Platform("ascend", "the Ascend operator", schedulers.is_ascend_operator, schedulers.read_ascend_operator),
    Platform("volcano", "Volcano", schedulers.is_volcano, schedulers.read_volcano),
    Platform("ranktable", "the rank table", ascend_cards.is_here, ascend_cards.read),
    Platform("slurm", "Slurm", schedulers.is_slurm, schedulers.read_slurm),
    Platform("openmpi", "Open MPI", schedulers.is_openmpi, schedulers.read_openmpi),
)
NONE = "none"
AUTO = "auto"
# Set in a worker: a ttprun that a worker starts is a separate job in the same environment.
_IN_A_WORKER = "TORCHELASTIC_RUN_ID"
# torch's own defaults.
STATIC_PORT = 29500
_C10D_PORT = 29400
_ADDRESSES = ("master_addr", "rdzv_endpoint")


@dataclass(frozen=True)
class Filled:
    """The result of reading a platform.

    Attributes:
        card: the card of this process, where the platform starts a process for each card
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
    """Set the missing arguments in `parsed`; return the values read, None if there were none.

    Args:
        parsed: torchrun's arguments; flags and `PET_*` are kept.
        flags: the names of arguments from the command line.
        platform_setting: TTP_PLATFORM.

    Raises:
        ConfigError: the platform of this environment, or `platform_setting`, has missing or wrong values, or
            two platforms contradict each other.
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
            best = _merged(best, other_reading)
        if not ("nnodes" in flags and _is_alone(parsed.nnodes)):  # one node has no number
            _require_agreement(best, _torchrun_reading(parsed, flags, environ), per_node=False)
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
        named_platforms = [platform for platform in PLATFORMS if platform_setting == platform.name]
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
                other_platform.name for other_platform in named_platforms if other_platform is not platform
            ]
            raise ConfigError(f"{platform.title}: {error}; {_choice(other_names)}") from None
    return readings


def _missing(parsed: argparse.Namespace, flags_given: Collection[str]) -> bool:
    """Return whether the job's layout is incomplete without a platform."""
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
    """Refuse two readings with different numbers; host names may differ."""
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


def _merged(first: Reading, second: Reading) -> Reading:
    """Return the values of both readings; the first reading wins."""
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


def _torchrun_reading(
    parsed: argparse.Namespace, flags: Collection[str], environ: Mapping[str, str]
) -> Reading | None:
    """Return the values of torchrun's own variables that no flag replaces; 0 nodes: unknown."""

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
    """Set the missing arguments; return each value and its source, in words."""
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
    if getattr(parsed, "ttp_spare", False):  # it has no number among the nodes
        return ["this is a spare node"]
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
        endpoint_text = f"{address.value} port {parsed.master_port or STATIC_PORT}"
    else:
        number = port.value if port is not None else _C10D_PORT
        host = f"[{address.value}]" if ":" in address.value else address.value
        parsed.rdzv_endpoint = endpoint_text = f"{host}:{number}"
    return f"they meet at {endpoint_text} ({address.source})"


def _require_name(address: Value[str], may_come: bool, machine: Machine) -> None:
    """Refuse a name without an address; in Kubernetes wait, because a pod's name is published when the pod
    runs.
    """

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
    return next((platform.title for platform in PLATFORMS if name == platform.name), "torchrun's variables")


def _remedy(readings: list[Reading]) -> str:
    return _choice([reading.platform for reading in readings] if len(readings) > 1 else [])


def _choice(other_names: list[str]) -> str:
    named = "".join(f"--ttp-platform {other_name}, or " for other_name in other_names)
    return f"else give {named}--ttp-platform none and torchrun's flags"
