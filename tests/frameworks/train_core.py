"""A short training script with megatron-core as a library: `train_core.py --iters 8`.

A tiny GPT under DDP and the distributed optimizer in bf16, on random tokens. Each iteration is recorded with
`record.Recorder`, in the same form as runs of Megatron-LM. With `--save DIR` the script resumes from the
newest checkpoint in DIR, and with the adaptor last words go to DIR; the script itself saves nothing.

With `--context 2` two ranks share a sequence, with a plain attention in place of Transformer Engine's. With
`--stages 2` two ranks have a layer each, and two micro-batches go through both. With `--experts 2` four
experts are on two ranks. With `--freeze` the embedding is not trained. With `--muon` Muon updates the
matrices, on every rank. With `--accumulate 2` every second step has an update. With `--stream` the tokens
come from a data loader that reads ahead, and the loop counts them. `--loop` selects how the adaptor learns of
the steps, if at all. With `--late` the job is claimed only by `adaptor.protect`. `--give` makes a mistake in
the arguments of `protect`.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import os
import sys
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import adaptor

if __name__ == "__main__" and not {"unprotected", "--late"}.intersection(sys.argv):
    adaptor.enable()

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
from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.dot_product_attention import DotProductAttention
from record import Recorder
from torch.utils.data import DataLoader, Dataset

VOCABULARY = 256
LENGTH = 32
ROWS = 1000  # of a stream
# What the script counts, and a checkpoint has besides.
EXTRA = {"counted": 0}
GIVEN = (
    *("bare-model", "bare-optimizer", "other-adam", "twice"),
    *("extra-function", "torch-scheduler", "other-increment"),
)


class ContextAttention(DotProductAttention):
    """Attention of this rank's part of a sequence to the whole sequence."""

    def __init__(self, config: TransformerConfig, *args: Any, **kwargs: Any) -> None:
        super().__init__(dataclasses.replace(config, context_parallel_size=1), *args, **kwargs)

    def forward(self, query: Any, key: Any, value: Any, *args: Any, **kwargs: Any) -> Any:
        group = parallel_state.get_context_parallel_group()
        key, value = (
            tensor_parallel.gather_from_sequence_parallel_region(part, group=group) for part in (key, value)
        )
        return super().forward(query, key, value, *args, **kwargs)


class Rows(Dataset[torch.Tensor]):
    """Tokens that depend on the number of their row alone."""

    def __len__(self) -> int:
        return ROWS

    def __getitem__(self, row: int) -> torch.Tensor:
        return torch.randint(VOCABULARY, (LENGTH + 1,), generator=torch.Generator().manual_seed(row))


class Stream:
    """The rows of a data-parallel rank in order, from a process that reads ahead of the loop.

    `rows` is the number of rows read so far.
    """

    def __init__(self, rank: int, size: int, step: int) -> None:
        self._rank, self._size = rank, size
        self.go_back(step)

    def go_back(self, step: int) -> None:
        self.rows = step
        own_rows = range(step * self._size + self._rank, ROWS, self._size)
        self._loader = iter(DataLoader(Rows(), sampler=own_rows, num_workers=1))

    def read(self) -> torch.Tensor:
        self.rows += 1
        tokens: torch.Tensor = next(self._loader)
        return tokens


def build(
    args: argparse.Namespace, change: Callable[[torch.nn.Module], None] | None = None
) -> tuple[DistributedDataParallel, TransformerConfig]:
    """Return the model, with gradients reduced into shards for `args.instances` copies of the optimizer
    state.

    Args:
        change: changes the model before the wrapping.
    """
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
        context_parallel_size=args.context,
        tensor_model_parallel_size=args.tensor,
        **parts(args),
    )
    spec = get_gpt_layer_local_spec(num_experts=config.num_moe_experts)
    if args.context > 1:
        spec.submodules.self_attention.submodules.core_attention = ContextAttention
    ends = {
        "pre_process": parallel_state.is_pipeline_first_stage(),
        "post_process": parallel_state.is_pipeline_last_stage(),
        "share_embeddings_and_output_weights": args.stages == 1,
    }
    model = GPTModel(config, spec, VOCABULARY, LENGTH, **ends).cuda().bfloat16()
    if args.freeze:
        model.embedding.requires_grad_(False)
    if change is not None:
        change(model)
    ddp = DistributedDataParallelConfig(
        use_distributed_optimizer=not args.whole,
        num_distributed_optimizer_instances=args.instances,
        grad_reduce_in_fp32=True,
    )
    return DistributedDataParallel(config, ddp, model), config


def parts(args: argparse.Namespace) -> dict[str, Any]:
    """Return the options of the model's config for stages and experts."""
    options: dict[str, Any] = {}
    if args.stages > 1:
        options |= {
            "pipeline_model_parallel_size": args.stages,
            "pipeline_dtype": torch.bfloat16,
            "deallocate_pipeline_outputs": True,
            "batch_p2p_comm": False,
        }
    if args.experts > 1:
        options |= {
            "expert_model_parallel_size": args.experts,
            "num_moe_experts": 4,
            "moe_router_topk": 2,
            "add_bias_linear": False,
        }
    return options


def constant_schedule(optimizer: MegatronOptimizer) -> OptimizerParamScheduler:
    """Return a scheduler with a constant learning rate."""
    return OptimizerParamScheduler(
        optimizer,
        init_lr=1e-3,
        max_lr=1e-3,
        min_lr=1e-3,
        lr_warmup_steps=0,
        lr_decay_steps=100,
        lr_decay_style="constant",
        start_wd=0.0,
        end_wd=0.0,
        wd_incr_steps=0,
        wd_incr_style="constant",
    )


def drawn(iteration: int) -> torch.Tensor:
    """Tokens that depend on iteration and data-parallel rank alone."""
    source = torch.Generator().manual_seed(1000 * iteration + parallel_state.get_data_parallel_rank())
    return torch.randint(VOCABULARY, (1, LENGTH + 1), generator=source)


def batch(tokens: torch.Tensor) -> dict[str, torch.Tensor]:
    """Return this rank's part of [1, LENGTH + 1] tokens, as inputs of the model."""
    tokens = tokens.cuda()
    part = LENGTH // parallel_state.get_context_parallel_world_size()
    start = part * parallel_state.get_context_parallel_rank()
    own_part = slice(start, start + part)
    return {
        "input_ids": tokens[:, :-1][:, own_part],
        "labels": tokens[:, 1:][:, own_part],
        "position_ids": torch.arange(LENGTH, device="cuda")[None, own_part],
        "attention_mask": torch.ones(1, 1, LENGTH, LENGTH, device="cuda").tril()[:, :, own_part] < 0.5,
    }


def resume(root: Path, model: DistributedDataParallel, optimizer: MegatronOptimizer) -> int:
    """Load the tracker's checkpoint, in Megatron's `torch` format; return its step."""
    tracker = root / "latest_checkpointed_iteration.txt"
    if not tracker.exists():
        return 0
    step = int(tracker.read_text())
    rank = parallel_state.get_tensor_model_parallel_rank()
    folder = root / f"iter_{step:07d}" / f"mp_rank_{rank:02d}"
    body = torch.load(folder / "model_optim_rng.pt", weights_only=False)
    model.module.load_state_dict(body["model"])
    optimizer.load_state_dict(body["optimizer"])
    if (folder / "distrib_optim.pt").exists():
        optimizer.load_parameter_state(str(folder / "distrib_optim.pt"))
    (rng,) = body["rng_state"]
    torch.set_rng_state(rng["torch_rng_state"])
    torch.cuda.set_rng_state(rng["cuda_rng_state"])
    tensor_parallel.get_cuda_rng_tracker().set_states(rng["rng_tracker_states"])
    return step


def through_stages(model: DistributedDataParallel, tokens: torch.Tensor) -> torch.Tensor:
    """Forward and backward pass of two micro-batches; returns their mean loss, 0 where others have it."""

    def forward(data: Any, chunk: Any) -> tuple[torch.Tensor, Callable[..., Any]]:
        return chunk(**next(data)), lambda output: (output.mean(), {"loss": output.detach().mean()})

    micro_batches = [batch(tokens), batch(tokens.flip(1))]
    losses = get_forward_backward_func()(
        forward_step_func=forward,
        data_iterator=iter(micro_batches),
        model=[model],
        num_microbatches=len(micro_batches),
        seq_length=LENGTH,
        micro_batch_size=1,
        forward_only=False,
    )
    values = [micro_batch["loss"] for micro_batch in losses]
    return torch.stack(values).mean() if values else torch.zeros(())


def begun(protection: Any, step: int) -> AbstractContextManager[None]:
    """The step is told to begin, and nobody tells of its end."""
    protection.begin_step(step)
    return contextlib.nullcontext()


LOOPS: dict[str, Callable[[Any, int], AbstractContextManager[None]]] = {
    "step": lambda protection, step: protection.step(step),
    "begin-step": begun,
    "one-behind": lambda protection, step: begun(protection, step - 1),
    "skips": lambda protection, step: protection.step(step + (step > 4)),
    "no-step": lambda protection, step: contextlib.nullcontext(),
    "run-steps": lambda protection, step: contextlib.nullcontext(),
    "unprotected": lambda protection, step: contextlib.nullcontext(),
}


def main() -> None:
    parser = argparse.ArgumentParser(description="train a tiny GPT with megatron-core as a library")
    parser.add_argument("--iters", type=int, default=8)
    parser.add_argument("--instances", type=int, default=1, help="copies of the optimizer state")
    parser.add_argument("--context", type=int, default=1, help="ranks that share a sequence")
    parser.add_argument("--tensor", type=int, default=1, help="ranks that share a layer")
    parser.add_argument("--stages", type=int, default=1, help="ranks that have a part of the layers each")
    parser.add_argument("--experts", type=int, default=1, help="ranks that have a part of the experts each")
    parser.add_argument("--whole", action="store_true", help="every rank has the whole optimizer")
    parser.add_argument("--muon", action="store_true", help="with --whole: Muon updates the matrices")
    parser.add_argument("--accumulate", type=int, default=1, help="steps with one update")
    parser.add_argument("--stream", action="store_true", help="tokens from a data loader that reads ahead")
    parser.add_argument("--further", type=int, help="steps behind that of the checkpoint, for --iters")
    parser.add_argument("--end-at", type=int, help="the step in which the function asks for the end")
    parser.add_argument("--freeze", action="store_true", help="do not train the embedding")
    parser.add_argument("--loop", choices=LOOPS, default="step", help="how the adaptor is told of steps")
    parser.add_argument("--late", action="store_true", help="do not call adaptor.enable")
    parser.add_argument("--uncopied", action="store_true", help="do not ask for copies in host memory")
    parser.add_argument("--give", choices=GIVEN, help="to the adaptor")
    parser.add_argument("--record", type=Path, required=True, help="directory for the record of the run")
    parser.add_argument("--save", type=Path, help="directory of checkpoints")
    args = parser.parse_args()

    torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    torch.distributed.init_process_group("nccl")
    parallel_state.initialize_model_parallel(
        tensor_model_parallel_size=args.tensor,
        pipeline_model_parallel_size=args.stages,
        expert_model_parallel_size=args.experts,
        context_parallel_size=args.context,
        num_distributed_optimizer_instances=args.instances,
    )
    tensor_parallel.model_parallel_cuda_manual_seed(1234)

    model, config = build(args)
    make = get_megatron_optimizer
    if args.muon:
        from megatron.core.optimizer.muon import get_megatron_muon_optimizer as make
    optimizer = make(
        OptimizerConfig(
            lr=1e-3, bf16=True, params_dtype=torch.bfloat16, use_distributed_optimizer=not args.whole
        ),
        [model],
    )
    config.grad_scale_func = optimizer.scale_loss
    recorder = Recorder(args.record)
    step = 0
    if adaptor.is_newcomer():  # its state comes from others
        print(f"rank {torch.distributed.get_rank()} loads nothing\n", end="", flush=True)
    elif args.save:
        if args.loop != "unprotected" and not args.uncopied:
            adaptor.write_host_copies(model=[model], optimizer=optimizer, save=args.save, extra=EXTRA)
        step = resume(args.save, model, optimizer)
    protection: Any = contextlib.nullcontext()
    scheduler = None
    if args.loop != "unprotected":
        protected: dict[str, Any] = {"model": [model], "optimizer": optimizer}
        if args.give == "bare-model":
            protected["model"] = model.module
        elif args.give == "bare-optimizer":
            protected["optimizer"] = torch.optim.Adam(model.parameters())
        elif args.give == "other-adam":
            (chained,) = optimizer.chained_optimizers
            chained.optimizer = torch.optim.AdamW(chained.optimizer.param_groups)
        elif args.give == "torch-scheduler":
            protected["scheduler"] = torch.optim.lr_scheduler.ConstantLR(torch.optim.SGD(model.parameters()))
        elif args.give == "other-increment":
            scheduler = constant_schedule(optimizer)
            protected.update(scheduler=scheduler, samples_per_step=2)
        extra = {"read": lambda: 0} if args.give == "extra-function" else EXTRA
        for _ in range(2 if args.give == "twice" else 1):
            protection = adaptor.protect(**protected, save=args.save or "", step=step, extra=extra)

    size = parallel_state.get_data_parallel_world_size()
    stream = Stream(parallel_state.get_data_parallel_rank(), size, step) if args.stream else None

    def one_step(iteration: int) -> bool:
        with LOOPS[args.loop](protection, iteration):
            if (iteration - 1) % args.accumulate == 0:
                model.zero_grad_buffer()
                optimizer.zero_grad()
            tokens = stream.read() if stream else drawn(iteration)
            is_last = iteration % args.accumulate == 0
            if args.stages > 1:  # which reduces the gradients, too
                loss = through_stages(model, tokens)
            else:
                loss = model(**batch(tokens)).mean()
                with contextlib.nullcontext() if is_last else model.no_sync():
                    optimizer.scale_loss(loss).backward()
            is_updated, grad_norm = False, None
            if is_last:
                if args.stages == 1:
                    finalize_model_grads([model])
                is_updated, grad_norm, _ = optimizer.step()
                if scheduler is not None:
                    scheduler.step(increment=1)
            mean = loss.detach() / torch.distributed.get_world_size()
            torch.distributed.all_reduce(mean)
        EXTRA["counted"] = iteration
        with protection.phase("logging") if args.loop != "unprotected" else protection:
            figures = {"lm loss": mean, **({"rows": stream.rows} if stream else {})}
            recorder.add(iteration, figures, grad_norm, skipped=not is_updated)
        return iteration != args.end_at

    def go_back(step: int) -> None:
        print(f"back behind step {step}\n", end="", flush=True)  # one write: four ranks have one log
        if stream is not None:
            stream.go_back(step)
            torch.rand(())  # a loader draws its seed; the device cpu gives each a generator of its own

    if args.loop == "run-steps":
        protection.run_steps(one_step, step + args.further if args.further else args.iters, go_back)
    else:
        for iteration in range(step + 1, args.iters + 1):
            one_step(iteration)
    assert not adaptor.is_newcomer(), "it has joined"
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
