"""The CRC-32 that zip files have: ten times as fast where the package isal is installed."""

from __future__ import annotations

import importlib
import zlib
from collections.abc import Callable

_Crc32 = Callable[[bytes | bytearray | memoryview, int], int]


def _fastest() -> _Crc32:
    try:
        # The same numbers, by the processor's instructions for them.
        function: _Crc32 = importlib.import_module("isal.isal_zlib").crc32
    except ImportError:
        return zlib.crc32
    return function


# Takes data and the CRC-32 of what stands before it, 0 for none; returns that of both together.
crc32 = _fastest()
