"""Of Megatron-LM's `megatron.data.dataset_utils`: the function that ModelLink takes from there."""

from __future__ import annotations


def compile_helper() -> None:
    """There is nothing to compile: `megatron.data.helpers` is Python here."""
