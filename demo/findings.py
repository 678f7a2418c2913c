"""The findings of the demo: the rows of its table, and whether all promises were kept."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from demo.records import Incident, Step, compare
from demo.runs import RANKS, Run

ONLINE, SAVED = "recovered", "saved"


@dataclass(frozen=True)
class Findings:
    """The findings of all runs.

    Attributes:
        incidents: name, value of the online run, value of the run with a restart.
        rows: name and value, of all runs together.
        sentences: how each killed run went on.
        kept: whether no finished step and no bit of a loss was lost, and each run recovered in its own way.
    """

    incidents: list[tuple[str, str, str]]
    rows: list[tuple[str, str]]
    sentences: list[str]
    kept: bool


@dataclass(frozen=True)
class Survival:
    """A killed run, and the report of its incident."""

    run: Run
    incident: Incident

    @property
    def goes_on(self) -> float | None:
        """Seconds from the kill until all ranks had finished a later step; None if one never did."""
        kill = self.run.kill
        assert kill is not None
        ends = [
            _first_after(self.run.steps, rank, self.incident.saved_step, kill.time) for rank in range(RANKS)
        ]
        known_ends = [end for end in ends if end is not None]
        return max(known_ends) - kill.time if len(known_ends) == RANKS else None

    @property
    def lost(self) -> int:
        kill = self.run.kill
        assert kill is not None
        finished = max((step.iteration for step in self.run.steps if step.time <= kill.time), default=0)
        return max(0, finished - self.incident.saved_step)

    @property
    def restarts(self) -> int:
        return max((step.restart for step in self.run.steps), default=0)

    def since_kill(self, event: str) -> str:
        """Return the time from the kill to the first event of a type."""
        assert self.run.kill is not None
        moment = self.incident.first(event)
        return "never" if moment is None else _seconds(moment - self.run.kill.time)

    @property
    def sentence(self) -> str:
        assert self.run.kill is not None
        rank, step, took = self.run.kill.rank, self.incident.saved_step, self.goes_on
        outcome = "was never finished" if took is None else f"was finished {took:.1f} s after the kill"
        if self.incident.verdict == ONLINE:
            return (
                f"Online recovery: rank {rank} got a new process, the other {RANKS - 1} kept theirs; "
                f"the next step, {step + 1}, {outcome}."
            )
        if self.incident.verdict == SAVED:
            return (
                f"Save and restart: step {step} was saved, all {RANKS} processes started again; "
                f"the next step, {step + 1}, {outcome}."
            )
        return f"{self.run.title}: {self.incident.verdict}: {self.incident.reason}"


def examine(reference: Run, calm: Run, online: Survival, restart: Survival) -> Findings:
    """Compare the undisturbed and the killed runs with the reference, and time both incidents."""
    killed_runs = (online, restart)
    compared = {
        calm.title: compare(reference.steps, calm.steps),
        online.run.title: compare(reference.steps, online.run.steps, unrecorded=online.incident.saved_step),
        restart.run.title: compare(
            reference.steps, restart.run.steps, unrecorded=restart.incident.saved_step
        ),
    }

    values: dict[str, Callable[[Survival], str]] = {
        "killed with SIGKILL": _killed,
        "how it went on": _way,
        "from the kill to its detection": lambda killed: killed.since_kill("fault-noticed"),
        "from the kill to the next step finished by all ranks": lambda killed: _seconds(killed.goes_on),
        "steps lost": lambda killed: str(killed.lost),
    }
    incidents = [(name, value(online), value(restart)) for name, value in values.items()]
    rows = []
    for title, result in compared.items():
        verdict = f"yes ({result.compared} of them)" if result.equal else f"NO: {result.difference}"
        rows.append((f"losses equal, bit for bit: {title}", verdict))
    runs = (reference, calm, online.run, restart.run)
    rows += [(f"seconds of the run: {run.title}", f"{run.seconds:.0f}") for run in runs]
    kept = (
        (online.incident.verdict, online.restarts) == (ONLINE, 0)
        and (restart.incident.verdict, restart.restarts) == (SAVED, 1)
        and all(killed.lost == 0 and killed.goes_on is not None for killed in killed_runs)
        and all(result.equal for result in compared.values())
    )
    return Findings(incidents, rows, [killed.sentence for killed in killed_runs], kept)


def _first_after(steps: list[Step], rank: int, iteration: int, moment: float) -> float | None:
    """Return when `rank` first finished a step later than `iteration`, after `moment`."""
    return min(
        (
            step.time
            for step in steps
            if step.rank == rank and step.iteration > iteration and step.time > moment
        ),
        default=None,
    )


def _killed(survival: Survival) -> str:
    kill = survival.run.kill
    assert kill is not None
    return f"rank {kill.rank} (pid {kill.pid}), in step {kill.step(survival.run.steps)}"


def _way(survival: Survival) -> str:
    if survival.incident.verdict == ONLINE:
        kill = survival.run.kill
        assert kill is not None
        replaced = f"; replaced by pid {kill.spare}, " in survival.incident.reason
        process = f"the spare process {kill.spare}" if replaced else "a new process (no spare waited)"
        return f"from step {survival.incident.saved_step} in {process}, {survival.restarts} restarts"
    if survival.incident.verdict == SAVED:
        plural = "" if survival.restarts == 1 else "s"
        return f"step {survival.incident.saved_step} saved, {survival.restarts} restart{plural}"
    return survival.incident.verdict


def _seconds(value: float | None) -> str:
    return "never" if value is None else f"{value * 1000:,.0f} ms" if value < 1 else f"{value:.1f} s"
