"""The files of host copies that an agent holds, from start to start of the workers.

The files belong to the workers of the node and, if the agent keeps copies for another node, to the ranks of
that node. The files are anonymous memory without a name: they end with the agent process, however the
process ends. `adaptor.protocol.copy_file` has their content.
"""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Collection, Sequence

from adaptor import descriptors
from adaptor.protocol.copy_file import FILES, CopyFile


class CopyFiles:
    """The files of one agent."""

    def __init__(self) -> None:
        self._own: dict[int, list[int]] = {}
        self._others: dict[int, list[int]] = {}  # of ranks of another node
        self._ranks: set[int] = set()

    def begin(self, ranks: Sequence[int]) -> str:
        """Make the missing files for `ranks`; return the paths of all files, for the environment.

        Files of ranks that were on this node in the previous start are kept: the ranks may be on another
        node now. For each rank the files that its worker writes come first.

        Raises:
            OSError: no more files can be made.
        """
        _keep_only(self._own, {*ranks, *self._ranks})
        self._ranks = set(ranks)
        for rank in ranks:
            if rank not in self._own:
                self._own[rank] = [_new_file() for _ in range(FILES)]
        paths: dict[int, list[str]] = {}
        for files_by_rank in (self._own, self._others):
            for rank, files in files_by_rank.items():
                paths.setdefault(rank, []).extend(map(_path, files))
        return json.dumps(paths)

    def own(self) -> dict[int, list[CopyFile]]:
        """Open the files of the ranks of this node for reading.

        Raises:
            OSError: no more files can be opened.
        """
        return {rank: [CopyFile(_path(file)) for file in self._own[rank]] for rank in sorted(self._ranks)}

    def other(self, rank: int, slot: int) -> CopyFile:
        """Open a file for a copy of a rank of another node.

        Raises:
            OSError: no more files can be made or opened.
        """
        if rank not in self._others:
            self._others[rank] = [_new_file() for _ in range(FILES)]
        return CopyFile(_path(self._others[rank][slot]))

    def to_overwrite(self, rank: int, generation: str, step: int, other_step: int) -> CopyFile:
        """Open the file for the copy of `step` of a rank of another node.

        The copy of `other_step` is kept, otherwise the older copy is overwritten: a spare node in the place
        of a lost node has no copy, and these copies may be the only ones. A copy that is not older than
        `step` was sent before, or belongs to a step from which the job has gone back.

        Args:
            rank: the owner of the copy.
            generation: the start of the workers in which the copy was made.
            step: the copied step.
            other_step: the step of the sender's other copy; -1: none.

        Raises:
            OSError: no more files can be made or opened.
        """

        def worth(slot: int) -> int:
            with contextlib.closing(self.other(rank, slot)) as file:
                header = file.header
            if header is None or header.generation != generation or header.step >= step:
                return -1
            return step if header.step == other_step else header.step

        return self.other(rank, min(range(FILES), key=worth))

    def forget_after(self, step: int) -> None:
        """Give up the copies of later steps: their state is in doubt.

        Raises:
            OSError: no more files can be opened.
        """
        for files in (*self._own.values(), *self._others.values()):
            for copy_descriptors in files:
                with contextlib.closing(CopyFile(_path(copy_descriptors))) as file:
                    if file.header is not None and file.header.step > step:
                        file.begin()

    def newest(self, *, is_kept: bool) -> int | None:
        """Return the newest step of which each rank of this node has a complete copy; None without one.

        Args:
            is_kept: count only copies that another node also has.
        """
        common_steps: set[int] | None = None
        for rank in sorted(self._ranks):
            steps = set()
            for copy_descriptors in self._own.get(rank, ()):
                file = CopyFile(_path(copy_descriptors))
                header, kept = file.header, file.kept
                file.close()
                if header is not None and (not is_kept or kept == header.step):
                    steps.add(header.step)
            common_steps = steps if common_steps is None else common_steps & steps
        return max(common_steps, default=None) if common_steps else None

    def close(self) -> None:
        """Close all files."""
        _keep_only(self._own, ())
        _keep_only(self._others, ())


def _keep_only(files_by_rank: dict[int, list[int]], ranks: Collection[int]) -> None:
    for rank in files_by_rank.keys() - set(ranks):
        for file in files_by_rank.pop(rank):
            os.close(file)


def _path(file: int) -> str:
    return f"/proc/{os.getpid()}/fd/{file}"


def _new_file() -> int:
    file = descriptors.in_memory("ttp-host-copy")
    os.fchmod(file, 0o600)
    return file
