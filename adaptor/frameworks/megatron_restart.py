"""Lets a restarted job load what it has saved, by the options of Megatron-LM and of ModelLink."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from adaptor import context, output
from adaptor.checkpoint import tracker
from adaptor.context import Context
from adaptor.protocol.environment import Generation, Nodes
from adaptor.protocol.naming import TRACKER
from adaptor.protocol.start_options import START_ONLY


def resume_after_restart(args: Any) -> None:
    """Let a restarted job load the newest checkpoint in its --save folder, whatever it began from."""
    if not context.part(Generation).is_restart:
        return
    if not (Path(args.save) / TRACKER).is_file():
        # Before the framework loads, host copies become a checkpoint there. And a node with a disk of its own
        # may have none where others have one: all ranks load then, or none.
        may_come = context.get().settings.host_copy or _may_have_own_disk(args)
        if may_come and args.load is None:
            args.load = args.save
        return
    if _has_saved_nothing(args):
        return
    changed = {name: value for name, value in START_ONLY.items() if _is_given(args, name)}
    if not _is_same_folder(args.load, args.save):
        where = "is missing" if args.load is None else f"is {args.load}"
        _say_once(args, f"--load {where}: the restarted job loads from --save {args.save}")
    if changed:
        flags = ", ".join("--" + name.replace("_", "-") for name in changed)
        _say_once(args, f"{flags}: not for the restarted job, which goes on exactly where it was")
    args.load = args.save
    for name, value in changed.items():
        setattr(args, name, value)


def _may_have_own_disk(args: Any) -> bool:
    """Return whether other nodes may have a tracker that this one does not see, and may be asked for it."""
    return context.part(Nodes).here > 1 and not getattr(args, "exit_on_missing_checkpoint", False)


def _is_given(args: Any, name: str) -> bool:
    """Return whether a user has given an option that has no default of its own; a number may be 0."""
    value = getattr(args, name, None)
    return value is not None and value is not False


def _is_same_folder(one: str | None, other: str) -> bool:
    return one is not None and Path(one).resolve() == Path(other).resolve()


def _has_saved_nothing(args: Any) -> bool:
    """Return whether what is in --save is of an earlier run: of no later step than this job has begun at."""
    if (
        args.load is None
        or _is_same_folder(args.load, args.save)
        or getattr(args, "finetune", False)
        or getattr(args, "reset_iteration", False)
    ):
        return False
    began = getattr(args, "ckpt_step", None) or tracker.tracked_step(Path(args.load))
    saved = tracker.tracked_step(Path(args.save))
    return began is not None and saved is not None and saved <= began


class _Said:
    """The lines that this process has told, a part of its context."""

    def __init__(self, context: Context) -> None:
        self.lines: set[str] = set()


def _say_once(args: Any, line: str) -> None:
    """Megatron parses its arguments more than once."""
    said = context.part(_Said).lines
    if args.rank == 0 and line not in said:
        said.add(line)
        output.tell(f"[ttp] {line}", to="stdout")
