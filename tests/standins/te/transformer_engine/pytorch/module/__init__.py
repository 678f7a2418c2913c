"""Linear layers that compute in fp8 inside `fp8_autocast`, norms, attention."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from itertools import pairwise
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


def _nothing() -> None:
    """End a backward pass that reduces nothing."""


class _Product(torch.autograd.Function):
    """A matrix product of numbers that were rounded to fp8, forward and backward.

    `rounded` returns the numbers of a tensor, by the tensor's name; `ends` is called after the backward pass.
    """

    @staticmethod
    def forward(
        context: Any, values: torch.Tensor, weight: torch.Tensor, rounded: Any, ends: Any
    ) -> torch.Tensor:
        context.rounded, context.ends = rounded, ends
        context.operands = rounded(values, "input"), rounded(weight, "weight")
        return functional.linear(*context.operands)

    @staticmethod
    def backward(context: Any, grad: torch.Tensor) -> Any:
        values, weight = context.operands
        grad = context.rounded(grad.contiguous(), "grad_output")
        rows = grad.reshape(-1, grad.shape[-1])
        grads = grad @ weight, rows.t() @ values.reshape(-1, values.shape[-1]), None, None
        context.ends()
        return grads


def _rounded(fp8: Any, tensor: torch.Tensor, _name: str) -> torch.Tensor:
    if isinstance(tensor, QuantizedTensor):
        return tensor.dequantize()
    return tensor if fp8 is None else _quantizer(fp8)(tensor).dequantize()


def _reduce_backward() -> None:
    FP8GlobalStateManager.reduce_and_update_fp8_tensors(forward=False)


class Linear(TransformerEngineBaseModule):
    """A product, with its part of tensor and sequence parallelism by Megatron-core's own functions."""

    def __init__(
        self,
        in_features: int,
        out_features: int,
        *,
        init_method: Any = None,
        bias: bool = True,
        return_bias: bool = False,
        parallel_mode: str | None = None,
        tp_group: Any = None,
        tp_size: int = 1,
        sequence_parallel: bool = False,
        params_dtype: torch.dtype = torch.float32,
        get_rng_state_tracker: Any = None,
        rng_tracker_name: str | None = None,
        **_options: Any,
    ) -> None:
        super().__init__()
        self.parallel_mode, self.return_bias = parallel_mode, return_bias
        self._group, self._is_cut = tp_group, tp_size > 1
        self._in_sequence = sequence_parallel and self._is_cut
        if parallel_mode == "column":
            out_features //= tp_size
        elif parallel_mode == "row":
            in_features //= tp_size
        self.in_features, self.out_features, self.use_bias, self.tp_size = (
            in_features,
            out_features,
            bias,
            tp_size,
        )
        names = (rng_tracker_name,) if rng_tracker_name else ()
        draws = get_rng_state_tracker().fork(*names) if get_rng_state_tracker else nullcontext()
        weight = torch.empty(out_features, in_features, dtype=params_dtype)
        with torch.no_grad(), draws:
            init_method(weight)
        self.weight = torch.nn.Parameter(self._made(weight))
        if FP8GlobalStateManager.weights is not None and FP8GlobalStateManager.keeps_init_value:
            self.weight.get_high_precision_init_val = lambda: weight
            self.weight.clear_high_precision_init_val = lambda: None
        self.bias = torch.nn.Parameter(torch.zeros(out_features, dtype=params_dtype)) if bias else None
        if parallel_mode is not None:
            self._name_the_cut(self.weight, parallel_mode == "row")
            if bias and parallel_mode == "column":
                self._name_the_cut(self.bias, 0)
            elif bias:
                self.bias.sequence_parallel = sequence_parallel  # type: ignore[union-attr]

    @staticmethod
    def _name_the_cut(param: Any, dimension: int) -> None:
        param.tensor_model_parallel, param.partition_dim, param.partition_stride = True, int(dimension), 1

    @staticmethod
    def _made(weight: torch.Tensor) -> torch.Tensor:
        fp8 = FP8GlobalStateManager.weights
        return weight if fp8 is None else _quantizer(fp8)(weight)

    def forward(self, values: torch.Tensor, is_first_microbatch: bool | None = None) -> Any:
        rounded, ends = partial(_rounded, FP8GlobalStateManager.recipe), _nothing
        if self.prepare_forward():
            rounded = partial(self._with_scales, is_first_microbatch is not False)
            if torch.is_grad_enabled() and FP8GlobalStateManager.is_first_fp8_module():
                ends = _reduce_backward
        out = _Product.apply(self._before(values), self.weight, rounded, ends)
        out = self._behind(out)
        if self.return_bias:
            return out, self.bias
        return out if self.bias is None else out + self.bias

    def _with_scales(self, updates_weight: bool, tensor: torch.Tensor, name: str) -> torch.Tensor:
        """Return the numbers of a tensor under delayed scaling; the weight's are those of the first
        micro-batch."""
        if name == "weight":
            if updates_weight or name not in self._fp8_workspaces:
                self._fp8_workspaces[name] = self.quantizers["scaling_fwd"][1].rounded(tensor)
            return self._fp8_workspaces[name]
        key = "scaling_fwd" if name == "input" else "scaling_bwd"
        return self.quantizers[key][0].rounded(tensor)

    def _before(self, values: torch.Tensor) -> torch.Tensor:
        if not self._is_cut or self.parallel_mode != "column":
            return values
        from megatron.core.tensor_parallel import mappings

        if self._in_sequence:
            return mappings.gather_from_sequence_parallel_region(values, group=self._group)
        return mappings.copy_to_tensor_model_parallel_region(values, group=self._group)

    def _behind(self, values: torch.Tensor) -> torch.Tensor:
        if not self._is_cut or self.parallel_mode != "row":
            return values
        from megatron.core.tensor_parallel import mappings

        if self._in_sequence:
            return mappings.reduce_scatter_to_sequence_parallel_region(values, group=self._group)
        return mappings.reduce_from_tensor_model_parallel_region(values, group=self._group)


class LayerNormLinear(Linear):
    def __init__(
        self,
        in_features: int,
        out_features: int,
        *,
        eps: float = 1e-5,
        normalization: str = "LayerNorm",
        sequence_parallel: bool = False,
        **options: Any,
    ) -> None:
        super().__init__(in_features, out_features, sequence_parallel=sequence_parallel, **options)
        dtype = options["params_dtype"]
        self.eps, self.normalization = eps, normalization
        self.layer_norm_weight = torch.nn.Parameter(torch.ones(in_features, dtype=dtype))
        self.layer_norm_weight.sequence_parallel = sequence_parallel
        self.layer_norm_bias = None
        if normalization == "LayerNorm":
            self.layer_norm_bias = torch.nn.Parameter(torch.zeros(in_features, dtype=dtype))
            self.layer_norm_bias.sequence_parallel = sequence_parallel

    def forward(self, values: torch.Tensor, is_first_microbatch: bool | None = None) -> Any:
        weight, bias = self.layer_norm_weight, self.layer_norm_bias
        if self.normalization == "LayerNorm":
            values = functional.layer_norm(values, weight.shape, weight, bias, self.eps)
        else:
            values = functional.rms_norm(values, weight.shape, weight, self.eps)
        return super().forward(values, is_first_microbatch)


class LayerNorm(torch.nn.LayerNorm):
    def __init__(
        self,
        hidden_size: int,
        eps: float,
        params_dtype: torch.dtype,
        sequence_parallel: bool = False,
        **_options: Any,
    ) -> None:
        super().__init__(hidden_size, eps, dtype=params_dtype)
        self.weight.sequence_parallel = self.bias.sequence_parallel = sequence_parallel


class RMSNorm(torch.nn.RMSNorm):
    def __init__(
        self,
        hidden_size: int,
        eps: float,
        params_dtype: torch.dtype,
        sequence_parallel: bool = False,
        **_options: Any,
    ) -> None:
        super().__init__(hidden_size, eps, dtype=params_dtype)
        self.weight.sequence_parallel = sequence_parallel


class DotProductAttention(torch.nn.Module):
    """Causal attention of equal sequences (`sbhd`) or of packed ones (`thd`), without dropout."""

    def __init__(
        self,
        num_attention_heads: int,
        kv_channels: Any,
        softmax_scale: float | None = None,
        qkv_format: str = "sbhd",
        **_options: Any,
    ) -> None:
        super().__init__()
        self.qkv_format, self._scale = qkv_format, softmax_scale

    def forward(
        self,
        query: Any,
        key: Any,
        value: Any,
        *_args: Any,
        qkv_format: str = "sbhd",
        cu_seqlens_q: Any = None,
        **_options: Any,
    ) -> torch.Tensor:
        if qkv_format == "thd":
            ends = cu_seqlens_q.tolist()
            parts = [
                self._attention(*(tensor[begin:end].unsqueeze(1) for tensor in (query, key, value)))
                for begin, end in pairwise(ends)
                if end > begin
            ]
            rest = query[ends[-1] :].flatten(1) * 0  # padding behind the last sequence
            return torch.cat([*(part.squeeze(1) for part in parts), rest[:, : parts[0].shape[-1]]])
        return self._attention(query, key, value)

    def _attention(self, *tensors: torch.Tensor) -> torch.Tensor:
        heads = (tensor.permute(1, 2, 0, 3) for tensor in tensors)
        out = functional.scaled_dot_product_attention(
            *heads, is_causal=True, scale=self._scale, enable_gqa=True
        )
        return out.permute(2, 0, 1, 3).flatten(2)


class GroupedLinear(TransformerEngineBaseModule):
    """A product for each expert of the rank, over the expert's rows."""

    def __init__(
        self,
        num_gemms: int,
        in_features: int,
        out_features: int,
        *,
        init_method: Any = None,
        bias: bool = True,
        params_dtype: torch.dtype = torch.float32,
        get_rng_state_tracker: Any = None,
        rng_tracker_name: str | None = None,
        **_options: Any,
    ) -> None:
        super().__init__()
        if bias:
            raise NotImplementedError("this stand-in's experts have no bias")
        self.num_gemms = num_gemms
        self.in_features, self.out_features, self.use_bias = in_features, out_features, bias
        names = (rng_tracker_name,) if rng_tracker_name else ()
        for expert in range(num_gemms):
            weight = torch.empty(out_features, in_features, dtype=params_dtype)
            with (
                torch.no_grad(),
                get_rng_state_tracker().fork(*names) if get_rng_state_tracker else nullcontext(),
            ):
                init_method(weight)
            self.register_parameter(f"weight{expert}", torch.nn.Parameter(weight))

    def forward(self, values: torch.Tensor, m_splits: Any, is_first_microbatch: bool | None = None) -> Any:
        weights = (getattr(self, f"weight{expert}") for expert in range(self.num_gemms))
        rows = torch.split(values, list(m_splits))
        return torch.cat([functional.linear(*pair) for pair in zip(rows, weights, strict=True)])

    def init_fp8_metadata(self, num_gemms: int = 1) -> None:
        """Do nothing: the stand-in has no such state."""
