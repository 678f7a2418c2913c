"""The checks of `ttp doctor` that compare a node with the needs of a job: memory, disk space, time for a
save.

The needs are calculated from the arguments of the script, as for `ttp plan`. Without arguments the newest
checkpoint of the save folder gives the size of a save.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from pathlib import Path
from typing import Literal, NamedTuple

import msgspec

from adaptor import host_memory
from adaptor.config import Config
from adaptor.launchers.cli import plan
from adaptor.operations import job_reader
from adaptor.protocol.records import ProtectionPlan, Replicas
from adaptor.text import duration, size

# A save is not always as fast as the trial, and tensors do not get all memory that is free before a job.
_MARGIN = 1.25
# The most that the settings allow, in seconds.
_LONGEST = 3600
# Without progress of a save for a third of TTP_OT another node takes over; for an eighth, ranks are probed.
_TAKES_OVER, _ASKS = 3, 8
_GATHERING = "use the format torch and a --save that all nodes see: docs/costs.md"


class Save(NamedTuple):
    """A save of the job.

    Attributes:
        size: in bytes, of all nodes together
        nodes: the nodes that write equal parts
        source: the source of the numbers, in words
    """

    size: float
    nodes: int
    source: str

    @property
    def part(self) -> float:
        """Return the bytes that one node writes."""
        return self.size / self.nodes


class Speed(NamedTuple):
    """The write speed of the save folder.

    Attributes:
        rate: in bytes per second
        pause_s: the longest time without progress
    """

    rate: float
    pause_s: float


class PlannedJob:
    """The job to run on nodes like this one.

    Args:
        script: the script and its arguments; empty: unknown.
        ranks_per_node: None: as many as a second copy needs, on one node.
    """

    def __init__(self, script: list[str], nodes: int = 1, ranks_per_node: int | None = None) -> None:
        self.script = script
        self.nodes = nodes
        self._ranks_per_node = ranks_per_node
        self._plan: ProtectionPlan | None = None

    def fits(self, settings: Config) -> Iterator[CheckResult]:
        """Read the arguments with the framework's parser, and compare the needs of a rank with the node."""
        report = plan.report(self.script, self.nodes, self._ranks_per_node)
        if report is None:
            yield CheckResult("job", "FAIL", "its arguments cannot be examined", "stderr has said why")
            return
        for line in report.refusals:
            yield CheckResult("job", "FAIL", line)
        if not report.refusals:
            yield CheckResult("job", "OK" if report.fits else "WARN", report.verdict)
        self._plan = report.plan
        if report.plan is not None:
            yield from memory(report.plan, settings)

    def save(self, folder: Path) -> Save | None:
        """Return the size of a save of the job; None if unknown."""
        if self._plan is not None and self._plan.save is not None:
            return Save(self._plan.save, self._plan.nodes, "by the arguments of the script")
        newest_save = job_reader.newest(folder)
        return (
            None
            if newest_save is None
            else Save(newest_save.size, self.nodes, f"as large as that of step {newest_save.step}")
        )


def memory(of_job: ProtectionPlan, settings: Config) -> Iterator[CheckResult]:
    """Compare the memory of a rank with the free memory of the device, or of the host without a device.

    Args:
        of_job: the memory of each rank.
    """
    ranks = -(-of_job.ranks // of_job.nodes)
    row = next((row for row in of_job.replicas if row.chosen), None)
    need = None if row is None else _rank_memory(of_job, row, settings)
    if row is None or need is None:
        description = "how much memory a rank takes is not known of this framework"
        yield CheckResult("replica", "WARN", description, "calculate it with the formulas of docs/costs.md")
        return
    on_host = host_memory.available()
    # With several nodes each node also keeps the copies of another node.
    copies = (row.host_copy or 0.0) * ranks * min(2, of_job.nodes) if of_job.makes_copies else 0.0
    if settings.host_copy is None and copies > on_host * host_memory.FOR_COPIES:
        description = f"the copies of this node would take {_bytes(copies)}, and {_bytes(on_host)} are free"
        yield CheckResult(
            "host copies",
            "WARN",
            f"{description}: none are made",
            "give the node more memory, or set TTP_HOST_COPY",
        )
        copies = 0.0
    device = _device_memory(settings)
    free, memory_place = (
        device
        if device is not None
        else (max(0.0, on_host - copies) / ranks, f"this host for each of {ranks} ranks")
    )
    description = (
        f"{row.kind} takes {_bytes(row.memory)} more on a rank, {_bytes(need)} with weights, gradients and"
        f" optimizer; {_bytes(free)} are free on {memory_place}"
    )
    if need > free:
        yield CheckResult("replica", "FAIL", description, _smaller_replica(of_job, settings, free))
    elif need * _MARGIN > free:
        yield CheckResult("replica", "WARN", description, "activations come on top: docs/costs.md")
    else:
        yield CheckResult("replica", "OK", f"{description}; activations come on top")
    if copies:
        description = f"the copies of this node take {_bytes(copies)}, and {_bytes(on_host)} are free"
        bad = copies > on_host
        remedy = "leave TTP_HOST_COPY out, or give the node more memory" if bad else ""
        yield CheckResult("host copies", "FAIL" if bad else "OK", description, remedy)
    remaining_bytes = on_host - copies if device is not None else on_host - copies - need * ranks
    if of_job.writer is not None and of_job.writer > remaining_bytes:
        description = (
            f"where a save cannot be written in place, one rank gathers {_bytes(of_job.writer)} on the host"
        )
        yield CheckResult(
            "gathering",
            "WARN",
            f"{description}; {_bytes(max(0.0, remaining_bytes))} are left there",
            _GATHERING,
        )


def _rank_memory(of_job: ProtectionPlan, row: Replicas, settings: Config) -> float | None:
    """Return the bytes of weights, gradients, optimizer and the adaptor's additions; None if unknown."""
    if of_job.training is None or row.memory is None:
        return None
    return of_job.training + row.memory + ((row.local_copy or 0.0) if settings.local_copy else 0.0)


def _smaller_replica(of_job: ProtectionPlan, settings: Config, free: float) -> str:
    """Return the remedy for a rank without room for its replica."""
    for row in of_job.replicas:
        need = _rank_memory(of_job, row, settings)
        if not row.chosen and need is not None and need <= free:
            return f"TTP_REPLICA={row.kind} takes {_bytes(row.memory)} more, and survives {row.survives}"
    return "spread the job over more ranks: no kind of replica fits"


def _device_memory(settings: Config) -> tuple[float, str] | None:
    """Return free memory and name of the device with the least free memory; None without a device."""
    if settings.device:
        return None
    import torch

    kind = next(
        (kind for kind in ("cuda", "npu") if hasattr(torch, kind) and getattr(torch, kind).is_available()), ""
    )
    if not kind:
        return None
    of_kind = getattr(torch, kind)
    return min((float(of_kind.mem_get_info(at)[0]), f"{kind}:{at}") for at in range(of_kind.device_count()))


def times(speed: Speed, save: Save | None, room: int, settings: Config) -> Iterator[CheckResult]:
    """Compare a save with free disk space and allowed time.

    Args:
        save: the size of a save; None: unknown.
        room: free bytes in the folder.
        settings: TTP_OT and TTP_GRACE.
    """
    if save is None:
        description = (
            f"{speed.rate * settings.grace_s / 1e9:.1f} GB can be written in it ({settings.grace_s:.0f} s)"
        )
        remedy = (
            "say -- SCRIPT ARGUMENTS, or a --save with a checkpoint, to compare it with a save of the job"
        )
        yield CheckResult("TTP_GRACE", "OK", description, remedy)
        yield _without_progress(speed, None, settings)
        return
    if save.size > room:
        description = f"a save has {_bytes(save.size)} ({save.source}), and {_bytes(room)} are free there"
        yield CheckResult("room", "FAIL", description, "make room, or name another --save")
    yield _grace(save, save.part / speed.rate, settings.grace_s)
    yield _without_progress(speed, save, settings)


def _grace(save: Save, seconds: float, grace_s: float) -> CheckResult:
    """Compare the seconds of this node's part of a save with TTP_GRACE."""
    all_of = "all of it" if save.nodes == 1 else f"1 of {save.nodes} nodes"
    description = (
        f"this node writes {_bytes(save.part)} of a save in {duration(seconds)} ({all_of}, {save.source});"
        f" when the job is told to end it has {duration(grace_s)}"
    )
    needed_s = math.ceil(seconds * _MARGIN)
    if needed_s <= grace_s:
        return CheckResult("TTP_GRACE", "OK", description)
    remedy = (
        f"set TTP_GRACE to {needed_s} or more, and what the scheduler gives to more than that (KillWait,"
        " GraceTime, terminationGracePeriodSeconds)"
        if needed_s <= _LONGEST
        else f"name a --save that is faster: TTP_GRACE is {_LONGEST} at most"
    )
    return CheckResult("TTP_GRACE", "FAIL" if seconds > grace_s else "WARN", description, remedy)


def _without_progress(speed: Speed, save: Save | None, settings: Config) -> CheckResult:
    """Compare the longest pause of the trial with TTP_OT, the limit of time without progress."""
    limit, pause = settings.timeout_s, speed.pause_s
    written_text = f"{speed.rate * limit / 1e9:.1f} GB could be written in them"
    if save is not None:
        written_text = f"this node's part of a save takes {duration(save.part / speed.rate)}"
    description = (
        f"a save may take any time, but for {limit:.0f} s without progress; {written_text}, and the "
        "longest pause of"
        f" the trial was {duration(pause)}"
    )
    if pause * _ASKS < limit:
        return CheckResult("TTP_OT", "OK", description)
    needed_s = math.ceil(pause * _ASKS * _MARGIN)
    remedy = (
        f"set TTP_OT to {needed_s} or more: a save that stands still for {limit:.0f} s is given up, and for"
        f" {limit / _TAKES_OVER:.0f} s is begun anew on another node"
        if needed_s <= _LONGEST
        else "name a --save on a disk that does not stand still"
    )
    return CheckResult("TTP_OT", "FAIL" if pause >= limit else "WARN", description, remedy)


def _bytes(count: float | None) -> str:
    return "not known" if count is None else size(int(count))


class CheckResult(msgspec.Struct, frozen=True):
    """One line of `ttp doctor`.

    Attributes:
        name: the subject of the check
        level: OK; WARN: the setup could be better; FAIL: a job would be refused, or a fault would lose steps
        words: the result
        remedy: '' if nothing is to be done
    """

    name: str
    level: Literal["OK", "WARN", "FAIL"]
    words: str
    remedy: str = ""
