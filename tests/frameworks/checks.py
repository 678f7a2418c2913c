"""The checks of `by_hand`: layouts, faults, and their expected outcomes."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass, replace

from tests.faults import framework_log, harness, outcome, scenario
from tests.faults.harness import DP2, DP3_FP32, ITERATIONS, MOE_EP2, PP2_DP2, TP2_DP2, Ended, Job, Layout
from tests.faults.same import differences
from tests.faults.scenario import Baseline


@dataclass(frozen=True)
class Check:
    """A fault in a layout, and its expected outcome.

    Attributes:
        nodes: the number of agents; several are in network namespaces.
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
    result = harness.run(job)
    assert result.code == 0, result.log[-3000:]
    outcome.assert_same_training(result, baseline.records)
    return result


def survives(step: int, code: int = 137) -> Callable[[Job, Baseline], Ended]:
    return lambda job, baseline: scenario.survives(job, baseline, code=code, saved={step}, resumed=True)


def saves(step: int) -> Callable[[Job, Baseline], Ended]:
    return lambda job, baseline: scenario.ends(job, baseline, code=137, saved={step})[0]


def has_local_copy(step: int) -> Callable[[Job, Baseline], Ended]:
    def has_local_copy(job: Job, baseline: Baseline) -> Ended:
        result, _ = scenario.ends(job, baseline, code=137, saved={step})
        assert f"step {step} is saved, step {step + 1} was not finished on every rank" in result.last_line
        scenario.goes_on(job, baseline, step)
        return result

    return has_local_copy


def restarts(step: int) -> Callable[[Job, Baseline], Ended]:
    return lambda job, baseline: scenario.restarts(job, baseline, saved={step})


def recovers(job: Job, baseline: Baseline) -> Ended:
    """Assert that a job trains on without a restart, with the baseline's records, log and last checkpoint."""
    assert job.save is not None
    # A rank that hangs is noticed by its standing still.
    result = harness.run(replace(job, options=("--ttp-online", "60", "--ttp-hang", "10")))
    assert result.code == 0, result.log[-3000:]
    assert "1 incident (1 without a restart), 0 steps lost" in result.log, result.log[-3000:]
    (saved,) = set(outcome.steps_in(job.save)) - {ITERATIONS}
    # A rank that was killed when all had finished the step has not recorded it.
    outcome.assert_same_training(result, baseline.records, steps=set(range(1, ITERATIONS + 1)) - {saved})
    framework_log.assert_same(result, baseline)
    names = [f"iter_{step:07d}" for step in (saved, ITERATIONS)]
    assert [differences(job.save / name, baseline.checkpoints / name) for name in names] == [[], []]
    return result


def copies(step: int) -> Callable[[Job, Baseline], Ended]:
    """Assert that a job resumes from copies in host memory, and that their checkpoint equals the
    framework's.
    """

    def copies(job: Job, baseline: Baseline) -> Ended:
        assert job.save is not None
        result = harness.run(replace(job, options=("--ttp-host-copy", "2")))
        assert set(result.codes) == {0}, result.log[-3000:]
        line = f"[ttp] step {step} is written from the copies in host memory (nothing was saved)"
        assert line in result.said, result.log[-3000:]
        name = f"iter_{step:07d}"
        assert differences(job.save / name, baseline.checkpoints / name) == []
        outcome.assert_same_training(result, baseline.records)
        return result

    return copies


# What a job says at its start that is not recovered online; the reason differs.
NOT_ONLINE = re.compile(r"\[ttp\] online recovery: no \(.+\); a fault restarts all ranks$", re.MULTILINE)


def is_not_online(step: int) -> Callable[[Job, Baseline], Ended]:
    def is_not_online(job: Job, baseline: Baseline) -> Ended:
        result = restarts(step)(replace(job, options=("--ttp-online", "60")), baseline)
        assert len(NOT_ONLINE.findall(result.log)) == 1, result.log[:3000]
        return result

    return is_not_online


def refused(line: str) -> Callable[[Job, Baseline], Ended]:
    def refused(job: Job, baseline: Baseline) -> Ended:
        result = harness.run(job)
        assert result.code == 2, result.log[-3000:]
        assert result.last_line.startswith(f"ttprun: error: {line}"), result.log[-3000:]
        assert "Traceback" not in result.log, result.log[-3000:]
        assert not any(result.records.values())
        return result

    return refused


SHARDED = replace(DP2, name="dp2-torch_dist", extra=("--ckpt-format", "torch_dist"))
# With experts, and saves by another process.
SHARDED_EXPERTS = replace(
    MOE_EP2, name="moe-dp4-ep2-async", extra=(*MOE_EP2.extra, *SHARDED.extra, "--async-save")
)
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
        SHARDED,
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
# With tied ones, 0.12 itself asserts in `_build_model_param_gbuf_map` (benchmarks/results/by_hand.md).
STAGES = replace(PP2_DP2, name="pp2-dp2-untied", extra=("--untie-embeddings-and-output-weights",))
SAID = "`online recovery: no` at the start; "
RECOVERED = "recovered online, bitwise"
# Of the versions with which that has been tested.
ONLINE = {
    f"online-{name}": Check(
        layout, f"{fault} of rank 1, {phase} of step 6", recovers, RECOVERED, spec, restarts=1
    )
    for name, layout, fault, phase, spec in (
        ("backward", DP2, "SIGKILL", "backward", "rank=1,step=6,phase=backward,kind=sigkill"),
        ("update", DP2, "SIGKILL", "update", "rank=1,step=6,phase=update,kind=sigkill"),
        ("exception", DP2, "an exception", "backward", "rank=1,step=6,phase=backward,kind=exception"),
        ("hang", DP2, "a hang", "backward", "rank=1,step=6,phase=backward,kind=deadlock"),
        ("tensor", TP2_DP2, "SIGKILL", "backward", "rank=1,step=6,phase=backward,kind=sigkill"),
        ("torch_dist", SHARDED, "SIGKILL", "gather", "rank=1,step=6,phase=gather,kind=sigkill"),
        ("experts", SHARDED_EXPERTS, "SIGKILL", "backward", "rank=1,step=6,phase=backward,kind=sigkill"),
        ("pipeline", STAGES, "SIGKILL", "gather", "rank=1,step=6,phase=gather,kind=sigkill"),
    )
}
REFUSED = "refused in one line before the first step"


SPLIT_REFUSED = Check(
    replace(DP2, replica="split"), "none", refused("TTP_REPLICA is split, but Megatron-core "), REFUSED
)
