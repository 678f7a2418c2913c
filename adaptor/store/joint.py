"""Sends a checkpoint by the uploaders of several nodes: which node sends which files, and which commits.

The nodes communicate by the part lists in the store alone. The leader (node 0, as long as it lives) chooses
the checkpoint and writes an empty list; the other nodes see the list and join. Nodes whose save folder has
the same manifest share the folder, and each sends its share of the files; a node with its own disk sends all
files of the disk. The leader waits until all files are in the store, sends the missing files of a node that
is given up, and writes the manifest. See docs/object_storage.md.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import wait
from dataclasses import dataclass, field
from pathlib import Path

from adaptor import threads
from adaptor.errors import CheckpointError
from adaptor.protocol import naming
from adaptor.protocol.naming import FileEntry
from adaptor.store import catalog, local_checkpoints, prune, push
from adaptor.store.client import Store, Stored
from adaptor.store.push import Pushed, Sending

_LOOK_S = 1.0  # between two looks at the parts of the other nodes


@dataclass(frozen=True)
class Patience:
    """Seconds of waiting for another node.

    Attributes:
        joins: until the node joins: it looks every few seconds, and an ended process is restarted within a
            minute
        joins_at_end: until the node joins at the end of the job, when all nodes look each second
        moves: without a sign of life, which a node gives every `beats` seconds; a request may take two
            minutes, and is repeated for one minute
        beats: between two signs of life
        leads: until node 0 begins with last words or the newest checkpoint: it looks each second, interrupts
            its current upload for last words, and needs a few requests
    """

    joins: float = 60.0
    joins_at_end: float = 10.0
    moves: float = 180.0
    beats: float = 20.0
    leads: float = 10.0


PATIENCE = Patience()


@dataclass
class Others:
    """The other nodes, from the checkpoints before.

    Attributes:
        absent: nodes that did not join
        apart: nodes with their own disks
    """

    absent: set[int] = field(default_factory=set)
    apart: set[int] = field(default_factory=set)


@dataclass
class Watch:
    """Watches the files of a checkpoint that the nodes have sent.

    Attributes:
        prefix: of the checkpoint
        files: of the leader's manifest
        nodes: the other nodes
        patience: with the other nodes
        at_end: returns whether the job has ended
        others: the knowledge of the other nodes from checkpoints before
        paths: of the files in the store
    """

    store: Store
    prefix: str
    files: Sequence[FileEntry]
    nodes: set[int]
    patience: Patience
    at_end: Callable[[], bool]
    others: Others
    paths: set[str] = field(default_factory=set)
    _objects: dict[str, Stored] = field(default_factory=dict)  # the lists at the last look
    _lists: dict[int, catalog.PartList] = field(default_factory=dict)
    _moved: dict[int, float] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self._sizes = {file.path: file.bytes for file in self.files}
        self._began = time.monotonic()

    def look(self) -> None:
        """Read the lists that have changed; if the lists have all files, check the objects."""
        current_time, prefix = time.monotonic(), catalog.parts_prefix(self.prefix)
        stored_objects = self.store.objects(prefix)
        changed = {
            name: stored for name, stored in stored_objects.items() if self._objects.get(name) != stored
        }
        self._objects = stored_objects
        for node, part_list in catalog.read_lists(self.store, self.prefix, changed).items():
            self._lists[node], self._moved[node] = part_list, current_time
        parts = catalog.parts_of(self._lists, self.prefix, {})
        self.paths = set(parts)
        if self.paths >= set(self._sizes):
            objects = self.store.objects(self.prefix)
            for path, part in parts.items():
                stored = objects.get(f"{self.prefix}/{path}")
                if stored is None or stored.bytes != self._sizes.get(path, part.bytes):
                    self.paths.discard(path)

    @property
    def apart(self) -> set[int]:
        """Return the nodes that are known to have their own disks."""
        return self.others.apart | {
            node for node, part_list in self._lists.items() if part_list.seen != self.prefix
        }

    def is_given_up(self, node: int) -> bool:
        """Return whether a node does not send its share."""
        part_list = self._lists.get(node)
        if part_list is None:
            joins = self.patience.joins_at_end if self.at_end() else self.patience.joins
            return node in self.others.absent or not self._is_within(joins)
        return part_list.done or part_list.seen != self.prefix or self._is_still(node)

    def is_awaited(self, node: int) -> bool:
        """Return whether files may come from the disk of a node."""
        part_list = self._lists.get(node)
        if part_list is None:
            return self._is_within(self.patience.joins)
        return not part_list.done and not self._is_still(node)

    def unfinished(self) -> set[int]:
        """Return the nodes with their own disks that have begun to send, and are not done."""
        return {node for node in self.apart if node in self._lists and not self._lists[node].done}

    def unheard(self) -> set[int]:
        """Return the nodes that had their own disks before, and have not joined."""
        return self.others.apart - set(self._lists)

    def _is_within(self, seconds: float) -> bool:
        return time.monotonic() < self._began + seconds

    def _is_still(self, node: int) -> bool:
        return time.monotonic() - self._moved[node] >= self.patience.moves

    def remember(self) -> None:
        """Keep for the next checkpoint which nodes have joined, and which have their own disks."""
        joined = self.nodes & set(self._lists)
        self.others.apart = {node for node in joined if self._lists[node].seen != self.prefix}
        self.others.absent = self.nodes - joined


@dataclass(frozen=True)
class _Owed:
    """Files that the store lacks and that this node has to send; empty: the node waits for other nodes."""

    files: list[FileEntry]


def divide(files: Sequence[FileEntry], nodes: int) -> list[list[FileEntry]]:
    """Return the files that each node sends: the largest first, each to the node with the fewest bytes."""
    shares: list[list[FileEntry]] = [[] for _ in range(nodes)]
    sizes = [0] * nodes
    for file in sorted(files, key=lambda file: (-file.bytes, file.path)):
        node = min(range(nodes), key=lambda node: (sizes[node], node))
        shares[node].append(file)
        sizes[node] += file.bytes
    return shares


def announced(store: Store, step: int, place: str, node: int) -> tuple[str, bool] | None:
    """Return the prefix at which another node leads the upload of a checkpoint, and whether it is committed.

    Args:
        store: the store.
        step: of the checkpoint.
        place: of the manifest in the save folder of this node; a node with another disk has another place.
        node: this node.

    Returns:
        None if no other node has begun.
    """
    root, newest = naming.final_name(step), None
    places = [f"{root}/{name}" for name in store.folders(root)]
    # A step that was saved again has several places; the place of this node's folder first.
    for prefix in sorted(places, key=lambda candidate_prefix: candidate_prefix != place):
        if not catalog.is_of_same_generation(prefix, place):
            continue
        stored_objects = store.objects(prefix)
        if catalog.manifest_name(prefix) in stored_objects:
            return prefix, True
        part_lists = [
            object_name for object_name in stored_objects if catalog.is_parts_name(prefix, object_name)
        ]
        if set(part_lists) - {catalog.parts_name(prefix, node)}:
            newest = newest or (prefix, False)
        if prefix == place and newest is not None:
            break
    return newest


@dataclass
class JointPush:
    """A checkpoint that this node sends together with others.

    Attributes:
        root: the save folder
        step: of the checkpoint
        node: this node
        nodes: the number of nodes
        pace: receives the number of bytes of each piece before the piece is sent
        wait: waits for a number of seconds, or less
        patience: with the other nodes
        tell: prints a line about an upload that is begun again or cannot be removed

    Raises:
        CheckpointError: the save folder has no such checkpoint.
    """

    store: Store
    root: Path
    step: int
    node: int
    nodes: int
    pace: Callable[[int], None]
    wait: Callable[[float], None]
    patience: Patience
    tell: Callable[[str], None] = lambda line: None

    def __post_init__(self) -> None:
        self._manifest = push.read_folder(self.root, self.step)
        self._shares = divide(self._manifest.files, self.nodes)

    def follow(self, prefix: str) -> int:
        """Send this node's part of the checkpoint at `prefix`; return the number of bytes.

        Raises:
            CheckpointError: a file differs from the manifest.
        """
        shares_folder = catalog.place(self._manifest) == prefix
        sending = self._sending(prefix)
        with self._announced(sending):
            sending.send(self._shares[self.node] if shares_folder else self._manifest.files)
        sending.tell(is_complete=True)
        return sending.sent

    def lead(self, other_nodes: Others, at_end: Callable[[], bool]) -> Pushed:
        """Have the checkpoint sent, and commit it.

        Args:
            other_nodes: the knowledge of the other nodes, which is updated.
            at_end: returns whether the job has ended.

        Raises:
            CheckpointError: the checkpoint is incomplete or differs from its manifest; nothing is committed.
        """
        saved_manifest, prefix = self._manifest, catalog.place(self._manifest)
        files, total = len(saved_manifest.files), sum(file.bytes for file in saved_manifest.files)
        stored_prefix = push.find(self.store, saved_manifest)
        if stored_prefix is not None:
            self._remove_left_over(stored_prefix)
            return Pushed(stored_prefix, files, total, 0, True)
        sending = self._sending(prefix)
        with self._announced(sending):
            awaited_nodes = set(range(self.nodes)) - {self.node}
            watch = Watch(
                self.store, prefix, saved_manifest.files, awaited_nodes, self.patience, at_end, other_nodes
            )
            sending.send(self._shares[self.node])
            sending.tell(is_complete=True)
            while owed := self._owed(watch):
                if owed.files:
                    sending.look_again()
                    sending.send(owed.files)
                    sending.tell(is_complete=True)
                else:
                    self.wait(_LOOK_S)
        self._require_whole(watch)
        push.require_same(self.root, saved_manifest)
        size = push.commit(self.store, saved_manifest)
        watch.remember()
        self._remove_left_over(prefix)
        return Pushed(prefix, files, size, size, False)

    def _require_whole(self, watch: Watch) -> None:
        """Refuse a checkpoint without known files on the disk of another node.

        Raises:
            CheckpointError: names the file or the nodes.
        """
        folder = self.root / naming.final_name(self._manifest.step)
        local_checkpoints.require(folder, watch.paths)
        if local_checkpoints.names_files(watch.paths):
            return
        # A folder may lack files, and without a layout file the folders are unknown.
        lacks = watch.unfinished()
        if not local_checkpoints.names_folders(watch.paths):
            lacks |= watch.unheard()
        if lacks:
            nodes = ", ".join(map(str, sorted(lacks)))
            raise CheckpointError(
                f"{folder}: not all files on the disk of node {nodes} have been sent, so the store does not"
                " get this checkpoint; with a --save folder that all nodes share this cannot happen"
            )

    def _remove_left_over(self, prefix: str) -> None:
        prune.remove_left_over(self.store, self.root, prefix, self.tell)

    def _sending(self, prefix: str) -> Sending:
        return Sending(self.store, self.root, self._manifest, prefix, self.pace, self.node, self.tell)

    @contextlib.contextmanager
    def _announced(self, sending: Sending) -> Iterator[None]:
        """Write the list, and repeat it while files are sent, as a sign of life."""
        over = threading.Event()

        def beat() -> None:
            reported_pieces = 0
            while not over.wait(self.patience.beats):
                if sending.pieces != reported_pieces:
                    reported_pieces = sending.pieces
                    with contextlib.suppress(Exception):  # the next request raises the error
                        sending.tell(is_complete=False)

        sending.tell(is_complete=False)
        beating = threads.start(beat, "ttp-beat")  # without a thread the lists of whole files are signs
        try:
            yield
        finally:
            over.set()
            if beating is not None:
                wait([beating])

    def _owed(self, watch: Watch) -> _Owed | None:
        """Return the missing files, None if none is missing."""
        watch.look()
        missing = [
            (node, file)
            for node, share in enumerate(self._shares)
            for file in share
            if file.path not in watch.paths
        ]
        own_files = [file for node, file in missing if node == self.node or watch.is_given_up(node)]
        if missing:
            return _Owed(own_files)
        lacks = local_checkpoints.missing(self.root / naming.final_name(self._manifest.step), watch.paths)
        # If completeness is unknown, a node with its own disk may have more files.
        awaited_nodes = set(range(self.nodes)) if lacks else watch.apart
        is_waiting = any(watch.is_awaited(node) for node in awaited_nodes - {self.node})
        return _Owed([]) if is_waiting else None
