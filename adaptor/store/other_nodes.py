"""Tells what the other nodes of a job have sent of a checkpoint, and when one is given up."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from adaptor.protocol.file_entry import FileEntry
from adaptor.store import catalog, layout
from adaptor.store.client import Store, Stored


@dataclass(frozen=True)
class Patience:
    """Seconds for which another node is waited for.

    Attributes:
        joins: until it joins: it asks every few seconds, and a process that has ended is started again within
            a minute
        joins_at_end: until it joins at the end of the job, when all ask each second
        moves: without a sign of life, which it gives every `beats` seconds; one request may take two minutes,
            and is made again for one
        beats: between two signs of life
        leads: until node 0 begins with what is always sent: it looks each second, leaves what it is sending
            for last words, and needs a few requests
    """

    joins: float = 60.0
    joins_at_end: float = 10.0
    moves: float = 180.0
    beats: float = 20.0
    leads: float = 10.0


PATIENCE = Patience()


@dataclass
class Others:
    """The other nodes, as the checkpoints before have shown them.

    Attributes:
        absent: they did not join
        apart: they have disks of their own
    """

    absent: set[int] = field(default_factory=set)
    apart: set[int] = field(default_factory=set)


class Watch:
    """Looks at what the nodes have sent of a checkpoint.

    Args:
        store: where it is.
        prefix: its prefix.
        files: of the leader's manifest.
        nodes: the other nodes.
        patience: with them.
        at_end: says whether the job has ended.
        other_nodes: what is known of them from checkpoints before.

    Attributes:
        paths: of the files that are there
    """

    def __init__(
        self,
        store: Store,
        prefix: str,
        files: Sequence[FileEntry],
        nodes: set[int],
        patience: Patience,
        at_end: Callable[[], bool],
        other_nodes: Others,
    ) -> None:
        self._store = store
        self._where = prefix
        self._sizes = {file.path: file.bytes for file in files}
        self._nodes = nodes
        self._began = time.monotonic()
        self._patience = patience
        self._at_end = at_end
        self.others = other_nodes
        self.paths: set[str] = set()
        self._objects: dict[str, Stored] = {}  # the lists, as they were when they were read
        self._lists: dict[int, layout.PartList] = {}
        self._moved: dict[int, float] = {}

    def look(self) -> None:
        """Read the lists that have changed; where they have all files, see whether these are there."""
        current_time, prefix = time.monotonic(), layout.parts_prefix(self._where)
        stored_objects = self._store.objects(prefix)
        changed = {
            name: stored for name, stored in stored_objects.items() if self._objects.get(name) != stored
        }
        self._objects = stored_objects
        for node, part_list in catalog.read_lists(self._store, self._where, changed).items():
            self._lists[node], self._moved[node] = part_list, current_time
        parts = catalog.parts_of(self._lists, self._where, {})
        self.paths = set(parts)
        if self.paths >= set(self._sizes):
            objects = self._store.objects(self._where)
            for path, part in parts.items():
                stored = objects.get(f"{self._where}/{path}")
                if stored is None or stored.bytes != self._sizes.get(path, part.bytes):
                    self.paths.discard(path)

    @property
    def apart(self) -> set[int]:
        """Return the nodes that have disks of their own, as far as they have shown it."""
        return self.others.apart | {
            node for node, part_list in self._lists.items() if part_list.seen != self._where
        }

    def is_given_up(self, node: int) -> bool:
        """Return whether a node does not send its share."""
        part_list = self._lists.get(node)
        if part_list is None:
            joins = self._patience.joins_at_end if self._at_end() else self._patience.joins
            return node in self.others.absent or not self._is_within(joins)
        return part_list.done or part_list.seen != self._where or self._is_still(node)

    def is_awaited(self, node: int) -> bool:
        """Return whether files may come from the disk of a node."""
        part_list = self._lists.get(node)
        if part_list is None:
            return self._is_within(self._patience.joins)
        return not part_list.done and not self._is_still(node)

    def unfinished(self) -> set[int]:
        """Return the nodes with disks of their own that have begun to send, and are not done."""
        return {node for node in self.apart if node in self._lists and not self._lists[node].done}

    def unheard(self) -> set[int]:
        """Return the nodes that had disks of their own before, and have not joined."""
        return self.others.apart - set(self._lists)

    def _is_within(self, seconds: float) -> bool:
        return time.monotonic() < self._began + seconds

    def _is_still(self, node: int) -> bool:
        return time.monotonic() - self._moved[node] >= self._patience.moves

    def remember(self) -> None:
        """Note for the next checkpoint who has joined, and who has a disk of its own."""
        joined = self._nodes & set(self._lists)
        self.others.apart = {node for node in joined if self._lists[node].seen != self._where}
        self.others.absent = self._nodes - joined
