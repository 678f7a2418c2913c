"""A training loop like that of MindSpeed-LLM 2.3 to 26.1, in place of Megatron-LM's own.

Unlike Megatron-LM's loop, each call counts floating-point operations from 0, with functions of its own for
the count and the log; saves omit the data, and change the mode of the saved folder.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from megatron.core import mpu
from megatron.core.distributed import finalize_model_grads
from megatron.core.num_microbatches_calculator import get_num_microbatches, update_num_microbatches
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.training import get_args, get_timers
from megatron.training import training as of_megatron
from megatron.training.training import (
    calc_params_l2_norm,
    disable_forward_pre_hook,
    enable_forward_pre_hook,
    evaluate_and_print_results,
    save_checkpoint_and_time,
    should_disable_forward_pre_hook,
    train_step,
)

from mindspeed_llm.training import utils

__all__ = ["calc_params_l2_norm", "disable_forward_pre_hook", "enable_forward_pre_hook", "train"]
__all__ += ["should_disable_forward_pre_hook"]


def num_floating_point_operations(args: Any, batch_size: int) -> float:
    """Return Megatron-LM's count, for which the data of each step were noted once."""
    assert len(utils.ratios) == get_num_microbatches(), utils.ratios
    utils.ratios.clear()
    return float(of_megatron.num_floating_point_operations(args, batch_size))


def training_log(
    loss_dict: Any,
    total_loss_dict: Any,
    learning_rate: Any,
    decoupled_learning_rate: Any,
    iteration: int,
    loss_scale: Any,
    report_memory_flag: bool,
    skipped_iter: int,
    grad_norm: Any,
    params_norm: Any,
    num_zeros_in_grad: Any,
) -> bool:
    write = getattr(of_megatron.training_log, "__wrapped__", of_megatron.training_log)
    if not get_args().log_num_zeros_in_grad:  # MindSpeed says 0, of which Megatron-LM would say nothing
        assert num_zeros_in_grad == 0
        num_zeros_in_grad = None
    first_arguments = (
        loss_dict,
        total_loss_dict,
        learning_rate,
        decoupled_learning_rate,
        iteration,
        loss_scale,
    )
    further_arguments = (report_memory_flag, skipped_iter, grad_norm, params_norm, num_zeros_in_grad)
    return bool(write(*first_arguments, *further_arguments))


def update_save_checkpoint_chmod(save_path: str, permission: int = 0o640) -> None:
    for root, _, files in os.walk(save_path):
        for file in files:
            (Path(root) / file).chmod(permission)


def train(
    forward_step_func: Any,
    model: Any,
    optimizer: Any,
    opt_param_scheduler: Any,
    train_data_iterator: Any,
    valid_data_iterator: Any,
    process_non_loss_data_func: Any,
    config: Any,
    *_: Any,
) -> tuple[int, float]:
    args, timers = get_args(), get_timers()
    for chunk in model:
        chunk.train()
    totals: dict[str, Any] = {}
    iteration, operations, memory = args.iteration, 0.0, True
    config.grad_scale_func, config.timers = optimizer.scale_loss, timers
    config.finalize_model_grads_func = finalize_model_grads
    timers("interval-time", log_level=0).start(barrier=True)

    def noted(*arguments: Any) -> Any:
        utils.ratios.append(0.5)
        return forward_step_func(*arguments)

    while iteration < args.train_iters:
        update_num_microbatches(args.consumed_train_samples, consistency_check=True)
        args.curr_iteration = iteration
        losses, skipped, *_further, norm, zeros = train_step(
            noted,
            train_data_iterator,
            model,
            optimizer,
            opt_param_scheduler,
            config,
            get_forward_backward_func(),
        )
        iteration += 1
        batch_size = mpu.get_data_parallel_world_size() * args.micro_batch_size * get_num_microbatches()
        args.consumed_train_samples += batch_size
        operations += num_floating_point_operations(args, batch_size)
        rate = next(group["lr"] for group in optimizer.param_groups)
        scale = optimizer.get_loss_scale().item()
        memory = training_log(
            losses, totals, rate, None, iteration, scale, memory, skipped, norm, None, zeros or 0
        )
        if args.eval_interval and iteration % args.eval_interval == 0 and args.do_valid:
            timers("interval-time").stop()
            evaluate_and_print_results(
                f"iteration {iteration}",
                forward_step_func,
                valid_data_iterator,
                model,
                iteration,
                process_non_loss_data_func,
                config,
                verbose=False,
            )
            timers("interval-time", log_level=0).start(barrier=True)
        if args.save and args.save_interval and iteration % args.save_interval == 0:
            state = (model, optimizer, opt_param_scheduler)
            save_checkpoint_and_time(iteration, *state, operations, checkpointing_context=None)
            update_save_checkpoint_chmod(args.save)
    return iteration, operations
