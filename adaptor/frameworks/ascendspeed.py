"""The work of the patches on ModelLink's training loop. Imported once the framework is."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch

from adaptor import context
from adaptor.checkpoint import format_torch
from adaptor.checkpoint.step_record import RandomStates
from adaptor.checkpoint.trainee import ProtectedState
from adaptor.checkpoint.training_state import CheckpointContents, Files, TrainingState
from adaptor.errors import UnsupportedError
from adaptor.frameworks import supported_options

_DEEPSPEED = "training by DeepSpeed, which has checkpoints of its own,"
# As `supported_options` has them for Megatron-LM.
ALLOWED_VALUES: supported_options.Values = (
    ("deepspeed", (False,), _DEEPSPEED),
    ("release_fp32_grad", (False, None), "an optimizer without fp32 gradients"),
    ("optimizer", ("adam", "sgd"), "an optimizer other than adam and sgd"),
    ("cpu_optimizer", (False, None), "optimizer offload"),
    ("lora_target_modules", ([], None), "LoRA"),
    ("mos", (False, None), "distillation"),
    ("kd", (False, None), "distillation"),
    ("num_layers_per_virtual_pipeline_stage", (None,), "an interleaved pipeline"),
    ("foldx_mode", (None,), "a folded pipeline, which is an interleaved one,"),
    ("num_experts", ([1], None), "experts, which DeepSpeed trains,"),
    ("random_ltd", (False, None), "random-LTD, with random states and token counts of its own,"),
    (
        "data_efficiency_curriculum_learning",
        (False, None),
        "curriculum learning, with token counts of its own,",
    ),
    ("no_save_optim", (False, None), "--no-save-optim, without which nothing can go on from a checkpoint,"),
    ("no_save_rng", (False, None), "--no-save-rng, without which nothing can go on,"),
)


def checks(args: Any) -> Iterator[Callable[[], None]]:
    """Return the refusals of what would be protected in part; each raises UnsupportedError."""
    yield from supported_options.checks_of_values(ALLOWED_VALUES, args)
    yield lambda: _require_savable(args)
    yield lambda: supported_options.require_alone(args)
    yield supported_options.require_no_layout_only
    yield supported_options.require_no_host_copy
    yield supported_options.require_no_comparison
    yield lambda: _require_shards_to_copy(args)


def _require_savable(args: Any) -> None:
    if args.optimizer == "sgd" and args.use_distributed_optimizer:
        raise UnsupportedError(
            "--optimizer is sgd with --use-distributed-optimizer: the framework itself cannot save that; "
            "use adam, or leave out --use-distributed-optimizer"
        )


def _require_shards_to_copy(args: Any) -> None:
    is_requested = getattr(args, "local_copy_os", False) or context.get().settings.local_copy
    if is_requested and not args.use_distributed_optimizer:
        raise UnsupportedError(
            "--local-copy-os (TTP_LOCAL_COPY) is given without --use-distributed-optimizer: "
            "add --use-distributed-optimizer, or leave out --local-copy-os"
        )


def data_parallel_size(args: Any) -> int:
    """Return the data-parallel size as the framework will compute it, from sizes cut to the ranks."""
    tensor = min(args.tensor_model_parallel_size, args.world_size)
    return int(
        args.world_size // (tensor * min(args.pipeline_model_parallel_size, args.world_size // tensor))
    )


def protected_state(model: Sequence[Any], optimizer: Any, scheduler: Any) -> ProtectedState:
    """Return the state of this rank, from the framework's globals."""
    from ascendspeed import get_args, get_num_microbatches
    from ascendspeed.checkpointing import get_checkpoint_name
    from ascendspeed.core import parallel_state, tensor_parallel

    args = get_args()
    size = parallel_state.get_data_parallel_world_size()

    def batch() -> int:
        return int(size * args.micro_batch_size * get_num_microbatches())

    def counters() -> dict[str, int | float]:
        return {
            "iteration": args.iteration,
            "consumed_train_samples": args.consumed_train_samples,
            "consumed_valid_samples": args.consumed_valid_samples,
            "consumed_train_tokens": args.consumed_train_tokens,
            "actual_seq_length": args.seq_length,  # which is not there before the end of the first step
        }

    def growth() -> dict[str, int | float]:
        step = args.iteration + 1
        # The framework saves after the evaluation of a step.
        due = args.eval_interval and step % args.eval_interval == 0 and args.do_valid
        sets = len(getattr(args, "valid_weighted_split_names", None) or ("",))
        return {
            "iteration": 1,
            "consumed_train_samples": batch(),
            "consumed_valid_samples": sets * args.eval_iters * batch() if due else 0,
            "consumed_train_tokens": batch() * args.seq_length,
        }

    return ProtectedState(
        model=model,
        optimizer=optimizer,
        scheduler=scheduler,
        save=args.save,
        group=Path(get_checkpoint_name("", 0)).parent.name,
        make_format=lambda _state, _first: AscendSpeedFormat(),
        contents=CheckpointContents(counters, growth),
        increment=batch,
        random=lambda: RandomStates(tensor_parallel.get_cuda_rng_tracker()),
        sizes=lambda: (size, size),
        may_copy=False,
        args=args,
        # It is called before the tokens of the step are counted.
        further_fields=lambda _everyone: {"also": lambda: {"token_num": args.consumed_train_tokens}},
    )


class AscendSpeedFormat(format_torch.TorchFormat):
    """ModelLink's format: the two archives of Megatron's, with other names inside."""

    def rng(self, states: Sequence[Mapping[str, Any]]) -> Any:
        (states_of_this_rank,) = states
        return states_of_this_rank

    def files(self, state: TrainingState, body: dict[str, Any], gathered: Sequence[Any]) -> Files:
        from ascendspeed.utils import convert_args_to_strs

        args = body.pop("args")
        named: dict[str, Any] = {"args": convert_args_to_strs(args)}
        for name, value in body.items():
            if name == "rng_state":
                named.update(value)
            else:
                named["lr_scheduler" if name == "opt_param_scheduler" else name] = value
            if name == "iteration":
                named["tokens"] = args.consumed_train_tokens
        files: Files = {f"{state.folder}/{format_torch.MODEL_FILE}": partial(format_torch.save, named)}
        (world,) = gathered
        if world is not None:
            numbered = by_chunk(state.optimizer, world)
            files[f"{state.folder}/{format_torch.OPTIMIZER_FILE}"] = partial(format_torch.save, numbered)
        return files


def by_chunk(optimizer: Any, world: Mapping[Any, Any]) -> dict[int, dict[Any, dict[str, torch.Tensor]]]:
    """Return the gathered tensors by model chunk and gradient type, padded like the chunk's buffer."""
    numbers = iter(range(len(optimizer.buffers)))
    states_by_chunk: dict[int, dict[Any, dict[str, torch.Tensor]]] = {}
    for chunk, model in enumerate(optimizer.models):
        states_by_chunk[chunk] = {}
        for dtype, buffer in model._grad_buffers.items():
            ((_, tensors),) = world[next(numbers)].items()
            missing = buffer.numel_padded - tensors.pop("numel_unpadded")
            states_by_chunk[chunk][dtype] = {
                key: torch.nn.functional.pad(value, (0, missing)) if missing else value
                for key, value in tensors.items()
            }
    return states_by_chunk
