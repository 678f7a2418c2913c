"""Loads a checkpoint of Megatron-LM: an intact one, whose loaded state is compared with its agreed state
(`verification.save_check`).

A different checkpoint is refused like a damaged checkpoint: the newest checkpoint before takes its place, and
is loaded instead. If the second checkpoint differs, too, the loader is more likely to be wrong than two
checkpoints: the job ends.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from adaptor import context, hooks, output
from adaptor.checkpoint import resume_check
from adaptor.errors import ResumeError
from adaptor.frameworks import adapter_base, megatron_restart, state_comparison
from adaptor.frameworks.megatron_restart import ChosenStep
from adaptor.protocol import naming
from adaptor.protocol.environment import Generation, HeldCopies

# The arguments that a load of Megatron-LM increases, or requires to be 0.
_COUNTERS = ("consumed_train_samples", "skipped_train_samples", "consumed_valid_samples", "iteration")

# The argument with the folder of a student's teacher.
_TEACHER = "export_kd_teacher_load"


def load(wrapped: Callable[..., Any], args: Any, kwargs: Any) -> Any:
    """Call the framework's `load_checkpoint`, with an intact checkpoint, and compare what was loaded."""
    from megatron.training import get_args

    from adaptor.frameworks import megatron_lm
    from adaptor.host_copy import copier  # torch, which is for the script to import

    megatron_args = get_args()
    load_arg = args[3] if len(args) > 3 else kwargs.get("load_arg", "load")
    model, optimizer, scheduler = _loaded_into(args, kwargs)
    if load_arg == _TEACHER or (optimizer is None and getattr(megatron_args, "stage", None) == "dpo"):
        return wrapped(*args, **kwargs)  # a teacher or reference model, also in a restart from its own folder
    is_restart, may_have = context.part(Generation).is_restart, bool(context.part(HeldCopies).paths)
    copies = may_have and is_restart and load_arg == "load"
    if copies:
        megatron_lm.write_host_copies(model, optimizer, scheduler)
        copier.require_training()

    def check() -> None:
        _require_intact(load_arg, optimizer)

    def write() -> None:
        if copies:  # where the newest checkpoint was damaged, they may be newer than the one that is loaded
            megatron_lm.write_host_copies(model, optimizer, scheduler)

    if load_arg == "load":
        megatron_restart.settle(megatron_args, check, write)
    else:
        check()
    if load_arg == "load" and megatron_args.load:
        for hook in hooks.of_worker():
            hook.before_load(megatron_args)
    load = getattr(megatron_args, load_arg)
    is_filtered = adapter_base.is_filtered(megatron_args)
    if is_filtered:
        adapter_base.settle(Path(load), Path(megatron_args.save))
    all_of_it = megatron_restart.load_what_is_saved(megatron_args, scheduler)
    chosen = context.part(ChosenStep).loading(megatron_args, None if is_filtered else load)

    def load_once() -> Any:
        return wrapped(*args, **kwargs)

    def refuse(step: int, reason: str) -> None:
        _require_intact(load_arg, optimizer, {step: reason})

    with chosen, all_of_it if load_arg == "load" else contextlib.nullcontext():
        if load_arg == "load":
            loaded = _load_compared(load_once, refuse, model, optimizer, scheduler)
        else:
            loaded = load_once()
    if is_filtered:
        adapter_base.require_added()
    return loaded


def _require_intact(load_arg: str, optimizer: Any, refused: Mapping[int, str] | None = None) -> None:
    from megatron.training import get_args
    from megatron.training.checkpointing import checkpoint_exists

    megatron_args = get_args()
    pretrained = getattr(megatron_args, "pretrained_checkpoint", None)  # loaded where the first is empty
    for folder in filter(None, (getattr(megatron_args, load_arg), pretrained)):
        chosen = getattr(megatron_args, "ckpt_step", None) or None
        loads = _files_of_rank(folder, optimizer)
        resume_check.require_intact(Path(folder), Path(megatron_args.save), chosen, loads, refused)
        if checkpoint_exists(folder):
            break


def _loaded_into(args: Any, kwargs: Any) -> tuple[Any, Any, Any]:
    """Return model, optimizer and scheduler from the arguments of the framework's `load_checkpoint`."""
    names = ("ddp_model", "optimizer", "opt_param_scheduler")
    call_arguments = {**dict(zip(names, args, strict=False)), **kwargs}
    model = call_arguments["ddp_model"] if "ddp_model" in call_arguments else call_arguments["model"]
    return model, call_arguments.get("optimizer"), call_arguments.get("opt_param_scheduler")


def _files_of_rank(load: str, optimizer: Any) -> tuple[str, ...]:
    """Return the prefixes of the files' paths, relative to the folder of the checkpoint.

    In the format `torch` a rank loads the model of its model-parallel rank; the first rank of each group with
    a shared distributed optimizer loads the optimizer's state and sends the others their parts. In the format
    `torch_dist` most data of a rank is in the files with the rank's number, if sizes have not changed.
    """
    import torch.distributed as dist
    from megatron.training.checkpointing import get_checkpoint_name

    from adaptor.checkpoint import shards  # torch, which is for the script to import
    from adaptor.checkpoint.step_record import chain

    folder = Path(get_checkpoint_name(load, 0)).parent.name
    loads = [f"{folder}/{naming.MODEL_FILE}", f"__{dist.get_rank()}_"]
    if any(
        shards.is_sharded(chained_optimizer) and chained_optimizer.data_parallel_group.rank() == 0
        for chained_optimizer in chain(optimizer)
    ):
        loads.append(f"{folder}/{naming.OPTIMIZER_FILE}")
    return tuple(loads)


def _load_compared(
    load_once: Callable[[], Any],
    refuse: Callable[[int, str], None],
    model: Any,
    optimizer: Any,
    scheduler: Any,
) -> Any:
    """Load, compare with the agreed state, and after a difference load the checkpoint before. Collective.

    Args:
        load_once: the framework's load; returns the step first.
        refuse: puts another checkpoint in the place of a step's checkpoint, for a reason; raises ResumeError
            without another checkpoint.

    Returns:
        The result of the framework's load.

    Raises:
        ResumeError: the loaded state differs from the agreed state, also after a second load.
    """
    from megatron.training import get_args

    args = get_args()
    counters = {name: getattr(args, name) for name in _COUNTERS if hasattr(args, name)}
    steps = getattr(scheduler, "num_steps", None)
    loaded = load_once()
    step, problem = _problem(args, loaded, model, optimizer)
    if not problem:
        return loaded
    refuse(step, problem)
    for name, value in counters.items():
        setattr(args, name, value)
    if steps is not None:
        scheduler.num_steps = steps
    loaded = load_once()
    _, second = _problem(args, loaded, model, optimizer)
    if second:
        raise ResumeError(
            f"{second}; so did the checkpoint that was loaded before ({problem}): the loader may be wrong"
        )
    return loaded


def _problem(args: Any, loaded: Any, model: Any, optimizer: Any) -> tuple[int, str]:
    """Return the step that was to be loaded, and the differences from its agreed state; "" without a
    difference, or without a comparison.
    """
    import torch.distributed as dist
    from megatron.core import mpu

    from adaptor.frameworks import megatron_lm
    from adaptor.replica.group import gather_values
    from adaptor.verification import save_check, state_sums

    step = loaded[0] if isinstance(loaded, tuple) else 0
    if not args.load or optimizer is None or getattr(args, "finetune", False):
        return step, ""
    chosen, archived = getattr(args, "ckpt_step", None), megatron_restart.archived_step()
    if adapter_base.is_filtered(args) or getattr(args, "load_model_opt_format", False):
        if not step:
            return step, ""
        chosen = archived = step  # these loads have no step of their own, or ignore the option
    chosen, agreed = save_check.chosen_checkpoint(Path(args.load), chosen, step)
    folder = Path(args.load) / naming.final_name(chosen)
    other_steps = set(gather_values(step and (archived or step))) - {chosen}  # 0: a release
    if other_steps:
        return chosen, f"{folder}: the ranks have loaded step {', '.join(map(str, sorted(other_steps)))}"
    if agreed is None:
        return step, ""
    state, place, states = megatron_lm.described(model, optimizer)
    is_whole = not getattr(args, "no_load_optim", False) and not getattr(args, "no_save_optim", False)
    random, peers = "", list[int]()  # no random states are loaded
    if not getattr(args, "no_load_rng", False) and not getattr(args, "no_save_rng", False):
        random = state_sums.random_key(states.own(), states.place)
        peers = dist.get_process_group_ranks(mpu.get_data_parallel_group(with_context_parallel=True))
    result = save_check.compare(
        folder, agreed, state, place.shares, has_optimizer=is_whole, random=random, peers=peers
    )
    state_comparison.tell_not_compared(folder, result)
    if result.other_random_states and not result.problem and args.rank == 0:
        first, count = result.other_random_states[0], len(result.other_random_states) - 1
        output.tell(
            f"[ttp] {folder}: the random states of rank {first}{f' and {count} more' if count else ''} are"
            " not those at the begin of the save: training goes on, but may not be bitwise",
            to="stdout",
        )
    return step, result.problem
