"""Carries out on one disk the decisions of all ranks before a resume: the step that its tracker names.

Here a tracker goes backwards, because its checkpoint is damaged, or not whole on every node: where nodes have
disks of their own, a job that ended between the saves of two nodes has left a step on some disks. Elsewhere a
tracker goes backwards only in a pull (`store/pull.py`), from a step whose folder is gone.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

from adaptor import context, output
from adaptor.checkpoint import disk, left_overs, publish, regular_folder, tracker
from adaptor.checkpoint.save_folder_lock import locked
from adaptor.errors import CheckpointError
from adaptor.protocol import naming
from adaptor.protocol.environment import WorkerPlace


@dataclass(frozen=True)
class Agreed:
    """The step from which all ranks go on, for the disks that rank 0 does not see.

    Attributes:
        step: the step for each tracker
        given_up: later steps that are not whole on every node; they are moved aside
        may_change: False: the job only loads from the folder
    """

    step: int
    given_up: tuple[int, ...] = ()
    may_change: bool = True


def names_aside(root: Path, steps: Iterable[int]) -> dict[int, Path]:
    """Return, for each of these steps with a folder under its final name, a free name for the folder."""
    return {step: publish.place_aside(root, step) for step in steps if _bears_name(root, step)}


@disk.one_line
def go_back(root: Path, step: int, aside: Mapping[int, Path]) -> None:
    """Move the folders of other steps aside, and let the tracker name `step`.

    The tracker comes last, as ever. After a crash in between, the tracker names a missing folder, which the
    next start treats as damage.

    Args:
        root: the save folder.
        step: the loaded step.
        aside: the new path of each other step.

    Raises:
        CheckpointError: the disk refuses.
    """
    for aside_step, target in aside.items():
        # A shared file system may show other times of its files on each machine, as if each had a disk of its
        # own: then another rank has moved the folder.
        with contextlib.suppress(FileNotFoundError):
            (root / naming.final_name(aside_step)).rename(target)
    disk.sync(root)
    with locked(root):
        tracker.set_under_lock(root, step)


def complete(root: Path, name: str, generation: str) -> str:
    """Name a regular save on this disk, if rank 0 has named its own and the job ended then.

    Args:
        root: the save folder.
        name: of the folder of the checkpoint.
        generation: of the workers that have saved the checkpoint, as rank 0 sees.

    Returns:
        Why a written save cannot get its name, in a line; "" if it has its name, is missing, or is
        incomplete. Never raises, because all ranks wait.
    """
    step = naming.step_of(name)
    try:
        if step is not None and regular_folder.complete_on_own_disk(root, step, generation):
            tracker.advance(root, step)
            node = context.part(WorkerPlace).node
            output.tell(
                f"[ttp] node {node}: {root / name}: the end of the job had cut its save short when all was"
                " written; it is complete now",
                to="stdout",
            )
    except Exception as error:
        reason = str(error) if isinstance(error, CheckpointError) else f"{type(error).__name__}: {error}"
        return f"{root / name}: was written, and cannot get its name now: {reason}"
    return ""


def follow(root: Path, agreed: Agreed) -> str:
    """Carry out `agreed` on a disk that rank 0 does not see; called by one rank of the disk.

    Left-overs of dead processes on the disk are removed, too: rank 0 cleans its own disk alone.

    Returns:
        Why it cannot be done, in a line; "" if done. Never raises, because all ranks wait.
    """
    if not agreed.may_change:
        return settle(root, agreed.step, may_change=False)
    try:
        named = tracker.tracked_step(root)
        left_overs.clean(root)
        aside = names_aside(root, agreed.given_up)
        if aside or named != agreed.step:
            go_back(root, agreed.step, aside)
        if named not in agreed.given_up:
            _tell_of(root, named, agreed.step)
    except CheckpointError as error:
        return str(error)
    except Exception as error:
        return f"{root}: {type(error).__name__}: {error}"
    return ""


def settle(root: Path, step: int, *, may_change: bool) -> str:
    """Let the tracker on this disk name `step`, if it names no step or a later step.

    The framework takes the largest step of all ranks.

    Args:
        root: the folder of checkpoints.
        step: the step of rank 0's tracker.
        may_change: whether the job saves in the folder.

    Returns:
        Why it cannot be done, in a line; "" if done. Never raises, because all ranks wait.
    """
    named = tracker.tracked_step(root)
    if named is not None and named <= step:
        return ""
    if not may_change:
        return _of_trackers(root, named, step)
    try:
        go_back(root, step, {})
        _tell_of(root, named, step)
    except CheckpointError as error:
        return str(error)
    except Exception as error:
        return f"{root}: {type(error).__name__}: {error}"
    return ""


def _tell_of(root: Path, named: int | None, step: int) -> None:
    """Print a line about a tracker that has gone backwards."""
    if named is not None and named > step:
        output.tell(
            f"[ttp] node {context.part(WorkerPlace).node}: {root / naming.TRACKER} named step {named}, and"
            f" names step {step} now, as on node 0",
            to="stdout",
        )


def _bears_name(root: Path, step: int) -> bool:
    return os.path.lexists(root / naming.final_name(step))


def _of_trackers(root: Path, named: int | None, step: int) -> str:
    named_step = "no step" if named is None else f"step {named}"
    return f"{root / naming.TRACKER}: names {named_step}, that of node 0 step {step}"
