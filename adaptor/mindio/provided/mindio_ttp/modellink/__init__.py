"""The names that the guide imports for ModelLink: optimizers with replicas, and their groups.

They are looked up on demand: the framework imports the groups before its optimizer is there.
"""

from __future__ import annotations

import importlib
from typing import Any

_PLACES = {
    "TTPReplicaOptimizer": "mindio_modellink",
    "TTPOddReplicaOptimizer": "mindio_modellink",
    "build_optimizer_replica_group": "mindio_modellink_groups",
    "get_dp_rank_list": "mindio_modellink_groups",
}


def __getattr__(name: str) -> Any:
    if name in _PLACES:
        return getattr(importlib.import_module(f"adaptor.frameworks.{_PLACES[name]}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
