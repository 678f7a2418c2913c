"""Checksums of optimizer shards: two holders of a shard compare their bits.

A sum depends on bits, never on values: NaN and -0 count as stored. Only scalars (counts of updates, learning
rate, betas) are compared by value, because a message turns a tuple into a list.

On the host a sum is the xxh3_128 of the bytes, at the speed of memory. On a device a sum is the sum of the
words, each multiplied by an odd hashed number for its place: an odd factor is invertible modulo 2**64, so a
change of a single word always changes the sum. The factors are hashed because with 1, 3, 5, ... a bit
inverted in 4, 8 or 16 words in a row is missed in 3 % of the cases. A device may add up the products in any
order.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy
import torch
import xxhash

from adaptor.replica import optimizer_state, twin
from adaptor.verification.agreed_state import MASK
from adaptor.verification.placed_sums import odd_factors, odd_hash, words_of

# Words that are multiplied at once: the products stay in the cache of a device.
_CHUNK = 1 << 20

_MANY = 100  # the 625 numbers of Python's random state are taken at once
# The sums of a shard, by key (`shard_sums`): 32 hexadecimal digits from a host, 16 from a device.
Sums = Mapping[str, str]


class BitSum:
    """The sum of the bits of tensors, added one behind the other; all lie on one device.

    On a device `add` queues the work on the current stream, and `value` waits for the result.

    Args:
        weighted: True: the sum of words, also on a host; None: on a device alone.
    """

    def __init__(self, weighted: bool | None = None) -> None:
        self._weighted = weighted
        self._count = 0
        self._host = xxhash.xxh3_128()
        self._partial_sums: list[torch.Tensor] = []

    def add(self, tensor: torch.Tensor) -> None:
        """Add the elements of `tensor`, of any type and shape."""
        self._count += 1
        integers = words_of(tensor)
        if self._weighted is None:
            self._weighted = integers.device.type != "cpu"
        if not integers.numel():
            return
        if not self._weighted:
            self._host.update(integers.view(torch.uint8).numpy().data)
            return
        factors = odd_factors(integers.device, _CHUNK)
        for start in range(0, integers.numel(), _CHUNK):
            chunk = integers[start : start + _CHUNK].to(torch.int64)
            self._partial_sums.append((chunk * factors[: chunk.numel()]).sum())

    def value(self) -> str:
        """Return the sum, with the number of tensors, in hexadecimal."""
        if not self._weighted:
            host = self._host.copy()
            host.update(self._count.to_bytes(8, "little"))
            return str(host.hexdigest())
        total = self._count
        partial_sums = torch.stack(self._partial_sums).tolist() if self._partial_sums else []
        for place, partial_sum in enumerate(partial_sums):
            total += partial_sum * odd_hash(place.to_bytes(8, "little"))
        return f"{total & MASK:016x}"


def tensors_sum(tensors: Iterable[torch.Tensor], weighted: bool | None = None) -> str:
    """Return the sum of the bits of tensors, in their order.

    Args:
        tensors: all on one device.
        weighted: True: the sum of words, also on a host; None: on a device alone.
    """
    bits = BitSum(weighted)
    for tensor in tensors:
        bits.add(tensor)
    return bits.value()


class PendingSums:
    """The sums of a shard; a device may still compute.

    Args:
        bits: by key, sums of tensors.
        scalars: by key, finished sums.
        numbers: by key, numbers on a device, in one tensor.
    """

    def __init__(
        self, bits: Mapping[str, BitSum], scalars: Sums, numbers: Mapping[str, torch.Tensor] | None = None
    ) -> None:
        self._bits = bits
        self._scalars = scalars
        self._numbers = numbers or {}

    def read(self) -> Sums:
        """Return the sums by key; waits for the device. From any thread."""
        return {
            **{key: bits.value() for key, bits in self._bits.items()},
            **self._scalars,
            **{key: scalar_sum(numbers.tolist()) for key, numbers in self._numbers.items()},
        }


def shard_sums(optimizer: torch.optim.Optimizer, weighted: bool | None = None) -> Sums:
    """Return the sums of one shard, by key. All holders of a shard get equal sums for an equal state.

    Args:
        optimizer: the torch optimizer with the shard on this rank: the own inner optimizer, or a mirror's
            (`shards.held_shards` returns both).
        weighted: True: the sum of words, also on a host; None: on a device alone.

    Returns:
        Sums by key. A sum of tensors runs over all params of the shard, in the order of the param groups:

        - `param`: the fp32 main params.
        - `exp_avg`, `exp_avg_sq` or any other name: the tensors under the name in the state of the params;
          absent before the first update.
        - `state.NAME`: numbers under NAME in the state of the params (`state.step`: counts of updates).
        - `group.NAME`: values under NAME in the param groups (`group.lr`, `group.weight_decay`,
          `group.betas`, `group.step`). A list equals a tuple, and a tensor of one number the number.

        A sum of tensors has 32 hexadecimal digits from a host, and 16 from a device or with `weighted`; sums
        of different lengths cannot be compared. Sums of scalars always have 32.
    """
    return start_shard_sums(optimizer, weighted).read()


def start_shard_sums(optimizer: torch.optim.Optimizer, weighted: bool | None = None) -> PendingSums:
    """Queue the sums of `shard_sums` on the device, without waiting for the result."""
    bits = {"param": BitSum(weighted)}
    entries: dict[str, list[Any]] = {}
    for values in optimizer_state.values_of(optimizer):
        bits["param"].add(values)
    for param in twin.params(optimizer):
        for key, value in optimizer_state.state_values(optimizer, param).items():
            is_tensor = isinstance(value, torch.Tensor)
            if is_tensor and (value.numel() != 1 or value.shape == param.shape):
                bits.setdefault(key, BitSum(weighted)).add(value)
            else:
                entries.setdefault(f"state.{key}", []).append(value)
    on_device = {
        key: torch.stack([value.reshape(()) for value in values])
        for key, values in entries.items()
        if all(isinstance(value, torch.Tensor) and value.device.type != "cpu" for value in values)
    }
    for scalars in twin.scalars(optimizer):
        for key, value in scalars.items():
            entries.setdefault(f"group.{key}", []).append(value)
    on_host = {key: scalar_sum(values) for key, values in entries.items() if key not in on_device}
    return PendingSums(bits, on_host, on_device)


def start_gradient_sums(optimizer: torch.optim.Optimizer) -> PendingSums:
    """Queue the sum of the gradients for the update of a shard, under the key `grad`.

    Args:
        optimizer: as for `shard_sums`, after the clipping and, for a mirror, after its exchange.
    """
    bits = BitSum()
    is_present = []
    for param in twin.params(optimizer):
        gradient = optimizer_state.gradient_of(param)
        is_present.append(gradient is not None)
        if gradient is not None:
            bits.add(gradient)
    return PendingSums({"grad": bits}, {"grad.present": scalar_sum(is_present)})


def random_sum(states: Any) -> str:
    """Return the sum of random states, in the form in which a framework stores them."""
    bits = xxhash.xxh3_128()

    def add(value: Any) -> None:
        if isinstance(value, torch.Generator):
            value = value.get_state()
        if isinstance(value, torch.Tensor):
            bits.update(value.detach().cpu().reshape(-1).contiguous().view(torch.uint8).numpy().data)
        elif isinstance(value, numpy.ndarray):
            bits.update(value.tobytes())
        elif isinstance(value, Mapping):
            for key in sorted(value):
                bits.update(repr(key).encode())
                add(value[key])
        elif isinstance(value, Sequence) and not isinstance(value, str) and len(value) < _MANY:
            for item in value:
                add(item)
        else:
            bits.update(repr(value).encode())

    add(states)
    return str(bits.hexdigest())


def scalar_sum(value: Any) -> str:
    """Return the sum of scalars by value: numbers, texts, and lists and dicts of numbers and texts."""
    return str(xxhash.xxh3_128_hexdigest(_canonical(value).encode()))


def _canonical(value: Any) -> str:
    """Return a text, equal for equal values, also if a message has changed their types."""
    if isinstance(value, torch.Tensor):
        return _canonical(value.item()) if value.numel() == 1 else tensors_sum([value])
    if isinstance(value, bool | int | float):
        return float(value).hex()
    if isinstance(value, str) or value is None:
        return repr(value)
    if isinstance(value, Mapping):
        items = sorted((str(key), _canonical(item)) for key, item in value.items())
        return "{" + ",".join(f"{key!r}:{item}" for key, item in items) + "}"
    if isinstance(value, Sequence):
        return "[" + ",".join(map(_canonical, value)) + "]"
    return type(value).__qualname__  # an object of the framework is no part of the state
