"""The contexts in which modules compute in fp8, or are made with fp8 weights."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any


class FP8GlobalStateManager:
    """The recipes of the contexts that are open.

    Attributes:
        recipe: in which modules compute; None: not in fp8
        weights: in which weights are made; None: not in fp8
    """

    recipe: Any = None
    weights: Any = None
    keeps_init_value = False

    @classmethod
    def is_fp8_enabled(cls) -> bool:
        return cls.recipe is not None


@contextlib.contextmanager
def fp8_autocast(enabled: bool = True, fp8_recipe: Any = None, fp8_group: Any = None) -> Iterator[None]:
    before = FP8GlobalStateManager.recipe
    FP8GlobalStateManager.recipe = fp8_recipe if enabled else None
    try:
        yield
    finally:
        FP8GlobalStateManager.recipe = before


@contextlib.contextmanager
def fp8_model_init(
    enabled: bool = True, recipe: Any = None, preserve_high_precision_init_val: bool = False
) -> Iterator[None]:
    before = FP8GlobalStateManager.weights, FP8GlobalStateManager.keeps_init_value
    FP8GlobalStateManager.weights = recipe if enabled else None
    FP8GlobalStateManager.keeps_init_value = preserve_high_precision_init_val
    try:
        yield
    finally:
        FP8GlobalStateManager.weights, FP8GlobalStateManager.keeps_init_value = before
