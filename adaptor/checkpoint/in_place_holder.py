"""The part of a holder in archives that are written in place (`in_place`), and the rounds of all."""

from __future__ import annotations

import functools
import os
import secrets
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from adaptor.checkpoint import disk, in_place_messages, shard_exchange, shards
from adaptor.checkpoint.file_parts import PartWriter, read_all, write_all
from adaptor.checkpoint.in_place_messages import TOKEN_BYTES, Answer, Offer, Order, Report, receive, send
from adaptor.checkpoint.shard_exchange import DumpCancelled, Exchange
from adaptor.errors import CheckpointError

ROUND_S = 1.0  # far below the time-out of a message, which is that of the group


def take_part(optimizers: Sequence[Any], writer: int, exchange: Exchange) -> bool:
    """Write the own parts of the archives of another rank, as a holder; return True if that gathers instead.

    Args:
        optimizers: those of the chain.
        writer: the rank, in the exchange, that makes the archives.
        exchange: with the folder.

    Raises:
        CheckpointError: nothing can be written here, of which the writer has been told; DumpCancelled.
        RuntimeError: from the process group, when the writer is gone.
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
    """Return, per optimizer of the chain, the readers of the shards that this rank gives, by index.

    Args:
        optimizers: those of the chain.
        exchange: which names the shards.

    Raises:
        CheckpointError: it has not what it was chosen for, or no state yet.
    """
    readers: list[Mapping[int, Any]] = []
    for position, optimizer in enumerate(optimizers):
        own_shards: Mapping[int, Any] = {}
        if shards.is_sharded(optimizer) and exchange.rank in exchange.sources[position]:
            own_shards = shard_exchange.own_shards(optimizer, position, exchange)
        for reader in own_shards.values():
            for number, buffer in enumerate(optimizer.buffers):
                for bucket in range(len(buffer.buckets)):
                    for _, _, tensors in reader(number, bucket):
                        for key in shards.KEYS:
                            shards.tensor_of(tensors, key)
        readers.append(own_shards)
    return readers


def _in_rounds(parts: PartWriter, add: Callable[[], None], writer: int, exchange: Exchange) -> Order:
    """Write a while at each order of the writer to write, until it orders to send or to leave.

    Args:
        parts: of this rank.
        add: adds them to it, before the first round.
        writer: the rank, in the exchange.
        exchange: with the folder.

    Returns:
        That order.

    Raises:
        CheckpointError: they cannot be written, of which the writer has been told; DumpCancelled.
    """
    assert exchange.folder is not None
    failed: Exception | None = None
    is_added = False
    while (order := receive(Order, writer, exchange)) in (Order.WRITE, Order.WAIT):
        if order is Order.WAIT:
            continue
        report = Report()
        try:
            if not is_added:
                add()
                is_added = True
            if parts.write_for(ROUND_S):
                report = Report(done=True, parts=parts.parts, not_finite=parts.not_finite)
        except DumpCancelled:
            raise
        except Exception as error:
            failed = _in_one_line(error, exchange.folder)
            report = Report(failure=str(failed) or type(failed).__name__)
        send(report, writer, exchange)
    if failed is not None:
        raise failed
    return order


def _proof(offer: Offer, folder: Path, files: list[int]) -> Answer:
    """Open the files, which are appended to `files`, and leave a token. Raises OSError."""
    descriptor = disk.open_below(folder, offer.drafts[0], os.O_RDONLY)
    try:
        answer = in_place_messages.seen(descriptor)
        if read_all(descriptor, TOKEN_BYTES, 0) != offer.token:
            return Answer(problem=f"{folder}: is another folder than the writer's")
    finally:
        os.close(descriptor)
    # Not for reading as well: a client of NFS would then write pages as a whole that it has read before.
    files += [disk.open_below(folder, draft, os.O_WRONLY) for draft in offer.drafts]
    answer.token = secrets.token_bytes(TOKEN_BYTES)
    write_all(files[0], answer.token, offer.slot)
    os.fsync(files[0])
    return answer


def _in_one_line(error: Exception, folder: Path) -> Exception:
    if isinstance(error, OSError):
        return CheckpointError(f"{folder}: {error.strerror or error}")
    return error
