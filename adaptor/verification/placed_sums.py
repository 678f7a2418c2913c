"""Sums of the bits of a tensor, dependent on the place of each element, and additive over parts.

The sum of a param is the total of the sums of its parts, for any parts, modulo 2**64. So ranks with parts of
a param, a rank with the whole param, and ranks of a job with another data-parallel size compare the same
number. The words are multiplied by odd hashed factors, as in `checksums`, whose sums are faster on a host and
do not add up.
"""

from __future__ import annotations

import functools

import numpy
import numpy.typing as npt
import torch
import xxhash

from adaptor.verification.agreed_state import MASK

# Words that share one factor of their place; a sum over them stays in the cache of a processor.
_CHUNK = 1 << 13
_AT_ONCE = 1 << 22  # words that a device multiplies at once
_WORDS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int32}


def words_of(tensor: torch.Tensor) -> torch.Tensor:
    """Return the bits of a tensor of any type and shape as integers of at most 32 bits, flat."""
    flat = tensor.detach().reshape(-1).contiguous()
    return flat.view(_WORDS[flat.element_size()])


def odd_hash(data: bytes) -> int:
    """Return an odd hash of `data` below 2**64."""
    return int(xxhash.xxh3_64_intdigest(data)) | 1


def name_factor(name: str) -> int:
    """Return the odd factor of a param's sum in the sum of all params."""
    return odd_hash(name.encode())


def placed_sum(tensor: torch.Tensor, first: int = 0) -> int:
    """Return the sum of the bits of a part of a param, below 2**64.

    Args:
        tensor: the part; consecutive elements of the param.
        first: the place of its first element in the param.
    """
    integers = words_of(tensor)
    start = first * (2 if tensor.element_size() == 8 else 1)
    count = integers.numel()
    head = min(-start % _CHUNK, count)
    tail = head + (count - head) // _CHUNK * _CHUNK
    total = 0
    for begin, end in ((0, head), (tail, count)):
        if begin < end:
            place, chunk = (start + begin) % _CHUNK, (start + begin) // _CHUNK
            total += _one_chunk(integers[begin:end], place) * int(_chunk_factors(chunk, 1)[0])
    if head < tail:
        total += _whole_chunks(integers[head:tail].view(-1, _CHUNK), (start + head) // _CHUNK)
    return total & MASK


def _one_chunk(integers: torch.Tensor, place: int) -> int:
    factors = odd_factors(integers.device, _CHUNK)[place : place + integers.numel()]
    if integers.device.type == "cpu":
        return int(numpy.einsum("i,i->", integers.numpy(), factors.numpy(), dtype=numpy.int64))
    return int((integers.to(torch.int64) * factors).sum())


def _whole_chunks(integers: torch.Tensor, chunk: int) -> int:
    factors = odd_factors(integers.device, _CHUNK)
    if integers.device.type == "cpu":
        sums = numpy.einsum("ij,j->i", integers.numpy(), factors.numpy(), dtype=numpy.int64)
        return int(numpy.dot(sums.view(numpy.uint64), _chunk_factors(chunk, len(sums))))
    rows, total = _AT_ONCE // _CHUNK, 0
    for begin in range(0, len(integers), rows):
        chunks = integers[begin : begin + rows]
        chunk_sums = (chunks.to(torch.int64) * factors).sum(1)
        chunk_factors = _chunk_factors(chunk + begin, len(chunks)).view(numpy.int64)
        total += int((chunk_sums * torch.from_numpy(chunk_factors).to(integers.device)).sum())
    return total


def _chunk_factors(first: int, count: int) -> npt.NDArray[numpy.uint64]:
    """Return the odd factors of chunks: hashes of their numbers (splitmix64)."""
    state = numpy.arange(first + 1, first + count + 1, dtype=numpy.uint64) * numpy.uint64(0x9E3779B97F4A7C15)
    for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB)):
        state = (state ^ (state >> numpy.uint64(shift))) * numpy.uint64(factor)
    factors: npt.NDArray[numpy.uint64] = (state ^ (state >> numpy.uint64(31))) | numpy.uint64(1)
    return factors


@functools.cache
def odd_factors(device: torch.device, count: int) -> torch.Tensor:
    """Return the odd factors of the words of a chunk of `count` words: distinct and below 2**32, so that two
    single-bit changes in a chunk never cancel each other. Each step of the loop is bijective on 31 bits.
    """
    place = numpy.arange(count, dtype=numpy.int64)
    for multiplier in (0x9E3779B1, 0x85EBCA6B, 0xC2B2AE35):
        place = (place * multiplier) & ((1 << 31) - 1)
        place ^= place >> 15
    return torch.from_numpy(2 * place + 1).to(device)
