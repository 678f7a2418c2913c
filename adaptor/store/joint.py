"""Sends a checkpoint by the uploaders of several nodes: which node sends which files, and which commits.

They tell each other what they send by the lists of parts in the store alone. The node that leads (node 0, as
long as it lives) chooses the checkpoint and writes an empty list; the others see it and join. Nodes whose
save folder has the same manifest share the folder, and each sends its share of the files; a node with a disk
of its own sends what is on that. The leader waits until all files are in the store, sends what a node that is
given up has not sent, and writes the manifest. See docs/object_storage.md.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from adaptor.errors import CheckpointError
from adaptor.protocol import naming
from adaptor.protocol.file_entry import FileEntry
from adaptor.store import abandoned, completeness, layout, push
from adaptor.store.client import Store
from adaptor.store.other_nodes import Others, Patience, Watch
from adaptor.store.push import Pushed, Sending

_LOOK_S = 1.0


@dataclass(frozen=True)
class _Owed:
    """Files that the store still lacks and that this node is to send; empty: it waits for other nodes."""

    ours: list[FileEntry]


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
        step: of the checkpoint.
        place: of the manifest in the save folder of this node; a node with another disk has another one.
        node: this one.

    Returns:
        None where no other node has begun.
    """
    root, newest = naming.final_name(step), None
    places = [f"{root}/{name}" for name in store.folders(root)]
    # A step that was saved again has several places; that of the folder of this node, which it shares, first.
    for prefix in sorted(places, key=lambda candidate_prefix: candidate_prefix != place):
        if not layout.is_of_same_generation(prefix, place):
            continue
        stored_objects = store.objects(prefix)
        if layout.manifest_name(prefix) in stored_objects:
            return prefix, True
        part_lists = [
            object_name for object_name in stored_objects if layout.is_parts_name(prefix, object_name)
        ]
        if set(part_lists) - {layout.parts_name(prefix, node)}:
            newest = newest or (prefix, False)
        if prefix == place and newest is not None:
            break
    return newest


class JointPush:
    """One checkpoint, sent by this node and others.

    Args:
        store: where to.
        root: the save folder.
        step: of the checkpoint.
        node: this one.
        nodes: how many there are.
        pace: is called with the bytes of each piece before it is sent.
        wait: waits for a number of seconds, or less.
        patience: with the others.
        tell: says that an upload is begun anew, or cannot be removed.

    Raises:
        CheckpointError: there is no such checkpoint.
    """

    def __init__(
        self,
        store: Store,
        root: Path,
        step: int,
        node: int,
        nodes: int,
        pace: Callable[[int], None],
        wait: Callable[[float], None],
        patience: Patience,
        tell: Callable[[str], None] = lambda line: None,
    ) -> None:
        self._store = store
        self._root = root
        self._tell = tell
        self._known = push.read_folder(root, step)
        self._node = node
        self._nodes = nodes
        self._pace = pace
        self._wait = wait
        self._patience = patience
        self._shares = divide(self._known.files, nodes)

    def follow(self, prefix: str) -> int:
        """Send what is this node's part of the checkpoint at `prefix`; return the bytes.

        Raises:
            CheckpointError: a file is not what the manifest says.
            StoreError: the store refuses, or does not answer.
        """
        shares_folder = layout.place(self._known) == prefix
        sending = self._sending(prefix)
        with self._begun(sending):
            sending.send(self._shares[self._node] if shares_folder else self._known.files)
        sending.tell(is_complete=True)
        return sending.sent

    def lead(self, other_nodes: Others, at_end: Callable[[], bool]) -> Pushed:
        """Have the checkpoint sent, and commit it.

        Args:
            other_nodes: what is known of them; it is brought up to date.
            at_end: says whether the job has ended.

        Raises:
            CheckpointError: the checkpoint is not complete, or not what its manifest says; nothing is
                committed.
            StoreError: the store refuses, or does not answer.
        """
        saved_manifest, prefix = self._known, layout.place(self._known)
        files, total = len(saved_manifest.files), sum(file.bytes for file in saved_manifest.files)
        stored_prefix = push.find(self._store, saved_manifest)
        if stored_prefix is not None:
            self._remove_left_over(stored_prefix)
            return Pushed(stored_prefix, files, total, 0, True)
        sending = self._sending(prefix)
        with self._begun(sending):
            awaited_nodes = set(range(self._nodes)) - {self._node}
            watch = Watch(
                self._store, prefix, saved_manifest.files, awaited_nodes, self._patience, at_end, other_nodes
            )
            sending.send(self._shares[self._node])
            sending.tell(is_complete=True)
            while owed := self._owed(watch):
                if owed.ours:
                    sending.look_again()
                    sending.send(owed.ours)
                    sending.tell(is_complete=True)
                else:
                    self._wait(_LOOK_S)
        self._require_whole(watch)
        push.require_same(self._root, saved_manifest)
        size = push.commit(self._store, saved_manifest)
        watch.remember()
        self._remove_left_over(prefix)
        return Pushed(prefix, files, size, size, False)

    def _require_whole(self, watch: Watch) -> None:
        """Refuse what lacks files that are on the disk of another node, as far as anybody can tell.

        Raises:
            CheckpointError: it does.
        """
        folder = self._root / naming.final_name(self._known.step)
        completeness.require(folder, watch.paths)
        if completeness.names_files(watch.paths):
            return
        # A folder that is there may lack files, and without a layout file nobody names the folders.
        lacks = watch.unfinished()
        if not completeness.names_folders(watch.paths):
            lacks |= watch.unheard()
        if lacks:
            nodes = ", ".join(map(str, sorted(lacks)))
            raise CheckpointError(
                f"{folder}: not all files on the disk of node {nodes} have been sent, so the store does not"
                " get this checkpoint; with a --save folder that all nodes share this cannot happen"
            )

    def _remove_left_over(self, prefix: str) -> None:
        abandoned.remove_left_over(self._store, self._root, prefix, self._tell)

    def _sending(self, prefix: str) -> Sending:
        return Sending(self._store, self._root, self._known, prefix, self._pace, self._node, self._tell)

    @contextlib.contextmanager
    def _begun(self, sending: Sending) -> Iterator[None]:
        """Write the list, and write it again while files are sent, as a sign of life."""
        over = threading.Event()

        def beat() -> None:
            reported_pieces = 0
            while not over.wait(self._patience.beats):
                if sending.pieces != reported_pieces:
                    reported_pieces = sending.pieces
                    with contextlib.suppress(Exception):  # the next request tells of it
                        sending.tell(is_complete=False)

        sending.tell(is_complete=False)
        thread = threading.Thread(target=beat, name="ttp-beat", daemon=True)
        try:
            thread.start()
        except RuntimeError:  # no thread can be had: the lists of whole files are signs, too
            yield
            return
        try:
            yield
        finally:
            over.set()
            thread.join()

    def _owed(self, watch: Watch) -> _Owed | None:
        """Return what is not there yet, None where all is."""
        watch.look()
        missing = [
            (node, file)
            for node, share in enumerate(self._shares)
            for file in share
            if file.path not in watch.paths
        ]
        own_files = [file for node, file in missing if node == self._node or watch.is_given_up(node)]
        if missing:
            return _Owed(own_files)
        lacks = completeness.missing(self._root / naming.final_name(self._known.step), watch.paths)
        # Where nobody can tell whether all is there: a node with a disk of its own may have more.
        awaited_nodes = set(range(self._nodes)) if lacks else watch.apart
        is_waiting = any(watch.is_awaited(node) for node in awaited_nodes - {self._node})
        return _Owed([]) if is_waiting else None
