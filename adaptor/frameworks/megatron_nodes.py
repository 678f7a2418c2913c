"""The arguments of Megatron-LM in a job whose number of nodes may change (`--nnodes MIN:MAX`).

The framework itself makes the data-parallel size and the number of micro-batches from the number of ranks.
Values independent of the number of nodes are required or kept here: the global batch, and the position in the
samples, which the framework reads from the checkpoint (`consumed_train_samples`).
"""

from __future__ import annotations

import copy
from typing import Any

from adaptor import context, hooks, output
from adaptor.errors import ConfigError, UnsupportedError
from adaptor.frameworks.parallel_sizes import (
    NEAREST,
    counts_samples,
    data_parallel_size,
    divides,
    experts_objection,
    experts_size,
    holds_whole_models,
    model_size,
    rampup,
)
from adaptor.protocol.environment import Nodes


def fit(args: Any) -> None:
    """Fit the framework's parsed arguments to the present nodes; nothing where their number is fixed.

    Changes `args.global_batch_size` where TTP_BATCH is nearest and the nodes cannot divide it, and with
    TTP_RESHAPE the parallel sizes where the model does not fit the ranks.

    Args:
        args: the framework's arguments, before their validation; `world_size` is known.

    Raises:
        ConfigError: an argument that would change with the number of nodes is missing, or cannot be kept.
        UnsupportedError: the model does not fit the ranks, or the ranks cannot divide the global batch.
    """
    nodes = context.part(Nodes)
    if not nodes.fewest:
        return
    _require_independent(args, f"--nnodes {nodes.fewest}:{nodes.most}")
    fitted_args = copy.copy(args)
    _resize(args)
    _require_whole_replicas(args, nodes)
    unit = args.micro_batch_size * data_parallel_size(args)
    global_batch_size = args.global_batch_size
    if not divides(args, unit, global_batch_size):
        if context.get().settings.batch != NEAREST:
            raise UnsupportedError(_indivisible(args, nodes))
        _require_samples(args)
        args.global_batch_size = nearest(global_batch_size, unit)
    nodes.fitting = tuple(
        count for count in range(nodes.fewest, nodes.most + 1) if _fits(fitted_args, nodes, count)
    )
    _say(args, nodes, fitted_args)


def _resize(args: Any) -> None:
    """Set other parallel sizes if the model does not fit the ranks. Raises UnsupportedError."""
    for hook in hooks.of_worker():
        if not holds_whole_models(args, args.world_size):
            hook.resize(args)


def count_iterations(args: Any) -> None:
    """Set the last step of a job whose steps had other batches: the framework divides all samples by the one.

    Args:
        args: of the framework; the checkpoint is loaded.
    """
    if context.part(Nodes).fewest and context.get().settings.batch == NEAREST and counts_samples(args):
        samples_left = args.train_samples - args.consumed_train_samples
        args.train_iters = args.iteration + max(0, samples_left) // args.global_batch_size


def nearest(batch: int, unit: int) -> int:
    """Return the multiple of `unit` that is nearest to `batch`, of two the lower one; at least `unit`."""
    lower = batch // unit * unit
    return max(unit, lower if batch - lower <= unit - (batch - lower) else lower + unit)


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
    size = model_size(args)
    reason = experts_objection(args)
    if args.world_size % size:
        reason = (
            f"the model (tensor times pipeline times context parallel size) takes {size}, of which"
            f" {args.world_size} is no multiple"
        )
    elif reason:
        size = experts_size(args)
    if reason:
        ranks = _count(args.world_size, "rank")
        raise UnsupportedError(
            f"{_count(nodes.here, 'node')} with {ranks}: {reason}; {_others(args, nodes, size)}"
        )


def _others(args: Any, nodes: Nodes, size: int) -> str:
    """Return suitable numbers of ranks in place of a number that is no multiple of `size`."""
    local = args.world_size // nodes.here
    fitting = [str(count) for count in range(nodes.fewest, nodes.most + 1) if count * local % size == 0]
    with_nodes = f"start {' or '.join(fitting)} nodes" if fitting else "start another number of nodes"
    advice = next(filter(None, (hook.advise_sizes(args) for hook in hooks.of_worker())), "")
    return f"{with_nodes}, or {advice or 'with other parallel sizes'}"


def _fits(args: Any, nodes: Nodes, count: int) -> bool:
    """Return whether the job could train on `count` nodes, with the requested global batch."""
    settings = context.get().settings
    args_there = copy.copy(args)
    args_there.world_size = args.world_size // nodes.here * count
    try:
        _resize(args_there)
    except UnsupportedError:
        return False
    if not holds_whole_models(args_there, args_there.world_size):
        return False
    size = data_parallel_size(args_there)
    if settings.replica == "split" and size % 2:
        return False
    may_change = settings.batch == NEAREST and counts_samples(args)
    return may_change or divides(args, args.micro_batch_size * size, args.global_batch_size)


def _indivisible(args: Any, nodes: Nodes) -> str:
    size = data_parallel_size(args)
    sizes = [f"--global-batch-size {args.global_batch_size}"]
    if rampup(args):
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
    if rampup(args):
        raise UnsupportedError(
            "--ttp-batch nearest with --rampup-batch-size: only one global batch can be changed, not a row of"
            " them; give a --rampup-batch-size that each number of nodes can divide"
        )


def _say(args: Any, nodes: Nodes, fitted_args: Any) -> None:
    """Print, on rank 0, with how many nodes the job trains, and what the global batch is."""
    # The framework parses its arguments more than once.
    if args.rank or not context.get().is_first("nodes and batch"):
        return
    size = data_parallel_size(args)
    nodes_before = f", {nodes.before} before" if nodes.before not in (0, nodes.here) else ""
    batch_now, batch_asked = args.global_batch_size, fitted_args.global_batch_size
    batch = (
        f"global batch {batch_now}"
        if batch_now == batch_asked
        else f"global batch {batch_now} in place of {batch_asked} (TTP_BATCH)"
    )
    micro = batch_now // (args.micro_batch_size * size)
    micro_batches = (
        f": {_count(micro, 'micro-batch', 'es')} of {args.micro_batch_size} on each data-parallel rank"
    )
    if rampup(args):
        micro_batches = ""
    sizes, fitted_sizes = _sizes(args), _sizes(fitted_args)
    changed = "" if sizes == fitted_sizes else f"{sizes} in place of {fitted_sizes} (TTP_RESHAPE), "
    output.tell(
        f"[ttp] {_count(nodes.here, 'node')} of {nodes.fewest} to {nodes.most}{nodes_before}: {changed}"
        f"data-parallel size {size}, {batch}{micro_batches}"
    )


def _sizes(args: Any) -> str:
    return f"TP{args.tensor_model_parallel_size} PP{args.pipeline_model_parallel_size}"


def _count(number: int, noun: str, plural: str = "s") -> str:
    return f"{number} {noun}{'' if number == 1 else plural}"
