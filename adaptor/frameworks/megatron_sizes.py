"""Finds the number of parameters of a model from Megatron-LM's arguments, before it is built."""

from __future__ import annotations

import copy
import math
from typing import Any

from adaptor.protection_plan import ModelSize

# Bytes for each parameter in the framework's own formula, where the optimizer is not distributed.
_BYTES = 18


def model_of(parsed: Any) -> ModelSize | None:
    """Return the sizes of the model; None if this version of the framework has no formula for the sizes.

    Args:
        parsed: the framework's arguments, validated.
    """
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


def _expert_tensor(args: Any) -> int:
    return int(getattr(args, "expert_tensor_parallel_size", None) or args.tensor_model_parallel_size)


def _positions(args: Any) -> float:
    """Return the parameters of learned positions, which the formula leaves out; each tensor rank has all."""
    learned = getattr(args, "position_embedding_type", "") == "learned_absolute"
    return float(args.hidden_size * args.max_position_embeddings) if learned else 0.0


def _padded_vocabulary(args: Any) -> int:
    if getattr(args, "padded_vocab_size", None):
        return int(args.padded_vocab_size)
    size = args.vocab_size
    if not size:
        from megatron.training.global_vars import (
            build_tokenizer,
        )  # which has a module of its own in each version

        size = build_tokenizer(args).vocab_size
    multiple = args.make_vocab_size_divisible_by * args.tensor_model_parallel_size
    return int(math.ceil(size / multiple) * multiple)
