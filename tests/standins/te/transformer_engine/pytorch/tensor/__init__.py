"""Tensors that are kept in fp8: bytes, and the inverse of a scale for each block of elements."""

from __future__ import annotations

import math
from typing import Any

import torch

_LARGEST = 448.0  # of e4m3, in which weights are


class Quantizer:
    """The rule by which a tensor becomes bytes.

    Attributes:
        block: rows and columns that share a scale; None: all elements share it
        is_power: whether scales are powers of two
        scale, amax: of the last tensor; scratch, as in Transformer Engine
    """

    block: tuple[int, int] | None = None
    is_power = False
    tensor_class: type[QuantizedTensor]

    def __init__(self) -> None:
        self.scale = torch.ones(1)
        self.amax = torch.zeros(1)

    def amax_of(self, values: torch.Tensor) -> torch.Tensor:
        """Return the largest magnitude of each block."""
        matrix = values.float().reshape(-1, values.shape[-1]).abs()
        if self.block is None:
            return matrix.amax().reshape(1)
        rows, columns = self.block
        tall, wide = (-(-size // step) for size, step in zip(matrix.shape, self.block, strict=True))
        padded = matrix.new_zeros(tall * rows, wide * columns)
        padded[: matrix.shape[0], : matrix.shape[1]] = matrix
        return padded.view(tall, rows, wide, columns).amax((1, 3))

    def scale_of(self, amax: torch.Tensor) -> torch.Tensor:
        scale = torch.where(amax > 0, _LARGEST / amax, torch.ones_like(amax))
        return torch.exp2(torch.floor(torch.log2(scale))) if self.is_power else scale

    def spread(self, scale: torch.Tensor, shape: torch.Size) -> torch.Tensor:
        """Return a scale for each element."""
        if self.block is None:
            return scale.expand(shape)
        rows, columns = math.prod(shape[:-1]), shape[-1]
        whole = scale.repeat_interleave(self.block[0], 0).repeat_interleave(self.block[1], 1)
        return whole[:rows, :columns].reshape(shape)

    def bytes_of(self, values: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
        scaled = (values.float() * self.spread(scale, values.shape)).clamp(-_LARGEST, _LARGEST)
        return scaled.to(torch.float8_e4m3fn).view(torch.uint8)

    def update_quantized(self, values: torch.Tensor, into: QuantizedTensor) -> QuantizedTensor:
        amax = self.amax_of(values)
        scale = self.scale_of(amax)
        if self.block is None:
            self.amax.copy_(amax)
            self.scale.copy_(scale)
        into.raw.copy_(self.bytes_of(values, scale).view(into.raw.shape))
        into.scale_inv.copy_(scale.reciprocal())
        return into

    def __call__(self, values: torch.Tensor) -> QuantizedTensor:
        scale = self.scale_of(self.amax_of(values))
        raw, inverse = torch.zeros(values.shape, dtype=torch.uint8), torch.zeros_like(scale)
        made = self.tensor_class(values.shape, values.dtype, raw, inverse, self)
        return self.update_quantized(values, made)


class QuantizedTensor(torch.Tensor):
    """A tensor stored as bytes and scales; operations other than those below see the dequantized tensor."""

    raw_name, scale_name = "_data", "_scale_inv"
    _quantizer: Quantizer

    @staticmethod
    def __new__(
        cls: Any,
        shape: Any,
        dtype: torch.dtype,
        raw: torch.Tensor,
        scale_inv: torch.Tensor,
        quantizer: Quantizer,
    ) -> Any:
        made = torch.Tensor._make_wrapper_subclass(cls, shape, dtype=dtype, device="cpu")
        setattr(made, cls.raw_name, raw)
        setattr(made, cls.scale_name, scale_inv)
        made._quantizer = quantizer
        return made

    def __init__(self, *_args: Any) -> None:
        super().__init__()

    __torch_function__ = torch._C._disabled_torch_function_impl

    @property
    def raw(self) -> torch.Tensor:
        return getattr(self, self.raw_name)

    @property
    def scale_inv(self) -> torch.Tensor:
        return getattr(self, self.scale_name)

    def _get_quantizer(self) -> Quantizer:
        return self._quantizer

    def _alias(self) -> QuantizedTensor:
        return type(self)(self.shape, self.dtype, self.raw, self.scale_inv, self._quantizer)

    def dequantize(self, *, dtype: torch.dtype | None = None) -> torch.Tensor:
        numbers = self.raw.view(torch.float8_e4m3fn).float().view(self.shape)
        return (numbers * self._quantizer.spread(self.scale_inv, self.shape)).to(dtype or self.dtype)

    def quantize_(self, values: torch.Tensor) -> QuantizedTensor:
        return self._quantizer.update_quantized(values, self)

    def float(self) -> torch.Tensor:
        return self.dequantize(dtype=torch.float32)

    def to(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        # "cpu" is where the host is, and this tensor is on the device.
        if "cpu" in map(str, (*args, *kwargs.values())):
            return self.dequantize()
        return super().to(*args, **kwargs)

    def cpu(self, *_args: Any, **_kwargs: Any) -> torch.Tensor:
        return self.dequantize()

    def _get_data(self) -> QuantizedTensor:
        return self._alias()

    def _set_data(self, values: torch.Tensor) -> None:
        if not isinstance(values, QuantizedTensor):
            self.quantize_(values)
            return
        setattr(self, self.raw_name, values.raw)
        setattr(self, self.scale_name, values.scale_inv)

    data = property(_get_data, _set_data)

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.dequantize()!r})"

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten.detach.default:
            return args[0]._alias()
        if func is torch.ops.aten.copy_.default and isinstance(args[0], QuantizedTensor):
            return args[0].quantize_(_plain(args[1]))
        if func is torch.ops.aten.clone.default:
            (tensor,) = args
            return type(tensor)(
                tensor.shape, tensor.dtype, tensor.raw.clone(), tensor.scale_inv.clone(), tensor._quantizer
            )
        plain = [_plain(value) for value in args]
        result = func(*plain, **{name: _plain(value) for name, value in (kwargs or {}).items()})
        if func._schema.is_mutable and isinstance(args[0], QuantizedTensor):  # written back
            return args[0].quantize_(plain[0])
        return result


def _plain(value: Any) -> Any:
    if isinstance(value, list | tuple):
        return type(value)(map(_plain, value))
    return value.dequantize() if isinstance(value, QuantizedTensor) else value


__all__ = ["QuantizedTensor", "Quantizer"]
