"""Carries out on one disk what the ranks have agreed on before a resume: which step its tracker names.

Here a tracker goes backwards. What it named is damaged, or it is not whole on every node: where nodes have
disks of their own, a job that ended between the saves of two nodes has left a step on some of them. Elsewhere
it does so only in a pull (`store/pull.py`), from a step whose folder is gone.
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
from adaptor.protocol.environment import Place


@dataclass(frozen=True)
class Agreed:
    """The step from which all ranks go on, for the disks that rank 0 does not see.

    Attributes:
        step: the one that each tracker is to name
        given_up: later steps that are not whole on every node; they are moved aside
        may_change: False: the job only loads from the folder
    """

    step: int
    given_up: tuple[int, ...] = ()
    may_change: bool = True


def names_aside(root: Path, steps: Iterable[int]) -> dict[int, Path]:
    """Return, for each of these steps that has something under its final name, where that can be moved to."""
    return {step: publish.place_aside(root, step) for step in steps if _bears_name(root, step)}


@disk.one_line
def go_back(root: Path, step: int, aside: Mapping[int, Path]) -> None:
    """Move the folders of other steps aside, and let the tracker name `step`.

    The tracker comes last, as ever. After a crash in between it names a folder that is gone, which the next
    start takes for one more damage.

    Args:
        root: the save folder.
        step: the one that is loaded.
        aside: where each other step is moved to.

    Raises:
        CheckpointError: the disk refuses.
    """
    for aside_step, target in aside.items():
        # A shared file system may show other times of its files on each machine, as if each had a disk of its
        # own: then another rank has done it.
        with contextlib.suppress(FileNotFoundError):
            (root / naming.final_name(aside_step)).rename(target)
    disk.sync(root)
    with locked(root):
        tracker.set_under_lock(root, step)


def complete(root: Path, name: str, generation: str) -> str:
    """Give a regular save its name on this disk, where rank 0 has given it its own and the job ended then.

    Args:
        root: the save folder.
        name: of the folder of the checkpoint.
        generation: of the workers that have saved it, as rank 0 sees.

    Returns:
        Why a save that was written cannot get its name, in a line; '' where it has it, or is not there, or
        only half of it. It raises nothing, for all ranks wait.
    """
    step = naming.step_of(name)
    try:
        if step is not None and regular_folder.complete_on_own_disk(root, step, generation):
            tracker.advance(root, step)
            node = context.part(Place).node
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
    """Do it on a disk that rank 0 does not see; one rank of those that see it calls this.

    What dead processes have left there is removed, too: rank 0 removes it on its own disk alone.

    Returns:
        Why it cannot be done, in a line; '' where it is done. It raises nothing, for all ranks wait for it.
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
    """Let the tracker on this disk name `step`, if it names none or a later one.

    The framework takes the largest that any rank reads.

    Args:
        root: the folder of checkpoints.
        step: the one that rank 0's tracker names.
        may_change: whether the job saves there.

    Returns:
        Why it does not, in a line; '' where it does. It raises nothing, for all ranks wait for it.
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
    """Say that a tracker has gone backwards."""
    if named is not None and named > step:
        output.tell(
            f"[ttp] node {context.part(Place).node}: {root / naming.TRACKER} named step {named}, and"
            f" names step {step} now, as on node 0",
            to="stdout",
        )


def _bears_name(root: Path, step: int) -> bool:
    return os.path.lexists(root / naming.final_name(step))


def _of_trackers(root: Path, named: int | None, step: int) -> str:
    named_step = "no step" if named is None else f"step {named}"
    return f"{root / naming.TRACKER}: names {named_step}, that of node 0 step {step}"
