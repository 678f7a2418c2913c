"""Delayed scaling: the rules of the stand-in for Transformer Engine, and copies of its state."""

from __future__ import annotations

import importlib
import math
import pickle
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from adaptor.checkpoint import amax_histories
from adaptor.checkpoint.training_state import Buffers

STAND_IN = Path(__file__).resolve().parents[1] / "standins/te"


@pytest.fixture
def engine(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    monkeypatch.syspath_prepend(str(STAND_IN))
    te = importlib.import_module("transformer_engine")
    yield te
    te.pytorch.fp8.FP8GlobalStateManager.reset()
    for name in [name for name in sys.modules if name.partition(".")[0] == "transformer_engine"]:
        del sys.modules[name]


LARGEST = torch.finfo(torch.float32).max


@pytest.mark.parametrize(
    ("history", "reduced", "options", "expected_history", "scale"),
    [
        ([[4], [2], [8]], 4, {}, [[0], [8], [4]], 448 / 8),
        ([[4], [2], [8]], 6, {}, [[0], [8], [6]], 448 / 8),  # 6: another rank's
        ([[4], [2], [8]], 4, {"algorithm": "most_recent"}, [[0], [8], [4]], 448 / 4),
        ([[4], [2], [8]], 4, {"margin": 1}, [[0], [8], [4]], 224 / 8),
        ([[4], [2], [8]], 4, {"largest": 57344}, [[0], [8], [4]], 57344 / 8),
        ([[4]], 4, {}, [[0]], 448 / 4),
        ([[0], [2], [8]], 0, {}, [[0], [2], [8]], 3),  # no tensor was quantized
        ([[0], [2], [8]], math.inf, {}, [[0], [8], [math.inf]], 3),
        ([[0], [0], [0]], 1e-40, {}, [[0], [0], [1e-40]], LARGEST),
    ],
)
def test_the_rules_of_an_update(
    engine: Any,
    history: list[Any],
    reduced: float,
    options: dict[str, Any],
    expected_history: list[Any],
    scale: float,
) -> None:
    rows, scales = torch.tensor(history, dtype=torch.float32), torch.tensor([3.0])
    arguments = {"algorithm": "max", "largest": 448, "margin": 0, **options}
    engine.pytorch.fp8.fused_amax_and_scale_update_after_reduction(
        torch.tensor([reduced], dtype=torch.float32), [rows], [scales], **arguments
    )
    assert rows.tolist() == torch.tensor(expected_history, dtype=torch.float32).tolist()
    assert scales.tolist() == torch.tensor([scale]).tolist()


def layer(engine: Any) -> Any:
    options = {"init_method": torch.nn.init.ones_, "bias": False, "params_dtype": torch.float32}
    return engine.pytorch.Linear(4, 3, **options)


def passes(engine: Any, module: Any, size: float, *, rows: int = 2) -> torch.Tensor:
    """Make a forward and a backward pass of values of this size, and return the result."""
    recipe = engine.common.recipe.DelayedScaling(amax_history_len=rows)
    with engine.pytorch.fp8_autocast(fp8_recipe=recipe):
        out = module(torch.full((2, 4), size))
    out.sum().backward()
    return out.detach()


def saved(module: Any) -> Any:
    state = pickle.loads(module.get_extra_state().numpy().tobytes())
    return {key: value.tolist() if isinstance(value, torch.Tensor) else value for key, value in state.items()}


def test_passes_change_the_state_of_a_module(engine: Any) -> None:
    """The first product is scaled by 1, the second by the largest elements of the first."""
    module = layer(engine)
    assert module.get_extra_state().numel() == 0
    passes(engine, module, 3.0)
    state = saved(module)
    assert state["scale_fwd"] == torch.tensor([448 / 3, 448, 1]).tolist()
    assert state["amax_history_fwd"] == [[0, 0, 0], [3, 1, 0]]
    assert state["scale_bwd"] == [57344, 1]
    assert state["amax_history_bwd"] == [[0, 0], [1, 0]]
    assert state["extra_fp8_variables"] == {
        "fp8_checkpoint": True,
        "num_gemms": 1,
        "fp8_max_fwd": 448,
        "fp8_max_bwd": 57344,
    }
    loaded = layer(engine)
    loaded.set_extra_state(module.get_extra_state())
    assert passes(engine, loaded, 2.1).tolist() == passes(engine, module, 2.1).tolist() != [[8.4] * 3] * 2
    assert saved(loaded) == saved(module)


def test_a_copy_is_put_back_and_saved(engine: Any) -> None:
    module, without = layer(engine), torch.nn.BatchNorm1d(3)
    model = torch.nn.Sequential(module, without)
    buffers = Buffers([model])
    passes(engine, module, 3.0)
    taken, before = buffers.take(), saved(module)
    own = module.get_extra_state().clone()
    passes(engine, module, 5.0)
    after = saved(module)
    assert after != before
    with buffers.saved_as(taken, torch.Tensor.cpu):
        assert saved(module) == before
        assert module.get_extra_state().numel() == own.numel()
    assert saved(module) == after
    buffers.put_back(taken)
    assert saved(module) == before
    buffers.put_back(taken[: -len(buffers.histories.take())])
    assert saved(module)["scale_fwd"] == [1, 1, 1], "no step was made"


def test_a_copy_without_delayed_scaling_is_empty(engine: Any) -> None:
    module = layer(engine)
    histories = amax_histories.AmaxHistories([module])
    with engine.pytorch.fp8_autocast(fp8_recipe=engine.common.recipe.Float8CurrentScaling()):
        module(torch.ones(2, 4))
    assert histories.take() == ()
    histories.put_back(())
    amax_histories.forget_order([module])


def test_the_order_of_reductions_begins_anew(engine: Any) -> None:
    """As in a new process; the abandoned step had kept tensors for recomputation."""
    modules = [layer(engine), layer(engine)]
    for module in reversed(modules):
        passes(engine, module, 3.0)
    taken = amax_histories.AmaxHistories(modules).take()
    manager = engine.pytorch.fp8.FP8GlobalStateManager
    recompute = SimpleNamespace(_is_first_fp8_module=[True])
    engine.pytorch.distributed.activation_recompute_forward = recompute
    manager.fp8_tensors_recompute_buffer.append([torch.ones(1)])
    modules[0].fp8_meta["global_fp8_buffer_pos_fwd_recompute"] = 0
    amax_histories.forget_order(modules)
    assert (recompute._is_first_fp8_module, manager.fp8_tensors_recompute_buffer) == ([], [])
    assert manager.global_amax_buffer == {}
    assert "global_fp8_buffer_pos_fwd_recompute" not in modules[0].fp8_meta
    amax_histories.AmaxHistories(modules).put_back(taken)
    (forward, _) = manager.global_amax_buffer.values()
    newest = [module.fp8_meta["scaling_fwd"].amax_history[0] for module in modules]
    assert [row.data_ptr() for row in forward] == [row.data_ptr() for row in reversed(newest)]
