"""The demo's model, and the four ways to start its training."""

from __future__ import annotations

import dataclasses
import os
import sys
from pathlib import Path

from demo.runs import RANKS, Plan, Run
from tests.frameworks import record

ITERATIONS = 80
LAYERS, HIDDEN, SEQUENCE, BATCH = 3, 128, 128, 16
SETTING = (
    f"Megatron-LM's pretrain_gpt.py, unedited: a GPT-2 of {LAYERS} layers, hidden size {HIDDEN},"
    f" on {RANKS} data-parallel processes (CPU, gloo, bf16, distributed optimizer, dropout),"
    f" {ITERATIONS} iterations of {BATCH} × {SEQUENCE} tokens of the sources of the Python standard library."
)


def tools_environment(megatron: Path) -> dict[str, str]:
    """Return the environment of Megatron's scripts: their tree, and a path that begins with this python3."""
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", os.defpath)])
    return {"PATH": path, "PYTHONPATH": str(megatron)}


def tokenizer_arguments(data: Path) -> list[str]:
    files = ["--vocab-file", str(data / "gpt2-vocab.json"), "--merge-file", str(data / "gpt2-merges.txt")]
    return ["--legacy-tokenizer", "--tokenizer-type", "GPT2BPETokenizer", *files]


def arguments(data: Path) -> list[str]:
    """Return the arguments of pretrain_gpt.py that all runs have."""
    model = f"""
        --num-layers {LAYERS} --hidden-size {HIDDEN} --num-attention-heads 4
        --seq-length {SEQUENCE} --max-position-embeddings {SEQUENCE}
        --attention-dropout 0.1 --hidden-dropout 0.1 --bf16 --use-distributed-optimizer
        --micro-batch-size 2 --global-batch-size {BATCH} --train-iters {ITERATIONS} --seed 1234
        --lr 2e-3 --min-lr 2e-4 --lr-decay-style cosine --lr-warmup-iters 6
        --weight-decay 0.1 --clip-grad 1.0 --adam-beta2 0.95
        --split 100,0,0 --eval-iters 0 --log-interval 1
        --ckpt-format torch --save-interval {10 * ITERATIONS}
        --transformer-impl local --distributed-backend gloo --no-masked-softmax-fusion
        --no-gradient-accumulation-fusion --no-bias-gelu-fusion --no-bias-dropout-fusion
        --no-bias-swiglu-fusion --no-rope-fusion --no-persist-layer-norm
    """
    files = ["--data-path", str(data / "text_text_document"), "--data-cache-path", str(data / "cache")]
    return [*model.split(), *files, *tokenizer_arguments(data)]


def plan_runs(megatron: Path, data: Path, out: Path, kill: Plan) -> list[Run]:
    """Return the runs: undisturbed without and with the adaptor, online recovery, and save and restart.

    The last two runs do `kill`.
    """
    cluster = ["--standalone", "--nproc-per-node", str(RANKS)]  # standalone: the system picks the port
    plain = [sys.executable, "-m", "torch.distributed.run", *cluster, "-m", "adaptor.devices", "cpu"]
    adapted = [sys.executable, "-m", "adaptor.launchers.cli.ttprun", "--ttp-device", "cpu", *cluster]
    environment = tools_environment(megatron)

    def run(name: str, title: str, launcher: list[str], extra: list[str], plan: Plan | None = None) -> Run:
        folder = out / name
        script = [record.__file__, str(folder / "records"), str(megatron / "pretrain_gpt.py")]
        return Run(
            title=title,
            command=[*launcher, *script, *arguments(data), *extra],
            folder=folder,
            iterations=ITERATIONS,
            environment=environment | {"TTP_LOG_PATH": str(folder / "ttp")},
            plan=plan,
        )

    def checkpoints(name: str) -> list[str]:
        return ["--save", str(out / name / "checkpoints"), "--load", str(out / name / "checkpoints")]

    # The adaptor's second copies are Megatron's own two optimizer instances. They sum gradients in another
    # order than a single instance, which shows in the last bits: therefore the run without the adaptor has
    # two instances as well. It saves nothing, because both instances would write the same file at the same
    # time.
    two_instances = ["--num-distributed-optimizer-instances", "2"]
    online, restart = ([*adapted, "--max-restarts", "1", "--ttp-online", seconds] for seconds in ("60", "0"))
    return [
        run("1-torchrun", "torchrun, without the adaptor", plain, two_instances),
        run("2-ttprun", "ttprun, no fault", adapted, checkpoints("2-ttprun")),
        run(
            *("3-online", f"rank {kill.rank} killed, online recovery"),
            *(online, checkpoints("3-online"), dataclasses.replace(kill, last_step=ITERATIONS - 2)),
        ),
        run(
            "4-restart", f"rank {kill.rank} killed, save and restart", restart, checkpoints("4-restart"), kill
        ),
    ]
