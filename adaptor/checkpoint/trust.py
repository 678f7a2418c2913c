"""Nothing that was saved is trusted: before a resume all ranks together check what the tracker names.

Rank 0 decides what is checked and what is done, and tells the others, who might see an older state of a
shared file system; the ranks divide the files among them, since a checksum reads everything. So all ranks go
on, or all raise the same. What is not of the adaptor, a folder without a manifest, is left to the framework.

In the folder that the job itself saves to, what is damaged is moved aside, and the newest intact checkpoint
takes its place. A folder that it only loads from is not touched: there a damage ends the job.
"""

from __future__ import annotations

import os
import zipfile
from collections.abc import Generator
from dataclasses import dataclass
from pathlib import Path

from adaptor.checkpoint import disk, manifest, naming, publish
from adaptor.checkpoint.manifest import FileEntry
from adaptor.errors import CheckpointError, ResumeError

# What the tracker of a converted model says, which belongs to no step.
RELEASE = b"release"

# What rank 0 wants to know next: the files of a folder, which are compared with their manifest. It is sent
# what is wrong with them.
_Files = tuple[Path, tuple[FileEntry, ...]]
_Judgement = Generator[_Files, list[str], None]


@dataclass(frozen=True)
class _Told:
    """What rank 0 tells: files to be checked, or that all is done; `refusal` is why nothing can be loaded."""

    folder: str = ""
    files: tuple[FileEntry, ...] = ()
    refusal: str = ""


def require_intact(load: Path, save: Path, chosen: int | None = None) -> None:
    """On every rank at the same time, before the framework reads: what it will read is intact.

    Args:
        load: where it reads.
        save: where this job saves; if that is the same, another checkpoint may be put in the place of a
            damaged one.
        chosen: the step that the user named, None for that of the tracker.

    Raises:
        ResumeError: a checkpoint is damaged, and no other may take its place.
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
        found: list[list[str]] = [[] for _ in range(size)]
        dist.all_gather_object(found, manifest.compare(Path(order.folder), _part(order.files, rank, size)))
        problems = [problem for part in found for problem in part]


def _part(files: tuple[FileEntry, ...], rank: int, size: int) -> list[FileEntry]:
    """The files that `rank` reads: each has one reader, who are spread over all ranks, and so over nodes."""
    return [file for number, file in enumerate(files) if number * size // len(files) == rank]


def _next(judgement: _Judgement, problems: list[str] | None) -> _Told:
    try:
        folder, files = next(judgement) if problems is None else judgement.send(problems)
        return _Told(str(folder), files)
    except StopIteration:
        return _Told()
    except (CheckpointError, ResumeError, OSError) as error:
        return _Told(refusal=str(error))


def _judge(load: Path, save: Path, chosen: int | None) -> _Judgement:
    named = publish.tracked_step(load) if chosen is None else chosen
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
    steps, damaged, words = _steps(root), {}, []
    if named is not None and os.path.lexists(root / naming.final_name(named)):
        steps = [step for step in steps if step < named]  # newer ones: a user has gone back by hand
        damaged[named] = problems
    else:
        words.append(_first(problems))
    for step in reversed(steps):
        problems = yield from _examine(root, step)
        if problems:
            damaged[step] = problems
        elif _is_ours(root, step) or (named is not None and step < named and _seems_whole(root, step)):
            break
    else:
        words += [_first(problems) for problems in damaged.values()]
        raise ResumeError(
            f"{'; '.join(words)}; no other checkpoint in {root} is intact, and nothing was changed:"
            " load another one, or begin anew in another --save folder"
        )
    aside = {which: publish.place_aside(root, which) for which in damaged}
    words += [f"{_first(problems)}, kept in {aside[which].name}" for which, problems in damaged.items()]
    print(f"[ttp] {'; '.join(words)}; the newest intact checkpoint is step {step}", flush=True)
    publish.go_back(root, step, aside)


def _examine(root: Path, step: int) -> Generator[_Files, list[str], list[str]]:
    """What is wrong with a checkpoint: nothing is known of one that has no manifest."""
    folder = root / naming.final_name(step)
    if not folder.is_dir():
        return [f"{folder}: missing"]
    if not _is_ours(root, step):
        return []
    try:
        known = manifest.read(folder)
    except CheckpointError as error:
        return [str(error)]
    if known.step != step or not known.files:
        return [f"{folder / naming.MANIFEST}: is not that of step {step}"]
    return (yield folder, known.files)


def _of_tracker(root: Path) -> list[str]:
    """What is wrong with a tracker that names no step: nothing where there is nothing that it could name.

    One that is not there is not lost, for it is only ever replaced: a user took it away to begin anew.
    """
    tracker = root / naming.TRACKER
    if not tracker.exists() or not any(_is_ours(root, step) for step in _steps(root)):
        return []
    return [] if tracker.read_bytes().strip() == RELEASE else [f"{tracker}: names no step"]


def _steps(root: Path) -> list[int]:
    """The steps that have a folder, in order."""
    names = [path.name for path in root.iterdir()] if root.is_dir() else []
    return sorted(step for name in names if (step := naming.step_of(name)) is not None)


def _is_ours(root: Path, step: int) -> bool:
    return os.path.lexists(root / naming.final_name(step) / naming.MANIFEST)


def _seems_whole(root: Path, step: int) -> bool:
    """Of a checkpoint without a manifest: it has files, and torch's archives among them have their end."""
    files = list(disk.files(root / naming.final_name(step)))
    return bool(files) and all(zipfile.is_zipfile(file) for file in files if file.suffix == ".pt")


def _first(problems: list[str]) -> str:
    return problems[0] + (f" (and {len(problems) - 1} more)" if len(problems) > 1 else "")
