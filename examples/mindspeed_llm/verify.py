"""What the flow is measured by: `python verify.py checkpoints|models|logits|merged A B [...]`.

checkpoints A B            the newest checkpoints of two runs, bit for bit
models A B                 the weights of two models of Hugging Face, bit for bit
logits MODEL FILE          transformers' logits against those that logits.py has written
merged BASE LORA MERGED    peft's merge_and_unload against the framework's conversion of a LoRA checkpoint
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
    """One line: what is different."""


def same_checkpoints(one: Path, other: Path) -> str:
    folders = checkpoints.newest(one), checkpoints.newest(other)
    names = [[str(path.relative_to(folder)) for path in checkpoints.files(folder)] for folder in folders]
    if folders[0].name != folders[1].name or names[0] != names[1]:
        raise DifferentError(f"{folders[0]} has {names[0]}, {folders[1]} has {names[1]}")
    tensors = 0
    for name in names[0]:
        found = [dict(checkpoints.flat(_trained(checkpoints.load(folder / name)))) for folder in folders]
        for key in sorted(set(found[0]) | set(found[1])):
            left, right = (values.get(key) for values in found)
            if isinstance(left, torch.Tensor) and isinstance(right, torch.Tensor):
                tensors += 1
                if not equal(left, right):
                    raise DifferentError(f"{name}: {key} is different")
            elif isinstance(left, (int, float, str)) and left != right:
                raise DifferentError(f"{name}: {key} is {left} and {right}")
    return f"{folders[0].name} of {one} and {other}: {tensors} tensors, bit for bit"


def _trained(content: dict[str, Any]) -> dict[str, Any]:
    """Without the arguments, which name folders, and a count that it begins anew at every start."""
    left_out = ("args", "num_floating_point_operations_so_far")
    return {key: value for key, value in content.items() if key not in left_out}


def equal(left: torch.Tensor, right: torch.Tensor) -> bool:
    if left.dtype != right.dtype or left.shape != right.shape:
        return False
    return torch.equal(
        left.contiguous().view(-1).view(torch.uint8), right.contiguous().view(-1).view(torch.uint8)
    )


def weights(model: Path) -> dict[str, torch.Tensor]:
    from safetensors.torch import load_file

    found: dict[str, torch.Tensor] = {}
    for file in sorted(model.glob("model*.safetensors")):
        found |= load_file(file)
    return found


def same_models(one: Path, other: Path) -> str:
    left, right = weights(one), weights(other)
    for name in sorted(set(left) | set(right)):
        if name not in left or name not in right:
            raise DifferentError(f"{name} is in {one if name in left else other} only")
        if not equal(left[name], right[name]):
            raise DifferentError(f"{name} is different")
    return f"{one} and {other}: {len(left)} tensors, bit for bit"


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
    most = float((expected - written["logits"]).abs().max())
    if not most < TOLERANCE:
        raise DifferentError(f"logits of {model} differ by {most:.2g} from the framework's")
    size = float(expected.abs().max())
    return f"{model}: {expected.numel()} logits up to {size:.2g}, at most {most:.1g} from the framework's"


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
    found, most, different = weights(result), 0.0, 0
    for name, tensor in found.items():
        left, right = expected[name].float(), tensor.float()
        different += int((left != right).sum())
        most = max(most, float(((left - right).abs() / left.abs().clamp(min=1e-3)).max()))
    if set(expected) != set(found) or not most <= 2**-7:  # an ulp of bf16, where both round
        raise DifferentError(f"{result} differs from peft's merge by {most:.2g}")
    return (
        f"{result}: {len(found)} tensors as peft merges them, {different} numbers off by one rounding of bf16"
    )


def _modules(name: str, rows: torch.Tensor, config: dict[str, Any]) -> list[tuple[str, torch.Tensor]]:
    """Return Hugging Face's modules below one of Megatron's, each with its rows of lora_B."""
    layer, module = name.split(".")[2], name.split(".lora_A.")[0].rpartition(".")[2]
    attention, mlp = f"model.layers.{layer}.self_attn", f"model.layers.{layer}.mlp"
    if module == "linear_qkv":
        groups, heads = config["num_key_value_heads"], config["num_attention_heads"]
        each = rows.view(groups, heads // groups + 2, config["head_dim"], rows.shape[1])
        parts = each[:, :-2], each[:, -2:-1], each[:, -1:]
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
