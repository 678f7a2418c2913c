"""The group of all ranks."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from adaptor.replica import group
from tests.faults import warm
from tests.ports import free_port


@pytest.fixture
def alone() -> Iterator[None]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def test_the_group_is_made_although_gloo_groups_are_disabled(
    alone: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """MindSpeed's --disable-gloo-group replaces torch's function."""
    new_group = dist.new_group

    def no_gloo(*args: Any, **kwargs: Any) -> Any:
        return None if kwargs.get("backend") == "gloo" else new_group(*args, **kwargs)

    monkeypatch.setattr(dist, "new_group", no_gloo)
    assert dist.new_group(backend="gloo") is None
    everyone = group.of_everyone()
    assert (dist.get_backend(everyone), dist.get_world_size(everyone)) == ("gloo", 1)
    group.barrier(everyone)


def test_a_wait_at_the_barrier_can_be_ended() -> None:
    """gloo may drop data for a dead rank; nothing else would end the wait."""
    script = Path(__file__).with_name("barrier_script.py")
    environment = {**os.environ, "PYTHONPATH": str(script.parents[2]), "GLOO_SOCKET_IFNAME": "lo"}
    ran = warm.run([sys.executable, str(script), str(free_port())], env=environment, timeout=240)
    assert ran.stdout.split() == ["WaitEndedError"], ran.stderr[-3000:]


def test_values_are_gathered(alone: None) -> None:
    everyone = group.of_everyone()
    assert group.gather_bytes(everyone, b"\0two\0") == [b"\0two\0"]
    assert group.gather_all({"step": (3, None)}, everyone) == [{"step": (3, None)}]
    assert group.total(everyone, (1 << 64) - 1) == (1 << 64) - 1
