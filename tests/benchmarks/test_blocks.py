"""Blocks of steps that take turns, their measurements, and the shares of the parts of a step."""

from __future__ import annotations

import itertools
import os
import random
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

BENCHMARKS = Path(__file__).resolve().parents[2] / "benchmarks"


@pytest.fixture
def blocks(monkeypatch: pytest.MonkeyPatch) -> Iterator[ModuleType]:
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    import _blocks

    cpus_before = os.sched_getaffinity(0)  # blocks pin their process
    yield _blocks
    os.sched_setaffinity(0, cpus_before)


def lines_of(rank: int, blocks: ModuleType) -> list[dict[str, Any]]:
    """Return the lines of a rank; its steps take 10 more, and 1 more, when the feature is on."""
    state = {"on": True, "clock": 0}
    began: list[int] = []
    lines: list[dict[str, Any]] = []

    def step() -> None:
        state["clock"] += 11 if state["on"] else 10

    def end(steps: int) -> dict[str, Any]:
        took = (state["clock"] - began.pop()) / steps
        return {"wall": took + rank, "parts": {"all": 2 * took}}

    measured_blocks = blocks.Blocks(
        lambda event, seconds, **fields: lines.append({"what": event, "rank": rank, "time": 0.0, **fields}),
        block=3,
        pairs=4,
        seed=1,
        turn=lambda on: state.update(on=on),
        begin=lambda: began.append(state["clock"]),
        end=end,
        warm_up=5,
    )
    for _ in range(5 + 2 * 4 * 3 + 2):
        measured_blocks.step(step, None, (), {})
    return lines


def test_both_arms_of_each_pair_on_all_ranks(blocks: ModuleType) -> None:
    lines = list(itertools.chain(*zip(lines_of(0, blocks), lines_of(1, blocks), strict=True)))
    of_a_pair = ({"wall": 10.5, "parts": {"all": 20.0}}, {"wall": 11.5, "parts": {"all": 22.0}})
    assert blocks.paired(lines) == [of_a_pair] * 4
    arms = [line["arm"] for line in lines if line["rank"] == 0]
    assert {"off", "on"} == set(arms[:2])


def test_the_median_and_its_interval(blocks: ModuleType) -> None:
    """A few outliers do not move the median, and the 95 % interval contains the true value."""
    source = random.Random(1)
    hits = 0
    for _ in range(200):
        values = [source.gauss(3.0, 1.0) for _ in range(60)] + [1000.0, -500.0]
        middle, low, high = blocks.middle(values)
        assert low < middle < high < low + 1
        hits += low <= 3.0 <= high
    assert hits >= 180


def test_the_share_of_a_part_excludes_the_parts_in_it(blocks: ModuleType) -> None:
    import _parts

    time_now = 0

    def passes(amount: int) -> None:
        nonlocal time_now
        time_now += amount

    class Meters(_parts.Times):  # type: ignore[misc, name-defined]
        def __init__(self) -> None:
            self.parts = {"wall": lambda: time_now}

    shares = _parts.Shares(Meters())

    def outer() -> None:
        passes(1)
        shares.measured("barrier", lambda: passes(10))
        passes(100)
        shares.measured("barrier", lambda: passes(1000))

    shares.measured("door", outer)
    assert {part: taken for part, taken in shares.taken.items() if any(taken)} == {
        "door": [101],
        "barrier": [1010],
    }
    assert (shares.calls["door"], shares.calls["barrier"]) == (1, 2)
