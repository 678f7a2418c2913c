"""Linear layers that compute in fp8 inside `fp8_autocast`, norms, attention."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.nn import functional

from transformer_engine.common import recipe
from transformer_engine.pytorch.fp8 import FP8GlobalStateManager
from transformer_engine.pytorch.module.base import TransformerEngineBaseModule
from transformer_engine.pytorch.tensor import QuantizedTensor, Quantizer
from transformer_engine.pytorch.tensor.float8_blockwise_tensor import Float8BlockQuantizer
from transformer_engine.pytorch.tensor.float8_tensor import Float8CurrentScalingQuantizer
from transformer_engine.pytorch.tensor.mxfp8_tensor import MXFP8Quantizer

_QUANTIZERS: dict[type, Callable[[], Quantizer]] = {
    recipe.Float8CurrentScaling: Float8CurrentScalingQuantizer,
    recipe.Float8BlockScaling: Float8BlockQuantizer,
    recipe.MXFP8BlockScaling: MXFP8Quantizer,
}


def _quantizer(of: Any) -> Quantizer:
    return _QUANTIZERS[type(of)]()


class _Product(torch.autograd.Function):
    """A matrix product of numbers that were rounded to fp8, forward and backward."""

    @staticmethod
    def forward(context: Any, values: torch.Tensor, weight: torch.Tensor, fp8: Any) -> torch.Tensor:
        def rounded(tensor: torch.Tensor) -> torch.Tensor:
            if isinstance(tensor, QuantizedTensor):
                return tensor.dequantize()
            return tensor if fp8 is None else _quantizer(fp8)(tensor).dequantize()

        context.rounded = rounded
        context.operands = rounded(values), rounded(weight)
        return functional.linear(*context.operands)

    @staticmethod
    def backward(context: Any, grad: torch.Tensor) -> Any:
        values, weight = context.operands
        grad = context.rounded(grad.contiguous())
        rows = grad.reshape(-1, grad.shape[-1])
        return grad @ weight, rows.t() @ values.reshape(-1, values.shape[-1]), None


class Linear(TransformerEngineBaseModule):
    def __init__(
        self,
        in_features: int,
        out_features: int,
        *,
        init_method: Any = None,
        bias: bool = True,
        return_bias: bool = False,
        parallel_mode: str | None = None,
        tp_size: int = 1,
        params_dtype: torch.dtype = torch.float32,
        **_options: Any,
    ) -> None:
        super().__init__()
        if tp_size != 1:
            raise NotImplementedError("this stand-in has no tensor parallelism")
        self.parallel_mode, self.return_bias = parallel_mode, return_bias
        weight = torch.empty(out_features, in_features, dtype=params_dtype)
        with torch.no_grad():
            init_method(weight)
        self.weight = torch.nn.Parameter(self._made(weight))
        if FP8GlobalStateManager.weights is not None and FP8GlobalStateManager.keeps_init_value:
            self.weight.get_high_precision_init_val = lambda: weight
            self.weight.clear_high_precision_init_val = lambda: None
        self.bias = torch.nn.Parameter(torch.zeros(out_features, dtype=params_dtype)) if bias else None

    @staticmethod
    def _made(weight: torch.Tensor) -> torch.Tensor:
        fp8 = FP8GlobalStateManager.weights
        return weight if fp8 is None else _quantizer(fp8)(weight)

    def forward(self, values: torch.Tensor, is_first_microbatch: bool | None = None) -> Any:
        out = _Product.apply(values, self.weight, FP8GlobalStateManager.recipe)
        if self.return_bias:
            return out, self.bias
        return out if self.bias is None else out + self.bias


class LayerNormLinear(Linear):
    def __init__(self, in_features: int, out_features: int, *, eps: float = 1e-5, **options: Any) -> None:
        super().__init__(in_features, out_features, **options)
        dtype = options["params_dtype"]
        self.eps = eps
        self.layer_norm_weight = torch.nn.Parameter(torch.ones(in_features, dtype=dtype))
        self.layer_norm_bias = torch.nn.Parameter(torch.zeros(in_features, dtype=dtype))

    def forward(self, values: torch.Tensor, is_first_microbatch: bool | None = None) -> Any:
        weight, bias = self.layer_norm_weight, self.layer_norm_bias
        return super().forward(functional.layer_norm(values, weight.shape, weight, bias, self.eps))


class LayerNorm(torch.nn.LayerNorm):
    def __init__(self, hidden_size: int, eps: float, params_dtype: torch.dtype, **_options: Any) -> None:
        super().__init__(hidden_size, eps, dtype=params_dtype)


class RMSNorm(torch.nn.RMSNorm):
    def __init__(self, hidden_size: int, eps: float, params_dtype: torch.dtype, **_options: Any) -> None:
        super().__init__(hidden_size, eps, dtype=params_dtype)


class DotProductAttention(torch.nn.Module):
    def __init__(self, num_attention_heads: int, kv_channels: int, **_options: Any) -> None:
        super().__init__()

    def forward(self, query: Any, key: Any, value: Any, *_args: Any, **_options: Any) -> torch.Tensor:
        heads = (tensor.permute(1, 2, 0, 3) for tensor in (query, key, value))
        out = functional.scaled_dot_product_attention(*heads, is_causal=True)
        return out.permute(2, 0, 1, 3).flatten(2)


class GroupedLinear(TransformerEngineBaseModule):
    """A name."""
