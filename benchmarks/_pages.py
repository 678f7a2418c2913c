"""The section of a campaign in benchmarks/results/campaigns.md."""

from __future__ import annotations

import time
from collections.abc import Sequence

from _verdicts import EXPLAINED, FAILED, LEFT, SURVIVED

WHAT = """\
Jobs of several layouts train a tiny GPT with Megatron-LM's `pretrain_gpt.py` under `ttprun`. Each generation
of their processes is hit by a fault of a random kind, at a random rank, step and phase, and often by a second
one in the incident that the first has opened; then all processes start again (`TTP_ONLINE=0`). All is drawn
from a seed before anything runs; what can be survived follows from which ranks were struck, and which shards
they hold.

- {survived}: the newest finished step is saved, the tracker names it, every file is what the manifest says.
- {explained}: too many ranks were gone; the last line says which shard nobody holds, the newest checkpoint is
  what it was, and nothing is left behind, but for a regular save that the loss of node 0 has interrupted:
  the next start removes it.
- {failed}: anything else.

Kinds: a process ends (`sigkill`, now and then two processes at once; `sigsegv`; `oom`, by the kernel, in a
memory cgroup; `os._exit`, with code 0 or another; `sys.exit`) or raises (`exception`; `nan`: after its
optimizer state has become not finite); it hangs (`deadlock` of its main thread, `sigstop`, `holds-the-gil`);
a process is told to end (`sigterm`), or ttprun (`agent-sigterm`, and `agent-sigint`, which is Ctrl-C), or all
of them (`tree-sigterm`); a node other than the first loses ttprun and its processes (`agent-sigkill`), or the
first does, which has the controller (`controller-sigkill`); the network between two nodes drops all packets,
both ways, and heals some seconds later (`cut`). Jobs of two nodes have a network namespace for each. Where
the network is cut, both sides are judged, and it counts as {survived} if one of them could and did save.

Every loss and grad norm of every rank is compared, bit for bit, with a run of the unmodified framework
without faults. Cells count {survived} / {explained} / {left}, then what {failed}, if anything did; – is where
the seed draws nothing, or where there is no such fault: the framework saves only on some ranks, it can not
hang between two steps, only jobs of two nodes have a network."""


def heading(kinds: Sequence[str], suffix: str = "") -> str:
    """Return the heading of a campaign with faults of `kinds`."""
    return f"Random {'kills' if set(kinds) == {'sigkill'} else 'faults'}{suffix}"


def section(machine: str, command: str, tables: Sequence[str], summary: Sequence[str]) -> str:
    """Return the section of a campaign; `command` repeats or continues the campaign."""
    introduction = WHAT.format(survived=SURVIVED, explained=EXPLAINED, failed=FAILED, left=LEFT)
    return text_of(introduction, machine, command, tables, summary)


def text_of(
    introduction: str, machine: str, command: str, tables: Sequence[str], summary: Sequence[str]
) -> str:
    """Return the section of a campaign; `introduction` describes its tables."""
    parts = [
        introduction,
        f"    {command}",
        f"On {machine}, {time.strftime('%Y-%m-%d')}.",
        "\n".join(f"- {line}" for line in summary),
        *tables,
    ]
    return "\n\n".join(parts)
