"""The files of host copies that an agent holds for the workers of its node, from start to start of them.

They are anonymous memory: they end with this process, however it ends, and nothing has a name that could be
left behind. What is in them: `adaptor.protocol.copy_file`.
"""

from __future__ import annotations

import json
import os
from collections.abc import Collection, Sequence

from adaptor import descriptors

# While one is written, the other is whole.
KEPT = 2


class CopyFiles:
    """The files of one agent."""

    def __init__(self) -> None:
        self._files: dict[int, list[int]] = {}
        self._ranks: set[int] = set()

    def begin(self, ranks: Sequence[int]) -> str:
        """Make the files that are missing for `ranks`; return where all files are, for the environment.

        Those of ranks that were on this node in the start before are kept: they may be on another node now.

        Raises:
            OSError: no more files can be made.
        """
        self._keep_only({*ranks, *self._ranks})
        self._ranks = set(ranks)
        for rank in ranks:
            if rank not in self._files:
                self._files[rank] = [_made() for _ in range(KEPT)]
        own = os.getpid()
        return json.dumps(
            {rank: [f"/proc/{own}/fd/{file}" for file in files] for rank, files in self._files.items()}
        )

    def close(self) -> None:
        """Let go of all."""
        self._keep_only(())

    def _keep_only(self, ranks: Collection[int]) -> None:
        for rank in self._files.keys() - set(ranks):
            for file in self._files.pop(rank):
                os.close(file)


def _made() -> int:
    file = descriptors.in_memory("ttp-host-copy")
    os.fchmod(file, 0o600)
    return file
