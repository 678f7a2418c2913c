"""Decides on rank 0, before a resume, which checkpoint is loaded: the tracker's, or another in its place.

It asks for files to be compared with their manifest (`Files`) and is told the problems; all ranks make these
comparisons (`resume_check`). A checkpoint that cannot be read, because a disk or a machine is in trouble, may
be intact: the job is refused then, and nothing is changed. In the folder that the job itself saves to, a
damaged checkpoint is moved aside, and the newest intact one takes its place. A folder that the job only loads
from is not changed: there damage ends the job.
"""

from __future__ import annotations

import contextlib
import os
import platform
import zipfile
from collections.abc import Generator, Mapping, Sequence
from pathlib import Path

from adaptor import output
from adaptor.checkpoint import disk, left_overs, manifest, publish, saved_steps, tracker
from adaptor.checkpoint.manifest import Unreadable
from adaptor.checkpoint.save_folder_lock import locked
from adaptor.errors import CheckpointError, ResumeError
from adaptor.protocol import naming
from adaptor.protocol.file_entry import FileEntry

# The text of the tracker of a converted model, which belongs to no step.
RELEASE = "release"
# The number of names and problems that are printed, and the characters of each.
TOLD = 5
_LONGEST = 1000

# The next question of rank 0: the files of a folder, to be compared with their manifest; the answer is the
# list of problems.
Files = tuple[Path, tuple[FileEntry, ...]]
Judgement = Generator[Files, list[str], None]


def judge(load: Path, save: Path, chosen: int | None) -> Judgement:
    """Decide what the framework loads; ask for comparisons on the way, until what it names is intact.

    Args:
        load: the folder that the framework loads from.
        save: the folder that this job saves to.
        chosen: the step that the user named, None for that of the tracker.

    Raises:
        ResumeError: a checkpoint is damaged, and no other may take its place; or it cannot be read.
    """
    _require_readable(load)
    named = tracker.tracked_step(load) if chosen is None else chosen
    with contextlib.suppress(Exception):  # it only prints
        _tell_ignored(load)
    problems = _of_tracker(load) if named is None else (yield from _examine(load, named))
    if not problems:
        return
    if chosen is not None:
        raise ResumeError(f"{first_of(problems)}; --ckpt-step names it: choose another step, or leave it out")
    if load.resolve() != save.resolve():
        raise ResumeError(
            f"{first_of(problems)}; it is in --load, and only in the --save folder may another take its"
            " place: choose one with --ckpt-step, or another folder"
        )
    yield from _replace(load, named, problems)


def _replace(root: Path, named: int | None, problems: list[str]) -> Judgement:
    """Find the newest checkpoint that is intact, and let it take the place of what the tracker names."""
    steps, damaged, words = saved_steps.steps(root), {}, []
    if named is not None and os.path.lexists(root / naming.final_name(named)):
        steps = [step for step in steps if step < named]  # newer ones: a user has gone back by hand
        damaged[named] = problems
    else:
        words.append(first_of(problems))
    for step in reversed(steps):
        problems = yield from _examine(root, step)
        if problems:
            damaged[step] = problems
        elif saved_steps.has_manifest(root, step) or (
            named is not None and step < named and _seems_whole(root, step)
        ):
            break
    else:
        words += [first_of(problems) for problems in damaged.values()]
        raise ResumeError(
            f"{'; '.join(words[:TOLD])}; no other checkpoint in {root} is intact, and nothing was changed:"
            " load another one, or begin anew in another --save folder"
        )
    aside = {which: publish.place_aside(root, which) for which in damaged}
    words += [f"{first_of(problems)}, kept in {aside[which].name}" for which, problems in damaged.items()]
    more = [f"and {len(words) - TOLD} more"] if len(words) > TOLD else []
    _say(*words[:TOLD], *more, f"the newest intact checkpoint is step {step}")
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


def _examine(root: Path, step: int) -> Generator[Files, list[str], list[str]]:
    """Return what is wrong with a checkpoint; nothing if it has no manifest to compare it with.

    Raises:
        ResumeError: a file cannot be read, and no other is damaged.
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
        raise ResumeError(_refusal([by_rank(0, str(error))])) from error
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
            raise ResumeError(_refusal([by_rank(0, f"{path}: cannot be read ({error.strerror})")])) from error


def _require_answer(path: Path) -> None:
    """Refuse a path of which the system does not say whether it exists. Raises ResumeError."""
    try:
        path.stat()
    except OSError as error:
        if not disk.is_wrong(error):
            raise ResumeError(_refusal([by_rank(0, f"{path}: cannot be read ({error.strerror})")])) from error
    except ValueError:
        pass


def _refusal(unreadable: Sequence[str]) -> str:
    return (
        f"{first_of(unreadable)}; it may be intact, so nothing was changed: start again when it can be read"
    )


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
        more = f" (and {len(ignored) - TOLD} more)" if len(ignored) > TOLD else ""
        _say(f"{root}: no checkpoint, and ignored: {', '.join(ignored[:TOLD])}{more}")


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
    output.tell(f"[ttp] {'; '.join(map(line_of, words))}", to="stdout")


def by_rank(rank: int, problem: str) -> Unreadable:
    """Return the problem, with the rank and machine that cannot read it."""
    return Unreadable(f"rank {rank} on {platform.node()}: {problem}")


def line_of(text: str) -> str:
    """Return `text` as one printable line of limited length: a file name may contain any character."""
    plain = "".join(char if char.isprintable() else ascii(char)[1:-1] for char in text)
    return plain if len(plain) <= _LONGEST else f"{plain[:_LONGEST]} ..."


def first_of(problems: Sequence[str]) -> str:
    """Return the first of some problems as one line, with the number of the others."""
    return line_of(problems[0]) + (f" (and {len(problems) - 1} more)" if len(problems) > 1 else "")
