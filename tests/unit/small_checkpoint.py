"""A small checkpoint of the format `torch` with random content, of one rank, as Megatron-LM 0.15 has it."""

from __future__ import annotations

from argparse import Namespace
from collections import OrderedDict
from pathlib import Path
from typing import Any

import torch

from adaptor.checkpoint import regular_folder, tracker
from adaptor.protocol import naming
from adaptor.transform import archive
from adaptor.transform.records import StoredTensor

STEP = 7
HIDDEN, HEADS, FFN, LAYERS, VOCABULARY, MULTIPLE = 12, 6, 24, 4, 18, 4


def arguments(**more: Any) -> Namespace:
    """The arguments that are stored, as far as a transform reads them."""
    said: dict[str, Any] = {
        "num_layers": LAYERS,
        "num_attention_heads": HEADS,
        "group_query_attention": False,
        "num_query_groups": 1,
        "swiglu": True,
        "untie_embeddings_and_output_weights": False,
        "make_vocab_size_divisible_by": MULTIPLE,
        "vocab_size": VOCABULARY,
        "padded_vocab_size": 20,
        "accumulate_allreduce_grads_in_fp32": True,
        "use_distributed_optimizer": True,
        "optimizer": "adam",
        "tensor_model_parallel_size": 1,
        "pipeline_model_parallel_size": 1,
        "virtual_pipeline_model_parallel_size": None,
        "data_parallel_size": 1,
        "world_size": 1,
        "rank": 0,
        "params_dtype": torch.bfloat16,
    }
    return Namespace(**(said | more))


def _shapes() -> dict[str, tuple[int, ...]]:
    shapes: dict[str, tuple[int, ...]] = {"embedding.word_embeddings.weight": (20, HIDDEN)}
    for layer in range(LAYERS):
        shapes |= {
            f"decoder.layers.{layer}.{name}": shape
            for name, shape in {
                "input_layernorm.weight": (HIDDEN,),
                "self_attention.linear_proj.weight": (HIDDEN, HIDDEN),
                "self_attention.linear_qkv.weight": (3 * HIDDEN, HIDDEN),
                "self_attention.linear_qkv.bias": (3 * HIDDEN,),
                "mlp.linear_fc1.weight": (2 * FFN, HIDDEN),
                "mlp.linear_fc2.weight": (HIDDEN, FFN),
            }.items()
        }
    return {**shapes, "decoder.final_layernorm.weight": (HIDDEN,)}


def write(root: Path, **more: Any) -> dict[str, torch.Tensor]:
    """Write the checkpoint of STEP below `root`, with a manifest; return the weights.

    Args:
        more: arguments that are stored.
    """
    draw = torch.Generator().manual_seed(1)
    model: OrderedDict[str, Any] = OrderedDict()
    starts, at = {}, 0
    for name, shape in _shapes().items():
        model[name] = torch.randn(shape, generator=draw).bfloat16()
    model["output_layer._extra_state"] = None
    for name in reversed(_shapes()):
        at = -(-at // 64) * 64
        starts[name] = at
        at += model[name].numel()
    state = {kind: torch.zeros(at) for kind in ("param", "exp_avg", "exp_avg_sq")}
    for name, start in starts.items():
        count = model[name].numel()
        for kind, whole in state.items():
            drawn = torch.randn(count, generator=draw)
            whole[start : start + count] = model[name].float().flatten() if kind == "param" else drawn
    group = {"lr_mult": 1.0, "is_expert_parallel": False, "is_decoupled_lr": False, "step": STEP}
    body = {
        "args": arguments(**more),
        "checkpoint_version": 3.0,
        "iteration": STEP,
        "model": model,
        "optimizer": {
            "optimizer": {"param_groups": [{"wd_mult": 1.0, **group}, {"wd_mult": 0.0, **group}]},
            "grad_scaler": {"scale": torch.tensor([4096.0]), "growth_tracker": 3},
        },
        "opt_param_scheduler": {"num_steps": 8},
        "rng_state": [],
    }
    folder = root / naming.regular_name(STEP) / "mp_rank_00"
    folder.mkdir(parents=True)
    dtypes = torch.bfloat16, torch.float32
    torch.save(body, folder / naming.MODEL_FILE)
    torch.save(
        {"buckets_coalesced": True, 0: {dtypes: {**state, "numel_unpadded": at}}},
        folder / naming.OPTIMIZER_FILE,
    )
    regular_folder.publish_regular(root, STEP)
    tracker.advance(root, STEP)
    return {name: value for name, value in model.items() if value is not None}


def change(file: Path, edit: Any) -> None:
    """Let `edit` change the content of an archive; the manifest goes, which would tell of it."""
    content = torch.load(file, weights_only=False)
    edit(content)
    torch.save(content, file)
    (file.parent.parent / naming.MANIFEST).unlink(missing_ok=True)


def contents(root: Path) -> dict[str, bytes]:
    """What is in the archives of the checkpoint, but random states, by file and place."""
    found: dict[str, bytes] = {}
    folder = root / naming.final_name(STEP)

    def walk(place: str, value: Any) -> None:
        if isinstance(value, StoredTensor):
            found[place] = value.path.read_bytes()[value.offset : value.offset + value.bytes]
        elif isinstance(value, Namespace):
            walk(place, vars(value))
        elif isinstance(value, dict):
            for key, item in value.items():
                walk(f"{place}/{key}", item)
        elif isinstance(value, list):
            for number, item in enumerate(value):
                walk(f"{place}/{number}", item)
        else:
            found[place] = repr(value).encode()

    for path in sorted(folder.rglob("*.pt")):
        walk(path.relative_to(folder).as_posix(), archive.read(path))
    return found
