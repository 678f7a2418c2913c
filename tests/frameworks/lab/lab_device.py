"""The device of `lab`: a CPU for CUDA scripts; it reports each read of its state."""

from __future__ import annotations

import sys
from contextlib import AbstractContextManager
from typing import Any

from adaptor.devices.cpu import Cpu

READ = "lab: the state of its device is read"


class LabDevice(Cpu):
    def beside(self) -> AbstractContextManager[Any]:
        print(READ, file=sys.stderr, flush=True)
        return super().beside()
