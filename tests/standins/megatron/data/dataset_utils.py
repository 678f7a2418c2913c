"""The function of Megatron-LM's `megatron.data.dataset_utils` that ModelLink imports."""

from __future__ import annotations


def compile_helper() -> None:
    """There is nothing to compile: `megatron.data.helpers` is Python here."""
