"""Checks, before a resume and by all ranks together, the checkpoint that the tracker names.

Rank 0 decides what is checked and what is done, and tells the others, who might see an older state of a
shared file system; the ranks divide the files among them, and the blocks of a file that has a checksum of
blocks, since a checksum reads everything (`divided_reading`). So all ranks go on, or all raise the same.
What is not of the adaptor, a folder without a manifest, is left to the framework.

What cannot be read on some rank, because a disk or a machine has troubles, may be intact: then the job is
refused, and nothing is touched. In the folder that the job itself saves to, what is damaged is moved aside,
and the newest intact checkpoint takes its place. A folder that it only loads from is not touched: there a
damage ends the job.
"""

from __future__ import annotations

import contextlib
import os
import platform
import zipfile
from collections.abc import Generator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from adaptor import context, output
from adaptor.checkpoint import (
    disk,
    divided_reading,
    hashing,
    left_overs,
    manifest,
    publish,
    saved_steps,
    tracker,
)
from adaptor.checkpoint.checked_files import CheckedFiles
from adaptor.checkpoint.divided_reading import Division, Reader, in_blocks
from adaptor.checkpoint.manifest import Unreadable
from adaptor.checkpoint.save_folder_lock import locked
from adaptor.errors import CheckpointError, ResumeError
from adaptor.protocol import naming
from adaptor.protocol.environment import Place
from adaptor.protocol.file_entry import FileEntry

# The text of the tracker of a converted model, which belongs to no step.
RELEASE = "release"
# The number of names and problems that are printed, and the characters of each.
_TOLD = 5
_LONGEST = 1000

# The next question of rank 0: the files of a folder, to be compared with their manifest; the answer is the
# list of problems.
_Files = tuple[Path, tuple[FileEntry, ...]]
_Judgement = Generator[_Files, list[str], None]


@dataclass(frozen=True)
class _Told:
    """The message of rank 0: files to check, or that all is done; `refusal`: why nothing can be loaded."""

    folder: str = ""
    files: tuple[FileEntry, ...] = ()
    refusal: str = ""


def require_intact(load: Path, save: Path, chosen: int | None = None, loads: tuple[str, ...] = ()) -> None:
    """Make sure that the checkpoint which the framework is about to read is intact.

    All ranks call it at the same time: the files are divided among those that see the same folder. Files that
    are intact are `CheckedFiles` afterwards, so the framework need not read them once more.

    Args:
        load: the folder that the framework loads from.
        save: the folder that this job saves to; if it is the same, another checkpoint may take the place of a
            damaged one.
        chosen: the step that the user named, None for that of the tracker.
        loads: with what the paths of files begin, below the checkpoint, that this rank is about to load; they
            are read on its node then.

    Raises:
        ResumeError: a checkpoint is damaged, and no other may take its place; or it cannot be read; or nodes
            have copies of their own, and one is damaged.
    """
    import torch.distributed as dist

    rank, size = dist.get_rank(), dist.get_world_size()
    judgement = _judge(load, save, chosen) if rank == 0 else None
    problems: list[str] | None = None
    while True:
        told = [_next(judgement, problems) if judgement is not None else _Told()]
        dist.broadcast_object_list(told, src=0)
        (order,) = told
        if order.refusal:
            raise ResumeError(order.refusal)
        if not order.files:
            return
        readers = [Reader(0, ())] * size
        view = divided_reading.view(Path(order.folder))
        dist.all_gather_object(readers, Reader(context.part(Place).node, loads, view))
        found = [_Compared() for _ in range(size)]
        dist.all_gather_object(found, _compare(order, rank, readers))
        views = divided_reading.views(readers)
        seen = [_of_view(order, [found[number] for number in ranks]) for ranks in views]
        problems = [problem for some in seen for problem in some]
        if not problems:
            context.part(CheckedFiles).add(Path(order.folder), order.files)
        elif divided_reading.are_copies(readers):
            raise ResumeError(_of_copies(seen, [readers[ranks[0]].node for ranks in views]))


@dataclass
class _Compared:
    """The part of a rank.

    Attributes:
        problems: with the files
        digests: by path, of the blocks that this rank has read
    """

    problems: list[str] = field(default_factory=list)
    digests: dict[str, bytes] = field(default_factory=dict)


def _compare(order: _Told, rank: int, readers: Sequence[Reader]) -> _Compared:
    """Compare the part of `rank`; never raise, for the other ranks wait for the answer."""
    compared, folder = _Compared(), Path(order.folder)
    try:
        division = Division(rank, readers)
        mine = division.whole_files(order.files)
        compared.problems += manifest.compare(folder, [file for file in mine if not in_blocks(file)])
        compared.problems += manifest.compare(folder, filter(in_blocks, mine), checksums=False)
        threads = max(1, len(os.sched_getaffinity(0)) // max(1, context.part(Place).local_size))
        for file in filter(in_blocks, order.files):
            first, end = division.blocks(file)
            if first < end:
                compared.digests[file.path] = _digests(folder / file.path, first, end, threads, compared)
    except Exception as error:
        compared.problems.append(
            Unreadable(f"{order.folder}: cannot be read ({type(error).__name__}: {error})")
        )
    compared.problems = [
        _by(rank, problem) if isinstance(problem, Unreadable) else problem for problem in compared.problems
    ]
    return compared


def _digests(path: Path, first: int, end: int, threads: int, compared: _Compared) -> bytes:
    try:
        return hashing.block_digests(path, first, end, threads)
    except OSError as error:
        if not disk.is_wrong(error):  # else the rank that compares its size says so
            compared.problems.append(Unreadable(f"{path}: cannot be read ({error.strerror or error})"))
        return b""


def _of_view(order: _Told, found: Sequence[_Compared]) -> list[str]:
    """Return all problems of the files that some ranks see alike; of many a file each has read a part."""
    told = [problem for part in found for problem in part.problems]
    problems = list(told)
    for file in filter(in_blocks, order.files):
        path = Path(order.folder) / file.path
        digests = b"".join(part.digests.get(file.path, b"") for part in found)
        if len(digests) != hashing.blocks_of(file) * hashing.DIGEST_BYTES:
            if not any(f"{path}:" in problem for problem in told):
                problems.append(Unreadable(f"{path}: cannot be read as a whole on all ranks"))
        elif hashing.join_blocks(digests) != file.xxh3_128_blocks:
            problems.append(f"{path}: checksum differs from the manifest")
    return problems


def _of_copies(seen: Sequence[list[str]], nodes: Sequence[int]) -> str:
    """Refuse copies that are not all intact: no older checkpoint can take the place of each.

    Args:
        seen: the problems of each copy.
        nodes: for each copy, the number of a node that has it.
    """
    words = [
        f"node {node}: {_first(problems)}" for problems, node in zip(seen, nodes, strict=True) if problems
    ]
    return (
        f"{'; '.join(words[:_TOLD])}; the nodes do not see the same folder, so nothing was changed: copy the"
        " checkpoint to them anew, or give a folder that they share"
    )


def _by(rank: int, problem: str) -> Unreadable:
    """Say who cannot read it."""
    return Unreadable(f"rank {rank} on {platform.node()}: {problem}")


def _next(judgement: _Judgement, problems: list[str] | None) -> _Told:
    try:
        folder, files = next(judgement) if problems is None else judgement.send(problems)
        return _Told(str(folder), files)
    except StopIteration:
        return _Told()
    except (CheckpointError, ResumeError) as error:
        return _Told(refusal=str(error))
    except Exception as error:  # whatever it is, the other ranks wait for word of it
        return _Told(refusal=_line(f"the checkpoint cannot be checked: {type(error).__name__}: {error}"))


def _judge(load: Path, save: Path, chosen: int | None) -> _Judgement:
    _require_readable(load)
    named = tracker.tracked_step(load) if chosen is None else chosen
    with contextlib.suppress(Exception):  # it only prints
        _tell_ignored(load)
    problems = _of_tracker(load) if named is None else (yield from _examine(load, named))
    if not problems:
        return
    if chosen is not None:
        raise ResumeError(f"{_first(problems)}; --ckpt-step names it: choose another step, or leave it out")
    if load.resolve() != save.resolve():
        raise ResumeError(
            f"{_first(problems)}; it is in --load, and only in the --save folder may another take its place:"
            " choose one with --ckpt-step, or another folder"
        )
    yield from _replace(load, named, problems)


def _replace(root: Path, named: int | None, problems: list[str]) -> _Judgement:
    """Find the newest checkpoint that is intact, and let it take the place of what the tracker names."""
    steps, damaged, words = saved_steps.steps(root), {}, []
    if named is not None and os.path.lexists(root / naming.final_name(named)):
        steps = [step for step in steps if step < named]  # newer ones: a user has gone back by hand
        damaged[named] = problems
    else:
        words.append(_first(problems))
    for step in reversed(steps):
        problems = yield from _examine(root, step)
        if problems:
            damaged[step] = problems
        elif saved_steps.has_manifest(root, step) or (
            named is not None and step < named and _seems_whole(root, step)
        ):
            break
    else:
        words += [_first(problems) for problems in damaged.values()]
        raise ResumeError(
            f"{'; '.join(words[:_TOLD])}; no other checkpoint in {root} is intact, and nothing was changed:"
            " load another one, or begin anew in another --save folder"
        )
    aside = {which: publish.place_aside(root, which) for which in damaged}
    words += [f"{_first(problems)}, kept in {aside[which].name}" for which, problems in damaged.items()]
    more = [f"and {len(words) - _TOLD} more"] if len(words) > _TOLD else []
    _say(*words[:_TOLD], *more, f"the newest intact checkpoint is step {step}")
    _go_back(root, step, aside)


@disk.one_line
def _go_back(root: Path, step: int, damaged: Mapping[int, Path]) -> None:
    """Move the folders of damaged checkpoints, by step, aside, and let the tracker name `step`.

    Here alone the tracker goes backwards: what it named is not there any more. It comes last, as ever. After
    a crash in between it names a folder that is gone, which the next start takes for one more damage.
    """
    for which, aside in damaged.items():
        (root / naming.final_name(which)).rename(aside)
    disk.sync(root)
    with locked(root):
        tracker.set_under_lock(root, step)


def _examine(root: Path, step: int) -> Generator[_Files, list[str], list[str]]:
    """Return what is wrong with a checkpoint: nothing is known of one that has no manifest.

    Raises:
        ResumeError: nothing is known to be wrong, and something cannot be read.
    """
    folder = root / naming.final_name(step)
    _require_answer(folder)
    if not disk.is_folder(folder):
        return [f"{folder}: {'is not a folder' if os.path.lexists(folder) else 'missing'}"]
    if not saved_steps.has_manifest(root, step):
        return []
    try:
        known = manifest.read(folder)
    except manifest.UnreadableError as error:
        raise ResumeError(_refusal([_by(0, str(error))])) from error
    except CheckpointError as error:
        return [str(error)]
    if known.step != step or not known.files:
        return [f"{folder / naming.MANIFEST}: is not that of step {step}"]
    problems = yield folder, known.files
    wrong = [problem for problem in problems if not isinstance(problem, Unreadable)]
    if problems and not wrong:
        raise ResumeError(_refusal(problems))
    return wrong


def _require_readable(root: Path) -> None:
    """Refuse a folder, or a tracker, of which nobody can tell what it says. Raises ResumeError."""
    _require_answer(root)
    path = root / naming.TRACKER
    _require_answer(path)
    try:
        os.close(disk.open_regular(path))
    except OSError as error:
        if not disk.is_wrong(error):
            raise ResumeError(_refusal([_by(0, f"{path}: cannot be read ({error.strerror})")])) from error


def _require_answer(path: Path) -> None:
    """Refuse what may be there or not. Raises ResumeError."""
    try:
        path.stat()
    except OSError as error:
        if not disk.is_wrong(error):
            raise ResumeError(_refusal([_by(0, f"{path}: cannot be read ({error.strerror})")])) from error
    except ValueError:
        pass


def _refusal(unreadable: Sequence[str]) -> str:
    return f"{_first(unreadable)}; it may be intact, so nothing was changed: start again when it can be read"


def _of_tracker(root: Path) -> list[str]:
    """Return the problem of a tracker that names no step; no problem if there is no checkpoint to name.

    If it says `release`, the framework begins from a converted model, as the user wanted; a line then tells
    of the newer checkpoints beside it.

    Raises:
        ResumeError: the tracker is not a file, so the framework could load nothing.
    """
    path = root / naming.TRACKER
    ours = [step for step in saved_steps.steps(root) if saved_steps.has_manifest(root, step)]
    if not ours:
        if os.path.lexists(path) and not path.is_file():
            raise ResumeError(f"{path}: is not a file, so nothing can be loaded: remove it")
        return []
    if not os.path.lexists(path):
        return [f"{path}: missing beside checkpoints (to begin anew, choose another --save folder)"]
    if tracker.tracker_text(root) != RELEASE:
        return [f"{path}: names no step"]
    _say(
        f"{path} says release: training begins from {root / RELEASE}, not from step {ours[-1]}, which is"
        f" saved beside it; write {ours[-1]} into the file to go on from there"
    )
    return []


def _tell_ignored(root: Path) -> None:
    """Name what looks like a checkpoint and is none: it is left as it is."""
    ignored = [
        name
        for name in saved_steps.names(root)
        if (name.startswith("iter_") and naming.step_of(name) is None and not naming.is_temporary(name))
        or (naming.is_temporary(name) and not left_overs.is_left_over(root / name))
    ]
    if ignored:
        more = f" (and {len(ignored) - _TOLD} more)" if len(ignored) > _TOLD else ""
        _say(f"{root}: no checkpoint, and ignored: {', '.join(ignored[:_TOLD])}{more}")


def _seems_whole(root: Path, step: int) -> bool:
    """Return True if a checkpoint without a manifest has files, and no archive of torch is cut off."""
    files = list(disk.files(root / naming.final_name(step)))
    return bool(files) and all(_is_archive(file) for file in files if file.suffix == ".pt")


def _is_archive(path: Path) -> bool:
    try:
        with os.fdopen(disk.open_regular(path), "rb") as file:
            return zipfile.is_zipfile(file)
    except OSError:
        return False


def _say(*words: str) -> None:
    output.tell(f"[ttp] {'; '.join(map(_line, words))}", to="stdout")


def _line(text: str) -> str:
    """Return `text` as one printable line of limited length: a file name may contain any character."""
    plain = "".join(char if char.isprintable() else ascii(char)[1:-1] for char in text)
    return plain if len(plain) <= _LONGEST else f"{plain[:_LONGEST]} ..."


def _first(problems: Sequence[str]) -> str:
    return _line(problems[0]) + (f" (and {len(problems) - 1} more)" if len(problems) > 1 else "")
