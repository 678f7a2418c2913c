"""The training loop."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from megatron.bridge.training.checkpointing import save_checkpoint
from megatron.bridge.training.eval import evaluate_and_print_results
from megatron.bridge.training.state import GlobalState
from megatron.bridge.training.utils.flop_utils import num_floating_point_operations
from megatron.core.distributed import finalize_model_grads
from megatron.core.num_microbatches_calculator import get_num_microbatches
from megatron.core.rerun_state_machine import get_rerun_state_machine


def train(
    forward_step_func: Callable[..., Any],
    model: list[Any],
    optimizer: Any,
    scheduler: Any,
    train_data_iterator: Any,
    valid_data_iterator: Any,
    global_state: GlobalState,
    log: Callable[..., None],
) -> None:
    cfg, train_state, timers = global_state.cfg, global_state.train_state, global_state.timers
    timers("interval-time", log_level=0).start(barrier=True)  # it must not run already
    config = model[0].config
    overlaps = cfg.ddp.overlap_param_gather
    if overlaps:
        model[0].disable_forward_pre_hook(param_sync=False)  # they must be enabled
        param_sync_func, config.param_sync_func = config.param_sync_func, None
    first = train_state.step
    while train_state.step < cfg.train.train_iters:
        losses, grad_norm, skipped = train_step(
            forward_step_func, train_data_iterator, model, optimizer, scheduler, global_state
        )
        if overlaps and train_state.step == first:
            model[0].enable_forward_pre_hook()
            config.param_sync_func = param_sync_func
        train_state.step += 1
        batch = cfg.data_parallel_size * cfg.train.micro_batch_size * get_num_microbatches()
        train_state.consumed_train_samples += batch
        train_state.floating_point_operations_so_far += num_floating_point_operations(cfg, batch)
        log(train_state.step, losses, grad_norm, skipped=skipped)
        if train_state.do_valid and train_state.step % cfg.train.eval_interval == 0:
            evaluate_and_print_results(global_state)
        if train_state.step % cfg.checkpoint.save_interval == 0:
            save_checkpoint(global_state, model, optimizer, scheduler)
    if overlaps:
        model[0].disable_forward_pre_hook()
    timers("interval-time").stop()


def train_step(
    forward_step_func: Callable[..., Any],
    data_iterator: Any,
    model: list[Any],
    optimizer: Any,
    scheduler: Any,
    global_state: GlobalState,
) -> tuple[dict[str, torch.Tensor], Any, bool]:
    machine = get_rerun_state_machine()
    while machine.should_run_forward_backward(data_iterator):
        model[0].zero_grad_buffer()
        optimizer.zero_grad()
        loss = forward_step_func(data_iterator, model[0])
        optimizer.scale_loss(loss).backward()
        finalize_model_grads(model)
    updated, grad_norm, _ = optimizer.step()
    if updated:
        scheduler.step(increment=get_num_microbatches() * global_state.cfg.data_parallel_size)
    mean = loss.detach() / torch.distributed.get_world_size()
    torch.distributed.all_reduce(mean)
    return {"lm loss": mean}, grad_norm, not updated
