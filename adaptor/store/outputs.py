"""Sends files of a job that are no checkpoints (logs, TensorBoard, results) to a store (TTP_STORE_ALSO).

outputs/node0/logs/agent.log    a file of the folder `logs` of node 0

A file that has changed is sent again as a whole. Checkpoints in the folders are left out: `uploader.py` sends
them.
"""

from __future__ import annotations

import os
import re
import stat
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from adaptor.errors import StoreError
from adaptor.operations.words import size
from adaptor.protocol import naming
from adaptor.store.client import PIECE, Store
from adaptor.store.opening import open_store
from adaptor.store.upload_order import OutputSettings

# Seconds between two looks at the folders. A store takes money for each request.
LOOK_S = 60.0
# A file that changed is sent at most for this part of the time: a large log would be sent without a pause.
_SHARE = 0.05
_ATTEMPTS_AT_END = 3
_RETRY_S = 1.0
_OURS = {naming.LEASE, naming.LOCK, naming.UPLOADS}


@dataclass(frozen=True)
class _Version:
    """The version of a file: its size in bytes, and when it was changed, in ns since the epoch."""

    bytes: int
    changed_ns: int


class ChangedError(Exception):
    """A file has become shorter, or is gone, while it was sent; it is sent at the next look."""


class OutputUploader:
    """Sends what changes in some folders, until `end`.

    Args:
        order: of the agent.
        tell: prints a line.
        look_s: seconds between two looks at the folders.
    """

    def __init__(self, order: OutputSettings, tell: Callable[[str], None], look_s: float = LOOK_S) -> None:
        self._order = order
        self._tell = tell
        self._look_s = look_s
        self._leaving = threading.Event()
        self._sent: dict[str, _Version] = {}  # by the name of the object
        self._not_before: dict[str, float] = {}  # by the name of the object, on the monotonic clock
        self._told: set[str] = set()  # failures
        self._why = "there was no time to send them"
        self._paced = 0.0  # when the next piece may be sent, on the monotonic clock

    def end(self) -> None:
        """Let `run` send what has changed since, and return."""
        self._leaving.set()

    def run(self) -> None:
        """Send what changes until `end`, and once more after it."""
        store, failures_at_end = None, 0
        while True:
            leaving = self._leaving.is_set()  # before the folders are read: what is in them then is sent
            try:
                if store is None:
                    store = open_store(self._order.url, self._order.endpoint, make=True)
                    self._note_what_was_sent(store)
                self._send(store, everything=leaving)
            except StoreError as error:
                self._why = str(error)
                self._tell_once(f"{self._order.url} does not get {self._names}: {error}; it is tried again")
                failures_at_end += leaving
                if failures_at_end >= _ATTEMPTS_AT_END:
                    break
                if leaving:
                    time.sleep(_RETRY_S)
                else:
                    self._leaving.wait(self._look_s)
                continue
            if leaving:
                break
            self._leaving.wait(self._look_s)
        self.tell_what_is_local()

    @property
    def _names(self) -> str:
        return ", ".join(self._order.folders)

    def tell_what_is_local(self, why: str = "") -> None:
        """Say where the files are, and how many of them the store does not have.

        Args:
            why: the reason, where it is not the last failure.
        """
        files = dict(self._files())
        local = [one.bytes for name, (_, one) in files.items() if self._sent.get(name) != one]
        where = f"{self._order.url.rstrip('/')}/{self._prefix}"
        if local:
            self._tell(
                f"[ttp] {len(local)} of {len(files)} files of {self._names} ({size(sum(local))}) are not in"
                f" {where}: {why or self._why}"
            )
        elif files:
            total = sum(one.bytes for _, one in files.values())
            self._tell(f"[ttp] {self._names}: {len(files)} files ({size(total)}) are in {where}")

    @property
    def _prefix(self) -> str:
        return f"outputs/node{self._order.node}"

    def _tell_once(self, line: str) -> None:
        if line not in self._told:
            self._told.add(line)
            self._tell(f"[ttp] {line}")

    def _note_what_was_sent(self, store: Store) -> None:
        """Take files for sent that the store has in their size, and that have not changed since."""
        stored = store.objects(self._prefix)
        for name, (_, version) in self._files():
            found = stored.get(name)
            if found is None or found.bytes != version.bytes:
                continue
            if found.modified.timestamp() * 1e9 > version.changed_ns:
                self._sent[name] = version

    def _files(self) -> Iterator[tuple[str, tuple[Path, _Version]]]:
        """Yield the name of the object, the path and the version of each file."""
        for folder in self._order.folders:
            for place, folders, names in os.walk(folder):  # a folder that is not there yet has no files
                folders[:] = [name for name in folders if name not in _OURS and not _is_checkpoint(name)]
                for name in names:
                    path = Path(place) / name
                    try:
                        found = path.lstat()
                    except OSError:
                        continue
                    if stat.S_ISREG(found.st_mode) and name not in _OURS:
                        below = f"{_below(folder)}/{path.relative_to(folder)}"
                        yield f"{self._prefix}/{below}", (path, _version(found))

    def _send(self, store: Store, *, everything: bool) -> None:
        """Send the files that have changed.

        Args:
            store: the store.
            everything: also files that were sent a short time ago.

        Raises:
            StoreError: the store refuses, or does not answer.
        """
        for name, (path, version) in self._files():
            began = time.monotonic()
            if self._sent.get(name) == version:
                continue
            if began < self._not_before.get(name, 0.0) and not everything:
                continue
            try:
                _require_name(name)
                sent = self._send_file(store, name, path)
            except ChangedError:
                continue
            except (OSError, ValueError) as error:
                reason = error.strerror if isinstance(error, OSError) else str(error)
                self._why = f"{str(path)!a}: {reason}"
                self._tell_once(f"{str(path)!a} is not sent to {self._order.url}: {reason}")
                continue
            self._sent[name] = sent
            ended = time.monotonic()
            self._not_before[name] = ended + (ended - began) / _SHARE

    def _send_file(self, store: Store, name: str, path: Path) -> _Version:
        """Write a file as an object; return the version that was sent.

        Raises:
            ChangedError: it has become shorter.
            OSError: it cannot be read.
        """
        descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_NOFOLLOW | os.O_CLOEXEC)
        with os.fdopen(descriptor, "rb") as file:
            version = _version(os.fstat(descriptor))  # another file may have taken the name since the look

            def pieces() -> Iterator[bytes]:
                for at in range(0, version.bytes, PIECE):
                    wanted = min(PIECE, version.bytes - at)
                    self._pace(wanted)
                    content = file.read(wanted)
                    if len(content) != wanted:
                        raise ChangedError
                    yield content

            if version.bytes > PIECE:
                store.put_pieces(name, pieces(), version.bytes)
            else:
                store.put(name, b"".join(pieces()))
        return version

    def _pace(self, count: int) -> None:
        """Wait before a piece is sent, so that the rate is kept while the job trains."""
        if not self._order.rate:
            return
        now = time.monotonic()
        begin = max(self._paced, now)
        self._paced = begin + count / self._order.rate
        self._leaving.wait(begin - now)


def _version(found: os.stat_result) -> _Version:
    return _Version(found.st_size, found.st_mtime_ns)


def _is_checkpoint(name: str) -> bool:
    """Return whether a folder is a checkpoint, also one that is being written or was moved aside."""
    return re.search(r"(^|_)iter_[0-9]", name) is not None


def _below(folder: str) -> str:
    """Return what stands for a folder in the names of objects: its path, without a `/` in front."""
    path = os.path.normpath(folder)
    if path.startswith(("/", ".")):
        path = os.path.normpath(Path(path).absolute())
    return path.lstrip("/")


def _require_name(name: str) -> None:
    """Refuse a name that no object can have. Raises ValueError."""
    if not name.isprintable():  # nor are surrogates, of a name that is no UTF-8
        raise ValueError("an object cannot have this name")
