"""The report of a worker on its newest collectives, from torch's flight recorder."""

from __future__ import annotations

from typing import NamedTuple

import msgspec

# The most groups in a report; the rest is in the rank's file.
MOST_GROUPS = 64


class Newest(NamedTuple):
    """The newest collective that a rank has begun in a group; its time compares within the rank only."""

    number: int
    name: str
    begun: int


# By the backend and the name of the group.
Collectives = dict[str, Newest]


class _Entry(msgspec.Struct):
    """A record of torch's, version 2.x of the format; other fields are not read."""

    collective_seq_id: int
    process_group: tuple[str, str]
    profiling_name: str
    is_p2p: bool
    record_id: int


class _Dump(msgspec.Struct):
    entries: list[_Entry] = []


class _Report(msgspec.Struct, array_like=True):
    path: str
    groups: Collectives


def newest(dump: object) -> Collectives:
    """Return the newest collective of each group in a dump of torch's recorder. Raises ValidationError."""
    collectives: Collectives = {}
    for entry in msgspec.convert(dump, _Dump).entries:
        backend, _, name = entry.profiling_name.rpartition(":")
        number, group = entry.process_group
        group_text = f"group {number}" + (f" ({group})" if group not in ("", "undefined") else "")
        key = f"{group_text} of {backend}" if backend else group_text
        # Not the greatest number: a new group, after an online recovery, counts from the beginning.
        if not entry.is_p2p and (key not in collectives or collectives[key].begun < entry.record_id):
            collectives[key] = Newest(entry.collective_seq_id, name, entry.record_id)
    last = sorted(collectives.items(), key=lambda pair: -pair[1].begun)[:MOST_GROUPS]
    return dict(last)


def encode(path: str, collectives: Collectives) -> str:
    """Return the report of a rank to the controller: its file, and the newest collective of each group."""
    return msgspec.json.encode(_Report(path, collectives)).decode()


def decode(raw_fields: str) -> tuple[str, Collectives]:
    """Return the file and the collectives in a report. Raises msgspec.MsgspecError."""
    report = msgspec.json.decode(raw_fields, type=_Report)
    return report.path, report.groups
