"""The folders of regular saves: written by the framework under a temporary name, and renamed when complete
and on disk.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
from collections.abc import Iterator
from functools import partial
from pathlib import Path

from adaptor.checkpoint import (
    checksum_notes,
    disk,
    integrity,
    left_overs,
    linux_calls,
    manifest,
    publish,
    tracker,
)
from adaptor.checkpoint.manifest import Manifest
from adaptor.checkpoint.save_folder_lock import locked
from adaptor.errors import CheckpointError
from adaptor.protocol import naming
from adaptor.verification.agreed_state import AgreedState

# Files that are no part of a save: an NFS server's copies of removed open files, and short-lived probes.
_PASSING = (".nfs", disk.PROBE)
# A folder cannot be renamed to the name of another one, or of a file.
_IN_THE_WAY = (errno.ENOTEMPTY, errno.EEXIST, errno.ENOTDIR)


@disk.one_line
def prepare_regular(root: Path, step: int, generation: str = "") -> None:
    """Make the folder for a regular save of the framework, on each rank.

    Raises:
        CheckpointError: another user has put a link or a folder in its place.
    """
    saving = root / naming.regular_name(step, generation)
    root.mkdir(parents=True, exist_ok=True)
    disk.ensure_private(saving)


@disk.one_line
def take_on_own_disk(root: Path, step: int, generation: str = "") -> Path | None:
    """Take a regular save that rank 0 has renamed, if the save has its temporary name here: on another disk.

    Only an existing folder can be renamed: a client of a shared file system may answer all else from a cache.
    Of nodes that share the other disk, one takes the save. An empty folder is removed.

    Returns:
        The new path of the save; None if missing.
    """
    saving, taken = root / naming.regular_name(step, generation), root / naming.taken_name(step, generation)
    try:
        try:
            saving.rename(taken)
        except OSError as error:
            if error.errno not in _IN_THE_WAY:
                raise
            older = left_overs.abandon(taken)  # of a process that died, and was replaced online
            saving.rename(taken)
            left_overs.remove_beside(older, disk.remove, left_overs.ROOM_S)
    except FileNotFoundError:
        return None
    if not _written(taken):
        disk.remove(taken)
        return None
    return taken


@disk.one_line
def complete_on_own_disk(root: Path, step: int, generation: str) -> bool:
    """Name a save on a disk of this node's own, if the job ended before the save was named.

    Rank 0 has named the save, so every rank had written. After a power cut some files may be missing: the
    save is completed only if each file has the size in its note; the following check reads the files.

    Args:
        root: the save folder.
        step: of the save.
        generation: of the workers that have made the save, from the manifest of rank 0.

    Returns:
        True if the save has its name.

    Raises:
        CheckpointError: the disk refuses.
    """
    folder = root / naming.taken_name(step, generation)
    if not left_overs.is_left_over(folder):
        folder = root / naming.regular_name(step, generation)
    with contextlib.suppress(FileNotFoundError), _alone(folder):
        if not _is_noted(folder, step, generation):
            return False
        if folder.name == naming.regular_name(step, generation):
            taken = take_on_own_disk(root, step, generation)
            # A client of a shared file system may have shown another folder under the name.
            if taken is None or not _is_noted(taken, step, generation):
                return False
            folder = taken
        sync_regular(root, step, generation, folder)
        publish_regular(root, step, generation, folder)
        return True
    return False


@contextlib.contextmanager
def _alone(folder: Path) -> Iterator[None]:
    """Work on a folder that other ranks find, too; one rank does. A file system without locks lets all ranks
    work.

    Raises:
        FileNotFoundError: the folder has another name by now, or another rank is at work in it.
    """
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), str(folder)) from None
        except OSError:
            pass
        if not os.path.samestat(os.fstat(descriptor), folder.stat()):
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), str(folder))
        yield
    finally:
        os.close(descriptor)


def _is_noted(folder: Path, step: int, generation: str) -> bool:
    """Return True if each file of an unfinished save equals its note, and no noted file is missing.

    Raises:
        OSError: a note cannot be read.
        UnreadableError: the manifest of an earlier call cannot be read.
    """
    saved_manifest = manifest.read_if_intact(folder)  # none yet, or half of one
    if saved_manifest is not None and (saved_manifest.step, saved_manifest.generation) != (step, generation):
        return False  # an older version on its way out
    files = _written(folder)
    checksum_notes.require_readable(folder)
    entries = checksum_notes.entries(folder, files)
    return (
        bool(files)
        and not checksum_notes.without_file(folder)
        and all(file_entry.xxh3_128 for file_entry in entries)
    )


@disk.one_line
def sync_regular(root: Path, step: int, generation: str = "", taken: Path | None = None) -> None:
    """Bring a regular save to disk, which may take long, so that `publish_regular` is quick.

    Files without a checksum get one, except large files. `taken`: the result of `take_on_own_disk`.
    """
    saving = taken or root / naming.regular_name(step, generation)
    integrity.settle(saving)
    files = _written(saving)
    for path in files:
        disk.sync(path)
    checksum_notes.complete(saving, files)


@disk.one_line
def publish_regular(
    root: Path,
    step: int,
    generation: str = "",
    taken: Path | None = None,
    state: AgreedState | None = None,
) -> None:
    """Give a regular save, which the framework wrote to `regular_name(step, generation)`, its final name.

    The tracker is not touched: the caller replaces the tracker by `tracker.advance`. A complete checkpoint of
    the same step is replaced by the newer save, without a moment in which neither has the name if the file
    system can exchange two names. `taken`: the result of `take_on_own_disk`; `state`: for the manifest.

    Raises:
        CheckpointError: the save is missing or empty, or the disk refuses.
    """
    saving, final = taken or root / naming.regular_name(step, generation), root / naming.final_name(step)
    if not saving.is_dir():
        if tracker.is_complete(root, step):
            return
        raise CheckpointError(f"{saving}: missing, so the save of step {step} cannot be completed")
    files = _written(saving)
    for path in files:
        disk.sync(path)
    if not files:
        raise CheckpointError(f"{saving}: nothing was written, so there is nothing to publish")
    entries = checksum_notes.entries(saving, files)
    new_manifest = Manifest.now(step, entries, {}, 0, generation, part=taken is not None, state=state)
    disk.write(saving, naming.MANIFEST, new_manifest.encode())
    checksum_notes.remove(saving)
    disk.share_folder(saving)
    disk.sync_folders(saving)
    with locked(root):
        older = _replace_regular(root, step, saving, final)
    # The caller may keep a window open, in which this rank gives nothing to last words.
    left_overs.remove_beside(older, disk.remove, left_overs.ROOM_S)


def _written(saving: Path) -> list[Path]:
    """Return the files of a regular save, without notes and the manifest of an earlier call."""
    return [
        path
        for path in disk.files(saving)
        if path != saving / naming.MANIFEST
        and not path.name.startswith(_PASSING)
        and not checksum_notes.is_note(path)
    ]


def _replace_regular(root: Path, step: int, saving: Path, final: Path) -> list[Path]:
    """Rename `saving` to `final`, under the lock; return the folders of older versions, to be removed."""
    if not tracker.is_complete(root, step):
        publish.move_in(root, step, saving, final)
        return []
    if not linux_calls.exchange(saving, final):
        # A crash between these two is undone by left_overs.clean().
        replaced = root / naming.replaced_name(step)
        older = []
        if left_overs.is_left_over(replaced):
            older = [disk.free_name(root, partial(naming.abandoned_name, saving.name))]
            replaced.rename(older[0])
        else:
            disk.remove(replaced)
        final.rename(replaced)
        saving.rename(final)
        disk.sync(root)
        return [replaced, *older]
    # Under this name another node would take the folder for a save on its own disk.
    older = left_overs.abandon(saving)
    disk.sync(root)
    return older
