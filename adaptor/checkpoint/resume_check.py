"""Checks, before a resume and by all ranks together, the checkpoint that the tracker names.

Rank 0 decides what is checked and what is done (`resume_judgement`), and tells the others, who might see an
older state of a shared file system; the ranks divide the files among them, and the blocks of a file that has
a checksum of blocks, since a checksum reads everything (`divided_reading`). So all ranks go on, or all raise
the same. A node with a disk of its own may have nothing but what its ranks load, of the same save; what is
agreed on is done there, too (`agreed_step`). What is not of the adaptor, a folder without a manifest, is left
to the framework.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TypeVar

from adaptor import context
from adaptor.checkpoint import (
    agreed_step,
    disk,
    divided_reading,
    hashing,
    manifest,
    own_part,
    tracker,
)
from adaptor.checkpoint.agreed_step import Agreed
from adaptor.checkpoint.checked_files import CheckedFiles
from adaptor.checkpoint.divided_reading import Division, Reader, in_blocks
from adaptor.checkpoint.manifest import Unreadable
from adaptor.checkpoint.resume_judgement import (
    COPIES,
    TOLD,
    Found,
    Judgement,
    by_rank,
    first_of,
    judge,
    line_of,
)
from adaptor.errors import CheckpointError, ResumeError
from adaptor.protocol.environment import Place
from adaptor.protocol.file_entry import FileEntry

_T = TypeVar("_T")


@dataclass(frozen=True)
class _Told:
    """The message of rank 0: files to check, or that all is done; `refusal`: why nothing can be loaded.

    Attributes:
        generation: of the checkpoint that they are of
        is_regular: whether the framework has saved it, so every rank had written when it got its name
        agreed: what is to be done on the disks that rank 0 does not see
        is_empty: rank 0 sees no checkpoint
    """

    folder: str = ""
    files: tuple[FileEntry, ...] = ()
    refusal: str = ""
    generation: str = ""
    is_regular: bool = False
    agreed: Agreed | None = None
    is_empty: bool = False


def require_intact(load: Path, save: Path, chosen: int | None = None, loads: tuple[str, ...] = ()) -> None:
    """Make sure that the checkpoint which the framework is about to read is intact.

    All ranks call it at the same time: the files are divided among those that see the same folder. Files that
    are intact are `CheckedFiles` afterwards, so the framework need not read them once more.

    Args:
        load: the folder that the framework loads from.
        save: the folder that this job saves to; if it is the same, another checkpoint may take the place of a
            damaged one, or of one that is not whole on every node.
        chosen: the step that the user named, None for that of the tracker.
        loads: with what the paths of files begin, below the checkpoint, that this rank is about to load; they
            are read on its node then.

    Raises:
        ResumeError: a checkpoint is damaged, and no other may take its place; or it cannot be read; or nodes
            do not see the same folder, and no checkpoint is whole on all of them.
    """
    import torch.distributed as dist

    rank = dist.get_rank()
    judgement = judge(load, save, chosen) if rank == 0 else None
    found: Found | None = None
    readers: list[Reader] = []
    root = load
    while True:
        told = [_next(judgement, found) if judgement is not None else _Told()]
        dist.broadcast_object_list(told, src=0)
        (order,) = told
        if order.refusal:
            raise ResumeError(order.refusal)
        if order.agreed is not None:
            found = Found(_follow(root, order.agreed, readers))
            continue
        if order.is_empty:
            _require_nothing(load)
        if not order.files:
            return
        folder = Path(order.folder)
        root = folder.parent
        readers = _readers(folder, loads)
        if not all(reader.is_there for reader in readers):
            if order.is_regular and not readers[rank].is_there and disk.is_same(root, save):
                agreed_step.complete(root, folder.name, order.generation)
            readers = _readers(folder, loads)
        found, part = _examine(order, readers)
        if not found.problems:
            context.part(CheckedFiles).add(folder, part or order.files)


def _readers(folder: Path, loads: tuple[str, ...]) -> list[Reader]:
    """Return what every rank sees of a checkpoint."""
    view = divided_reading.view(folder)
    node = context.part(Place).node
    return _gather(Reader(node, loads, view, bool(view) or os.path.lexists(folder)))


def _gather(mine: _T) -> list[_T]:
    """Return what each rank has given, by rank."""
    import torch.distributed as dist

    found = [mine] * dist.get_world_size()
    dist.all_gather_object(found, mine)
    return found


def _follow(root: Path, agreed: Agreed, readers: Sequence[Reader]) -> list[str]:
    """Do what is agreed on, on each disk that rank 0 does not see by one rank that does; return problems."""
    import torch.distributed as dist

    rank, problem = dist.get_rank(), ""
    apart = divided_reading.apart(readers)
    if rank in apart and any(ranks[0] == rank for ranks in divided_reading.views(readers)):
        problem = agreed_step.follow(root, agreed)
    nodes = [reader.node for reader in readers]
    return [f"node {node}: {one}" for node, one in zip(nodes, _gather(problem), strict=True) if one]


def _require_nothing(load: Path) -> None:
    """Refuse a folder in which rank 0 sees no checkpoint, and another rank sees one: they would load apart.

    Raises:
        ResumeError: on all ranks.
    """
    seen = _gather((context.part(Place).node, tracker.tracked_step(load)))
    there = {node: step for node, step in seen if step is not None}
    if there:
        words = ", ".join(f"node {node} has step {step}" for node, step in list(there.items())[:TOLD])
        raise ResumeError(f"{load}: node 0 has no checkpoint, {words}; {COPIES}")


def _examine(order: _Told, readers: Sequence[Reader]) -> tuple[Found, tuple[FileEntry, ...]]:
    """Compare a checkpoint with its manifest, together with all other ranks.

    Returns:
        What was found, and the files of this node, where it has only a part of them.
    """
    import torch.distributed as dist

    unlike, apart = divided_reading.unlike(readers), divided_reading.apart(readers)
    views = divided_reading.views(readers)
    if not all(reader.is_there for reader in readers):  # so nothing need be read to know that it is not whole
        compared = (
            _Compared() if readers[dist.get_rank()].is_there else _Compared([f"{order.folder}: missing"])
        )
        order = replace(order, files=())
    else:
        compared = _compare(order, dist.get_rank(), readers)
    found = _gather(compared)
    seen = [_of_view(order, [found[number] for number in ranks]) for ranks in views]
    if unlike:
        nodes = [_nodes(readers[rank].node for rank in ranks) for ranks in views]
        problems = [_of_nodes(each, one) for each, one in zip(nodes, seen, strict=True) if one]
    else:
        problems = [problem for some in seen for problem in some]
    return Found(problems, unlike, apart), compared.part


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
        if rank in divided_reading.apart(readers) and (
            problem := own_part.of_another_save(folder, order.generation)
        ):
            compared.problems.append(problem)
            return compared
        if readers[rank].view not in ((), readers[0].view):
            compared.part = own_part.files(folder, order.files, order.generation)
        if compared.part:
            loads = readers[rank].loads
            compared.problems += own_part.lacks(folder, compared.part, order.files, loads)
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
    problems = list(dict.fromkeys(told))
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


def _nodes(numbers: Iterable[int]) -> str:
    """Return the words for nodes that see the same folder, or none."""
    nodes = sorted(set(numbers))
    more = f" and {len(nodes) - TOLD} more" if len(nodes) > TOLD else ""
    return f"node{'s' if len(nodes) > 1 else ''} {', '.join(map(str, nodes[:TOLD]))}{more}"


def _of_nodes(nodes: str, problems: list[str]) -> str:
    """Return the problems of the copy of some nodes in a line; damage before what cannot be read."""
    if all(isinstance(problem, Unreadable) for problem in problems):
        return Unreadable(first_of(problems))
    return f"{nodes}: {first_of(sorted(problems, key=lambda problem: isinstance(problem, Unreadable)))}"


def _next(judgement: Judgement, found: Found | None) -> _Told:
    try:
        asked = next(judgement) if found is None else judgement.send(found)
        if isinstance(asked, Agreed):
            return _Told(agreed=asked)
        folder, files = asked
        known = manifest.read(folder)
        return _Told(str(folder), files, generation=known.generation, is_regular=not known.groups)
    except StopIteration as end:
        return _Told(is_empty=not end.value)
    except (CheckpointError, ResumeError) as error:
        return _Told(refusal=str(error))
    except Exception as error:  # whatever it is, the other ranks wait for word of it
        return _Told(refusal=line_of(f"the checkpoint cannot be checked: {type(error).__name__}: {error}"))
