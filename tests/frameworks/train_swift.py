"""A script of the small ms-swift: `train_swift.py --iters 8 --record DIR --output-dir DIR`."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import torch
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler
from record import Recorder
from swift.dataset.packing import PackingDataset
from swift.megatron.arguments.sft_args import MegatronSftArguments
from swift.megatron.trainers.base import BaseMegatronTrainer
from swift.megatron.utils.megatron_lm_utils import initialize_megatron
from train_core import batch, build, drawn


def trainer_of(kind: str | None) -> type[BaseMegatronTrainer]:
    """Return the trainer of `--rlhf-type`; the framework imports rollouts only for a kind that has them."""
    if kind is None:
        return BaseMegatronTrainer
    from swift.megatron.trainers.rollout_mixin import MegatronRolloutMixin

    return type("RolloutTrainer", (MegatronRolloutMixin, BaseMegatronTrainer), {})


def adapt(model: torch.nn.Module) -> None:
    """Freeze the model, and give each first layer of an MLP an adapter, as LoRA does."""
    model.requires_grad_(False)
    for layer in [module for name, module in model.named_modules() if name.endswith("linear_fc1")]:
        down, up = (
            torch.nn.Linear(*sizes, bias=False).cuda().bfloat16()
            for sizes in ((layer.input_size, 4), (4, layer.output_size))
        )
        torch.nn.init.normal_(down.weight, std=0.1, generator=torch.Generator().manual_seed(1))
        torch.nn.init.zeros_(up.weight)
        layer.lora_A, layer.lora_B = (torch.nn.ModuleDict({"default": part}) for part in (down, up))
        layer.register_forward_hook(
            lambda layer, inputs, output: (
                output[0] + layer.lora_B["default"](layer.lora_A["default"](inputs[0])),
                output[1],
            )
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--iters", dest="train_iters", type=int, required=True)
    parser.add_argument("--instances", type=int, default=1, help="copies of the optimizer state")
    parser.add_argument("--global-batch-size", type=int, default=2)
    parser.add_argument("--save-interval", type=int, default=2)
    parser.add_argument("--tuner-type", default="full", choices=("full", "lora"))
    parser.add_argument("--rlhf-type", choices=("grpo",))
    parser.add_argument("--steps-per-generation", type=int, default=1)
    parser.add_argument("--mcore-model")
    parser.add_argument("--mcore-adapter")
    for name in ("--finetune", "--no-save-optim", "--no-save-rng"):
        parser.add_argument(name, action="store_true")
    parser.add_argument("--record", type=Path, required=True)
    parser.add_argument("--output-dir", required=True)
    parser.add_argument("--add-version", action="store_true")
    args = parser.parse_args(namespace=MegatronSftArguments())
    args._init_output_dir()
    args.virtual_pipeline_model_parallel_size = None
    initialize_megatron(args)
    shape = argparse.Namespace(
        instances=args.instances, stages=1, experts=1, context=1, tensor=1, freeze=False, whole=False
    )
    model, _ = build(shape, adapt if args.tuner_type == "lora" else None)
    options = OptimizerConfig(
        lr=1e-3, min_lr=1e-5, bf16=True, params_dtype=torch.bfloat16, use_distributed_optimizer=True
    )
    optimizer = get_megatron_optimizer(options, [model])
    scheduler = OptimizerParamScheduler(
        optimizer, 0.0, 1e-3, 1e-5, 8, 100, "cosine", 0.0, 0.0, 100, "constant"
    )

    def forward(tokens: Any, model: Any) -> torch.Tensor:
        loss: torch.Tensor = model(**batch(tokens)).mean()
        return loss

    args.forward_step = forward
    trainer = trainer_of(args.rlhf_type)(args, [model], optimizer, scheduler, Recorder(args.record).add)
    trainer.train(PackingDataset(None, drawn, args.train_iters), None)
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
