"""A training loop on Megatron-core that outlives its processes: `ttprun --nproc-per-node 4 pretrain.py --save
ckpt`.

A tiny GPT with dropout in bf16 under DDP and the distributed optimizer, on the rows of a data loader that
reads ahead. Lines for the adaptor are marked (ttp); without the adaptor, or with ENABLE_TTP=False, the script
runs under plain torchrun.
"""

from __future__ import annotations

import argparse
import os
import random
import warnings
from collections.abc import Iterator
from pathlib import Path

import adaptor  # (ttp)

adaptor.enable()  # (ttp)
# They warn of packages for accelerators that are not installed, and of functions that torch will rename.
warnings.filterwarnings("ignore", module="megatron|torch")

import numpy  # noqa: E402
import torch  # noqa: E402
from megatron.core import parallel_state, tensor_parallel  # noqa: E402
from megatron.core.distributed import (  # noqa: E402
    DistributedDataParallel,
    DistributedDataParallelConfig,
    finalize_model_grads,
)
from megatron.core.models.gpt import GPTModel  # noqa: E402
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec  # noqa: E402
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer  # noqa: E402
from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler  # noqa: E402
from megatron.core.transformer import TransformerConfig  # noqa: E402
from torch.utils.data import DataLoader, Dataset  # noqa: E402

VOCABULARY, LENGTH, BATCH = 256, 32, 2


class Rows(Dataset[torch.Tensor]):
    """A text of as many rows as the training takes; a row follows from its number alone."""

    def __init__(self, count: int) -> None:
        self._count = count

    def __len__(self) -> int:
        return self._count

    def __getitem__(self, row: int) -> torch.Tensor:
        return torch.randint(VOCABULARY, (LENGTH + 1,), generator=torch.Generator().manual_seed(row))


def read_behind(step: int, last: int) -> Iterator[torch.Tensor]:
    """Return the batches of this rank of the steps after `step`, read ahead by a process of their own."""
    rank, size = parallel_state.get_data_parallel_rank(), parallel_state.get_data_parallel_world_size()
    rows = Rows(last * BATCH * size)
    own_rows = [row for row in range(step * BATCH * size, len(rows)) if row // BATCH % size == rank]
    # It draws a seed: from a generator of its own, so that it may be made when the random states are loaded.
    return iter(DataLoader(rows, BATCH, sampler=own_rows, num_workers=1, generator=torch.Generator()))


def main() -> None:
    args = arguments()
    # On a CPU under plain torchrun: `python -m adaptor.devices cpu` before the script.
    torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    torch.distributed.init_process_group("nccl")
    parallel_state.initialize_model_parallel(num_distributed_optimizer_instances=args.instances)
    tensor_parallel.model_parallel_cuda_manual_seed(1234)
    torch.manual_seed(1234)

    model = build(args.instances)
    optimizer = get_megatron_optimizer(
        OptimizerConfig(
            lr=1e-3, min_lr=1e-5, bf16=True, params_dtype=torch.bfloat16, use_distributed_optimizer=True
        ),
        [model],
    )
    size = parallel_state.get_data_parallel_world_size()
    scheduler = OptimizerParamScheduler(
        optimizer,
        init_lr=0.0,
        max_lr=1e-3,
        min_lr=1e-5,
        lr_warmup_steps=2 * BATCH * size,
        lr_decay_steps=args.iters * BATCH * size,
        lr_decay_style="cosine",
        start_wd=0.1,
        end_wd=0.1,
        wd_incr_steps=0,
        wd_incr_style="constant",
    )
    # A process in the place of a failed one gets its state from the others.
    finished_step = 0 if adaptor.is_newcomer() else load(args.save, model, optimizer, scheduler)  # (ttp)
    protection = adaptor.protect(  # (ttp)
        model=[model],
        optimizer=optimizer,
        scheduler=scheduler,
        save=args.save,
        step=finished_step,
        samples_per_step=BATCH * size,
    )
    model.config.grad_scale_func = optimizer.scale_loss
    batches = read_behind(finished_step, args.iters)

    def go_back(step: int) -> None:  # called before training goes on after a fault
        nonlocal batches
        batches = read_behind(step, args.iters)

    def save_after(step: int) -> None:
        with protection.phase("save"):  # (ttp)
            save(args.save, step, model, optimizer, scheduler)

    def one_step(step: int) -> None:  # called again for a step that a fault has cut off
        if step - 1 > finished_step and (step - 1) % args.save_interval == 0:
            save_after(step - 1)
        loss, grad_norm = train_step(next(batches), model, optimizer)
        scheduler.step(increment=BATCH * size)
        if torch.distributed.get_rank() == 0:
            # Nine digits tell each float32 from all others: runs can be compared bit for bit.
            print(f"step {step} loss {loss:.9g} grad norm {float(grad_norm):.9g}", flush=True)

    print(f"rank {torch.distributed.get_rank()} is process {os.getpid()}", flush=True)
    protection.run_steps(one_step, args.iters, go_back)  # (ttp) in place of `for step in range(...)`
    if args.iters > finished_step:
        save_after(args.iters)
    torch.distributed.destroy_process_group()


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--iters", type=int, default=10)
    parser.add_argument("--save", type=Path, required=True, help="folder of checkpoints, also loaded from")
    parser.add_argument("--save-interval", type=int, default=1000, help="steps between two saves")
    parser.add_argument("--instances", type=int, default=1, help="copies of the optimizer state")
    return parser.parse_args()


def build(instances: int) -> DistributedDataParallel:
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
    return DistributedDataParallel(config, ddp, model)


def train_step(batch: torch.Tensor, model: DistributedDataParallel, optimizer: object) -> tuple[float, float]:
    """Make one update; return the mean loss over all ranks and the gradient norm."""
    tokens = batch.cuda()
    model.zero_grad_buffer()
    optimizer.zero_grad()
    positions = torch.arange(LENGTH, device="cuda")[None]
    mask = torch.ones(1, 1, LENGTH, LENGTH, device="cuda").tril() < 0.5
    loss = model(tokens[:, :-1], positions, mask, labels=tokens[:, 1:]).mean()
    optimizer.scale_loss(loss).backward()
    finalize_model_grads([model])
    _, grad_norm, _ = optimizer.step()
    mean = loss.detach() / torch.distributed.get_world_size()
    torch.distributed.all_reduce(mean)
    return float(mean), grad_norm


def save(
    folder: Path, step: int, model: DistributedDataParallel, optimizer: object, scheduler: object
) -> None:
    """Save `step` as the adaptor does; the tracker is written last."""
    checkpoint = folder / f"iter_{step:07d}"
    files = checkpoint / f"mp_rank_{parallel_state.get_tensor_model_parallel_rank():02d}"
    files.mkdir(parents=True, exist_ok=True)
    optimizer.save_parameter_state(str(files / "distrib_optim.pt"))  # all ranks give their shards
    if parallel_state.get_data_parallel_rank() == 0:
        rng = {
            "random_rng_state": random.getstate(),
            "np_rng_state": numpy.random.get_state(),
            "torch_rng_state": torch.get_rng_state(),
            "cuda_rng_state": torch.cuda.get_rng_state(),
            "rng_tracker_states": tensor_parallel.get_cuda_rng_tracker().get_states(),
        }
        state = {
            "iteration": step,
            "model": model.module.state_dict(),
            "optimizer": optimizer.state_dict(),
            "opt_param_scheduler": scheduler.state_dict(),
            "rng_state": [rng],  # the same on all data-parallel ranks
        }
        torch.save(state, files / "model_optim_rng.pt")
    torch.distributed.barrier()
    if torch.distributed.get_rank() == 0:
        tracker = folder / "latest_checkpointed_iteration.txt"
        draft = tracker.with_suffix(".new")
        draft.write_text(str(step))
        draft.replace(tracker)


def load(folder: Path, model: DistributedDataParallel, optimizer: object, scheduler: object) -> int:
    """Load the newest checkpoint in `folder`; return its step, or 0 without a checkpoint."""
    tracker = folder / "latest_checkpointed_iteration.txt"
    if not tracker.is_file():
        return 0
    step = int(tracker.read_text())
    files = folder / f"iter_{step:07d}" / f"mp_rank_{parallel_state.get_tensor_model_parallel_rank():02d}"
    state = torch.load(files / "model_optim_rng.pt", map_location="cpu", weights_only=False)
    model.module.load_state_dict(state["model"])
    optimizer.load_state_dict(state["optimizer"])
    optimizer.load_parameter_state(str(files / "distrib_optim.pt"))
    scheduler.load_state_dict(state["opt_param_scheduler"])
    rng = state["rng_state"][0]
    random.setstate(rng["random_rng_state"])
    numpy.random.set_state(rng["np_rng_state"])
    torch.set_rng_state(rng["torch_rng_state"])
    torch.cuda.set_rng_state(rng["cuda_rng_state"])
    tensor_parallel.get_cuda_rng_tracker().set_states(rng["rng_tracker_states"])
    return step


if __name__ == "__main__":
    main()
