"""The framework's arguments in a checkpoint: the arguments that are read, their range, refused options."""

from __future__ import annotations

from argparse import Namespace
from pathlib import Path
from typing import Any

from adaptor.checkpoint.layout_file import UNEVEN
from adaptor.errors import CheckpointError, UnsupportedError
from adaptor.protocol import naming
from adaptor.transform.sizes import Sizes

# The arguments that are read, with their largest values. No model has larger numbers, which would only take
# memory.
_NUMBERS = {
    "num_layers": 1 << 16,
    "num_attention_heads": 1 << 20,
    "make_vocab_size_divisible_by": 1 << 30,
    "tensor_model_parallel_size": 1 << 16,
    "pipeline_model_parallel_size": 1 << 16,
    "data_parallel_size": 1 << 20,
}
_OPTIONAL_NUMBERS = {
    "num_query_groups": 1 << 20,
    "num_experts": 1 << 20,
    "vocab_size": 1 << 32,
    "virtual_pipeline_model_parallel_size": 1 << 16,
    "expert_model_parallel_size": 1 << 16,
    "expert_tensor_parallel_size": 1 << 16,
    "context_parallel_size": 1 << 16,
    "ddp_num_buckets": 1 << 32,
    "ddp_bucket_size": 1 << 50,
}
_FLAGS = (
    "use_distributed_optimizer",
    "swiglu",
    "untie_embeddings_and_output_weights",
    "accumulate_allreduce_grads_in_fp32",
    "group_query_attention",
)
_MOST_RANKS = 1 << 20

# Arguments with which a checkpoint has another content, and their flags. A checkpoint that has one set is
# refused.
_REFUSED = {
    "use_megatron_fsdp": "--use-megatron-fsdp",
    "use_custom_fsdp": "--use-custom-fsdp",
    "use_torch_fsdp2": "--use-torch-fsdp2",
    "fp8": "--fp8-format",
    "fp4": "--fp4-format",
    "optimizer_cpu_offload": "--optimizer-cpu-offload",
    "use_precision_aware_optimizer": "--use-precision-aware-optimizer",
    "overlap_param_gather_with_optimizer_step": "--overlap-param-gather-with-optimizer-step",
    "multi_latent_attention": "--multi-latent-attention",
    "mtp_num_layers": "--mtp-num-layers",
    "moe_grouped_gemm": "--moe-grouped-gemm",
    "heterogeneous_layers_config_path": "--heterogeneous-layers-config-path",
    "is_hybrid_model": "--is-hybrid-model",
}


def of(body: Any, path: Path) -> Namespace:
    """Return the checked arguments from the content of a model's file.

    Raises:
        CheckpointError: an argument is missing or out of its range.
        UnsupportedError: the file has no arguments.
    """
    args = body.get("args") if isinstance(body, dict) else None
    if not isinstance(args, Namespace):
        raise UnsupportedError(f"{path}: has no arguments of the framework, from which its sizes are read")
    for name, largest in (_NUMBERS | _OPTIONAL_NUMBERS).items():
        value = getattr(args, name, None)
        least = 1 if name in _NUMBERS else 0
        if value is None and name in _OPTIONAL_NUMBERS:
            continue
        if type(value) is not int or not least <= value <= largest:
            raise _cannot_be(path, name, value, f"a number from {least} to {largest}")
    for name in _FLAGS:
        if type(value := getattr(args, name, None)) is not bool:
            raise _cannot_be(path, name, value, "True or False")
    sizes = Sizes.of(args)
    if max(sizes.tp, sizes.expert_tensor) * sizes.pp * sizes.ep > _MOST_RANKS:
        raise CheckpointError(f"{path}: its arguments say {sizes}; no checkpoint has so many ranks")
    return args


def _cannot_be(path: Path, name: str, value: Any, right: str) -> CheckpointError:
    shown = ascii(value) if type(value) in (int, float, str, bool) else f"a {type(value).__name__}"
    verb = "lack" if value is None else "say"
    description = name if value is None else f"{name}={shown[:40]}"
    return CheckpointError(f"{path}: its arguments {verb} {description}; it must be {right}")


def require_supported(args: Namespace, folder: Path, *, described: bool, weights_only: bool = False) -> None:
    """Refuse a checkpoint that was saved with an option that is not supported.

    Args:
        args: the framework's arguments in the checkpoint.
        folder: of the checkpoint, for messages.
        described: the checkpoint has a layout file.
        weights_only: the optimizer is left out.

    Raises:
        UnsupportedError: names the option.
    """
    for name, option in UNEVEN.items():
        if getattr(args, name, None) and not described:
            raise UnsupportedError(
                f"{folder}: was saved with {option} and has no {naming.LAYOUT}, without which it is not"
                " transformed"
            )
    if reason := untransformable(args, described=True, weights_only=weights_only):
        raise UnsupportedError(f"{folder}: was saved {reason}, which is not transformed")
    sizes = Sizes.of(args)
    if sizes.lack:
        raise UnsupportedError(f"{folder}: was saved with {sizes.lack}")
    has_experts = bool(getattr(args, "num_experts", None)) and not described
    if has_experts and sizes.ep == 1:
        raise UnsupportedError(
            f"{folder}: has experts with an expert-parallel size of 1, where one optimizer has them and all"
            f" else, and no {naming.LAYOUT}; without it only sizes from 2 on are transformed"
        )
    etp = getattr(args, "expert_tensor_parallel_size", None) or sizes.tp
    if has_experts and (etp != sizes.tp or sizes.tp > 1):
        raise UnsupportedError(
            f"{folder}: has experts with TP{sizes.tp} and expert-tensor-parallel size {etp}, and no"
            f" {naming.LAYOUT}; without it experts are transformed only where both are 1"
        )


def untransformable(args: Namespace, *, described: bool, weights_only: bool = False) -> str:
    """Return the option with which a checkpoint cannot be transformed, whatever its sizes; empty: there is
    none.

    Args:
        args: the framework's arguments.
        described: a layout file describes each rank; False: rules lay out source and target.
        weights_only: the optimizer is left out.

    Returns:
        Words that follow `a job` or `was saved`.
    """
    for name, option in {**_REFUSED, **({} if described else UNEVEN)}.items():
        if getattr(args, name, None):
            return f"with {option}"
    if weights_only:
        return ""
    if not args.use_distributed_optimizer:
        return "without --use-distributed-optimizer"
    optimizer = getattr(args, "optimizer", None)
    return "" if optimizer == "adam" else f"with --optimizer {optimizer}"
