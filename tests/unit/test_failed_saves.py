"""Regular saves that fail: what the ranks agree on, and when a save is tried again."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch.distributed as dist

from adaptor import context
from adaptor.config import load
from adaptor.errors import CheckpointError
from adaptor.frameworks.failed_saves import FIRST_PAUSE_S, FailedSaves, SaveAgreement, SaveFailedError
from adaptor.protocol.messages import SaveEnded
from adaptor.replica import group
from adaptor.worker import runtime

FOLDER = Path("save/iter_0000004_saving")


class Worker(runtime.Runtime):
    """Rank 0, which is the only one."""

    def __init__(self) -> None:
        self.rank = 0
        self.said: list[Any] = []
        self.processor = SimpleNamespace(say=self.said.append)  # type: ignore[assignment]
        self.session = SimpleNamespace(board=SimpleNamespace(finished=-1))  # type: ignore[assignment]


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def everyone() -> Iterator[dist.ProcessGroup]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield group.of_everyone()
    dist.destroy_process_group()


@pytest.fixture
def worker(monkeypatch: pytest.MonkeyPatch) -> Worker:
    worker = Worker()
    monkeypatch.setattr(runtime, "get", lambda: worker)
    return worker


def test_an_error_is_raised_where_the_ranks_meet(everyone: dist.ProcessGroup) -> None:
    agreement = SaveAgreement(everyone, FOLDER)
    agreement.meet()
    with agreement.noting():
        raise OSError(28, "No space left on device")
    with agreement.noting():
        raise ValueError("the first error counts")
    with pytest.raises(SaveFailedError, match=r"^rank 0: No space left on device \(save/iter_"):
        agreement.meet()


def test_the_error_of_the_system_behind_others_is_named(everyone: dist.ProcessGroup) -> None:
    agreement = SaveAgreement(everyone, FOLDER)
    failure = RuntimeError("Worker failure")
    failure.__cause__ = OSError(5, "Input/output error", "a.distcp")
    error = CheckpointError("CheckpointException ranks: [1]")
    error.failures = {1: (failure, None)}  # type: ignore[attr-defined]
    with agreement.noting():
        raise error
    assert agreement.error == "Input/output error (a.distcp)"


def test_what_may_follow_from_a_lost_rank_is_no_error_of_the_save(everyone: dist.ProcessGroup) -> None:
    agreement = SaveAgreement(everyone, FOLDER)
    with pytest.raises(RuntimeError), agreement.noting():
        raise RuntimeError("[gloo/transport/tcp/pair.cc] Connection closed by peer")
    assert agreement.error == ""


def test_pauses_grow_until_a_save_succeeds(
    everyone: dist.ProcessGroup, worker: Worker, capfd: pytest.CaptureFixture[str]
) -> None:
    clock = Clock()
    failed = FailedSaves(context.Context(load({})), clock)
    assert not failed.is_due()
    for number in range(3):
        failed.fail(4, "rank 0: No space left on device", "")
        pause_s = FIRST_PAUSE_S * 2**number
        clock.now += pause_s - 0.1
        assert not failed.is_due()
        clock.now += 0.1
        assert failed.is_due()
        assert not failed.is_due()  # an attempt has begun, which may go on in the background
    failed.succeed(6)
    clock.now += 1000.0
    assert not failed.is_due()
    assert worker.said == [*[SaveEnded(0, 4, "rank 0: No space left on device")] * 3, SaveEnded(0, 6)]


@pytest.mark.parametrize("exits", [False, True])
def test_a_training_loop_does_not_end_by_a_save_that_has_failed(exits: bool, worker: Worker) -> None:
    failed = FailedSaves(context.Context(load({})))

    def end(step: int) -> None:
        worker.session.board.finished = step
        with failed.in_loop():
            if exits:
                sys.exit(0)

    failed.fail(4, "rank 0: No space left on device", "")
    with pytest.raises(CheckpointError, match="step 4 could not be saved: rank 0: No space"):
        end(4)
    with pytest.raises(SystemExit) if exits else contextlib.nullcontext():
        end(5)  # the framework saves that step when the loop has ended
    failed.succeed(4)
    with pytest.raises(SystemExit) if exits else contextlib.nullcontext():
        end(4)


def test_an_unfinished_folder_that_stays_is_named(worker: Worker, capfd: pytest.CaptureFixture[str]) -> None:
    from adaptor import output
    from tests.waiting import LONG_S

    FailedSaves(context.Context(load({}))).fail(4, "rank 1: Read-only file system", str(FOLDER))
    assert output.drain(LONG_S)
    said = "".join(capfd.readouterr())
    assert f"[ttp] step 4 could not be saved: rank 1: Read-only file system; {FOLDER} is unfinished" in said
    assert "training goes on" in said
