"""A short training script of our own, the way megatron-core is used as a library: `train_core.py --iters 8`.

A tiny GPT under DDP and the distributed optimizer in bf16, on random tokens. Each iteration is recorded with
`record.Recorder`, in the same form as runs of Megatron-LM. With `--save DIR` it resumes from the checkpoint
there, if there is one, and has its last words there, where the adaptor is enabled; it saves nothing itself.
"""

from __future__ import annotations

import argparse
import os
from pathlib import Path

import torch
from megatron.core import parallel_state, tensor_parallel
from megatron.core.distributed import (
    DistributedDataParallel,
    DistributedDataParallelConfig,
    finalize_model_grads,
)
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.optimizer import MegatronOptimizer, OptimizerConfig, get_megatron_optimizer
from megatron.core.transformer import TransformerConfig
from record import Recorder

import adaptor

VOCABULARY = 256
LENGTH = 32


def build(instances: int) -> tuple[DistributedDataParallel, TransformerConfig]:
    """The model, its gradients reduced into shards for `instances` copies of the optimizer state."""
    config = TransformerConfig(
        num_layers=2,
        hidden_size=64,
        num_attention_heads=4,
        bf16=True,
        params_dtype=torch.bfloat16,
        persist_layer_norm=False,
        bias_dropout_fusion=False,
        gradient_accumulation_fusion=False,
        finalize_model_grads_func=finalize_model_grads,
    )
    model = GPTModel(config, get_gpt_layer_local_spec(), VOCABULARY, LENGTH).cuda().bfloat16()
    ddp = DistributedDataParallelConfig(
        use_distributed_optimizer=True,
        num_distributed_optimizer_instances=instances,
        grad_reduce_in_fp32=True,
    )
    return DistributedDataParallel(config, ddp, model), config


def batch(iteration: int, rank: int) -> dict[str, torch.Tensor]:
    """Tokens that depend on the iteration and the data-parallel rank alone, [1, LENGTH] each."""
    source = torch.Generator().manual_seed(1000 * iteration + rank)
    tokens = torch.randint(VOCABULARY, (1, LENGTH + 1), generator=source).cuda()
    return {
        "input_ids": tokens[:, :-1],
        "labels": tokens[:, 1:],
        "position_ids": torch.arange(LENGTH, device="cuda")[None],
        "attention_mask": torch.ones(1, 1, LENGTH, LENGTH, device="cuda").tril() < 0.5,
    }


def resume(root: Path, model: DistributedDataParallel, optimizer: MegatronOptimizer) -> int:
    """Load the checkpoint that the tracker names, in Megatron's `torch` format; returns its step."""
    tracker = root / "latest_checkpointed_iteration.txt"
    if not tracker.exists():
        return 0
    step = int(tracker.read_text())
    folder = root / f"iter_{step:07d}" / "mp_rank_00"
    body = torch.load(folder / "model_optim_rng.pt", weights_only=False)
    model.module.load_state_dict(body["model"])
    optimizer.load_state_dict(body["optimizer"])
    optimizer.load_parameter_state(str(folder / "distrib_optim.pt"))
    (rng,) = body["rng_state"]
    torch.set_rng_state(rng["torch_rng_state"])
    torch.cuda.set_rng_state(rng["cuda_rng_state"])
    tensor_parallel.get_cuda_rng_tracker().set_states(rng["rng_tracker_states"])
    return step


def main() -> None:
    parser = argparse.ArgumentParser(description="train a tiny GPT with megatron-core as a library")
    parser.add_argument("--iters", type=int, default=8)
    parser.add_argument("--instances", type=int, default=1, help="copies of the optimizer state")
    parser.add_argument("--record", type=Path, required=True, help="directory for the record of the run")
    parser.add_argument("--save", type=Path, help="directory of checkpoints")
    args = parser.parse_args()

    torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    torch.distributed.init_process_group("nccl")
    parallel_state.initialize_model_parallel(num_distributed_optimizer_instances=args.instances)
    tensor_parallel.model_parallel_cuda_manual_seed(1234)

    model, config = build(args.instances)
    optimizer = get_megatron_optimizer(
        OptimizerConfig(lr=1e-3, bf16=True, params_dtype=torch.bfloat16, use_distributed_optimizer=True),
        [model],
    )
    config.grad_scale_func = optimizer.scale_loss
    recorder = Recorder(args.record)
    step = resume(args.save, model, optimizer) if args.save else 0
    protection = adaptor.protect(model=[model], optimizer=optimizer, save=args.save or "", step=step)
    for iteration in range(step + 1, args.iters + 1):
        protection.begin_step(iteration)
        model.zero_grad_buffer()
        optimizer.zero_grad()
        loss = model(**batch(iteration, parallel_state.get_data_parallel_rank())).mean()
        optimizer.scale_loss(loss).backward()
        finalize_model_grads([model])
        done, grad_norm, _ = optimizer.step()
        mean = loss.detach() / torch.distributed.get_world_size()
        torch.distributed.all_reduce(mean)
        recorder.add(iteration, {"lm loss": mean}, grad_norm, skipped=not done)
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
