"""Patches for Megatron's calls that need a GPU; independent of the rest of the adaptor."""

from __future__ import annotations

from typing import Any

import torch

from adaptor import patching
from adaptor.frameworks.tested_versions import MEGATRON_SPECIFIER

kernels = patching.Unit("cpu-kernels", framework="megatron-lm", tested=MEGATRON_SPECIFIER, group="device:cpu")
generation = patching.Unit(
    "cpu-generation", framework="megatron-lm", tested=MEGATRON_SPECIFIER, group="device:cpu"
)
loading = patching.Unit("cpu-loading", framework="megatron-lm", tested=MEGATRON_SPECIFIER, group="device:cpu")


@kernels.patch(
    "megatron.legacy.fused_kernels:load",
    why="the function asks nvcc for its version, and a CPU needs no kernels of CUDA",
    accepts="(args)",
)
def no_kernels_are_compiled(wrapped: Any, instance: Any, args: Any, kwargs: Any) -> None:
    return None


@kernels.patch(
    "megatron.core.fp8_utils:quantize_param_shard",
    why="in 0.12 the function needs Transformer Engine even if there are no fp8 params",
    accepts="(model_params, main_params, start_offsets, data_parallel_group, ...)",
    optional=True,
)
def no_fp8_needs_no_transformer_engine(wrapped: Any, instance: Any, args: Any, kwargs: Any) -> None:
    if args[0] if args else kwargs["model_params"]:
        wrapped(*args, **kwargs)


@generation.patch(
    "megatron.inference.text_generation.communication:_is_cuda",
    why="the function asserts that a tensor is on a GPU",
    accepts="(tensor)",
    optional=True,
)
def a_tensor_on_the_cpu_will_do(wrapped: Any, instance: Any, args: Any, kwargs: Any) -> None:
    return None


@loading.patch(
    "megatron.training.checkpointing:load_checkpoint",
    why="fp32 main params are views of the model's leaves: written in place only under no_grad",
    accepts=(
        "(ddp_model, optimizer, opt_param_scheduler, load_arg=, strict=, ...)",
        "(model, optimizer, opt_param_scheduler, load_arg=, strict=)",  # up to 0.8
    ),
)
def loads_without_autograd(wrapped: Any, instance: Any, args: Any, kwargs: Any) -> Any:
    with torch.no_grad():
        return wrapped(*args, **kwargs)


@loading.patch(
    "megatron.core.optimizer.cpu_offloading.hybrid_optimizer:HybridDeviceOptimizer"
    "._get_sub_optimizer_param_groups",
    why="an optimizer on the host copies params of a device alone; here these are the optimizer's own",
    accepts="(offload_fraction)",
    optional=True,
)
def own_params_are_on_the_device(wrapped: Any, instance: Any, args: Any, kwargs: Any) -> Any:
    own_params = {id(param) for group in instance.param_groups for param in group["params"]}
    torch.Tensor.is_cuda = property(lambda tensor: id(tensor) in own_params)  # type: ignore[assignment]
    try:
        return wrapped(*args, **kwargs)
    finally:
        del torch.Tensor.is_cuda  # the one of its base class is found again
