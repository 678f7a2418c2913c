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


def section(where: str, command: str, tables: Sequence[str], summary: Sequence[str], what: str = WHAT) -> str:
    """Return `tables` and `summary` as they were printed; `command` makes all of it again.

    Args:
        where: the machine, in words.
        command: the command line.
        tables: of the incidents.
        summary: lines.
        what: the first paragraphs.
    """
    what = what.format(online=ONLINE, restart=RESTART, explained=EXPLAINED, failed=FAILED)
    return text_of(what, where, command, tables, summary)


def tables_of(found: Sequence[Incident], jobs: Sequence[Mapping[str, Any]]) -> tuple[list[str], list[str]]:
    """Return the tables, and the lines that sum them up."""
    records: Counter[str] = Counter()
    for one in jobs:
        records[one["cut"]] += one["records"]
    saved = sum(one["cut"] not in LIBRARY for one in jobs)  # a loop of one's own here saves nothing itself
    count = Counter(one.outcome for one in found)
    summary = [
        f"{len(found)} incidents in {len(jobs)} jobs: "
        + ", ".join(f"{count[name]} {name}" for name in OUTCOMES)
        + f"; a second fault struck in {sum(len(one.struck) > 1 for one in found)} of them.",
        f"{sum(records.values())} records (loss, grad norm) and {saved} last checkpoints were compared.",
        f"Jobs that failed: {sum(bool(one['problems']) for one in jobs)}.",
    ]
    if times := sorted(one.seconds for one in found if one.seconds):
        middle = statistics.median(times)
        summary.append(
            f"From the fault until all go on: {middle:.2f} s (median; {times[0]:.2f} to {times[-1]:.2f})."
        )
    together = [one for one in found if any(Fault.parse(text).also is not None for text in one.struck)]
    if together:
        alone = [one for one in found if one not in together]
        summary.append(
            f"In {len(together)} of them another rank was killed in the same moment: {_cell(together)}"
            f" ({ONLINE} / {RESTART} / {EXPLAINED}); in the others {_cell(alone)}."
        )
    summary += [f"PROBLEM: {problem}" for one in jobs for problem in one["problems"]]
    whys = Counter(one.why for one in found if one.outcome == RESTART)
    tables = [_phase_table(found), _layout_table(found, records)]
    if any(one.struck[1:] for one in found):
        tables.insert(1, _second_table(found))
    if whys:
        rows = [[why, n] for why, n in whys.most_common()]
        tables.append(table(["why all were started again", "incidents"], rows))
    return tables, summary


def _cell(found: Sequence[Incident]) -> str:
    if not found:
        return "–"
    count = Counter(one.outcome for one in found)
    failed = f", {count[FAILED]} {FAILED}" if count[FAILED] else ""
    return f"{count[ONLINE]} / {count[RESTART]} / {count[EXPLAINED]}{failed}"


def _phase_table(found: Sequence[Incident]) -> str:
    kinds = [kind for kind in KINDS if any(one.kind == kind for one in found)]
    rows = []
    struck = {one.phase for one in found}
    elsewhere = [phase for phase in struck - {"", *CHOICE} if phase in PHASES]
    usual = [phase for phase in CHOICE if phase in struck or not elsewhere]
    for phase in [*usual, *sorted(elsewhere), ""]:
        here = [one for one in found if phase in ("", one.phase)]
        times = [one.seconds for one in here if one.seconds]
        rows.append(
            [
                PHASES[phase] if phase else "all",
                *(_cell([one for one in here if one.kind == kind]) for kind in kinds),
                _cell(here),
                f"{statistics.median(times):.2f}" if times else "–",
            ]
        )
    return table(["the fault strikes", *kinds, "all", "fault to all going on, s (median)"], rows)


def _second_table(found: Sequence[Incident]) -> str:
    seconds: dict[str, list[Incident]] = {}
    for one in found:
        for text in one.struck[1:]:
            fault = Fault.parse(text)
            who = "the new process" if fault.restart == NEWCOMERS else "a survivor"
            seconds.setdefault(f"{who}: {PHASES[fault.phase]}", []).append(one)
    return table(
        ["the second fault strikes", "incidents"],
        [[words, _cell(seconds[words])] for words in sorted(seconds)],
    )


def _layout_table(found: Sequence[Incident], records: Counter[str]) -> str:
    rows = [
        [name, cut.words, _cell([one for one in found if one.cut == name]), records[name]]
        for name, cut in ALL.items()
        if any(one.cut == name for one in found)
    ]
    return table(["layout", "", "incidents", "records as in the undisturbed run"], rows)
