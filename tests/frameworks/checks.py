"""What `by_hand` does to a checkout: layouts, faults, and what has to come of them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

from tests.faults import harness, outcome, scenario
from tests.faults.harness import DP2, DP3_FP32, TP2_DP2, Ended, Job, Layout
from tests.faults.scenario import Baseline


@dataclass(frozen=True)
class Check:
    """What is done to a layout, and what has to come of it.

    nodes  how many agents; several are in network namespaces
    """

    layout: Layout
    fault: str
    run: Callable[[Job, Baseline], Ended]
    outcome: str
    spec: str = ""
    restarts: int = 0
    arguments: tuple[str, ...] = ()
    nodes: int = 1


def _undisturbed(job: Job, baseline: Baseline) -> Ended:
    ended = harness.run(job)
    assert ended.code == 0, ended.log[-3000:]
    outcome.assert_same_training(ended, baseline.records)
    return ended


def survives(step: int, code: int = 137) -> Callable[[Job, Baseline], Ended]:
    return lambda job, baseline: scenario.survives(job, baseline, code=code, saved={step}, resumed=True)


def saves(step: int) -> Callable[[Job, Baseline], Ended]:
    return lambda job, baseline: scenario.ends(job, baseline, code=137, saved={step})[0]


def has_local_copy(step: int) -> Callable[[Job, Baseline], Ended]:
    def has_local_copy(job: Job, baseline: Baseline) -> Ended:
        ended, _ = scenario.ends(job, baseline, code=137, saved={step})
        assert f"step {step} is saved, step {step + 1} was not finished on every rank" in ended.last_line
        scenario.goes_on(job, baseline, step)
        return ended

    return has_local_copy


def restarts(step: int) -> Callable[[Job, Baseline], Ended]:
    return lambda job, baseline: scenario.restarts(job, baseline, saved={step})


def refused(line: str) -> Callable[[Job, Baseline], Ended]:
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
        survives(5),
        SAVED.format(5),
        "rank=1,step=6,phase=backward,kind=sigkill",
    ),
    "update": Check(
        DP3_FP32,
        "SIGKILL of rank 2, update of step 6",
        survives(6),
        SAVED.format(6),
        "rank=2,step=6,phase=update,kind=sigkill",
    ),
    "tensor": Check(
        TP2_DP2,
        "SIGKILL of rank 3, at the door of step 6",
        survives(6),
        SAVED.format(6),
        "rank=3,step=6,phase=door-after,kind=sigkill",
    ),
    "torch_dist": Check(
        replace(DP2, name="dp2-torch_dist", extra=("--ckpt-format", "torch_dist")),
        "SIGKILL of rank 1, backward of step 6",
        survives(5),
        SAVED.format(5),
        "rank=1,step=6,phase=backward,kind=sigkill",
    ),
    "restart": Check(
        DP2,
        "SIGKILL of rank 0, backward of step 4",
        restarts(3),
        "started again from step 3 by itself, trained to the end, bitwise",
        "rank=0,step=4,phase=backward,kind=sigkill",
        restarts=1,
    ),
}
REFUSED = "refused in one line before the first step"


SPLIT_REFUSED = Check(
    replace(DP2, replica="split"), "none", refused("TTP_REPLICA is split, but Megatron-core "), REFUSED
)
