"""The checks of the flow: `python verify.py checkpoints|models|logits|merged A B [...]`.

checkpoints A B            the newest checkpoints of two runs, bit for bit models A B                 the
weights of two models of Hugging Face, bit for bit logits MODEL FILE          transformers' logits against
those of logits.py merged BASE LORA MERGED    peft's merge_and_unload against the framework's conversion of a
LoRA checkpoint
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import checkpoints
import torch

TOLERANCE = 1e-4  # of logits in fp32


class DifferentError(Exception):
    """A difference, described in one line."""


def same_checkpoints(first: Path, second: Path) -> str:
    folders = checkpoints.newest(first), checkpoints.newest(second)
    names = [[str(path.relative_to(folder)) for path in checkpoints.files(folder)] for folder in folders]
    if folders[0].name != folders[1].name or names[0] != names[1]:
        raise DifferentError(f"{folders[0]} has {names[0]}, {folders[1]} has {names[1]}")
    tensors = 0
    for name in names[0]:
        values_of_folders = [
            dict(checkpoints.flat(_trained(checkpoints.load(folder / name)))) for folder in folders
        ]
        for key in sorted(set(values_of_folders[0]) | set(values_of_folders[1])):
            first_value, right = (values.get(key) for values in values_of_folders)
            if isinstance(first_value, torch.Tensor) and isinstance(right, torch.Tensor):
                tensors += 1
                if not equal(first_value, right):
                    raise DifferentError(f"{name}: {key} is different")
            elif isinstance(first_value, (int, float, str)) and first_value != right:
                raise DifferentError(f"{name}: {key} is {first_value} and {right}")
    return f"{folders[0].name} of {first} and {second}: {tensors} tensors, bit for bit"


def _trained(content: dict[str, Any]) -> dict[str, Any]:
    """Return the state without the arguments, which name folders, and a count that restarts at every
    start.
    """
    left_out = ("args", "num_floating_point_operations_so_far")
    return {key: value for key, value in content.items() if key not in left_out}


def equal(first: torch.Tensor, right: torch.Tensor) -> bool:
    if first.dtype != right.dtype or first.shape != right.shape:
        return False
    return torch.equal(
        first.contiguous().view(-1).view(torch.uint8), right.contiguous().view(-1).view(torch.uint8)
    )


def weights(model: Path) -> dict[str, torch.Tensor]:
    from safetensors.torch import load_file

    tensors: dict[str, torch.Tensor] = {}
    for file in sorted(model.glob("model*.safetensors")):
        tensors |= load_file(file)
    return tensors


def same_models(first: Path, second: Path) -> str:
    first_weights, right = weights(first), weights(second)
    for name in sorted(set(first_weights) | set(right)):
        if name not in first_weights or name not in right:
            raise DifferentError(f"{name} is in {first if name in first_weights else second} only")
        if not equal(first_weights[name], right[name]):
            raise DifferentError(f"{name} is different")
    return f"{first} and {second}: {len(first_weights)} tensors, bit for bit"


def _pretrained(model: Path, **options: Any) -> Any:
    from transformers import AutoModelForCausalLM
    from transformers.utils import logging

    logging.disable_progress_bar()
    return AutoModelForCausalLM.from_pretrained(model, **options)


def logits(model: Path, file: Path) -> str:
    written = torch.load(file, weights_only=True)
    loaded = _pretrained(model, dtype=torch.float32, attn_implementation="eager")
    with torch.no_grad():
        expected = loaded.eval()(written["tokens"]).logits
    difference = float((expected - written["logits"]).abs().max())
    if not difference < TOLERANCE:
        raise DifferentError(f"logits of {model} differ by {difference:.2g} from the framework's")
    size = float(expected.abs().max())
    return (
        f"{model}: {expected.numel()} logits up to {size:.2g}, at most {difference:.1g} from the framework's"
    )


def merged(base: Path, lora: Path, result: Path) -> str:
    """Give peft the adapters of a checkpoint, cut as Hugging Face's modules are, and merge."""
    from peft import LoraConfig, get_peft_model

    config = json.loads((base / "config.json").read_text())
    adapters = checkpoints.model_of(lora)
    arguments = next(
        content["args"]
        for content in map(checkpoints.load, checkpoints.files(checkpoints.newest(lora)))
        if "args" in content
    )
    rank, alpha = (int(getattr(arguments, name)) for name in ("lora_r", "lora_alpha"))
    cut: dict[str, torch.Tensor] = {}
    for name, tensor in adapters.items():
        if name.endswith("lora_A.default.weight"):  # others are None
            for target, rows in _modules(name, adapters[name.replace("lora_A", "lora_B")], config):
                cut[f"base_model.model.{target}.lora_A.default.weight"] = tensor
                cut[f"base_model.model.{target}.lora_B.default.weight"] = rows
    targets = sorted({name.split(".lora_")[0].rpartition(".")[2] for name in cut})
    model = _pretrained(base, dtype=torch.bfloat16)
    tuned = get_peft_model(model, LoraConfig(r=rank, lora_alpha=alpha, target_modules=targets))
    missing = set(cut) - set(tuned.state_dict())
    if missing:
        raise DifferentError(f"peft has no {min(missing)}")
    tuned.load_state_dict(cut, strict=False)
    expected = tuned.merge_and_unload().state_dict()
    tensors, largest, different = weights(result), 0.0, 0
    for name, tensor in tensors.items():
        by_peft, right = expected[name].float(), tensor.float()
        different += int((by_peft != right).sum())
        largest = max(
            largest,
            float(((by_peft - right).abs() / by_peft.abs().clamp(min=1e-3)).max()),
        )
    if set(expected) != set(tensors) or not largest <= 2**-7:  # an ulp of bf16, where both round
        raise DifferentError(f"{result} differs from peft's merge by {largest:.2g}")
    count = f"{len(tensors)} tensors as peft merges them"
    return f"{result}: {count}, {different} numbers off by one rounding of bf16"


def _modules(name: str, rows: torch.Tensor, config: dict[str, Any]) -> list[tuple[str, torch.Tensor]]:
    """Return Hugging Face's modules below a module of Megatron, each with its rows of lora_B."""
    layer, module = name.split(".")[2], name.split(".lora_A.")[0].rpartition(".")[2]
    attention, mlp = f"model.layers.{layer}.self_attn", f"model.layers.{layer}.mlp"
    if module == "linear_qkv":
        groups, heads = config["num_key_value_heads"], config["num_attention_heads"]
        by_group = rows.view(groups, heads // groups + 2, config["head_dim"], rows.shape[1])
        parts = by_group[:, :-2], by_group[:, -2:-1], by_group[:, -1:]
        return [
            (f"{attention}.{letter}_proj", part.reshape(-1, rows.shape[1]))
            for letter, part in zip("qkv", parts, strict=True)
        ]
    if module == "linear_fc1":
        gate, up = rows.chunk(2)
        return [(f"{mlp}.gate_proj", gate), (f"{mlp}.up_proj", up)]
    return [(f"{attention}.o_proj" if module == "linear_proj" else f"{mlp}.down_proj", rows)]


COMMANDS: dict[str, Callable[..., str]] = {
    "checkpoints": same_checkpoints,
    "models": same_models,
    "logits": logits,
    "merged": merged,
}


def main() -> None:
    command, *paths = sys.argv[1:]
    try:
        print(COMMANDS[command](*map(Path, paths)))
    except (DifferentError, ValueError, OSError) as error:
        sys.exit(f"verify.py: {error}")


if __name__ == "__main__":
    main()
