"""Process groups whose backends are exchanged: a rank is replaced, and nobody else makes a group."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from adaptor.online import groups
from tests.faults.warm import Warm
from tests.ports import free_ports

ROOT = Path(__file__).parents[2]
SCRIPT = Path(__file__).with_name("groups_script.py")


def test_this_torch_can_exchange_backends() -> None:
    assert groups.why_not() == ""


@pytest.mark.parametrize("size", [2, 3])
def test_a_newcomer_takes_the_place_of_the_last_rank(size: int) -> None:
    """It gets the state of an optimizer, too, with the sender's checksum."""

    (port,) = free_ports(1)

    def start(rank: int, newcomer: bool) -> subprocess.Popen[str]:
        words = [str(port), str(rank), str(size), str(int(newcomer))]
        return Warm(
            [sys.executable, str(SCRIPT), *words],
            env={**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )

    ranks = [start(rank, newcomer=False) for rank in range(size)]
    assert ranks[-1].communicate(timeout=120)[0].splitlines()[-1] == "first"
    ranks[-1] = start(size - 1, newcomer=True)
    said = [process.communicate(timeout=120)[0] for process in ranks]
    assert [text.splitlines()[-1] for text in said] == ["done"] * size, "\n".join(said)
