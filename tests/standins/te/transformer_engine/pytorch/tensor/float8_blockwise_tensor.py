"""A scale for 128 rows and columns, a power of two."""

from transformer_engine.pytorch.tensor import QuantizedTensor, Quantizer


class Float8BlockwiseQTensor(QuantizedTensor):
    raw_name, scale_name = "_rowwise_data", "_rowwise_scale_inv"


class Float8BlockQuantizer(Quantizer):
    block, is_power = (128, 128), True
    tensor_class = Float8BlockwiseQTensor
