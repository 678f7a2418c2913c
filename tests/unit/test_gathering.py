"""Between the updates of a chain no parameters are gathered; at its end all of them are."""

from __future__ import annotations

from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from adaptor.errors import UnsupportedError
from adaptor.frameworks import optimizer_instances
from adaptor.patches import megatron_core
from adaptor.worker import runtime

Call = tuple[tuple[Any, ...], dict[str, Any]]


class Part:
    """Of a model."""


@pytest.mark.parametrize(
    ("requests", "gathered"),
    [
        ([{}, {}], [{}]),  # Megatron: each optimizer gathers everything
        # MindSpeed with experts: each optimizer gathers its own parameters.
        ([{"kind": "dense"}, {"kind": "moe"}], [{"kind": "dense"}, {"kind": "moe"}]),
        ([{"kind": "dense"}, {"kind": "dense"}, {"kind": "moe"}], [{"kind": "dense"}, {"kind": "moe"}]),
    ],
)
def test_deferred_gathers_run_at_the_end(
    monkeypatch: pytest.MonkeyPatch, requests: list[dict[str, Any]], gathered: list[dict[str, Any]]
) -> None:
    window = SimpleNamespace(is_open=False)
    session = SimpleNamespace(window=window)
    monkeypatch.setattr(runtime, "get", lambda: SimpleNamespace(session=session))
    part, calls = Part(), list[Call]()

    def gather(*args: Any, **kwargs: Any) -> None:
        calls.append((args, kwargs))

    for _ in range(2):  # steps
        for number, kwargs in enumerate(requests, 1):
            window.is_open = number < len(requests)
            assert not calls
            megatron_core.parameters_are_gathered_at_the_end(gather, part, (), kwargs)
        assert [kwargs for _, kwargs in calls] == gathered
        calls.clear()


class LayerWiseDistributedOptimizer(SimpleNamespace):
    """Megatron-core's, by its name."""


@pytest.mark.parametrize("is_nested", [False, True])
def test_whole_matrices_on_one_rank_alone_are_refused(is_nested: bool) -> None:
    layer_wise = LayerWiseDistributedOptimizer(chained_optimizers=[])
    optimizer = SimpleNamespace(chained_optimizers=[layer_wise]) if is_nested else layer_wise
    with pytest.raises(UnsupportedError, match="Muon's state of whole matrices, each on one rank alone"):
        optimizer_instances.let_pass_the_door(optimizer)


@pytest.mark.parametrize("name", ["mode", "tp_mode"])  # up to 0.16, and later
@pytest.mark.parametrize(("mode", "size"), [("blockwise", 2), ("duplicated", 1), ("duplicated", 2)])
def test_muon_that_asks_other_ranks_in_its_update_is_refused(name: str, mode: str, size: int) -> None:
    """In a loop on Megatron-core the config of Muon has the name of Adam."""
    muon = torch.optim.SGD([torch.zeros(1)])
    groups = SimpleNamespace(tp=SimpleNamespace(size=lambda: size))
    vars(muon).update({"pg_collection": groups, name: mode})
    is_refused = mode == "duplicated" and size == 2
    with pytest.raises(UnsupportedError, match="--muon-tp-mode is") if is_refused else nullcontext():
        optimizer_instances.let_pass_the_door(SimpleNamespace(optimizer=muon))
