"""Online recovery of ranks that hang or whose state is torn, and of two at once."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from tests.faults.harness import DP2, DP4, Ended, Layout
from tests.faults.scenario import BaselineOf, restarts
from tests.integration.test_online import online, trains_on


def replacement(result: Ended) -> str:
    """Return the only line about replaced processes."""
    (line,) = [line for line in result.said if "replaced by pid" in line]
    return line


def test_an_exception_inside_the_update(tmp_path: Path, baseline_of: BaselineOf) -> None:
    """The exception leaves a half-made state: the rank is replaced like a dead rank, and its process is
    ended. The report has the stack of the exception.
    """
    job = online(tmp_path, DP2, ["rank=1,step=6,phase=update,kind=exception"])
    result = trains_on(job, baseline_of(DP2))
    assert replacement(result).startswith("[ttp] rank 1 raised ")
    (path,) = job.out.glob("logs/*/incidents/*.json")
    events = json.loads(path.read_text())["events"]
    (calls,) = [
        event["data"]["detail"] for event in events if event["type"] == "calls" and event["rank"] == 1
    ]
    assert "fault.py" in calls.splitlines()[-1]


@pytest.mark.parametrize(
    ("layout", "phase", "kind", "cause"),
    [
        (DP2, "forward", "sigstop", "rank 1 does not answer"),
        (DP2, "data", "deadlock", "rank 1 stands still, others wait; wait (threading.py:"),
        (DP2, "door-before", "deadlock", "rank 1 stands still, others wait; wait (threading.py:"),
        (
            DP4,
            "forward",
            "unanswered",
            "rank 1 waits in another call than most ranks; recv (distributed_c10d.py:",
        ),
    ],
    ids=["stopped", "deadlock", "deadlock before the update", "unanswered"],
)
def test_a_rank_hangs(
    layout: Layout, phase: str, kind: str, cause: str, tmp_path: Path, baseline_of: BaselineOf
) -> None:
    """The rank is ended and replaced; a rank that answers provides its state until the step is saved."""
    job = online(
        tmp_path,
        layout,
        [f"rank=1,step=6,phase={phase},kind={kind}"],
        options=("--ttp-spares", "0", "--ttp-hang", "8"),
    )
    result = trains_on(job, baseline_of(layout))
    assert cause in replacement(result)


def test_a_survivor_with_work_that_gloo_has_dropped_continues(
    tmp_path: Path, baseline_of: BaselineOf
) -> None:
    """Only rank 3 holds its shard: the rank is not replaced, its wait is ended."""
    faults = ["rank=1,step=6,phase=backward,kind=sigkill", "rank=3,step=6,phase=forward,kind=forgotten"]
    result = trains_on(online(tmp_path, DP4, faults), baseline_of(DP4))
    assert re.search(r"rank 1 was ended by SIGKILL; replaced by pid \d+, ", replacement(result))


def test_a_survivor_that_nothing_wakes_is_replaced(tmp_path: Path, baseline_of: BaselineOf) -> None:
    """Rank 2 answers, but its main thread hangs in gloo; rank 0 also holds its shard."""
    faults = ["rank=1,step=6,phase=backward,kind=sigkill", "rank=2,step=6,phase=forward,kind=unending"]
    result = trains_on(online(tmp_path, DP4, faults), baseline_of(DP4))
    assert re.search(r"rank 1 was ended by SIGKILL; replaced by pid \d+ and \d+, ", replacement(result))


def test_where_nobody_else_has_its_shard_the_step_is_saved_at_once(
    tmp_path: Path, baseline_of: BaselineOf
) -> None:
    faults = ["rank=1,step=6,phase=backward,kind=sigkill", "rank=3,step=6,phase=forward,kind=unending"]
    result = restarts(online(tmp_path, DP4, faults), baseline_of(DP4), saved={5})
    assert "not recovered online: rank 3: its main thread hangs in " in result.log
    assert "TTP_ONLINE" not in result.log


# `give`: tests/integration/test_library.py.
@pytest.mark.parametrize("phase", ["regroup", "exchange", "joined"])
def test_the_only_other_holder_dies_while_the_new_process_joins(
    phase: str, tmp_path: Path, baseline_of: BaselineOf
) -> None:
    """Nobody has the shard of ranks 1 and 3 any more; the step was saved before, and nothing is lost."""
    faults = ["rank=1,step=6,phase=backward,kind=sigkill", f"rank=3,phase={phase},kind=sigkill"]
    result = restarts(online(tmp_path, DP4, faults), baseline_of(DP4), saved={5})
    reason = "not recovered online: rank 3 has died, too; nobody else holds shard 1 of group "
    assert f"step 5 is saved, no finished step is lost; {reason}" in result.log
    assert "restart 1 of 1: from step 5, 0 steps lost" in result.log


def test_the_new_process_is_killed_as_it_joins(tmp_path: Path, baseline_of: BaselineOf) -> None:
    """At the transfer of state, afterwards, and before the first step (another incident)."""
    faults = [
        "rank=1,step=4,phase=backward,kind=sigkill",
        "rank=1,phase=get,kind=sigkill,restart=-1",
        "rank=1,step=6,phase=update,kind=sigkill,restart=-1",
        "rank=1,phase=joined,kind=sigkill,restart=-1,since=6",
        "rank=1,phase=proceed,kind=sigkill,restart=-1,since=6",
    ]
    trains_on(online(tmp_path, DP4, faults), baseline_of(DP4), incidents=3)


def test_a_survivor_that_is_stopped_in_the_middle_of_a_recovery_is_replaced(
    tmp_path: Path, baseline_of: BaselineOf
) -> None:
    """Rank 0 has its shard, too."""
    faults = ["rank=1,step=6,phase=backward,kind=sigkill", "rank=2,phase=exchange,kind=sigstop"]
    result = trains_on(online(tmp_path, DP4, faults), baseline_of(DP4))
    assert re.search(r"rank 1 was ended by SIGKILL; replaced by pid \d+ and \d+, ", replacement(result))


def test_a_survivor_that_is_stopped_at_the_order_to_proceed_is_noticed(
    tmp_path: Path, baseline_of: BaselineOf
) -> None:
    """The new process waits for the survivor before both call their loops again."""
    faults = ["rank=1,step=6,phase=backward,kind=sigkill", "rank=0,phase=proceed,kind=sigstop"]
    options = ("--ttp-spares", "0", "--ttp-hang", "8")
    result = trains_on(online(tmp_path, DP2, faults, options=options), baseline_of(DP2), incidents=2)
    assert any("rank 0 does not answer; replaced by pid " in line for line in result.said), result.said


def test_a_new_process_that_is_stopped_in_its_first_step_is_noticed(
    tmp_path: Path, baseline_of: BaselineOf
) -> None:
    faults = [
        "rank=1,step=6,phase=backward,kind=sigkill",
        "rank=1,step=6,phase=backward,kind=sigstop,restart=-1",
    ]
    options = ("--ttp-spares", "0", "--ttp-hang", "8")
    result = trains_on(online(tmp_path, DP2, faults, options=options), baseline_of(DP2), incidents=2)
    assert any("rank 1 does not answer; replaced by pid " in line for line in result.said), result.said


def test_two_ranks_at_once_and_one_later(tmp_path: Path, baseline_of: BaselineOf) -> None:
    """Ranks 0 and 1 hold different shards; later rank 3 gets its shard from the replacement of rank 1.

    Rank 3 writes the log: if it were killed at any moment, as rank 1 is, a line might be written twice.
    """
    faults = ["rank=0,step=4,phase=backward,kind=sigkill,also=1", "rank=3,step=7,phase=between,kind=sigkill"]
    trains_on(online(tmp_path, DP4, faults), baseline_of(DP4), incidents=2)


def test_a_script_that_leaves_its_loop_is_not_waited_for(tmp_path: Path, baseline_of: BaselineOf) -> None:
    """Nobody calls the loop again after `sys.exit`."""
    faults = ["rank=0,step=6,phase=backward,kind=sys.exit,code=7"]
    result = restarts(online(tmp_path, DP2, faults), baseline_of(DP2), saved={5})
    assert "not recovered online: rank 0: its script has left the training loop" in result.log
