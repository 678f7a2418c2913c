"""Model weights rebuilt from the optimizer's float32 main params.

The weights in the model itself may be half updated or half gathered when a dump begins; the main params of
the chosen holders are not. A tensor of the model's state dict is recognised by its memory, whatever its name.
So tied embeddings need no rule: on one pipeline stage both names have the same memory, and the copy of the
last stage is a param of its own, with a main param of its own.

A weight that Transformer Engine keeps in fp8 is quantized anew, by its own quantizer, and saved dequantized,
as the framework saves it in the format `torch_dist`. Its scales depend on the main param alone: weights with
scales of earlier steps are refused (`supported_options`).
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch

from adaptor.checkpoint import shards
from adaptor.errors import CheckpointError
from adaptor.replica import optimizer_state

ToHost = Callable[[torch.Tensor], torch.Tensor]
Cast = Callable[[torch.Tensor, torch.dtype], torch.Tensor]
IsFinite = Callable[[torch.Tensor], bool]
# Returns the numbers of a weight in fp8, from its main param and the live weight.
Requantize = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
# A saved tensor of a model: its name, the tensor, and a function that replaces it.
TensorSlot = tuple[str, torch.Tensor, Callable[[torch.Tensor], None]]
# The attributes in which tensors of Transformer Engine have their bytes.
_BYTES = ("_data", "_rowwise_data", "_columnwise_data")
_ADDRESS_BITS = 64


def is_quantized(tensor: torch.Tensor) -> bool:
    """Tell whether Transformer Engine keeps a tensor in fewer bits than its dtype says."""
    return getattr(tensor, "_quantizer", None) is not None


def requantized(main: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """Return the numbers of the quantized `weight` when made of the main param."""
    quantizer: Any = copy.copy(weight._quantizer)  # type: ignore[attr-defined]
    for name in ("scale", "amax"):  # scratch, which the main thread may be using
        if isinstance(scratch := getattr(quantizer, name, None), torch.Tensor):
            setattr(quantizer, name, scratch.clone())
    values = main.detach().to(_memory(weight).device, weight.dtype).view(weight.shape)
    numbers: torch.Tensor = quantizer(values).dequantize(dtype=weight.dtype)
    return numbers


class _Buffer:
    """A param buffer of a distributed optimizer, with the weights cast from its main params."""

    def __init__(self, optimizer: Any, buffer: Any, main: torch.Tensor, cast: Cast) -> None:
        data = buffer.param_data
        if not data.dtype.is_floating_point or data.element_size() < 2:
            raise CheckpointError(f"weights of {data.dtype} cannot be rebuilt from float32 main params")
        self._buckets = shards.buckets_of(optimizer, buffer)
        self._start = _start(data)
        self._end = self._start + data.numel() * data.element_size()
        self._cast = cast(main, data.dtype)

    def rebuilt(self, tensor: torch.Tensor) -> torch.Tensor | None:
        """Return the weights at the place of `tensor` in the buffer; None if it is not in this buffer."""
        if not self._start <= _start(tensor) < self._end or tensor.dtype != self._cast.dtype:
            return None
        first = (_start(tensor) - self._start) // tensor.element_size()
        last = first + sum(
            (size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True)
        )
        for bucket in self._buckets:
            if bucket.offset <= first and last < bucket.offset + bucket.unpadded:
                return self._cast.as_strided(
                    tensor.shape, tensor.stride(), first - bucket.offset + bucket.world
                )
        return None


class Weights:
    """Collects main params, optimizer by optimizer, and rebuilds the model's state dicts from them.

    `to_host` brings a tensor to host memory. `cast`, `is_finite` and `requantize` are for main params and
    weights, and replaced if the main params are stand-ins.
    """

    def __init__(
        self,
        to_host: ToHost,
        cast: Cast = torch.Tensor.to,
        is_finite: IsFinite = shards.is_finite,
        requantize: Requantize = requantized,
    ) -> None:
        self._to_host, self._cast, self._is_finite = to_host, cast, is_finite
        self._requantize = requantize
        self._buffers: list[_Buffer] = []
        self._whole: dict[tuple[int, torch.Size, torch.dtype], torch.Tensor] = {}

    def add_sharded(self, optimizer: Any, state: Mapping[Any, Any]) -> None:
        """Add a distributed optimizer's params, from its gathered parameter state."""
        storage = optimizer_state.storage_of(optimizer)
        for number, buffer in enumerate(optimizer.buffers):
            (world,) = state[number].values()
            if storage is not None and not _is_in_order(buffer):
                buckets = shards.buckets_of(optimizer, buffer)
                for param, (start, end, number_of_bucket) in buffer.param_index_map.items():
                    bucket = buckets[number_of_bucket]
                    main = world["param"][start - bucket.offset + bucket.world :][: end - start]
                    self._whole[_address(param)] = storage.cast(main, param.dtype).view(param.shape)
                continue
            places = getattr(buffer, "param_index_map", {})
            # Params with memory of their own: gradients alone are in the buffer.
            apart = {param: place for param, place in places.items() if not _is_in(param, buffer.param_data)}
            buckets = shards.buckets_of(optimizer, buffer) if apart else []
            for param, (start, end, number_of_bucket) in apart.items():
                padding = buckets[number_of_bucket].offset - buckets[number_of_bucket].world
                main = world["param"][start - padding : end - padding]
                self._whole[_address(param)] = main.view(param.shape)
            if not places or len(apart) < len(places):
                cast = self._cast if storage is None else storage.cast
                self._buffers.append(_Buffer(optimizer, buffer, world["param"], cast))

    def add_whole(self, optimizer: Any, live: Any) -> None:
        """Add the params of an optimizer that every data-parallel rank has; `live` updates the model."""
        groups = (
            getattr(optimizer, "float16_groups", []),
            getattr(optimizer, "fp32_from_float16_groups", []),
        )
        for params, mains in zip(*groups, strict=True):
            for param, main in zip(params, mains, strict=True):
                self._whole[_address(param)] = main
        for param, main in zip(live.get_parameters(), optimizer.get_parameters(), strict=True):
            self._whole.setdefault(_address(param), main)

    def rebuild(
        self, chunk: Any, places: Iterable[TensorSlot], buffers: Mapping[int, torch.Tensor]
    ) -> list[str]:
        """Replace each saved tensor (`places`) of a model chunk: weights by weights rebuilt from main params.

        `buffers`: copies to save in place of live buffers, by their address (`Buffers.copies`). Returns the
        names of non-finite weights. Raises CheckpointError if a trained weight has no main param on the rank.
        """
        trained = {
            _start(_memory(param)) for param in chunk.parameters() if param.requires_grad and param.numel()
        }
        not_finite = []
        for name, value, put in places:
            weight = self._rebuilt(value)
            if weight is None:
                address = _start(_memory(value))
                if address in trained:
                    raise CheckpointError(f"{name}: no optimizer of this rank has its main param")
                put(self._to_host(buffers.get(address, value)))
                continue
            if not self._is_finite(weight):
                not_finite.append(name)
            put(weight)
        return not_finite

    def _rebuilt(self, tensor: torch.Tensor) -> torch.Tensor | None:
        main = self._whole.get(_address(tensor))
        if main is not None and is_quantized(tensor):
            return self._to_host(self._requantize(main, tensor))
        if main is not None:
            return self._cast(self._to_host(main.detach()), tensor.dtype)
        for buffer in self._buffers:
            weight = buffer.rebuilt(tensor)
            if weight is not None:
                return weight
        return None


def _is_in_order(buffer: Any) -> bool:
    """Return whether the weights lie in their buffer where its map says."""
    first, size = _start(buffer.param_data), buffer.param_data.element_size()
    return all(
        _start(param) == first + start * size for param, (start, _, _) in buffer.param_index_map.items()
    )


def _memory(tensor: torch.Tensor) -> torch.Tensor:
    """Return the tensor that has the memory of `tensor`."""
    if is_quantized(tensor):
        for name in _BYTES:
            if isinstance(held := getattr(tensor, name, None), torch.Tensor):
                return held
    return tensor


def _is_in(param: torch.Tensor, data: torch.Tensor | None) -> bool:
    """Tell whether the memory of a param is a part of `data`, in numbers that a cast makes of main params."""
    if data is None or is_quantized(param):
        return False
    start = _start(data)
    return not param.numel() or start <= _start(param) < start + data.numel() * data.element_size()


def _start(tensor: torch.Tensor) -> int:
    """Return the address of a tensor.

    Without memory (an offloaded buffer) it is a number above all addresses, which no other storage has.
    """
    storage = tensor.untyped_storage()
    if storage.nbytes() or not tensor.numel():
        return tensor.data_ptr()
    return (int(storage._cdata) << _ADDRESS_BITS) + int(tensor.storage_offset()) * tensor.element_size()


def _address(tensor: torch.Tensor) -> tuple[int, torch.Size, torch.dtype]:
    return _start(_memory(tensor)), tensor.shape, tensor.dtype
