"""Lets a restarted job load its own saves, by the options of Megatron-LM and of ModelLink."""

from __future__ import annotations

import contextlib
from argparse import Namespace
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from adaptor import context, output
from adaptor.checkpoint import save_folder_claim, tracker
from adaptor.context import Context
from adaptor.frameworks import fine_tuning
from adaptor.protocol.environment import Generation, HeldCopies, Nodes
from adaptor.protocol.framework_options import LEFT_OUT, START_ONLY
from adaptor.protocol.naming import TRACKER


def resume_after_restart(args: Any) -> None:
    """Let a restarted job load the newest checkpoint in its --save folder, regardless of its origin."""
    context.part(_Begun).note(args)
    if not context.part(Generation).is_restart:
        return
    if not (Path(args.save) / TRACKER).is_file():
        # Before the framework loads, host copies become a checkpoint there. And a node with a disk of its own
        # may have none where others have one: all ranks load then, or none.
        if _may_find_one() and args.load is None:
            args.load = args.save
            args.exit_on_missing_checkpoint = False  # the job began without a checkpoint
        return
    if _has_saved_nothing(args):
        return
    _load_from_save(args)


def _load_from_save(args: Any) -> None:
    changed = {name: value for name, value in START_ONLY.items() if _is_given(args, name)}
    if not save_folder_claim.is_same(args.load, args.save):
        state_of_load = "is missing" if args.load is None else f"is {args.load}"
        _say_once(args, f"--load {state_of_load}: the restarted job loads from --save {args.save}")
    by_load = getattr(args, "ref_model", "none") is None and not save_folder_claim.is_same(
        args.load, args.save
    )
    if getattr(args, "stage", None) == "dpo" and by_load:
        args.ref_model = fine_tuning.reference_model(args)
        _say_once(args, f"the reference model is that of {args.ref_model}, as at the first start")
    if changed:
        flags = ", ".join("--" + name.replace("_", "-") for name in changed)
        _say_once(args, f"{flags}: not for the restarted job, which goes on exactly where it was")
    args.load = args.save
    for name, value in changed.items():
        setattr(args, name, value)


def _may_find_one() -> bool:
    """Return whether there may be a checkpoint to load all the same; the same on all ranks.

    Copies may be in host memory (TTP_HOST_COPY), or other nodes have a tracker that is not seen here.
    """
    settings = context.get().settings
    may_have_copies = settings.host_copy is None and bool(context.part(HeldCopies).paths)
    return bool(settings.host_copy) or may_have_copies or context.part(Nodes).here > 1


def _is_given(args: Any, name: str) -> bool:
    """Return whether the user has set an option without a default; a number may be 0."""
    value = getattr(args, name, None)
    return value is not None and value is not False


def _has_saved_nothing(args: Any) -> bool:
    """Return whether the content of --save belongs to an earlier run: its step is not later than the first
    step of this job.
    """
    if (
        args.load is None
        or save_folder_claim.is_same(args.load, args.save)
        or getattr(args, "finetune", False)
        or getattr(args, "reset_iteration", False)
    ):
        return False
    began = getattr(args, "override_ckpt_iteration", None)
    if began is None:
        began = getattr(args, "ckpt_step", None) or tracker.tracked_step(Path(args.load))
    saved = tracker.tracked_step(Path(args.save))
    return began is not None and saved is not None and saved <= began


class _Begun:
    """The arguments of the user, before a restart changes them; a part of the context."""

    def __init__(self, context: Context) -> None:
        self.given: dict[str, Any] | None = None

    def note(self, args: Any) -> None:
        """Keep what is given; the first time alone."""
        if self.given is None:
            self.given = {name: getattr(args, name, None) for name in ("load", *START_ONLY)}


def agree(args: Any) -> bool | None:
    """Let all ranks load from the folder chosen by rank 0: --save, or another --load. Collective.

    Each rank has chosen by the files visible to it. Nodes with disks of their own may see other trackers, and
    a check may have gone back in --save, to a step of an earlier run.

    Returns:
        Whether the folder is --save; None where the job has no other folder.
    """
    from adaptor.replica.group import gather_values

    given_args = context.part(_Begun).given
    if (
        given_args is None
        or given_args["load"] is None
        or save_folder_claim.is_same(given_args["load"], args.save)
    ):
        return None
    began = Namespace(save=args.save, **given_args)
    has_saved = (Path(args.save) / TRACKER).is_file() and not _has_saved_nothing(began)
    own_values = context.part(Generation).is_restart, has_saved
    gathered = gather_values(own_values)
    # A node that came later knows of no restart.
    from_save = any(is_restart for is_restart, _ in gathered) and gathered[0][1]
    if from_save:
        _load_from_save(args)
    elif save_folder_claim.is_same(args.load, args.save):
        _say_once(
            args,
            f"--save {args.save} has no intact step that is later than that of --load "
            f"{given_args['load']}: the"
            " restarted job loads from --load",
        )
        for name, value in given_args.items():
            if hasattr(args, name):
                setattr(args, name, value)
    return from_save


def settle(args: Any, check: Callable[[], None], write: Callable[[], None]) -> None:
    """Let all ranks load an intact checkpoint from the same folder. Collective.

    Args:
        check: checks the checkpoint named by `args`; another checkpoint may take its place.
        write: writes newer state, if present, into --save.
    """
    agreed_before = agree(args)
    check()
    resume_after_restart(args)  # a node with a disk of its own may have got its tracker just now
    write()
    if agree(args) != agreed_before:
        check()


class ChosenStep:
    """The step named by --ckpt-step, while the framework loads the step; a part of the context.

    Megatron-LM loads the weights of this step (before 0.12 not even the weights), but the distributed
    optimizer of the step named by the tracker.
    """

    def __init__(self, context: Context) -> None:
        self._trackers: dict[Path, int] = {}

    @contextlib.contextmanager
    def loading(self, args: Any, folder: str | None) -> Iterator[None]:
        """Let the chosen step count as the step of the tracker in `folder` in this block.

        Args:
            args: of the framework. With checkpoints of ModelOpt the framework ignores the option.
            folder: the folder to load from.
        """
        step = getattr(args, "ckpt_step", None)
        if step and folder is not None and not getattr(args, "load_model_opt_format", False):
            self._trackers = {Path(folder) / TRACKER: step}
        try:
            yield
        finally:
            self._trackers = {}

    def instead_of(self, file: str) -> int | None:
        """Return the chosen step where `file` is the tracker of the folder that is loaded from."""
        return self._trackers.get(Path(file))


class _Loading:
    """A load of the framework, a part of the context.

    Attributes:
        args: of the framework, while its `load_checkpoint` is running; else None
        archived: the step in the files of this rank that were loaded last; None: they name no step
    """

    def __init__(self, context: Context) -> None:
        self.args: Any = None
        self.archived: int | None = None


@contextlib.contextmanager
def load_what_is_saved(args: Any, scheduler: Any) -> Iterator[None]:
    """Let the framework load all of a checkpoint, also of last words in a job whose regular saves have less.

    The framework expects no optimizer in a checkpoint where --no-save-optim is given.

    Args:
        args: of the framework; in the block, state left out of saves is not left out of loads.
        scheduler: of the optimizer, or None; the scheduler begins at the step of a checkpoint without the
            scheduler's state.
    """
    loading = context.part(_Loading)
    names = [name for name in (*LEFT_OUT, *LEFT_OUT.values()) if hasattr(args, name)]
    given = {name: getattr(args, name) for name in names}
    loading.args = args
    try:
        for name in LEFT_OUT:
            if given.get(name):
                setattr(args, name, None)
        yield
        if scheduler is not None and getattr(args, "no_load_optim", None) and not given["no_load_optim"]:
            scheduler.step(args.consumed_train_samples - scheduler.num_steps)
    finally:
        loading.args = None
        for name, value in given.items():
            setattr(args, name, value)


def archived_step() -> int | None:
    """Return the step in the files that this rank has loaded last; None: they name no step.

    With the distributed optimizer in the format `torch` the framework returns the tracker's step instead.
    """
    return context.part(_Loading).archived


def accept_what_is_missing(saved: Any) -> None:
    """Let a restarted job load a regular save without the state that the job leaves out of saves.

    The step in `saved` is kept for `archived_step`.
    """
    loading = context.part(_Loading)
    args = loading.args
    loading.archived = saved.get("iteration") if saved else None
    if args is None or not context.part(Generation).is_restart or not saved:
        return
    missing = [name for name in LEFT_OUT if getattr(saved.get("args"), name, None)]
    for name in missing:
        setattr(args, LEFT_OUT[name], True)
    if missing:
        flags = ", ".join("--" + name.replace("_", "-") for name in missing)
        step = saved.get("iteration", "the newest")
        _say_once(
            args,
            f"the save of step {step} was made with {flags}: the job goes on from it without that state, and"
            " so not bitwise; last words would have it",
        )


def tell_of_last_words(args: Any) -> None:
    """Print at the first start which state is in last words and not in the regular saves of the job."""
    if not context.part(Generation).is_restart and getattr(args, "no_save_optim", None):
        _say_once(
            args,
            "--no-save-optim: last words have the optimizer's state all the same, with Adam 12 bytes for each"
            " parameter more than a regular save",
        )


def _say_once(args: Any, line: str) -> None:
    """Megatron parses its arguments more than once."""
    if args.rank == 0 and context.get().is_first(line):
        output.tell(f"[ttp] {line}", to="stdout")
