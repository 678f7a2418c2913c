"""A simulated worker: a real session, door and board; script and processor have no threads.

The script is Megatron's loop, as seen by the session and other ranks. The processor answers like
`adaptor.worker.processor`; its threads are generators.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from adaptor.devices.device import HOST
from adaptor.protocol.board import Board
from adaptor.protocol.messages import (
    Dump,
    EndScript,
    Exit,
    Freeze,
    FromWorker,
    Frozen,
    Hello,
    Joined,
    Layout,
    PresenceProbe,
    Present,
    Proceed,
    Raised,
    Regroup,
    RegroupFailed,
    Replacement,
    Standing,
    TerminationRequested,
    ToWorker,
    WriteFailed,
    Written,
)
from adaptor.worker.door import Unwind
from adaptor.worker.session import Session
from tests.simulation import meetings
from tests.simulation.clock import Body, Link, Parked, Process

if TYPE_CHECKING:
    from tests.simulation.agent import Agent


# The framework's own timeout for collectives.
FRAMEWORK_S = 60.0
# Seconds after which a main thread is taken not to leave the framework's loop any more.
UNWIND_S = 3.0
# The step of a shard in the middle of its update.
TORN = -1


class ScriptError(Exception):
    """An exception that leaves the script."""


class ReplacedError(Exception):
    """A newer order has replaced the order in execution."""


class Trainee:
    """The trainee of a session. The content of a shard is the step of its last update."""

    save_folder = "/save"
    in_parts = False
    device = HOST
    survives = ""

    def __init__(self, worker: Worker) -> None:
        self._worker = worker
        self.job = job = worker.world.job
        self.shares = job.shares[worker.rank]
        self.has_local_copy = job.has_local_copy
        self.tensors = {(s.group, s.index): job.origin for s in self.shares}
        self.before = dict(self.tensors)  # the local copy
        self.gradients = TORN  # the step of the gradients for the copies of other ranks' shards
        self.updates = 0
        self.step = job.origin

    def after_evaluation(self) -> None:
        """Do nothing: an evaluation changes no state."""

    def take_record(self, step: int) -> tuple[int, int]:
        return step, self.updates

    def snapshot_before_update(self) -> int:
        return self.step

    def derive(self, record: tuple[int, int], door: int, updated: bool) -> tuple[int, int]:
        assert door == record[0] + 1, "a record is derived by what another step has changed"
        return record[0] + 1, record[1] + updated

    def require_as_derived(self, taken: tuple[int, int], derived: tuple[int, int]) -> None:
        assert taken == derived

    def has_state(self) -> bool:
        return self.job.origin > 0 or self.updates > 0 or any(self.tensors.values())

    def exchange(self) -> None:
        if self.job.copies[self._worker.rank]:
            self._worker.meet(
                ("exchange", self.step, self._worker.epoch), self.job.partners[self._worker.rank]
            )
            self.gradients = self.step

    def barrier(self) -> None:
        self._worker.meet(("barrier", self.step, self._worker.epoch), frozenset(self.job.ranks))

    def copy_state(self) -> None:
        self.before.update(self.tensors)

    def update(self, number: int, step: int) -> None:
        for shard in self.job.inner[self._worker.rank][number]:
            self.tensors[shard] = step

    def update_replicas(self) -> None:
        for shard in self.job.copies[self._worker.rank]:
            self.tensors[shard] = self.gradients


def _line(order: Regroup, newcomer: int, *parts: Any) -> Any:
    return ("dump", "line", order.incident, order.attempt, newcomer, *parts)


class Worker(Process):
    """A process of a rank.

    Attributes:
        epoch: the incident of the last online recovery; connections belong to one epoch.
        newcomer: whether the process replaces another and has not joined the others yet.
        is_known: whether the agent has received the hello.
        raises: whether an exception is about to leave the script.
    """

    def __init__(self, agent: Agent, rank: int, pid: int = 0, *, newcomer: bool = False) -> None:
        super().__init__(agent.clock)
        world = agent.world
        self.world = world
        self.rank = rank
        self.pid = pid or rank
        self.newcomer = newcomer
        self.epoch = 0
        self.node = agent.node
        self.machine = agent.machine
        self.agent = agent
        self.meetings = world.meetings
        self.to_agent = Link(
            self.clock,
            world.local_delay,
            lambda message: self.agent.do(self.agent.receive_from_worker, self, message),
        )
        self.from_agent = Link(self.clock, world.local_delay, lambda order: self.do(self._obey, order))
        self.is_known = False
        self.raises = False
        self.main_hangs = False
        self._exit_code = 0
        self._current = (0, 0)
        self._has_left = False  # it has left its script, and waits for the controller
        self._outcomes: dict[Any, bool] = {}  # of its collectives
        self.waits_for: dict[Any, frozenset[int]] = {}
        self._hanging: set[Any] = set()
        self._broken_told: set[str] = set()
        self._shut_epoch = -1  # the epoch whose connections it has shut
        self._order: Regroup | None = None  # the newest order
        self._ready: Regroup | None = None  # the order for the main thread
        self._is_out_of_loop = False  # the main thread has left the loop

    # the main thread

    def start(self) -> None:
        boards = self.agent.boards
        self.session = Session(
            Board(self.rank, boards.path, boards.slots), self._send_layout, self._send_broken_barrier
        )
        self.session.door._changed = self.condition  # type: ignore[assignment]
        write = self.session.board.write

        def written() -> None:
            write()
            self.world.on_board(self)

        self.session.board.write = written  # type: ignore[method-assign]
        self.say(Hello(self.rank, self.pid))
        self.thread(self._main())

    def _main(self) -> Body[None]:
        try:
            yield from self._script()
        except Exception as error:
            self.session.window.give_up()
            self.session.board.fail(str(error))
            self._exit_code = 1
            self.say(Raised(self.rank, f"{type(error).__name__}: {error}", 1))
            return  # the process stays: it may be a holder
        if self.session.door.closed and not self.session.script_may_end.is_set():
            self._has_left = True
            return  # it may be a holder
        yield from self._end()

    def _end(self) -> Body[None]:
        self.session.board.end()
        if self.session.script_may_end.is_set():
            self.say(Frozen(self.rank, self._current[0], self.session.board.record()))
        yield self.world.random.uniform(0.001, 0.3)
        self.world.end(self, 0)

    def _script(self) -> Body[None]:
        job, draw = self.world.job, self.world.random
        session = self.session
        yield from self._busy(draw.uniform(0.05, 0.5))
        if self.newcomer:  # it builds its model alone
            self.trainee = Trainee(self)
            self._inner = [object() for _ in job.inner[self.rank]]
            yield from self._rejoin()
        else:
            if self.rank == 0:
                self.world.disk.clean_all()  # while the disk hangs, no rank begins
            yield from self.through(lambda: self.meet("start", frozenset(job.ranks)))
            self.trainee = Trainee(self)
            self._inner = [object() for _ in job.inner[self.rank]]
            session.begin_training(self.trainee, self._inner, job.origin)
        while True:
            try:
                yield from self._train()
                return
            except Unwind:
                pass
            except Exception as error:
                if not self.world.online_s:
                    raise
                session.window.give_up()
                self.say(Raised(self.rank, f"{type(error).__name__}: {error}", 1))
            yield from self._rejoin()

    def _train(self) -> Body[None]:
        job, draw = self.world.job, self.world.random
        session, trainee, inner = self.session, self.trainee, self._inner
        for step in [step for step in job.steps if step > trainee.step]:
            yield from self._busy(self.world.pause_before(step))
            trainee.step = step
            session.begin_step(step, watched=True)
            yield from self._busy(draw.uniform(0.5, 1.5) * self.world.step_s)
            yield from self.through(
                lambda step=step: self.meet(("reduce", step, self.epoch), frozenset(job.ranks))
            )
            if step in job.skipped:
                session.end_update(False, None)
            else:
                yield from self._busy(draw.uniform(0.0, 0.2) * self.world.step_s)  # norm and clipping
                yield from self.through(lambda: session.before_update(inner[0]))
                for number, optimizer in enumerate(inner):
                    session.before_update(optimizer)
                    trainee.update(number, TORN)
                    yield from self._busy(draw.uniform(0.1, 1.0) * self.world.update_s)
                    trainee.update(number, step)
                    session.after_update(optimizer)
                session.end_update(True, 1.0)
                trainee.updates += 1
                if not job.late:
                    yield from self._gather(step)
            session.end_step()
            if job.late and step not in job.skipped:
                yield from self._gather(step)
            if self.world.saves_after(step):
                session.pace.begin_phase("save")  # not by `phase`: a generator that is closed would end it
                try:
                    yield from self._save(step)
                except (Exception, Unwind):
                    session.pace.end_phase(is_measure=False)
                    raise
                session.pace.end_phase()

    def _gather(self, step: int) -> Body[None]:
        everyone = frozenset(self.world.job.ranks)
        yield from self.through(lambda: self.meet(("gather", step, self.epoch), everyone))

    def _save(self, step: int) -> Body[None]:
        """Make a regular save of the framework; rank 0 renames it when every rank has written."""
        everyone = frozenset(self.world.job.ranks)
        yield from self._busy(self.world.random.uniform(0.01, 0.2))
        yield from self.through(lambda: self.meet(("written", step, self.epoch), everyone))
        if self.rank == 0:
            door = self.session.door
            yield from self.through(lambda: door.enter(-1))  # as Session.publishing, which cannot take time
            try:
                self.world.disk.publish_regular(step, self.world.generation)
                yield from self._busy(self.world.random.uniform(0.001, 0.05))
                self.world.disk.replace_tracker(step)
            finally:
                door.leave()
        yield from self.through(lambda: self.meet(("saved", step, self.epoch), everyone))

    def _busy(self, seconds: float) -> Body[None]:
        yield seconds
        updating, inside = self.session.window.is_open, self.session.door._inside > 0
        if (updating and (self.main_hangs or self.raises)) or (inside and self.main_hangs):
            self.world.faults.in_a_window(self)
        while self.main_hangs:
            yield None
        if self.raises:
            self.raises = False
            raise ScriptError("it failed")

    def meet(self, name: Any, peers: frozenset[int]) -> None:
        """Take part in a collective with `peers`; the real code is parked until the collective is complete or
        broken.
        """
        if self._shut_epoch == self.epoch and not meetings.is_apart(name):
            raise RuntimeError("connection shut")
        if name not in self._outcomes:
            if name not in self.waits_for:
                self.waits_for[name] = peers
                self.later(FRAMEWORK_S, self.met, name, False)
                self.meetings.arrive(self, name)
            raise Parked
        if not self._outcomes[name]:
            raise RuntimeError(f"{name if isinstance(name, str) else name[0]}: connection closed by peer")

    def met(self, name: Any, is_complete: bool) -> None:
        """Note the outcome of a collective; the first outcome counts."""
        if is_complete and name in self._hanging:
            return
        if name not in self._outcomes and name in self.waits_for:
            self._outcomes[name] = is_complete
            self.meetings.left(self, name)
            self.changed()

    def hangs_in(self, name: Any) -> None:
        """Note that a collective will never complete, and that this rank does not learn why."""
        self._hanging.add(name)

    def has_done(self, name: Any) -> bool:
        return bool(self._outcomes.get(name))

    def _send_layout(self, trainee: Any, origin: int) -> None:
        online = "" if self.world.online_s else "off"
        fields = (trainee.shares, trainee.save_folder, origin, "same", trainee.has_local_copy, online)
        self.say(Layout(self.rank, *fields))

    def _send_broken_barrier(self, error: str) -> None:
        if error not in self._broken_told:  # a parked call of the door is repeated, see `clock`
            self._broken_told.add(error)
            self.say(Raised(self.rank, error, 1))

    # the processor

    def say(self, message: FromWorker) -> None:
        self.to_agent.send(message)

    def sigterm(self) -> None:
        self.say(TerminationRequested(self.rank, "SIGTERM"))

    def _obey(self, order: ToWorker) -> None:
        match order:
            case Freeze():
                if order.incident != self._current[0]:
                    self._current = (order.incident, 0)
                    self.session.script_may_end.clear()
                    self.session.door.let_through(None)
                self.thread(self._freeze(order))
            case Dump():
                self._current = (order.incident, order.attempt)
                self.session.door.let_through(order.step)
                self.thread(self._dump(order))
            case Regroup():
                self.world.invariants.takes_part(self, order.incident, order.attempt)
                self._current = (order.incident, order.attempt)
                self._order = order
                self.session.door.let_through(order.step)
                self.thread(self._regroup(order))
                self.changed()
            case Proceed():
                self.world.invariants.takes_part(self, order.incident, -1)
                self.epoch = order.incident
                self.session.door.open()
                self.changed()
            case PresenceProbe():
                self.say(Present(self.rank, order.incident))
            case EndScript():
                self.session.script_may_end.set()
                if self._has_left:
                    self._has_left = False
                    self.thread(self._end())
            case Exit():
                self.world.end(self, self._exit_code)

    def _freeze(self, order: Freeze) -> Body[None]:
        if order.stacks:
            yield self.world.random.uniform(0.0, 0.2)
        # The main thread: a dump that was given up waits on another thread.
        is_waiting = not all(map(meetings.is_apart, self.waits_for.keys() - self._outcomes.keys()))
        standing = Standing(is_waiting, "somewhere") if order.stacks else None
        board = yield from self.through(lambda: self.session.freezer.freeze(self.world.timeout_s / 2))
        if board is not None:
            self.world.at_point(self, "frozen")
            self.say(Frozen(self.rank, order.incident, board, standing))

    def _dump(self, order: Dump) -> Body[None]:
        session, group = self.session, order.groups[0]
        try:
            if session.board.finished < order.step:
                self.world.at_point(self, "let through")
            yield from self.through(lambda: session.freezer.bring_to(order.step, self._wake, order.timeout_s))
            trainee = self.trainee
            tensors = trainee.before if session.from_local_copy(order.step) else trainee.tensors
            record = session.record_of(order.step)
            for group in order.groups:
                files = yield from self.world.dumping.take_part(self, order, group, tensors, record)
                if group.writer == self.rank:
                    self.say(Written(self.rank, order.incident, order.attempt, group.group, files))
                    self.world.at_point(self, "written")
        except Exception as error:
            if not self.cancelled(order):
                reason = f"{type(error).__name__}: {error}"
                place = (order.incident, order.attempt, group.group)
                self.say(WriteFailed(self.rank, *place, reason, session.board.record()))

    # online recovery

    def _regroup(self, order: Regroup) -> Body[None]:
        """Follow an order to regroup, on a thread of the processor."""
        try:
            if not self.newcomer:
                if self.session.trainee is None:
                    raise RuntimeError("it is not in its training loop")
                yield from self.through(
                    lambda: self.session.freezer.bring_to(order.step, self._wake, order.timeout_s)
                )
                self.session.door.turn_away()
                self._shut_epoch = self.epoch
                self._wake()
                deadline = self.clock.now + UNWIND_S
                while not self._is_out_of_loop and not self.cancelled(order):
                    if self.clock.now >= deadline:
                        raise TimeoutError("its main thread has not left the training loop")
                    yield 0.05
            if self.cancelled(order):
                return
            self._ready = order
            self.changed()
            for replacement in order.replaced if not self.newcomer else ():
                self._give(order, replacement)
        except Exception as error:
            self._cannot(order, error)

    def _give(self, order: Regroup, replacement: Replacement) -> None:
        """Send a newcomer its shards, and the record of the step."""
        session, trainee, meetings = self.session, self.trainee, self.meetings
        tensors = trainee.before if session.from_local_copy(order.step) else trainee.tensors
        if replacement.twin == self.rank:
            name = _line(order, replacement.rank, "record")
            meetings.handed_over[name] = session.record_of(order.step)
            meetings.arrive(self, name, needs_others=False)
        for source in replacement.sources:
            if source.source == self.rank:
                name = _line(order, replacement.rank, source.group, source.index)
                meetings.handed_over[name] = tensors[source.group, source.index]
                meetings.arrive(self, name, needs_others=False)

    def _rejoin(self) -> Body[None]:
        """Take part in a recovery on the main thread, until all ranks go on."""
        self._is_out_of_loop, finished_order = True, None
        self.world.at_point(self, "unwound")
        while True:
            while self._ready is finished_order and not (
                finished_order is not None and self.epoch == finished_order.incident
            ):
                yield None
            if self._ready is finished_order:
                break
            finished_order = self._ready
            assert finished_order is not None
            try:
                yield from self._join(finished_order)
            except Exception as error:
                self._cannot(finished_order, error, may_be_echo=True)
        self._is_out_of_loop, self._ready, self.newcomer = False, None, False
        self.session.pace.abandon_step()

    def _join(self, order: Regroup) -> Body[None]:
        trainee, job, session = self.trainee, self.world.job, self.session
        if self.newcomer:
            replacement = next(candidate for candidate in order.replaced if candidate.rank == self.rank)
            record = yield from self._ask(order, replacement.twin, _line(order, self.rank, "record"))
            for source in replacement.sources:
                line = _line(order, self.rank, source.group, source.index)
                shard = yield from self._ask(order, source.source, line)
                trainee.tensors[source.group, source.index] = shard
        else:
            record = session.record_of(order.step)
            if session.from_local_copy(order.step):
                if self.cancelled(order):
                    return
                session.freezer.go_back(order.step)
                trainee.tensors.update(trainee.before)
        name = ("dump", "groups", order.incident, order.attempt)
        # Ranks arrive at different times.
        yield self.world.random.uniform(0.0, 0.05)
        yield from self.through(lambda: self._unless_new(order, name, set(job.ranks)))
        yield self.world.random.uniform(0.0, 0.05)
        if self.main_hangs or self.cancelled(order):
            return
        trainee.step, trainee.updates = order.step, record[1]
        session.begin_again(trainee, self._inner, record, order.step, order.origin)
        self.say(Joined(self.rank, order.incident, order.attempt, order.step, "same"))
        self.world.at_point(self, "joined")

    def _ask(self, order: Regroup, giver: int, name: Any) -> Body[Any]:
        yield from self.through(lambda: self._unless_new(order, name, {giver}))
        return self.meetings.handed_over[name]

    def _unless_new(self, order: Regroup, name: Any, peers: set[int]) -> None:
        if self.cancelled(order):
            raise ReplacedError("a newer order has replaced this one")
        self.meet(name, frozenset({*peers, self.rank}))

    def _cannot(self, order: Regroup, error: Exception, *, may_be_echo: bool = False) -> None:
        if not self.cancelled(order):
            reason = f"{type(error).__name__}: {error}"
            place = (self.rank, order.incident, order.attempt)
            self.say(RegroupFailed(*place, reason, may_be_echo=may_be_echo))

    def cancelled(self, order: Dump | Regroup) -> bool:
        return self._current != (order.incident, order.attempt)

    def _wake(self) -> int:
        self.meetings.shut(self)
        return 0
