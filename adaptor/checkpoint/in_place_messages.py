"""The messages between the writer of archives and their other holders, who write in place (`in_place`)."""

from __future__ import annotations

import enum
import os
from pathlib import Path
from typing import Any, TypeVar

import msgspec
import torch

from adaptor.checkpoint import shard_exchange
from adaptor.checkpoint.file_parts import NotFinite, Region, WrittenPart
from adaptor.checkpoint.shard_exchange import Exchange

T = TypeVar("T")

TOKEN_BYTES = 16
_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")


class Offer(msgspec.Struct):
    """The files of the writer. `token` stands at byte 0 of the first; the holder's belongs at byte `slot`.

    Without files nothing can be laid out, and the holder sends its shards.
    """

    drafts: list[str]
    regions: list[Region]
    token: bytes
    slot: int


class Answer(msgspec.Struct):
    """The first file as a holder sees it; `problem`: why it sees none."""

    kernel: str = ""
    device: int = 0
    inode: int = 0
    token: bytes = b""
    problem: str = ""


class Order(enum.Enum):
    """The order of the writer to a holder: to write for a round, to wait for the next order, to send its
    shards instead, or to leave."""

    WRITE = "write"
    WAIT = "wait"
    SEND = "send"
    END = "end"


class Report(msgspec.Struct):
    """The work of a holder in a round; the parts come when all are on disk."""

    done: bool = False
    failure: str = ""
    parts: list[WrittenPart] = []
    not_finite: list[NotFinite] = []


def seen(descriptor: int) -> Answer:
    """Return which file it is, and for which kernel: on one kernel the same file has one cache."""
    status = os.fstat(descriptor)
    return Answer(_BOOT_ID.read_text().strip(), status.st_dev, status.st_ino)


def send(message: Any, to: int, exchange: Exchange) -> None:
    """Send a message to one rank.

    Args:
        message: one of those above.
        to: the rank, in the exchange.
        exchange: with the process group.

    Raises:
        RuntimeError: from the process group, when that rank is gone.
    """
    content = bytearray(msgspec.msgpack.encode(message))
    for tensor in (torch.tensor([len(content)]), torch.frombuffer(content, dtype=torch.uint8)):
        shard_exchange.group_of(exchange).send([tensor], to, exchange.tag).wait()


def receive(kind: type[T], source: int, exchange: Exchange) -> T:
    """Return the next message of one rank.

    Args:
        kind: of the message.
        source: the rank, in the exchange.
        exchange: with the process group.

    Raises:
        RuntimeError: from the process group, when that rank is gone.
    """
    length = torch.zeros(1, dtype=torch.int64)
    shard_exchange.group_of(exchange).recv([length], source, exchange.tag).wait()
    content = torch.zeros(int(length), dtype=torch.uint8)
    shard_exchange.group_of(exchange).recv([content], source, exchange.tag).wait()
    return msgspec.msgpack.decode(content.numpy().tobytes(), type=kind)
