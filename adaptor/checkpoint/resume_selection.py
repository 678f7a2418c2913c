"""Decides on rank 0, before a resume, which checkpoint is loaded, and carries out on one disk what all ranks
decided.

Rank 0 asks for comparisons of files with their manifest (`Files`) and gets the `CheckpointProblems`; all
ranks make the comparisons (`resume_check`). A checkpoint that cannot be read, because of an error of a disk
or a machine, may be intact: the job is refused then, and nothing is changed. In the save folder of the job a
damaged checkpoint is moved aside, and the newest intact checkpoint replaces it. A folder that the job only
loads from is not changed: its damage ends the job.

Where nodes have disks of their own, a checkpoint is intact if it is intact on each disk. A node without the
checkpoint may only see a shared folder late: so another checkpoint is taken only if the node certainly has
another disk.

Here a tracker goes backwards, because its checkpoint is damaged, or not whole on every node: where nodes have
disks of their own, a job that ended between the saves of two nodes has left a step on some disks. Elsewhere a
tracker goes backwards only in a pull (`store/pull.py`), from a step whose folder is gone.
"""

from __future__ import annotations

import contextlib
import os
import platform
import zipfile
from collections.abc import Generator, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import MappingProxyType

from adaptor import context, output
from adaptor.checkpoint import disk, left_overs, manifest, publish, regular_folder, tracker
from adaptor.checkpoint.manifest import Unreadable
from adaptor.checkpoint.tracker import locked
from adaptor.errors import CheckpointError, ResumeError
from adaptor.protocol import naming
from adaptor.protocol.environment import WorkerPlace
from adaptor.protocol.naming import FileEntry


@dataclass(frozen=True)
class Agreed:
    """The step from which all ranks go on, for the disks that rank 0 does not see.

    Attributes:
        given_up: later steps that are not whole on every node; they are moved aside
        may_change: False: the job only loads from the folder
    """

    step: int
    given_up: tuple[int, ...] = ()
    may_change: bool = True


def names_aside(save_folder: Path, steps: Iterable[int]) -> dict[int, Path]:
    """Return, for each of these steps with a folder under its final name, a free name for the folder."""
    return {step: publish.place_aside(save_folder, step) for step in steps if _bears_name(save_folder, step)}


@disk.one_line
def go_back(save_folder: Path, step: int, aside: Mapping[int, Path]) -> None:
    """Move the folders of other steps aside, to the paths in `aside`, and let the tracker name `step`.

    The tracker comes last, as ever. After a crash in between, the tracker names a missing folder, which the
    next start treats as damage. Raises CheckpointError.
    """
    for aside_step, target in aside.items():
        # A shared file system may show other times of its files on each machine, as if each had a disk of its
        # own: then another rank has moved the folder.
        with contextlib.suppress(FileNotFoundError):
            (save_folder / naming.final_name(aside_step)).rename(target)
    disk.sync(save_folder)
    with locked(save_folder):
        tracker.set_under_lock(save_folder, step)


def complete(save_folder: Path, name: str, generation: str) -> str:
    """Name a regular save on this disk, if rank 0 has named its own and the job ended then.

    Returns why a written save cannot get its name, in a line; "" if it has its name, is missing, or is
    incomplete. Never raises, because all ranks wait.
    """
    step = naming.step_of(name)
    try:
        if step is not None and regular_folder.complete_on_own_disk(save_folder, step, generation):
            tracker.advance(save_folder, step)
            node = context.part(WorkerPlace).node
            output.tell(
                f"[ttp] node {node}: {save_folder / name}: the end of the job had cut its save short when all"
                " was written; it is complete now",
                to="stdout",
            )
    except Exception as error:
        reason = str(error) if isinstance(error, CheckpointError) else f"{type(error).__name__}: {error}"
        return f"{save_folder / name}: was written, and cannot get its name now: {reason}"
    return ""


def follow(save_folder: Path, agreed: Agreed) -> str:
    """Carry out `agreed` on a disk that rank 0 does not see; return why not, or "". Never raises."""
    if not agreed.may_change:
        return settle(save_folder, agreed.step, may_change=False)
    try:
        named = tracker.tracked_step(save_folder)
        left_overs.clean(save_folder)
        aside = names_aside(save_folder, agreed.given_up)
        if aside or named != agreed.step:
            go_back(save_folder, agreed.step, aside)
        if named not in agreed.given_up:
            _tell_of(save_folder, named, agreed.step)
    except CheckpointError as error:
        return str(error)
    except Exception as error:
        return f"{save_folder}: {type(error).__name__}: {error}"
    return ""


def settle(save_folder: Path, step: int, *, may_change: bool) -> str:
    """Let the tracker on this disk name the `step` of rank 0, if it names no step or a later step.

    The framework takes the largest step of all ranks. `may_change`: whether the job saves in the folder.
    Returns as `follow`.
    """
    named = tracker.tracked_step(save_folder)
    if named is not None and named <= step:
        return ""
    if not may_change:
        return _of_trackers(save_folder, named, step)
    try:
        go_back(save_folder, step, {})
        _tell_of(save_folder, named, step)
    except CheckpointError as error:
        return str(error)
    except Exception as error:
        return f"{save_folder}: {type(error).__name__}: {error}"
    return ""


def _tell_of(save_folder: Path, named: int | None, step: int) -> None:
    """Print a line about a tracker that has gone backwards."""
    if named is not None and named > step:
        output.tell(
            f"[ttp] node {context.part(WorkerPlace).node}: {save_folder / naming.TRACKER} named step {named},"
            f" and names step {step} now, as on node 0",
            to="stdout",
        )


def _bears_name(save_folder: Path, step: int) -> bool:
    return os.path.lexists(save_folder / naming.final_name(step))


def _of_trackers(save_folder: Path, named: int | None, step: int) -> str:
    named_step = "no step" if named is None else f"step {named}"
    return f"{save_folder / naming.TRACKER}: names {named_step}, that of node 0 step {step}"


# The text of the tracker of a converted model, which belongs to no step.
RELEASE = "release"
# The number of names and problems that are printed, and the characters of each.
MOST_NAMED = 5
_LONGEST = 1000

COPIES = (
    "the nodes do not see the same folder, so nothing was changed: copy the checkpoint to them anew, or give"
    " a folder that they share"
)

ALIKE = "let all name the same step, or choose one with --ckpt-step"


@dataclass(frozen=True)
class CheckpointProblems:
    """The findings of all ranks about a checkpoint.

    Attributes:
        problems: a line each; if nodes have copies of their own, one line of each node with problems
        sees_another: the ranks that do not see the checkpoint of rank 0
        on_another_disk: the ranks that certainly have another disk
    """

    problems: list[str]
    sees_another: frozenset[int] = frozenset()
    on_another_disk: frozenset[int] = frozenset()

    @property
    def words(self) -> str:
        """Return the problems in a line."""
        return (
            "; ".join(map(line_of, self.problems[:MOST_NAMED]))
            if self.sees_another
            else first_of(self.problems)
        )

    def of_step(self, step: int) -> str:
        """Return the problem with the checkpoint of `step`."""
        return f"step {step} is not whole on every node ({self.words})" if self.sees_another else self.words


# The next question of rank 0: the files of a folder, to be compared with their manifest, or actions on the
# disks of other nodes, whose answer has the problems.
Files = tuple[Path, tuple[FileEntry, ...]]
Judgement = Generator[Files | Agreed, CheckpointProblems, bool]


def judge(
    load_folder: Path,
    save_folder: Path,
    chosen: int | None,
    refused: Mapping[int, str] = MappingProxyType({}),
) -> Judgement:
    """Decide on the checkpoint for the framework; ask for comparisons until the named checkpoint is intact.

    `chosen`: the step that the user named, None for the step of the tracker; `refused`: checkpoints that
    are not taken, by step, with the reason. Returns True if rank 0 sees a checkpoint to load. Raises
    ResumeError if a checkpoint is damaged and no other may replace it, or cannot be read.
    """
    _require_readable(load_folder)
    named = tracker.tracked_step(load_folder) if chosen is None else chosen
    with contextlib.suppress(Exception):  # only prints
        _tell_ignored(load_folder)
    examined = (
        CheckpointProblems(_of_tracker(load_folder))
        if named is None
        else (yield from _examine(load_folder, named, refused))
    )
    is_saved_to = load_folder.resolve() == save_folder.resolve()
    if not examined.problems:
        if named is not None and chosen is None:
            if examined.on_another_disk:
                yield from _agree(Agreed(named, may_change=is_saved_to))
            else:
                _tell_of_later(load_folder, named)
        return named is not None
    if examined.sees_another and (chosen is not None or not is_saved_to):
        raise ResumeError(f"{examined.words}; {COPIES}")
    if chosen is not None:
        raise ResumeError(f"{examined.words}; --ckpt-step names it: choose another step, or leave it out")
    if not is_saved_to:
        raise ResumeError(
            f"{examined.words}; it is in --load, and only in the --save folder may another take its"
            " place: choose one with --ckpt-step, or another folder"
        )
    yield from _replace(load_folder, named, examined, refused)
    return True


def _replace(
    save_folder: Path, named: int | None, examined: CheckpointProblems, refused: Mapping[int, str]
) -> Generator[Files | Agreed, CheckpointProblems, None]:
    """Find the newest intact checkpoint, and let the tracker name it."""
    steps, damaged, problem_lines = tracker.steps(save_folder), dict[int, CheckpointProblems](), []
    if named is not None and os.path.lexists(save_folder / naming.final_name(named)):
        steps = [step for step in steps if step < named]  # newer steps: a user has gone back by hand
        damaged[named] = examined
    else:
        problem_lines.append(examined.words)
    for step in reversed(steps):
        examined = yield from _examine(save_folder, step, refused)
        if examined.problems:
            damaged[step] = examined
        elif tracker.has_manifest(save_folder, step) or (
            named is not None and step < named and _seems_whole(save_folder, step)
        ):
            break
    else:
        raise ResumeError(_of_none(save_folder, problem_lines, damaged))
    sees_another = frozenset[int]().union(*(damaged_step.sees_another for damaged_step in damaged.values()))
    if sees_another - examined.on_another_disk:
        raise ResumeError(
            f"{next(damage for damage in damaged.values() if damage.sees_another).words}; {COPIES}"
        )
    aside = names_aside(save_folder, damaged)
    # Before rank 0: after a crash in between, the next start finds the same problems.
    if examined.on_another_disk:
        gone = () if named is None or named in damaged else (named,)
        yield from _agree(Agreed(step, (*gone, *damaged)))
    problem_lines += [
        f"{damaged_step.of_step(step)}, kept in {aside[step].name}" for step, damaged_step in damaged.items()
    ]
    omitted = [f"and {len(problem_lines) - MOST_NAMED} more"] if len(problem_lines) > MOST_NAMED else []
    newest = (
        "the newest that is intact on every node"
        if examined.on_another_disk
        else "the newest intact checkpoint"
    )
    _say(*problem_lines[:MOST_NAMED], *omitted, f"{newest} is step {step}")
    go_back(save_folder, step, aside)


def _of_none(save_folder: Path, problem_lines: list[str], damaged: dict[int, CheckpointProblems]) -> str:
    """Return why nothing can be loaded: no checkpoint is intact."""
    problem_lines = [*problem_lines, *(damage.of_step(step) for step, damage in damaged.items())]
    summary = f"{'; '.join(problem_lines[:MOST_NAMED])}; no other checkpoint in {save_folder} is intact"
    if any(damage.sees_another for damage in damaged.values()):
        return f"{summary} on every node; {COPIES}"
    return f"{summary}, and nothing was changed: load another one, or begin anew in another --save folder"


def _agree(agreed: Agreed) -> Generator[Agreed, CheckpointProblems, None]:
    """Have actions done on the disks that rank 0 does not see. Raises ResumeError."""
    examined = yield agreed
    if examined.problems:
        advice = "" if agreed.may_change else f"; {ALIKE}"
        raise ResumeError(f"{'; '.join(map(line_of, examined.problems[:MOST_NAMED]))}{advice}")


def _examine(
    load_folder: Path, step: int, refused: Mapping[int, str]
) -> Generator[Files, CheckpointProblems, CheckpointProblems]:
    """Return the problems of a checkpoint; none if it has no manifest. Raises ResumeError if unreadable."""
    folder = load_folder / naming.final_name(step)
    if step in refused:
        return CheckpointProblems([refused[step]])
    _require_answer(folder)
    if not disk.is_folder(folder):
        return CheckpointProblems(
            [f"{folder}: {'is not a folder' if os.path.lexists(folder) else 'missing'}"]
        )
    if not tracker.has_manifest(load_folder, step):
        return CheckpointProblems([])
    try:
        saved_manifest = manifest.read(folder)
    except manifest.UnreadableError as error:
        raise ResumeError(_refusal([by_rank(0, str(error))])) from error
    except CheckpointError as error:
        return CheckpointProblems([str(error)])
    if saved_manifest.step != step or not saved_manifest.files:
        return CheckpointProblems([f"{folder / naming.MANIFEST}: is not that of step {step}"])
    examined = yield folder, saved_manifest.files
    wrong = [problem for problem in examined.problems if not isinstance(problem, Unreadable)]
    if examined.problems and not wrong:
        raise ResumeError(_refusal(examined.problems))
    return CheckpointProblems(wrong, examined.sees_another, examined.on_another_disk)


def _require_readable(load_folder: Path) -> None:
    """Refuse a folder, or a tracker, whose content cannot be told. Raises ResumeError."""
    _require_answer(load_folder)
    path = load_folder / naming.TRACKER
    _require_answer(path)
    try:
        os.close(disk.open_regular(path))
    except OSError as error:
        if not disk.is_wrong(error):
            raise ResumeError(_refusal([by_rank(0, f"{path}: cannot be read ({error.strerror})")])) from error


def _require_answer(path: Path) -> None:
    """Refuse a path of which the system cannot tell whether it exists. Raises ResumeError."""
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


def _of_tracker(load_folder: Path) -> list[str]:
    """Return the problem of a tracker that names no step; none if no checkpoint exists.

    If it says `release`, the framework begins from a converted model, as the user wanted; a line names the
    newer checkpoints. Raises ResumeError if the tracker is not a file.
    """
    path = load_folder / naming.TRACKER
    own_steps = [step for step in tracker.steps(load_folder) if tracker.has_manifest(load_folder, step)]
    if not own_steps:
        if os.path.lexists(path) and not path.is_file():
            raise ResumeError(f"{path}: is not a file, so nothing can be loaded: remove it")
        return []
    if not os.path.lexists(path):
        return [f"{path}: missing beside checkpoints (to begin anew, choose another --save folder)"]
    if tracker.tracker_text(load_folder) != RELEASE:
        return [f"{path}: names no step"]
    _say(
        f"{path} says release: training begins from {load_folder / RELEASE}, not from step {own_steps[-1]},"
        f" which is saved beside it; write {own_steps[-1]} into the file to go on from there"
    )
    return []


def _tell_of_later(load_folder: Path, named: int) -> None:
    """Print a line about a checkpoint later than the step of the tracker, which a user may have chosen."""
    newest = max(filter(partial(tracker.has_manifest, load_folder), tracker.steps(load_folder)), default=0)
    if newest > named:
        _say(
            f"{load_folder / naming.TRACKER} says {named}: training goes on from step {named}, not from step"
            f" {newest}, which is saved beside it; write {newest} into the file to go on from there"
        )


def _tell_ignored(load_folder: Path) -> None:
    """Name entries that look like a checkpoint and are none; they are left as they are."""
    ignored = [
        name
        for name in tracker.entry_names(load_folder)
        if (name.startswith("iter_") and naming.step_of(name) is None and not naming.is_temporary(name))
        or (naming.is_temporary(name) and not left_overs.is_left_over(load_folder / name))
    ]
    if ignored:
        omitted = f" (and {len(ignored) - MOST_NAMED} more)" if len(ignored) > MOST_NAMED else ""
        _say(f"{load_folder}: no checkpoint, and ignored: {', '.join(ignored[:MOST_NAMED])}{omitted}")


def _seems_whole(load_folder: Path, step: int) -> bool:
    """Return True if a checkpoint without a manifest has files, and no archive of torch is cut off."""
    files = list(disk.files(load_folder / naming.final_name(step)))
    return bool(files) and all(_is_archive(file) for file in files if file.suffix == ".pt")


def _is_archive(path: Path) -> bool:
    try:
        with os.fdopen(disk.open_regular(path), "rb") as file:
            return zipfile.is_zipfile(file)
    except OSError:
        return False


def _say(*message_parts: str) -> None:
    output.tell(f"[ttp] {'; '.join(map(line_of, message_parts))}", to="stdout")


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
