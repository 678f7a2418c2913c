"""The base classes of Megatron-LM's modules."""

from transformer_engine.pytorch import distributed, float8_tensor, ops, optimizers, tensor
from transformer_engine.pytorch.fp8 import fp8_autocast, fp8_model_init
from transformer_engine.pytorch.module import (
    DotProductAttention,
    GroupedLinear,
    LayerNorm,
    LayerNormLinear,
    Linear,
    RMSNorm,
)

__all__ = [
    "DotProductAttention",
    "GroupedLinear",
    "LayerNorm",
    "LayerNormLinear",
    "Linear",
    "RMSNorm",
    "distributed",
    "float8_tensor",
    "fp8_autocast",
    "fp8_model_init",
    "ops",
    "optimizers",
    "tensor",
]
