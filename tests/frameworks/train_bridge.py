"""A script of the small Megatron-Bridge: `train_bridge.py --iters 8 --record DIR --save DIR`."""

from __future__ import annotations

import argparse
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from megatron.bridge.training.setup import setup
from megatron.bridge.training.state import GlobalState
from megatron.bridge.training.train import train
from megatron.core.optimizer import OptimizerConfig
from record import Recorder
from train_core import batch, build, drawn


class Config(SimpleNamespace):
    def to_yaml(self, path: str | Path) -> None:
        Path(path).write_text("train: {}\n")


def config_of(args: argparse.Namespace) -> Config:
    size = args.batch
    return Config(
        train=SimpleNamespace(
            train_iters=args.iters,
            global_batch_size=size,
            micro_batch_size=1,
            eval_interval=3,
            eval_iters=2,
            exit_interval=None,
        ),
        checkpoint=SimpleNamespace(
            save=str(args.save),
            load=str(args.save),
            save_interval=args.save_interval,
            ckpt_format=args.ckpt_format,
            async_save=False,
            finetune=False,
            ckpt_step=None,
        ),
        optimizer=OptimizerConfig(
            optimizer=args.optimizer,
            lr=1e-3,
            min_lr=1e-5,
            bf16=True,
            params_dtype=torch.bfloat16,
            use_distributed_optimizer=args.optimizer == "adam",
        ),
        dist=SimpleNamespace(use_decentralized_pg=False, instances=args.instances),
        ddp=SimpleNamespace(overlap_param_gather=False),
        rng=SimpleNamespace(data_parallel_random_init=False),
        model=SimpleNamespace(cuda_graph_impl="none"),
        dataset=SimpleNamespace(dataloader_type="single"),
        peft=None,
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--iters", type=int, required=True)
    parser.add_argument("--instances", type=int, default=1, help="copies of the optimizer state")
    parser.add_argument("--batch", type=int, default=2, help="samples of a step, one for each rank")
    parser.add_argument("--save-interval", type=int, default=2)
    parser.add_argument("--ckpt-format", default="torch_dist")
    parser.add_argument("--optimizer", default="adam", help="or dist_muon")
    parser.add_argument("--record", type=Path, required=True)
    parser.add_argument("--save", type=Path, required=True)
    args = parser.parse_args()
    state = GlobalState(config_of(args))
    state.train_state.do_valid = True
    shape = SimpleNamespace(
        instances=args.instances,
        stages=1,
        experts=1,
        context=1,
        tensor=1,
        freeze=False,
        whole=args.optimizer != "adam",
    )

    def forward(data_iterator: Any, model: Any) -> torch.Tensor:
        loss: torch.Tensor = model(**batch(next(data_iterator))).mean()
        return loss

    training = setup(state, drawn, lambda: build(shape))
    train(
        forward,
        training.model,
        training.optimizer,
        training.scheduler,
        training.train_data_iterator,
        training.valid_data_iterator,
        state,
        Recorder(args.record).add,
    )
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
