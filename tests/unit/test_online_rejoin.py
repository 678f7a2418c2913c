"""Online recovery in one worker: threads of an abandoned attempt, and orders in quick succession."""

from __future__ import annotations

import secrets
import sys
import threading
from collections.abc import Callable, Iterator
from datetime import timedelta
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist

from adaptor import patches, patching
from adaptor.devices.device import HOST
from adaptor.errors import CheckpointError
from adaptor.online import rejoin, state, transfer
from adaptor.online.groups import Groups
from adaptor.online.rejoin import Rejoin
from adaptor.protocol.board import Board, BoardMemory
from adaptor.protocol.messages import Proceed, Regroup, Replacement, ShardSource, Standing
from adaptor.worker import stacks
from adaptor.worker.door import Unwind
from adaptor.worker.processor import CannotRejoinError
from adaptor.worker.session import Session
from tests.unit.threads import LONG_S, Thread
from tests.unit.trainee import CountingTrainee, Loop

# Seconds to wait for a main thread that does not come.
IN_VAIN_S = 0.3


def order(attempt: int, *, incident: int = 1, step: int = 5, timeout_s: float = LONG_S) -> Regroup:
    return Regroup(
        incident=incident,
        attempt=attempt,
        step=step,
        origin=0,
        replaced=(Replacement(1, 0, (ShardSource("g", 0, 0),)),),
        store_host=f"ttp-test-{secrets.token_hex(8)}",
        store_port=0,
        timeout_s=timeout_s,
        store_secret=b"",
    )


class Worker:
    """Rank 0, whose main thread has finished step 4, with its real session and board."""

    def __init__(self, memory: BoardMemory, *, comes_new: bool = False) -> None:
        board = Board(0, memory.path, memory.slots)
        self.session = Session(board, lambda *heard: None, lambda error: None)
        loop = Loop(self.session, CountingTrainee())
        loop.begin(4)
        processor = SimpleNamespace(go_round_by=lambda rejoin: None, say=lambda message: None)
        self.runtime = SimpleNamespace(rank=0, session=self.session, processor=processor)
        runtime: Any = self.runtime
        self.rejoin = Rejoin(runtime, Groups(None), comes_new)  # type: ignore[arg-type]
        self.board = board

    def may_update(self, step: int) -> bool:
        """Return whether the main thread passes a closed door when let through."""
        door = self.session.door
        door.shut()
        door.let_through(step)
        try:
            door.enter(step)
        except Unwind:
            return False
        door.leave()
        return True


@pytest.fixture
def memory() -> Iterator[BoardMemory]:
    board_memory = BoardMemory([0])
    yield board_memory
    board_memory.close()


def test_a_thread_that_is_late_turns_nobody_away_when_all_go_on(memory: BoardMemory) -> None:
    """Otherwise the next incident would take the main thread out of an update to be saved."""
    worker = Worker(memory)

    def wake(inodes: frozenset[int]) -> int:  # the thread did not run during attempt 2
        worker.rejoin.proceed(Proceed(1, 5))
        worker.board.finish(5)
        return 0

    with Thread(worker.rejoin.regroup, order(1), wake) as late:
        late.result()
    assert worker.may_update(6)


def test_a_thread_that_is_late_shuts_no_connection_of_the_next_attempt(memory: BoardMemory) -> None:
    worker = Worker(memory)
    worker.board.ready(5)  # an update that does not come
    shut: list[int] = []

    def wake(inodes: frozenset[int]) -> int:
        shut.append(1)
        if len(shut) == 1:
            with (
                pytest.raises(CannotRejoinError),
                Thread(worker.rejoin.regroup, order(2, step=4, timeout_s=IN_VAIN_S), never) as new,
            ):
                new.result()
        return 0

    def never(inodes: frozenset[int]) -> int:
        return 0

    with Thread(worker.rejoin.regroup, order(1), wake) as late:
        late.result()
    assert shut == [1]


def test_the_framework_waits_by_torchs_own_function_where_no_wait_has_to_be_ended(
    memory: BoardMemory, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without online recovery, or with groups other than gloo's, the wait is not wrapped."""
    patches.load("online")
    native, rejoin = dist.Work.wait, Worker(memory).rejoin
    try:
        for why_not, are_gloo, can_end in (
            ("", True, True),
            ("why", True, False),
            ("", True, True),
            ("", False, False),
        ):
            monkeypatch.setattr(Groups, "are_gloo", are_gloo)
            rejoin.set_online_support(why_not)
            assert (dist.Work.wait is not native) == can_end
    finally:
        patching.disarm("waits")
    assert dist.Work.wait is native


def test_a_wait_for_finished_work_calls_torch_alone(memory: BoardMemory) -> None:
    """A micro-batch makes eight such waits."""
    patches.load("online")
    group = dist.ProcessGroupGloo(dist.HashStore(), 0, 1, timedelta(minutes=1))
    work = group.allreduce([torch.ones(1)])
    work.wait()
    called: list[str] = []
    Worker(memory).rejoin.set_online_support("")
    try:
        sys.setprofile(
            lambda frame, event, _: called.append(frame.f_code.co_name) if event == "call" else None
        )
        work.wait()
        sys.setprofile(None)
    finally:
        patching.disarm("waits")
    assert called == ["wait"]


def test_a_late_order_is_ignored(memory: BoardMemory) -> None:
    """Each order has a thread; the thread of the newer order may be faster."""
    worker = Worker(memory)
    worker.board.ready(5)  # an update that does not come
    woken: list[int] = []
    with pytest.raises(CannotRejoinError):
        worker.rejoin.regroup(order(2, timeout_s=IN_VAIN_S), lambda inodes: 0)
    worker.rejoin.regroup(order(1), lambda inodes: woken.append(1) or 0)
    assert woken == []


def test_a_thread_that_begins_when_all_go_on_does_nothing(memory: BoardMemory) -> None:
    """The thread would take the order for an order of the next incident and turn the main thread away."""
    worker = Worker(memory)
    worker.board.finish(5)
    worker.rejoin.proceed(Proceed(1, 5))
    woken: list[int] = []
    worker.rejoin.regroup(order(1), lambda inodes: woken.append(1) or 0)
    assert woken == []
    assert worker.may_update(6)


def test_a_joined_rank_is_a_survivor_of_the_next_fault(memory: BoardMemory) -> None:
    """The next order may come before the main thread sees that all continue."""
    worker = Worker(memory, comes_new=True)
    worker.rejoin.regroup(order(1), lambda inodes: 0)  # the main thread requests the rest itself
    worker.board.finish(5)
    worker.rejoin.proceed(Proceed(1, 5))
    assert not worker.rejoin.newcomer
    with pytest.raises(CannotRejoinError, match="its main thread has not left the training loop"):
        worker.rejoin.regroup(order(1, incident=2, timeout_s=IN_VAIN_S), lambda inodes: 0)


class SurvivorState:
    """The state that a survivor provides (`state.Given`)."""

    device = HOST

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self._optimizer = optimizer

    def record(self) -> Any:
        return {}

    def shard(self, index: int) -> torch.optim.Optimizer:
        return self._optimizer

    def frozen(self) -> list[torch.Tensor]:
        return []


def adam() -> torch.optim.Optimizer:
    optimizer = torch.optim.Adam([torch.nn.Parameter(torch.ones(4))])
    optimizer.param_groups[0]["params"][0].grad = torch.ones(4)
    optimizer.step()
    return optimizer


@pytest.mark.parametrize("is_finite", [True, False])
def test_a_newcomer_takes_no_shard_that_is_not_finite(is_finite: bool) -> None:
    """The source checks its own shard only when the newcomer joins."""
    sender_optimizer, target = adam(), adam()
    if not is_finite:
        next(iter(sender_optimizer.state.values()))["exp_avg"][1] = torch.nan
    store = dist.HashStore()

    def line(place: int) -> transfer.TransferChannel:
        return transfer.TransferChannel(
            dist.ProcessGroupGloo(store, place, 2, timedelta(seconds=60)), 1 - place
        )

    chain = SimpleNamespace(optimizer=target, data_parallel_group=None)
    loop: Any = SimpleNamespace(protected=SimpleNamespace(optimizer=chain, group="g", model=[]))
    with Thread(
        lambda: transfer.answer(line(transfer.SOURCE), SurvivorState(sender_optimizer), lambda: False)
    ) as gives:
        to_source = line(transfer.NEWCOMER)
        if is_finite:
            state.fetch_shards(order(1), 1, lambda source: to_source, loop)
        else:
            with pytest.raises(CannotRejoinError, match="its optimizer state is not finite"):
                state.fetch_shards(order(1), 1, lambda source: to_source, loop)
        gives.result()


def test_small_tensors_arrive_in_one_message() -> None:
    """Each message costs a round trip, and an optimizer has hundreds of small tensors."""
    store, sent = dist.HashStore(), []

    def line(place: int) -> transfer.TransferChannel:
        group = dist.ProcessGroupGloo(store, place, 2, timedelta(seconds=60))

        def send(tensors: list[torch.Tensor], *place: int) -> dist.Work:
            sent.append(tensors[0].nbytes)
            return group.send(tensors, *place)

        return transfer.TransferChannel(SimpleNamespace(send=send, recv=group.recv), 1 - place)

    def tensors(fill: float) -> list[torch.Tensor]:
        odd = torch.full((3,), fill, dtype=torch.bfloat16)
        transposed = torch.empty(5, 2).t().copy_(torch.arange(10.0).reshape(2, 5) * fill)
        return [
            odd,
            torch.tensor(fill),
            transposed,
            torch.empty(0),
            torch.full((1 << 20,), fill),
            odd.clone(),
        ]

    outgoing, taken = tensors(2.0), tensors(1.0)
    with Thread(lambda: line(transfer.SOURCE).send_tensors(outgoing, lambda tensor: tensor)) as gives:
        assert line(transfer.NEWCOMER).receive_tensors(taken) == sum(tensor.nbytes for tensor in outgoing)
        gives.result()
    assert all(map(torch.equal, outgoing, taken))
    small, checksum = [50, 4 << 20, 6], [8, 8]
    assert sent == [*small, *checksum]


def test_an_order_from_before_a_freeze_is_ignored(memory: BoardMemory) -> None:
    """A new controller has taken over: the steps reported to it must stay true."""
    worker = Worker(memory)
    worker.rejoin.freeze(12)
    woken: list[int] = []
    worker.rejoin.regroup(order(1), lambda inodes: woken.append(1) or 0)
    assert woken == []
    assert worker.may_update(5)


def test_a_freeze_ends_the_attempt_that_waits(memory: BoardMemory) -> None:
    worker = Worker(memory)

    def wake(inodes: frozenset[int]) -> int:
        worker.rejoin.freeze(12)
        worker.board.finish(5)
        return 0

    with Thread(worker.rejoin.regroup, order(1), wake) as attempt:
        attempt.result()
    assert worker.may_update(6), "the attempt has turned the main thread away after it was given up"


def test_an_abandoned_step_is_not_provided(memory: BoardMemory) -> None:
    """The live state is then overwritten with the local copy, and the copy stays unchanged."""
    worker = Worker(memory)
    worker.board.ready(5)
    worker.board.updating(copied=True)
    worker.board.finish(5)
    worker.session.freezer.go_back(4)
    assert memory.read(0).finished == 4
    assert worker.session.from_local_copy(4)
    worker.session.freezer.bring_to(4, lambda: 0, 1.0)
    with pytest.raises(RuntimeError, match="step 5"):
        worker.session.freezer.bring_to(5, lambda: 0, 1.0)


@pytest.mark.parametrize("is_frozen", [True, False])
def test_a_regular_save_that_an_incident_has_taken_away_ends_no_training(
    memory: BoardMemory, is_frozen: bool
) -> None:
    """The incident's dump replaces its folder; without an incident the disk has failed."""
    worker = Worker(memory)

    class ToldError(Exception):
        pass

    def tell_of(error: Exception) -> None:
        assert isinstance(error, CheckpointError)
        raise ToldError

    def train() -> None:
        if is_frozen:
            worker.session.door.shut()
        raise CheckpointError("iter_0000005_saving: missing")

    worker.runtime.tell_of = tell_of
    loop: Any = SimpleNamespace(finish_step=lambda: None)
    with pytest.raises(ToldError if is_frozen else CheckpointError):
        worker.rejoin.run(loop, train)


@pytest.mark.parametrize(
    ("look", "error"),
    [(stacks.awaited, "has not left the training loop in time"), (stacks.standing, "main thread hangs in ")],
    ids=["in-the-framework", "in-a-recovery"],
)
def test_a_main_thread_that_waits_for_no_other_rank_hangs_in_a_recovery_alone(
    look: Callable[[], Standing | None], error: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Inside the framework the main thread may save or compile for any time."""
    monkeypatch.setattr(rejoin, "UNWIND_S", 0.01)
    raised: list[str] = []

    def wait() -> None:
        with pytest.raises(CannotRejoinError) as caught:
            rejoin.until_it_comes(1.5, lambda: 0, threading.Event().wait, lambda: False, look=look)
        raised.append(str(caught.value))

    thread = threading.Thread(target=wait)
    thread.start()
    thread.join()
    assert error in raised[0]
