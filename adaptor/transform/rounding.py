"""Compares main params with weights: the optimizer's params, rounded, are the weights bit for bit."""

from __future__ import annotations

from typing import Any

import numpy

Bits = Any  # an array of numpy, of unsigned integers


def rounds_to(main: memoryview, weight: memoryview, dtype: str) -> bool:
    """Return whether main params in float32 round to weights.

    Args:
        main: the bytes of the main params.
        weight: those of as many weights.
        dtype: of the weights: float32, bfloat16 or float16.
    """
    if dtype == "float32":
        return main == weight
    main_bits, theirs = numpy.frombuffer(main, numpy.uint32), numpy.frombuffer(weight, numpy.uint16)
    rounded = _bfloat16(main_bits) if dtype == "bfloat16" else _float16(main_bits)
    is_equal = rounded == theirs
    # Not a number has many forms, of which it makes no difference which one is there.
    return bool(is_equal.all()) or bool((is_equal | (_is_nan(main_bits) & _is_nan_16(theirs, dtype))).all())


def _bfloat16(bits: Bits) -> Bits:
    """Round to the nearest, to the even one of two that are as near."""
    rounded = bits >> numpy.uint32(16)
    rounded &= numpy.uint32(1)
    rounded += numpy.uint32(0x7FFF)
    rounded += bits
    rounded >>= numpy.uint32(16)
    return rounded.astype(numpy.uint16)


def _float16(bits: Bits) -> Bits:
    with numpy.errstate(over="ignore"):
        return bits.view(numpy.float32).astype(numpy.float16).view(numpy.uint16)


def _is_nan(bits: Bits) -> Bits:
    return numpy.isnan(bits.view(numpy.float32))


def _is_nan_16(bits: Bits, dtype: str) -> Bits:
    infinite = 0x7F80 if dtype == "bfloat16" else 0x7C00
    return (bits & 0x7FFF) > infinite
