"""Random states are recorded bitwise and do not follow the main thread."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import numpy
import pytest
import torch

from adaptor.checkpoint import step_record


class _Tracker:
    def __init__(self) -> None:
        self.states = {"model-parallel-rng": torch.get_rng_state()}

    def get_states(self) -> dict[str, Any]:
        return dict(self.states)


def test_recorded_states_stay() -> None:
    (taken,) = step_record.RandomStates(_Tracker()).take()
    state_before = random.getstate(), torch.get_rng_state()
    random.random()
    torch.rand(1)
    assert taken["random_rng_state"] == state_before[0] != random.getstate()
    assert torch.equal(taken["torch_rng_state"], state_before[1])
    assert not torch.equal(taken["torch_rng_state"], torch.get_rng_state())


def test_numpy_s_state_equals_get_state() -> None:
    changes: list[Callable[[], object]] = [
        lambda: None,
        lambda: numpy.random.seed(1),
        numpy.random.rand,
        numpy.random.randn,  # leaves a spare deviate
        numpy.random.randn,  # and uses it up: the rest of the state stays
        lambda: None,
        lambda: numpy.random.set_state(state_before),
    ]
    state_before = numpy.random.get_state()
    for change in changes:
        change()
        taken, real = step_record._numpy.take(), numpy.random.get_state()
        assert numpy.array_equal(taken[1], real[1])
        assert (taken[0], *taken[2:]) == (real[0], *real[2:])


def test_python_s_state_equals_getstate() -> None:
    taken = step_record._PythonState()
    state_before = random.getstate()
    changes: list[Callable[[], object]] = [
        lambda: None,
        lambda: random.seed(1),
        random.random,
        lambda: [random.random() for _ in range(700)],  # the words are made anew
        lambda: random.gauss(0.0, 1.0),  # leaves a spare deviate
        lambda: random.gauss(0.0, 1.0),  # and uses it up: the rest of the state stays
        lambda: None,
        lambda: random.setstate(state_before),
    ]
    for change in changes:
        change()
        assert taken.take() == random.getstate()
        assert taken.take() is taken.take()


def test_python_s_state_is_taken_each_time_where_its_place_is_not_known(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    class Other(random.Random):
        pass

    taken = step_record._PythonState()
    assert taken.take() is taken.take()
    for generator in (Other(3), random.Random(4)):  # replaces the module's generator
        monkeypatch.setattr(random, "getstate", generator.getstate)
        for _ in range(2):
            assert taken.take() == generator.getstate()
            generator.random()


def test_a_generator_of_the_tracker_is_copied() -> None:
    tracker = _Tracker()
    generator = torch.Generator()
    tracker.states = {"graph-safe": generator}
    taken = step_record.take_random(tracker)["rng_tracker_states"]["graph-safe"]
    state_before = taken.get_state()
    torch.rand(1, generator=generator)
    assert torch.equal(taken.get_state(), state_before)
