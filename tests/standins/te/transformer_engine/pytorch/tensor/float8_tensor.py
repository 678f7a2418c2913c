"""A scale for the whole tensor, from its largest element, or from those of earlier tensors."""

import torch

from transformer_engine.pytorch.tensor import QuantizedTensor, Quantizer


class Float8Tensor(QuantizedTensor):
    pass


class Float8Quantizer(Quantizer):
    """Of delayed scaling: `scale` and `amax` are parts of the state of a module."""

    def __init__(self, scale: torch.Tensor, amax: torch.Tensor, fp8_dtype: torch.dtype) -> None:
        self.scale, self.amax, self.dtype = scale, amax, fp8_dtype

    def rounded(self, values: torch.Tensor) -> torch.Tensor:
        """Return the numbers of `values` in fp8, and let `amax` grow: atomicMaxFloat of the cast kernels."""
        self.amax.copy_(torch.maximum(self.amax, values.float().abs().amax().reshape(1)))
        largest = torch.finfo(self.dtype).max
        scaled = (values.float() * self.scale).clamp(-largest, largest).to(self.dtype)
        return (scaled.float() * (1 / self.scale)).to(values.dtype)


class Float8CurrentScalingQuantizer(Quantizer):
    tensor_class = Float8Tensor
