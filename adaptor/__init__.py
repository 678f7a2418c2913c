"""Fault tolerance for Megatron-style training: the job survives the death of its processes.

`ttprun` in place of `torchrun` enables the adaptor by itself; scripts of Megatron-LM, ModelLink and
MindSpeed-LLM stay as they are. A script with a training loop of its own calls `enable`, `protect` and
`Protection.run_steps` (docs/training_loops.md). Importing this package imports neither torch nor a framework.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence
    from pathlib import Path

    from adaptor.checkpoint.training_state import CheckpointContents
    from adaptor.errors import (
        AdaptorError,
        CheckpointError,
        ConfigError,
        DriftError,
        ResumeError,
        StartError,
        StepError,
        StoreError,
        UnsupportedError,
    )
    from adaptor.library import Protection
    from adaptor.patching import Outcome
    from adaptor.transform.functions import (
        merge_layouts,
        ranks_needed,
        transform_checkpoint,
        transform_rank,
    )

__version__ = "0.1.0"

__all__ = [
    "AdaptorError",
    "CheckpointContents",
    "CheckpointError",
    "ConfigError",
    "DriftError",
    "Outcome",
    "Protection",
    "ResumeError",
    "StartError",
    "StepError",
    "StoreError",
    "UnsupportedError",
    "disable",
    "enable",
    "format_report",
    "is_newcomer",
    "is_restart",
    "merge_layouts",
    "protect",
    "ranks_needed",
    "report",
    "transform_checkpoint",
    "transform_rank",
    "write_host_copies",
]

# The modules of public names, which are imported when a name is first asked for.
_MODULES = {
    "CheckpointContents": "adaptor.checkpoint.training_state",
    "Outcome": "adaptor.patching",
    "Protection": "adaptor.library",
    **dict.fromkeys(
        ("merge_layouts", "ranks_needed", "transform_checkpoint", "transform_rank"),
        "adaptor.transform.functions",
    ),
}

_enabled: bool | None = None  # None: nobody has enabled it, or called `disable`


def enable(*, provide_mindio: bool = False) -> None:
    """Arm the patches, so that the framework is patched when the script imports it, and let them act.

    Call it before the framework is imported and before process groups are made: it also switches off the
    watchdogs of NCCL and HCCL, which would end the survivors of a fault. A second call does nothing more.
    The settings are read from the environment, where ttprun has put its flags. With ENABLE_TTP=False it does
    nothing.

    Args:
        provide_mindio: patch no framework; let `import mindio_ttp` find the adaptor's (the same as
            TTP_PROVIDE_MINDIO=1), for a script that was adapted to MindIO TTP by hand.

    Raises:
        ConfigError: a setting makes no sense, or `provide_mindio` is set and a `mindio_ttp` is installed.
        StartError: a module that is to be patched has been imported already, or the process was not started
            by ttprun.
    """
    if not arm(provide_mindio=provide_mindio):
        return
    from adaptor import _start

    _start.claim()


def arm(*, provide_mindio: bool = False) -> bool:
    """Do as `enable` does, but change nothing of the framework before the job is claimed; watchdogs stay on.

    ttprun calls it in each worker: the script may turn out to train nothing that can be protected.

    Returns:
        True if the adaptor is enabled.
    """
    global _enabled
    if _enabled and not provide_mindio:
        return True
    if not _is_wanted():
        return False
    from adaptor import _start, context

    if provide_mindio or context.get().settings.provide_mindio:
        _start.provide_mindio()
    else:
        _start.arm_patches()
    _enabled = True
    return True


def _is_wanted() -> bool:
    """Return ENABLE_TTP. Unless it is False, an error of the adaptor that leaves the script is one line."""
    from adaptor import context, errors

    try:
        is_enabled = context.get().settings.enabled
    except errors.ConfigError:
        errors.say_in_one_line()
        raise
    if is_enabled:
        errors.say_in_one_line()
    return is_enabled


def _is_on() -> bool:
    """Return whether the adaptor is enabled.

    Raises:
        StartError: nobody has enabled it, nor said that it is to be off.
    """
    if _enabled is None and _is_wanted():
        from adaptor import errors
        from adaptor.protocol.environment import NOT_BY_TTPRUN

        raise errors.StartError(NOT_BY_TTPRUN)
    return bool(_enabled)


def protect(
    *,
    model: Sequence[Any],
    optimizer: Any,
    save: str | Path,
    step: int = 0,
    scheduler: Any = None,
    samples_per_step: int | Callable[[], int] = 0,
    extra: Mapping[str, Any] | None = None,
    format: str = "torch",
    contents: CheckpointContents | None = None,
) -> Protection:
    """Protect a training loop of your own on Megatron-core: its state can be saved from now on.

    Every rank calls it once, after loading and before the first step, and then makes its steps by
    `protection.run_steps`, or each inside of `with protection.step(number):`. docs/training_loops.md has a
    complete loop. The survivors of a failure write a checkpoint into `save`, and the tracker file. In
    Megatron's format `torch` it is `iter_N/mp_rank_XX/model_optim_rng.pt` (iteration, model, optimizer,
    opt_param_scheduler, rng_state, and the entries of `extra`), and `distrib_optim.pt` beside it. With
    ENABLE_TTP=False, and after `disable`, the call does nothing.

    Args:
        model: the `DistributedDataParallel` modules of this rank, one for each virtual pipeline stage.
        optimizer: the result of `get_megatron_optimizer`.
        save: the folder of the checkpoints, which every rank sees; it is made if it is not there.
        step: the number of the last finished step, whose state was loaded; 0 at the start.
        scheduler: the `OptimizerParamScheduler`, or None without one.
        samples_per_step: the `increment` that the script gives to `scheduler.step` after each update, in
            samples; or a function that returns it for the running step, called before the update.
        extra: further entries of `model_optim_rng.pt`; they are saved as they are at the moment of the save.
        format: of the checkpoint: `torch`, `torch_dist` with `contents`, or one that a plug-in brings
            (docs/plug_ins.md).
        contents: what else the checkpoints of a framework contain (docs/plug_ins.md); None: nothing.

    Returns:
        The object that is told of steps and phases.

    Raises:
        UnsupportedError: the layout, or an option of the framework, cannot be protected.
        DriftError: a function of the framework does not have the signature that its patch expects.
        ConfigError: `save` cannot be written, is an object store, or holds a later step than `step`.
        StartError: the process was not started by ttprun.
    """
    is_on = _is_on()
    from adaptor import library

    if not is_on:
        return library.Protection(None, step)
    return library.protect(
        model=model,
        optimizer=optimizer,
        save=save,
        step=step,
        scheduler=scheduler,
        samples_per_step=samples_per_step,
        extra=extra,
        format=format,
        contents=contents,
    )


def write_host_copies(
    *,
    model: Sequence[Any],
    optimizer: Any,
    save: str | Path,
    scheduler: Any = None,
    extra: Mapping[str, Any] | None = None,
    format: str = "torch",
    contents: CheckpointContents | None = None,
) -> int | None:
    """Make a checkpoint of the copies in host memory (TTP_HOST_COPY), where they are newer than the rest.

    With TTP_HOST_COPY every rank of a training loop of your own calls it once in each start, when model and
    optimizer are built and right before the script looks into `save` for what to load; collective. After the
    loss of all ranks with a shard the newest step of which every rank has a copy is then a checkpoint in
    `save` like any other. It has the entries of `extra` as they were behind that step. At the first start,
    without TTP_HOST_COPY, with ENABLE_TTP=False and after `disable` it does nothing.

    Args:
        model: the one that `protect` will be given; so are the others.
        optimizer: of it.
        save: the folder of the checkpoints.
        scheduler: or None without one.
        extra: further entries of `model_optim_rng.pt`.
        format: of the checkpoint.
        contents: what else the checkpoints of a framework contain.

    Returns:
        The step that was written; None: there is nothing newer, or it could not be written, which a line
        says.

    Raises:
        UnsupportedError: model or optimizer are not what Megatron-core makes; or this start of the workers is
            for the copies alone, because no restart is left.
        StartError: the process was not started by ttprun.
    """
    if not _is_on():
        return None
    from adaptor import library

    return library.write_host_copies(
        model=model,
        optimizer=optimizer,
        save=save,
        scheduler=scheduler,
        extra=extra,
        format=format,
        contents=contents,
    )


def is_restart() -> bool:
    """Return whether ttprun has started all workers of this job again.

    A framework that would begin anew then loads from its save folder instead: the newest step is there.
    """
    if not _enabled:
        return False
    from adaptor import context
    from adaptor.protocol.environment import Generation

    return context.part(Generation).is_restart


def is_newcomer() -> bool:
    """Return whether this process takes the place of a failed rank in a job that goes on (TTP_ONLINE).

    Such a process runs the script alone up to `Protection.run_steps`: its collectives return at once, with
    its own values. There it joins the others, and gets the state of model, optimizer, scheduler and random
    numbers from them, so it need not load a checkpoint before.

    Returns:
        True from `enable` on until it has joined; False in every other process, and with ENABLE_TTP=False.
    """
    if not _enabled:
        return False
    from adaptor.online import rejoin

    return rejoin.is_newcomer()


def _count_as_enabled() -> None:
    """Let `enable` do nothing from now on: the script is examined, and its patches are armed already."""
    global _enabled
    _enabled = True


def disable() -> None:
    """Undo every patch, also for names that other modules have imported meanwhile.

    Raises:
        StartError: a training loop runs; its steps would be saved under a wrong number.
    """
    global _enabled
    if not _enabled:
        _enabled = False
        return
    from adaptor import context, mindio, patching
    from adaptor.errors import StartError
    from adaptor.worker import runtime
    from adaptor.worker.unprotected import UnprotectedTraining
    from adaptor.worker.watchdogs import Watchdogs

    if runtime.training():
        raise StartError("adaptor.disable() was called while training runs; call it before, or not at all")
    patching.disarm("ttp")
    context.part(UnprotectedTraining).disarm()
    context.part(Watchdogs).restore()
    mindio.withdraw()
    _enabled = False


def report() -> tuple[Outcome, ...]:
    """Return the state of each patch: its status, expected and found signature, the framework's version."""
    import adaptor.patches as patches
    from adaptor import patching

    patches.load("ttp")
    return patching.outcomes("ttp")


def format_report() -> str:
    """Return `report()` as an aligned table of text."""
    from adaptor import patching

    return patching.format_outcomes(report())


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    import importlib

    return getattr(importlib.import_module(_MODULES.get(name, "adaptor.errors")), name)
