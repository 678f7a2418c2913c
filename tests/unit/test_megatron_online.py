"""The start of a newcomer among survivors in Megatron-LM."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from adaptor.frameworks.training_loop import loads_nothing


def test_a_newcomer_builds_its_model_with_the_survivors_arguments() -> None:
    """It reads no checkpoint; its arguments, which are saved, are then those of all. It draws weights: else
    one that is cut by tensor parallelism counts in the gradient norm as if it were not."""
    args = SimpleNamespace(load="/save", perform_initialization=True, seed=1)
    arguments_before = dict(vars(args))
    with loads_nothing(args):
        assert vars(args) == {"load": None, "perform_initialization": True, "seed": 1}
    assert vars(args) == arguments_before
    with pytest.raises(RuntimeError), loads_nothing(args):
        raise RuntimeError
    assert vars(args) == arguments_before
