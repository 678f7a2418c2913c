"""What Megatron does on a GPU and cannot do on a CPU, whatever the adaptor does besides."""

from __future__ import annotations

from typing import Any

import torch

from adaptor import patching

kernels = patching.Unit(
    "cpu-kernels", framework="megatron-lm", tested=">=0.15.0rc5,<0.17", group="device:cpu"
)
loading = patching.Unit(
    "cpu-loading", framework="megatron-lm", tested=">=0.15.0rc5,<0.17", group="device:cpu"
)


@kernels.patch(
    "megatron.legacy.fused_kernels:load",
    why="it asks nvcc for its version, and there is nothing to compile for",
    accepts="(args)",
)
def no_kernels_are_compiled(wrapped: Any, instance: Any, args: Any, kwargs: Any) -> None:
    return None


@loading.patch(
    "megatron.training.checkpointing:load_checkpoint",
    why="fp32 main params are views of the model's leaves: written in place only under no_grad",
    accepts="(ddp_model, optimizer, opt_param_scheduler, load_arg=, strict=, ...)",
)
def loads_without_autograd(wrapped: Any, instance: Any, args: Any, kwargs: Any) -> Any:
    with torch.no_grad():
        return wrapped(*args, **kwargs)
