"""Checkpoints in Megatron's `torch` format: saves of `train.py`, and the adaptor's saves after a failure.

    folder/latest_checkpointed_iteration.txt       the newest step
    folder/iter_0000200/mp_rank_00/model_optim_rng.pt    model, random states, and our `about`
    folder/iter_0000200/mp_rank_00/distrib_optim.pt      the optimizer's state

With tensor parallelism there is a folder `mp_rank_NN` for each part of the model.
"""

from __future__ import annotations

import dataclasses
import random
from pathlib import Path
from typing import Any

import numpy
import torch
from config import Config, ModelConfig, TrainConfig
from megatron.core import parallel_state, tensor_parallel
from registry import find
from tokenizer import Tokenizer

TRACKER = "latest_checkpointed_iteration.txt"
# Along which dimension tensor-parallel processes have divided a weight; all others they have whole.
DIVIDED = {
    "tokens.weight": 0,
    "qkv.weight": 0,
    "qkv.bias": 0,
    "wide.weight": 0,
    "wide.bias": 0,
    "lora.up.weight": 0,
    "attention.out.weight": 1,
    "mlp.out.weight": 1,
}


def newest(folder: Path) -> int | None:
    """Return the newest step that is saved in `folder`, or None. Raises ValueError for another tracker."""
    tracker = folder / TRACKER
    if not tracker.is_file():
        return None
    text = tracker.read_text(errors="replace").strip()
    if not text.isdecimal():
        raise ValueError(f"{tracker} says {text[:40]!r}: it must be the number of a step")
    return int(text)


def opened(file: Path) -> dict[str, Any]:
    """Return the content of a file of `write`. Raises ValueError for a damaged or foreign file."""
    try:
        state = torch.load(file, map_location="cpu", weights_only=False)
    except OSError:
        raise
    except Exception as error:  # whatever the bytes of a damaged file, or another program's, lead to
        reason = (str(error).splitlines() or [""])[0]
        raise ValueError(f"{file} cannot be read: {type(error).__name__}: {reason}") from None
    if not isinstance(state, dict) or "about" not in state:
        raise ValueError(f"{file} is not of a checkpoint of this example")
    return state


def part(folder: Path, step: int, rank: int = 0) -> Path:
    """Return the folder of a part of the model."""
    return folder / f"iter_{step:07d}" / f"mp_rank_{rank:02d}"


def about(config: Config, tokenizer: str) -> dict[str, Any]:
    """Return what a checkpoint says of itself: the configuration, and the digest of the tokenizer."""
    return {"config": dataclasses.asdict(config), "tokenizer": tokenizer}


def write(folder: Path, step: int, state: dict[str, Any], optimizer: Any = None, rank: int = 0) -> None:
    """Write a part of a checkpoint; the checkpoint has no valid name until `publish`."""
    files = part(folder, step, rank)
    files = files.parent.with_suffix(".unfinished") / files.name
    files.mkdir(parents=True, exist_ok=True)
    torch.save(state, files / "model_optim_rng.pt")
    if optimizer is not None:
        torch.save(optimizer, files / "distrib_optim.pt")


def publish(folder: Path, step: int) -> None:
    """Rename the checkpoint, then update the tracker: a concurrent reader always finds a whole checkpoint."""
    final = part(folder, step).parent
    if not final.exists():
        final.with_suffix(".unfinished").rename(final)
    draft = folder / f"{TRACKER}.new"
    draft.write_text(str(step))
    draft.rename(folder / TRACKER)


def save(
    folder: Path, step: int, model: Any, optimizer: Any, scheduler: Any, about_model: dict[str, Any]
) -> None:
    """Save a training; every rank calls this function.

    Args:
        model: the model itself, without the wrapper for data parallelism.
        about_model: the result of `about`.
    """
    # Megatron-core chains optimizers where a model needs several (experts); this one has one in the chain.
    (inner,) = getattr(optimizer, "chained_optimizers", [optimizer])
    optimizer_state = (
        inner.get_parameter_state_dp_zero()
    )  # a collective: rank 0 gets the shards of the others
    if parallel_state.get_data_parallel_rank() == 0:
        state = {
            "iteration": step,
            "model": model.state_dict(),
            "optimizer": optimizer.state_dict(),
            "opt_param_scheduler": scheduler.state_dict(),
            "rng_state": [
                {
                    "random_rng_state": random.getstate(),
                    "np_rng_state": numpy.random.get_state(),
                    "torch_rng_state": torch.get_rng_state(),
                    "cuda_rng_state": torch.cuda.get_rng_state(),
                    "rng_tracker_states": tensor_parallel.get_cuda_rng_tracker().get_states(),
                }
            ],
            "about": about_model,
        }
        write(folder, step, state, optimizer_state, parallel_state.get_tensor_model_parallel_rank())
    torch.distributed.barrier()
    if torch.distributed.get_rank() == 0:
        publish(folder, step)
    torch.distributed.barrier()


@torch.no_grad()  # the optimizer's copies of weights in fp32 are views of the weights themselves
def resume(folder: Path, model: Any, optimizer: Any, scheduler: Any, about_model: dict[str, Any]) -> int:
    """Load the newest checkpoint of a training, if there is one; return its step, or 0.

    Raises ValueError for a checkpoint of another model or tokenizer.
    """
    step = newest(folder)
    if step is None:
        return 0
    files = part(folder, step, parallel_state.get_tensor_model_parallel_rank())
    state = opened(files / "model_optim_rng.pt")
    require_same(folder, state["about"], about_model)
    model.load_state_dict(state["model"])
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


def require_same(folder: Path, about_saved: dict[str, Any], about_job: dict[str, Any]) -> None:
    """Raise ValueError where the model or the tokenizer of a checkpoint is another one."""
    for key, value in about_job["config"]["model"].items():
        if about_saved["config"]["model"].get(key) != value:
            saved_value = about_saved["config"]["model"].get(key)
            raise ValueError(f"{folder} has a model with {key} {saved_value}, the configuration says {value}")
    require_tokenizer(folder, about_saved, about_job["tokenizer"])


def require_tokenizer(folder: Path, about_saved: dict[str, Any], digest: str) -> None:
    """Raise ValueError where the checkpoint was trained with another tokenizer."""
    if about_saved["tokenizer"] != digest:
        raise ValueError(
            f"the tokenizer's vocabulary does not fit {folder}: "
            f"trained with {about_saved['tokenizer']}, given {digest}"
        )


def require_room(tokenizer: Tokenizer, config: ModelConfig) -> None:
    """Raise ValueError where the tokenizer has more tokens than the model has rows."""
    if len(tokenizer) > config.vocabulary:
        raise ValueError(
            f"the tokenizer has {len(tokenizer)} tokens, the model's vocabulary is {config.vocabulary}"
        )


def read(folder: Path) -> tuple[dict[str, torch.Tensor], Config, dict[str, Any]]:
    """Read the newest model of a folder, its tensor-parallel parts joined.

    Returns:
        The weights, the configuration for one process, and the description in the checkpoint.

    Raises:
        ValueError: there is no checkpoint, or it was not made by this example.
    """
    step = newest(folder)
    if step is None:
        raise ValueError(f"{folder} has no checkpoint: no {TRACKER}")
    files = sorted(part(folder, step).parent.glob("mp_rank_*/model_optim_rng.pt"))
    if not files:
        raise ValueError(f"{folder} has no checkpoint of this example at step {step}")
    parts = [opened(file) for file in files]
    about_model = parts[0]["about"]
    config = Config(
        ModelConfig(**about_model["config"]["model"]),
        dataclasses.replace(TrainConfig(**about_model["config"]["train"]), tensor_parallel=1),
    )
    weights = {}
    for name, value in parts[0]["model"].items():
        if isinstance(value, torch.Tensor):  # Megatron-core's layers have entries without one
            dimension = next((at for end, at in DIVIDED.items() if name.endswith(end)), None)
            all_parts = [tensor_part["model"][name] for tensor_part in parts]
            weights[name] = value if dimension is None else torch.cat(all_parts, dimension)
    return weights, config, about_model


def load(folder: Path, tokenizer: Tokenizer | None = None) -> Any:
    """Return the newest model of a folder in fp32, ready for use in this process alone.

    Raises ValueError as `read` does, and if `tokenizer` is not the tokenizer of the training.
    """
    from model import device, initialize_alone

    weights, config, about_model = read(folder)
    if tokenizer is not None:
        require_tokenizer(folder, about_model, tokenizer.digest)
    initialize_alone()
    model = find("model", config.model.name)(config)
    model.load_state_dict(weights)
    return model.float().eval().to(device())
