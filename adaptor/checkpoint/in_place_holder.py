"""The part of a holder in archives that are written in place (`in_place`), and the messages with the
writer.
"""

from __future__ import annotations

import enum
import functools
import os
import secrets
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

import msgspec
import torch

from adaptor.checkpoint import disk, shards
from adaptor.checkpoint.file_parts import NotFinite, PartWriter, Region, WrittenPart, read_all, write_all
from adaptor.checkpoint.shards import DumpCancelled, Exchange
from adaptor.errors import CheckpointError

T = TypeVar("T")

TOKEN_BYTES = 16
_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")


class Offer(msgspec.Struct):
    """The files of the writer, whose `token` is at byte 0 of the first; the holder's goes to byte `slot`.

    Without files nothing can be laid out, and the holder sends its shards.
    """

    drafts: list[str]
    regions: list[Region]
    token: bytes
    slot: int


class Answer(msgspec.Struct):
    """The first file as a holder sees it; `problem`: why the holder sees no file."""

    kernel: str = ""
    device: int = 0
    inode: int = 0
    token: bytes = b""
    problem: str = ""


class Order(enum.Enum):
    """The order of the writer to a holder: write for a round, wait, send your shards instead, or leave."""

    WRITE = "write"
    WAIT = "wait"
    SEND = "send"
    END = "end"


class HolderReport(msgspec.Struct):
    """The work of a holder in a round; the parts come when all are on disk."""

    done: bool = False
    failure: str = ""
    parts: list[WrittenPart] = []
    not_finite: list[NotFinite] = []


def seen(descriptor: int) -> Answer:
    """Return the identity of a file, with the kernel: on one kernel the same file has one cache."""
    status = os.fstat(descriptor)
    return Answer(_BOOT_ID.read_text().strip(), status.st_dev, status.st_ino)


def send(message: Any, to: int, exchange: Exchange) -> None:
    """Send a message of a class above to one rank of the exchange. Raises RuntimeError if it is gone."""
    content = bytearray(msgspec.msgpack.encode(message))
    for tensor in (torch.tensor([len(content)]), torch.frombuffer(content, dtype=torch.uint8)):
        shards.group_of(exchange).send([tensor], to, exchange.tag).wait()


def receive(kind: type[T], source: int, exchange: Exchange) -> T:
    """Return the next message of one rank of the exchange. Raises RuntimeError if the rank is gone."""
    length = torch.zeros(1, dtype=torch.int64)
    shards.group_of(exchange).recv([length], source, exchange.tag).wait()
    content = torch.zeros(int(length), dtype=torch.uint8)
    shards.group_of(exchange).recv([content], source, exchange.tag).wait()
    return msgspec.msgpack.decode(content.numpy().tobytes(), type=kind)


ROUND_S = 1.0  # far below the time-out of a message, which is the time-out of the group


def take_part(optimizers: Sequence[Any], writer: int, exchange: Exchange) -> bool:
    """Write the own parts of the archives of `writer`, as a holder; return True if the writer gathers
    instead.

    Raises CheckpointError (nothing can be written, as the writer has been told), DumpCancelled, RuntimeError
    (the writer is gone).
    """
    assert exchange.folder is not None
    own_by_optimizer = own_readers(optimizers, exchange)
    offer = receive(Offer, writer, exchange)
    if not offer.drafts:
        return True
    files: list[int] = []
    try:
        try:
            answer = _proof(offer, exchange.folder, files)
        except OSError as error:
            answer = Answer(problem=f"{error.filename or exchange.folder}: {error.strerror or error}")
        send(answer, writer, exchange)
        with PartWriter(files, exchange) as parts:
            add = functools.partial(parts.add_shards, offer.regions, optimizers, own_by_optimizer)
            return _in_rounds(parts, add, writer, exchange) is Order.SEND
    finally:
        for descriptor in files:
            os.close(descriptor)


def own_readers(optimizers: Sequence[Any], exchange: Exchange) -> list[Mapping[int, Any]]:
    """Return, per optimizer, the readers of the shards that this rank gives. Raises CheckpointError."""
    readers: list[Mapping[int, Any]] = []
    for position, optimizer in enumerate(optimizers):
        own_shards: Mapping[int, Any] = {}
        if shards.is_sharded(optimizer) and exchange.rank in exchange.sources[position]:
            own_shards = shards.own_shards(optimizer, position, exchange)
        for reader in own_shards.values():
            for number, buffer in enumerate(optimizer.buffers):
                for bucket in range(len(buffer.buckets)):
                    for _, _, tensors in reader(number, bucket):
                        for key in shards.KEYS:
                            shards.tensor_of(tensors, key)
        readers.append(own_shards)
    return readers


def _in_rounds(parts: PartWriter, add: Callable[[], None], writer: int, exchange: Exchange) -> Order:
    """Write for a round at each order, after `add`; return the first order to send or to leave."""
    assert exchange.folder is not None
    failed: Exception | None = None
    is_added = False
    while (order := receive(Order, writer, exchange)) in (Order.WRITE, Order.WAIT):
        if order is Order.WAIT:
            continue
        report = HolderReport()
        try:
            if not is_added:
                add()
                is_added = True
            if parts.write_for(ROUND_S):
                report = HolderReport(done=True, parts=parts.parts, not_finite=parts.not_finite)
        except DumpCancelled:
            raise
        except Exception as error:
            failed = _in_one_line(error, exchange.folder)
            report = HolderReport(failure=str(failed) or type(failed).__name__)
        send(report, writer, exchange)
    if failed is not None:
        raise failed
    return order


def _proof(offer: Offer, folder: Path, files: list[int]) -> Answer:
    """Open the files, which are appended to `files`, and leave a token. Raises OSError."""
    descriptor = disk.open_below(folder, offer.drafts[0], os.O_RDONLY)
    try:
        answer = seen(descriptor)
        if read_all(descriptor, TOKEN_BYTES, 0) != offer.token:
            return Answer(problem=f"{folder}: is another folder than the writer's")
    finally:
        os.close(descriptor)
    # Not for reading as well: a client of NFS would then write whole pages that it has read before.
    files += [disk.open_below(folder, draft, os.O_WRONLY) for draft in offer.drafts]
    answer.token = secrets.token_bytes(TOKEN_BYTES)
    write_all(files[0], answer.token, offer.slot)
    os.fsync(files[0])
    return answer


def _in_one_line(error: Exception, folder: Path) -> Exception:
    if isinstance(error, OSError):
        return CheckpointError(f"{folder}: {error.strerror or error}")
    return error
