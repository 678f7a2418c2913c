"""What the guide imports for ModelLink besides the engine: its optimizers with replicas, and their groups.

Looked up when they are asked for: the framework imports the groups before its optimizer is there.
"""

from __future__ import annotations

import importlib
from typing import Any

_PLACES = {
    "TTPReplicaOptimizer": "_mindio_modellink",
    "TTPOddReplicaOptimizer": "_mindio_modellink",
    "build_optimizer_replica_group": "_mindio_groups",
    "get_dp_rank_list": "_mindio_groups",
}


def __getattr__(name: str) -> Any:
    if name in _PLACES:
        return getattr(importlib.import_module(f"adaptor.patches.{_PLACES[name]}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
