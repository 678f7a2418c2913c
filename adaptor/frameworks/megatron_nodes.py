"""The arguments of Megatron-LM in a job whose number of nodes may change (`--nnodes MIN:MAX`).

The framework itself makes the data-parallel size and the number of micro-batches from the number of ranks.
What must not depend on that number is required or kept here: the global batch, and which samples come next,
which the framework knows by the number that the checkpoint has (`consumed_train_samples`).
"""

from __future__ import annotations

import copy
import shlex
from itertools import product
from typing import Any

from adaptor import context, output
from adaptor.context import Context
from adaptor.errors import ConfigError, UnsupportedError
from adaptor.protocol.environment import Nodes

NEAREST = "nearest"


class _Said:
    """A part of the context of a process.

    Attributes:
        said: whether the line about nodes and batch was printed: the framework parses its arguments more
            than once
    """

    def __init__(self, context: Context) -> None:
        self.said = False


def fit(args: Any) -> None:
    """Fit the framework's parsed arguments to the nodes that are there; nothing where their number is fixed.

    Changes `args.global_batch_size` where TTP_BATCH is nearest and the nodes cannot divide it.

    Args:
        args: of the framework, before it validates them; `world_size` is known.

    Raises:
        ConfigError: an argument that another number of nodes would change is not given, or cannot be kept.
        UnsupportedError: the model does not fit the ranks, or they cannot divide the global batch.
    """
    nodes = context.part(Nodes)
    if not nodes.fewest:
        return
    _require_independent(args, f"--nnodes {nodes.fewest}:{nodes.most}")
    _require_whole_replicas(args, nodes)
    unit = args.micro_batch_size * data_parallel_size(args)
    asked = args.global_batch_size
    if not _divides(args, unit, asked):
        if context.get().settings.batch != NEAREST:
            raise UnsupportedError(_indivisible(args, nodes))
        _require_samples(args)
        args.global_batch_size = nearest(asked, unit)
    nodes.fitting = tuple(
        count for count in range(nodes.fewest, nodes.most + 1) if _fits(args, nodes, count, asked)
    )
    _say(args, nodes, asked)


def count_iterations(args: Any) -> None:
    """Set the last step of a job whose steps had other batches: the framework divides all samples by the one.

    Args:
        args: of the framework; the checkpoint is loaded.
    """
    if context.part(Nodes).fewest and context.get().settings.batch == NEAREST and _counts_samples(args):
        left = args.train_samples - args.consumed_train_samples
        args.train_iters = args.iteration + max(0, left) // args.global_batch_size


def data_parallel_size(args: Any) -> int:
    """Return how many ranks read different samples: context parallel ranks read the same."""
    return int(args.world_size // _model_size(args))


def nearest(batch: int, unit: int) -> int:
    """Return the multiple of `unit` that is nearest to `batch`, of two the lower one; at least `unit`."""
    lower = batch // unit * unit
    return max(unit, lower if batch - lower <= unit - (batch - lower) else lower + unit)


def _model_size(args: Any) -> int:
    """Return the number of ranks that hold the model once, context parallel ranks included."""
    context_parallel = getattr(args, "context_parallel_size", 1)
    return int(args.tensor_model_parallel_size * args.pipeline_model_parallel_size * context_parallel)


def _experts_size(args: Any) -> int:
    """Return the number of ranks that hold all experts once; 1 where there are none."""
    if getattr(args, "num_experts", None) is None:
        return 1
    tensor = getattr(args, "expert_tensor_parallel_size", None) or args.tensor_model_parallel_size
    return int(tensor * args.expert_model_parallel_size * args.pipeline_model_parallel_size)


def _require_independent(args: Any, flag: str) -> None:
    """Require that samples and random numbers do not depend on the number of nodes."""
    if args.global_batch_size is None:
        raise ConfigError(
            f"{flag} without --global-batch-size: the framework would take --micro-batch-size times the"
            " data-parallel size, which changes with the nodes; give --global-batch-size"
        )
    if getattr(args, "dataloader_type", None) == "cyclic":
        raise UnsupportedError(
            f"{flag} with --dataloader-type cyclic: its order of samples depends on the data-parallel size,"
            " so some would be repeated or left out; use single, or a fixed --nnodes"
        )
    if getattr(args, "data_parallel_random_init", False):
        raise UnsupportedError(
            f"{flag} with --data-parallel-random-init: a checkpoint has the random states of as many ranks as"
            " saved it; leave it out, or use a fixed --nnodes"
        )


def _require_whole_replicas(args: Any, nodes: Nodes) -> None:
    for size, what in (
        (_model_size(args), "the model (tensor times pipeline times context parallel size)"),
        (_experts_size(args), "a set of experts (tensor times expert times pipeline parallel size)"),
    ):
        if args.world_size % size:
            raise UnsupportedError(
                f"{_count(nodes.here, 'node')} with {_count(args.world_size, 'rank')}: {what} takes {size},"
                f" of which {args.world_size} is no multiple; {_others(args, nodes, size)}"
            )


def _others(args: Any, nodes: Nodes, size: int) -> str:
    """Return what would be right in place of a number of ranks that is no multiple of `size`."""
    local = args.world_size // nodes.here
    fitting = [str(count) for count in range(nodes.fewest, nodes.most + 1) if count * local % size == 0]
    with_nodes = f"start {' or '.join(fitting)} nodes" if fitting else "start another number of nodes"
    target = other_sizes(args)
    if target is None:
        return f"{with_nodes}, or with other parallel sizes"
    tensor, pipeline = target
    folder = f"{str(args.save).rstrip('/')}-tp{tensor}-pp{pipeline}"
    source, made = shlex.quote(str(args.save)), shlex.quote(folder)
    return (
        f"{with_nodes}, or run `python -m adaptor transform {source} {made} --tp {tensor} --pp {pipeline}`"
        f" and start with --tensor-model-parallel-size {tensor} --pipeline-model-parallel-size {pipeline}"
        f" --load {made} --save {made}"
    )


def other_sizes(args: Any) -> tuple[int, int] | None:
    """Return the tensor and pipeline parallel sizes with which the model would fit the ranks that are there.

    Of all that fit, those with which a rank holds no more than now, and no less than need be; if there are
    none, those with which it holds the least more.

    Args:
        args: of the framework.

    Returns:
        None where there are none, or `adaptor transform` does not make such a checkpoint.
    """
    if (
        getattr(args, "ckpt_format", "torch") != "torch"
        or not args.use_distributed_optimizer
        or getattr(args, "optimizer", "adam") != "adam"
    ):
        return None
    now = args.tensor_model_parallel_size * args.pipeline_model_parallel_size
    found = [
        (tensor, pipeline)
        for tensor, pipeline in product(_divisors(args.world_size), repeat=2)
        if _takes(args, tensor, pipeline)
    ]

    def rank(sizes: tuple[int, int]) -> tuple[bool, int, bool, int]:
        held = sizes[0] * sizes[1]
        changes = sizes[0] != args.tensor_model_parallel_size
        return held < now, abs(held - now), changes, sizes[1]

    return min(found, key=rank, default=None)


def _divisors(number: int) -> list[int]:
    return [size for size in range(1, number + 1) if number % size == 0]


def _takes(args: Any, tensor: int, pipeline: int) -> bool:
    """Return whether the ranks that are there could train the model in these sizes, and the batch."""
    changed = copy.copy(args)
    changed.tensor_model_parallel_size, changed.pipeline_model_parallel_size = tensor, pipeline
    heads = [args.num_attention_heads]
    if getattr(args, "group_query_attention", False):
        heads.append(args.num_query_groups)
    has_experts = getattr(args, "num_experts", None) is not None
    if (
        any(count % tensor for count in heads)
        or args.num_layers % pipeline
        or (has_experts and tensor != args.tensor_model_parallel_size)
        or args.world_size % _model_size(changed)
        or args.world_size % _experts_size(changed)
    ):
        return False
    return _divides(args, args.micro_batch_size * data_parallel_size(changed), args.global_batch_size)


def _fits(args: Any, nodes: Nodes, count: int, batch: int) -> bool:
    """Return whether the job could train on `count` nodes, with the global batch that was asked for."""
    ranks = args.world_size // nodes.here * count
    if ranks % _model_size(args) or ranks % _experts_size(args):
        return False
    size = ranks // _model_size(args)
    if context.get().settings.replica == "split" and size % 2:
        return False
    may_change = context.get().settings.batch == NEAREST and _counts_samples(args)
    return may_change or _divides(args, args.micro_batch_size * size, batch)


def _divides(args: Any, unit: int, batch: int) -> bool:
    """Return whether each global batch of the job is a number of whole micro-batches on each rank."""
    if getattr(args, "decrease_batch_size_if_needed", False):
        return True  # the user lets the framework round it down
    return all(size % unit == 0 for size in [batch, *_rampup(args)])


def _rampup(args: Any) -> list[int]:
    """Return the first batch of --rampup-batch-size and what it grows by."""
    return [int(size) for size in (getattr(args, "rampup_batch_size", None) or [])[:2]]


def _indivisible(args: Any, nodes: Nodes) -> str:
    size = data_parallel_size(args)
    sizes = [f"--global-batch-size {args.global_batch_size}"]
    if _rampup(args):
        sizes.append(f"--rampup-batch-size {' '.join(map(str, args.rampup_batch_size))}")
    return (
        f"{_count(nodes.here, 'node')}: the data-parallel size is {size}, and {' and '.join(sizes)} cannot be"
        f" divided by {size} times --micro-batch-size {args.micro_batch_size}; start another number of nodes,"
        " give another batch, or --ttp-batch nearest with --train-samples"
    )


def _require_samples(args: Any) -> None:
    """Require what keeps the order of samples when the batch changes: their number is then given."""
    if not getattr(args, "train_samples", None):
        raise ConfigError(
            "--ttp-batch nearest without --train-samples: with --train-iters another batch changes how many"
            " samples there are, and with that their order; give --train-samples in its place"
        )
    if _rampup(args):
        raise UnsupportedError(
            "--ttp-batch nearest with --rampup-batch-size: only one global batch can be changed, not a row of"
            " them; give a --rampup-batch-size that each number of nodes can divide"
        )


def _counts_samples(args: Any) -> bool:
    return bool(getattr(args, "train_samples", None)) and not _rampup(args)


def _say(args: Any, nodes: Nodes, asked: int) -> None:
    """Print, on rank 0, with how many nodes the job trains, and what the global batch is."""
    part = context.part(_Said)
    if args.rank or part.said:
        return
    part.said = True
    size = data_parallel_size(args)
    before = f", {nodes.before} before" if nodes.before not in (0, nodes.here) else ""
    now = args.global_batch_size
    batch = f"global batch {now}" if now == asked else f"global batch {now} in place of {asked} (TTP_BATCH)"
    micro = now // (args.micro_batch_size * size)
    each = f": {_count(micro, 'micro-batch', 'es')} of {args.micro_batch_size} on each data-parallel rank"
    if _rampup(args):
        each = ""
    output.tell(
        f"[ttp] {_count(nodes.here, 'node')} of {nodes.fewest} to {nodes.most}{before}: data-parallel size"
        f" {size}, {batch}{each}"
    )


def _count(number: int, what: str, plural: str = "s") -> str:
    return f"{number} {what}{'' if number == 1 else plural}"
