"""The sizes in the arguments of a job of Megatron-LM: whether parallel sizes fit the ranks and the batch, and
how many parameters the model has.
"""

from __future__ import annotations

import copy
import math
from typing import Any

from adaptor.errors import UnsupportedError
from adaptor.protection_plan import ModelSize
from adaptor.protocol.framework_options import UNEVEN

NEAREST = "nearest"
# How the framework is told of chunks: they belong to one pipeline parallel size.
CHUNKS = ("num_layers_per_virtual_pipeline_stage", "num_virtual_stages_per_pipeline_rank")
# Bytes for each parameter in the framework's own formula, where the optimizer is not distributed.
_BYTES = 18


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
    with_experts = [layer >= dense and bool(is_sparse) for layer, is_sparse in enumerate(sparse)]
    each = layers // chunks
    stages_with_experts = {
        chunk % stages for chunk in range(chunks) if any(with_experts[chunk * each : (chunk + 1) * each])
    }
    return stages_with_experts == set(range(stages))


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
        unit: of how many samples a batch is a multiple.
        batch: the global batch that is asked for.
    """
    if getattr(args, "decrease_batch_size_if_needed", False):
        return True  # the user lets the framework round it down
    return all(size % unit == 0 for size in [batch, *rampup(args)])


def require_whole_batches(args: Any) -> None:
    """Refuse a global batch that the ranks cannot share, as the framework does in training.

    Raises:
        UnsupportedError: names the batch and the size of which it must be a multiple.
    """
    micro_batch, batch = getattr(args, "micro_batch_size", None), getattr(args, "global_batch_size", None)
    size = data_parallel_size(args)
    if micro_batch and batch and size and not divides(args, micro_batch * size, batch):
        batches = " and ".join(map(str, [batch, *rampup(args)]))
        raise UnsupportedError(
            f"--global-batch-size is {batches}, no multiple of {micro_batch * size}: --micro-batch-size"
            f" {micro_batch} times the data-parallel size {size} of {args.world_size} ranks"
        )


def chunks_of(args: Any, pipeline: int) -> int:
    """Return the chunks of each stage in a pipeline of size `pipeline`."""
    if pipeline != args.pipeline_model_parallel_size or pipeline == 1:
        return 1
    layers, stages = (getattr(args, name, None) for name in CHUNKS)
    return int(stages or (args.num_layers // pipeline // layers if layers else 1))


def model_of(parsed: Any) -> ModelSize | None:
    """Return the sizes of the model; None if this version of the framework has no formula for the sizes."""
    try:
        from megatron.training.theoretical_memory_usage import compute_weight_and_optimizer_memory
    except ImportError:
        return None
    try:
        args = copy.copy(parsed)
        args.use_distributed_optimizer = False
        args.padded_vocab_size = _padded_vocabulary(args)
        experts = getattr(args, "num_experts", None)
        if experts is not None:
            args.num_experts = 0
        dense = compute_weight_and_optimizer_memory(args) / _BYTES + _positions(args)
        of_experts = 0.0
        if experts is not None:
            args.num_experts = experts
            all_experts = compute_weight_and_optimizer_memory(args) / _BYTES + _positions(args) - dense
            # The formula divides them by the tensor-parallel size alone.
            apart = args.expert_model_parallel_size * _expert_tensor(args) / args.tensor_model_parallel_size
            of_experts = all_experts / apart
    except (
        Exception
    ):  # a model that the formula does not know; a tokenizer whose package or files are not here
        return None
    tensor, pipeline = args.tensor_model_parallel_size, args.pipeline_model_parallel_size
    expert = getattr(args, "expert_model_parallel_size", 1)
    # The first and the last stage have embeddings, or a copy of them; those between have not.
    embedding = args.hidden_size * args.padded_vocab_size / tensor + _positions(args)
    total = dense if pipeline == 1 else 2 * dense - _positions(args) + (pipeline - 2) * (dense - embedding)
    return ModelSize(
        tensor=tensor,
        dense=dense,
        experts=of_experts,
        total=total,
        weight=2 if args.bf16 or args.fp16 else 4,
        weight_copies=expert if getattr(args, "ckpt_format", "torch") == "torch" else 1,
    )


def _positions(args: Any) -> float:
    """Return the parameters of learned positions, which the formula leaves out; each tensor rank has all."""
    learned = getattr(args, "position_embedding_type", "") == "learned_absolute"
    return float(args.hidden_size * args.max_position_embeddings) if learned else 0.0


def _padded_vocabulary(args: Any) -> int:
    if getattr(args, "padded_vocab_size", None):
        return int(args.padded_vocab_size)
    size = args.vocab_size
    if not size:
        # `build_tokenizer` is defined in another module in each version.
        from megatron.training.global_vars import build_tokenizer

        size = build_tokenizer(args).vocab_size
    multiple = args.make_vocab_size_divisible_by * args.tensor_model_parallel_size
    return int(math.ceil(size / multiple) * multiple)
