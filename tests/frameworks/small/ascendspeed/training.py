"""The training loop."""

from __future__ import annotations

import itertools
import random
import sys
from collections.abc import Iterator
from typing import Any

import numpy
import torch
import torch.distributed as dist

from ascendspeed import arguments, get_args, get_num_microbatches, get_timers, update_num_microbatches
from ascendspeed.checkpointing import load_checkpoint, save_checkpoint
from ascendspeed.core import parallel_state
from ascendspeed.core.pipeline_parallel.schedules import get_forward_backward_func, get_forward_func
from ascendspeed.error_utils import check_equal
from ascendspeed.model import DistributedDataParallel
from ascendspeed.model.transformer import Model
from ascendspeed.optimizer import get_megatron_optimizer

# With a bias for each of its outputs the model has 169 params, which no group of 2 to 4 ranks divides.
WIDTH = 12


class AnnealingLR:
    """The learning rate falls with the tokens, which are counted when a step is over."""

    def __init__(self, optimizer: Any) -> None:
        self.optimizer = optimizer
        self.num_steps = self.num_tokens = 0
        self.step(0)

    def step(self, increment: int, token_num: int | None = None) -> None:
        self.num_tokens = get_args().consumed_train_tokens if token_num is None else token_num
        self.num_steps += increment
        for group in self.optimizer.param_groups:
            group["lr"] = 0.01 / (1 + self.num_tokens / 100)

    def state_dict(self) -> dict[str, int]:
        return {"num_steps": self.num_steps, "num_tokens": self.num_tokens}

    def load_state_dict(self, saved: dict[str, int]) -> None:
        self.num_steps = saved["num_steps"]
        self.step(0, saved["num_tokens"])


def train_step(
    forward_step_func: Any, data_iterator: Any, model: Any, optimizer: Any, lr_scheduler: Any, config: Any
) -> tuple[dict[str, torch.Tensor], int, float, float]:
    args, timers = get_args(), get_timers()
    for buffer in model[0]._grad_buffers.values():
        buffer.data.zero_()
    timers("forward-backward", log_level=1).start()
    losses = get_forward_backward_func()(
        forward_step_func=forward_step_func, data_iterator=data_iterator, model=model
    )
    timers("forward-backward").stop()
    optimizer.reduce_model_grads(args, timers)
    updated, norm, zeros = optimizer.step(args, timers)
    if updated:
        optimizer.gather_model_params(args, timers)
    lr_scheduler.step(get_num_microbatches() * args.micro_batch_size * args.data_parallel_size)
    return (
        {key: sum(micro_batch[key] for micro_batch in losses) / len(losses) for key in losses[0]},
        0,
        norm,
        zeros,
    )


def training_log(
    loss_dict: dict[str, torch.Tensor],
    total_loss_dict: dict[str, Any],
    learning_rate: float,
    iteration: int,
    loss_scale: float,
    report_memory_flag: bool,
    skipped_iter: int,
    grad_norm: float,
    params_norm: float | None,
    num_zeros_in_grad: float,
    model: Any = None,
    optimizer: Any = None,
) -> bool:
    args = get_args()
    assert model is not None
    for key, count in (("advanced iterations", 1), ("skipped iterations", 0), ("nan iterations", 0)):
        total_loss_dict[key] = total_loss_dict.get(key, 0) + count
    for key, loss in loss_dict.items():
        total_loss_dict[key] = total_loss_dict.get(key, torch.zeros(1)) + loss
    if iteration % args.log_interval:
        return report_memory_flag
    steps = total_loss_dict["advanced iterations"]
    elapsed = get_timers()("interval-time").elapsed(barrier=True) / steps
    line = f" iteration {iteration:8d}/{args.train_iters:8d} |"
    line += f" consumed samples: {args.consumed_train_samples:12d} |"
    line += f" consumed tokens: {args.consumed_train_tokens:12d} |"
    line += f" elapsed time per iteration (ms): {elapsed * 1000:.1f} | learning rate: {learning_rate:.3E} |"
    for key in loss_dict:
        line += f" {key}: {total_loss_dict[key].item() / steps:.6E} |"
        total_loss_dict[key] = torch.zeros(1)
    line += f" loss scale: {loss_scale:.1f} | grad norm: {grad_norm:.3f} |"
    line += f" num zeros: {num_zeros_in_grad:.1f} | number of nan iterations: {0:3d} |"
    for key in ("advanced iterations", "skipped iterations", "nan iterations"):
        total_loss_dict[key] = 0
    if dist.get_rank() == dist.get_world_size() - 1:
        print(line, flush=True)
    return False


def save_checkpoint_and_time(iteration: int, model: Any, optimizer: Any, lr_scheduler: Any) -> None:
    timer = get_timers()("save-checkpoint", log_level=0)
    timer.start(barrier=True)
    save_checkpoint(iteration, model, optimizer, lr_scheduler)
    timer.stop(barrier=True)


def print_datetime(string: str) -> None:
    dist.barrier()
    if dist.get_rank() == 0:
        print(string, flush=True)


def train(
    forward_step_func: Any,
    model: Any,
    optimizer: Any,
    lr_scheduler: Any,
    train_data_iterator: Any,
    valid_data_iterator: Any,
    config: Any,
) -> int:
    args = get_args()
    model[0].train()
    total_loss_dict: dict[str, Any] = {}
    iteration = args.iteration
    get_timers()("interval-time", log_level=0).start(barrier=True)
    print_datetime("before the start of training step")
    flag = True
    while iteration < args.train_iters:
        update_num_microbatches(args.consumed_train_samples)
        losses, skipped, norm, zeros = train_step(
            forward_step_func, train_data_iterator, model, optimizer, lr_scheduler, config
        )
        iteration += 1
        args.iteration = iteration
        args.consumed_train_samples += args.global_batch_size
        args.actual_seq_length = args.seq_length
        args.consumed_train_tokens += args.global_batch_size * args.actual_seq_length
        figures = optimizer.param_groups[0]["lr"], iteration, optimizer.get_loss_scale().item()
        flag = training_log(
            losses, total_loss_dict, *figures, flag, skipped, norm, None, zeros, model, optimizer
        )
        if args.eval_interval and iteration % args.eval_interval == 0 and args.do_valid:
            for iterator in valid_data_iterator:
                evaluate_and_print_results(
                    f"iteration {iteration}", forward_step_func, iterator, model, iteration, False
                )
        saved = bool(args.save and args.save_interval and iteration % args.save_interval == 0)
        if saved:
            save_checkpoint_and_time(iteration, model, optimizer, lr_scheduler)
        if args.exit_interval and iteration % args.exit_interval == 0:
            if not saved:
                save_checkpoint_and_time(iteration, model, optimizer, lr_scheduler)
            print_datetime(f"exiting program at iteration {iteration}")
            sys.exit()
    return int(iteration)


def evaluate(forward_step_func: Any, data_iterator: Any, model: Any, verbose: bool = False) -> float:
    args = get_args()
    model[0].eval()
    total = 0.0
    with torch.no_grad():
        for _ in range(args.eval_iters):
            losses = get_forward_func()(
                forward_step_func=forward_step_func, data_iterator=data_iterator, model=model
            )
            total += sum(float(micro_batch["loss"]) for micro_batch in losses) / len(losses)
            args.consumed_valid_samples += args.global_batch_size
    model[0].train()
    return total / args.eval_iters


def evaluate_and_print_results(
    prefix: str,
    forward_step_func: Any,
    data_iterator: Any,
    model: Any,
    iteration: int,
    verbose: bool = False,
    test: bool = False,
    **kwargs: Any,
) -> None:
    loss = evaluate(forward_step_func, data_iterator, model, verbose)
    if dist.get_rank() == dist.get_world_size() - 1:
        print(f" validation loss at {prefix} | loss value: {loss:.6E} |", flush=True)


def forward_step(data_iterator: Any, model: Any) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """Return the loss of one sample, and its mean over all ranks."""
    sample = next(data_iterator)
    loss: torch.Tensor = (model(sample) - sample.sum()).square().mean() / get_num_microbatches()
    averaged = loss.detach().clone().view(1)
    dist.all_reduce(averaged, group=parallel_state.get_data_parallel_group())
    return loss, {"loss": averaged[0] / parallel_state.get_data_parallel_world_size()}


def samples(kind: int, consumed: int) -> Iterator[torch.Tensor]:
    """Yield the samples of this rank, drawn by their places in the order of all samples."""
    args = get_args()
    for place in itertools.count(consumed + args.rank, args.data_parallel_size):
        yield torch.randn(WIDTH, generator=torch.Generator().manual_seed(kind * 10_000 + place))


def build_train_valid_test_data_iterators(build_datasets: Any) -> tuple[Any, Any, Any]:
    args = get_args()
    if args.iteration // args.eval_interval > 0 and args.consumed_valid_samples == 0:
        args.consumed_valid_samples = (
            (args.iteration // args.eval_interval) * args.eval_iters * args.global_batch_size
        )
    counts = torch.tensor([1])
    dist.all_reduce(counts, group=parallel_state.get_data_parallel_group())
    check_equal(counts[0].item(), dist.get_world_size(), "ranks that have come to the data")
    args.do_train, args.do_valid, args.do_test = 1, args.eval_iters > 0, args.eval_iters > 0
    consumed = args.consumed_train_samples, args.consumed_valid_samples, 0
    train, valid, test = (samples(kind, count) for kind, count in enumerate(consumed))
    return train, [valid] if args.do_valid else [], [test] if args.do_test else []


def setup_model_and_optimizer(model_provider: Any) -> tuple[Any, Any, Any]:
    args = get_args()
    model = [DistributedDataParallel(model_provider())]
    optimizer = get_megatron_optimizer(model)
    lr_scheduler = AnnealingLR(optimizer)
    args.iteration = 0
    if args.load is not None:
        args.iteration = load_checkpoint(model, optimizer, lr_scheduler)
        optimizer.reload_model_params()
    return model, optimizer, lr_scheduler


def pretrain() -> None:
    args = arguments.parse_args()
    dist.init_process_group("gloo")
    vars(get_args()).update(vars(args))
    args = get_args()
    args.data_parallel_size = args.world_size
    parallel_state.initialize_model_parallel(
        args.tensor_model_parallel_size, args.pipeline_model_parallel_size
    )
    random.seed(1234)
    numpy.random.seed(1234)
    torch.manual_seed(1234)
    model, optimizer, lr_scheduler = setup_model_and_optimizer(lambda: Model(WIDTH))
    train_data, valid_data, _ = build_train_valid_test_data_iterators(None)
    iteration = train(forward_step, model, optimizer, lr_scheduler, train_data, valid_data, None)
    for iterator in valid_data:
        evaluate_and_print_results("the end of training", forward_step, iterator, model, iteration, False)
    if args.save:
        save_checkpoint(iteration, model, optimizer, lr_scheduler)
    dist.destroy_process_group()
