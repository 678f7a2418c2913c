"""Host copies: complete steps, common steps after a death, and the restored state."""

from __future__ import annotations

import asyncio
import os
import random
import resource
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing
from dataclasses import dataclass, field
from pathlib import Path
from threading import Barrier, Event
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist

from adaptor import config, context, descriptors
from adaptor.checkpoint.step_record import StepRecord
from adaptor.devices.device import HOST
from adaptor.errors import CheckpointError
from adaptor.host_copy import content, copier, rebuild, reservation
from adaptor.host_copy.copier import Copier
from adaptor.launchers.agent.host_copies import CopyFiles, CopyKeeper
from adaptor.protocol.copy_file import CopyFile, CopyHeader
from adaptor.protocol.environment import COPY_FILES, HeldCopies
from adaptor.protocol.messages import Share
from adaptor.replica import group, tolerance
from tests import waiting
from tests.unit.threads import LONG_S, Thread

EVERY = 2


@pytest.fixture
def new_file() -> Iterator[Callable[[], CopyFile]]:
    """Yield a function that makes copy files as an agent does; all are closed at the end of the test."""
    with ExitStack() as opened:

        def make() -> CopyFile:
            descriptor = descriptors.in_memory("ttp-test")
            opened.callback(os.close, descriptor)
            return opened.enter_context(closing(CopyFile(f"/proc/{os.getpid()}/fd/{descriptor}")))

        yield make


def trainee(size: int = 4, frozen: int = 0) -> Any:
    """Return a rank that trains one layer with Adam, after one optimizer step."""
    layer = torch.nn.Linear(size, size)
    optimizer = torch.optim.AdamW(layer.parameters(), lr=0.1)
    layer(torch.ones(size)).sum().backward()
    optimizer.step()
    chunks = [layer, *(torch.nn.Linear(2, 2).requires_grad_(False) for _ in range(frozen))]
    state = SimpleNamespace(
        optimizer=SimpleNamespace(optimizer=optimizer),
        model=chunks,
        args=SimpleNamespace(seq_length=size, betas=(0.9, 0.95), path=Path("/"), hook=print),
        extra={"counted": 20},
    )
    return SimpleNamespace(state=state, device=HOST)


def record(step: int) -> StepRecord:
    states = [{"torch_rng_state": torch.get_rng_state()}]
    return StepRecord(step, {"consumed_train_samples": 8 * step}, {"num_steps": step}, (), (None,), states)


def tensors(rank: Any) -> list[torch.Tensor]:
    optimizer = rank.state.optimizer.optimizer
    state = [value for entries in optimizer.state.values() for value in entries.values()]
    return [tensor.detach().clone() for chunk in rank.state.model for tensor in chunk.parameters()] + state


def test_a_copy_without_its_header_says_nothing(new_file: Callable[[], CopyFile]) -> None:
    file = new_file()
    assert file.header is None
    file.reserve(100)
    assert file.header is None
    file.content[:5] = b"whole"
    header = CopyHeader("0123456789abcdef", 4, 3, 20, 5, file.digest(5))
    file.commit(header)
    assert file.header == header
    file.begin()
    assert file.header is None
    file.commit(header)
    file.clear()
    assert file.header is None


def test_a_state_comes_back_bit_for_bit(new_file: Callable[[], CopyFile]) -> None:
    file, source, target = new_file(), trainee(frozen=1), trainee(frozen=1)

    def memory(size: int) -> memoryview:
        file.reserve(size)
        return file.content

    size = content.write(source, record(20), content.take_extra(source), memory, lambda: False)
    source_tensors = tensors(source)
    assert not all(map(torch.equal, tensors(target), source_tensors))
    restored = content.read(file.content[:size], target.state.optimizer, target.state.model)
    assert all(map(torch.equal, tensors(target), source_tensors))
    assert restored.extra == {"counted": 20}
    assert restored.record.step == 20
    assert torch.equal(restored.record.rng[0]["torch_rng_state"], torch.get_rng_state())
    assert restored.arguments == {"seq_length": 4, "betas": (0.9, 0.95)}
    other_state = trainee(size=5, frozen=1).state
    with pytest.raises(CheckpointError, match="the param groups of the new process have 2 params"):
        content.read(file.content[:size], other_state.optimizer, other_state.model)
    other_state = trainee().state
    with pytest.raises(CheckpointError, match="other types or sizes"):
        content.read(file.content[:size], other_state.optimizer, other_state.model)


@pytest.mark.usefixtures("alone_in_its_job")
def test_copies_that_cannot_be_written_leave_the_optimizer_as_it_was(
    new_file: Callable[[], CopyFile],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    """Without anything else to load the job begins with the initial state."""
    file, source, target = new_file(), trainee(), trainee()

    def memory(size: int) -> memoryview:
        file.reserve(size)
        return file.content

    size = content.write(source, record(20), content.take_extra(source), memory, lambda: False)
    file.commit(CopyHeader("a", 1, 0, 20, size, file.digest(size)))
    monkeypatch.setattr(rebuild, "_held", lambda: {(("a", 20), 0): (file, file.header)})
    target_tensors = tensors(target)

    def full(*args: Any, **kwargs: Any) -> Path:
        assert not all(map(torch.equal, tensors(target), target_tensors))
        raise CheckpointError("no space is left")

    monkeypatch.setattr(rebuild.publish, "prepare", full)
    state = _State(target.state.optimizer, target.state.model)
    protected: Any = SimpleNamespace(
        **vars(state), save=tmp_path, placed=lambda everyone: (state, SimpleNamespace(shares=()))
    )
    assert rebuild.write_newest(protected) is None
    assert "step 20 cannot be written from the copies in host memory: no space" in capfd.readouterr().out
    assert all(map(torch.equal, tensors(target), target_tensors))


@dataclass(frozen=True)
class _State:
    optimizer: Any
    model: list[Any]
    args: None = None
    extra: Any = field(default_factory=dict)


class _Ranks:
    """The copiers of a job, each on a thread for collective calls."""

    def __init__(
        self,
        count: int,
        new_file: Callable[[], CopyFile],
        *,
        has_keeper: bool = False,
        every: int | None = EVERY,
    ) -> None:
        self._barrier = Barrier(count)
        self._said: list[Sequence[int]] = [()] * count
        self._pool = ThreadPoolExecutor(count)
        self.files = [[new_file(), new_file()] for _ in range(count)]
        self.trainees = [trainee() for _ in range(count)]
        self.copiers = [
            Copier(every, rank, count, "a", files, has_keeper, lambda step: None, self._smallest_of(rank))
            for rank, files in enumerate(self.files)
        ]

    def _smallest_of(self, rank: int) -> Callable[[Sequence[int]], list[int]]:
        def smallest(numbers: Sequence[int]) -> list[int]:
            self._said[rank] = numbers
            self._barrier.wait()
            smallest_numbers = [min(column) for column in zip(*self._said, strict=True)]
            self._barrier.wait()
            return smallest_numbers

        return smallest

    def step(self, step: int) -> None:
        """On all ranks begin the step after `step` and reach the next update."""

        def step_of_rank(rank: int) -> None:
            self.copiers[rank].copy(self.trainees[rank], record(step), None, is_intact=True)
            self.copiers[rank].wait()

        list(self._pool.map(step_of_rank, range(len(self.copiers))))

    def interrupt(self, rank: int) -> None:
        """Leave the newest copy of `rank` half written."""
        headers = [(file.header.step, file) for file in self.files[rank] if file.header is not None]
        if headers:
            max(headers, key=lambda entry: entry[0])[1].begin()

    def whole(self) -> set[int]:
        """Return the steps that every rank has a copy of."""
        steps_of_ranks = [
            {file.header.step for file in files if file.header is not None} for files in self.files
        ]
        return set.intersection(*steps_of_ranks)


def test_a_step_is_copied_when_it_is_due(new_file: Callable[[], CopyFile]) -> None:
    ranks = _Ranks(2, new_file)
    for step in range(1, 8):
        ranks.step(step)
        newest = step // EVERY * EVERY
        assert ranks.whole() == {kept for kept in (newest - EVERY, newest) if kept > 0}


@pytest.mark.parametrize("seed", range(20))
def test_a_complete_step_stays_whoever_is_interrupted(seed: int, new_file: Callable[[], CopyFile]) -> None:
    """Copies are interrupted on some ranks while the job continues."""
    chance = random.Random(seed)
    ranks = _Ranks(3, new_file)
    ranks.step(EVERY)
    newest = EVERY
    for step in range(2 * EVERY, 12 * EVERY, EVERY):
        ranks.step(step)
        victims = [rank for rank in range(3) if chance.random() < 0.3]
        for rank in victims:
            ranks.interrupt(rank)
        assert max(ranks.whole(), default=-1) >= (newest if victims else step), (seed, step, victims)
        newest = max(ranks.whole())


def test_no_copy_is_made_while_one_is_in_transit_to_another_node(new_file: Callable[[], CopyFile]) -> None:
    ranks = _Ranks(2, new_file, has_keeper=True)
    for step in (2, 4):
        ranks.step(step)
        assert ranks.whole() == {2}
    for files in ranks.files:
        for file in files:
            if file.header is not None:
                file.note_kept(2)
    for step in (6, 8):
        ranks.step(step)
        assert ranks.whole() == {2, 6}


def test_copies_of_steps_after_a_rollback_are_given_up(new_file: Callable[[], CopyFile]) -> None:
    ranks = _Ranks(2, new_file)
    ranks.step(2)
    ranks.step(4)
    for of_rank in ranks.copiers:
        of_rank.forget_after(3)
    assert ranks.whole() == {2}


def test_a_rank_that_cannot_copy_is_reported_and_common_copies_stay(
    new_file: Callable[[], CopyFile], capfd: pytest.CaptureFixture[str]
) -> None:
    ranks = _Ranks(2, new_file)
    ranks.step(2)
    group = ranks.trainees[1].state.optimizer.optimizer.param_groups[0]
    group["hook"] = object()
    for step in (4, 6, 8):
        ranks.step(step)
        assert ranks.whole() == {2}
    del group["hook"]
    lines = [line for line in capfd.readouterr().err.splitlines() if "TTP_HOST_COPY" in line]
    assert len(lines) == 1
    assert lines[0].startswith("[ttp] rank 1 makes no more copies in host memory (TTP_HOST_COPY): ")


def test_a_rank_without_a_copy_thread_is_reported_and_trains_on(
    new_file: Callable[[], CopyFile], capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    start = threading.Thread.start

    def refuse(self: threading.Thread) -> None:
        if self.name == "ttp-host-copy":
            raise RuntimeError("can't start new thread")
        start(self)

    monkeypatch.setattr(threading.Thread, "start", refuse)
    ranks = _Ranks(2, new_file)
    for step in (2, 4):
        ranks.step(step)
        assert ranks.whole() == set()
    for of_rank in ranks.copiers:
        of_rank.stop()  # as in an incident
    lines = [line for line in capfd.readouterr().err.splitlines() if "TTP_HOST_COPY" in line]
    assert len(lines) == 2
    assert all(line.endswith("RuntimeError: can't start new thread") for line in lines)


def test_copies_that_do_not_fit_are_named_with_their_bytes() -> None:
    """Each of two nodes also keeps the other's copies; one rank of node 1 has larger copies."""
    needs = [reservation.Need(0, 30, 100), reservation.Need(0, 30, 90), reservation.Need(1, 25, 100)]
    assert reservation.bytes_on(needs) == {0: 85, 1: 85}
    assert reservation.shortage(needs) == ""
    assert reservation.bytes_on(needs[:2]) == {0: 60}
    assert reservation.shortage(needs[:2], 0.5) == (
        "the copies of node 0 take 60 bytes of its memory, and 90 bytes are free (limits of its control group"
        " included), of which copies take 50% at most"
    )
    assert "the copies of node 0 take 85 bytes" in reservation.shortage([*needs, reservation.Need(0, 0, 80)])


@pytest.fixture
def alone_in_its_job() -> Iterator[None]:
    """A job of this process alone, so no other rank has a copy."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        group.of_everyone()
        yield
    finally:
        dist.destroy_process_group()


@pytest.mark.parametrize("shared", [False, True], ids=["alone", "shared"])
@pytest.mark.parametrize("free", [1 << 30, 1 << 20], ids=["room", "no room"])
@pytest.mark.usefixtures("alone_in_its_job")
def test_auto_copies_state_without_another_holder(
    free: int,
    shared: bool,
    new_file: Callable[[], CopyFile],
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    """If half of the free memory is enough; otherwise a line gives the needed and the free memory."""
    monkeypatch.setattr(reservation, "available", lambda: free)
    if shared:
        monkeypatch.setattr(tolerance, "spare", lambda shares, place_of: 1)
    monkeypatch.setattr(content, "most_bytes", lambda trainee: 1 << 20)
    rank_copier = Copier(None, 0, 1, "a", [new_file(), new_file()], False, lambda step: None, list)
    trainee_facts, session = ReservableFacts(), SimpleNamespace(copier=rank_copier)
    kept = reservation.reserve(session, trainee_facts)  # type: ignore[arg-type]
    stdout = capfd.readouterr().out
    if shared:
        assert (session.copier, kept, stdout) == (None, trainee_facts, "")
    elif free == 1 << 30:
        assert (session.copier, kept) == (rank_copier, trainee_facts)
        assert stdout.startswith(
            "[ttp] copies in host memory at least every 50 steps: 2.0 MiB on node 0; they"
        )
    else:
        assert session.copier is None
        assert kept.survives == (
            "none; exceptions alone: a rank that dies takes the steps since the last save along"
        )
        assert "no copies in host memory (TTP_HOST_COPY=auto): the copies of node 0 take 2" in stdout
        assert f", and {free} bytes are free" in stdout


@pytest.mark.usefixtures("alone_in_its_job")
def test_memory_kept_since_the_previous_start_counts_for_the_next_copies(
    new_file: Callable[[], CopyFile], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Otherwise a job of several nodes would lose its copies at the first restart, or be refused."""
    kept = descriptors.in_memory("ttp-test")
    try:
        path = f"/proc/{os.getpid()}/fd/{kept}"
        with closing(CopyFile(path)) as file:
            file.reserve(3 << 20)
        monkeypatch.setattr(context.part(HeldCopies), "paths", {7: (path,)})
        monkeypatch.setattr(reservation, "available", lambda: 2 << 20)
        monkeypatch.setattr(content, "most_bytes", lambda trainee: 1 << 20)
        rank_copier = Copier(None, 0, 1, "a", [new_file(), new_file()], False, lambda step: None, list)
        session = SimpleNamespace(copier=rank_copier)
        reservation.reserve(session, ReservableFacts())  # type: ignore[arg-type]
        assert session.copier is rank_copier
    finally:
        os.close(kept)


@dataclass(frozen=True)
class ReservableFacts:
    """The facts of a trainee that `reserve` reads, apart from the size."""

    survives: str = "none; whatever"
    shares: tuple[Share, ...] = (Share("group", 0, 1),)


@pytest.mark.parametrize(
    ("copy_s", "step_s", "interval"),
    [(0.001, 1.0, 1), (0.1, 1.0, 5), (0.1, 0.5, 10), (60.0, 1.0, tolerance.MOST_STEPS)],
)
def test_auto_copies_as_often_as_the_share_of_time_allows(
    copy_s: float,
    step_s: float,
    interval: int,
    new_file: Callable[[], CopyFile],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Copies take at most 2 % of the time between two copies. The slowest rank counts; after a step back the
    measurement restarts, as on the replaced ranks.
    """
    ranks = _Ranks(2, new_file, every=None)
    clock = [0.0]
    monkeypatch.setattr(copier, "time", SimpleNamespace(monotonic=lambda: clock[0]))

    def copied(step: int) -> bool:
        ranks.step(step)
        clock[0] += step_s
        ranks.copiers[1]._copy_s = copy_s
        return step in ranks.whole()

    steps = range(1, 3 + 2 * interval)
    assert [step for step in steps if copied(step)] == sorted({1, 2, 2 + interval, 2 + 2 * interval})
    for of_rank in ranks.copiers:
        of_rank.forget_after(3)
    assert copied(4)  # without a due copy


def test_an_agent_keeps_the_files_of_the_start_before(monkeypatch: pytest.MonkeyPatch) -> None:
    files = CopyFiles()

    def begin(ranks: Sequence[int]) -> set[int]:
        monkeypatch.setenv(COPY_FILES, files.begin(ranks))
        held_copies = HeldCopies(None)  # type: ignore[arg-type]
        for paths in held_copies.paths.values():
            with ExitStack() as opened:
                headers = [opened.enter_context(closing(CopyFile(path))).header for path in paths]
            assert headers == [None, None]
        return set(held_copies.paths)

    assert begin([0, 1]) == {0, 1}
    assert begin([2, 3]) == {0, 1, 2, 3}
    assert begin([2, 3]) == {2, 3}
    files.close()
    assert begin([]) == set()


def test_an_agent_without_descriptors_gives_up_the_copies_that_are_in_doubt() -> None:
    with ExitStack() as opened:
        files = opened.enter_context(closing(CopyFiles()))
        files.begin([0])
        older, newer = (opened.enter_context(closing(file)) for file in files.own()[0])
        for step, file in ((4, older), (5, newer)):
            file.commit(CopyHeader("a", 1, 0, step, 0, 0))
        soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        resource.setrlimit(resource.RLIMIT_NOFILE, (0, hard))
        try:
            files.forget_after(4)
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
        assert older.header is not None
        assert newer.header is None


@pytest.fixture
def keepers() -> Iterator[list[tuple[CopyFiles, CopyKeeper]]]:
    """Nodes with a rank each: the first sends its copies to the second, whose place the third may take."""
    settings = config.load({})
    nodes = []
    for node in (0, 1, 1):
        files = CopyFiles()
        files.begin([node])
        nodes.append((files, CopyKeeper(node, files, settings, None)))
    secret = b"of this start of the workers, 32 bytes"
    endpoints = [keeper.listen(secret, "127.0.0.1") for _, keeper in nodes]
    receivers = [endpoints[2], endpoints[1]]
    nodes[0][1].give(lambda: receivers.pop() if len(receivers) > 1 else receivers[0])
    yield nodes
    for files, keeper in nodes:
        keeper.close()
        files.close()


@pytest.fixture
def first_files(keepers: list[tuple[CopyFiles, CopyKeeper]]) -> Iterator[list[CopyFile]]:
    """Yield the files of the first node's rank as its worker has opened them."""
    files = keepers[0][0].own()[0]
    yield files
    for file in files:
        file.close()


def _of_other(files: CopyFiles, slot: int, size: int = 0) -> tuple[CopyHeader | None, bytes]:
    """Return the header and the content of rank 0's copy kept by another node."""
    with closing(files.other(0, slot)) as file:
        return file.header, file.read(0, size)


def _fill(file: CopyFile, step: int, body: bytes, digest: int | None = None) -> CopyHeader:
    file.begin()
    file.reserve(len(body))
    file.content[: len(body)] = body
    header = CopyHeader("ab12", 2, 0, step, len(body), file.digest(len(body)) if digest is None else digest)
    file.commit(header)
    return header


def test_a_spare_node_keeps_the_copies_of_the_lost_node(
    keepers: list[tuple[CopyFiles, CopyKeeper]], first_files: list[CopyFile]
) -> None:
    """Also the existing copies, since no worker makes a new copy."""
    (_, giver), _, (kept_by_spare, _) = keepers
    first, second = first_files
    body = os.urandom(300_001)
    _fill(first, 2, body)
    giver.copied()
    waiting.until(lambda: first.kept == 2, "the next node has it")
    of_lost, lost = keepers.pop(1)
    lost.close()
    of_lost.close()
    waiting.until(lambda: _of_other(kept_by_spare, 0)[0] is not None, "the spare node has it")
    waiting.until(lambda: first.kept == 2, "which is known")
    assert _of_other(kept_by_spare, 0, len(body))[1] == body
    header = _fill(second, 4, body)
    giver.copied()
    waiting.until(lambda: second.kept == 4, "the spare node has it")
    assert _of_other(kept_by_spare, 1)[0] == header


def test_the_next_node_keeps_a_copy(
    keepers: list[tuple[CopyFiles, CopyKeeper]], first_files: list[CopyFile]
) -> None:
    (_, giver), (kept_by_next, _), _ = keepers
    body = os.urandom(3_000_001)
    for number, step in enumerate((2, 4)):
        header = _fill(first_files[number], step, body)
        giver.copied()
        waiting.until(lambda file=first_files[number], step=step: file.kept == step, "the next node has it")  # type: ignore[misc]
        assert _of_other(kept_by_next, number, len(body)) == (header, body)
    assert _of_other(kept_by_next, 0)[0] is not None  # the previous copy is still there


def test_a_copy_that_was_damaged_on_its_way_does_not_count(
    keepers: list[tuple[CopyFiles, CopyKeeper]],
    first_files: list[CopyFile],
    capfd: pytest.CaptureFixture[str],
) -> None:
    (_, giver), (kept_by_next, _), _ = keepers
    first, second = first_files
    _fill(first, 2, b"whole")
    giver.copied()
    waiting.until(lambda: first.kept == 2, "the next node has it")
    _fill(second, 4, b"other", digest=1)
    giver.copied()
    outputs = [""]

    def is_said() -> bool:
        outputs.append(outputs[-1] + capfd.readouterr().err)
        return "checksum" in outputs[-1]

    waiting.until(is_said, "it is told")
    assert "[ttp] node 0: the next node keeps no new copies of this node's ranks" in "".join(outputs)
    assert "(TTP_HOST_COPY): the copy of rank 0" in "".join(outputs)
    assert (second.kept, _of_other(kept_by_next, 1)[0]) == (-1, None)
    assert _of_other(kept_by_next, 0)[0] == first.header


@pytest.mark.parametrize(
    ("is_spare", "remaining_step"),
    [
        pytest.param(True, 4, id="a spare node has no copy, so the older one is overwritten"),
        pytest.param(False, 2, id="the sender has overwritten its newer copy, and not the older one"),
    ],
)
def test_a_copy_that_does_not_arrive_leaves_the_one_that_all_may_have(
    is_spare: bool,
    remaining_step: int,
    keepers: list[tuple[CopyFiles, CopyKeeper]],
    first_files: list[CopyFile],
    capfd: pytest.CaptureFixture[str],
) -> None:
    (_, giver), (kept_by_next, _), _ = keepers
    old, new = reversed(first_files)
    for file, step in ((old, 2), (new, 4)):
        _fill(file, step, b"whole")
        giver.copied()
        waiting.until(lambda file=file, step=step: file.kept == step, "the next node has it")  # type: ignore[misc]
    if is_spare:
        old.clear()
    _fill(new, 6, b"other", digest=1)
    giver.copied()
    waiting.until(lambda: "checksum" in capfd.readouterr().err, "it is told")
    kept = [
        header for header, _ in (_of_other(kept_by_next, 0), _of_other(kept_by_next, 1)) if header is not None
    ]
    assert [header.step for header in kept] == [remaining_step]


def test_a_generation_that_ends_while_a_copy_is_sent(
    keepers: list[tuple[CopyFiles, CopyKeeper]], first_files: list[CopyFile], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The generation ends after a sent piece and before the sender continues."""
    files, giver = keepers.pop(0)
    gone, ask_called = Event(), Event()
    ask = asyncio.run_coroutine_threadsafe

    async def drain(writer: asyncio.StreamWriter) -> None:
        gone.set()
        assert ask_called.wait(LONG_S)

    def asks(work: Any, loop: asyncio.AbstractEventLoop) -> Any:
        answer = ask(work, loop)
        ask_called.set()
        return answer

    monkeypatch.setattr(asyncio.StreamWriter, "drain", drain)
    monkeypatch.setattr(asyncio, "run_coroutine_threadsafe", asks)
    _fill(first_files[0], 2, b"whole")
    giver.copied()
    assert gone.wait(LONG_S)
    with Thread(giver.close):
        pass
    files.close()


# The rendezvous store hangs while the generation ends.
STORE_THAT_HANGS = """
import json, threading
from adaptor import config
from adaptor.launchers.control import agent_connections
from adaptor.launchers.agent import host_copies
from adaptor.launchers.agent.host_copies import CopyFiles
host_copies.AGAIN_S = agent_connections.CONNECT_TIMEOUT_S = 0.0
asked = threading.Event()
def find():
    asked.set()
    threading.Event().wait()
keeper = host_copies.CopyKeeper(0, CopyFiles(), config.load({}), None)
keeper.listen(bytes(32), "127.0.0.1")
keeper.give(find)
keeper.copied()
asked.wait()
keeper.close()
"""


def test_a_store_that_hangs_keeps_no_ttprun_from_its_end() -> None:
    command = [sys.executable, "-c", STORE_THAT_HANGS]
    assert subprocess.run(command, check=False, timeout=LONG_S).returncode == 0


def test_entries_of_a_script_belong_to_the_copied_step(new_file: Callable[[], CopyFile]) -> None:
    """The script keeps counting during the copy."""
    source, file = trainee(), new_file()
    event = Event()

    def counts(mark: Any, timeout_s: float) -> bool:
        source.state.extra["counted"] = 21
        return True

    source.device = SimpleNamespace(wait=counts, beside=HOST.beside, copy=HOST.copy)
    copier = Copier(EVERY, 0, 1, "a", [file, new_file()], False, lambda step: event.set(), list)
    copier.copy(source, record(20), None, is_intact=True)
    assert event.wait(60.0)
    header = file.header
    assert header is not None
    state = trainee().state
    restored = content.read(file.content[: header.size], state.optimizer, state.model)
    assert (restored.record.step, restored.extra) == (20, {"counted": 20})


def test_entries_that_cannot_be_copied_are_named() -> None:
    source = trainee()
    source.state.extra["written by"] = Path("/")
    with pytest.raises(TypeError, match="PosixPath cannot be passed on"):
        content.take_extra(source)


def test_the_newest_step_that_every_rank_of_a_node_has() -> None:
    """Rank 1 overwrites its copy of step 4 with step 8 while rank 0 has step 8 already."""
    files = CopyFiles()
    files.begin([0, 1])
    assert files.newest(is_kept=False) is None
    of = files.own()
    for rank, steps in ((0, (8, 6)), (1, (4, 6))):
        for file, step in zip(of[rank], steps, strict=True):
            _fill(file, step, b"state")
    assert files.newest(is_kept=False) == 6
    assert files.newest(is_kept=True) is None
    for rank in (0, 1):
        of[rank][1].note_kept(6)
    assert files.newest(is_kept=True) == 6
    files.forget_after(6)
    assert files.newest(is_kept=False) == 6
    assert of[0][0].header is None
    files.forget_after(5)
    assert files.newest(is_kept=False) is None
    for file in (*of[0], *of[1]):
        file.close()
    files.close()
