"""The versions of frameworks in which jobs were trained, with faults; the runs: docs/compatibility.md.

Statements about tested versions in reports, lines and documents are made from this list, or compared with it.
"""

from __future__ import annotations

from collections.abc import Sequence

# All since 0.12 with online recovery, too.
MEGATRON = ("0.8", "0.12", "0.13", "0.14", "0.15", "0.16", "0.17", "0.18", "0.19", "0.20")
ONLINE = MEGATRON[1:]
# Megatron-core 0.6, on which ModelLink was trained.
CORE = ("0.6", *MEGATRON)


def specifier(minors: Sequence[str]) -> str:
    """Return the PEP 440 specifier of all releases of `minors`, like 0.15, in their order."""
    numbers = [_number(minor) for minor in minors]
    gaps = [f"!=0.{number}.*" for number in range(numbers[0], numbers[-1]) if number not in numbers]
    return ",".join([f">={minors[0]}", *gaps, f"<0.{numbers[-1] + 1}"])


def words(minors: Sequence[str]) -> str:
    """Return `minors` in words, like `0.8 and 0.12 to 0.20`."""
    runs: list[list[str]] = []
    for minor in minors:
        if runs and _number(minor) == _number(runs[-1][-1]) + 1:
            runs[-1].append(minor)
        else:
            runs.append([minor])
    return " and ".join(run[0] if len(run) == 1 else f"{run[0]} to {run[-1]}" for run in runs)


def _number(minor: str) -> int:
    return int(minor.removeprefix("0."))


MEGATRON_SPECIFIER = specifier(CORE)
# ModelLink has no version in its package; a commit is named.
MODELLINK = "commit af1347"
# Of MindSpeed and MindSpeed-LLM.
MINDSPEED = ">=2.0,<26.2"

# Megatron-core 0.6 does not have this module: what came later may be missing there, too.
SINCE_0_7 = "megatron.core.distributed.distributed_data_parallel_config"
