"""No parameters are gathered between the updates of a chain; all are gathered at its end."""

from __future__ import annotations

from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from adaptor.errors import UnsupportedError
from adaptor.frameworks import megatron_settle, optimizer_instances
from adaptor.patches import megatron_core
from adaptor.worker import runtime

Call = tuple[tuple[Any, ...], dict[str, Any]]


class Part:
    """A part of a model."""


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


def test_gathers_of_single_optimizers_run_at_the_end(monkeypatch: pytest.MonkeyPatch) -> None:
    """Since 0.18 each optimizer of a chain gathers its own parameters; a layer-wise optimizer is a chain
    itself.
    """
    window, gathered = SimpleNamespace(is_open=True), list[str]()
    monkeypatch.setattr(runtime, "get", lambda: SimpleNamespace(session=SimpleNamespace(window=window)))
    inner = SimpleNamespace(chained_optimizers=[SimpleNamespace(optimizer="muon")])

    def gather(name: str) -> None:
        megatron_core.parameters_of_one_optimizer_are_gathered_at_the_end(
            lambda: gathered.append(name), inner, (), {}
        )

    for _ in range(2):  # steps
        window.is_open = True
        megatron_core.ranks_that_train_nothing_pass_the_door(lambda: gather("layer-wise"), inner, (), {})
        assert not gathered
        window.is_open = False
        gather("sharded")
        assert gathered == ["layer-wise", "sharded"]
        gathered.clear()


def test_gathers_that_an_abandoned_step_has_put_off_are_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    """A fault cuts off the gather of the first part of the model; other ranks have gathered both parts."""
    window, parts, gathered = SimpleNamespace(is_open=True), [Part(), Part()], list[Any]()
    monkeypatch.setattr(runtime, "get", lambda: SimpleNamespace(session=SimpleNamespace(window=window)))

    def gather(part: Part, **kwargs: Any) -> None:
        def record(**kwargs: Any) -> None:
            gathered.append((parts.index(part), kwargs))
            if not kwargs:
                raise RuntimeError("a rank is gone")

        megatron_core.parameters_are_gathered_at_the_end(record, part, (), kwargs)

    for part in parts:
        gather(part)
    window.is_open = False
    with pytest.raises(RuntimeError):
        gather(parts[0])
    gathered.clear()
    megatron_settle.settle_optimizer(SimpleNamespace(chained_optimizers=[]))
    for part in parts:
        gather(part, force_sync=True)
    assert gathered == [(number, {"force_sync": True}) for number in range(2)]


class LayerWiseDistributedOptimizer(SimpleNamespace):
    """Megatron-core's, by its name."""


def test_commits_that_load_other_weights_with_a_layer_wise_optimizer_are_refused() -> None:
    layer_wise = LayerWiseDistributedOptimizer(chained_optimizers=[], config=SimpleNamespace())
    layer_wise.optimizer = torch.optim.SGD([torch.zeros(1)])
    optimizer_instances.let_pass_the_door(SimpleNamespace(chained_optimizers=[layer_wise]))
    layer_wise._unique_model_chunks = list
    with pytest.raises(UnsupportedError, match="Megatron-LM#6920"):
        optimizer_instances.let_pass_the_door(SimpleNamespace(chained_optimizers=[layer_wise]))


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
