"""Brings the objects below a prefix of a store into a folder: the data of a job, before it begins.

Objects come in parts, a few at the same time, and are written in order. An object that the folder already has
is not requested again (`data_folder`). The size of each object is compared, all its parts have to be of one
version, and where its etag is an MD5 (S3, written in one request) the content is compared with it.
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
from adaptor.operations.words import duration, size
from adaptor.store import ahead
from adaptor.store.client import PIECE, DamagedError, Part, Store, Stored
from adaptor.store.data_folder import DataFolder, is_own

TELL_S = 5.0  # between two lines about what has come

Tell = Callable[[str], None]


@dataclass(frozen=True)
class _Task:
    """The objects of a store, and those of them that are to come."""

    store: Store
    folder: DataFolder
    objects: Mapping[str, Stored]
    missing: Mapping[str, Stored]


def bring(pulls: Sequence[tuple[Store, Path]], tell: Tell, now: Callable[[], float] = time.monotonic) -> None:
    """Let each folder have all objects of its store.

    Args:
        pulls: stores, and a folder for each; all folders differ.
        tell: prints a line.
        now: the clock, in seconds.

    Raises:
        StoreError: a store does not answer or has no object, the disk refuses or is too small.
    """
    listed = {store: _objects(store) for store, _ in pulls}
    try:
        with contextlib.ExitStack() as stack:
            tasks = []
            # In one order on all nodes: two that share two folders would wait for each other.
            for store, path in sorted(pulls, key=lambda one: os.path.realpath(one[1])):
                folder = DataFolder(path, str(store))
                waited = stack.enter_context(folder.locked(tell))
                objects = _objects(store) if waited else listed[store]
                tasks.append(_Task(store, folder, objects, folder.missing(objects)))
            _require_room(tasks)
            for task in tasks:
                _Pull(task, tell, now).run()
    except OSError as error:
        named = error.filename or " or ".join(str(path) for _, path in pulls)
        raise StoreError(f"{named}: {error.strerror or error}") from None


def _objects(store: Store) -> dict[str, Stored]:
    """Return the objects that become files, by name.

    Raises:
        StoreError: there is none, or one cannot become a file.
    """
    found = {name: one for name, one in store.objects("").items() if not is_own(name)}
    folders = {str(parent) for name in found for parent in PurePosixPath(name).parents}
    for name in sorted(found.keys() & {*folders, ""}):
        if found[name].bytes and name:
            raise StoreError(
                f"{store}: has an object {name} and others below {name}/, which cannot both be in a folder"
            )
        if not found[name].bytes:
            del found[name]  # consoles make an empty object for a folder; '' is the one of the prefix
    if not found:
        raise StoreError(f"{store}: there is no object below it")
    for name in found:
        parts = PurePosixPath(name).parts
        if not parts or parts[0] == "/" or ".." in parts or "\0" in name:
            raise StoreError(f"{store}: has an object {name!r}, which cannot be a file of a folder")
    return found


def _require_room(tasks: Iterable[_Task]) -> None:
    """Refuse disks that are too small for what comes; a file that is replaced stays until its end.

    Raises:
        StoreError: names the folder.
    """
    needed: dict[int, int] = {}
    for task in tasks:
        device = task.folder.path.stat().st_dev
        needed[device] = needed.get(device, 0) + sum(one.bytes for one in task.missing.values())
        free = shutil.disk_usage(task.folder.path).free
        if free < needed[device]:
            raise StoreError(
                f"{task.folder.path}: {size(free)} are free, and {size(needed[device])} have to come from"
                f" {task.store}: make room, or name another folder"
            )


class _Pull:
    """Brings what is missing of one store."""

    def __init__(self, task: _Task, tell: Tell, now: Callable[[], float]) -> None:
        self._store = task.store
        self._folder = task.folder
        self._task = task
        self._tell = tell
        self._now = now
        self._total = sum(one.bytes for one in task.missing.values())
        self._come = 0
        self._began = self._told = now()
        self._has_agreed = False  # an etag was the MD5 of what came
        self._compares = task.store.address.scheme in ("s3", "obs")
        self._differed: dict[str, str] = {}

    def run(self) -> None:
        objects, missing = self._task.objects, self._task.missing
        count = f"{len(objects)} object{'' if len(objects) == 1 else 's'}"
        what = f"{count}, {size(sum(one.bytes for one in objects.values()))}"
        if not missing:
            self._tell(f"[ttp] {self._folder.path} has what is in {self._store} already ({what})")
            return
        self._bring(missing)
        seconds = max(self._now() - self._began, 1e-3)
        self._tell(
            f"[ttp] {self._folder.path} has what is in {self._store} ({what};"
            f" {size(self._total)} came in {duration(seconds)}, {size(int(self._total / seconds))}/s)"
        )

    def _bring(self, missing: Mapping[str, Stored]) -> None:
        # Closed after an error, when a request may still take minutes.
        with contextlib.closing(ahead.in_order(self._calls(missing), "ttp-pull")) as coming:
            for name, stored in missing.items():
                parts = islice(coming, _count(stored))
                try:
                    self._write(name, stored, (part.result() for part in parts))
                except DamagedError as error:
                    for part in parts:  # what is left of it
                        part.cancel()
                    self._write_again(name, error)

    def _calls(self, missing: Mapping[str, Stored]) -> Iterator[Callable[[], Part]]:
        for name, stored in missing.items():
            yield from self._parts(name, stored)

    def _parts(self, name: str, stored: Stored) -> Iterator[Callable[[], Part]]:
        for start in range(0, stored.bytes, PIECE):
            length = min(PIECE, stored.bytes - start)
            yield partial(self._store.get_part, name, start, length)

    def _write_again(self, name: str, why: DamagedError) -> None:
        """Request an object once more: a byte has changed on its way, or the object in the store."""
        stored = self._store.stat(name)
        if stored is None:
            raise why
        self._write(name, stored, (call() for call in self._parts(name, stored)))

    def _write(self, name: str, stored: Stored, parts: Iterator[Part]) -> None:
        """Write a file of what comes.

        Raises:
            DamagedError: it was written anew meanwhile, or is not what its etag says.
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
            self._come -= count
            raise

    def _compare(self, name: str, etag: str, found: str) -> None:
        """Compare content with its etag, where that is an MD5: where a store encrypts, it may be none."""
        if re.fullmatch("[0-9a-f]{32}", etag) is None or not self._compares:
            return
        if etag == found:
            self._has_agreed = True
        elif not self._has_agreed and self._differed.get(name) == found:
            self._compares = False
            self._tell(
                f"[ttp] {self._store}/{name}: the store sends the same content again, and the etag of the"
                " object is not its MD5, as in a store that encrypts: from here on only the sizes of objects"
                " are compared"
            )
        else:
            self._differed[name] = found
            raise DamagedError(f"{self._store}/{name}: the content that came has another MD5 than its etag")

    def _count(self, count: int) -> None:
        self._come += count
        now = self._now()
        if now - self._told < TELL_S:
            return
        self._told = now
        rate = self._come / max(now - self._began, 1e-3)
        self._tell(
            f"[ttp] {self._folder.path}: {size(self._come)} of {size(self._total)} have come from"
            f" {self._store} ({size(int(rate))}/s, {duration((self._total - self._come) / rate)} left)"
        )


def _count(stored: Stored) -> int:
    return -(-stored.bytes // PIECE)
