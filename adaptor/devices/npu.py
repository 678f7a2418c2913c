"""Ascend NPUs, by `torch_npu`. Tested NPUs: docs/ascend.md."""

from __future__ import annotations

import contextlib
from functools import partial
from typing import Any

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


def abort_communicators(group: Any) -> None:
    """Abort the HCCL communicators of a process group, and free their buffers on the device.

    The group gets a fresh backend afterwards. Groups with other backends, and groups that a new process has
    made alone, have no communicators of HCCL.
    """
    if any(hasattr(group._get_backend(device), "abort_hccl_comm") for device in group._device_types):
        from torch_npu.distributed import reinit_process_group

        # An error, as of a store that has ended, costs the memory of the buffers alone.
        with contextlib.suppress(Exception):
            reinit_process_group(group, rebuild_link=True)
