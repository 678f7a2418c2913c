"""The work of the patches on Megatron-LM's training loop. Imported once the framework is."""

from __future__ import annotations

import copy
import importlib
import importlib.util
import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch.distributed as dist

from adaptor import context
from adaptor.checkpoint.step_record import LoaderStates, RandomStates
from adaptor.checkpoint.trainee import MegatronTrainee, ProtectedState
from adaptor.checkpoint.training_state import (
    FLOPS,
    CheckpointContents,
    CheckpointPlacement,
    TrainingState,
    format_named,
)
from adaptor.errors import UnsupportedError
from adaptor.frameworks import adapter_base, layout_beside, megatron_restart, supported_options
from adaptor.frameworks.failed_saves import FailedSaves
from adaptor.online.data_rewind import DataRewind
from adaptor.replica import group

# The counters in the framework's arguments; a version may lack some.
COUNTED = ("consumed_train_samples", "skipped_train_samples", "consumed_valid_samples")

# Where ModelOpt keeps what it has made of a module.
MODELOPT = "_modelopt_state"


def require_unconverted(model: Sequence[Any]) -> None:
    """Refuse a model that ModelOpt has quantized, pruned or made a student: ModelOpt's data beside the
    weights is in every checkpoint of the framework, and a load fails without the data. Raises
    UnsupportedError.
    """
    if any(hasattr(module, MODELOPT) for chunk in model for module in chunk.modules()):
        raise UnsupportedError(
            "the model was converted by ModelOpt, whose state cannot be protected yet; set ENABLE_TTP=False"
        )


def trainee(
    model: Sequence[Any],
    optimizer: Any,
    scheduler: Any,
    so_far: float,
    rerun: bool,
    everyone: dist.ProcessGroup | None = None,
    train_data: Any = None,
) -> MegatronTrainee:
    """The training state of this rank, from the framework's globals: collective.

    Args:
        so_far: the floating-point operations, where the training loop begins to count.
        rerun: whether saves contain the state of the rerun state machine, if present.
        everyone: all ranks; None where the group has to be made, and the user told.
        train_data: the iterator over the data of training, where this rank reads data.
    """
    from megatron.training import get_args

    require_unconverted(model)
    args = get_args()
    is_repeated = everyone is not None
    everyone = everyone or group.of_everyone()
    # With --full-validation the framework finds it out where the data is read, and tells what rank 0 has.
    broadcast = [args.eval_iters]
    dist.broadcast_object_list(broadcast, src=0, group=everyone)
    protected = _protected_state(model, optimizer, scheduler, so_far, *broadcast)
    return replace(
        protected.trainee(everyone, is_repeated),
        rerun=_rerun_state(rerun),
        loaders=_loader_states(train_data),
    )


def _protected_state(
    model: Sequence[Any],
    optimizer: Any,
    scheduler: Any,
    so_far: float = 0,
    eval_iters: int | list[int] = 0,
) -> ProtectedState:
    """Return the state of this rank, from the framework's globals.

    Args:
        so_far: see `trainee`.
        eval_iters: see `evaluated`.
    """
    from megatron.core import mpu, tensor_parallel
    from megatron.training import get_args
    from megatron.training.training import num_floating_point_operations

    # Up to 0.7 they are not of the core.
    core = importlib.util.find_spec("megatron.core.num_microbatches_calculator")
    batches = importlib.import_module(core.name if core else "megatron.training.global_vars")
    args = get_args()
    operations = _Operations(so_far)

    def batch() -> int:
        return int(
            mpu.get_data_parallel_world_size() * args.micro_batch_size * batches.get_num_microbatches()
        )

    def counters() -> dict[str, int | float]:
        counted = {name: getattr(args, name) for name in COUNTED if hasattr(args, name)}
        return {**counted, FLOPS: operations.total(args.curr_iteration)}

    def skipped() -> int:
        """Samples of the global batch that do not fill a micro-batch on every rank."""
        if not hasattr(args, "skipped_train_samples"):
            return 0  # up to 0.8 they are an error
        return int(batches.get_current_global_batch_size() - batches.get_current_running_global_batch_size())

    def growth() -> dict[str, int | float]:
        operation_count = num_floating_point_operations(args, batch())
        operations.add(args.curr_iteration, operation_count)
        return {
            "consumed_train_samples": batch(),
            "skipped_train_samples": skipped(),
            "consumed_valid_samples": evaluated(args, eval_iters, args.curr_iteration + 1),
            FLOPS: operation_count,
        }

    keeps = adapter_base.is_kept if adapter_base.is_filtered(args) else None
    return ProtectedState(
        model=model,
        optimizer=optimizer,
        scheduler=scheduler,
        save=args.save,
        group=_group(args),
        # Up to 0.6 there is one format, and no option that names it.
        make_format=format_named(getattr(args, "ckpt_format", "torch"), "--ckpt-format"),
        contents=CheckpointContents(counters, growth, keeps=keeps),
        increment=batch,
        random=lambda: RandomStates(
            tensor_parallel.get_cuda_rng_tracker(),
            mpu.get_data_parallel_group() if args.data_parallel_random_init else None,
        ),
        sizes=lambda: (
            mpu.get_data_parallel_world_size(with_context_parallel=True),
            supported_options.expert_data_parallel_size(args),
        ),
        args=args,
        beside=context.part(adapter_base.AdapterBase).files(),
        on_top=layout_beside.take,
    )


def _loader_states(train_data: Any) -> LoaderStates:
    """Return the states that the framework saves of the script's own data loaders: collective.

    Raises:
        UnsupportedError: the loader has no state.
    """
    from megatron.core import mpu
    from megatron.training import checkpointing, get_args

    root = getattr(get_args(), "dataloader_save", None)
    is_first = mpu.is_pipeline_first_stage(ignore_virtual=True) and mpu.get_tensor_model_parallel_rank() == 0
    has_states = hasattr(checkpointing, "maybe_save_dataloader_state")
    if not root or not is_first or train_data is None or not has_states:
        return LoaderStates()
    loader = train_data.iterable
    source = loader.source if isinstance(loader, DataRewind) else loader
    if not hasattr(source, "save_state"):
        raise UnsupportedError(
            f"--dataloader-save is {root}, and the data loader of the script, {type(source).__name__}, has no"
            " save_state: the framework could not save its state; leave it out, or set ENABLE_TTP=False"
        )
    folder = {}
    if "tp_group" in inspect.signature(checkpointing.maybe_save_dataloader_state).parameters:
        stages = mpu.get_pipeline_model_parallel_world_size()
        folder = {"pipeline_parallel": stages > 1, "tensor_rank": 0, "pipeline_rank": 0}
        folder |= {"expert_parallel": False, "expert_rank": 0}  # since 0.20
    basename = f"train_dataloader_dprank{mpu.get_data_parallel_rank():03d}.pt"
    path = Path(checkpointing.get_checkpoint_name("", 0, basename=basename, **folder))
    states = LoaderStates(
        str(path.relative_to(path.parts[0])), source.save_state, mpu.get_data_parallel_group()
    )
    if isinstance(loader, DataRewind):
        vars(loader)["save_state"] = states.own  # the loader may have read further than the loop
    return states


def _group(args: Any) -> str:
    """Return a name for the ranks with the model of this rank: the name of their folder in the format
    `torch`.

    If the format has no folder for the experts of some ranks, the name includes their part.
    """
    from megatron.core import mpu
    from megatron.training.checkpointing import get_checkpoint_name

    folder = Path(get_checkpoint_name("", 0)).parent.name
    if getattr(args, "num_experts", None) is None or not supported_options.lacks_folders(args):
        return folder
    return f"{folder}_part_{mpu.get_expert_tensor_parallel_rank()}"


def described(model: Sequence[Any], optimizer: Any) -> tuple[TrainingState, CheckpointPlacement]:
    """Return this rank's part of model and optimizer, and the rank's place in a checkpoint: collective.

    For reading only: without scheduler, counters and second copies.
    """
    protected, everyone = _protected_state(model, optimizer, None), dist.group.WORLD
    assert everyone is not None
    place = protected.place(everyone)
    return protected.at(place), place


def write_host_copies(model: Sequence[Any], optimizer: Any, scheduler: Any) -> None:
    """Make a checkpoint of the host copies, if newer than the job's saves: collective.

    Model and optimizer are built, and nothing is loaded yet. The job then loads from its save folder.
    """
    from megatron.training import get_args

    from adaptor.host_copy import rebuild

    if rebuild.write_newest(_protected_state(model, optimizer, scheduler)) is not None:
        megatron_restart.resume_after_restart(get_args())


def evaluated(args: Any, iters: int | list[int], step: int) -> int:
    """Return the samples of the evaluation that follows `step`, after which the framework saves; 0 without an
    evaluation.

    Args:
        iters: the framework's --eval-iters, a list with several sets to evaluate on.
    """
    # In the framework's order: a loop that never evaluates need not have said whether it would.
    if not (args.eval_interval and step % args.eval_interval == 0 and args.do_valid):
        return 0
    # Since 0.18 it may begin late, and have batches of its own.
    if step < (getattr(args, "start_eval_at_iter", None) or 0):
        return 0
    batch = getattr(args, "eval_global_batch_size", None) or args.global_batch_size
    return int(batch * (sum(iters) if isinstance(iters, list) else iters))


def _rerun_state(saved: bool) -> Callable[[], Any]:
    """Return a function for the state of the rerun state machine, as versions 0.10 to 0.13 write the state
    into every checkpoint.

    The state is empty if saves of the framework would not contain the state (`saved`).
    """
    if importlib.util.find_spec("megatron.core.rerun_state_machine") is None:
        return lambda: None
    from megatron.core.rerun_state_machine import get_rerun_state_machine

    take = get_rerun_state_machine().state_dict
    parameters = inspect.signature(take).parameters
    if "force" in parameters:  # later it is written on demand alone, and never in the format torch
        return lambda: None
    if not saved:
        return dict
    no_iterator, as_torch = None, "torch" if "ckpt_format" in parameters else False
    return lambda: copy.deepcopy(take(no_iterator, as_torch))


class _Operations:
    """The floating-point operations so far: Megatron keeps the count in a local variable of its loop."""

    def __init__(self, start: float) -> None:
        self._before = start
        self._iteration = -1
        self._of_iteration: float = 0

    def add(self, iteration: int, amount: float) -> None:
        """`iteration` (from 0) takes `amount`; the amount counts once the next iteration begins."""
        self._before = self.total(iteration)
        self._iteration = iteration
        self._of_iteration = amount

    def total(self, iteration: int) -> float:
        """Return the total at the begin of `iteration`."""
        return self._before + self._of_iteration if iteration > self._iteration else self._before


# The arguments of Megatron-LM's `checkpoint_and_decide_exit`.
_DECIDES_EXIT = (
    *("model", "optimizer", "opt_param_scheduler", "iteration", "num_floating_point_operations_so_far"),
    *("checkpointing_context", "train_data_iterator"),
)


def try_save_again(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
    """Save after a step if an earlier save has failed and the pause is over. Collective.

    Args:
        args, kwargs: the arguments of the loop's question whether to save, and whether to exit.
    """
    if not context.part(FailedSaves).is_due():
        return
    from megatron.training import training

    given = {**dict(zip(_DECIDES_EXIT, args, strict=False)), **kwargs}
    taken = inspect.signature(training.save_checkpoint_and_time).parameters  # some differ by version
    training.save_checkpoint_and_time(**{name: value for name, value in given.items() if name in taken})
