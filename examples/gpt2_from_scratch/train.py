"""Train GPT-2, protected against the loss of processes.

    ttprun --nproc-per-node 2 --max-restarts 3 train.py --config tiny --data data/train --valid data/valid \\
        --tokenizer tokenizer --save checkpoints            # on a CPU: also --ttp-device cpu

Lines for the adaptor are marked (ttp). Without the adaptor, or with ENABLE_TTP=False, this runs under
torchrun.
"""

from __future__ import annotations

import argparse
import math
import os
import sys
from pathlib import Path
from typing import Any

import adaptor  # (ttp)

adaptor.enable()  # (ttp)

import checkpoint  # noqa: E402
import config as configuration  # noqa: E402
import model  # noqa: E402, F401, RUF100  (it registers itself)
import torch  # noqa: E402
from data import Blocks  # noqa: E402
from megatron.core import parallel_state, tensor_parallel  # noqa: E402
from megatron.core.distributed import (  # noqa: E402
    DistributedDataParallel,
    DistributedDataParallelConfig,
    finalize_model_grads,
)
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer  # noqa: E402
from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler  # noqa: E402
from registry import find  # noqa: E402
from tokenizer import Tokenizer  # noqa: E402

EVALUATION_BATCHES = 20  # of the validation text, on each rank


def main() -> None:
    args = arguments()
    try:
        config = configuration.load(args.config)
        tokenizer = Tokenizer.load(args.tokenizer)
        checkpoint.require_room(tokenizer, config.model)
        train_text, valid_text = (
            Blocks(prefix, config.model.context, config.model.vocabulary)
            for prefix in (args.data, args.valid)
        )
        if config.model.lora_rank and args.init is None:
            raise ValueError(f"{args.config} trains additions to a model: name it with --init")
        about = checkpoint.about(config, tokenizer.digest)
        weights = initial_weights(args.init, about) if args.init else None
        begin(config.train)
    except (OSError, ValueError) as error:
        sys.exit(f"train.py: {error}")
    train(args, config, train_text, valid_text, weights, about)
    torch.distributed.destroy_process_group()


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="train GPT-2")
    parser.add_argument("--config", default="tiny", help="a name in configs/, or the path of a YAML file")
    parser.add_argument("--data", type=Path, required=True, help="training text, without .bin")
    parser.add_argument("--valid", type=Path, required=True, help="validation text, without .bin")
    parser.add_argument("--tokenizer", type=Path, required=True)
    parser.add_argument("--save", type=Path, required=True, help="folder of checkpoints, also resumed from")
    parser.add_argument("--init", type=Path, help="folder of a checkpoint whose weights are trained further")
    parser.add_argument("--stop-at", type=int, help="end after this step, as if the time were over")
    return parser.parse_args()


def initial_weights(folder: Path, about: dict[str, Any]) -> dict[str, torch.Tensor]:
    """Return the weights of a checkpoint, which may lack the additions of LoRA."""
    weights, _, about_saved = checkpoint.read(folder)
    free = ("lora_rank", "lora_alpha", "dropout")
    for key in free:
        about_saved["config"]["model"][key] = about["config"]["model"][key]
    checkpoint.require_same(folder, about_saved, about)
    return weights


def begin(config: configuration.TrainConfig) -> None:
    """Join the other processes, and seed the random numbers.

    On a CPU `--ttp-device cpu` makes cuda mean the CPU and nccl gloo, here and in all of Megatron-core.
    """
    torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    torch.distributed.init_process_group("nccl")
    if torch.distributed.get_world_size() % config.tensor_parallel:
        raise ValueError(
            f"{torch.distributed.get_world_size()} processes were started: "
            f"tensor_parallel, {config.tensor_parallel}, must divide them"
        )
    parallel_state.initialize_model_parallel(tensor_model_parallel_size=config.tensor_parallel)
    tensor_parallel.model_parallel_cuda_manual_seed(config.seed)
    torch.manual_seed(config.seed)


def build(
    config: configuration.Config, weights: dict[str, torch.Tensor] | None
) -> tuple[DistributedDataParallel, Any, OptimizerParamScheduler]:
    """Return the model, its optimizer, whose state the ranks share, and the schedule of the learning rate."""
    settings = config.train
    bf16 = settings.precision == "bf16"
    core = find("model", config.model.name)(config)
    if weights is not None:
        load_own_part(core, weights)
    core = core.cuda().bfloat16() if bf16 else core.cuda()
    # All gradients of a process lie in one buffer: a few exchanges sum them over the processes.
    wrapped = DistributedDataParallel(
        core.config,
        DistributedDataParallelConfig(use_distributed_optimizer=True, grad_reduce_in_fp32=True),
        core,
    )
    optimizer = get_megatron_optimizer(
        OptimizerConfig(
            lr=settings.learning_rate,
            min_lr=settings.least_learning_rate,
            weight_decay=settings.weight_decay,
            clip_grad=settings.clip,
            adam_beta2=0.95,
            bf16=bf16,
            params_dtype=torch.bfloat16 if bf16 else torch.float32,
            use_distributed_optimizer=True,
        ),
        [wrapped],
    )
    samples = settings.batch * parallel_state.get_data_parallel_world_size()
    scheduler = OptimizerParamScheduler(
        optimizer,
        init_lr=0.0,
        max_lr=settings.learning_rate,
        min_lr=settings.least_learning_rate,
        lr_warmup_steps=settings.warmup * samples,
        lr_decay_steps=max(settings.steps, settings.warmup + 1) * samples,
        lr_decay_style="cosine",
        start_wd=settings.weight_decay,
        end_wd=settings.weight_decay,
        wd_incr_steps=0,
        wd_incr_style="constant",
    )
    return wrapped, optimizer, scheduler


def load_own_part(core: Any, weights: dict[str, torch.Tensor]) -> None:
    """Load this process's part of a whole model."""
    rank = parallel_state.get_tensor_model_parallel_rank()
    size = parallel_state.get_tensor_model_parallel_world_size()
    own_weights = {}
    for name, value in weights.items():
        dimension = next((at for end, at in checkpoint.DIVIDED.items() if name.endswith(end)), None)
        own_weights[name] = value if dimension is None else value.chunk(size, dimension)[rank]
    missing, unexpected = core.load_state_dict(own_weights, strict=False)
    missing = [name for name in missing if ".lora." not in name and not name.endswith("_extra_state")]
    if missing or unexpected:
        raise ValueError(f"the weights do not fit the model: {(missing or unexpected)[0]}")


def train(
    args: argparse.Namespace,
    config: configuration.Config,
    train_text: Blocks,
    valid_text: Blocks,
    weights: dict[str, torch.Tensor] | None,
    about: dict[str, Any],
) -> None:
    """Train from the newest checkpoint to the last step, and save."""
    settings = config.train
    try:
        wrapped, optimizer, scheduler = build(config, weights)
        finished_step = checkpoint.resume(args.save, wrapped.module, optimizer, scheduler, about)
    except (OSError, ValueError) as error:
        sys.exit(f"train.py: {error}")
    rank, size = parallel_state.get_data_parallel_rank(), parallel_state.get_data_parallel_world_size()
    samples = settings.batch * size
    protection = adaptor.protect(  # (ttp)
        model=[wrapped],
        optimizer=optimizer,
        scheduler=scheduler,
        save=args.save,
        step=finished_step,
        samples_per_step=samples,
        extra={"about": about},
    )
    last = min(settings.steps, args.stop_at or settings.steps)

    def one_step(step: int) -> None:
        """Make one step. After a fault, all ranks call this function again for the interrupted step."""
        # The samples follow from the number of the step alone. Each rank takes its own part of them.
        first = (step - 1) * samples + rank * settings.batch
        tokens = train_text.batch(first, settings.batch, settings.seed).cuda()
        wrapped.zero_grad_buffer()
        optimizer.zero_grad()
        # All but the last token are seen, all but the first are to be said.
        loss = wrapped(tokens[:, :-1], labels=tokens[:, 1:].contiguous()).mean()
        optimizer.scale_loss(loss).backward()  # a scale other than 1 is for fp16 alone
        finalize_model_grads([wrapped])  # each process gets its part of the mean gradient
        # It updates its part of the weights in fp32, and all gather what the others have updated.
        _, norm, _ = optimizer.step()
        scheduler.step(increment=samples)
        mean = mean_over_ranks(loss.detach())
        say(f"step {step} loss {mean:.4f} {mean.hex()} gradient norm {float(norm):.3f}")
        if step < last and step % settings.evaluate_every == 0:
            measure(step)
        if step < last and settings.save_every and step % settings.save_every == 0:
            keep(step)

    def measure(step: int) -> None:
        with protection.phase("evaluation"):  # (ttp)
            mean = evaluate(wrapped.module, valid_text, settings.batch, rank, size)
        say(f"step {step} validation loss {mean:.4f} {mean.hex()} perplexity {math.exp(mean):.2f}")

    def keep(step: int) -> None:
        with protection.phase("save"):  # (ttp)
            checkpoint.save(args.save, step, wrapped.module, optimizer, scheduler, about)
        say(f"step {step} saved in {args.save}")

    protection.run_steps(one_step, last)  # (ttp) in place of `for step in range(done + 1, last + 1)`
    # After the loop: of what stands in it after the update, a fault may leave out the newest.
    if finished_step < last:
        measure(last)
        keep(last)
    protection.end_training()  # (ttp)


@torch.no_grad()
def evaluate(core: Any, text: Blocks, batch: int, rank: int, size: int) -> float:
    """Return the mean loss of a token over the first blocks of the text; each rank takes its own ones."""
    core.eval()
    try:
        total = torch.zeros(2, device="cuda")
        for index in range(rank, min(len(text), EVALUATION_BATCHES * batch * size), size):
            tokens = text[index][None].cuda()
            total += torch.stack(
                [core(tokens[:, :-1], labels=tokens[:, 1:].contiguous()).mean(), total.new_ones(())]
            )
        torch.distributed.all_reduce(total, group=parallel_state.get_data_parallel_group())
    finally:
        core.train()  # also where a fault ends it: the next step of this process needs its dropout
    return float(total[0] / total[1])


def mean_over_ranks(value: torch.Tensor) -> float:
    value = value / torch.distributed.get_world_size()
    torch.distributed.all_reduce(value)
    return float(value)


def say(line: str) -> None:
    """Print a line once for all ranks."""
    if torch.distributed.get_rank() == 0:
        print(line, flush=True)


if __name__ == "__main__":
    main()
