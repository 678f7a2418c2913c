"""The parts of last words with the agreed sums; the agent joins the parts to a field of the manifest."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import msgspec

from adaptor.protocol.naming import FileEntry
from adaptor.verification.agreed_state import AgreedGroup, AgreedState

_PART = ".state."


class AgreedPart(msgspec.Struct, frozen=True):
    """The agreed sums of one group."""

    group: str
    agreed: AgreedGroup

    @property
    def name(self) -> str:
        """The name of the file, below the checkpoint."""
        return f"{_PART}{self.group}"


def join(
    folder: Path, step: int, entries: Sequence[FileEntry]
) -> tuple[tuple[FileEntry, ...], AgreedState | None]:
    """Return the files of the checkpoint without the parts, and the agreed state.

    The state is None without parts, or if a call before a crash has removed a part.

    Args:
        folder: of the checkpoint; files may have the names of drafts.
        step: of the checkpoint.
        entries: of all groups.
    """
    files = tuple(entry for entry in entries if not entry.path.startswith(_PART))
    try:
        parts = [
            msgspec.json.decode((folder / entry.draft).read_bytes(), type=AgreedPart)
            for entry in entries
            if entry.path.startswith(_PART)
        ]
    except (OSError, msgspec.MsgspecError):
        return files, None
    return files, AgreedState(step, {part.group: part.agreed for part in parts}) if parts else None
