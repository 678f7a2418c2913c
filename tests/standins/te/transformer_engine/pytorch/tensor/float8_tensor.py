"""A scale for the whole tensor, from its largest element."""

from transformer_engine.pytorch.tensor import QuantizedTensor, Quantizer


class Float8Tensor(QuantizedTensor):
    pass


class Float8Quantizer(Quantizer):
    """Of delayed scaling; a name."""


class Float8CurrentScalingQuantizer(Quantizer):
    tensor_class = Float8Tensor
