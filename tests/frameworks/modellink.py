"""The command and the arguments with which ModelLink at commit af1347 trains a tiny Llama.

The script is ModelLink's own `pretrain_llama.py`, on a corpus of random tokens, with the stand-ins of
tests/standins for the parts of an Ascend machine.
"""

from __future__ import annotations

import json
import os
import shlex
import struct
from collections.abc import Sequence
from pathlib import Path

import numpy

STANDINS = Path(__file__).resolve().parents[1] / "standins"
VOCABULARY = 502
TOKENS = 20_000
# Two micro-batches on each of four ranks.
TINY = """
    --DDP-impl local --num-layers 2 --hidden-size 64 --ffn-hidden-size 96 --num-attention-heads 4
    --seq-length 32 --max-position-embeddings 32 --position-embedding-type rope --normalization RMSNorm
    --no-bias-gelu-fusion --hidden-dropout 0.1 --attention-dropout 0.1 --init-method-std 0.02
    --make-vocab-size-divisible-by 1 --split 100,0,0 --num-workers 0 --distributed-backend nccl
    --micro-batch-size 1 --lr 1e-3 --min-lr 1e-5 --lr-decay-style cosine
    --lr-warmup-iters 2 --clip-grad 0.5 --weight-decay 0.1 --eval-iters 0 --eval-interval 1000000
    --log-interval 1
"""
# Gradients overflow at a scale of 2**20: the fifth step is skipped; see `args.FP16`.
PRECISIONS = {
    "bf16": "--bf16",
    "fp16": "--fp16 --initial-loss-scale 524288 --loss-scale-window 4 --hysteresis 1",
}


def corpus(folder: Path) -> tuple[Path, Path]:
    """Write random tokens and a tokenizer below `folder`: the data's prefix, and the tokenizer's folder."""
    tokenizer = folder / "tokenizer"
    tokenizer.mkdir(parents=True)
    (tokenizer / "tokenizer_config.json").write_text(json.dumps({"vocab_size": VOCABULARY}))
    tokens = numpy.random.default_rng(1234).integers(0, VOCABULARY, TOKENS, dtype=numpy.uint16)
    sizes = numpy.full(10, TOKENS // 10, dtype=numpy.int32)
    pointers = numpy.arange(10, dtype=numpy.int64) * sizes[0] * tokens.itemsize
    prefix = folder / "corpus_text_document"
    prefix.with_suffix(".bin").write_bytes(tokens.tobytes())
    header = b"MMIDIDX\x00\x00" + struct.pack("<QBQQ", 1, 8, 10, 11)
    documents = numpy.arange(11, dtype=numpy.int64)
    prefix.with_suffix(".idx").write_bytes(
        header + sizes.tobytes() + pointers.tobytes() + documents.tobytes()
    )
    return prefix, tokenizer


def tiny_llama(
    data: tuple[Path, Path],
    *,
    processes: int,
    train_iters: int = 8,
    save: Path | None = None,
    load: Path | None = None,
    save_interval: int = 1000,
    precision: str = "bf16",
    tp: int = 1,
    pp: int = 1,
    distributed_optimizer: bool = True,
    extra: Sequence[str] = (),
) -> list[str]:
    """Return arguments of `pretrain_llama.py`: 2 layers, hidden 64, two micro-batches on each rank."""
    prefix, tokenizer = data
    args = [*shlex.split(TINY), *shlex.split(PRECISIONS[precision])]
    args += ["--global-batch-size", str(2 * processes // (tp * pp))]
    if "--train-samples" not in extra:
        args += ["--train-iters", str(train_iters)]
    args += ["--tensor-model-parallel-size", str(tp), "--pipeline-model-parallel-size", str(pp)]
    args += ["--data-path", str(prefix), "--tokenizer-name-or-path", str(tokenizer)]
    if distributed_optimizer:
        args += ["--use-distributed-optimizer"]
    if save is not None:
        args += ["--save", str(save), "--save-interval", str(save_interval)]
    if load is not None:
        args += ["--load", str(load)]
    return [*args, *extra]


def environment(tree: Path, **variables: str) -> dict[str, str]:
    """Return the framework's variables: paths of checkout and stand-ins, permission for old pickles.

    torch.jit.script is off: it cannot compile the stand-ins for torch's functions.
    """
    path = [str(STANDINS), str(STANDINS / "hugging_face"), str(tree), os.environ.get("PYTHONPATH", "")]
    return {
        "PYTHONPATH": os.pathsep.join(filter(None, path)),
        "TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD": "1",
        "PYTORCH_JIT": "0",
        # What pads a buffer is memory that the framework has not written to: let it find zeros there.
        "MALLOC_PERTURB_": "255",
        **variables,
    }
