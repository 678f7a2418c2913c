"""The session: what a worker knows about its training, and how its step is told to the board.

The main thread calls `begin_training`, then in every step `begin_step`, `before_update` and `after_update`
(from the optimizer's own step hooks) and `end_update`. The processor's threads call the rest. Between them
stand the door and one attribute that is replaced as a whole (`_history`); no lock is held across a call into
the framework.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol

import msgspec

from adaptor.checkpoint.manifest import FileEntry
from adaptor.control.board import Board
from adaptor.control.door import PUBLISH, Door
from adaptor.control.messages import BoardRecord, GroupOrder, Phase, Share
from adaptor.devices.device import HOST, Device

# A step that takes much longer than the longest of so many is taken for a hang.
RECENT = 20
# The first steps of a process, in which kernels are compiled and memory is found, are no measure.
UNUSUAL = 2
# A record that is read is copied within it, unless a collective that never ends is before it.
RECORD_S = 2.0


class Trainee(Protocol):
    """A framework's training state, as the control plane needs it."""

    @property
    def save(self) -> str:
        """The folder of checkpoints, absolute; empty where handlers of the script write and name them."""

    @property
    def shares(self) -> tuple[Share, ...]:
        """What this rank holds."""

    @property
    def device(self) -> Device:
        """Where its tensors lie."""

    def take_record(self, step: int) -> Any:
        """On the main thread: what belongs to finished `step` besides tensors (counters, schedule, RNG)."""

    def take_door(self) -> Any:
        """On the main thread, gradients ready or the step skipped: what the step has already changed.

        Taken before the update, so that a dump which lets the main thread through needs nothing else of it.
        """

    def derive(self, record: Any, door: Any, updated: bool) -> Any:
        """The record of the step after `record`, which the main thread has not come to take."""

    @property
    def goes_back(self) -> bool:
        """Whether this rank keeps a local copy of the state before an update; then there is no barrier."""

    def exchange(self) -> None:
        """On the main thread, gradients ready: fetch what copies of other ranks' shards need of this step.

        When it returns, the device has done all that this thread has started.
        """

    def barrier(self) -> None:
        """Return when every rank of the job has called it; raise when that is no longer possible."""

    def copy_state(self) -> None:
        """On the main thread, past the door: put what the update changes into the local copy."""

    def update_replicas(self) -> None:
        """On the main thread, in the update window, own shards done: update the copies; needs nobody else."""

    def has_state(self) -> bool:
        """Whether its step can be saved: an optimizer may lack what is saved of it until its first update."""

    def dump(self, record: Any, order: GroupOrder, run: DumpRun) -> tuple[FileEntry, ...]:
        """Do this rank's part of a group; the writer returns its files, the others nothing.

        Raises NotFiniteError on the writer, before it writes, unless `run.as_is`.
        """


class NotFiniteError(Exception):
    """The shards that `ranks` gave have a nan or an infinity in them; another copy may have none."""

    def __init__(self, what: str, ranks: tuple[int, ...]) -> None:
        super().__init__(what)
        self.ranks = ranks


@dataclass(frozen=True)
class DumpRun:
    """What a dump needs besides the state: where it goes, with whom, and when to stop.

    past    the local copy is wanted, not the live state
    as_is   write it whether it is finite or not
    remark  is told what is not finite in what is written
    groups  all that this rank takes part in, in the order in which `dump` is called for them
    wake    lets raise what hangs in a collective of this process
    """

    rank: int
    folder: str
    attempt: int
    connect: Callable[[tuple[int, ...]], Any]
    progress: Callable[[int], None]
    cancelled: Callable[[], bool]
    past: bool
    as_is: bool = True
    remark: Callable[[str], None] = lambda what: None
    groups: tuple[GroupOrder, ...] = ()
    wake: Callable[[], int] = lambda: 0


class _Taken(NamedTuple):
    """A record, and the mark behind what it has on the device."""

    record: Any
    mark: Any


@dataclass(frozen=True)
class _History:
    """`records[k]` belongs to finished step k; `door` to step `door_step`, updated or skipped."""

    records: dict[int, _Taken] = field(default_factory=dict)
    door_step: int = -1
    door: Any = None
    updated: bool = True


class Session:
    """One per worker process."""

    def __init__(
        self, board: Board, say: Callable[[Trainee, int], None], broke: Callable[[str], None]
    ) -> None:
        """`say` tells the agent what is held and from which step; `broke` that the barrier broke."""
        self.board = board
        self.door = Door()
        self.trainee: Trainee | None = None
        self._say = say
        self._broke = broke
        self._history = _History()
        self._mark: Any = None  # behind the last update on the device, and the last local copy
        self._last_believed: BoardRecord | None = None
        self._step = -1
        self._waiting: set[int] = set()  # inner optimizers that have yet to finish this update
        self._copying = False
        self._inner: frozenset[int] = frozenset()
        self._begun = 0.0
        self._took: deque[float] = deque(maxlen=RECENT)
        self._unusual = UNUSUAL

    @property
    def updating(self) -> bool:
        """Whether some inner optimizers have yet to make this update."""
        return bool(self._waiting)

    # main thread

    def begin_training(self, trainee: Trainee, inner_optimizers: Iterable[object], origin: int) -> None:
        """The state of `trainee` is that of step `origin`, from which training now goes on."""
        self._inner = frozenset(id(optimizer) for optimizer in inner_optimizers)
        self._history = _History()
        self._mark = trainee.device.mark()
        self.trainee = trainee
        self.board.start(origin)
        self._say(trainee, origin)

    def begin_step(self, step: int, *, watched: bool = False) -> None:
        """`step` begins; everything of step - 1 is done.

        watched  `end_step` will be called, so that a step that does not end is known
        """
        if self.trainee is None:
            return
        history = self._history
        # From the record before, that of the door's step can be derived.
        oldest = min(self.board.oldest, history.door_step - 1)
        kept = {k: taken for k, taken in history.records.items() if oldest <= k < step}
        left_out = self.board.finished < step - 1 and self.trainee.has_state()
        if left_out and self.board.finished == history.door_step:
            kept[self.board.finished] = _Taken(self.record_of(self.board.finished), None)
        kept[step - 1] = _Taken(self.trainee.take_record(step - 1), self.trainee.device.mark())
        self._history = _History(kept, history.door_step, history.door, history.updated)
        self._step = step
        if left_out:  # the framework skipped steps as a whole (Megatron's --iterations-to-skip)
            self.board.finish(step - 1)
        if watched:
            self._begun = time.monotonic()
            self.board.enter(step)

    def end_step(self) -> None:
        """The step that was begun has ended: what comes until the next one may take any time."""
        if self.board.inside < 0:
            return
        if self._unusual:
            self._unusual -= 1
        else:
            self._took.append(time.monotonic() - self._begun)
        self.board.leave(max(self._took, default=0.0))

    def before_copy(self) -> None:
        """A script that makes the local copy by itself begins to; `before_update` says that it is made."""
        if self.trainee is None or self._step < 0 or self._waiting or self._copying:
            return
        self._come_to_the_door(self.trainee)
        self.board.copying()
        self._copying = True

    def before_update(self, optimizer: object) -> None:
        """An inner optimizer is about to change its state; the first of them opens the update window."""
        if self.trainee is None or self._step < 0 or self._waiting or id(optimizer) not in self._inner:
            return
        self._open_window(self.trainee)
        self._waiting = set(self._inner)

    def after_update(self, optimizer: object) -> None:
        """An inner optimizer has changed its state; the last of them closes the update window."""
        if not self._waiting:
            return
        if self._waiting == {id(optimizer)}:
            assert self.trainee is not None
            self.trainee.update_replicas()
            self._mark = self.trainee.device.mark()
        self._waiting.discard(id(optimizer))
        if not self._waiting:
            self._close_window()

    def update_nothing(self) -> None:
        """This rank trains nothing (its pipeline stage is frozen): it passes the door with the others."""
        if self.trainee is None or self._step < 0 or self._inner:
            return
        self._open_window(self.trainee)
        self._close_window()

    def end_update(self, updated: bool, grad_norm: float | None) -> None:
        """The framework's optimizer step returned; without an update (an overflow) the step is skipped."""
        if self.trainee is None or self._step < 0:
            return
        self.board.grad_norm = float(grad_norm or 0.0)
        if updated or self.board.finished >= self._step:
            return
        self._take_door(updated=False)
        self._mark = self.trainee.device.mark()
        if self.trainee.has_state():
            self.board.finish(self._step)

    def publishing(self, act: Callable[[], None]) -> None:
        """Run `act`, which makes a regular checkpoint appear, as a window: not while an incident is open."""
        self.door.enter(PUBLISH)
        try:
            act()
        finally:
            self.door.leave()

    def give_up(self) -> None:
        """An exception left the script.

        Inside the update window the live state is that of no step. At the door it is intact, but the main
        thread will not come back to go through.
        """
        if self._copying:  # the live state is intact
            self._copying = False
            self.board.turn_back()
            self.door.leave()
        elif self._waiting:
            self._waiting = set()
            self.board.broken()
            self.door.leave()
        elif self.board.phase is Phase.READY:
            self.board.turn_back()

    def hold(self) -> None:
        """Keep the main thread, and with it the process and its state, until the processor ends it."""
        threading.Event().wait()

    def _open_window(self, trainee: Trainee) -> None:
        if not self._copying:
            self._come_to_the_door(trainee)
            if trainee.goes_back:
                self._copy_state(trainee)
        else:
            self._mark = trainee.device.mark()
        self._copying = False
        self.board.updating(copied=trainee.goes_back)

    def _close_window(self) -> None:
        self.board.finish(self._step)
        self.door.leave()

    def _come_to_the_door(self, trainee: Trainee) -> None:
        trainee.exchange()  # where it breaks, this rank has not come to the door
        self._take_door(updated=True)
        self.board.ready(self._step)
        if not trainee.goes_back:
            self._meet_the_others(trainee)
        self.door.enter(self._step)

    def _meet_the_others(self, trainee: Trainee) -> None:
        try:
            # Behind a closed door this rank may have told that it was not READY yet. Then nobody may begin
            # the update, so the barrier must not be passed.
            if not self.door.closed:
                trainee.barrier()
        except Exception as error:  # a broken barrier counts as READY: the gradients are complete here
            self.door.shut()
            self._broke(f"{type(error).__name__}: {error}")

    def _copy_state(self, trainee: Trainee) -> None:
        """In the window, for the copy is no holder of anything meanwhile; the live state is intact."""
        self.board.copying()
        try:
            trainee.copy_state()
            self._mark = trainee.device.mark()
        except BaseException:
            self.board.turn_back()
            self.door.leave()
            raise

    def _take_door(self, updated: bool) -> None:
        assert self.trainee is not None
        self._history = _History(self._history.records, self._step, self.trainee.take_door(), updated)

    # processor's threads

    def freeze(self, timeout_s: float, again: bool = False) -> BoardRecord | None:
        """Close the door; the board once no update is in flight, None where one is after `timeout_s`.

        again  it is asked in the same incident: there may be a dump, which must not be disturbed
        """
        until = time.monotonic() + timeout_s
        if not (self.door.close(timeout_s) and self._updates_are_over(until)):
            return None
        board = self._last_believed or self.board.record()
        handled = self.trainee is not None and not self.trainee.save
        # What handlers do with the device takes any time, and tells nothing of it.
        why = "" if again and handled else self._device.unreadable(release=not again)
        # Who was not READY can be so by now with gradients of which nothing is known, or have skipped a step.
        if self._device.released and board.phase is not Phase.READY:
            self._last_believed = board
        return msgspec.structs.replace(board, phase=Phase.UNREADABLE, error=why) if why else board

    def let_through(self, step: int | None) -> None:
        """Let the main thread through the door to `step`, and to no other step from now on; None: to none."""
        self.door.let_through(step)

    def bring_to(self, step: int, wake: Callable[[], int], timeout_s: float) -> None:
        """Wait until the state of `step` is here, and stays: its update is over, where one is needed, and
        that of a later step, which was let through before.

        Raises:
            TimeoutError: the update was not done after `timeout_s`.
            RuntimeError: an exception left the update.
        """
        until = time.monotonic() + timeout_s
        if self.board.finished < step:
            wake()  # the main thread may still hang in the barrier

        def over() -> bool:
            return self.board.finished >= step or self.board.phase is not Phase.READY

        if not (self.door.wait_until(over, timeout_s) and self._updates_are_over(until)):
            raise TimeoutError(f"the update of step {step} was not done after {timeout_s:g} s")
        if self.board.finished < step:
            raise RuntimeError(f"an exception left the update of step {step}")

    def is_past(self, step: int) -> bool:
        """Whether `step`, to which this rank was brought, is before the last update: in the local copy."""
        return step < self.board.live

    def record_of(self, step: int) -> Any:
        """What belongs to `step` besides tensors."""
        assert self.trainee is not None
        history = self._history
        taken, before = history.records.get(step), history.records.get(step - 1)
        if taken is not None and self._device.done(taken.mark):
            return taken.record
        # Not taken yet; or taken behind a collective of the device that never ends, the door before it.
        if history.door_step == step and before is not None:
            return self.trainee.derive(before.record, history.door, history.updated)
        if taken is not None and self._device.wait(taken.mark, RECORD_S):
            return taken.record
        raise LookupError(f"step {step} is not among the steps that this rank still knows")

    def _updates_are_over(self, until: float) -> bool:
        """Wait for the device, which may be behind the main thread."""
        return self._device.wait(self._mark, max(0.0, until - time.monotonic()))

    @property
    def _device(self) -> Device:
        return HOST if self.trainee is None else self.trainee.device
