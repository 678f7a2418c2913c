"""The lease of a save folder: one job at a time saves in a folder.

A file in the folder names the `ttprun` of the job (`Owner`). The file is touched every few seconds while the
process lives, and removed at its end, unless nodes were lost. A second job is refused. The lease of a dead
owner gives way: on the same machine the kernel tells whether the process lives; from another machine the
lease is watched, and is stale when it does not change. So no clocks of two machines are compared.

The lease keeps apart two jobs that were started by mistake. The lease is no lock: if it cannot be written, a
line says so and the job goes on; and both sides of a cut network are one job.
"""

from __future__ import annotations

import contextlib
import os
import threading
import time
from collections.abc import Callable, Collection
from datetime import datetime, timedelta, timezone
from pathlib import Path

import msgspec

from adaptor import output
from adaptor.checkpoint import disk
from adaptor.checkpoint.lease_content import LARGEST, LeaseContent, Owner, decode
from adaptor.checkpoint.tracker import locked
from adaptor.errors import CheckpointError, ConfigError
from adaptor.protocol import naming

# The pause between two touches of the lease.
REFRESH_S = 5.0
# After this time an unchanged lease of another machine is stale. Six refreshes: a file system of several
# machines may be slow, or show a change late, by some seconds.
STALE_S = 30.0
# The pause between two looks at a lease of another machine, or of a job that is leaving.
LOOK_S = 1.0
# The pause between two lines while the job waits for a leaving job.
AGAIN_S = 10.0
LOCK_PATIENCE_S = 10.0  # a lease is not worth a longer delay of a start
RELEASE_S = 1.0  # of each wait of a release: on a disk that hangs the job ends all the same


def go_on_without(
    save_folder: Path,
    owner: Owner,
    generation: str,
    members: Collection[str],
    lost: Collection[str],
    *,
    has_lease: bool,
    store: str = "",
    leaving: bool = False,
) -> None:
    """Note in the lease that the job goes on with `members` and without `lost`; `owner` gets the lease.

    Both sides of a cut network may want to go on without the other side. Invariant: of the agents of one
    generation that share the folder, at most one side goes on. A side with an excluded member does not go on,
    nor does a side that finds the lease of a later generation: the other side has started workers.

    Args:
        has_lease: whether `owner` took the lease for the generation. Another agent gets the lease only if the
            lease shows that its node shares the folder.
        store: the new rendezvous store; "": it stays.
        leaving: another agent of the job takes the lease next, and waits until `owner` releases it.

    Raises:
        CheckpointError: the other side goes on, or the node does not share the folder.
        OSError: the disk refuses.
    """
    with locked(save_folder, patience_s=LOCK_PATIENCE_S):
        seen_lease = _look(save_folder)
        written = seen_lease.content if seen_lease is not None else None
        if written is None or written.generation != generation:
            if has_lease and (written is None or seen_lease is None or seen_lease.owner == owner):
                return  # the lease could not be written, so no other node can take the lease over
            raise CheckpointError(
                f"{save_folder / naming.LEASE} is not of this start of the workers: nodes do not share"
                " the folder, or the other side of a cut network goes on"
            )
        excluded = sorted(set(members) & set(written.excluded))
        if excluded:
            raise CheckpointError(f"the other side of a cut network goes on without {' and '.join(excluded)}")
        all_excluded = tuple(sorted({*written.excluded, *lost}))
        content = LeaseContent.of_owner(owner, generation, all_excluded, store or written.store)
        _write(save_folder, msgspec.structs.replace(content, leaving=leaving))


class LeaseOfOthers:
    """The lease of a job as a node sees it that waits for others, and has not got the lease itself.

    Args:
        agent: the name of the node's agent, as in `LeaseContent.excluded`.
    """

    def __init__(self, save_folder: Path, agent: str) -> None:
        self._save_folder = save_folder
        self._agent = agent
        self._first: LeaseContent | None = None

    def other_job(self) -> str:
        """Return the owner, for a person, if the other side of a cut network goes on by the lease; else "".

        The side has excluded this node, or has started workers since the first call.
        """
        with contextlib.suppress(OSError):  # an error of the disk: the next look follows
            seen_lease = _look(self._save_folder)
            if seen_lease is None or (written := seen_lease.content) is None:
                return ""
            content = msgspec.structs.replace(written, leaving=False, ended=False)
            self._first = self._first or content
            return content.words if self._agent in content.excluded or content != self._first else ""
        return ""


class StoreOfJob:
    """Finds the rendezvous store of a live job that saves in `save_folder` and has lost its first store."""

    def __init__(self, save_folder: Path) -> None:
        self._save_folder = save_folder
        self._seen: _Seen | None = None

    def find(self) -> str:
        """Return the store, "" without one; watch the lease of another machine for `STALE_S` seconds."""
        store = self._read()
        return store if store and self._seen and _is_there(self._save_folder, self._seen) else ""

    def look(self) -> str:
        """Return the store if the lease has changed since the last call, because its job lives; else ""."""
        seen_before, store = self._seen, self._read()
        return store if seen_before not in (None, self._seen) else ""

    def _read(self) -> str:
        with contextlib.suppress(OSError):
            self._seen = _look(self._save_folder)
            written = self._seen.content if self._seen is not None else None
            return written.store if written is not None else ""
        return ""


class _Seen(msgspec.Struct, frozen=True):
    """A lease at one look; if it has changed at the next look, its owner is alive."""

    text: bytes
    touched: int

    @property
    def owner(self) -> Owner | None:
        """Return the owner; None if the file has another content."""
        return decode(self.text, Owner)

    @property
    def content(self) -> LeaseContent | None:
        """Return the whole content; None if the file has another content."""
        return decode(self.text, LeaseContent)

    @property
    def leaving(self) -> bool:
        """Return True if the job of the lease saves in the folder for the last time."""
        written = self.content
        return written is not None and written.leaving and not written.ended

    def is_copied(self, save_folder: Path) -> bool:
        """Return True if the lease was written for another folder of this machine: it was copied."""
        written = self.content
        if written is None or not written.inode:
            return False
        try:
            status = save_folder.stat()
        except OSError:
            return False
        return (written.device, written.inode) != (status.st_dev, status.st_ino)


def _write(save_folder: Path, content: LeaseContent) -> None:
    status = save_folder.stat()
    content = msgspec.structs.replace(content, device=status.st_dev, inode=status.st_ino)
    disk.replace(save_folder, naming.LEASE, msgspec.json.encode(content))


def _look(save_folder: Path) -> _Seen | None:
    path = save_folder / naming.LEASE
    try:
        return _Seen(disk.read(path, LARGEST), path.stat().st_mtime_ns)
    except FileNotFoundError:
        return None
    except OSError as error:
        if not disk.is_wrong(error):
            raise  # the owner cannot be told
        return _Seen(b"", 0)  # a folder, a FIFO, too long: no lease


class Lease:
    """The lease of a save folder for the process `owner`; a thread touches the lease until `release`.

    `generation`: of the workers, if a worker takes the lease. `store`: as in `LeaseContent`.
    """

    def __init__(self, save_folder: Path, owner: Owner, generation: str = "", store: str = "") -> None:
        self._save_folder = save_folder
        self._owner = owner
        self._generation = generation
        self._store = store
        self._released = threading.Event()
        # Daemon: on a disk that hangs the thread does not delay the end.
        self._thread = threading.Thread(target=self._keep, name="ttp-lease", daemon=True)
        self._marker = threading.Thread(target=self._mark, name="ttp-lease-leaving", daemon=True)

    def take(self, patience_s: float = 0.0) -> None:
        """Take the lease; the lease of a dead owner is replaced, with a line.

        `patience_s`: a leaving job may take this time. Raises ConfigError if another job has the lease,
        CheckpointError, OSError.
        """
        path, seen_before = self._save_folder / naming.LEASE, self._wait_for_leaving_job(patience_s)
        if seen_before is not None and seen_before.owner != self._owner:
            if _is_there(self._save_folder, seen_before):
                raise ConfigError(self._refusal(seen_before))
            self._say_replaced(seen_before)
            if _look(self._save_folder) is None:
                seen_before = None  # removed: a lease that exists under our lock is new
        with locked(self._save_folder, patience_s=LOCK_PATIENCE_S):
            seen_now = _look(self._save_folder)
            is_own = seen_now is None or seen_now.owner == self._owner
            if (
                seen_now is not None
                and not is_own
                and (seen_before is None or seen_now.text != seen_before.text)
            ):
                raise ConfigError(self._refusal(seen_now))  # another job was quicker
            if path.is_dir() and not path.is_symlink():  # a file cannot replace a folder
                disk.remove(path)
            written = seen_now.content if seen_now is not None and is_own else None
            store = self._store or (written.store if written is not None else "")
            _write(self._save_folder, LeaseContent.of_owner(self._owner, self._generation, store=store))

    def _wait_for_leaving_job(self, patience_s: float) -> _Seen | None:
        """Return the lease once no leaving job has it, or after `patience_s`."""
        seen_lease = _look(self._save_folder)
        looks, unchanged = 0, 0.0
        while seen_lease is not None and seen_lease.leaving and seen_lease.owner not in (None, self._owner):
            owner, waited = seen_lease.owner, looks * LOOK_S
            assert owner is not None
            if waited >= patience_s or unchanged >= STALE_S or owner.lives() is False:
                break
            if looks % max(1, round(AGAIN_S / LOOK_S)) == 0:
                owner_name = f"{owner.host}, pid {owner.pid}"
                output.tell(
                    f"[ttp] waiting for a job that ends and still saves in {self._save_folder}"
                    f" ({owner_name})",
                    to="stdout",
                )
            time.sleep(LOOK_S)
            looks += 1
            with contextlib.suppress(OSError):  # an error of the disk: the next look follows
                previous, seen_lease = seen_lease, _look(self._save_folder)
                unchanged = unchanged + LOOK_S if seen_lease == previous else 0.0
        return seen_lease

    def other_job(self) -> str:
        """Return the name of another owner, for a person; "" if no other process has the lease."""
        with contextlib.suppress(OSError):  # an error of the disk: the next look follows
            seen_lease = _look(self._save_folder)
            if seen_lease is not None and seen_lease.owner not in (None, self._owner):
                assert seen_lease.owner is not None
                return seen_lease.owner.words
        return ""

    def leave(self) -> None:
        """Mark the lease as leaving, in a thread: the job saves for the last time, a restarted job waits."""
        with contextlib.suppress(RuntimeError):  # no thread is available: the restarted job is refused
            self._marker.start()

    def _mark(self) -> None:
        def leaving(written: LeaseContent) -> LeaseContent:
            # The generation of the workers, which save for the last time: by it nodes see that they share the
            # folder.
            generation = self._generation or written.generation
            return msgspec.structs.replace(written, generation=generation, leaving=True)

        self._rewrite(lambda written: None if self._released.is_set() else leaving(written))

    def _rewrite(self, change: Callable[[LeaseContent], LeaseContent | None]) -> None:
        """Write what `change` returns, unless that is None, if this owner has the lease; a disk may fail."""
        with (
            contextlib.suppress(OSError, CheckpointError),
            locked(self._save_folder, patience_s=LOCK_PATIENCE_S),
        ):
            seen_lease = _look(self._save_folder)
            if seen_lease is not None and seen_lease.owner == self._owner:
                content = change(seen_lease.content or LeaseContent.of_owner(self._owner, ""))
                if content is not None:
                    _write(self._save_folder, content)

    def keep(self) -> None:
        """Touch the lease from now on, in a thread; without a thread it holds on this machine alone."""
        with contextlib.suppress(RuntimeError):
            self._thread.start()

    def release(self, *, stays: bool = False) -> None:
        """Free the lease for another job; a disk that hangs delays the call by some `RELEASE_S` at most.

        Args:
            stays: the file stays, as that of a process that has ended: the other side of a cut network may
                take it and go on, and a later job takes it at once.
        """
        self._released.set()
        for thread in (self._thread, self._marker):
            if thread.is_alive():
                thread.join(RELEASE_S)
        end = self._note_end if stays else self._remove
        ender = threading.Thread(target=end, name="ttp-lease-end", daemon=True)
        ender.start()
        ender.join(RELEASE_S)

    def _remove(self) -> None:
        with contextlib.suppress(OSError):
            if self._is_ours():
                (self._save_folder / naming.LEASE).unlink()

    def _note_end(self) -> None:
        self._rewrite(lambda written: msgspec.structs.replace(written, ended=True))

    def _is_ours(self) -> bool:
        seen_lease = _look(self._save_folder)
        return seen_lease is not None and seen_lease.owner == self._owner

    def _keep(self) -> None:
        is_reported = False
        while not self._released.wait(REFRESH_S):
            with contextlib.suppress(OSError):  # an error of the disk does not end a job
                seen_lease = _look(self._save_folder)
                if seen_lease is None or seen_lease.owner is None:
                    continue
                if seen_lease.owner == self._owner:
                    os.utime(self._save_folder / naming.LEASE, follow_symlinks=False)
                elif not is_reported:
                    is_reported = True
                    output.tell(
                        f"[ttp] {self._save_folder / naming.LEASE} now names {seen_lease.owner.words}:"
                        " it and this job both save in this folder",
                        to="stdout",
                    )

    def _refusal(self, seen_lease: _Seen) -> str:
        owner = seen_lease.owner
        owner_name = "another job" if owner is None else owner.words
        return (
            f"--save is {self._save_folder}: {owner_name}, saves there; end that one, or choose another"
            f" folder (if it is gone for sure, remove {naming.LEASE} there)"
        )

    def _say_replaced(self, seen_lease: _Seen) -> None:
        owner = seen_lease.owner
        if owner is None:
            owner_name = "something that is no lease"
        elif owner.lives() and seen_lease.is_copied(self._save_folder):
            owner_name = f"{owner.words}, and is a copy from another folder"
        else:
            owner_name = f"{owner.words}, which is gone"
        output.tell(
            f"[ttp] {self._save_folder / naming.LEASE} belonged to {owner_name}: this job saves there now",
            to="stdout",
        )


def _is_there(save_folder: Path, seen_lease: _Seen) -> bool:
    """Return True if the owner of a lease is alive.

    The kernel knows whether a process of this machine lives. A lease of another machine is watched for
    `STALE_S` seconds, and its owner is alive if the lease changes; not if its owner has noted its own end.
    """
    owner, content = seen_lease.owner, seen_lease.content
    if content is not None and content.ended:
        return False
    lives = False if owner is None else owner.lives()
    if owner is None or lives is not None:
        # A copied lease from another machine is not refreshed, as noticed below; device numbers are local.
        return bool(lives) and not seen_lease.is_copied(save_folder)
    until = datetime.now(timezone.utc) + timedelta(seconds=STALE_S)
    output.tell(
        f"[ttp] {save_folder / naming.LEASE} names {owner.words}, which may still run there:"
        f" waiting for a sign of life until {until:%H:%M:%S} UTC ({STALE_S:g} s)",
        to="stdout",
    )
    # Looks are counted, not seconds: while the disk hangs for this machine, it may hang for the owner.
    remaining_looks = failures = round(STALE_S / LOOK_S)
    while remaining_looks:
        time.sleep(LOOK_S)
        try:
            seen_now = _look(save_folder)
        except OSError:
            if not failures:
                raise
            failures -= 1
            continue
        if seen_now != seen_lease:
            return seen_now is not None
        remaining_looks -= 1
    return False
