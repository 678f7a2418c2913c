"""The command, the arguments and the environment with which the tests train a tiny GPT.

Eight iterations take 4.4 s of CPU time in each process, 3.6 s to import torch and the framework, and about
1.1 s with `tests/faults/warm.py`: 20 s in a job of four processes, or 5 s. Costly features are off:
torch.compile (TORCHDYNAMO_DISABLE), more threads than cores, evaluation, worker processes of the data loader,
tensorboard.
"""

from __future__ import annotations

import functools
import os
import shlex
import sys
import sysconfig
from collections.abc import Sequence
from pathlib import Path

import pybind11

RECORD = Path(__file__).with_name("record.py")

# Everything that would need CUDA, Transformer Engine or apex is switched off.
PLAIN = """
    --transformer-impl local --distributed-backend gloo
    --no-masked-softmax-fusion --no-gradient-accumulation-fusion --no-bias-gelu-fusion
    --no-bias-dropout-fusion --no-bias-swiglu-fusion --no-rope-fusion --no-persist-layer-norm
"""
# Two micro-batches on each of four ranks. Mock data needs no files; its tokens reach up to about 4,095.
TINY = """
    --num-layers 2 --hidden-size 64 --num-attention-heads 4 --seq-length 32 --max-position-embeddings 32
    --mock-data --tokenizer-type NullTokenizer --vocab-size 4200 --num-workers 0 --split 100,0,0
    --micro-batch-size 1 --global-batch-size 8 --hidden-dropout 0.1 --attention-dropout 0.1
    --init-method-std 0.02
    --lr 1e-3 --min-lr 1e-5 --lr-decay-style cosine --lr-warmup-iters 2 --clip-grad 1.0 --weight-decay 0.1
    --eval-iters 0 --eval-interval 1000000 --log-interval 1 --distributed-timeout-minutes 2
"""
# fp16: gradients overflow at a scale of 2**18. Starting at half of it and doubling after four good steps, the
# fifth is skipped; from 2**32, the default, the scale would take 15 skipped steps to come down.
FP16 = "--fp16 --initial-loss-scale 131072 --loss-scale-window 4 --hysteresis 1"
PRECISIONS = {"bf16": "--bf16", "fp32": "", "fp16": FP16}


def tiny_gpt(
    *,
    train_iters: int = 8,
    save: Path | None = None,
    load: Path | None = None,
    save_interval: int = 1000,
    precision: str = "bf16",
    tp: int = 1,
    distributed_optimizer: bool = True,
    checkpoint_format: str | None = "torch",
    extra: Sequence[str] = (),
) -> list[str]:
    """Return arguments of `pretrain_gpt.py`: 2 layers, hidden 64, dropout 0.1, cosine decay over
    `train_iters`.

    The learning rate at an iteration depends on `train_iters`, and the framework refuses a checkpoint of a
    run with another value: a resumed run has the same value, a shorter run has `--exit-interval` in `extra`.
    `--train-samples` in `extra` takes the place of iterations, `--data-path` that of mock data. Up to 0.8
    there is no option for the format (`checkpoint_format=None`), which is torch.
    """
    args = [*shlex.split(PLAIN), *shlex.split(TINY), *shlex.split(PRECISIONS[precision])]
    if "--data-path" in extra:
        args.remove("--mock-data")
    args += [
        *(() if "--train-samples" in extra else ("--train-iters", str(train_iters))),
        "--tensor-model-parallel-size",
        str(tp),
    ]
    if checkpoint_format is not None:
        args += ["--ckpt-format", checkpoint_format]
    if distributed_optimizer:
        args += ["--use-distributed-optimizer"]
    if save is not None:
        args += ["--save", str(save), "--save-interval", str(save_interval)]
    if load is not None:
        args += ["--load", str(load)]
    return [*args, *extra]


@functools.cache
def _make_flags() -> str:
    """The variables for which the framework's Makefile would start Python: see `megatron/core/datasets`."""
    includes = rf"-I{sysconfig.get_path('include')}\ -I{pybind11.get_include()}"
    return f" -- LIBEXT={sysconfig.get_config_var('EXT_SUFFIX')} CPPFLAGS={includes}"


# What makes a run quick, and what a user's job does not set: CONTRIBUTING.md has the list.
_QUICK = {"CUDA_DEVICE_MAX_CONNECTIONS": "1", "OMP_NUM_THREADS": "1", "TORCHDYNAMO_DISABLE": "1"}


def environment(*, of_a_user: bool = False, **variables: str) -> dict[str, str]:
    """Return the environment of a job.

    Args:
        of_a_user: with torch.compile, and with the number of threads that torchrun chooses.
        variables: further variables.
    """
    inherited = {name: value for name, value in os.environ.items() if name not in _QUICK}
    return {
        **inherited,
        # The framework calls `make` at every start, which asks the first python3 on PATH what is said here: a
        # fifth of a CPU second.
        "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}",
        "MAKEFLAGS": _make_flags(),
        **({} if of_a_user else _QUICK),
        # What a job does that is started again as a whole; tests of online recovery ask for it.
        "TTP_ONLINE": "0",
        **variables,
    }


def torchrun(processes: int, out: Path, script: Path, arguments: Sequence[str]) -> list[str]:
    """The command for a framework without the adaptor: plain torchrun, the device cpu, recorded into `out`.

    To be run with `environment()` and the directory of the script as working directory.
    """
    launcher = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--standalone",
        "--nproc-per-node",
        str(processes),
    ]
    return [*launcher, "-m", "adaptor.devices", "cpu", str(RECORD), str(out), str(script), *arguments]
