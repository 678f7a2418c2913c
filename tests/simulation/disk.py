"""The shared file system, and the agents' operations on it, step by step as in `checkpoint.publish`."""

from __future__ import annotations

from random import Random
from typing import TYPE_CHECKING, Any

from adaptor.protocol import naming
from adaptor.protocol.messages import Find, Prepare, Publish
from adaptor.protocol.naming import FileEntry
from tests.simulation.clock import Body, Clock, Process

if TYPE_CHECKING:
    from tests.simulation.save_folder_tasks import SaveFolderTasks

# The content of a regular save of the framework: correct by definition.
REGULAR = "regular"


class DiskError(Exception):
    """Stands in for CheckpointError."""


class Disk:
    """A file system that outlives generations. Every call is one moment; longer operations yield in between.

    Attributes:
        made_by: the generation that made each folder with a final name.
        slow_s: seconds of a write.
        names_s: seconds of an operation on names and folders.
        trouble: the probability that an operation fails.
        full_for: machines that cannot write.
        stuck_at: when operations of the machines `stuck_on` begin to hang, until `healed_at`.
    """

    def __init__(self, clock: Clock, random: Random) -> None:
        self._clock = clock
        self._random = random
        self.folders: dict[str, dict[str, Any]] = {}
        self.made_by: dict[str, str] = {}
        self.tracker: int | None = None
        self.slices = random.choice([1, 2, 4])
        self._turn: tuple[Process, Publish] | None = (
            None  # whose turn it is to publish; it ends with the process
        )
        self.healed_at = 0.0
        self.heal()

    def heal(self) -> None:
        """Repair the disk; operations that hang return some time later."""
        self.slow_s = self.names_s = 0.005
        self.trouble = 0.0
        self.full_for: set[int] = set()
        self.stuck_at = float("inf")
        self.stuck_on: set[int] = set()
        self.healed_at = self._clock.now

    @property
    def troubled(self) -> bool:
        return bool(self.stuck_on) or self.slow_s > 0.1

    def hang(self, at: float, nodes: set[int], healed_at: float) -> None:
        self.stuck_at, self.stuck_on, self.healed_at = at, nodes, healed_at

    def wait(self, node: int, seconds: float = 0.0) -> Body[None]:
        """Wait for a call on `node`: about `seconds`, or as long as names and folders take."""
        if self._hangs(node):
            late = self._random.uniform(0.0, 5.0)
            while self._clock.now < self.healed_at:
                yield 1.0
            yield late
        yield self._random.uniform(0.1, 2.0) * (seconds or self.names_s)

    def _hangs(self, node: int) -> bool:
        return self.stuck_at <= self._clock.now < self.healed_at and node in self.stuck_on

    def has_turn(self, by: Process) -> bool:
        return self._turn is not None and self._turn[0] is by

    def _hangs_in_turn(self, by: SaveFolderTasks, node: int) -> None:
        if self._hangs(node):  # by design, all other agents wait
            by.world.faults.disk_fails = True

    def write(self, folder: str, path: str, content: Any) -> None:
        if folder not in self.folders:
            raise FileNotFoundError(f"{folder}: no such folder")
        self.folders[folder][path] = content

    def prepare(self, order: Prepare, node: int, generation: str) -> Body[str]:
        name = naming.temporary_name(order.step, order.term, order.number, generation)
        yield from self.wait(node)
        self._may_fail()
        self.folders.pop(name, None)
        yield from self.wait(node)
        if name in self.folders:
            raise DiskError(f"{name}: exists")
        self.folders[name] = {}
        return name

    def publish(self, order: Publish, by: SaveFolderTasks, node: int) -> Body[int]:
        """Publish a checkpoint; return the step that the tracker names then."""
        step, generation = order.step, by.world.generation
        temporary = naming.temporary_name(step, order.term, order.number, generation)
        yield from self.wait(node)
        self._may_fail()
        for earlier_number in range(order.number - 1, order.written - 1, -1):
            name = naming.temporary_name(step, order.term, earlier_number, generation)
            if name in self.folders:
                self.folders[temporary] = self.folders.pop(name)
            yield from self.wait(node)
        if not self._is_of(step, generation):
            yield from self._make_ready(order, temporary, by, node)
        while self._turn is not None and self._turn[0].alive:
            yield 0.05
        self._turn = turn = (by, order)
        try:
            self._hangs_in_turn(by, node)
            if not self._is_of(step, generation):
                yield from self._move_in(order, temporary, by, node)
            self._hangs_in_turn(by, node)
            yield from self.wait(node)
            self._tell_tracker(step, generation)
        finally:
            if self._turn is turn:
                self._turn = None
        yield from self.wait(node)
        self.folders.pop(temporary, None)
        return max(step, self.tracker or 0)

    def find(self, order: Find, node: int, generation: str) -> Body[int]:
        yield from self.wait(node)
        steps = [s for s in map(naming.step_of, self.folders) if s is not None and self._is_of(s, generation)]
        candidates = [
            s for s in steps if s >= order.step or REGULAR not in self.folders[naming.final_name(s)]
        ]
        if not candidates:
            raise DiskError(f"no step {order.step}")
        yield from self.wait(node)
        self._tell_tracker(max(candidates), generation)
        return max(candidates)

    def is_ahead(self, step: int, generation: str) -> bool:
        """Return whether the tracker names `step`, or a later one, of another generation."""
        return self.tracker is not None and self.tracker >= step and not self._is_of(self.tracker, generation)

    def _is_of(self, step: int, generation: str) -> bool:
        return self.made_by.get(naming.final_name(step)) == generation

    def _make_ready(self, order: Publish, temporary: str, by: SaveFolderTasks, node: int) -> Body[None]:
        if not order.files:
            raise DiskError("nothing to publish")
        for entry in order.files:
            self._name(temporary, entry)
            by.progress += 1
            yield from self.wait(node)
        expected = {entry.path for entry in order.files}
        files = self._folder(temporary)
        for path in set(files) - expected:
            del files[path]
        yield from self.wait(node)
        self._folder(temporary)  # the manifest

    def _move_in(self, order: Publish, temporary: str, by: SaveFolderTasks, node: int) -> Body[None]:
        yield from self.wait(node)
        self._may_fail()
        final = naming.final_name(order.step)
        files = self._folder(temporary)  # perhaps with a file of a rank that was given up, which all ignore
        in_manifest = {entry.path: files[entry.path] for entry in order.files}
        if final in self.folders:
            self.folders[f"aside_{final}.{len(self.folders)}"] = self.folders.pop(final)
        self.folders[final] = self.folders.pop(temporary)
        self.made_by[final] = by.world.generation
        by.world.invariants.final(order.step, in_manifest)

    def publish_regular(self, step: int, generation: str) -> None:
        """Give a regular save of the framework its name, in place of an older folder."""
        self.folders[naming.final_name(step)] = {REGULAR: step}
        self.made_by[naming.final_name(step)] = generation

    def replace_tracker(self, step: int) -> None:
        if self.tracker is None or self.tracker < step:
            self.tracker = step

    def clean(self, node: int, term: int, generation: str) -> Body[None]:
        """Remove temporary folders at the end of an incident."""
        yield from self.wait(node)
        for name in [name for name in self.folders if naming.is_of(name, generation)]:
            if naming.term_of(name) == term:
                yield from self.wait(node)
                self.folders.pop(name, None)

    def clean_all(self) -> None:
        """Remove all temporary folders, as the first rank of a generation does."""
        for name in [name for name in self.folders if naming.is_temporary(name)]:
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

    def _tell_tracker(self, step: int, generation: str) -> None:
        if self.tracker is not None and self.tracker > step and not self._is_of(self.tracker, generation):
            raise DiskError(f"the tracker names step {self.tracker}")
        self.replace_tracker(step)

    def _may_fail(self) -> None:
        if self._random.random() < self.trouble:
            raise DiskError("no space left on device")
