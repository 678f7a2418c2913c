"""The start of a newcomer among survivors in Megatron-LM."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from adaptor.frameworks.training_loop import loads_nothing


def test_a_newcomer_builds_its_model_with_the_survivors_arguments() -> None:
    """A newcomer reads no checkpoint, but its saved arguments must equal those of the survivors.

    The newcomer still draws weights: otherwise a weight cut by tensor parallelism would count in the gradient
    norm as a whole weight.
    """
    args = SimpleNamespace(load="/save", perform_initialization=True, seed=1)
    arguments_before = dict(vars(args))
    with loads_nothing(args):
        assert vars(args) == {"load": None, "perform_initialization": True, "seed": 1}
    assert vars(args) == arguments_before
    with pytest.raises(RuntimeError), loads_nothing(args):
        raise RuntimeError
    assert vars(args) == arguments_before
