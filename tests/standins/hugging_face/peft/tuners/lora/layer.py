"""Layers with adapters."""

from __future__ import annotations

from typing import Any


class NameAlone:
    def __init__(self, *args: Any, **kwargs: Any) -> None:
        raise NotImplementedError(type(self).__name__)


class LoraLayer(NameAlone): ...
