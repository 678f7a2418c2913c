"""Brings the objects below a prefix of a store into a folder: the data of a job, before the job begins.

Objects come in parts, a few at the same time, and are written in order. An object that the folder already has
is not requested again (`data_folder`). The size of each object is compared, and all its parts have to be of
one version. An etag that is an MD5 (S3, written in one request) is compared with the content.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import re
import shutil
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import islice
from pathlib import Path, PurePosixPath

from adaptor.errors import StoreError
from adaptor.store import store_requests
from adaptor.store.client import PIECE, DamagedError, Part, Store, Stored
from adaptor.store.data_folder import DataFolder, is_own
from adaptor.text import duration, size

TELL_S = 5.0  # between two lines about the progress

Tell = Callable[[str], None]


@dataclass(frozen=True)
class _Task:
    """The objects of a store, and the missing ones."""

    store: Store
    folder: DataFolder
    objects: Mapping[str, Stored]
    missing: Mapping[str, Stored]


def bring(
    pulls: Sequence[tuple[Store, Path]], tell: Tell, clock: Callable[[], float] = time.monotonic
) -> None:
    """Bring all objects of each store into its folder.

    Args:
        pulls: stores, and a folder for each; all folders differ.
        tell: prints a line.
        clock: the clock, in seconds.

    Raises:
        StoreError: a store does not answer or has no object, the disk refuses or is too small.
    """
    listed = {store: _objects(store) for store, _ in pulls}
    try:
        with contextlib.ExitStack() as stack:
            tasks = []
            # In the same order on all nodes: nodes that share two folders would wait for each other.
            for store, path in sorted(pulls, key=lambda entry: os.path.realpath(entry[1])):
                folder = DataFolder(path, str(store))
                waited = stack.enter_context(folder.locked(tell))
                objects = _objects(store) if waited else listed[store]
                tasks.append(_Task(store, folder, objects, folder.missing(objects)))
            _require_room(tasks)
            for task in tasks:
                _Pull(task, tell, clock).run()
    except OSError as error:
        named = error.filename or " or ".join(str(path) for _, path in pulls)
        raise StoreError(f"{named}: {error.strerror or error}") from None


def _objects(store: Store) -> dict[str, Stored]:
    """Return the objects that become files, by name.

    Raises:
        StoreError: the store has no object, or an object cannot become a file.
    """
    objects_by_name = {name: stored for name, stored in store.objects("").items() if not is_own(name)}
    folders = {str(parent) for name in objects_by_name for parent in PurePosixPath(name).parents}
    for name in sorted(objects_by_name.keys() & {*folders, ""}):
        if objects_by_name[name].bytes and name:
            raise StoreError(
                f"{store}: has an object {name} and others below {name}/, which cannot both be in a folder"
            )
        if not objects_by_name[name].bytes:
            del objects_by_name[
                name
            ]  # consoles make an empty object for a folder; '' is the object of the prefix
    if not objects_by_name:
        raise StoreError(f"{store}: there is no object below it")
    for name in objects_by_name:
        parts = PurePosixPath(name).parts
        if not parts or parts[0] == "/" or ".." in parts or "\0" in name:
            raise StoreError(f"{store}: has an object {name!r}, which cannot be a file of a folder")
    return objects_by_name


def _require_room(tasks: Iterable[_Task]) -> None:
    """Refuse disks without room for the missing objects; a replaced file stays until its end.

    Raises:
        StoreError: names the folder.
    """
    bytes_by_device: dict[int, int] = {}
    for task in tasks:
        device = task.folder.path.stat().st_dev
        bytes_by_device[device] = bytes_by_device.get(device, 0) + sum(
            stored.bytes for stored in task.missing.values()
        )
        free = shutil.disk_usage(task.folder.path).free
        if free < bytes_by_device[device]:
            raise StoreError(
                f"{task.folder.path}: {size(free)} are free, and {size(bytes_by_device[device])} have to "
                "come from"
                f" {task.store}: make room, or name another folder"
            )


class _Pull:
    """Brings the missing objects of a store."""

    def __init__(self, task: _Task, tell: Tell, clock: Callable[[], float]) -> None:
        self._store = task.store
        self._folder = task.folder
        self._task = task
        self._tell = tell
        self._clock = clock
        self._total = sum(stored.bytes for stored in task.missing.values())
        self._pulled_bytes = 0
        self._began = self._told_at = clock()
        self._has_agreed = False  # an etag was the MD5 of the content
        self._compares = task.store.address.scheme in ("s3", "obs")
        self._differed: dict[str, str] = {}

    def run(self) -> None:
        objects, missing = self._task.objects, self._task.missing
        count = f"{len(objects)} object{'' if len(objects) == 1 else 's'}"
        summary = f"{count}, {size(sum(stored.bytes for stored in objects.values()))}"
        if not missing:
            self._tell(f"[ttp] {self._folder.path} has what is in {self._store} already ({summary})")
            return
        self._bring(missing)
        seconds = max(self._clock() - self._began, 1e-3)
        self._tell(
            f"[ttp] {self._folder.path} has what is in {self._store} ({summary};"
            f" {size(self._total)} came in {duration(seconds)}, {size(int(self._total / seconds))}/s)"
        )

    def _bring(self, missing: Mapping[str, Stored]) -> None:
        # Closed after an error, when a request may still take minutes.
        with contextlib.closing(store_requests.in_order(self._calls(missing), "ttp-pull")) as coming:
            for name, stored in missing.items():
                parts = islice(coming, _count(stored))
                try:
                    self._write(name, stored, (part.result() for part in parts))
                except DamagedError as error:
                    for part in parts:
                        part.cancel()
                    self._write_again(name, error)

    def _calls(self, missing: Mapping[str, Stored]) -> Iterator[Callable[[], Part]]:
        for name, stored in missing.items():
            yield from self._parts(name, stored)

    def _parts(self, name: str, stored: Stored) -> Iterator[Callable[[], Part]]:
        for start in range(0, stored.bytes, PIECE):
            length = min(PIECE, stored.bytes - start)
            yield partial(self._store.get_part, name, start, length)

    def _write_again(self, name: str, error: DamagedError) -> None:
        """Request an object once more: a byte has changed on the way, or the object in the store."""
        stored = self._store.stat(name)
        if stored is None:
            raise error
        self._write(name, stored, (call() for call in self._parts(name, stored)))

    def _write(self, name: str, stored: Stored, parts: Iterator[Part]) -> None:
        """Write a file from the parts.

        Raises:
            DamagedError: the object was written again meanwhile, or differs from its etag.
        """
        digest = hashlib.md5(usedforsecurity=False)
        etag, count = None, 0
        try:
            with self._folder.file(name, stored) as file:
                for part in parts:
                    etag = part.etag if etag is None else etag
                    if (part.etag, part.size) != (etag, stored.bytes):
                        raise DamagedError(f"{self._store}/{name}: was changed while it was pulled")
                    if self._compares:
                        digest.update(part.content)
                    file.write(part.content)
                    count += len(part.content)
                    self._count(len(part.content))
                self._compare(name, etag or "", digest.hexdigest())
        except DamagedError:
            self._pulled_bytes -= count
            raise

    def _compare(self, name: str, etag: str, etag_of_content: str) -> None:
        """Compare content with an etag that is an MD5; in a store that encrypts, an etag may be no MD5."""
        if re.fullmatch("[0-9a-f]{32}", etag) is None or not self._compares:
            return
        if etag == etag_of_content:
            self._has_agreed = True
        elif not self._has_agreed and self._differed.get(name) == etag_of_content:
            self._compares = False
            self._tell(
                f"[ttp] {self._store}/{name}: the store sends the same content again, and the etag of the"
                " object is not its MD5, as in a store that encrypts: from here on only the sizes of objects"
                " are compared"
            )
        else:
            self._differed[name] = etag_of_content
            raise DamagedError(f"{self._store}/{name}: the content that came has another MD5 than its etag")

    def _count(self, count: int) -> None:
        self._pulled_bytes += count
        current_time = self._clock()
        if current_time - self._told_at < TELL_S:
            return
        self._told_at = current_time
        rate = self._pulled_bytes / max(current_time - self._began, 1e-3)
        remaining_s = (self._total - self._pulled_bytes) / rate
        self._tell(
            f"[ttp] {self._folder.path}: {size(self._pulled_bytes)} of {size(self._total)} have come from"
            f" {self._store} ({size(int(rate))}/s, {duration(remaining_s)} left)"
        )


def _count(stored: Stored) -> int:
    return -(-stored.bytes // PIECE)
