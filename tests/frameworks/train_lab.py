"""A script of the framework `lab`, which is not edited: `train_lab.py --iters 8 --record DIR --save DIR`."""

from __future__ import annotations

import argparse
import os
from pathlib import Path

import lab
import torch
from megatron.core import parallel_state, tensor_parallel
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
from record import Recorder
from train_core import batch, build, drawn


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--iters", type=int, required=True)
    parser.add_argument("--instances", type=int, default=1, help="copies of the optimizer state")
    parser.add_argument("--record", type=Path, required=True)
    parser.add_argument("--save", type=Path, required=True)
    args = parser.parse_args()
    torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    torch.distributed.init_process_group("nccl")
    parallel_state.initialize_model_parallel(num_distributed_optimizer_instances=args.instances)
    tensor_parallel.model_parallel_cuda_manual_seed(1234)
    shape = argparse.Namespace(
        instances=args.instances, stages=1, experts=1, context=1, tensor=1, freeze=False, whole=False
    )
    model, config = build(shape)
    options = OptimizerConfig(lr=1e-3, bf16=True, params_dtype=torch.bfloat16, use_distributed_optimizer=True)
    optimizer = get_megatron_optimizer(options, [model])
    config.grad_scale_func = optimizer.scale_loss
    lab.train(
        model,
        optimizer,
        save=str(args.save),
        step=lab.load(args.save, model, optimizer),
        steps=args.iters,
        batch=lambda number, _rank: batch(drawn(number)),
        log=Recorder(args.record).add,
    )
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
