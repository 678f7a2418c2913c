"""Checks the save folder before a job begins, and takes its lease in a worker, for its job.

Invariant: the lease belongs to the process that the agent names, not to the worker, so the lease outlives a
restart of all workers. Rank 0 takes the lease, and every other rank checks that it writes as the same user.
"""

from __future__ import annotations

import contextlib
import errno
import mmap
import os
import platform
import re
import tempfile
from pathlib import Path

import msgspec

from adaptor import context, output
from adaptor.checkpoint import disk, tracker
from adaptor.checkpoint.lease import Lease
from adaptor.checkpoint.lease_content import LARGEST, LeaseContent, Owner, decode
from adaptor.errors import CheckpointError, ConfigError
from adaptor.protocol import naming
from adaptor.protocol.environment import GENERATION, Generation, WorkerPlace

# Variables for workers: the owner of the lease, and the file for the name of the leased folder.
OWNER = "TTP_OWNER"
NOTE = "TTP_OWNER_NOTE"
# HOST:PORT of the rendezvous store, if the job has lost the store of its flags.
STORE = "TTP_OWNER_STORE"
# The seconds for which the job waits for a leaving job.
PATIENCE = "TTP_OWNER_PATIENCE"

# The beginning of an object store's name, such as msc://profile/folder; pathlib turns `//` into `/`.
_STORE = re.compile(r"\w+:/")
_CREDENTIALS = re.compile(r"(:/+)[^/@]*@")  # before the host

# The folder of which this process has taken the lease.
_claimed: Path | None = None


def claim(save_folder: str | Path) -> None:
    """Take the lease for the job, while this worker lives. Raises ConfigError if another job has it."""
    global _claimed
    folder = Path(save_folder).resolve()
    if _claimed == folder:  # a framework may parse its arguments more than once
        return
    try:
        owner_text = os.environ.get(OWNER)
        owner = Owner.of(os.getppid()) if owner_text is None else msgspec.json.decode(owner_text, type=Owner)
        lease = Lease(folder, owner, os.environ.get(GENERATION, ""), os.environ.get(STORE, ""))
        lease.take(patience_s=float(os.environ.get(PATIENCE, "0")))
        if NOTE in os.environ:
            Path(os.environ[NOTE]).write_text(str(folder))
        lease.keep()
    except (OSError, CheckpointError) as error:
        reason = getattr(error, "strerror", None) or error
        output.tell(
            f"[ttp] the lease {folder / naming.LEASE} cannot be taken ({reason}): if a second job saves in"
            " this folder, neither of the two is refused",
            to="stdout",
        )
    _claimed = folder


def require_same_user(save_folder: str | Path) -> None:
    """Refuse a rank that writes into the shared folder as another user than rank 0. Raises ConfigError.

    Drafts are made private, so the first save would fail. Rank 0 has taken the lease by now; a folder without
    the lease of the generation is another node's own disk, or cannot be told.
    """
    lease_of_job = None
    try:
        if save_folder:
            lease_of_job = _lease_of_this_generation(Path(save_folder))
        if lease_of_job is None:
            return
        theirs, written = lease_of_job
        own_uid = disk.probe_rights(Path(save_folder)).st_uid
    except OSError:
        return
    if theirs == own_uid:
        return
    node_name = f"node {context.part(WorkerPlace).node} ({platform.node()})"
    raise ConfigError(
        f"--save is {save_folder}: {node_name} writes there as {disk.name_user(own_uid)}, node 0 "
        f"({written.host})"
        f" as {disk.name_user(theirs)}, and neither can write into the other's checkpoints: start"
        " ttprun as the same user on every node"
    )


def is_folder_shared(save_folder: Path) -> bool:
    """Return True if the folder has the lease that rank 0 has taken: then this node shares the folder."""
    try:
        return _lease_of_this_generation(save_folder) is not None
    except OSError:
        return False


def tell_of_own_disk(save_folder: str | Path) -> None:
    """Print, once for each node with a folder of its own, its effect on last words."""
    place, generation = context.part(WorkerPlace), context.part(Generation)
    if not save_folder or not place.node or place.local_rank or generation.is_restart or not generation.name:
        return
    with contextlib.suppress(OSError):  # the system cannot tell
        try:
            if _lease_of_this_generation(Path(save_folder)) is not None:
                return
        except FileNotFoundError:
            pass
        output.tell(
            f"[ttp] node {place.node}: --save is {save_folder}, and the lease of node 0 is not there, so it"
            " is a folder of this node's own: regular saves are kept on each node; last words are written"
            " only where one node can write all of the model, and the other nodes cannot load them then:"
            " a folder that all nodes share avoids this",
            to="stdout",
        )


def _lease_of_this_generation(save_folder: Path) -> tuple[int, LeaseContent] | None:
    """Return the owner of the lease file, as this machine sees it, and the content of the file."""
    descriptor = disk.open_regular(save_folder / naming.LEASE)
    with os.fdopen(descriptor, "rb") as file:
        # Of the open file: NFS may show the owner of a former file. And as this machine sees both users.
        theirs, written = os.fstat(descriptor).st_uid, decode(file.read(LARGEST), LeaseContent)
    generation = context.part(Generation).name
    if written is None or not generation or written.generation != generation:
        return None
    return theirs, written


def require_writable(save_folder: str | Path | None) -> None:
    """Refuse a job without a folder for its last words; the folder is made. Raises ConfigError."""
    folder = _require_folder(save_folder)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder) as file:
            if not context.part(Generation).is_restart:  # a restart trains on while the disk is full
                file.write(bytes(mmap.PAGESIZE))
    except OSError as error:
        node, user = context.part(WorkerPlace).node, disk.name_user(os.geteuid())
        raise ConfigError(
            f"--save is {save_folder}: it cannot be written ({error.strerror}) by {user} on node {node}"
            f" ({platform.node()})"
        ) from None


def require_possible(save_folder: str | Path | None) -> None:
    """Refuse a folder like `require_writable`, as far as possible without writing. Raises ConfigError."""
    folder = _require_folder(save_folder).absolute()
    nearest_existing = next(path for path in (folder, *folder.parents) if path.exists())
    if not nearest_existing.is_dir():
        raise ConfigError(f"--save is {save_folder}: it cannot be written ({os.strerror(errno.ENOTDIR)})")
    if not os.access(nearest_existing, os.W_OK | os.X_OK):
        raise ConfigError(f"--save is {save_folder}: it cannot be written ({os.strerror(errno.EACCES)})")


def _require_folder(save_folder: str | Path | None) -> Path:
    if not save_folder:
        raise ConfigError(
            "--save is missing: a folder for the checkpoint after a failure, e.g. --save checkpoints"
        )
    # A framework with support for object stores would get a path of this machine instead.
    if _STORE.match(str(save_folder)):
        shown = _CREDENTIALS.sub(r"\1...@", str(save_folder))
        raise ConfigError(
            f"--save is {shown}: the checkpoint after a failure needs a folder of a file system,"
            " not an object store"
        )
    return Path(save_folder)


def is_same(first: str | Path | None, second: str | Path | None) -> bool:
    """Return whether two options name the same folder; False if an option is missing."""
    return first is not None and second is not None and Path(first).resolve() == Path(second).resolve()


def require_no_later_step(save_folder: str | Path, step: int) -> None:
    """Refuse a save folder with a step after `step`, which a restart would load. Raises ConfigError."""
    saved = tracker.tracked_step(Path(save_folder))
    if saved is None and context.part(WorkerPlace).rank == 0:
        _tell_of_untracked(Path(save_folder), step)
    if saved is not None and saved > step:
        back = ""
        if os.path.lexists(Path(save_folder) / naming.final_name(step)):
            back = f"; to go back to step {step}, write {step} into {Path(save_folder) / naming.TRACKER}"
        raise ConfigError(
            f"--save {save_folder} holds step {saved}, but training begins at step {step}: "
            f"load step {saved}, or choose another folder{back}"
        )


def _tell_of_untracked(save_folder: Path, step: int) -> None:
    newer = [
        later_step
        for later_step in tracker.steps(save_folder)
        if later_step > step and tracker.has_manifest(save_folder, later_step)
    ]
    if newer:
        output.tell(
            f"[ttp] {save_folder} holds checkpoints up to step {newer[-1]} that no tracker names: training"
            f" begins at step {step}, and they stay; to go on from them, load from that folder",
            to="stdout",
        )
