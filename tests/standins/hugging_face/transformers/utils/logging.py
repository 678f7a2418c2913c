"""How much transformers says."""

from __future__ import annotations


def set_verbosity(verbosity: int) -> None:
    """It says nothing."""
