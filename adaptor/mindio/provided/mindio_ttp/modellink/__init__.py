"""What the guide imports for ModelLink besides the engine: optimizers with replicas, and their groups."""

from __future__ import annotations

from typing import Any

_NAMES = (
    "TTPOddReplicaOptimizer",
    "TTPReplicaOptimizer",
    "build_optimizer_replica_group",
    "get_dp_rank_list",
)


def __getattr__(name: str) -> Any:
    if name in _NAMES:
        raise ImportError(
            f"mindio_ttp.modellink.{name} is not provided: leave ModelLink unedited, the adaptor patches it "
            "by itself (see docs/mindio.md)"
        )
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
