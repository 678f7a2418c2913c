"""Process groups that a handler has made, in an attempt that others could not finish.

torch names a group that its members alone make (`use_local_synchronization`) by its ranks, and by how many
groups a process has. With one left from an earlier attempt, a rank would wait under another name.
"""

from __future__ import annotations

from typing import Any

import torch.distributed as dist
from torch.distributed import distributed_c10d


def present() -> frozenset[Any]:
    """The groups that this process has."""
    return frozenset(distributed_c10d._world.pg_names) if dist.is_initialized() else frozenset()


def drop_all_but(kept: frozenset[Any]) -> None:
    """Destroy those that were made since `kept` were all."""
    for group in present() - kept:
        dist.destroy_process_group(group)
