"""Online recovery as a worker sees it: leave the framework's loop, join the others, go round again.

The processor's thread gets `Regroup`: it brings the rank to the step, lets the main thread leave the
framework (an exception out of a broken collective, or `Unwind` at the door), and answers newcomers. The main
thread exchanges the process groups, puts back what belongs to the step, says `Joined`, waits for `Proceed`.
Then it calls the framework's loop again. A newcomer's main thread runs the framework's start alone, asks its
twin for the record of the step before it reads data, and joins at the same place.

Until `Proceed` a survivor's shards, copies and records stay those of the step, so that a dump of it can be
made at any moment. What fails is told (`RegroupFailed`), and the controller falls back to such a dump.
"""

from __future__ import annotations

import hashlib
import threading
import time
from collections.abc import Callable, Mapping
from typing import Any, Protocol, TypeVar

from adaptor import context
from adaptor.checkpoint.step_record import StepRecord, inner
from adaptor.checkpoint.trainee import MegatronTrainee
from adaptor.context import Context
from adaptor.errors import AdaptorError
from adaptor.online import state, transfer
from adaptor.online.groups import Groups
from adaptor.online.meeting import Meeting
from adaptor.protocol.messages import Joined, Proceed, Regroup, RegroupFailed, Replacement
from adaptor.waits import Waits
from adaptor.worker import stacks
from adaptor.worker.abort_gloo import LOOK_S
from adaptor.worker.door import Unwind
from adaptor.worker.processor import CannotRejoinError, MainThreadHangsError, why_not
from adaptor.worker.runtime import Runtime

T = TypeVar("T")

# When the connections of all groups are shut, what waits for them raises within milliseconds, and a wait for
# work that gloo has forgotten is ended within half a second (`abort_gloo.Waker`). A main thread that stands
# still for so long waits for others in a way that nothing here can end.
UNWIND_S = 3.0


class Loop(Protocol):
    """A framework's training loop, which can be called again. All on the main thread."""

    def group(self) -> str:
        """Return the name of the files that this rank could write: ranks of one group write the same."""

    def optimizer(self) -> Any:
        """Return the framework's optimizer, or chain of optimizers."""

    def model(self) -> Any:
        """Return the chunks of the model."""

    def answers(self, step: int) -> Mapping[str, Any]:
        """Return what a newcomer, which joins at `step`, would have asked other ranks at its start."""

    def settle(self, step: int) -> None:
        """Forget what an exception has left half done; the data since `step` will be given again."""

    def trainee(self, record: StepRecord) -> MegatronTrainee:
        """Describe what this rank holds: collective, over the new groups."""

    def agree(self, step: int) -> None:
        """Learn whether a rank has left what comes after `step`: collective, over the new groups."""

    def put_back(self, record: StepRecord) -> None:
        """Set the framework's counters to those of the step, as its loop reads them when it is called."""

    def finish_step(self) -> None:
        """Do what comes after the step (evaluation, a save) where a rank has not done all of it."""

    def gather_weights(self) -> None:
        """Make the model's weights from main params: collective, over the new groups."""


class Rejoin:
    """Of one worker.

    Args:
        worker: its session and its connection to the agent.
        made: its process groups.
        newcomer: this process takes the place of another.
    """

    def __init__(self, worker: Runtime, made: Groups, newcomer: bool) -> None:
        self._worker = worker
        self._groups = made
        self._session = worker.session
        self._alone = newcomer  # until it has joined
        self._changed = threading.Condition()
        self._order: Regroup | None = None  # the newest
        self._ready: Regroup | None = None  # for the main thread
        self._recovered = 0  # the incident that was recovered last
        self._left = False  # the main thread has left the framework's loop
        self._gone = False  # and will not call it again: the loop has ended, or the script has left it
        self._settled: Regroup | None = None  # it has put away what the fault has left half done
        self._loop: Loop | None = None
        self._meeting = Meeting(worker.rank)
        self._told: StepRecord | None = None
        worker.processor.go_round_by(self)

    @property
    def newcomer(self) -> bool:
        """Return whether this process takes the place of another, and has not joined yet."""
        return self._alone

    def decide(self, why_not: str) -> None:
        """On the main thread, before training begins: why this rank is not recovered online; empty: it is."""
        self._worker.online = why_not
        context.part(Waits).acts = not why_not

    # processor's threads

    def regroup(self, order: Regroup, wake: Callable[[frozenset[int]], int]) -> None:
        """See `processor.Rejoin`.

        Raises:
            Exception: this rank cannot take part; its state is what it was.
        """
        with self._changed:
            self._order = order
            self._meeting.abandon()
            if self._alone:
                self._ready = order
                self._changed.notify_all()
                return
        session = self._session
        if session.trainee is None or not session.is_training:
            raise CannotRejoinError("it is not in its training loop")

        def shut() -> int:
            with self._changed:  # behind that the main thread makes new connections
                if self._settled is order:
                    return 0
                inodes = self._groups.sockets()
            return wake(inodes)

        self._until_it_comes(order, shut, lambda slice_s: self._brought_to(order.step, shut, slice_s))
        session.door.turn_away()
        shut()
        self._until_it_comes(order, shut, lambda slice_s: self._wait(order, lambda: self._left, slice_s))
        with self._changed:
            if self._is_old(order):
                return
            self._ready = order
            self._changed.notify_all()
        self._until_it_comes(
            order, shut, lambda slice_s: self._wait(order, lambda: self._settled is order, slice_s)
        )
        if self._is_old(order):
            return
        for one in order.replaced:
            if self._worker.rank in (one.twin, *(source.source for source in one.sources)):
                self._answer(order, one)

    def _until_it_comes(self, order: Regroup, shut: Callable[[], int], done: Callable[[float], bool]) -> None:
        """Wait until the main thread has done its part, as `done` tells after so many seconds at most.

        Args:
            shut: is called until then: what is broken is broken whenever the main thread comes to it.

        Raises:
            MainThreadHangsError: it waits for work that will not end.
            CannotRejoinError: the time is over.
        """
        since = time.monotonic()
        until = since + order.timeout_s
        before = stacks.awaited()
        while not done(max(0.0, min(LOOK_S, until - time.monotonic()))):
            now = time.monotonic()
            if now >= until:
                raise CannotRejoinError("its main thread has not left the training loop in time")
            if self._gone:
                raise CannotRejoinError("its script has left the training loop")
            shut()
            there = stacks.awaited()
            if there is None or before is None or there.way != before.way:
                before, since = there, now
            elif now - since >= UNWIND_S:
                raise MainThreadHangsError(f"its main thread hangs in {there.where}")

    def _wait(self, order: Regroup, done: Callable[[], bool], timeout_s: float) -> bool:
        with self._changed:
            return self._changed.wait_for(lambda: done() or self._is_old(order), timeout_s)

    def _brought_to(self, step: int, wake: Callable[[], int], timeout_s: float) -> bool:
        try:
            self._session.bring_to(step, wake, timeout_s)
        except TimeoutError:
            return False
        return True

    def proceed(self, order: Proceed) -> None:
        """See `processor.Rejoin`."""
        self._session.door.open()
        with self._changed:
            self._recovered = order.incident
            self._changed.notify_all()

    def _answer(self, order: Regroup, one: Replacement) -> None:
        assert self._loop is not None
        trainee = self._session.trainee
        assert isinstance(trainee, MegatronTrainee)
        past = self._session.from_local_copy(order.step)
        record = self._session.record_of(order.step)
        loop = self._loop
        given = state.Given(trainee, record, past, lambda: loop.answers(order.step))
        line = self._meeting.to_newcomer(order, one.rank)
        transfer.answer(line, given, cancelled=lambda: self._is_old(order))

    def _is_old(self, order: Regroup) -> bool:
        return self._order is not order

    # main thread

    def run(self, loop: Loop, train: Callable[[], T]) -> T:
        """Return what `train` returns, which is the framework's loop; it is called again after each
        incident from which the job goes on."""
        self._loop = loop
        self._gone = False
        try:
            return self._run(loop, train)
        finally:
            self._gone = True

    def _run(self, loop: Loop, train: Callable[[], T]) -> T:
        if self._alone:
            self._join()
        while True:
            try:
                loop.finish_step()
                return train()
            except Unwind:
                pass
            except (AdaptorError, SystemExit):
                raise
            except Exception as error:
                self._worker.tell_of(error)
                error.__traceback__ = None  # what hangs on it is as large as the activations of a step
            self._join()

    def ask_record(self) -> tuple[StepRecord, Mapping[str, Any]]:
        """In a newcomer: the record of the step, and what it would have asked others at its start.

        Waits until the survivors have agreed on the step.
        """
        with self._changed:
            self._changed.wait_for(lambda: self._ready is not None)
            order = self._ready
        assert order is not None
        told = transfer.ask_record(self._meeting.to_source(order, self._replacement(order).twin))
        self._told = state.record_of(told)
        return self._told, told["answers"]

    def _join(self) -> None:
        """Take part in the attempts of an incident, until the job goes on; else this process is ended."""
        done: Regroup | None = None
        with self._changed:
            self._left = True
            self._changed.notify_all()
        while (order := self._next(done)) is not None:
            self._take_part(order)
            done = order

    def _next(self, done: Regroup | None) -> Regroup | None:
        """Wait for the order after `done`; None: the job goes on from what was `done`."""
        with self._changed:
            self._changed.wait_for(
                lambda: self._ready is not done or (done is not None and self._recovered == done.incident)
            )
            if self._ready is not done:
                return self._ready
            self._left = self._alone = False
            self._ready = None
        self._meeting.close()
        return None

    def _take_part(self, order: Regroup) -> None:
        where = (self._worker.rank, order.incident, order.attempt)
        try:
            digest = self._regrouped(order)
        except Exception as error:
            self._has_settled(order)
            if not self._is_old(order):
                self._worker.processor.say(RegroupFailed(*where, why_not(error)))
        else:
            self._worker.processor.say(Joined(*where, order.step, digest))

    def _regrouped(self, order: Regroup) -> str:
        """Exchange the groups and put back the state of the step; return the digest of `Joined`."""
        made, loop, session = self._groups, self._loop, self._session
        assert loop is not None
        trainee = session.trainee
        if self._alone:
            assert self._told is not None
            record = self._told
            if record.step != order.step:
                raise transfer.TransferError(f"it has the data after step {record.step}")
            self._fetch(order, loop)
        else:
            record = session.record_of(order.step)
            loop.settle(order.step)
            self._has_settled(order)
            if session.from_local_copy(order.step):
                assert isinstance(trainee, MegatronTrainee)
                assert trainee.local_copy is not None
                trainee.local_copy.put_back()
            assert isinstance(trainee, MegatronTrainee)
            copies = [mirror.optimizer for mirror in trainee.mirrors if mirror is not None]
            state.require_finite([*inner(trainee.state.optimizer), *copies])
        made.exchange(self._meeting.store(order, "groups"), f"{order.incident}.{order.attempt}")
        if order.replaced:
            trainee = loop.trainee(record)
        assert isinstance(trainee, MegatronTrainee)
        loop.agree(order.step)
        loop.put_back(record)
        state.restore(trainee, record)
        loop.gather_weights()
        trainee.random.put_back(record.rng)
        optimizers = inner(trainee.state.optimizer)
        session.begin_again(trainee, optimizers, record, order.step, order.origin)
        return _digest(record, made.count())

    def _has_settled(self, order: Regroup) -> None:
        with self._changed:
            self._settled = order
            self._changed.notify_all()

    def _fetch(self, order: Regroup, loop: Loop) -> None:
        """In a newcomer: get the shards that it updates, and the weights that nobody updates."""
        here = self._replacement(order)
        givers = {(one.group, one.index): one.source for one in here.sources}
        for index, optimizer in state.own_shards(loop.optimizer()):
            giver = givers.get((loop.group(), index))
            if giver is None:
                raise transfer.TransferError(f"nobody gives shard {index}")
            transfer.ask_shard(self._meeting.to_source(order, giver), index, optimizer)
        weights = state.frozen(loop.model())
        if weights:
            transfer.ask_frozen(self._meeting.to_source(order, here.twin), weights)
        for source in {here.twin, *givers.values()}:
            transfer.end(self._meeting.to_source(order, source))

    def _replacement(self, order: Regroup) -> Replacement:
        return next(one for one in order.replaced if one.rank == self._worker.rank)


def _digest(record: StepRecord, count: int) -> str:
    """Return a checksum of what is equal on all ranks: step, counters, schedule, and how many groups the job
    has made (by which torch names the next one)."""
    schedule = dict(record.scheduler or {})
    told = (record.step, sorted(record.counters.items()), sorted(schedule.items()), count)
    return hashlib.sha256(repr(told).encode()).hexdigest()[:16]


class OnlineRecovery:
    """Online recovery in this process.

    rejoin  what `prepare` has made; None with TTP_ONLINE=0
    """

    def __init__(self, _context: Context) -> None:
        self.rejoin: Rejoin | None = None


def prepare(worker: Runtime, newcomer: bool) -> None:
    """At the start of a worker whose job may go on after a fault: from now on its groups are remembered."""
    made = context.part(Groups)
    made.remember(lone=newcomer)
    context.part(OnlineRecovery).rejoin = Rejoin(worker, made, newcomer)


def of_this_process() -> Rejoin | None:
    """Return what was prepared; None with TTP_ONLINE=0."""
    return context.part(OnlineRecovery).rejoin
