"""`initialize_ub`, `get_ub`, `destroy_ub`: as Transformer Engine's, for one buffer."""

from __future__ import annotations

from typing import Any

import torch
import transformer_engine_torch as tex

_ub_communicators: dict[str, Any] | None = None


def initialize_ub(shape: Any, tp_size: int, dtype: Any = None, bootstrap_backend: str = "gloo") -> None:
    """Make the buffer; all ranks of the job do it."""
    global _ub_communicators
    if _ub_communicators is not None:
        raise RuntimeError("UB communicators are already initialized.")
    _ub_communicators = {}
    world = torch.distributed.new_group(backend=bootstrap_backend)
    domains = torch.arange(torch.distributed.get_world_size(world)).view(-1, tp_size).tolist()
    domain, _ = torch.distributed.new_subgroups_by_enumeration(domains, backend=bootstrap_backend)
    helper = tex.CommOverlapHelper(world, domain)
    _ub_communicators["proj_fprop"] = tex.CommOverlap(shape, dtype, helper, tp_size)


def get_ub(name: str) -> Any:
    """Return the buffer."""
    if _ub_communicators is None:
        raise RuntimeError("UB manager is not initialized.")
    return _ub_communicators[name]


def destroy_ub() -> None:
    """Give the buffer up."""
    global _ub_communicators
    _ub_communicators = None
