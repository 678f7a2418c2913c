"""A bit flips on one rank: detected before the next update, the rank is named, the step is undone bitwise."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path

import pytest

from adaptor.protocol import naming
from tests.faults import harness, outcome
from tests.faults.harness import (
    DP2,
    DP2_MIRROR,
    DP2_OVERLAP,
    DP4,
    ITERATIONS,
    MOE_EP2,
    PP2_DP2,
    TP2_DP2,
    Job,
    Layout,
)
from tests.faults.same import differences
from tests.faults.scenario import Baseline, BaselineOf
from tests.integration.test_online import online, trains_on

VERIFIED = ("--ttp-spares", "0", "--ttp-verify-every", "1")


def test_damage_at_rest_is_found_and_undone(tmp_path: Path, baseline_of: BaselineOf) -> None:
    """The first bit flips before the regular save of its step: the other holder's state is saved."""
    faults = [
        "rank=1,step=4,phase=between,kind=flip-moment,code=7",
        "rank=2,step=6,phase=forward,kind=flip-weight,code=3",
    ]
    job = online(tmp_path, DP4, faults, options=VERIFIED, save_interval=4)
    result = trains_on(job, baseline_of(DP4), incidents=2)
    lines = [line for line in result.said if "is corrupt" in line and "training goes on" in line]
    at_rest = r"\[ttp\] rank 1 is corrupt: exp_avg of shard mp_rank_00/\d changed at rest after .* step 4; "
    weights = r"\[ttp\] rank 2 is corrupt: weights of mp_rank_00 changed after their gather, in step 6; "
    assert [bool(re.match(at_rest, lines[0])), bool(re.match(weights, lines[1]))] == [True, True], lines
    assert ["after step 4" in lines[0], "after step 5" in lines[1]] == [True, True], lines
    reports = [
        json.loads(path.read_text()) for path in sorted(result.job.out.glob("logs/*/incidents/*.json"))
    ]
    assert [(report["cause"]["kind"], report["failed"]) for report in reports] == [
        ("corruption", [1]),
        ("corruption", [2]),
    ]


@pytest.mark.parametrize("layout", [DP2_OVERLAP, TP2_DP2, PP2_DP2, MOE_EP2], ids=lambda layout: layout.name)
def test_a_wrong_backward_pass_is_found_by_its_replay(
    layout: Layout, tmp_path: Path, baseline_of: BaselineOf
) -> None:
    faults = ["rank=1,step=5,phase=activation,kind=flip-activation,code=4"]
    job = online(tmp_path, layout, faults, options=(*VERIFIED, "--ttp-replay-every", "1"))
    result = trains_on(job, baseline_of(layout))
    (line,) = (line for line in result.said if "is corrupt" in line and "training goes on" in line)
    assert "differ from their repetition on rank" in line
    assert re.search(r"rank 1 |ranks 0 and 1 \(suspects\)", line), line
    assert "after step 4" in line


def test_a_mirror_is_compared_with_its_owner(tmp_path: Path, baseline_of: BaselineOf) -> None:
    """Damage on the way of gradients has two suspects, who agree on the state before: nobody is replaced."""
    faults = [
        "rank=1,step=4,phase=between,kind=flip-main,code=5",
        "rank=0,step=6,phase=exchanged,kind=flip-transfer,code=9",
    ]
    job = online(tmp_path, DP2_MIRROR, faults, options=VERIFIED)
    result = trains_on(job, baseline_of(DP2_MIRROR), incidents=2)
    at_rest, transfer = (line for line in result.said if "corrupt" in line and "training goes on" in line)
    assert (
        "rank 1 is corrupt: param of shard mp_rank_00/1 changed at rest after the update of step 4" in at_rest
    )
    assert "one of the ranks 0 and 1 (suspects) is corrupt: grad of shard mp_rank_00/1 differs" in transfer
    assert "nobody is replaced, training goes on after step 5" in transfer


def test_with_a_local_copy_an_update_is_undone(tmp_path: Path, baseline_of: BaselineOf) -> None:
    faults = ["rank=1,step=5,phase=updated,kind=flip-variance,code=2"]
    job = online(tmp_path, DP2, faults, options=(*VERIFIED, "--ttp-local-copy", "True"))
    result = harness.run(job, code=0)
    differs = (
        "(suspects) is corrupt: exp_avg_sq of shard mp_rank_00/0 differs between its holders after the update"
    )
    (line,) = (line for line in result.said if differs in line and "training goes on" in line)
    assert "nobody is replaced, training goes on after step 4, later steps are made again" in line
    wrong = "[ttp] rank 1 was wrong in the update of step 5: made again, it has other results"
    assert [line[: len(wrong)] for line in result.said if "was wrong in" in line] == [wrong]
    assert outcome.steps_in(job.save) == [4, ITERATIONS]
    outcome.assert_same_training(result, baseline_of(DP2).records)


def test_damage_is_found_where_the_other_holder_dies_first(tmp_path: Path, baseline_of: BaselineOf) -> None:
    """The new process gets its state from the damaged rank, which still has the sums of its update."""
    faults = [
        "rank=1,step=5,phase=between,kind=flip-main,code=11",
        "rank=0,step=6,phase=forward,kind=sigkill",
    ]
    job = online(tmp_path, DP2, faults, options=VERIFIED, save_interval=4)
    result = harness.run(job, code=0)
    at_rest = "rank 1 is corrupt: param of shard mp_rank_00/0 changed at rest after the update of step 5"
    result.assert_says(at_rest)
    _assert_saved_as_trained(job, baseline_of(DP2))


def test_state_that_changes_while_it_is_saved_is_no_checkpoint(
    tmp_path: Path, baseline_of: BaselineOf
) -> None:
    faults = [
        "rank=1,step=5,phase=dump,kind=flip-main,code=9",
        "rank=0,step=5,phase=forward,kind=sigkill",
    ]
    job = online(tmp_path, DP2, faults, options=VERIFIED, save_interval=3)
    result = harness.run(job, code=0)
    assert "step 4 could not be saved" in result.log
    _assert_saved_as_trained(job, baseline_of(DP2))


def test_the_save_behind_the_last_step_waits_for_the_verdict(tmp_path: Path, baseline_of: BaselineOf) -> None:
    faults = [f"rank=1,step={ITERATIONS},phase=between,kind=flip-main,code=11"]
    job = online(tmp_path, DP2, faults, options=VERIFIED)
    result = harness.run(job, code=0)
    at_rest = f"param of shard mp_rank_00/0 changed at rest after the update of step {ITERATIONS}"
    result.assert_says(at_rest)
    _assert_saved_as_trained(job, baseline_of(DP2))


def test_a_replay_names_the_step_the_rank_and_the_tensor(tmp_path: Path) -> None:
    save = tmp_path / "save"
    options = (*VERIFIED, "--ttp-transcript", "True")
    harness.run(Job(tmp_path / "job", DP2, save=save, save_interval=4, options=options), code=0)
    (transcript,) = (tmp_path / "job").glob("logs/*/transcript.jsonl")
    chosen = ("--from", f"{save}/iter_0000004", "--to", "7", "--compare", str(transcript), "--")
    ttp = (sys.executable, "-m", "adaptor.launchers.cli.ttp", "replay", *chosen)

    def replay(name: str, *faults: str, code: int) -> harness.Ended:
        job = Job(tmp_path / name, DP2, save=save, load=save, faults=faults, options=VERIFIED, prefix=ttp)
        return harness.run(job, code=code)

    equal = replay("equal", code=0)
    assert "all 3 verified steps are equal: 5 to 7" in equal.log.splitlines()
    other_replay = replay("other", "rank=1,step=6,phase=between,kind=flip-moment,code=7", code=1)
    assert "verified step 6 differs; step 5 is equal" in other_replay.log.splitlines()
    assert re.search(
        r"^exp_avg of shard mp_rank_00/\d on rank 1, after step 6$", other_replay.log, re.MULTILINE
    )
    assert outcome.steps_in(save) == [4, ITERATIONS]


def _assert_saved_as_trained(job: Job, baseline: Baseline) -> None:
    """Assert that the last checkpoint equals that of an undisturbed job, except for arguments of the
    restart.
    """
    assert job.save is not None
    folders = (root / naming.final_name(ITERATIONS) for root in (job.save, baseline.checkpoints))
    assert [line for line in differences(*folders) if "/args." not in line] == []
