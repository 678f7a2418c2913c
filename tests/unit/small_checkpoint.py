"""A small checkpoint of the format `torch` with random content, of one rank, as Megatron-LM 0.15 has it."""

from __future__ import annotations

import random
from argparse import Namespace
from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch

from adaptor.__main__ import main
from adaptor.checkpoint import layout_file, regular_folder, tracker
from adaptor.protocol import naming
from adaptor.transform import archive, rules
from adaptor.transform.records import StoredTensor

STEP = 7
HIDDEN, HEADS, FFN, LAYERS, VOCABULARY, MULTIPLE = 12, 6, 24, 4, 18, 4


@dataclass(frozen=True)
class Shape:
    """The sizes of a model; `rows` of its vocabulary with padding."""

    hidden: int = HIDDEN
    heads: int = HEADS
    ffn: int = FFN
    layers: int = LAYERS
    vocabulary: int = VOCABULARY
    rows: int = 20


SMALL = Shape()


def arguments(shape: Shape = SMALL, **changes: Any) -> Namespace:
    stored: dict[str, Any] = {
        "num_layers": shape.layers,
        "num_attention_heads": shape.heads,
        "group_query_attention": False,
        "num_query_groups": 1,
        "swiglu": True,
        "untie_embeddings_and_output_weights": False,
        "make_vocab_size_divisible_by": MULTIPLE,
        "vocab_size": shape.vocabulary,
        "padded_vocab_size": shape.rows,
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
    return Namespace(**(stored | changes))


def job_arguments(save: Path, load: Path | None = None, **sizes: int) -> Namespace:
    """The framework's arguments of a job with the model and `sizes` (tp, pp, dp)."""
    return arguments(
        load=str(load or save),
        save=str(save),
        ckpt_format="torch",
        ckpt_step=None,
        tensor_model_parallel_size=sizes.get("tp", 1),
        pipeline_model_parallel_size=sizes.get("pp", 1),
        data_parallel_size=sizes.get("dp", 1),
    )


def _shapes(shape: Shape) -> dict[str, tuple[int, ...]]:
    hidden, ffn = shape.hidden, shape.ffn
    shapes: dict[str, tuple[int, ...]] = {"embedding.word_embeddings.weight": (shape.rows, hidden)}
    for layer in range(shape.layers):
        shapes |= {
            f"decoder.layers.{layer}.{name}": shape_of_weight
            for name, shape_of_weight in {
                "input_layernorm.weight": (hidden,),
                "self_attention.linear_proj.weight": (hidden, hidden),
                "self_attention.linear_qkv.weight": (3 * hidden, hidden),
                "self_attention.linear_qkv.bias": (3 * hidden,),
                "mlp.linear_fc1.weight": (2 * ffn, hidden),
                "mlp.linear_fc2.weight": (hidden, ffn),
            }.items()
        }
    return {**shapes, "decoder.final_layernorm.weight": (hidden,)}


def random_states() -> dict[str, Any]:
    """Random states of one rank, as the framework saves them."""
    return {
        "random_rng_state": random.Random(1).getstate(),
        "np_rng_state": numpy.random.RandomState(1).get_state(),
        "torch_rng_state": torch.Generator().manual_seed(1).get_state(),
        "cuda_rng_state": torch.zeros(16, dtype=torch.uint8),
        "rng_tracker_states": {
            "model-parallel-rng": torch.ones(16, dtype=torch.uint8),
            "data-parallel-rng": torch.Generator().manual_seed(2).get_state(),
        },
    }


def write(
    root: Path, shape: Shape = SMALL, *, rng_state: bool = False, described: bool = False, **changes: Any
) -> dict[str, torch.Tensor]:
    """Write the checkpoint of STEP below `root`, with a manifest; return the weights.

    Args:
        shape: the sizes of the model.
        rng_state: with random states.
        described: the optimizer's layout matches no rule, and a layout file describes it.
        changes: stored arguments.
    """
    draw = torch.Generator().manual_seed(1)
    model: OrderedDict[str, Any] = OrderedDict()
    starts, at = {}, 0
    for name, size in _shapes(shape).items():
        model[name] = torch.randn(size, generator=draw).bfloat16()
    model["output_layer._extra_state"] = None
    ordered = list(_shapes(shape)) if described else list(reversed(_shapes(shape)))
    for name in ordered:
        at = -(-at // (96 if described else 64)) * (96 if described else 64)
        starts[name] = at
        at += model[name].numel()
    state = {kind: torch.zeros(at) for kind in ("param", "exp_avg", "exp_avg_sq")}
    for name in reversed(_shapes(shape)):
        start, count = starts[name], model[name].numel()
        for kind, full in state.items():
            drawn = torch.randn(count, generator=draw)
            full[start : start + count] = model[name].float().flatten() if kind == "param" else drawn
    group = {"lr_mult": 1.0, "is_expert_parallel": False, "is_decoupled_lr": False, "step": STEP}
    body = {
        "args": arguments(shape, **changes),
        "checkpoint_version": 3.0,
        "iteration": STEP,
        "model": model,
        "optimizer": {
            "optimizer": {"param_groups": [{"wd_mult": 1.0, **group}, {"wd_mult": 0.0, **group}]},
            "grad_scaler": {"scale": torch.tensor([4096.0]), "growth_tracker": 3},
        },
        "opt_param_scheduler": {"num_steps": 8},
        "rng_state": [random_states()] if rng_state else [],
    }
    folder = root / naming.regular_name(STEP) / "mp_rank_00"
    folder.mkdir(parents=True)
    dtypes = torch.bfloat16, torch.float32
    torch.save(body, folder / naming.MODEL_FILE)
    torch.save(
        {"buckets_coalesced": True, 0: {dtypes: {**state, "numel_unpadded": at}}},
        folder / naming.OPTIMIZER_FILE,
    )
    if described:
        (folder.parent / naming.LAYOUT).write_bytes(layout_file.join([layout(shape, starts, at)]))
    regular_folder.publish_regular(root, STEP)
    tracker.advance(root, STEP)
    return {name: value for name, value in model.items() if value is not None}


def layout(shape: Shape, starts: Mapping[str, int], numel: int, **changes: Any) -> bytes:
    """Return the layout of the only rank as the framework describes it; params begin at `starts`."""
    entries = []
    for name, size in _shapes(shape).items():
        cut = rules.cut_of(name, gated=True)
        pieces = rules.pieces(cut, size[cut.axis], 0, 1) if cut.axis is not None else ()
        entries.append(
            layout_file.Entry(
                name,
                dtype="bfloat16",
                shape=size,
                key=name,
                whole=size,
                axis=cut.axis,
                pieces=pieces,
                layer=rules.layer_of(name),
                padded=cut.rows,
                param=True,
            )
        )
    entries.append(layout_file.Entry("output_layer._extra_state"))
    places = [
        layout_file.ParamPlace("model", name, start, start + prod(_shapes(shape)[name]))
        for name, start in starts.items()
    ]
    groups = ((1.0, 1.0, False, False), (0.0, 1.0, False, False))
    buffer = layout_file.BufferLayout(("bfloat16", "float32"), numel, tuple(places))
    description: dict[str, Any] = {
        "format": layout_file.FORMAT,
        "folder": "mp_rank_00",
        "tp": 0,
        "pp": 0,
        "ep": 0,
        "sizes": {"tp": 1, "pp": 1, "vpp": 1, "ep": 1, "etp": 1, "dp": 1, "cp": 1},
        "core": "0.15.0",
        "args": {"num_layers": shape.layers, "padded_vocab_size": shape.rows},
        "chunks": {"model": tuple(entries)},
        "optimizers": (layout_file.OptimizerLayout(True, groups, (buffer,)),),
    }
    return layout_file.encode(layout_file.RankLayout(**(description | changes)))


def change(file: Path, edit: Any) -> None:
    """Edit an archive's content by `edit`; remove the manifest, whose checksum would differ."""
    content = torch.load(file, weights_only=False)
    edit(content)
    torch.save(content, file)
    (file.parent.parent / naming.MANIFEST).unlink(missing_ok=True)


def contents(root: Path) -> dict[str, bytes]:
    """Return the archives' content by file and place, without random states."""
    content_by_place: dict[str, bytes] = {}
    folder = root / naming.final_name(STEP)

    def walk(place: str, value: Any) -> None:
        if isinstance(value, StoredTensor):
            content_by_place[place] = value.path.read_bytes()[value.offset : value.offset + value.bytes]
        elif isinstance(value, Namespace):
            walk(place, vars(value))
        elif isinstance(value, dict):
            for key, item in value.items():
                walk(f"{place}/{key}", item)
        elif isinstance(value, list):
            for number, item in enumerate(value):
                walk(f"{place}/{number}", item)
        else:
            content_by_place[place] = repr(value).encode()

    for path in sorted(folder.rglob("*.pt")):
        walk(path.relative_to(folder).as_posix(), archive.read(path))
    return content_by_place


def transform(source: Path, target: Path, *options: str) -> int:
    return main(["transform", str(source), str(target), "--workers", "1", *options])


def error_line(capsys: pytest.CaptureFixture[str]) -> str:
    (line,) = [line for line in capsys.readouterr().err.splitlines() if not line.startswith("transform: ")]
    assert line.startswith("python -m adaptor transform: ")
    return line
