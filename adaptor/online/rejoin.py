"""Online recovery in a worker: leave the framework's loop, join the others, go round again.

The processor's thread gets `Regroup`: the thread brings the rank to the step, lets the main thread leave the
framework (an exception out of a broken collective, or `Unwind` at the door), and answers newcomers. The main
thread exchanges the process groups, restores the state of the step, says `Joined`, waits for `Proceed`. Then
the main thread calls the framework's loop again. A newcomer's main thread runs the framework's start alone,
asks its twin for the record of the step before reading data, and joins at the same place.

The step is on disk before the recovery begins, and until `Proceed` a survivor keeps the shards, copies and
records of the step. A failure is reported (`RegroupFailed`): then all are started again from the step, or the
controller tries once more.
"""

from __future__ import annotations

import functools
import threading
import time
from collections.abc import Callable
from typing import TypeVar

from adaptor import context, patching
from adaptor.checkpoint.step_record import StepRecord, inner
from adaptor.checkpoint.trainee import MegatronTrainee
from adaptor.context import Context
from adaptor.errors import AdaptorError, CheckpointError
from adaptor.online import state, transfer
from adaptor.online.groups import Groups
from adaptor.online.rank_buffers import RankBuffers
from adaptor.online.state import Loop, TwinAnswer
from adaptor.online.transfer import Meeting, TransferChannel
from adaptor.protocol.messages import Joined, Proceed, Regroup, Replacement, Standing
from adaptor.replica import group
from adaptor.worker import runtime, stacks
from adaptor.worker.abort_collectives import LOOK_S
from adaptor.worker.door import Unwind
from adaptor.worker.garbage import GarbageCollection
from adaptor.worker.processor import CannotRejoinError, MainThreadHangsError, failed
from adaptor.worker.runtime import Runtime

T = TypeVar("T")

# When the connections of all groups are shut, what waits for them raises within milliseconds, and a wait for
# work that gloo has forgotten is ended within half a second (`Waker`). A main thread that stands
# still for so long waits for others in a way that nothing here can end. On a machine with ten times more work
# than cores each of these takes seconds; and the step is on disk, so a longer wait costs only time.
UNWIND_S = 10.0


def until_it_comes(
    timeout_s: float,
    shut: Callable[[], int],
    is_done: Callable[[float], bool],
    is_gone: Callable[[], bool],
    *,
    look: Callable[[], Standing | None] = stacks.awaited,
) -> None:
    """Wait until the main thread has done its part; `is_done` waits for a given number of seconds at most.

    Args:
        shut: is called until then: a connection breaks whenever the main thread comes to use it.
        is_gone: returns whether the script has left its training loop.
        look: returns the position of the main thread; None where the thread may stay for any time.

    Raises:
        MainThreadHangsError: the main thread waits for work that will not end.
        CannotRejoinError: the time is over, or the script has left the loop.
    """
    since = time.monotonic()
    until = since + timeout_s
    standing_before = look()
    while not is_done(max(0.0, min(LOOK_S, until - time.monotonic()))):
        time_now = time.monotonic()
        if time_now >= until:
            raise CannotRejoinError("its main thread has not left the training loop in time")
        if is_gone():
            raise CannotRejoinError("its script has left the training loop")
        shut()
        standing = look()
        if (
            standing is None
            or standing_before is None
            or standing.stack_hashes != standing_before.stack_hashes
        ):
            standing_before, since = standing, time_now
        elif time_now - since >= UNWIND_S:
            raise MainThreadHangsError(f"its main thread hangs in {standing.where}")


class Rejoin:
    """The online recovery of a worker.

    Args:
        newcomer: this process replaces another.
    """

    def __init__(self, worker: Runtime, groups: Groups, newcomer: bool) -> None:
        self._worker = worker
        self._groups = groups
        self._session = worker.session
        self.newcomer = newcomer  # until it has joined
        self._changed = threading.Condition()
        self._order: Regroup | None = None  # the newest
        self._ready: Regroup | None = None  # for the main thread
        self._recovered = 0  # the incident that was recovered last
        self._frozen = 0  # the newest incident in which this rank was frozen
        self._has_left_loop = False  # the main thread has left the framework's loop
        # The main thread will not call the loop again: the loop has ended, or the script has left it.
        self._will_not_return = False
        self._settled: Regroup | None = None  # it has put away what the fault has left half done
        self._loop: Loop | None = None
        self._meeting = Meeting(worker.rank)
        self._ended: list[Meeting] = []  # to whose stores process groups may come back
        self._told: TwinAnswer | None = None  # in a newcomer
        worker.processor.go_round_by(self)

    def set_online_support(self, why_not: str) -> None:
        """Set, before training begins, why this rank is not recovered online; empty: the rank is."""
        self._worker.online = why_not
        # The framework's waits: torch's own cost it nothing.
        if not why_not and self._groups.are_gloo:
            patching.arm("waits")
        else:
            patching.disarm("waits")

    # processor's threads

    def regroup(self, order: Regroup, wake: Callable[[frozenset[int]], int]) -> None:
        """Let the main thread leave, and do a survivor's work for newcomers; may take long.

        Args:
            wake: shuts the connections with these inodes; called until the main thread has left.

        Raises:
            Exception: this rank cannot take part; the rank's state is unchanged.
        """
        with self._changed:
            if order.incident <= self._recovered or order.incident < self._frozen:
                return  # its thread begins late: all go on already, or there is another incident
            known_order = self._order
            if known_order is not None and (known_order.incident, known_order.attempt) > (
                order.incident,
                order.attempt,
            ):
                return  # each order has a thread, and that of a newer one was faster
            self._order = order
            for meeting in (*self._ended, self._meeting):
                meeting.abandon()
            if self.newcomer:
                self._ready = order
                self._changed.notify_all()
                return
        # In a further attempt the main thread has left the framework: it then waits for other ranks alone.
        is_further_attempt = known_order is not None and known_order.incident == order.incident
        session = self._session
        if session.trainee is None or not session.is_training:
            raise CannotRejoinError("it is not in its training loop")
        session.freezer.begin_attempt()
        device, is_turned_away = session.trainee.device, False

        def shut() -> int:
            # Once the main thread has settled it makes new connections, which must not be shut.
            with self._changed:
                if self._settled is order or self._is_old(order):
                    return 0
                inodes = self._groups.sockets()
            if is_turned_away:
                device.end_collectives()  # which is nothing once the main thread has come to rest
            return wake(inodes)

        wait = functools.partial(until_it_comes, order.timeout_s, shut, is_gone=lambda: self._will_not_return)
        wait(lambda slice_s: self._bring_to(order, shut, slice_s))
        with self._changed:
            if self._is_old(order):  # all may go on already: the door is open
                return
            session.door.turn_away()
            is_turned_away = True
        shut()
        wait(lambda slice_s: self._wait(order, lambda: self._has_left_loop, slice_s))
        with self._changed:
            if self._is_old(order):
                return
            self._ready = order
            self._changed.notify_all()
        wait(
            lambda slice_s: self._wait(order, lambda: self._settled is order, slice_s),
            look=stacks.standing if is_further_attempt else stacks.awaited,
        )
        if self._is_old(order):
            return
        for replacement in order.replaced:
            if self._worker.rank in (replacement.twin, *(source.source for source in replacement.sources)):
                self._answer(order, replacement)

    def _wait(self, order: Regroup, is_done: Callable[[], bool], timeout_s: float) -> bool:
        with self._changed:
            return self._changed.wait_for(lambda: is_done() or self._is_old(order), timeout_s)

    def _bring_to(self, order: Regroup, wake: Callable[[], int], timeout_s: float) -> bool:
        try:
            self._session.freezer.bring_to(order.step, wake, timeout_s)
        except TimeoutError:
            return self._is_old(order)
        return True

    def freeze(self, incident: int) -> None:
        """Give up the attempts of earlier incidents: they change the training state no more; at once."""
        with self._changed:
            self._frozen = incident
            if self._order is not None and self._order.incident < incident:
                self._order = None
                self._meeting.abandon()
                self._changed.notify_all()

    def proceed(self, order: Proceed) -> None:
        """Let the main thread go on; at once."""
        with self._changed:
            # From now on this is a survivor of the next incident, of which the order may come before the main
            # thread has seen this one; and no thread of this incident does anything more.
            self.newcomer, self._order = False, None
            self._session.door.open()
            self._recovered = order.incident
            self._changed.notify_all()

    def sockets(self) -> frozenset[int] | None:
        """Return the inodes of the connections that a dump may shut; None: all, as this process ends then."""
        return None if self._worker.online else self._groups.sockets()

    def _answer(self, order: Regroup, replacement: Replacement) -> None:
        assert self._loop is not None
        trainee = self._session.trainee
        assert isinstance(trainee, MegatronTrainee)
        past = not order.from_copies and self._session.from_local_copy(order.step)
        record = None if order.from_copies else self._session.record_of(order.step)
        loop = self._loop
        measures, is_copied = self._session.pace.measures(), self._session.copier is not None
        shared_state = state.Given(
            trainee, record, past, lambda: loop.answers(order.step), measures, is_copied
        )
        line = self._meeting.to_newcomer(order, replacement.rank)
        transfer.answer(line, shared_state, cancelled=lambda: self._is_old(order))

    def _is_old(self, order: Regroup) -> bool:
        """Return whether another attempt has begun, or all go on."""
        return self._order is not order

    def _require_current(self, order: Regroup) -> None:
        if self._is_old(order):
            raise CannotRejoinError("another attempt has begun")

    def copied_steps(self) -> tuple[int, ...]:
        """Return the steps of this rank's copies in host memory to which its loop can go back."""
        return () if self._loop is None else self._loop.copied_steps()

    # main thread

    def run(self, loop: Loop, train: Callable[[], T]) -> T:
        """Return the result of the loop `train`, which is called again after each incident."""
        self._loop = loop
        context.part(GarbageCollection).resume()  # in a newcomer: it has started
        self._will_not_return = False
        try:
            return self._run(loop, train)
        finally:
            self._will_not_return = True

    def _run(self, loop: Loop, train: Callable[[], T]) -> T:
        if self.newcomer:
            self._join()
        while True:
            try:
                loop.finish_step()
                self._session.pace.abandon_step()  # work before the loop's first step may take any time
                return train()
            except Unwind:
                pass
            except Exception as error:
                # The save of an incident takes away what a regular save has half written: that is made again.
                taken_away = isinstance(error, CheckpointError) and self._session.door.closed
                if isinstance(error, AdaptorError) and not taken_away:
                    raise
                self._worker.tell_of(error)
                error.__traceback__ = None  # what hangs on it is as large as the activations of a step
            self._join()

    def ask_record(self, read: Callable[[int], StepRecord] | None = None) -> TwinAnswer:
        """In a newcomer: ask where the job is, once the survivors have agreed on the step.

        Args:
            read: returns the record of a step from this rank's copy in host memory; None: no copies are used.
        """
        with self._changed:
            self._changed.wait_for(lambda: self._ready is not None)
            order = self._ready
        assert order is not None
        own_record = read(order.step) if read is not None and order.from_copies else None
        self._told = state.ask_twin(order, self._worker.rank, self._line_to(order), own_record)
        return self._told

    def _line_to(self, order: Regroup) -> Callable[[int], TransferChannel]:
        return lambda source: self._meeting.to_source(order, source)

    def _join(self) -> None:
        """Take part in the attempts of an incident, until the job goes on; else this process is ended."""
        done_order: Regroup | None = None
        with self._changed:
            self._has_left_loop = True
            self._changed.notify_all()
        while (order := self._next(done_order)) is not None:
            self._take_part(order)
            done_order = order

    def _next(self, done_order: Regroup | None) -> Regroup | None:
        """Wait for the order after `done_order`; None: the job goes on from what was `done_order`."""
        with self._changed:
            self._changed.wait_for(
                lambda: (
                    self._ready is not done_order
                    or (done_order is not None and self._recovered == done_order.incident)
                )
            )
            if self._ready is not done_order:
                return self._ready
            self._has_left_loop = False
            self._ready = None
            ended_meeting, self._meeting = self._meeting, Meeting(self._worker.rank)
            if not self._groups.are_gloo:
                ended_meeting.rest(self._groups.timeout_s)
                self._ended.append(ended_meeting)
                return None
        ended_meeting.close()
        return None

    def _take_part(self, order: Regroup) -> None:
        try:
            digest = self._restore_and_regroup(order)
        except Exception as error:
            self._has_settled(order)  # `regroup` waits for it, and would shut connections in vain
            if not self._is_old(order):
                self._worker.processor.say(failed(self._worker.rank, order, error))
        else:
            attempt_key = (self._worker.rank, order.incident, order.attempt)
            self._worker.processor.say(Joined(*attempt_key, order.step, digest))

    def _restore_and_regroup(self, order: Regroup) -> str:
        """Exchange the groups and put back the state of the step; return the digest of `Joined`."""
        groups, loop, session = self._groups, self._loop, self._session
        assert loop is not None
        trainee = session.trainee
        answer = self._told if self.newcomer else None
        if session.copier is not None:
            session.copier.stop()
        if answer is not None:
            record = answer.record
            if record.step != order.step:
                raise transfer.TransferError(f"it has read the data that follow step {record.step}")
            if order.from_copies:
                loop.put_back_copy(order.step)
                state.end_talk(order, self._worker.rank, self._line_to(order))
            else:
                state.fetch_shards(order, self._worker.rank, self._line_to(order), loop)
        else:
            if not order.from_copies:
                record = session.record_of(order.step)
            session.freezer.rest()  # what the abandoned step has queued there writes nothing later
            loop.settle(order.step)
            self._has_settled(order)
            if order.from_copies:
                with self._changed:
                    self._require_current(order)
                    session.board.broken()  # until all of the copy is there
                record = loop.put_back_copy(order.step)
            elif session.from_local_copy(order.step):
                assert isinstance(trainee, MegatronTrainee)
                assert trainee.local_copy is not None
                with self._changed:
                    # A controller that takes over freezes this rank, which answers with the steps that it
                    # has. After that it must not give one up: `freeze` makes the order an old one.
                    self._require_current(order)
                    session.freezer.go_back(order.step)
                trainee.local_copy.put_back()
            assert isinstance(trainee, MegatronTrainee)
            copies = [mirror.optimizer for mirror in trainee.mirrors if mirror is not None]
            state.require_finite([*inner(trainee.state.optimizer), *copies])
        store = self._meeting.store(order, "groups")
        self._require_current(order)  # from here on `regroup` abandons the store
        buffers = context.part(RankBuffers)
        buffers.leave()
        groups.exchange(store, f"{order.incident}.{order.attempt}")
        buffers.make_again()
        if order.replaced or order.from_copies:
            trainee = loop.protected.trainee(group.of_training_job(), is_repeated=True)
        assert isinstance(trainee, MegatronTrainee)
        loop.agree(order.step)
        loop.put_back(record)
        state.restore(trainee, record)
        loop.gather_weights()
        trainee.random.put_back(record.rng)
        trainee.loaders.put_back(record.loaders)
        optimizers = inner(trainee.state.optimizer)
        measures = answer.measures if answer is not None else None
        if answer is not None and not answer.is_copied:
            session.copier = None  # the other ranks wait in no agreement on copies
        session.begin_again(trainee, optimizers, record, order.step, order.origin, measures)
        return state.digest(record, groups.count())

    def _has_settled(self, order: Regroup) -> None:
        with self._changed:
            self._settled = order
            self._changed.notify_all()


class OnlineRecovery:
    """Online recovery in this process, created at the first request.

    Attributes:
        rejoin: None with TTP_ONLINE=0, and outside of a worker
    """

    def __init__(self, _context: Context) -> None:
        groups, worker = context.part(Groups), runtime.of_this_process()
        is_prepared = groups.remembers and isinstance(worker, Runtime)
        self.rejoin = Rejoin(worker, groups, groups.lone) if is_prepared else None  # type: ignore[arg-type]


def of_this_process() -> Rejoin | None:
    """Return this worker's part in online recovery; None with TTP_ONLINE=0."""
    return context.part(OnlineRecovery).rejoin


def is_newcomer() -> bool:
    """Return whether this process takes the place of another, and has not joined yet."""
    worker = of_this_process()
    return worker is not None and worker.newcomer
