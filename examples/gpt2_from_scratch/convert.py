"""Between checkpoints of this example and GPT-2 in Hugging Face's form, both ways.

    python convert.py to-hf checkpoints out --tokenizer tokenizer    # config.json, model.safetensors
    python convert.py from-hf gpt2 checkpoints                        # any folder that has these files

The weights are the same numbers in another order: Hugging Face keeps GPT-2's matrices transposed, and the
queries of all heads before the keys of all heads; here each head has its query, key and value side by side.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import shutil
from pathlib import Path
from typing import Any

import checkpoint
import safetensors
import safetensors.torch
import torch
from config import Config, ModelConfig
from tokenizer import Tokenizer
from torch import Tensor

# Names inside of a block, and whether Hugging Face keeps the matrix transposed.
_BLOCK = {
    "norm1": ("ln_1", False),
    "attention.qkv": ("attn.c_attn", True),
    "attention.out": ("attn.c_proj", True),
    "norm2": ("ln_2", False),
    "mlp.wide": ("mlp.c_fc", True),
    "mlp.out": ("mlp.c_proj", True),
}
_OUTSIDE = {"tokens.weight": "wte.weight", "positions.weight": "wpe.weight"} | {
    f"norm.{kind}": f"ln_f.{kind}" for kind in ("weight", "bias")
}
# What this model does, and a checkpoint must not say otherwise.
_FIXED = {
    "activation_function": "gelu_new",
    "layer_norm_epsilon": 1e-5,
    "scale_attn_weights": True,
    "scale_attn_by_inverse_layer_idx": False,
    "reorder_and_upcast_attn": False,
    "add_cross_attention": False,
    "tie_word_embeddings": True,
}
_FILES = ("vocab.json", "merges.txt")


def names(layers: int) -> dict[str, tuple[str, bool]]:
    """Return, for each weight, its name at Hugging Face, and whether Hugging Face keeps it transposed."""
    all_names = {name: (theirs, False) for name, theirs in _OUTSIDE.items()}
    for layer in range(layers):
        for name, (theirs, transposed) in _BLOCK.items():
            for kind in ("weight", "bias"):
                all_names[f"blocks.{layer}.{name}.{kind}"] = (
                    f"h.{layer}.{theirs}.{kind}",
                    transposed and kind == "weight",
                )
    return all_names


def by_head(weight: Tensor, heads: int) -> Tensor:
    """Bring rows from query, key, value of all heads to those of the first head, of the second, and so on."""
    return weight.view(3, heads, -1, *weight.shape[1:]).transpose(0, 1).reshape(weight.shape)


def by_kind(weight: Tensor, heads: int) -> Tensor:
    """Undo `by_head`."""
    return weight.view(heads, 3, -1, *weight.shape[1:]).transpose(0, 1).reshape(weight.shape)


def to_hf(weights: dict[str, Tensor], model: ModelConfig) -> dict[str, Tensor]:
    """Return the weights of this example as Hugging Face's; additions of LoRA go into their matrices."""
    weights = dict(weights)
    if model.lora_rank:
        for layer in range(model.layers):
            at = f"blocks.{layer}.attention."
            up, down = weights[f"{at}lora.up.weight"], weights[f"{at}lora.down.weight"]
            added = model.lora_alpha / model.lora_rank * up.float() @ down.float()
            weights[f"{at}qkv.weight"] = (weights[f"{at}qkv.weight"].float() + added).to(up.dtype)
    converted = {}
    for name, (theirs, transposed) in names(model.layers).items():
        weight = by_kind(weights[name], model.heads) if ".qkv." in name else weights[name]
        converted["transformer." + theirs] = (weight.t() if transposed else weight).contiguous()
    return converted


def from_hf(weights: dict[str, Tensor], model: ModelConfig) -> dict[str, Tensor]:
    """Return Hugging Face's weights in the form of the example.

    Raises ValueError for a missing weight or another shape.
    """
    weights = {name.removeprefix("transformer."): weight for name, weight in weights.items()}
    shapes = {"wte.weight": (model.vocabulary, model.hidden), "wpe.weight": (model.context, model.hidden)}
    wide = {"attn.c_attn": 3, "mlp.c_fc": 4}
    for layer in range(model.layers):
        for part, times in wide.items():
            shapes[f"h.{layer}.{part}.weight"] = (model.hidden, times * model.hidden)
    converted = {}
    for own_name, (theirs, transposed) in names(model.layers).items():
        if theirs not in weights:
            raise ValueError(f"the weight {theirs} is missing")
        weight = weights[theirs]
        if tuple(weight.shape) != shapes.get(theirs, tuple(weight.shape)):
            raise ValueError(f"{theirs} is {tuple(weight.shape)}, config.json makes it {shapes[theirs]}")
        weight = weight.t() if transposed else weight
        converted[own_name] = (
            by_head(weight.contiguous(), model.heads) if ".qkv." in own_name else weight
        ).contiguous()
    head = weights.get("lm_head.weight")
    if head is not None and not torch.equal(head, weights["wte.weight"]):
        raise ValueError("lm_head.weight is not wte.weight: here the head is tied to the embedding")
    return converted


def hf_config(model: ModelConfig, end: int | None) -> dict[str, Any]:
    """Return what `config.json` says."""
    return {
        "architectures": ["GPT2LMHeadModel"],
        "model_type": "gpt2",
        "vocab_size": model.vocabulary,
        "n_positions": model.context,
        "n_embd": model.hidden,
        "n_layer": model.layers,
        "n_head": model.heads,
        "attn_pdrop": model.dropout,
        "embd_pdrop": model.dropout,
        "resid_pdrop": model.dropout,
        "bos_token_id": end,
        "eos_token_id": end,
        **_FIXED,
    }


def export(folder: Path, out: Path, tokenizer: Path) -> None:
    """Write the newest checkpoint of `folder` as a model for Hugging Face. Raises ValueError."""
    weights, config, about = checkpoint.read(folder)
    loaded = Tokenizer.load(tokenizer)
    checkpoint.require_tokenizer(folder, about, loaded.digest)
    out.mkdir(parents=True, exist_ok=True)
    safetensors.torch.save_file(
        to_hf(weights, config.model), out / "model.safetensors", metadata={"format": "pt"}
    )
    text = json.dumps(hf_config(config.model, loaded.end), indent=2)
    (out / "config.json").write_text(text + "\n", encoding="utf-8")
    for name in _FILES:
        shutil.copyfile(tokenizer / name, out / name)


def import_(source: Path, folder: Path) -> None:
    """Write Hugging Face's GPT-2 in `source` as a checkpoint at step 0. Raises ValueError."""
    if checkpoint.newest(folder) is not None:
        raise ValueError(f"{folder} holds a checkpoint already: choose another folder")
    settings = json.loads((source / "config.json").read_text(encoding="utf-8"))
    for key, value in _FIXED.items():
        if settings.get(key, value) != value:
            raise ValueError(f"{source / 'config.json'} has {key} {settings[key]}: only {value} is supported")
    if settings.get("n_inner") not in (None, 4 * settings["n_embd"]):
        raise ValueError(
            f"{source / 'config.json'} has n_inner {settings['n_inner']}: only four times n_embd is supported"
        )
    model = ModelConfig(
        vocabulary=settings["vocab_size"],
        context=settings["n_positions"],
        hidden=settings["n_embd"],
        layers=settings["n_layer"],
        heads=settings["n_head"],
        dropout=float(settings.get("resid_pdrop", 0.1)),
    )
    loaded = Tokenizer.load(source)
    checkpoint.require_room(loaded, model)
    try:
        weights = safetensors.torch.load_file(source / "model.safetensors")
    except safetensors.SafetensorError as error:
        raise ValueError(f"{source / 'model.safetensors'} is damaged or cut short: {error}") from None
    about = checkpoint.about(dataclasses.replace(Config(), model=model), loaded.digest)
    checkpoint.write(folder, 0, {"iteration": 0, "model": from_hf(weights, model), "about": about})
    checkpoint.publish(folder, 0)


def main() -> None:
    parser = argparse.ArgumentParser(description="convert GPT-2 from and to Hugging Face's form")
    commands = parser.add_subparsers(dest="command", required=True)
    to_hf_command = commands.add_parser("to-hf")
    to_hf_command.add_argument("checkpoint", type=Path, help="folder of checkpoints")
    to_hf_command.add_argument("out", type=Path)
    to_hf_command.add_argument("--tokenizer", type=Path, required=True)
    back = commands.add_parser("from-hf")
    back.add_argument(
        "source", type=Path, help="folder with config.json, model.safetensors and the tokenizer"
    )
    back.add_argument("checkpoint", type=Path, help="folder of checkpoints to write")
    args = parser.parse_args()
    try:
        if args.command == "to-hf":
            export(args.checkpoint, args.out, args.tokenizer)
        else:
            import_(args.source, args.checkpoint)
    except KeyError as error:
        parser.exit(2, f"convert.py: {args.source / 'config.json'} has no {error}\n")
    except (OSError, ValueError) as error:
        parser.exit(2, f"convert.py: {error}\n")


if __name__ == "__main__":
    main()
