"""What a distributed optimizer does with fp8 weights."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist

from transformer_engine.pytorch.tensor import QuantizedTensor
from transformer_engine.pytorch.tensor.mxfp8_tensor import MXFP8Tensor


def replace_raw_data(tensor: QuantizedTensor, new_raw_data: torch.Tensor) -> None:
    if isinstance(tensor, MXFP8Tensor):
        raise NotImplementedError("replace_raw_data for MXFP8Tensor is not supported yet")
    new_raw_data.detach().copy_(tensor.raw)
    setattr(tensor, tensor.raw_name, new_raw_data)


def cast_master_weights_to_fp8(
    model_weights: Sequence[QuantizedTensor],
    master_weights: Sequence[torch.Tensor | None],
    start_offsets: Sequence[int | None],
    group: dist.ProcessGroup,
) -> None:
    """Quantize each rank's part of weights; the largest elements are found over all ranks of `group`."""
    wholes, amaxes = [], []
    for weight, master, start in zip(model_weights, master_weights, start_offsets, strict=True):
        whole = torch.zeros(weight.numel(), dtype=weight.dtype)
        if master is not None and start is not None:
            whole[start : start + master.numel()] = master.to(weight.dtype)
        wholes.append(whole.view(weight.shape))
        amaxes.append(weight._quantizer.amax_of(wholes[-1]))
    packed = torch.cat([amax.reshape(-1) for amax in amaxes])
    dist.all_reduce(packed, dist.ReduceOp.MAX, group=group)
    parts = packed.split([amax.numel() for amax in amaxes])
    for weight, master, start, whole, amax, part in zip(
        model_weights, master_weights, start_offsets, wholes, amaxes, parts, strict=True
    ):
        scale = weight._quantizer.scale_of(part.view(amax.shape))
        weight.scale_inv.copy_(scale.reciprocal())
        if master is not None and start is not None:
            end = start + master.numel()
            quantized = weight._quantizer.bytes_of(whole, scale)
            weight.raw.view(-1)[start:end] = quantized.view(-1)[start:end]
