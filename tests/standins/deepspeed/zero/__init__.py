"""DeepSpeed's ZeRO, switched off."""

from __future__ import annotations

import contextlib
from typing import Any


class Init(contextlib.nullcontext[None]):
    """A context for the construction of a model; with `enabled=False` without any effect."""

    def __init__(self, *, enabled: bool = True, **kwargs: Any) -> None:
        if enabled:
            raise NotImplementedError("zero.Init(enabled=True)")
        super().__init__()
