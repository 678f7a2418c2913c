"""The training loop."""

from __future__ import annotations

import random
from typing import Any

import numpy
import torch
import torch.distributed as dist

from ascendspeed import arguments, get_args, get_num_microbatches
from ascendspeed.checkpointing import load_checkpoint, save_checkpoint
from ascendspeed.core import parallel_state
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
    args = get_args()
    for buffer in model[0]._grad_buffers.values():
        buffer.data.zero_()
    loss = torch.zeros(())
    for number in range(get_num_microbatches()):
        loss = forward_step_func(number, model[0])
        loss.backward()
    optimizer.reduce_model_grads(args, None)
    updated, norm, zeros = optimizer.step(args, None)
    optimizer.gather_model_params(args, None)
    lr_scheduler.step(get_num_microbatches() * args.micro_batch_size * args.data_parallel_size)
    return {"loss": loss.detach()}, int(not updated), norm, zeros


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
    iteration = args.iteration
    while iteration < args.train_iters:
        train_step(forward_step_func, train_data_iterator, model, optimizer, lr_scheduler, config)
        iteration += 1
        args.iteration = iteration
        args.consumed_train_samples += args.global_batch_size
        args.actual_seq_length = args.seq_length
        args.consumed_train_tokens += args.global_batch_size * args.actual_seq_length
        if iteration % args.save_interval == 0:
            save_checkpoint(iteration, model, optimizer, lr_scheduler)
    return int(iteration)


def forward_step(number: int, model: Any) -> torch.Tensor:
    """The loss of one sample, which its place in the order of all samples says."""
    args = get_args()
    place = args.consumed_train_samples + number * args.data_parallel_size + args.rank
    sample = torch.randn(WIDTH, generator=torch.Generator().manual_seed(place))
    loss: torch.Tensor = (model(sample) - sample.sum()).square().mean() / get_num_microbatches()
    return loss


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
    model = [DistributedDataParallel(Model(WIDTH))]
    optimizer = get_megatron_optimizer(model)
    lr_scheduler = AnnealingLR(optimizer)
    args.iteration = 0
    if args.load is not None:
        args.iteration = load_checkpoint(model, optimizer, lr_scheduler)
        optimizer.reload_model_params()
    iteration = train(forward_step, model, optimizer, lr_scheduler, None, None, None)
    if args.save:
        save_checkpoint(iteration, model, optimizer, lr_scheduler)
    dist.destroy_process_group()
