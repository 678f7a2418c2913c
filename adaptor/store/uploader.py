"""Sends the checkpoints of a job to a store while the job trains; runs in its own process beside `ttprun`.

The uploader looks only at the save folder, so training never waits for it. A failure is reported once and
tried again. When the job ends, the uploader sends the newest checkpoint and reports what it cannot send.

Each node has an uploader. The uploader of node 0 chooses the checkpoints, and leads; the others join it
(`joint.py`). If no node has begun to lead the upload of last words, or of the newest checkpoint at the end of
the job, another node leads: node 0 is lost, or the files are on the disk of the other node.
"""

from __future__ import annotations

import contextlib
import os
import threading
import time
from collections.abc import Callable
from pathlib import Path

from adaptor.checkpoint import manifest, tracker
from adaptor.errors import CheckpointError, StoreError
from adaptor.protocol import naming
from adaptor.store import catalog, joint, local_checkpoints, prune, push
from adaptor.store.client import Store, Stored, open_store
from adaptor.store.joint import PATIENCE, JointPush, Others, Patience
from adaptor.store.local_checkpoints import Saved, SeenCheckpoints
from adaptor.store.settings import UploadSettings
from adaptor.store.store_requests import Backoff
from adaptor.text import duration, size

LOOK_S = 1.0
# Between two attempts after a store has not answered for the minute in which the client repeats requests.
_FIRST_WAIT_S, _LONGEST_WAIT_S = 1.0, 60.0
# After the end of the job a user may wait for this process.
_ATTEMPTS_AT_END = 3
# Between two looks whether node 0 has begun with a checkpoint: the first and the longest time.
_ASK_S, _LONGEST_ASK_S = 1.0, 3.0
# Nodes that take the place of node 0 do so one after the other, so that each sees an earlier beginning.
_TURNS = 3
# How many of the newest checkpoints are looked up: node 0 may be sending the one before the newest.
_ASKED = 2
_REMOVED = (
    "the step was removed before all of it was sent: with --save-retain-interval let TTP_STORE_EVERY be a"
    " multiple of that interval, so that what is sent stays"
)

Tell = Callable[[str], None]


class _PreemptedError(Exception):
    """Last words have arrived, which are newer than the checkpoint that is being sent."""


class Uploader:
    """Sends due checkpoints, until `end`.

    Args:
        order: of the agent.
        tell: prints a line.
        patience: with other nodes.
    """

    def __init__(self, order: UploadSettings, tell: Tell, patience: Patience = PATIENCE) -> None:
        self._order = order
        self._patience = patience
        self._others = Others()
        self._first_seen: dict[str, float] = {}  # by place, on the monotonic clock
        self._ask_at, self._asks = 0.0, Backoff(_ASK_S, _LONGEST_ASK_S)
        self._left_at = 0.0
        self._joined = ""  # the place of the checkpoint of which this node sent its part last
        self._signs: dict[str, Stored] = {}  # its part lists of all nodes, which changed at `_moved_at`
        self._moved_at = 0.0
        self._root = Path(order.save)
        self._tell = tell
        self._leaving = threading.Event()
        self._checkpoints = SeenCheckpoints(self._root)
        self._handled: set[str] = set()  # places of checkpoints that were sent or given up
        self._last: int | None = None  # the step that was sent or given up last
        self._committed: Saved | None = None
        self._has_told_of_later = self._has_told_of_unlisted = False
        self._reason = "there was no time to send it"
        self._last_failure = ""  # the failure that was told last
        self._paced = 0.0  # when the next piece may be sent, on the monotonic clock
        self._looked_at = 0.0

    def end(self) -> None:
        """Let `run` send the remaining checkpoints, and return."""
        self._leaving.set()

    def run(self) -> None:
        """Send checkpoints until `end`, and after it the newest checkpoint."""
        store, failures_at_end = None, 0
        backoff = Backoff(_FIRST_WAIT_S, _LONGEST_WAIT_S)
        while True:
            leaving = self._leaving.is_set()  # read before the folder, whose later content is not sent
            if leaving:
                self._checkpoints.look_anew()
            try:
                if store is None:
                    opened = open_store(self._order.url, self._order.endpoint, make=True)
                    self._find_last(opened)
                    store = opened
                send = self._follow_next if self._order.node else self._send_next
                if not send(store, leaving):
                    if leaving:
                        break
                    self._leaving.wait(LOOK_S)
                backoff.reset()
            except _PreemptedError:
                continue
            except (StoreError, manifest.UnreadableError, OSError) as error:
                self._fail(str(error))
                if not leaving:
                    self._leaving.wait(backoff.next())
                    continue
                failures_at_end += 1
                if failures_at_end >= _ATTEMPTS_AT_END:
                    break
                time.sleep(_FIRST_WAIT_S)
        self.tell_what_is_local()

    def tell_what_is_local(self, reason: str = "") -> None:
        """Report the newest checkpoint that the store does not have, if there is one."""
        saved = self._checkpoints.now()
        if not saved or (self._committed is not None and saved[-1].place == self._committed.place):
            return
        if self._order.node:
            self._tell(
                f"[ttp] node {self._order.node} has not sent its part of step {saved[-1].step} to"
                f" {self._order.url}: {reason or self._reason}"
            )
        else:
            step = saved[-1].step
            self._tell(
                f"[ttp] step {step} is only in {self._root}, not in {self._order.url}:"
                f" {reason or self._reason}; this sends it: {self._order.push_command(step)}"
            )

    def _find_last(self, store: Store) -> None:
        """Continue after the newest step that was sent before this process began."""
        saved, newest_stored, checkpoint = self._checkpoints.now(), 0, None
        newest = saved[-1].step if saved else -1
        for checkpoint_in_store in catalog.newest_first(store, None, []):
            if checkpoint_in_store.saved_manifest.step <= newest:
                checkpoint = checkpoint_in_store
                break
            newest_stored = max(newest_stored, checkpoint_in_store.saved_manifest.step)
        if checkpoint is not None:
            prune.remove_left_over(store, self._root, checkpoint.prefix, self._tell_of_upload)
            self._last = checkpoint.saved_manifest.step
            for local in saved:
                if local.step == self._last and not catalog.is_of_same_generation(
                    local.place, checkpoint.prefix
                ):
                    break  # another attempt has sent a checkpoint of this step
                if local.step <= self._last:
                    self._handled.add(local.place)
                    self._committed = local
        if newest_stored and not self._order.node:
            self._tell(
                f"[ttp] {store} holds step {newest_stored}, later than step {max(newest, 0)} of "
                f"{self._root}: a"
                f" pull would bring step {newest_stored}; use another prefix for this job, or pull first"
            )

    def _send_next(self, store: Store, leaving: bool) -> bool:
        """Send a checkpoint; return False if none is due."""
        saved = self._checkpoints.now()
        pending = [candidate for candidate in saved if candidate.place not in self._handled]
        chosen = local_checkpoints.choose(pending, self._last, self._order.every, at_end=leaving)
        if chosen is None:
            return False
        chosen_saved = chosen.saved
        if chosen.skipped:
            steps = ", ".join(str(skipped.step) for skipped in chosen.skipped)
            skipped_noun, whose = ("steps", "their") if len(chosen.skipped) > 1 else ("step", "its")
            self._tell(
                f"[ttp] not sent to {store}: {skipped_noun} {steps}, because step {chosen_saved.step} was "
                "saved before"
                f" {whose} turn came; a larger TTP_STORE_EVERY avoids it"
            )
            self._handle(chosen.skipped[-1])
        self._lead(store, chosen_saved)
        return True

    def _lead(self, store: Store, saved: Saved) -> None:
        """Have a checkpoint sent, and commit it."""
        began = time.monotonic()
        pace = lambda count: self._pace(count, saved)  # noqa: E731
        try:
            if self._order.nodes == 1:
                pushed = push.push(store, self._root, saved.step, pace, self._tell_of_upload)
            else:
                pushed = self._joint(store, saved, pace).lead(self._others, self._leaving.is_set)
        except manifest.UnreadableError:
            raise  # the disk may answer the next time
        except CheckpointError as error:
            if self._is_removed(saved):  # does not count for TTP_STORE_EVERY: the next may stay
                self._handled.update(self._checkpoints.until(saved))
            else:
                self._handle(saved)  # it will not get better
            self._fail(self._failure_reason(error, saved))
            return
        self._handle(saved)
        self._committed = saved
        self._last_failure = ""
        if not pushed.there:
            took = duration(time.monotonic() - began)
            self._tell(f"[ttp] step {saved.step} is in {store} ({size(pushed.sent)} in {took})")
        if self._order.keep:
            self._prune(store, saved.step)

    def _follow_next(self, store: Store, leaving: bool) -> bool:
        """Send this node's part of a checkpoint; return False if there is nothing to do.

        Of the checkpoints with which node 0 has not begun, node 0 may have skipped all but the newest.
        """
        saved = self._checkpoints.now()
        pending = [candidate for candidate in saved if candidate.place not in self._handled]
        current_time = time.monotonic()
        if leaving and not self._left_at:
            self._left_at = current_time
        if any(pending_save.place not in self._first_seen for pending_save in pending):
            self._first_seen = {
                pending_save.place: self._first_seen.get(pending_save.place, current_time)
                for pending_save in pending
            }
            self._ask_at = 0.0
            self._asks.reset()
        if not pending:
            return False
        newest_pending, *_ = pending[::-1]
        urgent = leaving or newest_pending.last_words
        if current_time < self._ask_at and not urgent:
            return False
        self._ask_at = current_time + self._asks.next()
        for candidate in pending[: -1 - _ASKED : -1]:
            announced_push = joint.announced(store, candidate.step, candidate.place, self._order.node)
            if announced_push is not None:
                prefix, committed = announced_push
                if committed:
                    prune.remove_left_over(store, self._root, prefix, self._tell_of_upload)
                else:
                    self._follow(store, candidate, prefix)
                self._handle(candidate)
                self._committed = candidate
                return True
        if urgent:
            self._begin_in_its_place(store, newest_pending, current_time)
        return urgent

    def _begin_in_its_place(self, store: Store, saved: Saved, current_time: float) -> None:
        """Lead if node 0 has not begun in time; a node with only a part of the files keeps waiting."""
        if self._is_part(saved) and self._is_node_0_busy(store, current_time):
            self._pause(LOOK_S)
            return
        since = max(self._first_seen[saved.place], self._left_at, self._moved_at)
        if current_time - since < self._patience.leads * min(self._order.node, _TURNS):
            self._pause(LOOK_S)
        elif not self._is_part(saved):
            self._lead(store, saved)
        elif current_time - since < self._patience.joins:
            self._pause(LOOK_S)
        else:
            folder = self._root / naming.final_name(saved.step)
            self._fail(f"{folder} has only a part of the checkpoint, and node 0 does not send its own")
            self._handle(saved)

    def _is_node_0_busy(self, store: Store, current_time: float) -> bool:
        """Return whether the checkpoint before, of which this node has sent its part, is still being sent."""
        if not self._joined:
            return False
        signs = store.objects(catalog.parts_prefix(self._joined))
        if not signs or store.stat(catalog.manifest_name(self._joined)) is not None:  # removed since, or sent
            self._joined, self._moved_at = "", current_time
            return False
        if signs != self._signs:
            self._signs, self._moved_at = signs, current_time
        return current_time - self._moved_at < self._patience.moves

    def _is_part(self, saved: Saved) -> bool:
        folder = self._root / naming.final_name(saved.step)
        try:
            return local_checkpoints.is_part(folder, push.read_folder(self._root, saved.step))
        except manifest.UnreadableError:
            raise
        except CheckpointError:
            return False  # the node that sends it reports the defect

    def _follow(self, store: Store, saved: Saved, prefix: str) -> None:
        self._joined, self._signs = prefix, {}
        try:
            self._joint(store, saved, lambda count: self._pace(count, saved)).follow(prefix)
            self._last_failure = ""
        except manifest.UnreadableError:
            raise
        except CheckpointError as error:
            self._fail(self._failure_reason(error, saved))

    def _failure_reason(self, error: CheckpointError, saved: Saved) -> str:
        return f"{error}; {_REMOVED}" if self._is_removed(saved) else str(error)

    def _is_removed(self, saved: Saved) -> bool:
        """Return whether a checkpoint, or a part of it, was removed from the folder."""
        folder = self._root / naming.final_name(saved.step)
        with contextlib.suppress(CheckpointError):
            files = push.read_folder(self._root, saved.step).files
            return not all(os.path.lexists(folder / file.path) for file in files)
        return not tracker.has_manifest(self._root, saved.step)

    def _joint(self, store: Store, saved: Saved, pace: Callable[[int], None]) -> JointPush:
        return JointPush(
            store,
            self._root,
            saved.step,
            self._order.node,
            self._order.nodes,
            pace,
            lambda seconds: self._wait(seconds, saved),
            self._patience,
            self._tell_of_upload,
        )

    def _tell_of_upload(self, line: str) -> None:
        self._tell(f"[ttp] {line}")

    def _wait(self, seconds: float, sent: Saved) -> None:
        """Wait for another node, unless last words have arrived, which are sent first."""
        self._look_for_last_words(sent)
        self._pause(seconds)

    def _pause(self, seconds: float) -> None:
        if self._leaving.is_set():
            time.sleep(seconds)
        else:
            self._leaving.wait(seconds)

    def _handle(self, last: Saved) -> None:
        """Do not send `last` again, nor any checkpoint before it."""
        self._last = last.step
        self._handled.update(self._checkpoints.until(last))

    def _prune(self, store: Store, step: int) -> None:
        """Remove old checkpoints; checkpoints of steps after `step` are of an earlier attempt, and stay."""
        pruned = prune.prune(store, self._order.keep, newest=step)
        if pruned.unlisted and not self._has_told_of_unlisted:
            self._has_told_of_unlisted = True
            self._tell(f"[ttp] {pruned.unlisted}")
        if pruned.later and not self._has_told_of_later:
            self._has_told_of_later = True
            steps = ", ".join(map(str, pruned.later))
            self._tell(
                f"[ttp] {store} holds steps {steps} of an earlier attempt, later than step {step}:"
                " TTP_STORE_KEEP neither counts nor removes them"
            )

    def _fail(self, reason: str) -> None:
        self._reason = reason
        if reason != self._last_failure:
            self._last_failure = reason
            newest = "no step" if self._committed is None else f"only step {self._committed.step}"
            newest_known = f"{newest} of this job is in {self._order.url} so far"
            if self._order.node:
                newest_known = f"node {self._order.node} sends nothing to {self._order.url} so far"
            self._tell(f"[ttp] {newest_known}: {reason}")

    def _pace(self, count: int, sent: Saved) -> None:
        """Wait before a piece is sent, to keep the rate; end the upload for last words."""
        begin = time.monotonic()
        if self._order.rate:
            begin = max(self._paced, begin)
            self._paced = begin + count / self._order.rate
        while True:
            self._look_for_last_words(sent)
            remaining_s = begin - time.monotonic()
            # The rate is for a job that trains.
            if remaining_s <= 0 or self._leaving.wait(min(remaining_s, LOOK_S)):
                return

    def _look_for_last_words(self, sent: Saved) -> None:
        current_time = time.monotonic()
        if current_time - self._looked_at < LOOK_S:
            return
        self._looked_at = current_time
        newer = self._checkpoints.last_words_after(sent)
        if newer is not None:
            if not self._order.node:  # else node 0 says it
                self._tell(
                    f"[ttp] step {sent.step} is not sent to {self._order.url}: the last words of step"
                    f" {newer.step} are sent in its place"
                )
            self._handle(sent)
            raise _PreemptedError
