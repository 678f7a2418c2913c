"""Clean-up of Megatron's state after an exception, before the training loop is called again."""

from __future__ import annotations

import enum
import os
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch

from adaptor.frameworks.megatron_settle import settle_core, settle_optimizer
from tests.faults import warm
from tests.frameworks import prepare


class Work:
    """Broken work of the abandoned step."""

    def __init__(self) -> None:
        self.waited = 0

    def wait(self) -> None:
        self.waited += 1
        raise RuntimeError("Connection closed by peer")


class Router(torch.nn.Module):
    """A router of experts in the middle of a step, as Megatron-core has it."""

    def __init__(self) -> None:
        super().__init__()
        for name in ("local_tokens_per_expert", "global_tokens_per_expert", "qb_beta_accum"):
            self.register_buffer(name, torch.ones(4), persistent=False)
        for name in ("ga_steps", "qb_beta_count"):
            self.register_buffer(name, torch.tensor(3), persistent=False)
        for name in ("expert_bias", "qb_beta"):
            self.register_buffer(name, torch.ones(4))


@pytest.mark.parametrize("several", [False, True], ids=["Megatron-LM", "MindSpeed"])
def test_broken_work_is_waited_for_and_forgotten(several: bool) -> None:
    """Megatron-LM has one handle for all buckets of a group, MindSpeed a list of handles."""
    works = [Work(), Work()] if several else [Work()]
    group = SimpleNamespace(
        grad_reduce_handle=None,
        param_gather_handle=works if several else works[0],
        param_gather_dispatched=True,
        reset=lambda: None,
    )
    chunk = SimpleNamespace(bucket_groups=[group], parameters=lambda: iter(()), modules=lambda: iter(()))
    settle_core([chunk])
    assert [work.waited for work in works] == [1] * len(works)
    assert group.param_gather_handle is None
    assert group.param_gather_dispatched is False


def test_the_sums_of_a_router_for_the_abandoned_step_are_cleared() -> None:
    """Saved buffers stay: the record of the step restores them."""
    router = Router()
    without = torch.nn.Linear(2, 2)
    without.register_buffer("ga_steps", None)  # of a loss that the job does not have
    settle_core([torch.nn.Sequential(torch.nn.ModuleList([router]), without)])
    kept = {name for name, buffer in router.named_buffers() if buffer.any()}
    assert kept == {"expert_bias", "qb_beta"}


class State(enum.Enum):
    """The state of a shared expert in Megatron-core 0.20."""

    IDLE = 0
    FC1_FORWARD_DONE = 1


def test_tensors_handed_between_parts_of_a_step_are_dropped() -> None:
    """With --moe-shared-expert-overlap and --defer-embedding-wgrad-compute."""
    expert, model = torch.nn.Module(), torch.nn.Module()
    expert.cached_fc2_input, expert.gate_score = torch.ones(2), torch.ones(2)
    expert.cached_output, expert._overlap_state = None, State.FC1_FORWARD_DONE
    put_off = model.embedding_activation_buffer = [torch.ones(2)]  # the output layer has the same list
    model.grad_output_buffer, model.expert = [torch.ones(2)], expert
    settle_core([model])
    assert (expert.cached_fc2_input, expert.gate_score, expert.cached_output) == (None, None, None)
    assert expert._overlap_state is State.IDLE
    assert put_off is model.embedding_activation_buffer
    assert (put_off, model.grad_output_buffer) == ([], [])


@pytest.mark.parametrize("path", ["moe_utils", "moe_feature.overlap.moe_common"])
def test_inputs_handed_to_shared_experts_are_forgotten(path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """With --moe-alltoall-overlap-comm the next forward pass would take the input of the abandoned step."""
    module: Any = ModuleType(f"mindspeed.core.transformer.moe.{path}")
    handed_over = module.AG_SHARED_EXPERTS_INPUTS = [(torch.ones(2), Work())]
    monkeypatch.setitem(sys.modules, module.__name__, module)
    settle_core([])
    assert handed_over == []


@pytest.mark.parametrize(
    ("name", "path"),
    [
        ("megatron.core.parallel_state", "_MOE_LAYER_WISE_LOGGING_TRACKER"),
        ("megatron.core.transformer.moe.moe_utils", "_MOE_LAYER_WISE_LOGGING_TRACKER"),
        ("megatron.core.transformer.moe.moe_logging", "_MOE_METRICS_TRACKER._metrics"),
        ("megatron.core.transformer.multi_token_prediction", "MTPLossLoggingHelper.tracker"),
    ],
    ids=["0.12", "0.13 to 0.16", "0.20", "further tokens"],
)
def test_sums_for_the_log_are_dropped(name: str, path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The groups of the sums are dropped too: a new process knows no such group and would not join the
    reduction.
    """
    added_up = {"values": torch.ones(2), "reduce_group": object()}
    module: Any = ModuleType(name)
    *holders, last = path.split(".")
    place = module
    for holder in holders:
        setattr(place, holder, SimpleNamespace())
        place = getattr(place, holder)
    setattr(place, last, added_up)
    monkeypatch.setitem(sys.modules, name, module)
    settle_core([])
    assert added_up == {}


def test_a_tracker_that_does_not_exist_yet(monkeypatch: pytest.MonkeyPatch) -> None:
    """Since 0.20 the tracker is made by the first reported loss."""
    module: Any = ModuleType("megatron.core.transformer.moe.moe_logging")
    module._MOE_METRICS_TRACKER = None
    monkeypatch.setitem(sys.modules, module.__name__, module)
    settle_core([])


def test_the_next_batch_is_the_first_one() -> None:
    """Since Megatron-core 0.16 a new process reduces its first gradients in another order than later ones."""
    group = SimpleNamespace(
        grad_reduce_handle=None,
        param_gather_handle=None,
        per_param_grad_ready_counts={"weight": 1},
        golden_per_param_grad_ready_counts={"weight": 2},
        is_first_batch=False,
        reset=lambda: None,
    )
    settle_core(
        [SimpleNamespace(bucket_groups=[group], parameters=lambda: iter(()), modules=lambda: iter(()))]
    )
    assert group.is_first_batch
    assert group.golden_per_param_grad_ready_counts == group.per_param_grad_ready_counts == {}


def test_a_fact_gathered_from_all_ranks_once_is_gathered_again() -> None:
    """In its first step Megatron-LM 0.20 gathers from all ranks whether any has parameters of another norm. A
    new process would gather alone.
    """
    learned: dict[str, Any] = {"_has_grad_norm_group_cache": {"separate": False}}
    optimizer, older = SimpleNamespace(**learned), SimpleNamespace()
    chain = SimpleNamespace(chained_optimizers=[optimizer, older], **learned)
    settle_optimizer(chain)
    assert optimizer._has_grad_norm_group_cache is None
    assert chain._has_grad_norm_group_cache is None
    assert not hasattr(older, "_has_grad_norm_group_cache")
    settle_optimizer(optimizer)
    settle_optimizer(older)


ABANDON_ASYNC_SAVES = """
import multiprocessing, os, select, signal, sys, time, types
import torch.distributed as dist
from megatron.core.dist_checkpointing.strategies import async_utils, filesystem_async
from adaptor.frameworks import megatron_settle

FORK = multiprocessing.get_context("fork")

def write(pids):
    child = FORK.Process(target=signal.pause)
    child.start()
    pids.send(child.pid)
    signal.pause()

dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
for is_persistent in (False, True):
    queue = async_utils.AsyncCallsQueue(persistent=is_persistent)
    caller = queue._get_async_caller()
    receiver, sender = FORK.Pipe(duplex=False)
    caller.process = writer = FORK.Process(target=write, args=(sender,))
    writer.start()
    caller.start_time = time.time()
    ends = [os.pidfd_open(pid) for pid in (writer.pid, receiver.recv())]
    request = async_utils.AsyncRequest(None, (), [])
    queue.call_idx = 4
    queue.async_calls.append(async_utils._ActiveAsyncRequest(4, caller, request))
    sys.modules["megatron.training.async_utils"] = types.SimpleNamespace(_async_calls_queue=queue)
    results = (getattr(filesystem_async, "_get_write_results_queue", None)
               or filesystem_async.get_write_results_queue)
    results().put("of the abandoned save")
    context = {"save_strategy": object(), "load_strategy": object(), "local_checkpoint_manager": 1}
    megatron_settle.abandon_async_saves(context)
    writer.join()
    for end in ends:  # the test has a limit of time
        select.select([end], [], [])
    assert results().empty()
    assert context == {"local_checkpoint_manager": 1}
    assert queue.get_num_unfinalized_calls() == 0
    assert queue._get_async_caller() is not caller
    assert queue.schedule_async_request(request) == 0
    megatron_settle.abandon_async_saves(None)
"""


@pytest.mark.parametrize("find", [prepare.megatron_lm, prepare.megatron_core])
def test_asynchronous_saves_are_abandoned(find: Callable[[], Path]) -> None:
    """The framework's own queue, with a writer that has forked another process."""
    try:
        framework = find()
    except prepare.NotPreparedError as error:
        pytest.skip(str(error))
    repository = Path(__file__).resolve().parents[2]
    path = f"{framework}{os.pathsep}{repository}"
    warm.run([sys.executable, "-c", ABANDON_ASYNC_SAVES], env={**os.environ, "PYTHONPATH": path}, code=0)
