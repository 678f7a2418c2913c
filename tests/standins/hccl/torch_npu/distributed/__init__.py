"""`torch_npu.distributed`: process groups of HCCL, for which gloo stands in."""

from __future__ import annotations

from torch_npu.distributed.distributed_c10d import reinit_process_group

__all__ = ["reinit_process_group"]
