"""The group over which the gradient norm of replicated shards is summed."""

from __future__ import annotations

from typing import Any


def __getattr__(name: str) -> Any:
    if name == "get_os_shard_group":
        raise ImportError(
            f"mindio_ttp.modellink.os_shard_parallel.{name} is not provided: leave ModelLink unedited, the "
            "adaptor patches it by itself (see docs/mindio.md)"
        )
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
