"""The files of host copies that an agent holds, from start to start of the workers.

They are those of the workers of its node and, where it keeps copies for another node, of the ranks there.
They are anonymous memory: they end with this process, however it ends, and nothing has a name that could be
left behind. What is in them: `adaptor.protocol.copy_file`.
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
        """Make the files that are missing for `ranks`; return where all files are, for the environment.

        Those of ranks that were on this node in the start before are held, too: they may be on another node
        now. Of each rank the files that its worker writes come first.

        Raises:
            OSError: no more files can be made.
        """
        _keep_only(self._own, {*ranks, *self._ranks})
        self._ranks = set(ranks)
        for rank in ranks:
            if rank not in self._own:
                self._own[rank] = [_made() for _ in range(FILES)]
        paths: dict[int, list[str]] = {}
        for files_by_rank in (self._own, self._others):
            for rank, files in files_by_rank.items():
                paths.setdefault(rank, []).extend(map(_path, files))
        return json.dumps(paths)

    def own(self) -> dict[int, list[CopyFile]]:
        """Open the files of the ranks of this node, for reading what their workers have written.

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
            self._others[rank] = [_made() for _ in range(FILES)]
        return CopyFile(_path(self._others[rank][slot]))

    def to_overwrite(self, rank: int, generation: str, step: int, other_step: int) -> CopyFile:
        """Open the file in which the copy of `step` of a rank of another node is to be kept.

        The copy of the step `other_step` is not overwritten, and else the older one is: a spare node that has
        taken the place of a lost one has no copy, and these may be the only ones. What is not older than
        `step` was sent before, or is of a step from which the job has gone back.

        Args:
            rank: whose copy it is.
            generation: the start of the workers in which it was made.
            step: that was copied.
            other_step: the step of the other copy that the sender has; -1: it has none.

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

    def newest(self, *, is_kept: bool) -> int | None:
        """Return the newest step of which each rank of this node has a whole copy; None: there is none.

        Args:
            is_kept: only copies count that another node has, too.
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
        """Let go of all."""
        _keep_only(self._own, ())
        _keep_only(self._others, ())


def _keep_only(files_by_rank: dict[int, list[int]], ranks: Collection[int]) -> None:
    for rank in files_by_rank.keys() - set(ranks):
        for file in files_by_rank.pop(rank):
            os.close(file)


def _path(file: int) -> str:
    return f"/proc/{os.getpid()}/fd/{file}"


def _made() -> int:
    file = descriptors.in_memory("ttp-host-copy")
    os.fchmod(file, 0o600)
    return file
