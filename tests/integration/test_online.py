"""A fault that costs no restart: only the failed rank gets a new process, and training goes on bitwise."""

from __future__ import annotations

import json
import re
import signal
from collections.abc import Collection, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.faults import framework_log, harness, keeping, outcome
from tests.faults.fault import DRILLED, NEWCOMERS
from tests.faults.harness import (
    DP2,
    DP2_FP16,
    DP2_FP32,
    DP2_LOADERS,
    DP2_MIRROR,
    DP2_OVERLAP,
    DP2_RAMPUP,
    DP2_WHOLE,
    DP4,
    ITERATIONS,
    MOE_DP2,
    MOE_EP2,
    MOE_EP2_DP2,
    MOE_EP2_MIRROR,
    MOE_ETP2,
    PP2_DP2,
    TP2_DP2,
    VPP2_DP2_OVERLAP,
    Ended,
    Job,
    Layout,
    job_in,
)
from tests.faults.library import train
from tests.faults.same import differences
from tests.faults.scenario import Baseline, BaselineOf, assert_as_saved, baselines, ends, restarts

# What forward passes add up over a step: for a router's bias, for a loss of routers, and for the log.
MOE_DP2_SUMS = replace(
    MOE_DP2,
    name="moe-dp2-sums",
    extra=(
        *MOE_DP2.extra,
        *("--moe-router-enable-expert-bias", "--moe-router-score-function", "sigmoid"),
        *("--moe-router-bias-update-rate", "0.1"),
        *("--moe-router-load-balancing-type", "global_aux_loss", "--moe-aux-loss-coeff", "0.1"),
        *("--mtp-num-layers", "1", "--position-embedding-type", "rope"),
        *("--moe-shared-expert-intermediate-size", "64", "--moe-shared-expert-overlap"),
        *("--moe-token-dispatcher-type", "alltoall"),
    ),
)
# The first stage has no experts.
MOE_DENSE_STAGE = replace(
    MOE_EP2_DP2,
    name="moe-pp2-dp2-ep2-dense-stage",
    processes=4,
    pp=2,
    extra=(*MOE_EP2_DP2.extra, "--moe-layer-freq", "[0,1]"),
)
# The rank that is killed, and where in the steps 3, 5 and 7: each time the process in its place. The step is
# made again, but for `gather` and `between`, in which all have made its update. Rank 3 writes the log.
KILLED = (
    (1, ("data", "norm", "gather")),
    (3, ("between", "backward", "update")),
    (0, ("backward", "door-after", "reduction")),
    (1, ("door-before", "between", "forward")),
)


def online(tmp_path: Path, layout: Layout, faults: Sequence[str], **job_options: Any) -> Job:
    """Return a job that recovers online, by default from cold processes."""
    options = job_options.pop("options", ("--ttp-spares", "0"))
    return job_in(
        tmp_path,
        layout,
        faults=faults,
        restarts=job_options.pop("restarts", 1),
        options=("--ttp-online", "60", *options),
        **job_options,
    )


def trains_on(
    job: Job,
    baseline: Baseline,
    incidents: int = 1,
    log_interval: int = 1,
    lost_nodes: int = 0,
    written: Collection[int] = (),
) -> Ended:
    """Assert that the job ends well without a restart, and that its training equals the baseline bit for bit.

    The framework's log has a line for every `log_interval` steps, as in the baseline; `framework_log` defines
    the gaps of the steps `written`. `lost_nodes` nodes are killed.
    """
    assert job.save is not None
    result = harness.run(job)
    killed = 128 + signal.SIGKILL
    assert [code for code in result.codes if code] == [killed] * lost_nodes, result.log[-5000:]
    outcome.assert_saved(job.save, ITERATIONS)
    # Each step that all went on from was saved first, and the framework would have saved the same.
    saved = {int(step) for step in re.findall(r"training goes on after step (\d+)", result.log)}
    regular = range(job.save_interval, ITERATIONS, job.save_interval)
    assert outcome.steps_in(job.save) == sorted({*saved, *regular, ITERATIONS}), result.said
    assert_as_saved(job.save, (*saved, ITERATIONS), baseline)
    # The line of a step that all had finished when the rank was killed is written nowhere.
    steps = set(range(1, ITERATIONS + 1)) - saved
    outcome.assert_same_training(result, baseline.records, steps=steps)
    framework_log.assert_same(result, baseline, log_interval, written=written)
    assert {line["restart"] for lines in result.records.values() for line in lines} == {0}
    recoveries = [
        line for line in result.said if re.search(r" training goes on after step \d+, 0 steps lost, ", line)
    ]
    assert len(recoveries) == incidents * job.nodes, result.said
    several = "" if incidents == 1 else "s"
    assert f"{incidents} incident{several} ({incidents} without a restart), 0 steps lost" in result.log
    reports = [json.loads(path.read_text()) for path in job.out.glob("logs/*/incidents/*.json")]
    assert [report["verdict"] for report in reports] == ["recovered"] * incidents
    return result


REPLACED = (
    r"\[ttp\] rank {rank} {how}; replaced by pid \d+, training goes on after step [67], "
    r"0 steps lost, \d+\.\d s after the fault was noticed"
)


BEGINS = re.compile(r"/args\./(iteration|curr_iteration|num_floating_point_operations_so_far): ")


def says(result: Ended, pattern: str) -> bool:
    return any(re.fullmatch(pattern, line) for line in result.said)


@pytest.mark.parametrize(("rank", "phases"), KILLED)
def test_a_rank_is_killed(rank: int, phases: Sequence[str], tmp_path: Path, baseline_of: BaselineOf) -> None:
    faults = [
        f"rank={rank},step={step},phase={phase},kind=sigkill,restart={restart}"
        for step, phase, restart in zip((3, 5, 7), phases, (0, NEWCOMERS, NEWCOMERS), strict=True)
    ]
    # A rank that is killed between two steps leaves the others in a drill.
    job = online(tmp_path, DP4, faults, environment={"TTP_DRILL_EVERY": "1"})
    result = trains_on(job, baseline_of(DP4), incidents=3)
    assert says(result, REPLACED.format(rank=rank, how="was ended by SIGKILL")), result.said
    saved = r"step [23] is saved \(\d.*\); a new process is started"
    assert says(result, rf"\[ttp\] rank {rank} was ended by SIGKILL; {saved}"), result.said
    noticed = rf"\[ttp\] [\dT:-]+Z incident 1, rank {rank} \(pid \d+, host .+\), after step [23], report "
    noticed += r"/.+-1\.json"
    assert says(result, noticed), result.said


def test_an_exception_replaces_nobody(tmp_path: Path, baseline_of: BaselineOf) -> None:
    """At `door-before` all others are READY for step 6, which no rank has finished. No restart is needed."""
    faults = ["rank=1,step=4,phase=backward,kind=exception", "rank=1,step=6,phase=door-before,kind=exception"]
    result = trains_on(online(tmp_path, DP2, faults, restarts=0), baseline_of(DP2), incidents=2)
    assert result.log.count("nobody is replaced") == 2


def test_after_a_read_that_failed_all_start_again(tmp_path: Path, baseline_of: BaselineOf) -> None:
    """A loader with a failed read would skip that data: its rank would be ahead of all others."""
    job = online(tmp_path, DP2, ["rank=1,step=6,phase=read,kind=exception"])
    result = restarts(job, baseline_of(DP2), saved={5})
    assert "not recovered online: rank 1: its data loader has failed, and would leave out" in result.log


def test_with_no_restart_and_no_spare_the_job_saves_and_ends(tmp_path: Path, baseline_of: BaselineOf) -> None:
    """Before the fault a drill shows that the rank's shard differs from the copy that the other rank
    saves.
    """
    faults = [
        "rank=1,step=5,phase=between,kind=flip-moment,code=7",
        "rank=1,step=6,phase=backward,kind=sigkill",
    ]
    job = online(tmp_path, DP2, faults, restarts=0, environment={"TTP_DRILL_EVERY": "1"})
    result, _ = ends(job, baseline_of(DP2), code=137, saved={5})
    assert "no restart is left (--max-restarts), and no spare process waits on its node" in result.log
    (drilled,) = (line for line in result.said if line.startswith("[ttp] drill: "))
    assert re.search(r"step 5 could not be saved bit for bit without rank 1: .* exp_avg of shard", drilled)
    (status,) = job.out.glob("logs/*/status.json")
    assert json.loads(status.read_text())["drill_problem"]


def test_a_loop_of_ones_own_says_at_its_start_that_it_is_not_recovered_online(tmp_path: Path) -> None:
    options = ("--ttp-online", "60")
    fault = "rank=1,step=6,phase=backward,kind=sigkill"
    save = ("--save", str(tmp_path / "save"))
    result = train(tmp_path / "job", *save, layout=DP2, restarts=1, faults=[fault], options=options, code=0)
    reason = "its training loop does not make its steps by protection.run_steps"
    line = f"[ttp] online recovery: no ({reason}); a fault restarts all ranks"
    assert result.said.count(line) == 1
    assert "not recovered online" not in result.log, "it was said"
    assert "restart 1 of 1: from step 5, 0 steps lost" in result.log


def test_a_stage_without_experts_says_at_its_start_that_it_is_not_recovered_online(tmp_path: Path) -> None:
    """Ranks of the stage have empty param groups, because others have such groups for experts."""
    result = harness.run(online(tmp_path, MOE_DENSE_STAGE, [], arguments=("--exit-interval", "1")), code=0)
    reason = "a rank has param groups of other ranks, empty ones, and a new process would have its own alone"
    assert result.said.count(f"[ttp] online recovery: no ({reason}); a fault restarts all ranks") == 1


def test_a_spare_takes_the_place(tmp_path: Path) -> None:
    """With no restart left, torch.compile and data loader processes, as in a user's job."""
    faults = ["rank=1,step=6,phase=backward,kind=sigkill-beside-a-spare"]
    compiler = {  # of both jobs; it compiles neither headers nor tests of the processor ahead
        "TORCHINDUCTOR_CACHE_DIR": str(keeping.root() / "compiled"),
        "TORCHINDUCTOR_CPP_CACHE_PRECOMPILE_HEADERS": "0",
        "TORCHINDUCTOR_VEC_ISA_OK": "1",
    }
    # Processes that compile beside the ranks change no bit, and import torch.
    alone = {**compiler, "TORCHINDUCTOR_COMPILE_THREADS": "1"}
    baseline = baselines(keeping.root(), environment=alone, of_a_user=True)(DP2_LOADERS)
    options: dict[str, Any] = {"options": ("--ttp-spares", "1"), "restarts": 0, "of_a_user": True}
    job = online(
        tmp_path, DP2_LOADERS, faults, environment={**compiler, "TORCH_LOGS": "output_code"}, **options
    )
    result = trains_on(job, baseline)
    assert f"replaced by pid {result.stamps[0]['spare']}, " in result.log
    assert "spare process" not in result.log
    assert "Output code" in result.log, "nothing was compiled"


def test_a_rank_is_replaced_by_a_spare_and_then_again(tmp_path: Path, baseline_of: BaselineOf) -> None:
    """An operator ends the rank (`ttp drill`). The second fault strikes in a function that a framework module
    has imported from another by name: a former spare has the same function as a worker.
    """
    faults = [
        f"rank=1,step={step},phase={phase},kind={kind},restart=-2"
        for step, phase, kind in ((4, "backward", "drilled"), (6, "norm", "sigkill-beside-a-spare"))
    ]
    options = ("--ttp-spares", "1", "--ttp-allow-drill", "True")
    job = online(tmp_path, DP2, faults, options=options)
    result = trains_on(job, baseline_of(DP2), incidents=2)
    for stamp in result.stamps:
        assert f"replaced by pid {stamp['spare']}, " in result.log
    assert "rank 1 was ended by SIGKILL (ttp drill); replaced by pid" in result.log
    assert "\n  recovered; steps lost: 0; " in (job.out / DRILLED).read_text()


def test_a_newcomer_that_is_killed_at_its_start_is_replaced(tmp_path: Path, baseline_of: BaselineOf) -> None:
    """Every replacement of rank 1 is killed: then there are last words, and all ranks restart."""
    faults = [
        "rank=1,step=6,phase=backward,kind=sigkill",
        *["rank=1,phase=start,kind=sigkill,restart=-1"] * 2,
    ]
    result = restarts(online(tmp_path, DP2, faults), baseline_of(DP2), saved={5})
    (path,) = result.job.out.glob("logs/*/incidents/*.json")
    report = json.loads(path.read_text())
    assert report["verdict"] == "saved"
    assert "rank 1 was ended by SIGKILL" in report["reason"]


# A rank is killed in step 4, another rank in step 6. In layouts with one fault `test_layouts.py` kills a rank
# in the other half of a step.
LAYOUTS = (
    (TP2_DP2, ("backward",)),
    (VPP2_DP2_OVERLAP, ("backward", "update")),
    (MOE_EP2, ("update",)),
    (MOE_EP2_MIRROR, ("backward", "update")),
    (MOE_ETP2, ("backward",)),
    (DP2_MIRROR, ("backward",)),
    (DP2_OVERLAP, ("backward", "update")),
    (DP2_FP16, ("backward",)),
    (DP2_FP32, ("backward",)),
    (DP2_WHOLE, ("backward",)),
)


@pytest.mark.parametrize(("layout", "phases"), LAYOUTS, ids=[layout.name for layout, _ in LAYOUTS])
def test_layouts(layout: Layout, phases: Sequence[str], tmp_path: Path, baseline_of: BaselineOf) -> None:
    faults = [
        f"rank={rank},step={step},phase={phase},kind=sigkill"
        for rank, step, phase in zip((1, 0), (4, 6), phases, strict=False)
    ]
    trains_on(online(tmp_path, layout, faults), baseline_of(layout), incidents=len(faults))


def test_sums_of_forward_passes_are_those_of_one_step(tmp_path: Path, baseline_of: BaselineOf) -> None:
    """In step 4 the survivor makes its forward passes twice, the new process once. The log line of step 6 is
    written in the recovery, by collectives over the groups of the sums.
    """
    faults = [
        "rank=1,step=4,phase=reduction,kind=sigkill",
        "rank=1,step=6,phase=gather,kind=sigkill,restart=-1",
    ]
    trains_on(online(tmp_path, MOE_DP2_SUMS, faults), baseline_of(MOE_DP2_SUMS), incidents=2, written=(6,))


def test_with_a_local_copy(tmp_path: Path, baseline_of: BaselineOf) -> None:
    faults = ["rank=1,step=6,phase=backward,kind=sigkill"]
    trains_on(online(tmp_path, DP2, faults, environment={"TTP_LOCAL_COPY": "True"}), baseline_of(DP2))


def test_behind_the_last_step(tmp_path: Path, baseline_of: BaselineOf) -> None:
    """The loop is called again and makes no step; the framework's save at its end equals the baseline's."""
    trains_on(
        online(tmp_path, DP2, [f"rank=0,step={ITERATIONS},phase=gather,kind=sigkill"]), baseline_of(DP2)
    )


def test_pipeline_stages(tmp_path: Path, baseline_of: BaselineOf) -> None:
    """The second fault is in the last stage, which alone knows the losses."""
    faults = ["rank=1,step=4,phase=backward,kind=sigkill", "rank=2,step=6,phase=gather,kind=sigkill"]
    trains_on(online(tmp_path, PP2_DP2, faults), baseline_of(PP2_DP2), incidents=2)


def test_a_save_and_an_evaluation_that_were_interrupted_are_made_again(
    tmp_path: Path, baseline_of: BaselineOf
) -> None:
    """The framework saves after step 4, as the batches grow then, and evaluates after step 5."""
    faults = [
        "rank=1,step=4,phase=save-barrier,kind=sigkill",
        "rank=1,step=5,phase=evaluation-forward,kind=sigkill,restart=-1",  # of the new process
    ]
    job = online(tmp_path, DP2_RAMPUP, faults)
    baseline = baseline_of(DP2_RAMPUP)
    result = harness.run(job, code=0)
    assert "2 incidents (2 without a restart), 0 steps lost" in result.log
    assert job.save is not None
    assert outcome.steps_in(job.save) == [*DP2_RAMPUP.saves, 5, ITERATIONS]
    spent = outcome.spent(job.out / "logs")
    assert min(spent[use] for use in ("data", "evaluation", "save", "other")) > 0
    for step in (4, 5, ITERATIONS):
        name = f"iter_{step:07d}"
        unequal = differences(job.save / name, baseline.checkpoints / name)
        # Where its loop begins, as after a restart: the framework reads none of it from a checkpoint.
        assert [line for line in unequal if not BEGINS.search(line)] == []
    outcome.assert_same_training(result, baseline.records)
    # Rank 0 says what it has found, the first time or again.
    assert re.search(r"validation loss at iteration 5 ", result.log)
