"""Fault tolerance for Megatron-style training: a job survives the death of its processes.

`ttprun` in place of `torchrun` enables the adaptor by itself; scripts of Megatron-LM, ModelLink and
MindSpeed-LLM need no edit. A script with a custom training loop calls `enable`, `protect` and
`Protection.run_steps` (docs/training_loops.md). An import of this package imports neither torch nor a
framework.
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
    from adaptor.transform.functions import merge_layouts, ranks_needed, transform_checkpoint, transform_rank

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
    "node_folder",
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
    """Arm the patches, so that the framework is patched at its import, and activate the patches.

    Call the function before the framework is imported and before process groups are made: the call also
    switches off the watchdogs of NCCL and HCCL, which would end the survivors of a fault. A second call does
    nothing more. The settings are read from the environment, which contains the flags of ttprun. With
    ENABLE_TTP=False the call does nothing.

    Args:
        provide_mindio: patch no framework; let `import mindio_ttp` find the adaptor's package (as
            TTP_PROVIDE_MINDIO=1), for a script adapted to MindIO TTP by hand.

    Raises:
        ConfigError: a setting makes no sense, or `provide_mindio` is set and a `mindio_ttp` is installed.
        StartError: a module with patches has been imported already, or the process was not started by ttprun.
    """
    if not arm(provide_mindio=provide_mindio):
        return
    from adaptor import _start

    _start.claim()


def arm(*, provide_mindio: bool = False) -> bool:
    """Do as `enable` does, but change nothing of the framework before the job is claimed; watchdogs stay on.

    ttprun calls the function in each worker: the script may train nothing that can be protected.

    Returns:
        True if the adaptor is enabled.
    """
    global _enabled
    if _enabled and not provide_mindio:
        return True
    if not _is_wanted():
        return False
    from adaptor import _start

    if not _start.provide_interface("mindio" if provide_mindio else ""):
        _start.arm_patches()
    _enabled = True
    return True


def _is_wanted() -> bool:
    """Return ENABLE_TTP. Unless False, an AdaptorError that leaves the script is printed as one line."""
    from adaptor import context, errors

    try:
        is_enabled = context.get().settings.enabled
    except errors.AdaptorError:
        errors.say_in_one_line()
        raise
    if is_enabled:
        errors.say_in_one_line()
    return is_enabled


def _is_on() -> bool:
    """Return whether the adaptor is enabled.

    Raises:
        StartError: the adaptor is neither enabled nor switched off.
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
    """Protect a training loop of your own on Megatron-core: the state can be saved from now on.

    Every rank calls the function once, after loading and before the first step. Then the rank makes its steps
    by `protection.run_steps`, or each step inside of `with protection.step(number):`. docs/training_loops.md
    has a complete loop. The survivors of a failure write a checkpoint into `save`, and the tracker file. In
    Megatron's format `torch` the files are `iter_N/mp_rank_XX/model_optim_rng.pt` (iteration, model,
    optimizer, opt_param_scheduler, rng_state, and the entries of `extra`), and `distrib_optim.pt`. With
    ENABLE_TTP=False, and after `disable`, the call does nothing.

    Args:
        model: the `DistributedDataParallel` modules of this rank, one module for each virtual pipeline stage.
        optimizer: the result of `get_megatron_optimizer`.
        save: the folder of the checkpoints, visible to every rank; a missing folder is created.
        step: the number of the last finished step, whose state was loaded; 0 at the start.
        scheduler: the `OptimizerParamScheduler`, or None.
        samples_per_step: the `increment` that the script passes to `scheduler.step` after each update, in
            samples; or a function that returns the increment of the running step, called before the update.
        extra: further entries of `model_optim_rng.pt`; saved with their values at the moment of the save.
        format: of the checkpoint: `torch`, `torch_dist` with `contents`, or a format of a plug-in
            (docs/plug_ins.md).
        contents: further content of the framework's checkpoints (docs/plug_ins.md); None: nothing.

    Returns:
        The object that the training loop calls at steps and phases.

    Raises:
        UnsupportedError: the layout, or an option of the framework, cannot be protected.
        DriftError: a function of the framework does not have the signature expected by its patch.
        ConfigError: `save` cannot be written, is an object store, or holds a later step than `step`.
        StartError: the process was not started by ttprun.
    """
    if not _is_on():
        from adaptor.library import Protection

        return Protection(None, step)
    from adaptor.frameworks import library_loop

    return library_loop.protect(
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
    """Make a checkpoint of the copies in host memory (TTP_HOST_COPY), if newer than all checkpoints.

    With TTP_HOST_COPY every rank of a custom training loop calls the function once in each start, when model
    and optimizer are built and before the script chooses a checkpoint in `save`; collective. After the loss
    of all holders of a shard, the newest step with a copy of every rank is then an ordinary checkpoint in
    `save`. The checkpoint has the entries of `extra` with their values after the step. At the first start,
    without TTP_HOST_COPY, with ENABLE_TTP=False and after `disable` the call does nothing.

    Args:
        model: the later argument of `protect`; so are the others.
        optimizer: of the model.
        save: the folder of the checkpoints.
        scheduler: or None.
        extra: further entries of `model_optim_rng.pt`.
        format: of the checkpoint.
        contents: further content of the framework's checkpoints.

    Returns:
        The written step; None: no copies are newer, or the write failed, as a printed line explains.

    Raises:
        UnsupportedError: Megatron-core has not made model or optimizer; or this start of the workers only
            writes the copies, because no restart is left.
        StartError: the process was not started by ttprun.
    """
    if not _is_on():
        return None
    from adaptor.frameworks import library_loop

    return library_loop.write_host_copies(
        model=model,
        optimizer=optimizer,
        save=save,
        scheduler=scheduler,
        extra=extra,
        format=format,
        contents=contents,
    )


def is_restart() -> bool:
    """Return whether ttprun has restarted all workers of this job.

    A framework that would begin with fresh weights must then load from its save folder: the folder has the
    newest step.
    """
    if not _enabled:
        return False
    from adaptor import context
    from adaptor.protocol.environment import Generation

    return context.part(Generation).is_restart


def is_newcomer() -> bool:
    """Return whether this process replaces a failed rank of a running job (TTP_ONLINE).

    A newcomer runs the script alone up to `Protection.run_steps`: its collectives return at once, with its
    own values. In `run_steps` the newcomer joins the other ranks and receives the state of model, optimizer,
    scheduler and random numbers, so the script need not load a checkpoint.

    Returns:
        True from `enable` until the newcomer has joined; False in every other process, and with
        ENABLE_TTP=False.
    """
    if not _enabled:
        return False
    from adaptor.online import rejoin

    return rejoin.is_newcomer()


def node_folder() -> Path | None:
    """Return a folder on a local disk of this node, for what the workers of this node need after a restart.

    Every start of the workers of a job, and every newcomer, has the same folder on the same node; ttprun
    removes the folder at its end.

    Returns:
        None outside of ttprun, and with ENABLE_TTP=False.
    """
    if not _enabled:
        return None
    from adaptor import context
    from adaptor.protocol.environment import Scratch

    return context.part(Scratch).path


def _count_as_enabled() -> None:
    """Let `enable` do nothing from now on: the script is examined, and its patches are armed already."""
    global _enabled
    _enabled = True


def disable() -> None:
    """Undo every patch, also for names that other modules have imported.

    Raises:
        StartError: a training loop runs; its steps would be saved under a wrong number.
    """
    global _enabled
    if not _enabled:
        _enabled = False
        return
    from adaptor import context, hooks, patching
    from adaptor.errors import StartError
    from adaptor.worker import runtime
    from adaptor.worker.framework_watchdogs import Watchdogs
    from adaptor.worker.unprotected import UnprotectedTraining

    if runtime.training():
        raise StartError("adaptor.disable() was called while training runs; call it before, or not at all")
    patching.disarm("ttp")
    context.part(UnprotectedTraining).disarm()
    context.part(Watchdogs).restore()
    for part in hooks.of_worker():
        part.withdraw()
    _enabled = False


def report() -> tuple[Outcome, ...]:
    """Return the state of each patch: status, expected and actual signature, version of the framework."""
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
