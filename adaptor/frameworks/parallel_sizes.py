"""The parallel sizes in the arguments of a job of Megatron-LM: checks whether the sizes fit the ranks and the
batch.
"""

from __future__ import annotations

from typing import Any

from adaptor.checkpoint.layout_file import UNEVEN

NEAREST = "nearest"
# How the framework is told of chunks: they belong to one pipeline parallel size.
CHUNKS = ("num_layers_per_virtual_pipeline_stage", "num_virtual_stages_per_pipeline_rank")


def model_size(args: Any) -> int:
    """Return the number of ranks that hold the model once, context parallel ranks included."""
    context_parallel = getattr(args, "context_parallel_size", 1)
    return int(args.tensor_model_parallel_size * args.pipeline_model_parallel_size * context_parallel)


def experts_size(args: Any) -> int:
    """Return the number of ranks that hold all experts once; 1 without experts."""
    if getattr(args, "num_experts", None) is None:
        return 1
    return int(_expert_tensor(args) * args.expert_model_parallel_size * args.pipeline_model_parallel_size)


def _expert_tensor(args: Any) -> int:
    return int(getattr(args, "expert_tensor_parallel_size", None) or args.tensor_model_parallel_size)


def experts_objection(args: Any) -> str:
    """Return why the ranks hold no whole number of sets of all experts, in words; empty where they do."""
    size = experts_size(args)
    if args.world_size % size == 0:
        return ""
    sizes = (
        f"TP{_expert_tensor(args)} EP{args.expert_model_parallel_size} PP{args.pipeline_model_parallel_size}"
    )
    return (
        f"{args.num_experts} experts with {sizes} take {size} ranks, and {args.world_size} is not divisible"
        f" by {size}"
    )


def has_lone_experts(args: Any) -> bool:
    """Return whether each rank has experts that no other rank has; False where the arguments do not tell."""
    if getattr(args, "num_experts", None) is None or args.world_size != experts_size(args):
        return False
    stages, layers = args.pipeline_model_parallel_size, args.num_layers
    if stages == 1:
        return True
    chunks = stages * chunks_of(args, stages) if layers else 0
    if not chunks or layers % chunks or any(getattr(args, name, None) for name in UNEVEN):
        return False
    every = getattr(args, "moe_layer_freq", None) or 1
    dense = getattr(args, "first_k_dense_replace", None) or 0  # of MindSpeed
    if not isinstance(every, int | list) or not isinstance(dense, int):
        return False
    sparse = every if isinstance(every, list) else [layer % every == 0 for layer in range(layers)]
    with_experts = [layer >= dense and bool(one) for layer, one in enumerate(sparse)]
    each = layers // chunks
    found = {
        chunk % stages for chunk in range(chunks) if any(with_experts[chunk * each : (chunk + 1) * each])
    }
    return found == set(range(stages))


def data_parallel_size(args: Any) -> int:
    """Return how many ranks read different samples: context parallel ranks read the same."""
    return int(args.world_size // model_size(args))


def holds_whole_models(args: Any, ranks: int) -> bool:
    """Return whether so many ranks hold the model, and all experts, a whole number of times."""
    return ranks % model_size(args) == 0 and ranks % experts_size(args) == 0


def counts_samples(args: Any) -> bool:
    """Return whether the global batch may change: samples keep their order then."""
    return bool(getattr(args, "train_samples", None)) and not rampup(args)


def rampup(args: Any) -> list[int]:
    """Return the first batch of --rampup-batch-size and the increment."""
    return [int(size) for size in (getattr(args, "rampup_batch_size", None) or [])[:2]]


def divides(args: Any, unit: int, batch: int) -> bool:
    """Return whether each global batch of the job is a number of whole micro-batches on each rank.

    Args:
        args: of the framework.
        unit: of how many samples a batch is a multiple.
        batch: the global batch that is asked for.
    """
    if getattr(args, "decrease_batch_size_if_needed", False):
        return True  # the user lets the framework round it down
    return all(size % unit == 0 for size in [batch, *rampup(args)])


def chunks_of(args: Any, pipeline: int) -> int:
    """Return the chunks of each stage in a pipeline of size `pipeline`: the arguments count chunks for their
    own size.
    """
    if pipeline != args.pipeline_model_parallel_size or pipeline == 1:
        return 1
    layers, stages = (getattr(args, name, None) for name in CHUNKS)
    return int(stages or (args.num_layers // pipeline // layers if layers else 1))
