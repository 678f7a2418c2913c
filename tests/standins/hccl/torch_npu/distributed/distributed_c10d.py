"""`torch_npu.distributed.distributed_c10d`: a helper for groups, a backend, `reinit_process_group`.

As torch_npu does, the import puts a copy of torch's helper in the place of the helper. The backend carries
collectives by gloo, and is used no more once its communicators are aborted.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d

_helper = distributed_c10d._new_process_group_helper
aborted: list[str] = []  # the groups whose communicators were aborted
_made: list[Any] = []  # torch would keep the part of a backend that is in C++ alone


class ProcessGroupHCCL(dist.ProcessGroupGloo):
    """A backend of a process group."""

    def _delete_tcpstore_key(self) -> None:
        """Delete the keys of the ranks' rendezvous; gloo leaves no key that is read again."""

    def abort_hccl_comm(self, reason: str) -> None:
        """Abort the communicators."""
        assert reason == "reinit"


def _create(options: Any, _: Any) -> ProcessGroupHCCL:
    backend = ProcessGroupHCCL(options.store, options.group_rank, options.group_size, options.timeout)
    _made.append(backend)
    return backend


def reinit_process_group(group: Any = None, rebuild_link: bool = True) -> Any:
    """Abort the communicators of a group, to be made again at its next collective."""
    assert rebuild_link, "the others are kept: resume_hccl_comm"
    group = group or dist.group.WORLD
    backend = group._get_backend(torch.device("cpu"))
    backend._delete_tcpstore_key()
    backend.abort_hccl_comm("reinit")
    aborted.append(group.group_name)
    return group


def _patched_new_process_group_helper(
    group_size: int,
    group_rank: int,
    global_ranks_in_group: Any,
    backend: Any,
    store: Any,
    group_name: Any,
    backend_options: Any = None,
    timeout: Any = None,
    pg_tag: Any = None,
    device_id: Any = None,
    group_desc: Any = None,
    enable_reconfigure: bool = False,
) -> Any:
    given = (group_size, group_rank, global_ranks_in_group, backend, store, group_name, backend_options)
    return getattr(_helper, "__wrapped__", _helper)(*given, timeout, pg_tag, device_id, group_desc)


dist.Backend.register_backend("hccl", _create, extended_api=True, devices=["cpu", "cuda"])
distributed_c10d._new_process_group_helper = _patched_new_process_group_helper
