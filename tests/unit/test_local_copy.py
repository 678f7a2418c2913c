"""The local copy holds the state before an update bitwise; a dump of the copy equals a dump of that time."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from adaptor.checkpoint import state_writer
from adaptor.checkpoint.local_copy import LocalCopy
from adaptor.checkpoint.shards import Exchange
from adaptor.checkpoint.step_record import StepRecord
from adaptor.checkpoint.training_state import TrainingState
from adaptor.devices.cpu.apex import FusedAdam

KINDS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "adam": lambda groups: torch.optim.Adam(groups, lr=1e-2, weight_decay=0.1),
    "adamw": lambda groups: torch.optim.AdamW(groups, lr=1e-2, betas=(0.8, 0.95)),
    "fused": lambda groups: FusedAdam(groups, lr=1e-2, weight_decay=0.1),
}


class Whole:
    """An unsharded optimizer: of float32 params, or of float32 copies of `halves`."""

    is_stub_optimizer = False

    def __init__(self, kind: str, params: list[torch.Tensor], halves: list[torch.Tensor]) -> None:
        groups = [{"params": params[:1], "weight_decay": 0.0}, {"params": params[1:]}]
        self.optimizer = KINDS[kind](groups)
        if halves:
            self.float16_groups = [halves]
            self.fp32_from_float16_groups = [params]

    def get_parameters(self) -> list[torch.Tensor]:
        return [param for group in self.optimizer.param_groups for param in group["params"]]

    def state_dict(self) -> dict[str, Any]:
        body: dict[str, Any] = {"optimizer": self.optimizer.state_dict()}
        if hasattr(self, "fp32_from_float16_groups"):
            body["fp32_from_fp16_params"] = self.fp32_from_float16_groups
        return body

    def update(self) -> None:
        for param in self.get_parameters():
            param.grad = torch.randn_like(param)
        self.optimizer.step()


class Chain:
    is_stub_optimizer = False

    def __init__(self, *optimizers: Whole) -> None:
        self.chained_optimizers = list(optimizers)


class Model(torch.nn.Module):
    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self.a = torch.nn.Parameter(torch.randn(3, 5).to(dtype))
        self.b = torch.nn.Parameter(torch.randn(7).to(dtype))

    def state_dict_for_save_checkpoint(self) -> dict[str, Any]:
        return self.state_dict()


def rank(kind: str, dtype: torch.dtype) -> TrainingState:
    model = Model(dtype)
    params = list(model.parameters())
    mains = params if dtype is torch.float32 else [param.detach().clone().float() for param in params]
    halves = [] if dtype is torch.float32 else params
    return TrainingState([model], Chain(Whole(kind, mains, halves)), None, "mp_rank_00")


def same(first: Any, right: Any) -> bool:
    if isinstance(first, torch.Tensor):
        return bool(first.dtype == right.dtype and torch.equal(first, right))
    if isinstance(first, dict):
        return list(first) == list(right) and all(same(first[key], right[key]) for key in first)
    if isinstance(first, list | tuple):
        return len(first) == len(right) and all(map(same, first, right))
    return bool(first == right)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kind", KINDS)
def test_the_copy_is_the_state_before_the_update(kind: str, dtype: torch.dtype) -> None:
    torch.manual_seed(1)
    (live,) = rank(kind, dtype).optimizer.chained_optimizers
    kept = LocalCopy(Chain(live), (None,))
    (past,) = kept.optimizer.chained_optimizers
    places: list[set[int]] = []
    for number in range(5):
        live.optimizer.param_groups[1]["lr"] = 1e-2 / (number + 1)
        state_before = copy.deepcopy((live.state_dict(), live.get_parameters()))
        kept.take()
        live.update()
        assert same((past.state_dict(), past.get_parameters()), state_before)
        assert not same(past.get_parameters(), live.get_parameters())
        tensors = [*past.get_parameters(), *(s["exp_avg"] for s in past.optimizer.state.values())]
        places.append({tensor.data_ptr() for tensor in tensors})
    assert places[1] == places[-1], "it is allocated once"
    assert len(places[1]) == 4
    assert kept.nbytes == 12 * (15 + 7)


def test_attributes_of_a_param_are_saved_with_it() -> None:
    (live,) = rank("adam", torch.bfloat16).optimizer.chained_optimizers
    live.fp32_from_float16_groups[0][0].tensor_model_parallel = True
    (past,) = LocalCopy(Chain(live), (None,)).optimizer.chained_optimizers
    assert past.fp32_from_float16_groups[0][0].tensor_model_parallel is True


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_dump_of_the_copy_equals_the_earlier_dump(dtype: torch.dtype, tmp_path: Path) -> None:
    """The model has its new weights by then."""
    torch.manual_seed(1)
    state = rank("fused", dtype)
    (live,) = state.optimizer.chained_optimizers
    kept = LocalCopy(state.optimizer, (None,))
    record = StepRecord(3, {}, None, (({}, {}),), (None,), ())
    for _ in range(3):
        kept.take()
        live.update()
    state_writer.write_files(state, record, Exchange(None, 0, [[0]]), tmp_path, 1)
    kept.take()
    live.update()
    for param, main in zip(state.model[0].parameters(), live.get_parameters(), strict=True):
        param.data.copy_(main.data)
    past = TrainingState(state.model, kept.optimizer, None, "mp_rank_00", live=state.optimizer)
    state_writer.write_files(past, record, Exchange(None, 0, [[0]]), tmp_path, 2)
    dumped_live, dumped_copy = (
        torch.load(tmp_path / f"mp_rank_00/model_optim_rng.pt.{attempt}", weights_only=False)
        for attempt in (1, 2)
    )
    assert same(dumped_copy, dumped_live)
    assert not torch.equal(dumped_copy["model"]["a"], state.model[0].a)


def test_a_bare_optimizer_and_one_without_params() -> None:
    class Stub:
        is_stub_optimizer = True
        optimizer = None

    (live,) = rank("adam", torch.float32).optimizer.chained_optimizers
    bare = LocalCopy(live, (None,))
    assert same(bare.optimizer.get_parameters(), live.get_parameters())
    chained = LocalCopy(Chain(live, Stub()), (None, None))  # type: ignore[arg-type]
    assert [type(chained_optimizer) for chained_optimizer in chained.optimizer.chained_optimizers] == [
        Whole,
        Stub,
    ]
    chained.take()


def test_a_shard_that_is_padding_alone() -> None:
    kept = LocalCopy(Whole("adam", [], []), (None,))
    kept.take()
    assert kept.nbytes == 0
