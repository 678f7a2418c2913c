"""Expands Slurm's lists of hosts (`n[01-03,07],rack[1-2]n[1-4]`), as `scontrol show hostnames` does.

Numbers keep their leading zeros. Several pairs of brackets are several dimensions: the last one runs fastest.
Slurm orders three and more in another way; the first host is the same, and the others are only counted.
"""

from __future__ import annotations

import itertools
import re

from adaptor.launchers.platforms.reading import PlatformError, shown

# Slurm's own limit for one range (MAX_RANGE in its hostlist.c).
MOST = 65536
_PART = re.compile(r"\[([^\[\]]*)\]|([^\[\],\s]+)", re.ASCII)
_RANGE = re.compile(r"([0-9]{1,9})(?:-([0-9]{1,9}))?", re.ASCII)


def expand(host_list: str, source: str) -> list[str]:
    """Return the hosts of the list `host_list`.

    Args:
        host_list: the list.
        source: the variable that has it, for errors.

    Raises:
        PlatformError: it is no such list, or names more than 65,536 hosts.
    """
    hosts: list[str] = []
    for entry in _entries(host_list, source):
        parts = [_names(match, host_list, source) for match in _PART.finditer(entry)]
        count = 1
        for part in parts:
            count *= len(part)
        if len(hosts) + count > MOST:
            raise PlatformError(f"{source} is {shown(host_list)}: these are more than {MOST} hosts")
        hosts += map("".join, itertools.product(*parts))
    if not hosts:
        raise PlatformError(f"{source} is {shown(host_list)}: it names no host")
    return hosts


def _entries(host_list: str, source: str) -> list[str]:
    """Split at the commas that are in no brackets."""
    entries = re.findall(r"(?:\[[^\[\]]*\]|[^\[\],\s])+", host_list)
    # What is left over are separators, or a bracket without its other half.
    if re.sub(r"[,\s]", "", host_list) != re.sub(r"[,\s]", "", "".join(entries)):
        raise PlatformError(f"{source} is {shown(host_list)}: a bracket has no other half")
    return entries


def _names(match: re.Match[str], host_list: str, source: str) -> list[str]:
    if match[2] is not None:
        return [match[2]]
    names: list[str] = []
    for text in match[1].split(","):
        ends = _RANGE.fullmatch(text.strip())
        low, high = (int(ends[1]), int(ends[2] or ends[1])) if ends else (1, 0)
        if ends is None or low > high:
            raise PlatformError(f"{source} is {shown(host_list)}: {shown(text)} is no range of numbers")
        if len(names) + high - low >= MOST:
            raise PlatformError(f"{source} is {shown(host_list)}: these are more than {MOST} hosts")
        names += [str(number).zfill(len(ends[1])) for number in range(low, high + 1)]
    return names
