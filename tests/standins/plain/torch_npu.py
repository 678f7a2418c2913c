"""Stands in for torch_npu where only MindIO's SDK looks for it, and the framework trains on the CPU."""

from __future__ import annotations

import torch

__version__ = "2.1.0"
npu = torch.cuda
torch.npu = npu  # type: ignore[attr-defined]
npu.SyncLaunchStream = torch.cuda.Stream  # type: ignore[attr-defined]
