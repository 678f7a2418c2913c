"""The memory that host copies take on each node, and whether it is there: checked before the first step."""

from __future__ import annotations

from typing import Any

import torch.distributed as dist

from adaptor.errors import UnsupportedError
from adaptor.host_memory import available
from adaptor.protocol.environment import Place


def require(place: Place, needed_bytes: int, everyone: dist.ProcessGroup) -> int:
    """Refuse a job whose copies do not fit into the memory of a node; return what all ranks of a node need.

    All ranks call it at the same time, before any of them takes memory for copies.

    Args:
        place: of this process.
        needed_bytes: bytes of the copies of this rank, all files together.
        everyone: all ranks of the job.

    Raises:
        UnsupportedError: on all ranks alike: names a node, what it has, and what it would need.
    """
    gathered: list[Any] = [None] * everyone.size()
    dist.all_gather_object(gathered, (place.node, needed_bytes, available()), group=everyone)
    nodes = sorted({node for node, _, _ in gathered})
    bytes_by_node = {
        node: sum(size for other_node, size, _ in gathered if other_node == node) for node in nodes
    }
    # Where there are several, each keeps the copies of the one before, too.
    needs: dict[int, int] = {
        node: bytes_by_node[node] + (bytes_by_node[nodes[at - 1]] if len(nodes) > 1 else 0)
        for at, node in enumerate(nodes)
    }
    for node, node_bytes in needs.items():
        free_bytes = min(free for other_node, _, free in gathered if other_node == node)
        if node_bytes > free_bytes:
            raise UnsupportedError(
                f"TTP_HOST_COPY is set: the copies of node {node} take {node_bytes} bytes of its memory, and"
                f" {free_bytes} bytes are free (limits of its control group included): leave it out, or "
                "give the"
                " node more memory"
            )
    return needs[place.node]
