"""Process groups: gloo in the place of nccl, with gloo's differences."""

from __future__ import annotations

import functools
import inspect
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d

from adaptor.devices.cpu.tensors import rebind


def _backend(name: str | None) -> str:
    return "gloo" if name is None or "nccl" in name else name


@functools.cache
def _signature(function: Any) -> inspect.Signature:
    return inspect.signature(function)


def _group_over_gloo(original: Any, *args: Any, **kwargs: Any) -> Any:
    call = _signature(original).bind(*args, **kwargs)
    call.arguments["backend"] = _backend(call.arguments.get("backend"))
    for of_nccl in ("device_id", "pg_options"):
        call.arguments.pop(of_nccl, None)
    return original(*call.args, **call.kwargs)


def _barrier_without_devices(original: Any, *args: Any, **kwargs: Any) -> Any:
    call = _signature(original).bind(*args, **kwargs)
    call.arguments.pop("device_ids", None)
    return original(*call.args, **call.kwargs)


def _send_a_copy(original: Any, tensor: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
    # Pipeline code frees the buffer as soon as isend returns: in order on a stream, a race here.
    return original(tensor.detach().clone(), *args, **kwargs)


def _split_sizes_as_lists(original: Any, *args: Any, **kwargs: Any) -> Any:
    call = _signature(original).bind(*args, **kwargs)
    for name in ("output_split_sizes", "input_split_sizes"):
        if call.arguments.get(name) is not None:
            call.arguments[name] = [int(size) for size in call.arguments[name]]
    return original(*call.args, **call.kwargs)


def _without_autograd(original: Any, *args: Any, **kwargs: Any) -> Any:
    # Gloo copies into the parts of the tensor that is filled, which autograd may watch.
    with torch.no_grad():
        return original(*args, **kwargs)


def _coalesced_as_bytes(
    original: Any, output_tensor: torch.Tensor, input_tensor: torch.Tensor, *args: Any, **kwargs: Any
) -> Any:
    # Gloo makes one tensor of all that are gathered together, and would convert numbers of different types.
    if distributed_c10d._world.pg_coalesce_state:
        output_tensor, input_tensor = output_tensor.view(torch.uint8), input_tensor.view(torch.uint8)
    return original(output_tensor, input_tensor, *args, **kwargs)


def install() -> None:
    # P2POp compares the identity of isend, so both modules must hold the same function.
    """Replace the NCCL calls of torch.distributed."""
    for name, effect in {
        "init_process_group": _group_over_gloo,
        "new_group": _group_over_gloo,
        "barrier": _barrier_without_devices,
        "isend": _send_a_copy,
        "all_to_all_single": _split_sizes_as_lists,
        "_all_gather_base": _without_autograd,
        "all_gather_into_tensor": _coalesced_as_bytes,
    }.items():
        rebind((distributed_c10d, dist), name, effect)
