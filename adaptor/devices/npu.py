"""Ascend NPUs, by `torch_npu`. Tested NPUs: docs/ascend.md."""

from __future__ import annotations

from functools import partial

import torch

from adaptor.devices.accelerator import Accelerator


class Npu(Accelerator):
    def __init__(self, device: torch.device) -> None:
        import torch_npu

        npu = torch_npu.npu
        # Other streams share a queue of the process (TASK_QUEUE_ENABLE), which stands still when the main
        # thread's stream is full; HCCL does not use streams of this kind.
        super().__init__(npu, device, partial(npu.SyncLaunchStream, device))

    def release(self) -> None:
        """Stop the device, which drops unexecuted work, and let the device go on."""
        self._module.stop_device(self._device.index)
        self._module.restart_device(self._device.index)
