"""The section of a campaign of online recovery in benchmarks/results/campaigns.md."""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from _bench import table
from _online import ALL, EXPLAINED, FAILED, KINDS, LIBRARY, ONLINE, OUTCOMES, RESTART, Incident
from _pages import text_of
from _schedule import CHOICE

from tests.faults.fault import NEWCOMERS, PHASES, Fault

WHAT = """\
Jobs of several layouts train a tiny GPT with Megatron-LM's `pretrain_gpt.py` under `ttprun --ttp-online 60`.
Up to six faults strike each job, one after another. The kind of each fault (the columns of the first table),
its rank, its step and its phase are random. `--second` is the share of faults that a second one follows while
the job recovers from the first, in a survivor or in the new process.

- {online}: at most the failed ranks got a new process (an exception may need none), and no step was lost.
- {restart}: last words of the newest finished step were saved, and all workers were started again; the last
  table says why.
- {explained}: nothing was saved because some shard had no holder left, and the last line said so.
- {failed}: anything else.

Every job had to come to its last step. Every loss and grad norm of every rank, and the checkpoint at its end,
were compared bit for bit with a run of the unmodified framework without faults. Half of the jobs have a spare
on each node, the others start a new process. A cell is the number of incidents {online} / {restart} /
{explained}, and of those that {failed}, if there are any."""


def section(
    machine: str, command: str, tables: Sequence[str], summary: Sequence[str], introduction: str = WHAT
) -> str:
    """Return the printed `tables` and `summary`; `command` repeats the campaign.

    Args:
        machine: in words.
        command: the command line.
        tables: of the incidents.
        summary: lines.
        introduction: the first paragraphs.
    """
    introduction = introduction.format(online=ONLINE, restart=RESTART, explained=EXPLAINED, failed=FAILED)
    return text_of(introduction, machine, command, tables, summary)


def tables_of(
    incidents: Sequence[Incident], jobs: Sequence[Mapping[str, Any]]
) -> tuple[list[str], list[str]]:
    """Return the tables of a campaign, and the lines of its summary."""
    records: Counter[str] = Counter()
    for job in jobs:
        records[job["cut"]] += job["records"]
    saved = sum(job["cut"] not in LIBRARY for job in jobs)  # the loops on Megatron-core save nothing
    count = Counter(incident.outcome for incident in incidents)
    summary = [
        f"{len(incidents)} incidents in {len(jobs)} jobs: "
        + ", ".join(f"{count[name]} {name}" for name in OUTCOMES)
        + f"; a second fault struck in {sum(len(incident.struck) > 1 for incident in incidents)} of them.",
        f"{sum(records.values())} records (loss, grad norm) and {saved} last checkpoints were compared.",
        f"Jobs that failed: {sum(bool(job['problems']) for job in jobs)}.",
    ]
    if times := sorted(incident.seconds for incident in incidents if incident.seconds):
        middle = statistics.median(times)
        summary.append(
            f"From the fault until all go on: {middle:.2f} s (median; {times[0]:.2f} to {times[-1]:.2f})."
        )
    together = [
        incident
        for incident in incidents
        if any(Fault.parse(text).also is not None for text in incident.struck)
    ]
    if together:
        alone = [incident for incident in incidents if incident not in together]
        summary.append(
            f"In {len(together)} of them another rank was killed in the same moment: {_cell(together)}"
            f" ({ONLINE} / {RESTART} / {EXPLAINED}); in the others {_cell(alone)}."
        )
    summary += [f"PROBLEM: {problem}" for job in jobs for problem in job["problems"]]
    whys = Counter(incident.why for incident in incidents if incident.outcome == RESTART)
    tables = [_phase_table(incidents), _layout_table(incidents, records)]
    if any(incident.struck[1:] for incident in incidents):
        tables.insert(1, _second_table(incidents))
    if whys:
        rows = [[reason, n] for reason, n in whys.most_common()]
        tables.append(table(["why all were started again", "incidents"], rows))
    return tables, summary


def _cell(incidents: Sequence[Incident]) -> str:
    if not incidents:
        return "–"
    count = Counter(incident.outcome for incident in incidents)
    failed = f", {count[FAILED]} {FAILED}" if count[FAILED] else ""
    return f"{count[ONLINE]} / {count[RESTART]} / {count[EXPLAINED]}{failed}"


def _phase_table(incidents: Sequence[Incident]) -> str:
    kinds = [kind for kind in KINDS if any(incident.kind == kind for incident in incidents)]
    rows = []
    struck = {incident.phase for incident in incidents}
    elsewhere = [phase for phase in struck - {"", *CHOICE} if phase in PHASES]
    usual = [phase for phase in CHOICE if phase in struck or not elsewhere]
    for phase in [*usual, *sorted(elsewhere), ""]:
        of_phase = [incident for incident in incidents if phase in ("", incident.phase)]
        times = [incident.seconds for incident in of_phase if incident.seconds]
        rows.append(
            [
                PHASES[phase] if phase else "all",
                *(_cell([incident for incident in of_phase if incident.kind == kind]) for kind in kinds),
                _cell(of_phase),
                f"{statistics.median(times):.2f}" if times else "–",
            ]
        )
    return table(["the fault strikes", *kinds, "all", "fault to all going on, s (median)"], rows)


def _second_table(incidents: Sequence[Incident]) -> str:
    seconds: dict[str, list[Incident]] = {}
    for incident in incidents:
        for text in incident.struck[1:]:
            fault = Fault.parse(text)
            process = "the new process" if fault.restart == NEWCOMERS else "a survivor"
            seconds.setdefault(f"{process}: {PHASES[fault.phase]}", []).append(incident)
    return table(
        ["the second fault strikes", "incidents"],
        [[stage, _cell(seconds[stage])] for stage in sorted(seconds)],
    )


def _layout_table(incidents: Sequence[Incident], records: Counter[str]) -> str:
    rows = [
        [name, cut.words, _cell([incident for incident in incidents if incident.cut == name]), records[name]]
        for name, cut in ALL.items()
        if any(incident.cut == name for incident in incidents)
    ]
    return table(["layout", "", "incidents", "records as in the undisturbed run"], rows)
