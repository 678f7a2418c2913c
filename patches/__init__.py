"""The patches, one file for each module of a framework, by group."""

from __future__ import annotations

import importlib

if __name__ != "adaptor.patches":
    raise ImportError(
        f"the directory patches/ is the package adaptor.patches, it was imported as {__name__!r}"
    )

FILES: dict[str, tuple[str, ...]] = {
    "ttp": (
        "modellink_training",
        "megatron_core",
        "megatron_training",
        "megatron_checkpointing",
        "ascendspeed_core",
        "ascendspeed_training",
        "ascendspeed_checkpointing",
        "mindspeed",
    ),
    "worker": ("torch_rendezvous",),
}


def load(group: str) -> None:
    """Import the files of a group, which declare its units; no framework. KeyError for an unknown group."""
    for name in FILES[group]:
        importlib.import_module(f"{__name__}.{name}")
