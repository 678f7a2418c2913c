"""Sends the checkpoints of a job to a store while it trains; runs in a process of its own beside `ttprun`.

It looks at the save folder, and at nothing of the job, so training never waits for it. What fails is said
once and tried again. When the job ends it sends the newest checkpoint; what it cannot send is said, too.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable
from pathlib import Path

import msgspec

from adaptor.checkpoint import saved_steps
from adaptor.errors import CheckpointError, StoreError
from adaptor.operations.words import duration, size
from adaptor.store import cadence, choose, push
from adaptor.store.cadence import Saved
from adaptor.store.client import Store
from adaptor.store.opening import open_store
from adaptor.store.prune import prune

LOOK_S = 1.0
# Between two attempts when a store has not answered for the minute in which the client tries by itself.
_FIRST_WAIT_S, _LONGEST_WAIT_S = 1.0, 60.0
# When the job has ended somebody may wait for this process.
_ATTEMPTS_AT_END = 3
_PROBE = "ttp_probe"

Tell = Callable[[str], None]


class Order(msgspec.Struct, frozen=True):
    """The work that an agent gives to its uploader.

    every  steps that lie at least between two checkpoints that are sent
    keep   how many complete ones stay in the store; 0: all
    rate   bytes in a second, while the job trains; 0: no limit
    """

    url: str
    endpoint: str
    save: str
    every: int
    keep: int
    rate: int


class End(msgspec.Struct, frozen=True):
    """The job has ended: send the newest checkpoint within so many seconds; None: without limit."""

    within_s: float | None


class _PreemptedError(Exception):
    """Last words have come, which are newer than what is being sent."""


def probe(url: str, endpoint: str) -> None:
    """Write an object to a store, and remove it.

    Raises:
        StoreError: it cannot be written there.
    """
    store = open_store(url, endpoint, make=True, patience_s=10)
    name = f"{_PROBE}/{os.getpid()}-{time.time_ns()}"
    store.put(name, b"")
    store.delete([name])


class Uploader:
    """Sends what is due, until `end`.

    Args:
        order: of the agent.
        tell: prints a line.
    """

    def __init__(self, order: Order, tell: Tell) -> None:
        self._order = order
        self._root = Path(order.save)
        self._tell = tell
        self._leaving = threading.Event()
        self._last: int | None = None  # the step that was sent or given up last
        self._committed: int | None = None
        self._why = "there was no time to send it"
        self._said = ""  # the failure that was told last
        self._paced = 0.0  # when the next piece may be sent, on the monotonic clock
        self._looked = 0.0

    def end(self) -> None:
        """Let `run` send what is left, and return."""
        self._leaving.set()

    def run(self) -> None:
        """Send checkpoints until `end`, and after it the newest one."""
        store, failures, wait_s = None, 0, _FIRST_WAIT_S
        while True:
            leaving = self._leaving.is_set()  # before the folder is read: what is in it then is sent
            try:
                if store is None:
                    store = open_store(self._order.url, self._order.endpoint, make=True)
                    self._find_last(store)
                if not self._send_next(store, leaving):
                    if leaving:
                        break
                    self._leaving.wait(LOOK_S)
                failures, wait_s = 0, _FIRST_WAIT_S
            except _PreemptedError:
                continue
            except (StoreError, OSError) as error:
                failures += 1
                self._fail(str(error))
                if leaving and failures == _ATTEMPTS_AT_END:
                    break
                if not leaving:
                    self._leaving.wait(wait_s)
                    wait_s = min(2 * wait_s, _LONGEST_WAIT_S)
        self.tell_what_is_local()

    def tell_what_is_local(self, why: str = "") -> None:
        """Say which checkpoint the store does not have, if there is one."""
        saved = self._saved()
        if saved and (self._committed is None or saved[-1].step > self._committed):
            self._tell(
                f"[ttp] step {saved[-1].step} is only in {self._root}, not in {self._order.url}:"
                f" {why or self._why}; ttp store push sends it"
            )

    def _saved(self) -> list[Saved]:
        return [
            Saved(step, saved_steps.are_last_words(self._root, step))
            for step in saved_steps.steps(self._root)
            if saved_steps.has_manifest(self._root, step)
        ]

    def _find_last(self, store: Store) -> None:
        """Go on after the newest step that was sent before this process began."""
        saved, there = self._saved(), choose.steps(store)
        newest = saved[-1].step if saved else -1
        if there and there[-1] > newest:
            self._tell(
                f"[ttp] {store} holds step {there[-1]}, later than step {max(newest, 0)} of {self._root}: a"
                " pull brings that one; use another prefix for this job, or pull first"
            )
        for found in choose.newest_first(store, None, []):
            if found.known.step <= newest:
                self._last = self._committed = found.known.step
                break

    def _send_next(self, store: Store, leaving: bool) -> bool:
        """Send one checkpoint; return False where none is due."""
        chosen = cadence.choose(self._saved(), self._last, self._order.every, at_end=leaving)
        if chosen is None:
            return False
        if chosen.skipped:
            steps = ", ".join(map(str, chosen.skipped))
            self._tell(
                f"[ttp] not sent to {store}: steps {steps}, because step {chosen.step} was saved before"
                " their turn came; a larger TTP_STORE_EVERY avoids it"
            )
            self._last = chosen.skipped[-1]
        began = time.monotonic()
        try:
            done = push.push(store, self._root, chosen.step, lambda count: self._pace(count, chosen.step))
        except CheckpointError as error:
            self._last = chosen.step  # it will not get better
            self._fail(str(error))
            return True
        self._last = self._committed = chosen.step
        self._said = ""
        if not done.there:
            took = duration(time.monotonic() - began)
            self._tell(f"[ttp] step {chosen.step} is in {store} ({size(done.sent)} in {took})")
        if self._order.keep:
            prune(store, self._order.keep)
        return True

    def _fail(self, why: str) -> None:
        self._why = why
        if why != self._said:
            self._said = why
            newest = "no step" if self._committed is None else f"only step {self._committed}"
            self._tell(f"[ttp] {newest} of this job is in {self._order.url} so far: {why}")

    def _pace(self, count: int, step: int) -> None:
        """Wait before a piece is sent, so that the rate is kept; end the upload for last words."""
        begin = time.monotonic()
        if self._order.rate:
            begin = max(self._paced, begin)
            self._paced = begin + count / self._order.rate
        while True:
            self._look_for_last_words(step)
            left = begin - time.monotonic()
            # Nobody trains any more when the job has ended.
            if left <= 0 or self._leaving.wait(min(left, LOOK_S)):
                return

    def _look_for_last_words(self, step: int) -> None:
        now = time.monotonic()
        if now - self._looked < LOOK_S:
            return
        self._looked = now
        newer = [one.step for one in self._saved() if one.last_words and one.step > step]
        if newer:
            self._tell(f"[ttp] step {step} is left out: the last words of step {newer[-1]} go first")
            self._last = step
            raise _PreemptedError
