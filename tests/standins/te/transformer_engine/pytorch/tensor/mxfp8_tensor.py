"""A scale for 32 elements of a row, a power of two."""

from transformer_engine.pytorch.tensor import QuantizedTensor, Quantizer


class MXFP8Tensor(QuantizedTensor):
    raw_name, scale_name = "_rowwise_data", "_rowwise_scale_inv"


class MXFP8Quantizer(Quantizer):
    block, is_power = (1, 32), True
    tensor_class = MXFP8Tensor
