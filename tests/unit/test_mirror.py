"""`mirror` replicas equal their owner's state bitwise at every step."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from adaptor.replica.ring import end_to_end, stride
from tests.faults.warm import Warm

ROOT = Path(__file__).parents[2]
SCRIPT = Path(__file__).with_name("mirror_script.py")


@pytest.mark.parametrize(
    ("size", "kind", "step"),
    [
        (2, "adamw", 1),
        (3, "adam", 1),
        (3, "sgd", 2),
        (5, "adamw", 2),
        (4, "fused", 3),
        (3, "fused-l2", 1),
        (2, "counting", 1),
    ],
)
def test_the_copy_equals_the_owners_state(size: int, kind: str, step: int, tmp_path: Path) -> None:
    ranks = [
        Warm(
            [sys.executable, str(SCRIPT), str(tmp_path / "store"), str(rank), str(size), kind, str(step)],
            env={**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for rank in range(size)
    ]
    outputs = [process.communicate(timeout=120)[0] for process in ranks]
    assert [text.splitlines()[-1] for text in outputs] == ["compared 8"] * size, "\n".join(outputs)


def test_tensors_that_lie_end_to_end_are_sent_from_their_memory() -> None:
    memory, separate = torch.arange(10.0), torch.ones(2)
    first, second, _, third = memory.split([3, 2, 1, 4])
    joined = list(end_to_end([first, second, third, separate, memory[:0], first]))
    assert [part.tolist() for part in joined] == [[0, 1, 2, 3, 4], [6, 7, 8, 9], [1, 1], [0, 1, 2]]
    assert [part.data_ptr() for part in joined[:3]] == [part.data_ptr() for part in (first, third, separate)]
    assert list(end_to_end([])) == []


@pytest.mark.parametrize(
    ("nodes", "expected"),
    [
        ([0, 0], 1),
        ([0, 1], 1),
        ([0, 0, 1, 1], 2),
        ([0, 1, 0, 1], 1),
        ([0, 0, 0, 1, 1, 1, 2, 2, 2], 3),
        ([0, 0, 0, 1, 1, 1, 2], 3),
        ([0] * 8 + [1] * 8, 8),
    ],
)
def test_neighbours_are_on_different_nodes(nodes: list[int], expected: int) -> None:
    assert stride(nodes) == expected


@given(st.lists(st.integers(0, 3), min_size=2, max_size=12))
def test_no_other_stride_separates_more_neighbours(nodes: list[int]) -> None:
    def apart(step: int) -> int:
        return sum(nodes[rank] != nodes[(rank + step) % len(nodes)] for rank in range(len(nodes)))

    assert apart(stride(nodes)) == max(apart(step) for step in range(1, len(nodes)))
