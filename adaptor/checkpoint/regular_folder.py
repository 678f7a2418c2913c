"""The folders of regular saves: written by the framework under a temporary name, and renamed when complete
and on disk.

Each rank leaves a note with the checksum beside each file that it has written. Rank 0, which makes the
manifest, takes the checksums from the notes, without reading the files of other ranks. A note is optional: if
a note cannot be written, read or removed, the save goes on, and its file has no checksum.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import xxhash

from adaptor.checkpoint import dcp, disk, hashing, left_overs, manifest, publish, tracker
from adaptor.checkpoint.hashing import HashingFile
from adaptor.checkpoint.manifest import Manifest
from adaptor.checkpoint.tracker import locked
from adaptor.errors import CheckpointError
from adaptor.protocol import naming
from adaptor.protocol.naming import FileEntry
from adaptor.verification.agreed_state import AgreedState

_SUFFIX = ".ttp-xxh3"
_LARGEST_NOTE = 64 << 20  # of a note, in bytes; with the sums of tensors 100 bytes for each
_SMALL = 64 << 20  # of a file that rank 0 hashes for others, in bytes: a hundredth of a second
# Files that are no part of a save: an NFS server's copies of removed open files, and short-lived probes.
_PASSING = (".nfs", disk.PROBE)
# A folder cannot be renamed to the name of another one, or of a file.
_IN_THE_WAY = (errno.ENOTEMPTY, errno.EEXIST, errno.ENOTDIR)


class _ChecksumNote(msgspec.Struct):
    bytes: int
    xxh3_128: str
    xxh3_128_blocks: str | None = None
    tensors: Mapping[str, str] = {}


def leave_note(folder: Path, entry: FileEntry, tensors: Mapping[str, str] | None = None) -> None:
    """Leave the checksum of a written file of the save in `folder`, unless the disk refuses.

    `tensors`: the sums of the tensors in the file, by name (`verification`).
    """
    note = _ChecksumNote(entry.bytes, entry.xxh3_128 or "", entry.xxh3_128_blocks, tensors or {})
    text = msgspec.json.encode(note)
    try:
        with os.fdopen(disk.create(folder, f"{entry.path}{_SUFFIX}"), "wb") as file:
            file.write(text)
    except OSError:
        # A part of the note; `noted_entries` reads no note older than its file.
        with contextlib.suppress(OSError):
            (folder / f"{entry.path}{_SUFFIX}").unlink()


def hash_and_leave(folder: Path, path: Path, tensors: Mapping[str, str] | None = None) -> None:
    """Hash a written file and leave its checksum, if the file can be read; `tensors`: see `leave_note`."""
    with contextlib.suppress(OSError):
        leave_note(folder, hashing.entry_of(path, path.relative_to(folder).as_posix()), tensors)


@contextlib.contextmanager
def hashed_archive(open_archive: Callable[[Any], Any], folder: Path, name: str) -> Iterator[Any]:
    """Write the archive `name` of the save in `folder`, and leave its checksum."""
    with HashingFile(folder / name, base_folder=folder) as file, open_archive(file) as archive:
        yield archive
    leave_note(folder, file.entry(name))


def write_and_leave(folder: Path, name: str, content: bytes) -> None:
    """Write a file and leave its checksum; `sync_regular` brings all files to disk."""
    with os.fdopen(disk.create(folder, name), "wb") as file:
        file.write(content)
    leave_note(folder, FileEntry(name, len(content), xxhash.xxh3_128_hexdigest(content)))


def tensors_of(path: Path) -> Mapping[str, str]:
    """Return the sums of the tensors in a file that was written; empty without a note of them."""
    try:
        note = _read_fresh_note(path, path.stat())
    except OSError:
        return {}
    return {} if note is None else note.tensors


def complete_notes(folder: Path, files: list[Path]) -> None:
    """Hash the files of a save in `folder` without a note, unless they are large.

    Only files of a process that the adaptor cannot look into are large and without a note. Raises OSError,
    and CheckpointError if a file has fewer bytes than were written.
    """
    for path in files:
        state = path.stat()
        written = _read_note(path)
        if written is not None and written.bytes > state.st_size:
            raise CheckpointError(
                f"{path}: has {state.st_size} bytes, and {written.bytes} were written: it was cut off"
            )
        is_noted = written is not None and written.bytes == state.st_size and _is_newer(_note_of(path), state)
        if state.st_size <= _SMALL and not is_noted:
            hash_and_leave(folder, path)


def is_note(path: Path) -> bool:
    """Return True if a file of a save is a note, and not part of the checkpoint."""
    return path.name.endswith(_SUFFIX)


def without_file(folder: Path) -> bool:
    """Return True if a note has no file."""
    return any(is_note(path) and not _noted(path).exists() for path in disk.files(folder))


def require_readable(folder: Path) -> None:
    """Read each note, because `noted_entries` ignores an unreadable note. Raises OSError."""
    for path in disk.files(folder):
        if is_note(path):
            try:
                disk.read(path, _LARGEST_NOTE)
            except OSError as error:
                if not disk.is_wrong(error):
                    error.filename = error.filename or str(path)
                    raise


def _noted(note: Path) -> Path:
    return note.with_name(note.name.removesuffix(_SUFFIX))


def noted_entries(folder: Path, files: list[Path]) -> list[FileEntry]:
    """Return the entries for `files`, without a checksum where no note is left. Raises OSError."""
    earlier = _of_earlier_call(folder)
    file_entries = []
    for path in files:
        name, state = path.relative_to(folder).as_posix(), path.stat()
        note = _read_fresh_note(path, state) or (
            earlier.get(name) if _is_newer(folder / naming.MANIFEST, state) else None
        )
        if note is None or note.bytes != state.st_size:
            file_entries.append(FileEntry(name, state.st_size, None))
        else:
            blocks = note.xxh3_128_blocks
            file_entries.append(FileEntry(name, note.bytes, note.xxh3_128, xxh3_128_blocks=blocks))
    return file_entries


def remove_notes(folder: Path) -> None:
    """Remove all notes, once the manifest has the checksums. A note that cannot be removed stays."""
    with contextlib.suppress(OSError):
        for path in list(disk.files(folder)):
            if is_note(path):
                with contextlib.suppress(OSError):
                    path.unlink()


def _is_newer(written: Path, state: os.stat_result) -> bool:
    """Return True if a file with checksums was written after the file with this state."""
    try:
        return written.stat().st_mtime_ns >= state.st_mtime_ns
    except OSError:
        return False


def _note_of(path: Path) -> Path:
    return path.with_name(f"{path.name}{_SUFFIX}")


def _read_fresh_note(path: Path, state: os.stat_result) -> _ChecksumNote | None:
    """Return the note of the file with this state; None for a note of an earlier file of the same name."""
    return _read_note(path) if _is_newer(_note_of(path), state) else None


def _read_note(path: Path) -> _ChecksumNote | None:
    """Return the note of the newest file of this name whose write has ended; None if there is none."""
    try:
        text = disk.read(_note_of(path), _LARGEST_NOTE)
        return msgspec.json.decode(text, type=_ChecksumNote)
    except (OSError, msgspec.MsgspecError):
        return None


def _of_earlier_call(folder: Path) -> Mapping[str, _ChecksumNote]:
    """Return the entries of a manifest whose call did not come to rename the folder."""
    if not (folder / naming.MANIFEST).exists():
        return {}
    try:
        files = manifest.read(folder).files
    except CheckpointError:
        return {}
    return {
        entry.path: _ChecksumNote(entry.bytes, entry.xxh3_128, entry.xxh3_128_blocks)
        for entry in files
        if entry.xxh3_128 is not None
    }


@disk.one_line
def prepare_regular(save_folder: Path, step: int, generation: str = "") -> None:
    """Make the folder for a regular save of the framework, on each rank. Raises CheckpointError."""
    saving = save_folder / naming.regular_name(step, generation)
    save_folder.mkdir(parents=True, exist_ok=True)
    disk.ensure_private(saving)


@disk.one_line
def take_on_own_disk(save_folder: Path, step: int, generation: str = "") -> Path | None:
    """Take a regular save that rank 0 has renamed, if the save has its temporary name here: on another disk.

    Only an existing folder can be renamed: a client of a shared file system may answer all else from a cache.
    Of nodes that share the other disk, one takes the save. An empty folder is removed. Returns the new path;
    None if missing.
    """
    saving, taken = (
        save_folder / naming.regular_name(step, generation),
        save_folder / naming.taken_name(step, generation),
    )
    try:
        try:
            saving.rename(taken)
        except OSError as error:
            if error.errno not in _IN_THE_WAY:
                raise
            older = left_overs.abandon(taken)  # of a process that died, and was replaced online
            saving.rename(taken)
            left_overs.remove_beside(older, disk.remove, left_overs.REMOVAL_WAIT_S)
    except FileNotFoundError:
        return None
    if not _written(taken):
        disk.remove(taken)
        return None
    return taken


@disk.one_line
def complete_on_own_disk(save_folder: Path, step: int, generation: str) -> bool:
    """Name a save on a disk of this node's own, if the job ended before that; return True if named.

    Rank 0 has named the save, so every rank had written. After a power cut some files may be missing: the
    save is completed only if each file has the size in its note; the following check reads the files.
    `generation`: of the workers, from the manifest of rank 0. Raises CheckpointError.
    """
    folder = save_folder / naming.taken_name(step, generation)
    if not left_overs.is_left_over(folder):
        folder = save_folder / naming.regular_name(step, generation)
    with contextlib.suppress(FileNotFoundError), _alone(folder):
        if not _is_noted(folder, step, generation):
            return False
        if folder.name == naming.regular_name(step, generation):
            taken = take_on_own_disk(save_folder, step, generation)
            # A client of a shared file system may have shown another folder under the name.
            if taken is None or not _is_noted(taken, step, generation):
                return False
            folder = taken
        sync_regular(save_folder, step, generation, folder)
        publish_regular(save_folder, step, generation, folder)
        return True
    return False


@contextlib.contextmanager
def _alone(folder: Path) -> Iterator[None]:
    """Work on a folder that other ranks find, too; one rank does, or all on a file system without locks.

    Raises FileNotFoundError if the folder has another name by now, or another rank is at work in it.
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
    """Return True if each file of an unfinished save equals its note, and no noted file is missing."""
    saved_manifest = manifest.read_if_intact(folder)  # none yet, or half of one
    if saved_manifest is not None and (saved_manifest.step, saved_manifest.generation) != (step, generation):
        return False  # an older version on its way out
    files = _written(folder)
    require_readable(folder)
    entries = noted_entries(folder, files)
    return bool(files) and not without_file(folder) and all(file_entry.xxh3_128 for file_entry in entries)


@disk.one_line
def sync_regular(save_folder: Path, step: int, generation: str = "", taken: Path | None = None) -> None:
    """Bring a regular save to disk, which may take long, so that `publish_regular` is quick.

    Files without a checksum get one, except large files. `taken`: the result of `take_on_own_disk`.
    """
    saving = taken or save_folder / naming.regular_name(step, generation)
    settle_integrity(saving)
    files = _written(saving)
    for path in files:
        disk.sync(path)
    complete_notes(saving, files)


def settle_integrity(folder: Path) -> None:
    """Take notes of checksums out of the framework's own file, if it has the known form. Raises OSError."""
    path = folder / dcp.INTEGRITY
    if not path.exists():
        return
    try:
        recorded = dcp.decode_integrity(disk.read(path, 64 << 20), path)
    except CheckpointError:
        return
    kept = {name: digest for name, digest in recorded.files.items() if not is_note(Path(name))}
    if kept != recorded.files:
        disk.replace(folder, dcp.INTEGRITY, dcp.Integrity(recorded.algorithm, kept).encode())


@disk.one_line
def publish_regular(
    save_folder: Path,
    step: int,
    generation: str = "",
    taken: Path | None = None,
    state: AgreedState | None = None,
) -> None:
    """Give a regular save, which the framework wrote to `regular_name(step, generation)`, its final name.

    The caller replaces the tracker (`tracker.advance`). A complete checkpoint of the same step is replaced
    without a moment in which neither has the name if the file system can exchange two names. `taken`: the
    result of `take_on_own_disk`. Raises CheckpointError if the save is missing or empty, or the disk refuses.
    """
    saving, final = (
        taken or save_folder / naming.regular_name(step, generation),
        save_folder / naming.final_name(step),
    )
    if not saving.is_dir():
        if tracker.is_complete(save_folder, step):
            return
        raise CheckpointError(f"{saving}: missing, so the save of step {step} cannot be completed")
    files = _written(saving)
    for path in files:
        disk.sync(path)
    if not files:
        raise CheckpointError(f"{saving}: nothing was written, so there is nothing to publish")
    entries = noted_entries(saving, files)
    new_manifest = Manifest.now(step, entries, {}, 0, generation, part=taken is not None, state=state)
    disk.write(saving, naming.MANIFEST, new_manifest.encode())
    remove_notes(saving)
    disk.share_folder(saving)
    disk.sync_folders(saving)
    with locked(save_folder):
        older = _replace_regular(save_folder, step, saving, final)
    # The caller may keep a window open, in which this rank gives nothing to last words.
    left_overs.remove_beside(older, disk.remove, left_overs.REMOVAL_WAIT_S)


def _written(saving: Path) -> list[Path]:
    """Return the files of a regular save, without notes and the manifest of an earlier call."""
    return [
        path
        for path in disk.files(saving)
        if path != saving / naming.MANIFEST and not path.name.startswith(_PASSING) and not is_note(path)
    ]


def _replace_regular(save_folder: Path, step: int, saving: Path, final: Path) -> list[Path]:
    """Rename `saving` to `final`, under the lock; return the folders of older versions, to be removed."""
    if not tracker.is_complete(save_folder, step):
        publish.move_in(save_folder, step, saving, final)
        return []
    if not disk.exchange(saving, final):
        # A crash between these two is undone by left_overs.clean().
        replaced = save_folder / naming.replaced_name(step)
        older = []
        if left_overs.is_left_over(replaced):
            older = [disk.free_name(save_folder, partial(naming.abandoned_name, saving.name))]
            replaced.rename(older[0])
        else:
            disk.remove(replaced)
        final.rename(replaced)
        saving.rename(final)
        disk.sync(save_folder)
        return [replaced, *older]
    # Under this name another node would take the folder for a save on its own disk.
    older = left_overs.abandon(saving)
    disk.sync(save_folder)
    return older
