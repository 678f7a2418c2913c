"""Transforms the checkpoint to load if the job has other parallel sizes (TTP_RESHAPE).

All ranks call the module together, before the framework loads. Each rank writes the files of its own
load, if the rank is the first with the files; rank 0 gives the checkpoint its name. No file has a final
name before all files are on disk, and the source is kept (`left_overs.put_in_place`). The work of an
interrupted start is kept, too, as far as whole ranks are written.

Invariant: all ranks decide by the reports of all ranks, and each rank reports, even after a failure: all go
the same way.
"""

from __future__ import annotations

import platform
import shlex
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, TypeVar

import torch.distributed as dist

from adaptor import output, text
from adaptor.checkpoint import disk, left_overs, manifest, tracker
from adaptor.errors import AdaptorError, CheckpointError, ResumeError
from adaptor.protocol import naming
from adaptor.protocol.naming import FileEntry
from adaptor.replica.group import gather_values
from adaptor.transform import copying, run
from adaptor.transform import target as targets
from adaptor.transform.copying import Files
from adaptor.transform.sizes import Rank, Sizes
from adaptor.transform.source import SourceCheckpoint, open_source, sizes_at
from adaptor.transform.target import TargetCheckpoint

T = TypeVar("T")
# How often ranks tell each other how far they are: no collective may last as long as a large transform.
_TELL_S = 2.0
# How long a rank looks for what rank 0 has renamed: clients of NFS may remember a folder for a minute.
_SEEN_S = 90.0
_LOOK_S = 0.2
# Of each rank of the target: its files, as path, size and checksum.
_Written = dict[Rank, list[FileEntry]]


def bring_to_sizes(args: Any, place: tuple[int, int, int]) -> None:
    """Give the checkpoint to load the parallel sizes of the job; collective.

    Args:
        args: of the framework, validated. The process groups exist.
        place: the tensor, pipeline and expert parallel rank of this process.

    Raises:
        ResumeError: the checkpoint has other sizes and cannot be transformed; the same on all ranks.
    """
    if not args.load:
        return
    save, wanted_sizes = Path(args.save), Sizes.of(args)
    order = _from_first(lambda: _begin(Path(args.load), save, _chosen(args), wanted_sizes, _format(args)))
    if order is None:
        return
    tensor, pipeline, expert = place
    # The rank from whose folder this process loads.
    own_rank = Rank(tensor, pipeline, expert if wanted_sizes.ep > 1 else 0)
    writers: dict[Rank, int] = {}
    for number, rank in enumerate(gather_values(own_rank)):
        writers.setdefault(rank, number)
    written = _write_together(order, own_rank if writers[own_rank] == dist.get_rank() else None)
    manifest_bytes = _from_first(lambda: _publish(order, save, written))
    _all_or_none(lambda: _see(save / naming.final_name(order.step), manifest_bytes))


def _chosen(args: Any) -> int | None:
    """Return the step named by the user, None for the step of the tracker."""
    return getattr(args, "ckpt_step", None) or None


def _format(args: Any) -> str:
    return str(getattr(args, "ckpt_format", "torch"))


def _is_same(first: Sizes, second: Sizes) -> bool:
    """Return whether checkpoints of these sizes have the same ranks; data-parallel ranks have no files."""
    return replace(first, dp=second.dp) == second


def _begin(
    load: Path, save: Path, chosen: int | None, wanted_sizes: Sizes, format: str
) -> run.TransformOrder | None:
    """Return the work to do, or None; check the work, and make its folder; on rank 0. Raises AdaptorError."""
    step = tracker.tracked_step(load) if chosen is None else chosen
    if step is None or not (load / naming.final_name(step)).is_dir():
        return None
    is_own = load.resolve() == save.resolve()
    try:
        sizes_of_folder = sizes_at(load, step)
    except AdaptorError:
        if is_own:
            raise
        return None  # what a job begins from may be anything that the framework loads
    staging = save / naming.reshape_name(step)
    if _is_same(sizes_of_folder, wanted_sizes):
        if is_own:
            _remove_staging(save)
        return None
    if not is_own:
        raise ResumeError(
            f"{load} has {sizes_of_folder} and the job has {wanted_sizes}; only in the --save folder is a "
            "checkpoint"
            f" transformed: run `python -m adaptor transform {shlex.quote(str(load))} DST --tp "
            f"{wanted_sizes.tp}"
            f" --pp {wanted_sizes.pp}` with a new folder DST, and give that as --load"
        )
    source = open_source(load, step)
    target = _target(source, wanted_sizes, format)
    target.require_parts()
    with Files() as files:
        copying.require_common(source, files)
        copying.require_replicas(source, files, everything=False)
    _remove_staging(save, keep=staging)
    staging.mkdir(exist_ok=True)
    if (staging / naming.final_name(step)).exists():  # of a start that ended before it could be put in place
        disk.remove(staging / naming.final_name(step))
    folder = run.temporary_folder(staging, step)
    size = sum(target.bytes(rank) for rank in wanted_sizes.ranks)
    if not folder.exists():
        disk.require_room(staging, size, run.NEED)
        folder.mkdir()
    _say(
        f"step {step} in {save} has {sizes_of_folder}, and the job has {wanted_sizes}: it is transformed "
        "(TTP_RESHAPE),"
        f" {size / 1e9:.3f} GB, {len(wanted_sizes.ranks)} rank{'' if len(wanted_sizes.ranks) == 1 else 's'}"
    )
    return run.TransformOrder(load, step, wanted_sizes, target.rows, folder, format)


def _target(source: SourceCheckpoint, sizes: Sizes, format: str) -> TargetCheckpoint:
    if source.layout is not None:
        targets.require_loaded_by(source.layout.ranks[0].core, format, f"--ckpt-format {format}: the job")
    return targets.by_rules(source, sizes, format)


def _remove_staging(save: Path, keep: Path | None = None) -> None:
    """Remove leftovers of transforms without a continuation."""
    staging_folders = [save / name for name in tracker.entry_names(save) if naming.is_reshape(name)]
    abandoned_folders = [path for path in staging_folders if path != keep and left_overs.is_left_over(path)]
    left_overs.remove_beside(abandoned_folders, disk.remove, left_overs.REMOVAL_WAIT_S)


@dataclass
class _Work:
    """The part of this process, during the write of a thread.

    Attributes:
        written: the files that are written
        problem: why they could not be, in words
        ended: the thread writes no more
        stopped: another rank has a problem
    """

    written: _Written = field(default_factory=dict)
    problem: str = ""
    ended: threading.Event = field(default_factory=threading.Event)
    stopped: threading.Event = field(default_factory=threading.Event)


class _StoppedError(Exception):
    """Another rank has a problem."""


def _write_together(order: run.TransformOrder, rank: Rank | None) -> _Written:
    """Write the files of all ranks of the target; return the written files.

    Args:
        rank: the target rank of this process's files; None: none.

    Raises:
        ResumeError: some rank has a problem.
    """
    work = _Work()
    if rank is None:
        work.ended.set()
    else:
        threading.Thread(target=_write, args=(work, order, rank), name="ttp-reshape", daemon=True).start()
    while True:
        work.ended.wait(_TELL_S)
        gathered = gather_values((work.ended.is_set(), work.problem))
        problem = next((said_problem for _, said_problem in gathered if said_problem), "")
        if problem:
            work.stopped.set()
        if all(has_ended for has_ended, _ in gathered):
            break
    if problem:
        raise ResumeError(f"TTP_RESHAPE: {problem}")
    return {rank: files for part in gather_values(work.written) for rank, files in part.items()}


def _write(work: _Work, order: run.TransformOrder, rank: Rank) -> None:
    """Write the files of one rank, unless an earlier start has; never raise."""

    def advanced(count: int) -> None:
        if work.stopped.is_set():
            raise _StoppedError

    try:
        if not order.folder.is_dir():
            raise CheckpointError(f"{order.folder}: is not there; all nodes need the same --save folder")
        written_files = run.already_done(order, rank)
        if written_files is None:
            target = _target(open_source(order.source, order.step), order.sizes, order.format)
            written_files = run.write_rank(target, rank, order.folder, order.mark, advanced)
        work.written[rank] = written_files
    except _StoppedError:
        pass
    except Exception as error:  # the others wait for the answer, whatever it is
        work.problem = f"rank {dist.get_rank()} on {platform.node()}: {_words(error)}"
    finally:
        work.ended.set()


def _publish(order: run.TransformOrder, save: Path, written: _Written) -> bytes:
    """Complete the checkpoint and give it its final name; return the manifest; on rank 0.

    Raises:
        AdaptorError: the publishing is impossible.
    """
    staging = order.folder.parent
    target = _target(open_source(order.source, order.step), order.sizes, order.format)
    run.finish(target, order, staging, written, verify=False)
    made_folder = staging / naming.final_name(order.step)
    manifest_bytes = disk.read(made_folder / naming.MANIFEST, manifest.LARGEST)
    kept = left_overs.put_in_place(save, order.step, made_folder)
    _say(
        f"step {order.step} in {save} has {order.sizes} now; what it was made from stays as {kept.name},"
        " until somebody removes it"
    )
    left_overs.remove_beside([staging], disk.remove, left_overs.REMOVAL_WAIT_S)
    return manifest_bytes


def _see(folder: Path, manifest_bytes: bytes) -> None:
    """Wait until this node sees the new checkpoint. Raises CheckpointError if this node does not."""
    until = time.monotonic() + _SEEN_S
    while True:
        tracker.entry_names(folder.parent)  # a client of NFS asks the server again
        try:
            if disk.read(folder / naming.MANIFEST, manifest.LARGEST) == manifest_bytes:
                return
        except OSError:
            pass
        if time.monotonic() > until:
            raise CheckpointError(
                f"{folder}: after {_SEEN_S:g} s this node does not see what rank 0 has put there; start again"
            )
        time.sleep(_LOOK_S)


def _words(error: Exception) -> str:
    return str(error) if isinstance(error, AdaptorError) else text.describe(error)


def _from_first(act: Callable[[], T]) -> T:
    """Call `act` on rank 0 and return its result on all ranks. Raises ResumeError if the call failed."""
    broadcast: list[Any] = [None, ""]
    if dist.get_rank() == 0:
        try:
            broadcast = [act(), ""]
        except Exception as error:  # the others wait for the answer, whatever it is
            broadcast = [None, _words(error)]
    dist.broadcast_object_list(broadcast, src=0)
    first_result, problem = broadcast
    if problem:
        raise ResumeError(f"TTP_RESHAPE: {problem}")
    result: T = first_result
    return result


def _all_or_none(act: Callable[[], None]) -> None:
    """Call `act` on all ranks. Raises ResumeError on all ranks if the call failed on any rank."""
    problem = ""
    try:
        act()
    except Exception as error:  # as above
        problem = f"rank {dist.get_rank()} on {platform.node()}: {_words(error)}"
    problem = next(filter(None, gather_values(problem)), "")
    if problem:
        raise ResumeError(f"TTP_RESHAPE: {problem}")


def _say(line: str) -> None:
    output.tell(f"[ttp] {line}", to="stdout")
