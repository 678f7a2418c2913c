"""Runs a transform: the ranks of the target, several at a time, then the publish.

Each rank's files are written below a temporary folder. When the files are on disk, a note beside them says
so, for `--resume`. The folder gets its name in the same way as last words (`publish`).
"""

from __future__ import annotations

import hashlib
import queue
import sys
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import msgspec

from adaptor.checkpoint import disk, layout_file, manifest, publish
from adaptor.checkpoint.hashing import HashingFile
from adaptor.checkpoint.layout_file import (
    BufferLayout,
    Entry,
    JobLayout,
    OptimizerLayout,
    ParamPlace,
    RankLayout,
)
from adaptor.errors import CheckpointError
from adaptor.protocol import naming
from adaptor.protocol.naming import FileEntry
from adaptor.transform import rules, writing
from adaptor.transform.copying import Files
from adaptor.transform.model import Slot, View
from adaptor.transform.sizes import Rank, Sizes
from adaptor.transform.target import TargetCheckpoint
from adaptor.transform.writing import NewItem

NEED = "the transform needs"  # before a number of bytes
_GENERATION = "transform"
_NOTE = ".done.json"
_EVERY_S = 1.0  # between two lines of progress


@dataclass(frozen=True)
class TransformOrder:
    """The arguments from which a worker process makes the same target again.

    Attributes:
        layout: of the target; None: by the rules
        weights_only: the optimizer is left out
    """

    source: Path
    step: int
    sizes: Sizes
    rows: int
    folder: Path
    format: str
    layout: JobLayout | None = None
    weights_only: bool = False

    @cached_property
    def mark(self) -> str:
        """Return a digest of the target and of the source's present files: runs with the same mark may share
        files.
        """
        folder = self.source / naming.final_name(self.step)
        files = sorted(path for path in folder.rglob("*") if path.is_file())
        stamps = [(str(file), file.stat().st_size, file.stat().st_mtime_ns) for file in files]
        identity = stamps, self.step, self.sizes, self.rows, self.format, self.weights_only
        text = repr(identity).encode()
        return hashlib.sha256(text + msgspec.json.encode(self.layout)).hexdigest()


class _RankNote(msgspec.Struct):
    """The note of a finished rank: its files, and their content.

    Attributes:
        digests: the SHA-256 of files, by path, where the framework wants SHA-256
    """

    mark: str
    files: list[FileEntry]
    items: list[NewItem] = []
    digests: dict[str, str] = {}


class _Stopped(Exception):
    """Another rank has failed, or the user has interrupted."""


def write_rank(
    target: TargetCheckpoint,
    rank: Rank,
    folder: Path,
    mark: str,
    progress: Callable[[int], None] = lambda count: None,
) -> list[FileEntry]:
    """Write the files of one rank, and the note about them.

    Args:
        target: the checkpoint in other sizes.
        rank: of the target.
        folder: the temporary folder.
        mark: of the order, by which another run knows that it may use the files.
        progress: receives the number of newly written bytes, again and again; an exception of it ends the
            work.

    Raises:
        CheckpointError: a file is damaged, the disk refuses, or the main params do not round to the weights.
    """
    items: list[NewItem] = []
    digests: dict[str, str] = {}
    with Files() as files:
        if target.format == "torch":
            entries = _write_torch(target, rank, folder, files, progress)
        else:
            path = folder / writing.data_file(target, rank)
            try:
                entry, items, digest = writing.write_rank(target, rank, folder, files, progress)
            except OSError as error:
                raise CheckpointError(f"{path}: {error.strerror or error}") from error
            entries = [entry]
            digests = {entry.path: digest} if digest else {}
    text = msgspec.json.encode(_RankNote(mark, entries, items, digests))
    disk.replace(folder, _note_name(target.sizes, rank), text)
    return entries


def _write_torch(
    target: TargetCheckpoint, rank: Rank, folder: Path, files: Files, progress: Callable[[int], None]
) -> list[FileEntry]:
    rank_folder = folder / target.sizes.folder(rank)
    rank_folder.mkdir(parents=True, exist_ok=True)
    contents = {naming.OPTIMIZER_FILE: target.optimizer_state, naming.MODEL_FILE: target.model_state}
    if target.source.weights_only:
        del contents[naming.OPTIMIZER_FILE]
    return [
        _written(rank_folder / name, content(rank, files), folder, files, progress)
        for name, content in contents.items()
    ]


def _written(
    path: Path, value: Any, folder: Path, files: Files, progress: Callable[[int], None]
) -> FileEntry:
    try:
        with HashingFile(path, progress, folder) as stream:
            writing.save(value, stream, path.stem, files)
    except OSError as error:
        raise CheckpointError(f"{path}: {error.strerror or error}") from error
    return stream.entry(path.relative_to(folder).as_posix())


def _note_name(sizes: Sizes, rank: Rank) -> str:
    return f"{sizes.folder(rank)}{_NOTE}"


def temporary_folder(root: Path, step: int) -> Path:
    """Return the folder of a transform before the publish."""
    return root / naming.temporary_name(step, generation=_GENERATION)


def already_done(order: TransformOrder, rank: Rank) -> list[FileEntry] | None:
    """Return the files of a rank that an earlier run wrote from the same source; None without such files."""
    try:
        note = _note(order, rank)
        sizes = [(order.folder / entry.path).stat().st_size for entry in note.files]
    except (OSError, msgspec.MsgspecError):
        return None
    if note.mark != order.mark or sizes != [entry.bytes for entry in note.files]:
        return None
    return note.files


def _note(order: TransformOrder, rank: Rank) -> _RankNote:
    """Return the note of a rank. Raises OSError and MsgspecError."""
    return msgspec.json.decode((order.folder / _note_name(order.sizes, rank)).read_bytes(), type=_RankNote)


def run(
    target: TargetCheckpoint,
    order: TransformOrder,
    ranks: Sequence[Rank],
    workers: int,
    say: Callable[[str], None],
) -> dict[Rank, list[FileEntry]]:
    """Write the files of `ranks` with up to `workers` threads; return their files. Progress goes to `say`.

    Raises:
        CheckpointError: a rank failed; the files of other ranks stay for `--resume`.
    """
    files_by_rank = {
        rank: rank_files for rank in ranks if (rank_files := already_done(order, rank)) is not None
    }
    remaining_ranks = [rank for rank in ranks if rank not in files_by_rank]
    if files_by_rank:
        say(f"{len(files_by_rank)} of {len(ranks)} ranks were there already")
    if not remaining_ranks:
        return files_by_rank
    total = sum(target.bytes(rank) for rank in remaining_ranks)
    disk.require_room(order.folder, total, NEED)
    progress = ProgressLine(total, say)
    stopped = threading.Event()

    def advanced(count: int) -> None:
        if stopped.is_set():
            raise _Stopped
        progress.add(count)

    # Threads are enough: reading, writing, hashing and copying release the interpreter's lock.
    mark = order.mark
    with ThreadPoolExecutor(min(workers, len(remaining_ranks))) as pool:
        # Not by `concurrent.futures.wait`: a signal during its locking of all futures leaves some locks
        # taken, and the threads that need them would keep this process for ever.
        ended_futures: queue.SimpleQueue[Future[list[FileEntry]]] = queue.SimpleQueue()
        running: dict[Future[list[FileEntry]], Rank] = {}
        try:
            for rank in remaining_ranks:
                future = pool.submit(write_rank, target, rank, order.folder, mark, advanced)
                running[future] = rank
                future.add_done_callback(ended_futures.put)
            while running:
                future = ended_futures.get()
                files_by_rank[running.pop(future)] = future.result()
        except BaseException:
            stopped.set()
            pool.shutdown(wait=False, cancel_futures=True)
            raise
    progress.end()
    return files_by_rank


class ProgressLine:
    """Reports at most once per second the written bytes, the rate, and the remaining time."""

    def __init__(self, total: int, say: Callable[[str], None]) -> None:
        self._lock = threading.Lock()
        self._total = total
        self._say = say
        self._done = 0
        self._began = self._said = time.monotonic()

    def add(self, count: int) -> None:
        """Count bytes that a thread has written; report if the last report is a second old."""
        with self._lock:
            self._done += count
            current_time = time.monotonic()
            if current_time - self._said < _EVERY_S:
                return
            self._said = current_time
            rate = self._done / (current_time - self._began)
            remaining_s = max(0, self._total - self._done) / rate
            self._say(
                f"{self._done / 1e9:.2f} of {self._total / 1e9:.2f} GB, {rate / 1e6:.0f} MB/s,"
                f" {remaining_s:.0f} s left"
            )

    def end(self) -> None:
        """Report the total time."""
        took = time.monotonic() - self._began
        rate = self._done / 1e6 / max(took, 1e-9)
        self._say(f"{self._done / 1e9:.2f} GB written in {took:.1f} s, {rate:.0f} MB/s")


def finish(
    target: TargetCheckpoint,
    order: TransformOrder,
    root: Path,
    files_by_rank: dict[Rank, list[FileEntry]],
    *,
    verify: bool,
) -> None:
    """Publish the written files: manifest, name, tracker.

    Args:
        target: the checkpoint.
        order: of the run.
        root: the folder to write to.
        files_by_rank: the files of each rank.
        verify: read all files again first, and compare the checksums.

    Raises:
        CheckpointError: a file differs from its checksum; the checkpoint gets no name.
    """
    entries = [entry for rank in target.sizes.ranks for entry in files_by_rank[rank]]
    if target.format != "torch":
        notes = [_note(order, rank) for rank in target.sizes.ranks]
        items = [item for note in notes for item in note.items]
        digests = {path: digest for note in notes for path, digest in note.digests.items()}
        entries += writing.write_rest(target, order.folder, items, digests)
    layout = _layout_content(target)
    if layout is not None:
        entries.append(writing.write_small(order.folder, naming.LAYOUT, layout))
    problems = manifest.compare(order.folder, entries) if verify else []
    if problems:
        raise CheckpointError(problems[0])
    world = target.arguments(target.sizes.ranks[0]).world_size
    publish.publish(root, order.step, entries, {}, world, _GENERATION)
    if _has_agreed_state(order.source / naming.final_name(order.step)):
        say(f"the agreed sums of step {order.step} are of its former parallel sizes: the new one has none")


def _has_agreed_state(folder: Path) -> bool:
    """Return whether the manifest of a checkpoint has the sums on which its holders agreed."""
    try:
        return manifest.read(folder).state is not None
    except CheckpointError:  # without a manifest
        return False


def defects(folder: Path, checksums: bool) -> list[str]:
    """Return the defects of a checkpoint against its manifest; none without a manifest."""
    if not (folder / naming.MANIFEST).exists():
        return []
    return manifest.defects(folder, checksums=checksums)


def say(line: str) -> None:
    """Print a line about the progress."""
    print(f"transform: {line}", file=sys.stderr, flush=True)


# The version of Megatron-core whose rules apply without a layout file of the source.
_CORE = "0.15"


def _layout_content(target: TargetCheckpoint) -> bytes | None:
    """Return the content of the target's layout file, from which the target can be transformed again.

    None where the source has none, and rules have laid out the target. The format `torch_dist` always gets a
    layout file, because it is not read without one.
    """
    if target.layout is not None:
        return layout_file.join(map(layout_file.encode, target.layout.ranks))
    source = target.source.layout
    if source is None and target.format == "torch":
        return None
    core = _CORE if source is None else source.ranks[0].core
    return layout_file.join(
        layout_file.encode(_of_rank(target, rank, view, core)) for rank, view in target.views.items()
    )


def _of_rank(target: TargetCheckpoint, rank: Rank, view: View, core: str) -> RankLayout:
    sizes, args = target.sizes, target.arguments(rank)
    job_sizes = {
        "tp": sizes.tp,
        "pp": sizes.pp,
        "vpp": sizes.vpp,
        "ep": sizes.ep,
        "etp": sizes.expert_tensor,
        "dp": sizes.dp,
    }
    return RankLayout(
        format=layout_file.FORMAT,
        folder=sizes.folder(rank),
        tp=rank.tp,
        pp=rank.pp,
        ep=rank.ep,
        sizes={**job_sizes, "cp": getattr(args, "context_parallel_size", None) or 1},
        core=core,
        args={name: getattr(args, name, None) for name in layout_file.ARGUMENTS},
        chunks={key: tuple(_entry(target, slot) for slot in slots) for key, slots in view.chunks.items()},
        optimizers=_optimizers(view),
    )


def _entry(target: TargetCheckpoint, slot: Slot) -> Entry:
    item, cut = slot.item, slot.item.cut
    whole_shape = list(item.shape)
    if cut.rows:
        whole_shape[cut.axis or 0] = target.rows
    return Entry(
        slot.name,
        dtype=item.dtype,
        shape=slot.shape,
        key=target.key(item.name),
        whole=tuple(whole_shape),
        axis=cut.axis,
        pieces=slot.pieces,
        layer=rules.layer_of(item.name),
        expert=rules.expert_of(item.name),
        padded=cut.rows,
        tied=slot.name == rules.OUTPUT and item.name == rules.EMBEDDING,
        param=slot.is_param,
    )


def _optimizers(view: View) -> tuple[OptimizerLayout, ...]:
    chunk_of = {id(slot): key for key, slots in view.chunks.items() for slot in slots}
    return tuple(
        OptimizerLayout(
            stored,
            groups,
            tuple(
                BufferLayout(
                    (buffer.dtypes[0].name, buffer.dtypes[1].name),
                    buffer.numel,
                    tuple(
                        ParamPlace(chunk_of[id(slot)], slot.name, at.begin, at.end)
                        for slot, at in buffer.slots
                    ),
                )
                for buffer in buffers
            ),
        )
        for stored, groups, buffers in zip(view.stored, view.groups, view.optimizers, strict=True)
    )
