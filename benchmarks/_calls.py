"""Counts the calls that the main thread makes, by function: for `_arming.py`.

The counts do not depend on the load of the machine, and show exactly where a call was added.
"""

from __future__ import annotations

import sys
from collections import Counter
from pathlib import Path
from types import FrameType
from typing import Any


class Calls:
    """The calls of Python functions, and of C functions by Python."""

    def __init__(self) -> None:
        self._python: Counter[Any] = Counter()  # by code
        self._c: Counter[str] = Counter()

    def begin(self) -> None:
        """Count from now on."""
        self._python.clear()
        self._c.clear()
        sys.setprofile(self._count)

    def _count(self, frame: FrameType, event: str, argument: Any) -> None:
        if event == "call":
            self._python[frame.f_code] += 1
        elif event == "c_call":
            self._c[getattr(argument, "__qualname__", str(argument)).rpartition("::")[2]] += 1

    def end(self) -> Counter[str]:
        """Stop counting; return the calls of each function, by file and name ("C": of C functions)."""
        sys.setprofile(None)
        calls = Counter({f"C {name.rpartition('_abi_')[2]}": count for name, count in self._c.items()})
        for code, count in self._python.items():
            calls[f"{'/'.join(Path(code.co_filename).parts[-2:])} {code.co_qualname}"] += count
        return calls
