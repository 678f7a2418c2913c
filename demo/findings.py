"""What the demo found out: the rows of its table, and whether everything is as promised."""

from __future__ import annotations

from dataclasses import dataclass

from demo.records import Incident, compare
from demo.runs import Run


@dataclass(frozen=True)
class Findings:
    rows: list[tuple[str, str]]  # name and value
    kept: bool  # no finished step and no bit of a loss was lost


def examine(runs: list[Run], incident: Incident) -> Findings:
    """Compare the calm and the killed run with the reference, and time the incident from the kill."""
    reference, calm, killed = runs
    kill = killed.kill
    assert kill is not None
    finished = max(step.iteration for step in killed.steps if step.restart == 0)
    lost = max(0, finished - incident.saved_step)
    resumed = min((step.time for step in killed.steps if step.restart > 0), default=None)
    compared = {
        calm.title: compare(reference.steps, calm.steps),
        killed.title: compare(reference.steps, killed.steps, unrecorded=incident.saved_step),
    }

    def since_kill(moment: float | None) -> str:
        return "never" if moment is None else f"{(moment - kill.time) * 1000:,.0f} ms"

    rows = [
        ("killed with SIGKILL", f"rank {kill.rank} (pid {kill.pid}), in step {kill.step(killed.steps)}"),
        ("newest step that any rank had finished", str(finished)),
        ("step saved", str(incident.saved_step) if incident.verdict == "saved" else incident.verdict),
        ("steps lost", str(lost)),
        ("from the kill to its detection", since_kill(incident.first("fault-noticed"))),
        ("from the kill to the published checkpoint", since_kill(incident.first("published"))),
        ("from the kill to the first step after the restart", since_kill(resumed)),
    ]
    for title, result in compared.items():
        verdict = f"yes ({result.compared} of them)" if result.equal else f"NO: {result.difference}"
        rows.append((f"losses equal, bit for bit: {title}", verdict))
    rows.append(("seconds of the three runs", " / ".join(f"{run.seconds:.0f}" for run in runs)))
    kept = lost == 0 and incident.verdict == "saved" and all(result.equal for result in compared.values())
    return Findings(rows, kept)
