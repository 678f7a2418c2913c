"""DeepSpeed's ZeRO, switched off."""

from __future__ import annotations

import contextlib
from typing import Any


class Init(contextlib.nullcontext[None]):
    """A model is built inside of it; with `enabled=False` that is all."""

    def __init__(self, *, enabled: bool = True, **kwargs: Any) -> None:
        if enabled:
            raise NotImplementedError("zero.Init(enabled=True)")
        super().__init__()
