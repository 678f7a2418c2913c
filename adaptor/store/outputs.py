"""Sends files of a job that are no checkpoints (logs, TensorBoard, results) to a store (TTP_STORE_ALSO).

outputs/node0/logs/agent.log    a file of the folder `logs` of node 0

A changed file is sent again as a whole. Checkpoints in the folders are left out: `uploader.py` sends
checkpoints.
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
from adaptor.protocol import naming
from adaptor.store.client import PIECE, Store, open_store
from adaptor.store.settings import OutputSettings
from adaptor.text import size

# Seconds between two looks at the folders. Each request to a store costs money.
LOOK_S = 60.0
# The largest share of the time for the upload of a file: a large log would be sent without a pause.
_SHARE = 0.05
_ATTEMPTS_AT_END = 3
_RETRY_S = 1.0
_OURS = {naming.LEASE, naming.LOCK, naming.UPLOADS}


@dataclass(frozen=True)
class _Version:
    """The version of a file: its size in bytes, and the time of its last change, in ns since the epoch."""

    bytes: int
    changed_ns: int


class ChangedError(Exception):
    """A file has become shorter or has disappeared during its upload; the next look sends it again."""


class OutputUploader:
    """Sends changed files of some folders, until `end`.

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
        self._reported: set[str] = set()  # failures
        self._reason = "there was no time to send them"
        self._paced = 0.0  # when the next piece may be sent, on the monotonic clock

    def end(self) -> None:
        """Let `run` send the last changes, and return."""
        self._leaving.set()

    def run(self) -> None:
        """Send changed files until `end`, and once more after it."""
        store, failures_at_end = None, 0
        while True:
            leaving = self._leaving.is_set()  # read before the folders, whose later content is not sent
            try:
                if store is None:
                    store = open_store(self._order.url, self._order.endpoint, make=True)
                    self._note_what_was_sent(store)
                self._send(store, everything=leaving)
            except StoreError as error:
                self._reason = str(error)
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

    def tell_what_is_local(self, reason: str = "") -> None:
        """Report the place of the files in the store, or the number of unsent files.

        Args:
            reason: the reason, if it is not the last failure.
        """
        files = dict(self._files())
        local = [version.bytes for name, (_, version) in files.items() if self._sent.get(name) != version]
        url = f"{self._order.url.rstrip('/')}/{self._prefix}"
        if local:
            self._tell(
                f"[ttp] {len(local)} of {len(files)} files of {self._names} ({size(sum(local))}) are not in"
                f" {url}: {reason or self._reason}"
            )
        elif files:
            total = sum(version.bytes for _, version in files.values())
            self._tell(f"[ttp] {self._names}: {len(files)} files ({size(total)}) are in {url}")

    @property
    def _prefix(self) -> str:
        return f"outputs/node{self._order.node}"

    def _tell_once(self, line: str) -> None:
        if line not in self._reported:
            self._reported.add(line)
            self._tell(f"[ttp] {line}")

    def _note_what_was_sent(self, store: Store) -> None:
        """Count files as sent that the store has in their size, and that have not changed since."""
        stored = store.objects(self._prefix)
        for name, (_, version) in self._files():
            sent = stored.get(name)
            if sent is None or sent.bytes != version.bytes:
                continue
            if sent.modified.timestamp() * 1e9 > version.changed_ns:
                self._sent[name] = version

    def _files(self) -> Iterator[tuple[str, tuple[Path, _Version]]]:
        """Yield the name of the object, the path and the version of each file."""
        for folder in self._order.folders:
            for place, folders, names in os.walk(folder):  # a missing folder has no files
                folders[:] = [name for name in folders if name not in _OURS and not _is_checkpoint(name)]
                for name in names:
                    path = Path(place) / name
                    try:
                        status = path.lstat()
                    except OSError:
                        continue
                    if stat.S_ISREG(status.st_mode) and name not in _OURS:
                        name_in_store = f"{self._prefix}/{_below(folder)}/{path.relative_to(folder)}"
                        yield name_in_store, (path, _version(status))

    def _send(self, store: Store, *, everything: bool) -> None:
        """Send the changed files.

        Args:
            store: the store.
            everything: send also files whose last upload is recent.
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
                self._reason = f"{str(path)!a}: {reason}"
                self._tell_once(f"{str(path)!a} is not sent to {self._order.url}: {reason}")
                continue
            self._sent[name] = sent
            end = time.monotonic()
            self._not_before[name] = end + (end - began) / _SHARE

    def _send_file(self, store: Store, name: str, path: Path) -> _Version:
        """Write a file as an object; return the sent version.

        Raises:
            ChangedError: the file has become shorter.
            OSError: the file cannot be read.
        """
        descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_NOFOLLOW | os.O_CLOEXEC)
        with os.fdopen(descriptor, "rb") as file:
            version = _version(os.fstat(descriptor))  # another file may have got the name since the look

            def pieces() -> Iterator[bytes]:
                for at in range(0, version.bytes, PIECE):
                    count = min(PIECE, version.bytes - at)
                    self._pace(count)
                    content = file.read(count)
                    if len(content) != count:
                        raise ChangedError
                    yield content

            if version.bytes > PIECE:
                store.put_pieces(name, pieces(), version.bytes)
            else:
                store.put(name, b"".join(pieces()))
        return version

    def _pace(self, count: int) -> None:
        """Wait before a piece is sent, to keep the rate while the job trains."""
        if not self._order.rate:
            return
        current_time = time.monotonic()
        begin = max(self._paced, current_time)
        self._paced = begin + count / self._order.rate
        self._leaving.wait(begin - current_time)


def _version(status: os.stat_result) -> _Version:
    return _Version(status.st_size, status.st_mtime_ns)


def _is_checkpoint(name: str) -> bool:
    """Return whether a folder is a checkpoint, also an unfinished one or one that was moved aside."""
    return re.search(r"(^|_)iter_[0-9]", name) is not None


def _below(folder: str) -> str:
    """Return the name of a folder in the names of objects: its path, without a leading `/`."""
    path = os.path.normpath(folder)
    if path.startswith(("/", ".")):
        path = os.path.normpath(Path(path).absolute())
    return path.lstrip("/")


def _require_name(name: str) -> None:
    """Refuse a name that no object can have. Raises ValueError."""
    if not name.isprintable():  # surrogates, of a name that is no UTF-8, are not printable
        raise ValueError("an object cannot have this name")
