"""A script of the small mcore_adapter: `train_mca.py --iters 8 --record DIR --output-dir DIR`."""

from __future__ import annotations

import argparse
import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from mcore_adapter.trainer.trainer import McaTrainer, Models
from megatron.core import parallel_state, tensor_parallel
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler
from record import Recorder
from torch.utils.data import Subset
from train_core import Rows, batch, build

ROWS = 10  # five batches for each of two ranks: an epoch has six steps


class RecordingTrainer(McaTrainer):
    recorder: Recorder

    def training_step(self, *args: Any, **kwargs: Any) -> Any:
        result = super().training_step(*args, **kwargs)
        loss, _, skipped, grad_norm, _ = result
        mean = loss / torch.distributed.get_world_size()
        torch.distributed.all_reduce(mean)
        self.recorder.add(self.state.global_step + 1, {"lm loss": mean}, grad_norm, skipped=skipped)
        return result


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--iters", dest="max_steps", type=int, required=True)
    parser.add_argument("--last", type=int, help="the last step, if it comes before that of --iters")
    parser.add_argument("--instances", type=int, default=1, help="copies of the optimizer state")
    parser.add_argument("--save-steps", type=int, default=2)
    parser.add_argument("--resume-from-checkpoint")
    parser.add_argument("--record", type=Path, required=True)
    parser.add_argument("--output-dir", required=True)
    args = parser.parse_args()
    args.max_steps = args.last or args.max_steps
    args.world_size = int(os.environ["WORLD_SIZE"])
    args.use_distributed_optimizer = True
    args.ignore_data_skip = args.auto_find_batch_size = False
    args.gradient_accumulation_steps = 1
    torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    torch.distributed.init_process_group("nccl")
    parallel_state.initialize_model_parallel(num_distributed_optimizer_instances=args.instances)
    tensor_parallel.model_parallel_cuda_manual_seed(1234)
    shape = SimpleNamespace(
        instances=args.instances, stages=1, experts=1, context=1, tensor=1, freeze=False, whole=False
    )
    wrapped, config = build(shape)
    config.save_pretrained = lambda folder: Path(folder, "mca_config.json").write_text("{}")
    model = Models([wrapped.module])
    model.config = config

    def make_optimizer() -> tuple[Any, OptimizerParamScheduler]:
        options = OptimizerConfig(
            lr=1e-3, min_lr=1e-5, bf16=True, params_dtype=torch.bfloat16, use_distributed_optimizer=True
        )
        optimizer = get_megatron_optimizer(options, [wrapped])
        return optimizer, OptimizerParamScheduler(
            optimizer, 0.0, 1e-3, 1e-5, 2, 20, "cosine", 0.0, 0.0, 20, "constant"
        )

    def forward(tokens: Any, chunk: Any) -> torch.Tensor:
        loss: torch.Tensor = chunk(**batch(tokens)).mean()
        return loss

    data = Subset(Rows(), range(ROWS))
    trainer = RecordingTrainer(model, [wrapped], args, data, make_optimizer, forward)
    trainer.recorder = Recorder(args.record)
    trainer.train(args.resume_from_checkpoint)
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
