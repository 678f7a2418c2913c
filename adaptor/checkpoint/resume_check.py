"""Checks, before a resume and by all ranks together, the checkpoint that the tracker names.

Rank 0 decides what is checked and what is done (`resume_judgement`), and tells the others, who might see an
older state of a shared file system; the ranks divide the files among them, and the blocks of a file that has
a checksum of blocks, since a checksum reads everything (`divided_reading`). So all ranks go on, or all raise
the same. A node with a disk of its own may have nothing but what its ranks load. What is not of the adaptor,
a folder without a manifest, is left to the framework.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from adaptor import context
from adaptor.checkpoint import disk, divided_reading, hashing, manifest
from adaptor.checkpoint.checked_files import CheckedFiles
from adaptor.checkpoint.divided_reading import Division, Reader, in_blocks
from adaptor.checkpoint.manifest import Unreadable
from adaptor.checkpoint.resume_judgement import TOLD, Judgement, by_rank, first_of, judge, line_of
from adaptor.errors import CheckpointError, ResumeError
from adaptor.protocol import naming
from adaptor.protocol.environment import Place
from adaptor.protocol.file_entry import FileEntry


@dataclass(frozen=True)
class _Told:
    """The message of rank 0: files to check, or that all is done; `refusal`: why nothing can be loaded.

    Attributes:
        generation: of the checkpoint that they are of
    """

    folder: str = ""
    files: tuple[FileEntry, ...] = ()
    refusal: str = ""
    generation: str = ""


def require_intact(load: Path, save: Path, chosen: int | None = None, loads: tuple[str, ...] = ()) -> None:
    """Make sure that the checkpoint which the framework is about to read is intact.

    All ranks call it at the same time: the files are divided among those that see the same folder. Files that
    are intact are `CheckedFiles` afterwards, so the framework need not read them once more.

    Args:
        load: the folder that the framework loads from.
        save: the folder that this job saves to; if it is the same, another checkpoint may take the place of a
            damaged one.
        chosen: the step that the user named, None for that of the tracker.
        loads: with what the paths of files begin, below the checkpoint, that this rank is about to load; they
            are read on its node then.

    Raises:
        ResumeError: a checkpoint is damaged, and no other may take its place; or it cannot be read; or nodes
            have copies of their own, and one is damaged.
    """
    import torch.distributed as dist

    rank, size = dist.get_rank(), dist.get_world_size()
    judgement = judge(load, save, chosen) if rank == 0 else None
    problems: list[str] | None = None
    while True:
        told = [_next(judgement, problems) if judgement is not None else _Told()]
        dist.broadcast_object_list(told, src=0)
        (order,) = told
        if order.refusal:
            raise ResumeError(order.refusal)
        if not order.files:
            return
        readers = [Reader(0, ())] * size
        view = divided_reading.view(Path(order.folder))
        dist.all_gather_object(readers, Reader(context.part(Place).node, loads, view))
        found = [_Compared() for _ in range(size)]
        compared = _compare(order, rank, readers)
        dist.all_gather_object(found, compared)
        views = divided_reading.views(readers)
        seen = [_of_view(order, [found[number] for number in ranks]) for ranks in views]
        problems = [problem for some in seen for problem in some]
        if not problems:
            context.part(CheckedFiles).add(Path(order.folder), compared.part or order.files)
        elif divided_reading.are_copies(readers):
            raise ResumeError(_of_copies(seen, [readers[ranks[0]].node for ranks in views]))


@dataclass
class _Compared:
    """The part of a rank.

    Attributes:
        problems: with the files
        digests: by path, of the blocks that this rank has read
        part: the files, where this node has only a part of the checkpoint
    """

    problems: list[str] = field(default_factory=list)
    digests: dict[str, bytes] = field(default_factory=dict)
    part: tuple[FileEntry, ...] = ()


def _compare(order: _Told, rank: int, readers: Sequence[Reader]) -> _Compared:
    """Compare the part of `rank`; never raise, for the other ranks wait for the answer."""
    compared, folder = _Compared(), Path(order.folder)
    try:
        division = Division(rank, readers)
        if readers[rank].view not in ((), readers[0].view):
            compared.part = _part(order)
        if compared.part:
            compared.problems += _lacks(order, compared.part, readers[rank].loads)
        files = compared.part or order.files
        mine = division.whole_files(files)
        compared.problems += manifest.compare(folder, [file for file in mine if not in_blocks(file)])
        compared.problems += manifest.compare(folder, filter(in_blocks, mine), checksums=False)
        threads = max(1, len(os.sched_getaffinity(0)) // max(1, context.part(Place).local_size))
        for file in filter(in_blocks, files):
            first, end = division.blocks(file)
            if first < end:
                compared.digests[file.path] = _digests(folder / file.path, first, end, threads, compared)
    except Exception as error:
        compared.problems.append(
            Unreadable(f"{order.folder}: cannot be read ({type(error).__name__}: {error})")
        )
    compared.problems = [
        by_rank(rank, problem) if isinstance(problem, Unreadable) else problem
        for problem in compared.problems
    ]
    return compared


def _part(order: _Told) -> tuple[FileEntry, ...]:
    """Return the files of this folder's own manifest, where it is of a part of the same checkpoint.

    Nothing where the folder must have all files, as in the format `torch_dist`, of which ranks may read any.
    """
    folder, known = Path(order.folder), {file.path: file for file in order.files}
    try:
        own = manifest.read(folder)
    except CheckpointError:
        return ()  # the files are compared with those of rank 0
    is_same = naming.final_name(own.step) == folder.name and own.generation == order.generation != ""
    if not is_same or any(file.path.endswith(".distcp") for file in (*own.files, *order.files)):
        return ()
    if {file.path for file in own.files} >= known.keys():
        return ()
    common = [(file, known[file.path]) for file in own.files if file.path in known]
    return own.files if all(_may_be_same(*pair) for pair in common) else ()


def _may_be_same(one: FileEntry, other: FileEntry) -> bool:
    return one.bytes == other.bytes and len({one.xxh3_128, other.xxh3_128} - {None}) < 2


def _lacks(order: _Told, part: Sequence[FileEntry], loads: Sequence[str]) -> list[str]:
    """Return what is wrong with a part of which a rank is about to load what begins with `loads`."""
    have, known = {file.path for file in part}, {file.path for file in order.files}
    needed = [path for path in loads if path.endswith(naming.MODEL_FILE) or path in known]
    return [f"{Path(order.folder) / path}: missing" for path in needed if path not in have]


def _digests(path: Path, first: int, end: int, threads: int, compared: _Compared) -> bytes:
    try:
        return hashing.block_digests(path, first, end, threads)
    except OSError as error:
        if not disk.is_wrong(error):  # else the rank that compares its size says so
            compared.problems.append(Unreadable(f"{path}: cannot be read ({error.strerror or error})"))
        return b""


def _of_view(order: _Told, found: Sequence[_Compared]) -> list[str]:
    """Return all problems of the files that some ranks see alike; of many a file each has read a part."""
    told = [problem for part in found for problem in part.problems]
    problems = list(told)
    files = next((part.part for part in found if part.part), order.files)
    for file in filter(in_blocks, files):
        path = Path(order.folder) / file.path
        digests = b"".join(part.digests.get(file.path, b"") for part in found)
        if len(digests) != hashing.blocks_of(file) * hashing.DIGEST_BYTES:
            if not any(f"{path}:" in problem for problem in told):
                problems.append(Unreadable(f"{path}: cannot be read as a whole on all ranks"))
        elif hashing.join_blocks(digests) != file.xxh3_128_blocks:
            problems.append(f"{path}: checksum differs from the manifest")
    return problems


def _of_copies(seen: Sequence[list[str]], nodes: Sequence[int]) -> str:
    """Refuse copies that are not all intact: no older checkpoint can take the place of each.

    Args:
        seen: the problems of each copy.
        nodes: for each copy, the number of a node that has it.
    """
    words = [
        f"node {node}: {first_of(problems)}" for problems, node in zip(seen, nodes, strict=True) if problems
    ]
    return (
        f"{'; '.join(words[:TOLD])}; the nodes do not see the same folder, so nothing was changed: copy"
        " the checkpoint to them anew, or give a folder that they share"
    )


def _next(judgement: Judgement, problems: list[str] | None) -> _Told:
    try:
        folder, files = next(judgement) if problems is None else judgement.send(problems)
        return _Told(str(folder), files, generation=manifest.read(folder).generation)
    except StopIteration:
        return _Told()
    except (CheckpointError, ResumeError) as error:
        return _Told(refusal=str(error))
    except Exception as error:  # whatever it is, the other ranks wait for word of it
        return _Told(refusal=line_of(f"the checkpoint cannot be checked: {type(error).__name__}: {error}"))
