"""The archives of a group, written in place by all its holders at the same time.

The writer lays the archives out, makes their files and tells the holders the places of their shards. Each
holder opens the files by its own path, and proves that they are the same files: the holder has read the
writer's token, and the writer reads the holder's token. If a holder does not see the files, all shards are
gathered instead. The writer reads the parts of another kernel again, and compares them with their checksums,
because caches of a shared file system may differ; so nothing depends on the promises of the file system.

Invariants: no two ranks write the same byte after the proof. A file is complete only when all ranks have
reported that their parts are on disk, and the parts leave no hole. A holder writes only between an order of
the writer and its own answer; so between answers and orders the writer works alone.

The ranks work in rounds of a second, so that a rank that waits for another on a slow disk never waits long
for a message; a round without an end is a fault of the rank. A rank that is done is told in each round to
wait.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import time
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
import xxhash

from adaptor.checkpoint import disk, in_place_holder
from adaptor.checkpoint.archive_layout import FileLayout, join_crcs
from adaptor.checkpoint.file_parts import (
    NotFinite,
    PartWriter,
    Region,
    WrittenPart,
    read_all,
    write_all,
)
from adaptor.checkpoint.hashing import BLOCK, DIGEST_BYTES, BlockDigest, crc32
from adaptor.checkpoint.in_place_holder import (
    ROUND_S,
    TOKEN_BYTES,
    Answer,
    HolderReport,
    Offer,
    Order,
    own_readers,
    receive,
    send,
)
from adaptor.checkpoint.planned_tensors import Source
from adaptor.checkpoint.shards import DumpCancelled, Exchange
from adaptor.errors import CheckpointError
from adaptor.protocol.naming import FileEntry

_AHEAD = 4  # blocks that the disk reads while one is given to a reader


class InPlace:
    """The archives of one attempt, as their writer sees them; used as a context.

    `layouts` are by path below the folder, with the source of each planned tensor. `not_finite`: of the
    written elements, with the rank of the exchange that gave them.
    """

    def __init__(
        self,
        layouts: Mapping[str, FileLayout[Source]],
        optimizers: Sequence[Any],
        exchange: Exchange,
        attempt: int,
    ) -> None:
        assert exchange.folder is not None
        self._layouts = dict(layouts)
        self._exchange = exchange
        self._attempt = attempt
        self._temporary_folder = exchange.folder
        self._others = _others(exchange)
        self._optimizers = optimizers
        self._own = own_readers(optimizers, exchange)
        self._drafts = [f"{name}.{attempt}" for name in self._layouts]
        self._files: list[int] = []
        self._foreign: set[int] = set()
        self._parts: list[tuple[int, WrittenPart]] = []
        self._is_complete = False
        self._next_round = 0.0
        self.not_finite: list[tuple[int, NotFinite]] = []

    def __enter__(self) -> InPlace:
        try:
            for draft, layout in zip(self._drafts, self._layouts.values(), strict=True):
                self._files.append(disk.create(self._temporary_folder, draft))
                disk.reserve(self._files[-1], layout.size)
                # At once: a write past the end would keep all other ranks from the file meanwhile.
                os.ftruncate(self._files[-1], layout.size)
        except BaseException as error:
            self.__exit__(type(error), error, None)
            raise
        return self

    def __exit__(self, *_: object) -> None:
        for descriptor in self._files:
            os.close(descriptor)
        if not self._is_complete:
            for draft in self._drafts[: len(self._files)]:
                with contextlib.suppress(OSError):
                    (self._temporary_folder / draft).unlink()

    def write(self) -> bool:
        """Have all parts written; return False if a holder does not see the files: then all holders send.

        Raises CheckpointError (another rank could not write), DumpCancelled, OSError (this rank could not),
        RuntimeError (a peer is gone).
        """
        regions = list(self._regions())
        with PartWriter(self._files, self._exchange) as writer:
            for number, layout in enumerate(self._layouts.values()):
                for entry in layout.entries:
                    if isinstance(entry.content, torch.Tensor):
                        writer.add_content(number, entry.begin, entry.content)
            writer.add_shards(regions, self._optimizers, self._own)
            if not self._is_shared(regions):
                self._order(Order.SEND)
                return False
            self._in_rounds(writer)
        is_unchanged = all(self._is_there(part) for rank, part in self._parts if rank in self._foreign)
        self._order(Order.END if is_unchanged else Order.SEND)
        return is_unchanged

    def finish(self) -> list[FileEntry]:
        """Write the bytes around the data; return the entries of the files, which are on disk afterwards.

        Raises CheckpointError if a part is missing or the disk returns other bytes than written, OSError.
        """
        entries = []
        for number, (name, layout) in enumerate(self._layouts.items()):
            descriptor = self._files[number]
            parts = sorted((part for _, part in self._parts if part.file == number), key=lambda part: part.at)
            for at, data in layout.around(_crcs(name, layout, parts)):
                write_all(descriptor, data, at)
            os.ftruncate(descriptor, layout.size)  # a small file may have been shorter than the proofs
            digest = self._digest(self._drafts[number], layout, parts)
            os.fsync(descriptor)
            entries.append(FileEntry(name, layout.size, None, self._attempt, digest))
        self._is_complete = True
        return entries

    def _regions(self) -> Iterator[Region]:
        for number, layout in enumerate(self._layouts.values()):
            for entry in layout.entries:
                if isinstance(source := entry.content, Source):
                    dtype = str(source.dtype).removeprefix("torch.")
                    yield Region(
                        number,
                        entry.begin,
                        source.position,
                        source.number,
                        source.key,
                        dtype,
                        source.begin,
                        source.end,
                        source.view,
                    )

    def _is_shared(self, regions: list[Region]) -> bool:
        """Offer the files to all other holders; return True if each has proved to see them."""
        if not self._others:
            return True
        token = secrets.token_bytes(TOKEN_BYTES)
        write_all(self._files[0], token, 0)
        os.fsync(self._files[0])
        slots = {rank: TOKEN_BYTES * (1 + number) for number, rank in enumerate(self._others)}
        for rank, slot in slots.items():
            send(Offer(self._drafts, regions, token, slot), rank, self._exchange)
        answers = {rank: receive(Answer, rank, self._exchange) for rank in self._others}
        # Opened anew: at an open a shared file system brings its cache up to date.
        descriptor = disk.open_below(self._temporary_folder, self._drafts[0], os.O_RDONLY)
        try:
            own_identity = in_place_holder.seen(descriptor)
            self._foreign = {
                rank
                for rank, answer in answers.items()
                if (answer.kernel, answer.device, answer.inode)
                != (own_identity.kernel, own_identity.device, own_identity.inode)
            }
            return all(
                not answer.problem and read_all(descriptor, TOKEN_BYTES, slots[rank]) == answer.token
                for rank, answer in answers.items()
            )
        finally:
            os.close(descriptor)

    def _in_rounds(self, writer: PartWriter) -> None:
        """Write the own parts while the other ranks write theirs, until all are on disk."""
        failure, is_finished = "", False
        error: Exception | None = None
        waiting = set(self._others)
        while waiting or not is_finished:
            self._order(Order.WRITE, waiting)
            self._order(Order.WAIT, set(self._others) - waiting)
            try:
                is_finished = writer.write_for(ROUND_S)
            except DumpCancelled:
                raise
            except Exception as raised:  # the other ranks, which are at work, are told after this round
                error = raised
            for rank in sorted(waiting):
                report = receive(HolderReport, rank, self._exchange)
                failure = failure or report.failure
                if report.done:
                    waiting.discard(rank)
                    self._parts += [(rank, part) for part in report.parts]
                    self.not_finite += [(rank, bad_shard) for bad_shard in report.not_finite]
            if error is not None or failure:
                self._order(Order.END)
                raise error or CheckpointError(failure)
        self._parts += [(self._exchange.rank, part) for part in writer.parts]
        self.not_finite += [(self._exchange.rank, bad_shard) for bad_shard in writer.not_finite]

    def _order(self, order: Order, ranks: set[int] | None = None) -> None:
        for rank in self._others if ranks is None else sorted(ranks):
            send(order, rank, self._exchange)

    def _is_there(self, part: WrittenPart) -> bool:
        """Read a part of another kernel again, while other ranks wait; return True if unchanged."""
        descriptor = disk.open_below(self._temporary_folder, self._drafts[part.file], os.O_RDONLY)
        try:
            crc = 0
            for begin in range(0, part.size, BLOCK):
                data = read_all(descriptor, min(BLOCK, part.size - begin), part.at + begin)
                crc = crc32(data, crc)
                self._exchange.advanced(len(data))
                if time.monotonic() >= self._next_round:
                    self._order(Order.WAIT)
                    self._next_round = time.monotonic() + ROUND_S
        finally:
            os.close(descriptor)
        return crc == part.crc

    def _digest(self, draft: str, layout: FileLayout[Source], parts: Sequence[WrittenPart]) -> str:
        """Return the digest of a file; blocks with bytes of several parts are read.

        For a reader all blocks are read and compared. Raises CheckpointError if a block has changed.
        """
        digests_by_block = {}
        for part in parts:
            first = -(-part.at // BLOCK)
            for begin in range(0, len(part.digests), DIGEST_BYTES):
                digests_by_block[first + begin // DIGEST_BYTES] = part.digests[begin : begin + DIGEST_BYTES]
        whole_digest = BlockDigest()
        descriptor = disk.open_below(self._temporary_folder, draft, os.O_RDONLY)
        try:
            for block in range(-(-layout.size // BLOCK)):
                digest = digests_by_block.get(block)
                if digest is None or layout.reader is not None:
                    if layout.reader is not None:
                        # The reader takes longer with a block than the disk, which reads on meanwhile.
                        os.posix_fadvise(
                            descriptor, (block + 1) * BLOCK, _AHEAD * BLOCK, os.POSIX_FADV_WILLNEED
                        )
                    data = read_all(descriptor, BLOCK, block * BLOCK)
                    digest_read = xxhash.xxh3_128_digest(data)
                    if digest not in (None, digest_read):
                        problem = f"other bytes are read at byte {block * BLOCK} than were written there"
                        raise CheckpointError(f"{self._temporary_folder / draft}: {problem}")
                    if layout.reader is not None:
                        layout.reader(data)
                    self._exchange.advanced(len(data))
                    digest = digest_read
                whole_digest.add_block(digest)
        finally:
            os.close(descriptor)
        return whole_digest.hexdigest()


def decline(exchange: Exchange) -> None:
    """Tell the other holders that nothing can be laid out, so they send. Raises RuntimeError."""
    for rank in _others(exchange):
        send(Offer([], [], b"", 0), rank, exchange)


def _others(exchange: Exchange) -> list[int]:
    return sorted({rank for sources in exchange.sources for rank in sources} - {exchange.rank})


def _crcs(name: str, layout: FileLayout[Source], parts: Sequence[WrittenPart]) -> list[int]:
    """Return the CRC-32 of each entry. Raises CheckpointError if its parts leave a hole, or overlap."""
    inside: dict[int, list[WrittenPart]] = defaultdict(list)
    number = 0
    for part in parts:
        while part.at >= layout.entries[number].begin + layout.entries[number].size:
            number += 1
        inside[number].append(part)
    crcs = []
    for number, entry in enumerate(layout.entries):
        at = entry.begin
        for part in inside[number]:
            if part.at != at:
                break
            at += part.size
        if at != entry.begin + entry.size:
            raise CheckpointError(f"{name}: no rank has written what belongs at byte {at}")
        crcs.append(join_crcs([(part.crc, part.size) for part in inside[number]]))
    return crcs
