"""The group of all ranks."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch.distributed as dist

from adaptor.replica import group


@pytest.fixture
def alone() -> Iterator[None]:
    """A world of one rank."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def test_it_is_made_where_the_framework_is_to_have_no_gloo_groups(
    alone: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As with MindSpeed's --disable-gloo-group, which puts this in the place of torch's function."""
    made = dist.new_group

    def no_gloo(*args: Any, **kwargs: Any) -> Any:
        return None if kwargs.get("backend") == "gloo" else made(*args, **kwargs)

    monkeypatch.setattr(dist, "new_group", no_gloo)
    assert dist.new_group(backend="gloo") is None
    everyone = group.of_everyone()
    assert (dist.get_backend(everyone), dist.get_world_size(everyone)) == ("gloo", 1)
    dist.barrier(group=everyone)
