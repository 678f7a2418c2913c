"""What `by_hand` does to a checkout: layouts, faults, and what has to come of them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

from tests.faults import harness, outcome, scenario
from tests.faults.harness import DP2, DP3_FP32, MOE_DP2, MOE_EP2, PP2_DP2, TP2_DP2, Ended, Job, Layout
from tests.faults.scenario import Baseline


@dataclass(frozen=True)
class Check:
    """What is done to a layout, and what has to come of it."""

    layout: Layout
    fault: str
    run: Callable[[Job, Baseline], Ended]
    outcome: str
    spec: str = ""
    restarts: int = 0
    arguments: tuple[str, ...] = ()


def _undisturbed(job: Job, baseline: Baseline) -> Ended:
    ended = harness.run(job)
    assert ended.code == 0, ended.log[-3000:]
    outcome.assert_same_training(ended, baseline.records)
    return ended


def _survives(step: int, code: int = 137) -> Callable[[Job, Baseline], Ended]:
    return lambda job, baseline: scenario.survives(job, baseline, code=code, saved={step})


def _restarts(step: int) -> Callable[[Job, Baseline], Ended]:
    return lambda job, baseline: scenario.restarts(job, baseline, saved={step})


def _refused(line: str) -> Callable[[Job, Baseline], Ended]:
    def refused(job: Job, baseline: Baseline) -> Ended:
        ended = harness.run(job)
        assert ended.code == 2, ended.log[-3000:]
        assert ended.last_line.startswith(f"ttprun: error: {line}"), ended.log[-3000:]
        assert "Traceback" not in ended.log, ended.log[-3000:]
        assert not any(ended.records.values())
        return ended

    return refused


SAVED = "step {} saved as the framework saves it; plain torchrun goes on from it, bitwise"
CHECKS = {
    "undisturbed": Check(DP2, "none", _undisturbed, "bitwise plain torchrun"),
    "backward": Check(
        DP2,
        "SIGKILL of rank 1, backward of step 6",
        _survives(5),
        SAVED.format(5),
        "rank=1,step=6,phase=backward,kind=sigkill",
    ),
    "update": Check(
        DP3_FP32,
        "SIGKILL of rank 2, update of step 6",
        _survives(6),
        SAVED.format(6),
        "rank=2,step=6,phase=update,kind=sigkill",
    ),
    "tensor": Check(
        TP2_DP2,
        "SIGKILL of rank 3, at the door of step 6",
        _survives(6),
        SAVED.format(6),
        "rank=3,step=6,phase=door-after,kind=sigkill",
    ),
    "torch_dist": Check(
        replace(DP2, name="dp2-torch_dist", extra=("--ckpt-format", "torch_dist")),
        "SIGKILL of rank 1, backward of step 6",
        _survives(5),
        SAVED.format(5),
        "rank=1,step=6,phase=backward,kind=sigkill",
    ),
    "restart": Check(
        DP2,
        "SIGKILL of rank 0, backward of step 4",
        _restarts(3),
        "started again from step 3 by itself, trained to the end, bitwise",
        "rank=0,step=4,phase=backward,kind=sigkill",
        restarts=1,
    ),
}
REFUSED = "refused in one line before the first step"


def _refuses(*arguments: str) -> Check:
    line = f"{arguments[0]} is "
    return Check(DP2, f"none, but `{arguments[0]}`", _refused(line), REFUSED, arguments=arguments)


def _dies(layout: Layout, rank: int, phase: str, saved: int) -> Check:
    words = {
        "norm": "before the gradient norm of",
        "door-after": "at the door of",
        "update": "in the update of",
    }
    return Check(
        layout,
        f"SIGKILL of rank {rank}, {words[phase]} step 6",
        _survives(saved),
        SAVED.format(saved),
        f"rank={rank},step=6,phase={phase},kind=sigkill",
    )


SPLIT_REFUSED = Check(
    replace(DP2, replica="split"), "none", _refused("TTP_REPLICA is split, but Megatron-core "), REFUSED
)
# MindSpeed replaces the layers and the operators of the update, at which the faults above strike.
MINDSPEED = {
    "undisturbed": CHECKS["undisturbed"],
    "norm": Check(
        DP2,
        "SIGKILL of rank 1, before the gradient norm of step 6",
        _survives(5),
        SAVED.format(5),
        "rank=1,step=6,phase=norm,kind=sigkill",
    ),
    "exception": Check(
        DP2,
        "exception in rank 1, before the gradient norm of step 6",
        _survives(5, code=1),
        SAVED.format(5),
        "rank=1,step=6,phase=norm,kind=exception",
    ),
    "door": Check(
        DP2,
        "SIGKILL of rank 1, at the door of step 6",
        _survives(6),
        SAVED.format(6),
        "rank=1,step=6,phase=door-after,kind=sigkill",
    ),
    "restart": Check(
        DP2,
        "SIGKILL of rank 0, before the gradient norm of step 4",
        _restarts(3),
        CHECKS["restart"].outcome,
        "rank=0,step=4,phase=norm,kind=sigkill",
        restarts=1,
    ),
    "availability": Check(
        DP2,
        "none, but `--enable-high-availability`",
        _refused("--enable-high-availability is given"),
        REFUSED,
        arguments=("--enable-high-availability",),
    ),
    "lora": _refuses("--lora-target-modules", "dense"),
    "reuse": _refuses("--reuse-fp32-param"),
}
CP2_DP2 = Layout("cp2-dp2", 4, extra=("--use-mcore-models", "--context-parallel-size", "2"))
# Its own model is another than that of Megatron-core.
MODELLINK = {
    "tensor": CHECKS["tensor"],
    "pipeline": _dies(PP2_DP2, 2, "norm", 5),
    "pipeline-door": _dies(PP2_DP2, 1, "door-after", 6),
    "context": _dies(CP2_DP2, 1, "norm", 5),
    "context-door": _dies(CP2_DP2, 2, "door-after", 6),
    "mcore": replace(
        MINDSPEED["norm"], layout=replace(DP2, name="dp2-core-models", extra=("--use-mcore-models",))
    ),
}
# Where embeddings are tied, Megatron-core 0.12 asserts in its stages if sizes are no multiple of 128.
STAGES = replace(PP2_DP2, name="pp2-dp2-untied", extra=("--untie-embeddings-and-output-weights",))
LLM = {
    "swap": _refuses("--swap-optimizer"),
    "update": _dies(DP2, 1, "update", 6),
    "tensor": _dies(TP2_DP2, 2, "norm", 5),
    "tensor-update": _dies(TP2_DP2, 3, "update", 6),
    "tensor-restart": replace(MINDSPEED["restart"], layout=TP2_DP2),
    "pipeline": _dies(STAGES, 2, "norm", 5),
    "pipeline-update": _dies(STAGES, 1, "update", 6),
}
EXPERTS = {
    "experts": _dies(MOE_DP2, 1, "norm", 5),
    "experts-update": _dies(MOE_DP2, 0, "update", 6),
    "experts-parallel": _dies(MOE_EP2, 1, "norm", 5),
    "experts-parallel-update": _dies(MOE_EP2, 2, "update", 6),
}
