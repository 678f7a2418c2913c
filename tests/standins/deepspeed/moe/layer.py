"""Names alone."""

from __future__ import annotations

from typing import Any


class MoE:
    def __init__(self, *args: Any, **kwargs: Any) -> None:
        raise NotImplementedError("MoE")
