"""DeepSpeed's accelerators."""

from __future__ import annotations

from deepspeed.accelerator import real_accelerator
from deepspeed.accelerator.real_accelerator import get_accelerator

__all__ = ["get_accelerator", "real_accelerator"]
