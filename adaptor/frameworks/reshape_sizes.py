"""Chooses the parallel sizes of a job of Megatron-LM: the sizes of TTP_RESHAPE, or of the job's arguments.

The sizes are set in the framework's parsed arguments before their validation. Without TTP_RESHAPE a
checkpoint in other sizes is refused.
"""

from __future__ import annotations

import copy
import shlex
from collections.abc import Callable, Iterator
from itertools import product
from pathlib import Path
from typing import Any, NamedTuple

from adaptor import context
from adaptor.checkpoint import tracker
from adaptor.errors import AdaptorError, ResumeError, UnsupportedError
from adaptor.frameworks.parallel_sizes import (
    CHUNKS,
    NEAREST,
    chunks_of,
    counts_samples,
    data_parallel_size,
    divides,
    experts_objection,
    holds_whole_models,
    model_size,
)
from adaptor.hooks import WorkerHooks
from adaptor.protocol import naming
from adaptor.transform.sizes import Reshape, ReshapeSettings, Sizes, untransformable

# Formats that `adaptor transform` writes.
_FORMATS = ("torch", "torch_dist")


class ReshapeHooks(WorkerHooks):
    """TTP_RESHAPE: checkpoints in other parallel sizes than those of the job."""

    def checks(self, args: Any, *, begins: bool) -> Iterator[Callable[[], None]]:
        if not begins:
            yield lambda: require_transformable(args)

    def require_other_loop(self, world_size: int, args: Any = None) -> None:
        if self._requested is not None:
            raise UnsupportedError(
                "TTP_RESHAPE is set: only jobs that load with Megatron-LM's own load_checkpoint have their"
                " checkpoints transformed; leave it out"
            )

    def resize(self, args: Any) -> None:
        if self._requested is not None:
            require_transformable(args)
            take(args, self._requested)

    def advise_sizes(self, args: Any) -> str:
        target = other_sizes(args)
        if target is not None:
            return _other_command(args, *target)
        expert_size = expert_size_that_fits(args)
        if expert_size is None:
            return ""
        command = _other_command(args, expert_size.tensor, expert_size.pipeline, expert_size.expert)
        return f"{command} ({expert_size.why})"

    def before_load(self, args: Any) -> None:
        """Have a checkpoint in other parallel sizes transformed, or refuse the checkpoint."""
        if self._requested is not None:
            from megatron.core import mpu

            from adaptor.frameworks import reshape  # torch, which is for the script to import

            tensor, pipeline = mpu.get_tensor_model_parallel_rank(), mpu.get_pipeline_model_parallel_rank()
            reshape.bring_to_sizes(args, (tensor, pipeline, mpu.get_expert_model_parallel_rank()))
        elif args.rank == 0:
            require_sizes_of_checkpoint(args)

    @property
    def _requested(self) -> Reshape | None:
        return self.settings.of(ReshapeSettings).reshape


def require_transformable(args: Any) -> None:
    """Refuse TTP_RESHAPE for a job whose checkpoints are not transformed. Raises UnsupportedError."""
    requested_sizes = context.get().settings.of(ReshapeSettings).reshape
    reason = None if requested_sizes is None else _untransformable(args)
    if reason:
        raise UnsupportedError(
            f"TTP_RESHAPE is {requested_sizes}: a checkpoint of a job {reason} is not transformed; leave "
            "out one of them"
        )


def _untransformable(args: Any) -> str:
    """Return why the checkpoints of a job are not transformed, in words; empty where they are."""
    if getattr(args, "ckpt_format", "torch") not in _FORMATS:
        return f"with --ckpt-format {args.ckpt_format}"
    if getattr(args, "use_checkpoint_args", False):  # they would win over the sizes of the job
        return "with --use-checkpoint-args"
    return untransformable(args, described=False)


def take(args: Any, requested_sizes: Reshape) -> None:
    """Set the sizes of TTP_RESHAPE in the framework's arguments.

    Args:
        args: the framework's arguments, before their validation; changed.

    Raises:
        UnsupportedError: no such sizes exist, or the sizes fit neither the model nor the ranks.
    """
    if requested_sizes.tp:
        tensor, pipeline = requested_sizes.tp, requested_sizes.pp
        reason = next(_objections(args, tensor, pipeline), "")
        if reason:
            raise UnsupportedError(
                f"TTP_RESHAPE is {requested_sizes}, and {reason}; give other sizes, or auto"
            )
    else:
        fitting_sizes = other_sizes(args)
        if fitting_sizes is None:
            raise UnsupportedError(
                f"TTP_RESHAPE is {requested_sizes}, and in no tensor and pipeline parallel sizes "
                f"{args.world_size}"
                f" ranks can train this model with this batch{_because_of_experts(args)}"
            )
        tensor, pipeline = fitting_sizes
    if pipeline != args.pipeline_model_parallel_size:
        for name in CHUNKS:
            if hasattr(args, name):
                setattr(args, name, None)
    args.tensor_model_parallel_size, args.pipeline_model_parallel_size = tensor, pipeline


def _because_of_experts(args: Any) -> str:
    """Return the end of the line for a job without fitting sizes: the sizes that would fit, and the reason if
    the experts are the reason.

    A pipeline parallel size of 1 is the easiest for experts: if 1 is too large, all other sizes are.
    """
    objection = experts_objection(_changed(args, args.tensor_model_parallel_size, 1))
    if not objection:
        return "; start another number of nodes"
    expert_size = expert_size_that_fits(args, chosen=True)
    alternative = (
        ""
        if expert_size is None
        else f", or with --expert-model-parallel-size {expert_size.expert} ({expert_size.why})"
    )
    return f": {objection}; start another number of nodes{alternative}"


def other_sizes(args: Any) -> tuple[int, int] | None:
    """Return the tensor and pipeline parallel sizes with which the model would fit the present ranks.

    Of all fitting sizes, choose sizes with which a rank holds no more than now, and no less than necessary;
    without such sizes, choose sizes with the least increase.

    Returns:
        None without fitting sizes, or if `adaptor transform` does not make such a checkpoint.
    """
    if _untransformable(args):
        return None
    current_parallel = args.tensor_model_parallel_size * args.pipeline_model_parallel_size
    candidates = [
        (tensor, pipeline)
        for tensor, pipeline in product(_divisors(args.world_size), repeat=2)
        if next(_objections(args, tensor, pipeline), None) is None and _trains(args, tensor, pipeline)
    ]

    def rank(sizes: tuple[int, int]) -> tuple[bool, int, bool, int]:
        model_parallel = sizes[0] * sizes[1]
        changes = sizes[0] != args.tensor_model_parallel_size
        return model_parallel < current_parallel, abs(model_parallel - current_parallel), changes, sizes[1]

    return min(candidates, key=rank, default=None)


class ExpertSize(NamedTuple):
    """Another expert parallel size, the job's sizes with this size, and the bound of the size, in words."""

    expert: int
    tensor: int
    pipeline: int
    why: str


def expert_size_that_fits(args: Any, *, chosen: bool = False) -> ExpertSize | None:
    """Return another expert parallel size with which the job could train on the present ranks.

    Of all such sizes, prefer sizes that leave the others unchanged; of these the largest.

    Args:
        chosen: the job itself chooses the other sizes, because the model does not fit the ranks in the sizes
            of the arguments; else the user sets the sizes.

    Returns:
        None without a size, or if `adaptor transform` does not make such a checkpoint.
    """
    experts = getattr(args, "num_experts", None)
    if experts is None:
        return None
    current_sizes = args.tensor_model_parallel_size, args.pipeline_model_parallel_size
    candidates = []
    for expert in _divisors(experts):
        changed = copy.copy(args)
        changed.expert_model_parallel_size = expert
        sizes = other_sizes(changed)
        stay = chosen and holds_whole_models(changed, args.world_size)
        if sizes is not None and (sizes == current_sizes or not stay):
            candidates.append((expert, sizes))
    if not candidates:
        return None
    expert, (tensor, pipeline) = max(
        candidates, key=lambda candidate: (candidate[1] == current_sizes, candidate[0])
    )
    ranks_left = args.world_size // (tensor * pipeline)
    ranks = f"{args.world_size} ranks / TP{tensor} / PP{pipeline}"
    reason = f"it has to divide {experts} experts, and {ranks_left} = {ranks}"
    return ExpertSize(expert, tensor, pipeline, reason)


def _divisors(number: int) -> list[int]:
    return [size for size in range(1, number + 1) if number % size == 0]


def _changed(args: Any, tensor: int, pipeline: int) -> Any:
    changed = copy.copy(args)
    changed.tensor_model_parallel_size, changed.pipeline_model_parallel_size = tensor, pipeline
    return changed


def _objections(args: Any, tensor: int, pipeline: int) -> Iterator[str]:
    """Yield why the present ranks cannot hold the model in these sizes."""
    heads = {"attention heads": args.num_attention_heads}
    if getattr(args, "group_query_attention", False):
        heads["query groups"] = args.num_query_groups
    for heads_name, count in heads.items():
        if count % tensor:
            yield f"{count} {heads_name} are not divisible by {tensor}"
    stages = pipeline * chunks_of(args, pipeline)
    if args.num_layers % stages:
        yield f"{args.num_layers} layers are not divisible by {stages}"
    if getattr(args, "num_experts", None) is not None:
        if tensor != args.tensor_model_parallel_size:
            yield "experts keep the tensor parallel size that they have"
        if (getattr(args, "expert_tensor_parallel_size", None) or tensor) != tensor:
            yield f"--expert-tensor-parallel-size {args.expert_tensor_parallel_size} is not {tensor}"
    changed = _changed(args, tensor, pipeline)
    if args.world_size % model_size(changed):
        yield f"the model takes {model_size(changed)} ranks, of which {args.world_size} is no multiple"
    if objection := experts_objection(changed):
        yield objection


def _trains(args: Any, tensor: int, pipeline: int) -> bool:
    """Return whether the requested replicas and batch are possible in these sizes."""
    size = data_parallel_size(_changed(args, tensor, pipeline))
    settings = context.get().settings
    if settings.replica == "split" and size % 2:
        return False
    may_change = settings.batch == NEAREST and counts_samples(args)
    return may_change or divides(args, args.micro_batch_size * size, args.global_batch_size)


def require_sizes_of_checkpoint(args: Any) -> None:
    """Refuse to load a checkpoint of the job in other sizes, if TTP_RESHAPE is not set.

    The check concerns the format `torch`, and optimizer state of `torch_dist` that is not fully reshardable:
    the framework loads both only in their own sizes, and reports other sizes in a traceback. Called by rank 0
    only.

    Args:
        args: of the framework, validated.

    Raises:
        ResumeError: the sizes differ.
    """
    load, save = Path(args.load), Path(args.save)
    step = getattr(args, "ckpt_step", None) or tracker.tracked_step(load)
    if step is None or load.resolve() != save.resolve() or not tracker.has_manifest(load, step):
        return
    folder = load / naming.final_name(step)
    from adaptor.transform import sharded_source  # imported only where a checkpoint is read
    from adaptor.transform.source import sizes_at

    is_sharded = sharded_source.is_sharded(folder)
    if is_sharded and not _loads_sharded_optimizer(args):
        return
    if not is_sharded and not any(path.name.startswith("mp_rank_") for path in folder.iterdir()):
        return
    try:
        sizes_of_step = sizes_at(load, step)
        if is_sharded and sharded_source.fits_any_size(folder):
            return
    except AdaptorError:
        return  # the framework may be able to load it
    if (sizes_of_step.tp, sizes_of_step.pp) != (
        args.tensor_model_parallel_size,
        args.pipeline_model_parallel_size,
    ):
        wanted_sizes = Sizes.of(args)
        raise ResumeError(
            f"step {step} in {save} has {sizes_of_step}, and the job has {wanted_sizes}: give "
            "--ttp-reshape auto, which"
            f" transforms it first, or start with --tensor-model-parallel-size {sizes_of_step.tp}"
            f" --pipeline-model-parallel-size {sizes_of_step.pp}"
        )


def _loads_sharded_optimizer(args: Any) -> bool:
    """Return whether the framework would load the state of a distributed optimizer."""
    leaves_out = getattr(args, "finetune", False) or getattr(args, "no_load_optim", False)
    return bool(getattr(args, "use_distributed_optimizer", False)) and not leaves_out


def _other_command(args: Any, tensor: int, pipeline: int, expert: int = 0) -> str:
    """Return how the job begins in other parallel sizes; `expert`: 0, or another than the arguments say."""
    chunks = chunks_of(args, pipeline)
    further_sizes = "".join(
        f" --{name} {value}"
        for name, value, usual in (
            ("ep", expert, 0),
            ("vpp", chunks, 1),
            ("format", getattr(args, "ckpt_format", "torch"), "torch"),
        )
        if value != usual
    )
    ending = f"-ep{expert}" if expert else ""
    folder = f"{str(args.save).rstrip('/')}-tp{tensor}-pp{pipeline}{ending}"
    source, transformed_folder = shlex.quote(str(args.save)), shlex.quote(folder)
    sizes = f"--tp {tensor} --pp {pipeline}{further_sizes}"
    experts = f" --expert-model-parallel-size {expert}" if expert else ""
    return (
        f"run `python -m adaptor transform {source} {transformed_folder} {sizes}`"
        f" and start with --tensor-model-parallel-size {tensor} --pipeline-model-parallel-size {pipeline}"
        f"{experts} --load {transformed_folder} --save {transformed_folder}"
    )
