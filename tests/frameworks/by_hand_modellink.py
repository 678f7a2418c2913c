"""Checks a checkout of ModelLink: `python -m tests.frameworks.by_hand_modellink TREE --out OUT`.

The script trains a tiny Llama with ModelLink's own `pretrain_llama.py` on the CPU, with the stand-ins of
tests/standins, with faults and without. It prints a row for each check (`modellink_bench`;
benchmarks/results/by_hand.md). With `--faults N` random ranks die or raise at random places instead, and the
script prints how often the job recovered online. The exit code is 1 if a check has failed.
"""

from __future__ import annotations

import argparse
import random
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

from tests.faults.harness import ITERATIONS, Job, Layout
from tests.frameworks import modellink
from tests.frameworks.by_hand import HEADER
from tests.frameworks.modellink_bench import Bench, Check

DP4 = Layout("dp4", 4)
DP3 = Layout("dp3", 3)
DP2 = Layout("dp2", 2)


class Llama:
    """A `Program` of the harness: ModelLink's `pretrain_llama.py`."""

    def __init__(self, tree: Path, data: tuple[Path, Path]) -> None:
        self.environment = modellink.environment(tree)
        self._tree, self._data = tree, data

    def __call__(self, job: Job) -> list[str]:
        layout = job.layout
        arguments = modellink.tiny_llama(
            self._data,
            processes=layout.processes,
            train_iters=ITERATIONS,
            save=job.save,
            load=job.load,
            save_interval=job.save_interval,
            precision=layout.precision,
            tp=layout.tp,
            pp=layout.pp,
            distributed_optimizer=layout.distributed_optimizer,
            extra=(*layout.extra, *job.arguments),
        )
        return [str(self._tree / "pretrain_llama.py"), *arguments]


def killed(rank: int, step: int, phase: str) -> tuple[str, str]:
    """Return a SIGKILL as text, and as a fault of the harness."""
    places = {"backward": "backward of", "update": "update of", "door-after": "at the door of"}
    return (
        f"SIGKILL of rank {rank}, {places[phase]} step {step}",
        f"rank={rank},step={step},phase={phase},kind=sigkill",
    )


# An interrupted update is undone from the local copy, as the other holder is gone.
BREAKS_OFF = (
    "exception of rank 0 in the update of step 6, SIGKILL of rank 1",
    "rank=0,step=6,phase=update,kind=exception,also=1",
)
LOCAL_COPY = ("--local-copy-os",)
# The saved step is one that the framework skipped.
SKIPPED = ("SIGKILL of rank 1, backward of step 6; step 5 was skipped", killed(1, 6, "backward")[1])
DP2_FP16 = replace(DP2, name="dp2-fp16", precision="fp16")
DP3_FP16 = replace(DP3, name="dp3-fp16", precision="fp16")
ZEROS = Layout("dp4-zeros", 4, extra=("--log-num-zeros-in-grad",))
SEQUENCE = Layout("tp2-dp2-sequence", 4, tp=2, extra=("--sequence-parallel",))
EVALUATION = ("--eval-interval", "5", "--eval-iters", "2", "--split", "90,10,0")
# The learning rate depends on tokens.
TOKENS = ("--lr-decay-tokens", "3000", "--lr-warmup-tokens", "500", "--lr-warmup-iters", "0")
EVALUATED = Layout("dp3-evaluation", 3, extra=(*EVALUATION, *TOKENS))
# Batches of 4, 4, 6, 6, then 8 samples.
RAMPUP = Layout(
    "dp2-rampup",
    2,
    extra=(
        *EVALUATION,
        *("--global-batch-size", "8", "--rampup-batch-size", "4", "2", "16"),
        *("--train-samples", "52", "--lr-warmup-iters", "0"),
    ),
)
WHOLE = replace(DP2, name="dp2-whole-optimizer", distributed_optimizer=False)


def recovers(layout: Layout, fault: str, *spec: str, **check_options: Any) -> Check:
    return Check(layout, fault, " ".join(spec), restarts=1, online=True, **check_options)


EXCEPTION = ("an exception of rank 1, backward of step 6", "rank=1,step=6,phase=backward,kind=exception")
HANG = ("a hang of rank 1, backward of step 6", "rank=1,step=6,phase=backward,kind=deadlock")
GATHER = ("SIGKILL of rank 1, gather of step 6", "rank=1,step=6,phase=gather,kind=sigkill")
TWICE = (
    "SIGKILL of rank 0, backward of step 4, and of rank 3, update of step 6",
    *("rank=0,step=4,phase=backward,kind=sigkill", "rank=3,step=6,phase=update,kind=sigkill"),
)
BETWEEN = (
    "SIGKILL of rank 1 behind step 5, which was skipped",
    "rank=1,step=5,phase=between,kind=sigkill",
)
LAST = ("SIGKILL of rank 0, gather of step 8, the last", "rank=0,step=8,phase=gather,kind=sigkill")
# With tensor parallelism rank 1 reads no data.
IN_EVALUATION = (
    "SIGKILL of rank 1 in the evaluation behind step 5, and of rank 0, gather of step 7",
    *("rank=1,step=5,phase=evaluation,kind=sigkill", "rank=0,step=7,phase=gather,kind=sigkill"),
)
# Without test data, ranks that read no data wait for some (`training.py:1463`).
TENSOR_EVALUATED = Layout("tp2-dp2-evaluation", 4, tp=2, extra=(*EVALUATION[:-1], "80,10,10"))
RECOMPUTE = replace(
    DP2, name="dp2-recompute", extra=("--recompute-granularity", "full", "--recompute-method", "uniform")
)
LOADERS = replace(DP2, name="dp2-loaders", extra=("--num-workers", "2"))
CYCLIC = replace(DP2, name="dp2-cyclic", extra=("--dataloader-type", "cyclic"))
TENSOR = Layout("tp2-dp2", 4, tp=2)
STAGES = Layout("pp2-dp2", 4, pp=2)
ALL = Layout("tp2-pp2-dp2", 8, tp=2, pp=2)
ONLINE = {
    "online-exception": recovers(DP4, *EXCEPTION),
    "online-hang": recovers(DP2, *HANG),
    "online-split": recovers(DP4, *TWICE),
    "online-mirror": recovers(DP3, *killed(0, 4, "backward")),
    "online-mirror-exception": recovers(DP3, *EXCEPTION),
    "online-mirror-gather": recovers(DP3, *GATHER),
    "online-door": recovers(DP2, *killed(1, 6, "door-after")),
    "online-fp16": recovers(DP2_FP16, *killed(1, 6, "backward")),
    "online-whole": recovers(WHOLE, *killed(1, 6, "update")),
    "online-tensor": recovers(TENSOR, *killed(3, 6, "backward")),
    "online-sequence": recovers(SEQUENCE, *killed(1, 6, "update")),
    "online-pipeline": recovers(STAGES, *killed(2, 6, "backward")),
    "online-pipeline-first": recovers(STAGES, *GATHER),
    "online-zeros": recovers(ZEROS, *GATHER),
    "online-evaluation": recovers(EVALUATED, *killed(2, 5, "update")),
    "online-rampup": recovers(RAMPUP, *killed(1, 5, "update")),
    "online-local-copy": recovers(DP2, *killed(1, 6, "update"), options=LOCAL_COPY),
    "online-recompute": recovers(RECOMPUTE, *killed(1, 6, "backward")),
    "online-loaders": recovers(LOADERS, *killed(1, 6, "backward")),
    "online-cyclic": recovers(CYCLIC, *killed(1, 6, "backward")),
    "online-in-evaluation": recovers(EVALUATED, *IN_EVALUATION),
    "online-tensor-evaluation": recovers(TENSOR_EVALUATED, *IN_EVALUATION),
    "online-spare": recovers(
        DP4,
        "SIGKILL of rank 2, backward of step 6, while a spare waits",
        "rank=2,step=6,phase=backward,kind=sigkill-beside-a-spare",
    ),
    "online-local-copy-back": recovers(DP2, *BREAKS_OFF, options=LOCAL_COPY),
    "online-local-copy-mirror": recovers(DP3, *BREAKS_OFF, options=LOCAL_COPY),
    "online-fp16-line": recovers(DP2_FP16, *BETWEEN),
    "online-fp16-mirror": recovers(DP3_FP16, *killed(1, 6, "backward")),
    "online-cold": recovers(DP2, *killed(0, 6, "backward"), spares=0),
    "online-all": recovers(ALL, *killed(6, 6, "update")),
    "online-last": recovers(DP3, *LAST),
    "online-begun": recovers(DP3, *killed(1, 6, "backward"), load=3),
    "online-begun-split": recovers(DP4, *killed(1, 6, "update"), load=3),
    "online-no": Check(
        replace(DP3, name="dp3-auto-recompute", extra=("--auto-recompute-device-size", "57344")),
        f"{killed(0, 4, 'backward')[0]}; TTP_ONLINE=60",
        killed(0, 4, "backward")[1],
        3,
        restarts=1,
        online=True,
    ),
}
# In namespaces of their own, the default port is free.
APART = (("TTP_TLS", "plain"), ("TTP_PORT", "8000"))
ONLINE["online-nodes"] = recovers(
    DP4, "SIGKILL of rank 2, backward of step 6", killed(2, 6, "backward")[1], nodes=2, environment=APART
)
CHECKS = {
    **ONLINE,
    "undisturbed": Check(DP3),
    "split": Check(DP4, *killed(1, 6, "backward"), 5),
    "split-update": Check(DP4, *killed(3, 6, "update"), 6),
    "split-restart": Check(DP4, *killed(2, 4, "backward"), 3, restarts=1),
    "zeros": Check(ZEROS, *killed(2, 4, "backward"), 3, restarts=1),
    "mirror": Check(DP3, *killed(1, 6, "backward"), 5),
    "mirror-update": Check(DP3, *killed(2, 6, "update"), 6),
    "split-fp16": Check(DP2_FP16, *killed(1, 6, "door-after"), 6),
    "split-skipped": Check(DP2_FP16, *SKIPPED, 5),
    "mirror-skipped": Check(DP3_FP16, *SKIPPED, 5),
    "tensor": Check(TENSOR, *killed(3, 6, "door-after"), 6),
    "sequence": Check(SEQUENCE, *killed(3, 6, "backward"), 5),
    "tensor-mirror": Check(Layout("tp2-dp3", 6, tp=2), *killed(4, 6, "backward"), 5),
    "all": Check(ALL, *killed(6, 6, "update"), 6),
    "pipeline": Check(STAGES, *killed(2, 6, "backward"), 5),
    "evaluation": Check(EVALUATED, *killed(1, 5, "door-after"), 5),
    "rampup": Check(RAMPUP, *killed(1, 6, "backward"), 5),
    "local-copy": Check(DP2, *BREAKS_OFF, 5, options=LOCAL_COPY),
    "local-copy-mirror": Check(DP3, *BREAKS_OFF, 5, options=LOCAL_COPY),
    "local-copy-skipped": Check(DP2_FP16, *SKIPPED, 5, options=LOCAL_COPY),
    "whole": Check(WHOLE, *killed(1, 6, "update"), 6),
    "restart": Check(DP3, *killed(0, 4, "backward"), 3, restarts=1),
    "off": Check(DP3, "none, ENABLE_TTP=False", environment=(("ENABLE_TTP", "False"),)),
    "native-split": Check(DP4, *killed(1, 6, "backward"), 5, load=3),
    "native-mirror": Check(DP3, *killed(1, 6, "update"), 6, load=3),
    "nodes": Check(
        DP4,
        "SIGKILL of node 1's ttprun, backward of step 6",
        "rank=2,step=6,phase=backward,kind=agent-sigkill",
        5,
        nodes=2,
        environment=APART,
    ),
    "too-late": Check(
        DP2,
        "SIGKILL of rank 1, backward of step 6; rank 0 hangs as it writes, TTP_OT=10",
        "rank=1,step=6,phase=backward,kind=sigkill rank=0,phase=dump-write,kind=deadlock",
        environment=(("TTP_OT", "10"),),
        last="the state cannot be saved: not done after 10 s (TTP_OT)",
    ),
    "nothing-yet": Check(
        DP2_FP16,
        "SIGKILL of rank 1, backward of step 5, when all steps were skipped",
        "rank=1,step=5,phase=backward,kind=sigkill",
        options=("--initial-loss-scale", "4294967296"),
        last="nothing to save: no step has finished",
    ),
    "lora": Check(
        DP2,
        options=("--lora-target-modules", "dense"),
        last="--lora-target-modules is ['dense']: LoRA cannot be protected yet",
    ),
    "fold": Check(DP2, options=("--foldx-mode", "fifo"), last="--foldx-mode is fifo: a folded pipeline"),
    "no-shards": Check(
        WHOLE,
        options=LOCAL_COPY,
        last="--local-copy-os (TTP_LOCAL_COPY) is given without --use-distributed-optimizer: add",
    ),
    "odd-split": Check(
        replace(DP3, replica="split"),
        last="TTP_REPLICA is split, but the data-parallel size is 3, which is odd",
    ),
    "nodes-restart": Check(DP4, *killed(2, 4, "backward"), 3, restarts=1, nodes=2, environment=APART),
}


# The phases from the forward pass of a step to its log line, before which all ranks meet.
PHASES = ("forward", "backward", "reduction", "door-before", "door-after", "update", "gather", "between")
# Only the distributed optimizer has hooks.
WHOLE_PHASES = tuple(phase for phase in PHASES if phase not in ("reduction", "gather"))
STRUCK = (DP4, DP3, DP2, WHOLE, TENSOR, STAGES, EVALUATED)


def faults(bench: Bench, count: int, seed: int) -> bool:
    """Let a random rank die or raise in each of `count` jobs; return whether all recovered online."""
    draw = random.Random(seed)
    recovered = 0
    for number in range(count):
        layout = draw.choice(STRUCK)
        phase = draw.choice(PHASES if layout.distributed_optimizer else WHOLE_PHASES)
        rank, step = draw.randrange(layout.processes), draw.randrange(2, ITERATIONS)
        # An exception in the middle of an update makes a shard unusable.
        kind = "sigkill" if phase == "update" else draw.choice(("sigkill", "exception"))
        spec = f"rank={rank},step={step},phase={phase},kind={kind}"
        check = recovers(layout, f"{number}: {spec}", spec, spares=draw.randrange(2))
        recovered += bench.check(check, f"fault-{seed}-{number}")
    print(f"{recovered} of {count} random faults recovered online, bitwise (seed {seed})")
    return recovered == count


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("tree", type=Path, help="a checkout of ModelLink")
    parser.add_argument("--out", type=Path, required=True, help="where the jobs run; about 200 MB")
    parser.add_argument("--name", default="ModelLink", help="the commit, for the rows")
    parser.add_argument("--only", action="append", choices=list(CHECKS), help="one check; repeat for more")
    parser.add_argument("--faults", type=int, default=0, help="so many random faults in place of the checks")
    parser.add_argument("--seed", type=int, default=0, help="of the random faults")
    parsed = parser.parse_args()
    tree = parsed.tree.resolve()
    if not (tree / "ascendspeed" / "training.py").is_file():
        parser.error(f"TREE is {parsed.tree}: it has no ascendspeed/training.py, as ModelLink af1347 has")
    data = parsed.out.resolve() / "data"
    if not data.exists():
        modellink.corpus(data)
    llama = Llama(tree, (data / "corpus_text_document", data / "tokenizer"))
    bench = Bench(llama, parsed.out.resolve(), parsed.name)
    print(HEADER)
    if parsed.faults:
        return 0 if faults(bench, parsed.faults, parsed.seed) else 1
    passed = [bench.check(CHECKS[name], name) for name in parsed.only or CHECKS]
    return 0 if all(passed) else 1


if __name__ == "__main__":
    sys.exit(main())
