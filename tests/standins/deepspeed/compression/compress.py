"""Names alone."""

from __future__ import annotations

from typing import Any


def init_compression(*args: Any, **kwargs: Any) -> Any:
    raise NotImplementedError("init_compression")


def redundancy_clean(*args: Any, **kwargs: Any) -> Any:
    raise NotImplementedError("redundancy_clean")
