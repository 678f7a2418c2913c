"""The shared file system, and the agents' jobs on it, step by step as in `checkpoint.publish`."""

from __future__ import annotations

from collections.abc import Callable
from random import Random
from typing import Any

from adaptor.checkpoint import naming
from adaptor.checkpoint.manifest import FileEntry
from adaptor.control.messages import Prepare, Publish
from tests.simulation.clock import Body, Clock, Process

# What the framework's own save has written: right by definition.
REGULAR = "regular"


class DiskError(Exception):
    """In the place of CheckpointError."""


class Disk:
    """Every call is one moment; what takes time yields between them.

    on_final  is called with a step and its files when they get their final name
    """

    def __init__(self, clock: Clock, random: Random, on_final: Callable[[int, dict[str, Any]], None]) -> None:
        self._clock = clock
        self._random = random
        self._on_final = on_final
        self.folders: dict[str, dict[str, Any]] = {}
        self.tracker: int | None = None
        self.slow_s = self.names_s = 0.005
        self.slices = random.choice([1, 2, 4])
        self.trouble = 0.0  # how often something on it fails
        self.stuck_at = float("inf")  # from then on nothing on it returns, on these nodes
        self.stuck_on: set[int] = set()
        self.full_for: set[int] = set()  # nodes that cannot write to it
        self._turn: tuple[Process, Publish] | None = None  # whose it is; it goes with the process

    def pause(self, node: int, seconds: float = 0.0) -> float:
        """How long a call on `node` takes: about `seconds`, or as long as names and folders take."""
        if self._clock.now >= self.stuck_at and node in self.stuck_on:
            return 1e9
        return self._random.uniform(0.1, 2.0) * (seconds or self.names_s)

    def write(self, folder: str, path: str, content: Any) -> None:
        if folder not in self.folders:
            raise FileNotFoundError(f"{folder}: no such folder")
        self.folders[folder][path] = content

    def is_complete(self, step: int) -> bool:
        return naming.final_name(step) in self.folders

    def prepare(self, order: Prepare, node: int) -> Body[str]:
        name = naming.temporary_name(order.step, order.term, order.number)
        yield self.pause(node)
        self._may_fail()
        self.folders.pop(name, None)
        yield self.pause(node)
        if name in self.folders:
            raise DiskError(f"{name}: exists")
        self.folders[name] = {}
        return name

    def publish(self, order: Publish, by: Process, node: int) -> Body[int]:
        """The step that the tracker names then."""
        step = order.step
        temporary = naming.temporary_name(step, order.term, order.number)
        final = naming.final_name(step)
        yield self.pause(node)
        self._may_fail()
        if not self.is_complete(step):  # this world is of one generation
            yield from self._make_ready(order, temporary, node)
        while self._turn is not None and self._turn[0].alive:
            yield 0.05
        self._turn = mine = (by, order)
        try:
            if not self.is_complete(step):
                yield from self._move_in(step, temporary, final, node)
            yield self.pause(node)
            self._announce(step)
        finally:
            if self._turn is mine:
                self._turn = None
        yield self.pause(node)
        self.folders.pop(temporary, None)
        return max(step, self.tracker or 0)

    def _make_ready(self, order: Publish, temporary: str, node: int) -> Body[None]:
        if not order.files:
            raise DiskError("nothing to publish")
        for entry in order.files:
            self._name(temporary, entry)
            yield self.pause(node)
        wanted = {entry.path for entry in order.files}
        files = self._folder(temporary)
        for path in set(files) - wanted:
            del files[path]
        yield self.pause(node)
        self._folder(temporary)  # the manifest

    def _move_in(self, step: int, temporary: str, final: str, node: int) -> Body[None]:
        yield self.pause(node)
        self._may_fail()
        if final in self.folders:
            self.folders[f"aside_{final}.{len(self.folders)}"] = self.folders.pop(final)
        self._folder(temporary)
        self.folders[final] = self.folders.pop(temporary)
        self._on_final(step, self.folders[final])

    def publish_regular(self, step: int) -> None:
        """A save of the framework gets its name; the one that is there is replaced."""
        self.folders[naming.final_name(step)] = {REGULAR: step}

    def replace_tracker(self, step: int) -> None:
        if self.tracker is None or self.tracker < step:
            self.tracker = step

    def clean(self, term: int) -> None:
        """At the end of an incident."""
        for name in [name for name in self.folders if naming.is_temporary(name)]:
            if naming.term_of(name) == term:
                del self.folders[name]

    def _name(self, folder: str, entry: FileEntry) -> None:
        files = self._folder(folder)
        if entry.draft in files:
            files[entry.path] = files.pop(entry.draft)
        if entry.path not in files:
            raise DiskError(f"{entry.path}: reported as written, but missing")

    def _folder(self, name: str) -> dict[str, Any]:
        if name not in self.folders:
            raise DiskError(f"{name}: no such folder")
        return self.folders[name]

    def _announce(self, step: int) -> None:
        if self.tracker is not None and self.tracker > step and not self.is_complete(self.tracker):
            raise DiskError(f"the tracker names step {self.tracker}")
        self.replace_tracker(step)

    def _may_fail(self) -> None:
        if self._random.random() < self.trouble:
            raise DiskError("no space left on device")
