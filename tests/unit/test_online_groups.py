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


def test_as_often_as_a_process_may_exchange_them_each_group_has_numbers_for_its_backends() -> None:
    """24 groups: one row of numbers for all of them would end before."""
    script = """
from datetime import timedelta
import torch, torch.distributed as dist
from torch.distributed import distributed_c10d as c10d
from adaptor import context
from adaptor.online.groups import MOST_EXCHANGES, Groups, ExchangeError

made = context.part(Groups)
made.remember(lone=False)
helper = c10d._new_process_group_helper
c10d._new_process_group_helper = lambda *args, **kwargs: made.make(helper, args, kwargs)
store = dist.HashStore()
dist.init_process_group("cpu:gloo,cuda:gloo", store=store, rank=0, world_size=1)
groups = [dist.new_group([0]) for _ in range(23)]
for number in range(MOST_EXCHANGES):
    made.exchange(store, f"{number}.1")
    for group in groups:
        dist.all_reduce(torch.ones(1), group=group)
try:
    made.exchange(store, "last")
except ExchangeError as error:
    print(error)
"""
    ran = subprocess.run(
        [sys.executable, "-c", script],
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert ran.stdout.strip() == "the process groups were exchanged 10 times in this process", ran.stderr[
        -3000:
    ]
