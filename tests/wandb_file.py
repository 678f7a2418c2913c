"""Reads the file of an offline run of Weights & Biases.

It is a log in the format of LevelDB: blocks of 32 KiB with pieces of records, each with a checksum, a length
and its place in the record. A record is a message of the client's own protocol buffers.
"""

from __future__ import annotations

import json
import struct
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from wandb.proto.wandb_internal_pb2 import Record

BLOCK = 32 * 1024
HEAD = struct.Struct("<4sHB")  # of the file
PIECE = struct.Struct("<IHB")  # checksum, length, place: all of a record, its first, middle or last piece
ALL, LAST = 1, 4


@dataclass(frozen=True)
class WandbRun:
    """The values of each step, and the exit code of the run; None: it was not ended."""

    steps: dict[int, dict[str, Any]]
    exit_code: int | None


def runs(folder: Path) -> list[WandbRun]:
    """Return the offline runs below `folder`, in the order of their starts."""
    files = folder.glob("wandb/offline-run-*/*.wandb")
    return [_read(path) for path in sorted(files, key=lambda path: path.parent.stat().st_ctime_ns)]


def _read(path: Path) -> WandbRun:
    steps: dict[int, dict[str, Any]] = {}
    exit_code = None
    for data in _records(path.read_bytes()):
        record = Record.FromString(data)
        match record.WhichOneof("record_type"):
            case "history":
                values = {_name(item): json.loads(item.value_json) for item in record.history.item}
                assert values["_step"] not in steps
                steps[values["_step"]] = values
            case "exit":
                exit_code = record.exit.exit_code
    return WandbRun(steps, exit_code)


def _name(item: Any) -> str:
    return item.key or "/".join(item.nested_key)


def _records(data: bytes) -> Iterator[bytes]:
    mark, *_ = HEAD.unpack_from(data)
    assert mark == b":W&B"
    at, record = HEAD.size, b""
    while at < len(data):
        if (room := BLOCK - at % BLOCK) < PIECE.size:  # too little for another piece
            at += room
            continue
        checksum, length, place = PIECE.unpack_from(data, at)
        piece = data[at + PIECE.size : at + PIECE.size + length]
        assert zlib.crc32(bytes([place]) + piece) == checksum
        at += PIECE.size + length
        record += piece
        if place in (ALL, LAST):
            yield record
            record = b""
