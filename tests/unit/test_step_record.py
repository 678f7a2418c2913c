from __future__ import annotations

import copy
import os
import sys
import textwrap
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from adaptor.checkpoint import step_record
from adaptor.checkpoint.step_record import StepRecord
from adaptor.checkpoint.training_state import Buffers
from adaptor.errors import CheckpointError
from tests.faults import warm
from tests.frameworks import prepare

# Runs the framework's own scheduler beside the derived records, in a process of its own.
AGAINST_THE_FRAMEWORK = """
import itertools, types
from adaptor.checkpoint import step_record
from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler

def optimizer():
    groups = [
        {"params": [], "wd_mult": 1.0, "lr_mult": 1.0, "max_lr": 3e-4, "min_lr": 1e-5, "step": 7},
        {"params": [], "wd_mult": 0.0, "lr_mult": 2.0, "max_lr": 1e-4, "min_lr": 0.0},
        {"params": [], "wd_mult": 1.0, "lr_mult": 1.0},
    ]
    inner = [types.SimpleNamespace(param_groups=groups[:2]), types.SimpleNamespace(param_groups=groups[2:])]
    return types.SimpleNamespace(chained_optimizers=inner, param_groups=groups)

checked = 0
styles = ["constant", "linear", "cosine", "inverse-square-root", "WSD"]
for lr_style, wd_style, warmup in itertools.product(styles, ["constant", "linear", "cosine"], [0, 40]):
    live = optimizer()
    scheduler = OptimizerParamScheduler(
        live, init_lr=0.0, max_lr=3e-4, min_lr=1e-5, lr_warmup_steps=warmup, lr_decay_steps=170,
        lr_decay_style=lr_style, start_wd=0.1 if wd_style == "constant" else 0.01, end_wd=0.1,
        wd_incr_steps=150, wd_incr_style=wd_style, wsd_decay_steps=60, lr_wsd_decay_style="minus_sqrt",
    )
    record = step_record.StepRecord(
        0, {}, scheduler.state_dict(), step_record.take_groups(live), (None, None), []
    )
    for number in range(30):
        skipped = number % 5 == 3
        # The main thread is somewhere else already: the record must not care.
        scheduler.num_steps += 1000
        derived = step_record.advance(
            record, updated=not skipped, scheduler=scheduler, increment=8, growth={}, scalers=(), rng=[],
            buffers=(),
        )
        scheduler.num_steps -= 1000
        if not skipped:
            scheduler.step(increment=8)
        assert derived.scheduler == scheduler.state_dict(), (lr_style, wd_style, number)
        assert derived.groups == step_record.take_groups(live), (lr_style, wd_style, number)
        assert derived.step == number + 1
        record = derived
        checked += 1
print("checked", checked)
"""


@pytest.mark.parametrize("find", [prepare.megatron_lm, prepare.megatron_core])
def test_a_derived_schedule_is_the_framework_s_own(find: Callable[[], Path]) -> None:
    try:
        framework = find()
    except prepare.NotPreparedError as error:
        pytest.skip(str(error))
    repository = Path(__file__).resolve().parents[2]
    completed = warm.run(
        [sys.executable, "-c", textwrap.dedent(AGAINST_THE_FRAMEWORK)],
        env={**os.environ, "PYTHONPATH": f"{framework}{os.pathsep}{repository}"},
        code=0,
    )
    assert completed.stdout.strip() == "checked 900"


class _Scheduler:
    """As Megatron's, reduced to what moves."""

    def __init__(self, optimizer: Any) -> None:
        self.optimizer = optimizer
        self.num_steps = 0

    def step(self, increment: int) -> None:
        self.num_steps += increment
        for group in self.optimizer.param_groups:
            group["lr"] = group["max_lr"] / (1 + self.num_steps)

    def state_dict(self) -> dict[str, Any]:
        return {"num_steps": self.num_steps}


class _Scaler:
    def __init__(self) -> None:
        self.scale = torch.tensor([4096.0])

    def state_dict(self) -> dict[str, Any]:
        return {"scale": self.scale, "growth_tracker": 3}


def _optimizer() -> Any:
    groups = [{"params": [torch.zeros(1)], "max_lr": 1.0, "lr": 1.0, "step": 4}]
    return types.SimpleNamespace(param_groups=groups, grad_scaler=_Scaler(), optimizer=object())


def _record(optimizer: Any, scheduler: Any) -> StepRecord:
    counters = {"consumed_train_samples": 32, "skipped_train_samples": 0, "flops": 1.5}
    return step_record.take(4, counters, optimizer, scheduler, [], (torch.ones(1),))


def _advance(record: StepRecord, scheduler: Any, *, updated: bool = True, growth: Any = None) -> StepRecord:
    return step_record.advance(
        record,
        updated=updated,
        scheduler=scheduler,
        increment=8,
        growth=growth or {},
        scalers=(None,),
        rng=[{"torch_rng_state": torch.zeros(1)}],
        buffers=(torch.zeros(1),),
    )


def test_a_record_does_not_follow_the_main_thread() -> None:
    optimizer = _optimizer()
    scheduler = _Scheduler(optimizer)
    record = _record(optimizer, scheduler)
    record_before = copy.deepcopy(record)
    scheduler.step(8)
    optimizer.grad_scaler.scale.fill_(1.0)
    assert (record.groups, record.scheduler) == (record_before.groups, record_before.scheduler)
    assert record.scalers[0] is not None
    assert record.scalers[0]["scale"].item() == 4096.0


def test_update_counts_are_read_with_the_tensors_not_from_the_record() -> None:
    optimizer = _optimizer()
    ((group,),) = step_record.take_groups(optimizer)
    assert dict(group) == {"max_lr": 1.0, "lr": 1.0}


def test_counters_grow_and_the_schedule_moves() -> None:
    optimizer = _optimizer()
    scheduler = _Scheduler(optimizer)
    record = _record(optimizer, scheduler)
    derived = _advance(record, scheduler, growth={"consumed_train_samples": 8, "flops": 0.25})
    assert derived.step == 5
    assert derived.counters == {"consumed_train_samples": 40, "skipped_train_samples": 0, "flops": 1.75}
    assert derived.scheduler == {"num_steps": 8}
    assert derived.groups[0][0]["lr"] == 1 / 9
    assert [states["torch_rng_state"].item() for states in derived.rng] == [0.0], "those of the door"
    assert [buffer.item() for buffer in derived.buffers if buffer is not None] == [0.0]
    assert (scheduler.num_steps, optimizer.param_groups[0]["lr"]) == (0, 1.0), "the live ones are not moved"
    assert record.groups[0][0]["lr"] == 1.0


class _CountsTokens(_Scheduler):
    """A scheduler like ModelLink's, which counts tokens and warms up by their number."""

    def __init__(self, optimizer: Any) -> None:
        super().__init__(optimizer)
        self.num_tokens = 0
        self.warmup_tokens: int | None = None

    def step(self, increment: int, token_num: int = 0) -> None:
        self.num_steps += increment
        self.num_tokens = token_num
        self.warmup_tokens = self.warmup_tokens or token_num

    def state_dict(self) -> dict[str, Any]:
        return {name: value for name, value in vars(self).items() if name != "optimizer"}


def test_a_schedule_moves_from_where_it_was_not_from_where_it_is() -> None:
    optimizer = _optimizer()
    scheduler = _CountsTokens(optimizer)
    record = _record(optimizer, scheduler)
    scheduler.step(8, token_num=500)  # the main thread has gone on
    derived = step_record.advance(
        record, updated=True, scheduler=scheduler, increment=8, growth={}, scalers=(), rng=[], buffers=(),
        also={"token_num": 100},
    )  # fmt: skip
    assert derived.scheduler == {"num_steps": 8, "num_tokens": 100, "warmup_tokens": 100}


def test_a_skipped_step_moves_the_counters_alone() -> None:
    optimizer = _optimizer()
    scheduler = _Scheduler(optimizer)
    record = _record(optimizer, scheduler)
    derived = _advance(record, scheduler, updated=False, growth={"consumed_train_samples": 8})
    assert (derived.step, derived.counters["consumed_train_samples"]) == (5, 40)
    assert (derived.scheduler, derived.groups) == (record.scheduler, record.groups)


def test_a_job_without_a_scheduler_keeps_its_scalars() -> None:
    optimizer = _optimizer()
    record = _record(optimizer, None)
    assert record.scheduler is None
    assert _advance(record, None).groups == record.groups


def test_a_scheduler_of_another_kind_is_one_line() -> None:
    optimizer = _optimizer()
    scheduler = torch.optim.lr_scheduler.ConstantLR(torch.optim.SGD([torch.zeros(1)], lr=1.0))
    record = _record(optimizer, scheduler)
    with pytest.raises(CheckpointError, match="ConstantLR: its state has no num_steps"):
        _advance(record, scheduler)


def test_an_optimizer_without_a_chain_is_a_chain_of_one() -> None:
    bare = _optimizer()
    assert step_record.chain(bare) == [bare]
    assert step_record.chain(types.SimpleNamespace(chained_optimizers=[1, 2])) == [1, 2]


def test_a_stage_that_is_not_trained_has_no_inner_optimizer() -> None:
    """A wait for the optimizer in the update window would never end, and all other ranks would wait at the
    door.
    """
    stub = types.SimpleNamespace(optimizer=None)
    adam = types.SimpleNamespace(optimizer=object())
    assert step_record.inner(stub) == []
    assert step_record.inner(types.SimpleNamespace(chained_optimizers=[stub])) == []
    assert step_record.inner(types.SimpleNamespace(chained_optimizers=[stub, adam])) == [adam.optimizer]


class _Router(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("bias", torch.zeros(3))
        self.register_buffer("counted", torch.zeros(3), persistent=False)
        self.register_buffer("absent", None)
        self.weight = torch.nn.Parameter(torch.ones(2))


def test_a_taken_buffer_is_found_by_the_present_address_of_the_live_buffer() -> None:
    model = torch.nn.Sequential(_Router(), _Router())
    buffers = Buffers([model, _Router()])
    taken = buffers.take()
    first, second = model[0], model[1]
    assert isinstance(first, _Router)
    assert isinstance(second, _Router)
    first.bias.add_(1.0)
    second.bias = torch.full((3,), 2.0)  # other memory
    copies = buffers.copies(taken)
    assert len(copies) == 3
    assert all(torch.equal(copies[router.bias.data_ptr()], torch.zeros(3)) for router in (first, second))
    assert copies.keys().isdisjoint({first.counted.data_ptr(), first.weight.data_ptr()})


def test_a_model_without_buffers_has_nothing_to_take() -> None:
    buffers = Buffers([torch.nn.Linear(2, 2)])
    assert buffers.take() == ()
    assert buffers.copies(()) == {}
