"""An unmodified Megatron-style training job survives the death of its processes.

    import adaptor
    adaptor.enable()

as the first lines of the script, and `ttprun` in place of `torchrun` (which enables the adaptor by itself).
Importing this package imports nothing else: no torch, no framework.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path

    from adaptor.library import Protection
    from adaptor.patching import Outcome

__version__ = "0.1.0"

__all__ = ["disable", "enable", "format_report", "protect", "report"]

_enabled = False


def enable(*, provide_mindio: bool = False) -> None:
    """Arm the patches on the framework, before it is imported. Enabling twice is enabling once.

    With `provide_mindio` (or TTP_PROVIDE_MINDIO) no framework is patched: the script was adapted to MindIO
    TTP by hand, and `import mindio_ttp` finds the adaptor's. ConfigError where one is installed.

    The settings are those of the environment, where ttprun has put its flags. With ENABLE_TTP=False nothing
    is done and no module is touched. Raises ConfigError for a setting that makes no sense, StartError where a
    patched module of the framework has been imported already, or where the job was not started by ttprun.
    """
    global _enabled
    if _enabled and not provide_mindio:
        return
    from adaptor import config, errors

    try:
        settings = config.load()
        if not settings.enabled:
            return
    except errors.ConfigError:
        errors.say_in_one_line()
        raise
    errors.say_in_one_line()
    from adaptor import _start

    if provide_mindio or settings.provide_mindio:
        _start.provide_mindio()
    else:
        _start.arm_patches()
    _enabled = True


def protect(
    *,
    model: Sequence[Any],
    optimizer: Any,
    save: str | Path,
    step: int = 0,
    scheduler: Any = None,
    samples_per_step: int = 0,
    extra: Mapping[str, Any] | None = None,
) -> Protection:
    """For a script with a training loop of its own on Megatron-core: from now on its state can be saved.

    Every rank calls it once, after loading and before the first step, and then `begin_step(step)` on what it
    returns at the start of each step. Last words go to `save` in Megatron's `torch` format:
    `iter_N/mp_rank_XX/` with model_optim_rng.pt (iteration, model, optimizer, opt_param_scheduler, rng_state
    and what `extra` holds) and distrib_optim.pt, and the tracker file. With ENABLE_TTP=False it does nothing.

    model             the DistributedDataParallel modules
    optimizer         what get_megatron_optimizer returned
    step              the step that the state is that of; 0 at the start
    scheduler         an OptimizerParamScheduler; None without one
    samples_per_step  the `increment` that the script gives to the scheduler's step after each update

    Raises LayoutError where the layout cannot be protected, DriftError where the framework does not fit.
    """
    from adaptor import library

    if not _enabled:
        return library.Protection(None)
    return library.protect(
        model=model,
        optimizer=optimizer,
        save=save,
        step=step,
        scheduler=scheduler,
        samples_per_step=samples_per_step,
        extra=extra,
    )


def disable() -> None:
    """Undo every patch; names that others imported meanwhile do what the framework's own functions do.

    Raises StartError once training has begun: its steps would be saved under a wrong number.
    """
    global _enabled
    if not _enabled:
        return
    from adaptor import mindio, patching
    from adaptor.control import runtime
    from adaptor.errors import StartError

    if runtime.training():
        raise StartError("adaptor.disable() was called while training runs; call it before, or not at all")
    patching.disarm("ttp")
    mindio.withdraw()
    _enabled = False


def report() -> tuple[Outcome, ...]:
    """What became of each patch: its status, expected and found signature, the framework's version."""
    import adaptor.patches as patches
    from adaptor import patching

    patches.load("ttp")
    return patching.outcomes("ttp")


def format_report() -> str:
    """`report()` as an aligned table for people."""
    from adaptor import patching

    return patching.format_outcomes(report())
