"""The demo's findings about its killed runs: the way of recovery, the seconds, and the kept promises."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from demo.findings import Survival, examine
from demo.records import Incident, Kill, Step
from demo.runs import RANKS, Run

KILL = Kill(rank=1, pid=7, time=2.5)
RECOVERED = Incident(saved_step=2, verdict="recovered", reason="", path=Path())
SAVED = Incident(saved_step=2, verdict="saved", reason="", path=Path())


def step(iteration: int, rank: int, time: float, restart: int = 0) -> Step:
    return Step(iteration, rank, restart, time, {"lm loss": (1.5).hex()}, None)


def run(title: str, after_s: float = 3.0, restart: int = 0, kill: Kill | None = None) -> Run:
    """Return four steps, a second apart; step 3 ends at `after_s`, a tenth later for each rank."""
    steps = [step(number, rank, float(number)) for number in (1, 2) for rank in range(RANKS)]
    late = [
        step(number, rank, after_s + number - 3 + rank / 10, restart)
        for number in (3, 4)
        for rank in range(RANKS)
    ]
    return Run(title, [], Path(title), 4, steps=steps + late, kill=kill)


REFERENCE, CALM = run("reference"), run("calm")
ONLINE = Survival(run("online", after_s=3.2, kill=KILL), RECOVERED)
RESTART = Survival(run("restart", after_s=9.2, restart=1, kill=KILL), SAVED)


def test_each_way_has_the_seconds_until_all_ranks_have_finished_the_next_step() -> None:
    findings = examine(REFERENCE, CALM, ONLINE, RESTART)
    assert findings.kept
    online, restart = findings.sentences
    assert online == (
        "Online recovery: rank 1 got a new process, the other 3 kept theirs; the next step, 3, was finished"
        " 1.0 s after the kill."
    )
    assert restart == (
        "Save and restart: step 2 was saved, all 4 processes started again; the next step, 3, was finished"
        " 7.0 s after the kill."
    )
    assert (
        "how it went on",
        "from step 2 in a new process (no spare waited), 0 restarts",
        "step 2 saved, 1 restart",
    ) in findings.incidents
    took = "from the kill to the next step finished by all ranks"
    assert (took, "1.0 s", "7.0 s") in findings.incidents


def test_a_spare_process_is_named() -> None:
    """The line of the incident names the process that took the place of the killed process."""
    kill = replace(KILL, spare=9)
    recovered = replace(RECOVERED, reason="rank 1 was ended by SIGKILL; replaced by pid 9, training goes on")
    online = Survival(run("online", after_s=3.2, kill=kill), recovered)
    (way,) = (
        row for row in examine(REFERENCE, CALM, online, RESTART).incidents if row[0] == "how it went on"
    )
    assert way[1] == "from step 2 in the spare process 9, 0 restarts"


def without(survival: Survival, rank: int) -> Survival:
    kept = [step for step in survival.run.steps if step.rank != rank or step.iteration < 3]
    return Survival(replace(survival.run, steps=kept), survival.incident)


@pytest.mark.parametrize(
    "online",
    [
        Survival(RESTART.run, SAVED),
        Survival(RESTART.run, RECOVERED),
        Survival(ONLINE.run, replace(RECOVERED, saved_step=1)),
        without(ONLINE, rank=3),
    ],
    ids=["saved", "restarted", "lost-a-step", "rank-stands-still"],
)
def test_a_run_that_did_not_recover_online_is_no_success(online: Survival) -> None:
    assert not examine(REFERENCE, CALM, online, RESTART).kept


def test_a_run_that_did_not_start_again_shows_no_restart() -> None:
    assert not examine(REFERENCE, CALM, ONLINE, Survival(ONLINE.run, RECOVERED)).kept


def test_another_loss_after_the_recovery_is_no_success() -> None:
    shifted_steps = [
        replace(step, losses={"lm loss": (2.5).hex()}) if step.iteration == 4 else step
        for step in ONLINE.run.steps
    ]
    findings = examine(
        REFERENCE, CALM, Survival(replace(ONLINE.run, steps=shifted_steps), RECOVERED), RESTART
    )
    assert not findings.kept
    assert ("losses equal, bit for bit: online", "NO: iteration 4, rank 0: lm loss") in [
        (name, value[:32]) for name, value in findings.rows
    ]
