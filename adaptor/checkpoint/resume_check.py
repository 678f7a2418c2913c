"""Checks, before a resume and by all ranks together, the checkpoint that the tracker names.

Rank 0 decides on checks and actions (`resume_selection`), and sends its decisions to the other ranks, which
might see an older state of a shared file system; the ranks divide the files among them, and the blocks of a
file with a checksum of blocks (`divided_reading`). So all ranks go on, or all raise the same error. A node
with a disk of its own may have only the files for its ranks, of the same save; the agreed actions are done on
its disk, too (`resume_selection`), and at the end all trackers lead the framework to the same step. A folder
without a manifest was not made by the adaptor, and is left to the framework.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeVar

from adaptor import context
from adaptor.checkpoint import disk, divided_reading, hashing, manifest, resume_selection, tracker
from adaptor.checkpoint.divided_reading import CheckedFiles, Division, Reader, in_blocks
from adaptor.checkpoint.manifest import Unreadable
from adaptor.checkpoint.resume_selection import (
    ALIKE,
    COPIES,
    MOST_NAMED,
    RELEASE,
    Agreed,
    CheckpointProblems,
    Judgement,
    by_rank,
    first_of,
    judge,
    line_of,
)
from adaptor.errors import CheckpointError, ResumeError
from adaptor.protocol.environment import WorkerPlace
from adaptor.protocol.naming import FileEntry

_T = TypeVar("_T")


@dataclass(frozen=True)
class _CheckOrder:
    """The message of rank 0: files to check, or the end of the check; `refusal`: why nothing can be loaded.

    Attributes:
        view: rank 0's view of the checkpoint (`divided_reading`)
        is_regular: whether the framework has saved the checkpoint, so every rank had written before the
            rename
        by_tracker: whether trackers name the step; a rank without knowledge of a restart may have a chosen
            step
    """

    folder: str = ""
    files: tuple[FileEntry, ...] = ()
    refusal: str = ""
    generation: str = ""
    view: tuple[int, ...] = ()
    is_regular: bool = False
    agreed: Agreed | None = None
    is_empty: bool = False
    by_tracker: bool = False


def require_intact(
    load_folder: Path,
    save_folder: Path,
    chosen: int | None = None,
    loads: tuple[str, ...] = (),
    refused: Mapping[int, str] | None = None,
) -> None:
    """Make sure that the checkpoint for the framework's load is intact; all ranks call this together.

    The files are divided among the ranks with the same view of the folder. Intact files are `CheckedFiles`
    afterwards, so the framework need not read the files once more. In the save folder of the job another
    checkpoint may replace one that is damaged, or not whole on every node.

    `chosen`: the step named by the user; None: by the tracker. `loads`: the beginnings of the paths of the
    files for the rank; its node reads them. `refused`: checkpoints that are not taken, by step, with the
    reason.

    Raises ResumeError if a checkpoint is damaged and no other may replace it, if it cannot be read, or if no
    checkpoint is whole on all nodes, which do not see the same folder.
    """
    import torch.distributed as dist

    rank = dist.get_rank()
    judgement = judge(load_folder, save_folder, chosen, refused or {}) if rank == 0 else None
    examined: CheckpointProblems | None = None
    readers: list[Reader] = []
    root = load_folder
    while True:
        answers = [_next(judgement, examined, chosen) if judgement is not None else _CheckOrder()]
        dist.broadcast_object_list(answers, src=0)
        (order,) = answers
        if order.refusal:
            raise ResumeError(order.refusal)
        if order.agreed is not None:
            examined = CheckpointProblems(_follow(root, order.agreed, readers))
            continue
        if order.is_empty:
            _require_nothing(load_folder)
        if not order.files:
            if readers and order.by_tracker:
                _require_one_step(root, save_folder)
            return
        folder = Path(order.folder)
        root = folder.parent
        readers = _readers(order, loads)
        if any(reader.lacks for reader in readers):
            unnamed = ""
            if order.is_regular and readers[rank].lacks and disk.is_same(root, save_folder):
                unnamed = resume_selection.complete(root, folder.name, order.generation)
            _gather(None)  # one rank of a disk works, and the others look afterwards
            readers = _readers(order, loads, unnamed)
        examined, part = _examine(order, readers)
        if not examined.problems:
            context.part(CheckedFiles).add(folder, part or order.files)


def _readers(order: _CheckOrder, loads: tuple[str, ...], unnamed: str = "") -> list[Reader]:
    """Return every rank's view of a checkpoint; `unnamed`: why a save on this disk cannot get its name."""
    folder = Path(order.folder)
    view = divided_reading.view(folder)
    is_there, is_other = bool(view) or os.path.lexists(folder), False
    if view and divided_reading.is_unlike(view, order.view):
        with contextlib.suppress(manifest.UnreadableError):  # the comparison reports the error
            is_other = bool(manifest.other_save_problem(folder, order.generation))
    return _gather(Reader(context.part(WorkerPlace).node, loads, view, is_there, is_other, unnamed))


def _gather(own_value: _T) -> list[_T]:
    from adaptor.replica.group import gather_values  # torch, which `ttp verify` does without

    return gather_values(own_value)


def _follow(load_folder: Path, agreed: Agreed, readers: Sequence[Reader]) -> list[str]:
    """Do the agreed actions, on each disk that rank 0 does not see by one rank; return problems."""
    import torch.distributed as dist

    rank, problem = dist.get_rank(), ""
    apart = divided_reading.apart(readers)
    if rank in apart and any(ranks[0] == rank for ranks in divided_reading.views(readers)):
        problem = resume_selection.follow(load_folder, agreed)
    nodes = [reader.node for reader in readers]
    return [
        f"node {node}: {node_problem}"
        for node, node_problem in zip(nodes, _gather(problem), strict=True)
        if node_problem
    ]


def _require_nothing(load_folder: Path) -> None:
    """Raise ResumeError on all ranks if rank 0 sees no checkpoint, and another rank sees one."""
    text = tracker.tracker_text(load_folder)
    named = RELEASE if text == RELEASE else tracker.tracked_step(load_folder)
    (_, first), *other_values = _gather((context.part(WorkerPlace).node, named))
    names_that_differ = {node: name for node, name in other_values if name != first}
    if names_that_differ:
        summary = ", ".join(
            f"node {node} has {_word(name)}" for node, name in list(names_that_differ.items())[:MOST_NAMED]
        )
        raise ResumeError(f"{load_folder}: node 0 has {_word(first)}, {summary}; {COPIES}")


def _word(named: str | int | None) -> str:
    return "no checkpoint" if named is None else "a release" if named == RELEASE else f"step {named}"


def _require_one_step(load_folder: Path, save_folder: Path) -> None:
    """Make sure that the framework takes the step of rank 0's tracker: it takes the largest of all ranks.

    A rank whose tracker names no step would not load at all. Trackers are set in the save folder. Raises
    ResumeError on all ranks.
    """
    import torch.distributed as dist

    steps_by_node = _gather((context.part(WorkerPlace).node, tracker.tracked_step(load_folder)))
    step = steps_by_node[0][1]
    wrong = [
        rank
        for rank, (_, named) in enumerate(steps_by_node)
        if step is not None and (named is None or named > step)
    ]
    if step is None or not wrong:
        return
    rank, problem = dist.get_rank(), ""
    node = steps_by_node[rank][0]
    if rank in wrong and all(
        steps_by_node[earlier_rank][0] != node for earlier_rank in wrong if earlier_rank < rank
    ):
        problem = resume_selection.settle(
            load_folder, step, may_change=disk.is_same(load_folder, save_folder)
        )
    problems = [
        f"node {node}: {node_problem}"
        for (node, _), node_problem in zip(steps_by_node, _gather(problem), strict=True)
        if node_problem
    ]
    if problems:
        raise ResumeError(f"{'; '.join(map(line_of, problems[:MOST_NAMED]))}; {ALIKE}")


def _examine(
    order: _CheckOrder, readers: Sequence[Reader]
) -> tuple[CheckpointProblems, tuple[FileEntry, ...]]:
    """Compare a checkpoint with its manifest, with all ranks; return the findings and this node's part."""
    import torch.distributed as dist

    unlike, apart = divided_reading.unlike(readers), divided_reading.apart(readers)
    # no file need be read to know that the checkpoint is not whole
    if any(reader.lacks for reader in readers):
        return CheckpointProblems(_lacking(order.folder, readers), unlike, apart), ()
    views = divided_reading.views(readers)
    compared = _compare(order, dist.get_rank(), readers)
    compared_by_rank = _gather(compared)
    results_by_view = [_of_view(order, [compared_by_rank[number] for number in ranks]) for ranks in views]
    if unlike:
        nodes = [_nodes(readers[rank].node for rank in ranks) for ranks in views]
        problems = [
            _of_nodes(view_nodes, view_result)
            for view_nodes, view_result in zip(nodes, results_by_view, strict=True)
            if view_result
        ]
    else:
        problems = [problem for some in results_by_view for problem in some]
    return CheckpointProblems(problems, unlike, apart), compared.part


def _lacking(folder: str, readers: Sequence[Reader]) -> list[str]:
    """Return the nodes that do not see a save, and why; a save that may get its name is unreadable."""
    unnamed_by_node = {
        reader.node: f"node {reader.node}: {reader.unnamed}" for reader in readers if reader.unnamed
    }
    problems: list[str] = [Unreadable(reason) for reason in unnamed_by_node.values()]
    for is_other, problem in (
        (True, "is of another save of this step than that of node 0"),
        (False, "missing"),
    ):
        lacking = (reader for reader in readers if reader.lacks and reader.is_other == is_other)
        nodes = {reader.node for reader in lacking} - unnamed_by_node.keys()
        if nodes:
            problems.append(f"{_nodes(nodes)}: {folder}: {problem}")
    return problems


@dataclass
class _Compared:
    """The part of a rank; `digests` of the blocks that it has read, by path; `part`: the files of a part."""

    problems: list[str] = field(default_factory=list)
    digests: dict[str, bytes] = field(default_factory=dict)
    part: tuple[FileEntry, ...] = ()


def _compare(order: _CheckOrder, rank: int, readers: Sequence[Reader]) -> _Compared:
    """Compare the part of `rank`; never raise, because the other ranks wait for the answer."""
    compared, folder = _Compared(), Path(order.folder)
    try:
        division = Division(rank, readers)
        if readers[rank].view not in ((), readers[0].view):
            compared.part = manifest.own_files(folder, order.files, order.generation)
        if compared.part:
            loads = readers[rank].loads
            compared.problems += manifest.missing_from_part(folder, compared.part, order.files, loads)
        files = compared.part or order.files
        own_files = division.whole_files(files)
        compared.problems += manifest.compare(folder, [file for file in own_files if not in_blocks(file)])
        compared.problems += manifest.compare(folder, filter(in_blocks, own_files), checksums=False)
        threads = max(1, len(os.sched_getaffinity(0)) // max(1, context.part(WorkerPlace).local_size))
        for file in filter(in_blocks, files):
            first, end = division.blocks(file)
            if first < end:
                compared.digests[file.path] = _digests(folder / file.path, first, end, threads, compared)
    except manifest.UnreadableError as error:  # the manifest of this copy
        compared.problems.append(Unreadable(error))
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
        if not disk.is_wrong(error):  # otherwise the rank that compares the size reports the error
            compared.problems.append(Unreadable(f"{path}: cannot be read ({error.strerror or error})"))
        return b""


def _of_view(order: _CheckOrder, compared_parts: Sequence[_Compared]) -> list[str]:
    """Return all problems of the files of one view; of many files each rank has read a part."""
    part_problems = [problem for part in compared_parts for problem in part.problems]
    problems = list(dict.fromkeys(part_problems))
    files = next((part.part for part in compared_parts if part.part), order.files)
    for file in filter(in_blocks, files):
        path = Path(order.folder) / file.path
        digests = b"".join(part.digests.get(file.path, b"") for part in compared_parts)
        if len(digests) != hashing.blocks_of(file) * hashing.DIGEST_BYTES:
            if not any(f"{path}:" in problem for problem in part_problems):
                problems.append(Unreadable(f"{path}: cannot be read as a whole on all ranks"))
        elif hashing.join_blocks(digests) != file.xxh3_128_blocks:
            problems.append(f"{path}: checksum differs from the manifest")
    return problems


def _nodes(numbers: Iterable[int]) -> str:
    """Return the words for nodes with the same view."""
    nodes = sorted(set(numbers))
    omitted = f" and {len(nodes) - MOST_NAMED} more" if len(nodes) > MOST_NAMED else ""
    return f"node{'s' if len(nodes) > 1 else ''} {', '.join(map(str, nodes[:MOST_NAMED]))}{omitted}"


def _of_nodes(nodes: str, problems: list[str]) -> str:
    """Return the problems of the copy of some nodes in a line; damage before unreadable files."""
    if all(isinstance(problem, Unreadable) for problem in problems):
        return Unreadable(first_of(problems))
    return f"{nodes}: {first_of(sorted(problems, key=lambda problem: isinstance(problem, Unreadable)))}"


def _next(judgement: Judgement, examined: CheckpointProblems | None, chosen: int | None) -> _CheckOrder:
    try:
        request = next(judgement) if examined is None else judgement.send(examined)
        if isinstance(request, Agreed):
            return _CheckOrder(agreed=request)
        folder, files = request
        saved_manifest = manifest.read(folder)
        view = divided_reading.view(folder)
        return _CheckOrder(
            str(folder), files, "", saved_manifest.generation, view, is_regular=not saved_manifest.groups
        )
    except StopIteration as end:
        return _CheckOrder(is_empty=not end.value, by_tracker=chosen is None)
    except (CheckpointError, ResumeError) as error:
        return _CheckOrder(refusal=str(error))
    except Exception as error:  # of any kind: the other ranks wait for a message
        return _CheckOrder(
            refusal=line_of(f"the checkpoint cannot be checked: {type(error).__name__}: {error}")
        )
