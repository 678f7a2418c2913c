"""The work of the patches on Megatron-LM's training loop. Imported once the framework is."""

from __future__ import annotations

import copy
import importlib
import importlib.util
import inspect
import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch.distributed as dist

from adaptor import context, hooks, patching
from adaptor.checkpoint import layer_wise, save_folder_claim
from adaptor.checkpoint.step_record import LoaderStates, RandomStates
from adaptor.checkpoint.trainee import ProtectedState
from adaptor.checkpoint.training_state import (
    FLOPS,
    CheckpointContents,
    CheckpointPlacement,
    TrainingState,
    format_named,
)
from adaptor.context import Context
from adaptor.errors import UnsupportedError
from adaptor.frameworks import (
    adapter_base,
    fine_tuning,
    layout_beside,
    megatron_nodes,
    megatron_restart,
    state_comparison,
    supported_options,
    training_loop,
)
from adaptor.frameworks.failed_saves import FailedSaves
from adaptor.host_copy import rebuild
from adaptor.online import rejoin
from adaptor.online.data_rewind import DataRewind
from adaptor.replica.group import gather_values

# The counters in the framework's arguments; a version may lack some.
COUNTED = ("consumed_train_samples", "skipped_train_samples", "consumed_valid_samples")

# The arguments of the training loop.
_NAMES = (
    *("forward_step_func", "model", "optimizer", "opt_param_scheduler"),
    *("train_data_iterator", "valid_data_iterator", "process_non_loss_data_func"),
    *("config", "checkpointing_context", "non_loss_data_func"),
)
# Where ModelOpt lists its conversions of a model, and the conversion that leaves nothing to save: a student.
MODELOPT, _STUDENT = "_modelopt_state", "kd_loss"


def require_unconverted(model: Sequence[Any]) -> None:
    """Refuse a model that ModelOpt has quantized or pruned: ModelOpt's data beside the weights is in every
    checkpoint of the framework, and a load fails without the data. Raises UnsupportedError.
    """
    conversions = [getattr(module, MODELOPT, ()) for chunk in model for module in chunk.modules()]
    if any(kind != _STUDENT for converted in conversions for kind, _ in converted):
        raise UnsupportedError(
            "the model was converted by ModelOpt, whose state cannot be protected yet; set ENABLE_TTP=False"
        )


def begin_training(protected: ProtectedState) -> None:
    """Begin training; the arguments are checked again, as a checkpoint or a yaml file may have changed them.
    Collective.

    Raises:
        AdaptorError: the job cannot be protected.
    """
    args = protected.args
    if not rejoin.is_newcomer():  # whose job was checked
        patching.check("ttp")
        require_protected(args)
        save_folder_claim.require_no_later_step(args.save, args.iteration)
        megatron_nodes.count_iterations(args)
        megatron_restart.tell_of_last_words(args)
        require_unconverted(protected.model)
        state_comparison.require_replays(protected.model)
        state_comparison.tell_of_intervals(getattr(args, "train_iters", None))
    training_loop.begin_training(protected, args.iteration)


def require_protected(args: Any) -> None:
    """Check the arguments with which training begins. Raises UnsupportedError."""
    supported_options.require_protected(args)
    for hook in hooks.of_worker():
        for check in hook.checks(args, begins=True):
            check()
    for check in fine_tuning.checks(args):
        check()


def describe_call(
    args: tuple[Any, ...], kwargs: Mapping[str, Any], operations: float, rerun: bool = True
) -> tuple[Mapping[str, Any], ProtectedState]:
    """Return the arguments of a call of `train` by their names, and the state that the loop trains.

    Args:
        operations: the floating-point operations so far, where the training loop begins to count.
        rerun: whether saves contain the state of the rerun state machine, if present.
    """
    call = {**dict(zip(_NAMES, args, strict=False)), **kwargs}
    context.part(Operations).begin(operations)
    eval_iters: list[Any] = [0]

    def further_fields(everyone: dist.ProcessGroup) -> Mapping[str, Any]:
        if path := context.get().settings.layout_only:
            layout_beside.write_alone(Path(path), everyone)
        # With --full-validation the framework finds it out where the data is read, and tells what rank 0 has.
        eval_iters[:] = [protected.args.eval_iters]
        dist.broadcast_object_list(eval_iters, src=0, group=everyone)
        return {"rerun": _rerun_state(rerun), "loaders": _loader_states(call.get("train_data_iterator"))}

    protected = _protected_state(
        call["model"], call["optimizer"], call["opt_param_scheduler"], eval_iters, further_fields
    )
    return call, protected


def batch_sizes() -> Any:
    """Return the framework's module with the sizes of batches; up to 0.7 it is not of the core."""
    core = importlib.util.find_spec("megatron.core.num_microbatches_calculator")
    return importlib.import_module(core.name if core else "megatron.training.global_vars")


def _protected_state(
    model: Sequence[Any],
    optimizer: Any,
    scheduler: Any,
    eval_iters: Sequence[int | list[int]] = (0,),
    further_fields: Callable[[dist.ProcessGroup], Mapping[str, Any]] = lambda _everyone: {},
) -> ProtectedState:
    """Return the state of this rank, from the framework's globals.

    Args:
        eval_iters: see `evaluated`; the value in a step is that of the one element.
        further_fields: see `ProtectedState`.
    """
    from megatron.core import mpu, tensor_parallel
    from megatron.training import get_args
    from megatron.training.training import num_floating_point_operations

    args, sizes, operations = get_args(), batch_sizes(), context.part(Operations)

    def batch() -> int:
        return int(mpu.get_data_parallel_world_size() * args.micro_batch_size * sizes.get_num_microbatches())

    def counters() -> dict[str, int | float]:
        counted = {name: getattr(args, name) for name in COUNTED if hasattr(args, name)}
        return {**counted, FLOPS: operations.total(args.curr_iteration)}

    def skipped() -> int:
        """Samples of the global batch that do not fill a micro-batch on every rank."""
        if not hasattr(args, "skipped_train_samples"):
            return 0  # up to 0.8 they are an error
        return int(sizes.get_current_global_batch_size() - sizes.get_current_running_global_batch_size())

    def growth() -> dict[str, int | float]:
        operation_count = num_floating_point_operations(args, batch())
        operations.add(args.curr_iteration, operation_count)
        return {
            "consumed_train_samples": batch(),
            "skipped_train_samples": skipped(),
            "consumed_valid_samples": evaluated(args, eval_iters[0], args.curr_iteration + 1),
            FLOPS: operation_count,
        }

    keeps = adapter_base.is_kept if adapter_base.is_filtered(args) else None
    return ProtectedState(
        model=model,
        optimizer=optimizer,
        scheduler=scheduler,
        save=args.save,
        group=layer_wise.group_of(_group(args), optimizer),
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
        on_top=lambda *of: {**layout_beside.take(*of), **_files_of_modelopt(args, *of)},
        further_fields=further_fields,
    )


def _files_of_modelopt(
    args: Any, state: TrainingState, place: CheckpointPlacement, everyone: dist.ProcessGroup
) -> Mapping[str, bytes]:
    """Return the files that ModelOpt adds to each save of a student, on the ranks that may write files of the
    whole job: collective. The files stay the same in training.
    """
    if not getattr(args, "export_kd_teacher_load", None):
        return {}
    from megatron.training.checkpointing import save_sharded_modelopt_state

    with tempfile.TemporaryDirectory() as folder:  # one for each rank; rank 0 alone writes
        save_sharded_modelopt_state(state.model, folder, (args.ckpt_format, 1))
        paths = [path for path in Path(folder).rglob("*") if path.is_file()]
        files = {str(path.relative_to(folder)): path.read_bytes() for path in paths}
    files_of_rank_0 = gather_values(files, everyone)[0]
    return files_of_rank_0 if state.writes_common else {}


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


def described(
    model: Sequence[Any], optimizer: Any
) -> tuple[TrainingState, CheckpointPlacement, RandomStates]:
    """Return this rank's part of model and optimizer, its place in a checkpoint, and its random states:
    collective.

    For reading only: without scheduler, counters and second copies.
    """
    protected, everyone = _protected_state(model, optimizer, None), dist.group.WORLD
    assert everyone is not None
    place = protected.place(everyone)
    return protected.at(place), place, protected.random()


def write_host_copies(model: Sequence[Any], optimizer: Any, scheduler: Any) -> None:
    """Make a checkpoint of the host copies, if newer than the job's saves: collective.

    Model and optimizer are built, and nothing is loaded yet. The job then loads from its save folder.

    Args:
        optimizer: None: nothing is made.
    """
    if optimizer is None:
        return
    protected = _protected_state(model, optimizer, scheduler)
    if rebuild.write_newest(protected) is not None:
        megatron_restart.resume_after_restart(protected.args)


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


class Operations:
    """The floating-point operations so far: Megatron keeps the count in a local variable of its loop."""

    def __init__(self, _context: Context) -> None:
        self.begin(0)

    def begin(self, start: float) -> None:
        """The loop is called, and begins to count at `start`."""
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

    arguments = {**dict(zip(_DECIDES_EXIT, args, strict=False)), **kwargs}
    taken = inspect.signature(training.save_checkpoint_and_time).parameters  # some differ by version
    training.save_checkpoint_and_time(**{name: value for name, value in arguments.items() if name in taken})
