"""Failed regular saves: the ranks' agreement, and the next attempt."""

from __future__ import annotations

import contextlib
import os
import queue
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch.distributed as dist

from adaptor import context, output
from adaptor.config import load
from adaptor.errors import CheckpointError
from adaptor.frameworks.failed_saves import FIRST_PAUSE_S, FailedSaves, SaveAgreement, SaveFailedError
from adaptor.frameworks.regular_save import RegularSaves
from adaptor.protocol.messages import SaveEnded
from adaptor.replica import group
from adaptor.worker import runtime
from tests.faults import warm
from tests.frameworks import prepare
from tests.waiting import LONG_S

FOLDER = Path("save/iter_0000004_saving")


class OnlyRank(runtime.Runtime):
    def __init__(self) -> None:
        self.rank = 0
        self.said: list[Any] = []
        self.processor = SimpleNamespace(say=self.said.append)  # type: ignore[assignment]
        self.session = SimpleNamespace(  # type: ignore[assignment]
            board=SimpleNamespace(finished=-1), trains_on_this_thread=False
        )


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
def worker(monkeypatch: pytest.MonkeyPatch) -> OnlyRank:
    worker = OnlyRank()
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


def test_an_error_without_a_text_is_not_named(everyone: dist.ProcessGroup) -> None:
    """Megatron-core reads the queue of its writers, which is empty after the end of a writer."""
    agreement = SaveAgreement(everyone, FOLDER)
    with agreement.noting():
        try:
            queue.Queue[int]().get_nowait()
        except queue.Empty:
            raise RuntimeError("results_queue should not be empty")  # noqa: B904
    assert agreement.error == "RuntimeError: results_queue should not be empty"


def test_an_effect_of_a_lost_rank_is_no_error_of_the_save(everyone: dist.ProcessGroup) -> None:
    agreement = SaveAgreement(everyone, FOLDER)
    with pytest.raises(RuntimeError), agreement.noting():
        raise RuntimeError("[gloo/transport/tcp/pair.cc] Connection closed by peer")
    assert agreement.error == ""


def test_pauses_grow_until_a_save_succeeds(
    everyone: dist.ProcessGroup, worker: OnlyRank, capfd: pytest.CaptureFixture[str]
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
        assert not failed.is_due()  # an attempt has begun, and may continue in the background
    failed.succeed(6)
    clock.now += 1000.0
    assert not failed.is_due()
    assert worker.said == [*[SaveEnded(0, 4, "rank 0: No space left on device")] * 3, SaveEnded(0, 6)]


@pytest.mark.parametrize("exits", [False, True])
def test_a_training_loop_does_not_end_by_a_save_that_has_failed(exits: bool, worker: OnlyRank) -> None:
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
        end(5)  # the framework saves that step after the loop
    failed.succeed(4)
    with pytest.raises(SystemExit) if exits else contextlib.nullcontext():
        end(4)


def _said(capfd: pytest.CaptureFixture[str]) -> str:
    assert output.drain(LONG_S)
    return "".join(capfd.readouterr())


def test_an_unfinished_folder_that_stays_is_named(
    worker: OnlyRank, capfd: pytest.CaptureFixture[str]
) -> None:
    FailedSaves(context.Context(load({}))).fail(4, "rank 1: Read-only file system", str(FOLDER))
    stderr = _said(capfd)
    assert f"[ttp] step 4 could not be saved: rank 1: Read-only file system; {FOLDER} is unfinished" in stderr
    assert "training goes on" in stderr


def test_a_save_after_the_training_loop_ends_the_report_of_failures(
    worker: OnlyRank, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    failed, saves = context.part(FailedSaves), context.part(RegularSaves)
    failed.forget()
    with failed.in_loop():
        failed.fail(4, "rank 0: No space left on device", "")
        with saves.regular(str(tmp_path), 5, may_fail=True):
            pass  # a save in another thread needs no agreement of the ranks
    assert worker.said[1:] == []
    with saves.regular(str(tmp_path), 6):
        pass  # of the script itself
    assert worker.said[1:] == []
    with saves.regular(str(tmp_path), 6, may_fail=True):
        pass
    assert worker.said[1:] == [SaveEnded(0, 6)]
    assert "[ttp] step 6 is saved; 1 save had failed before\n" in _said(capfd)


WRITERS_HAVE_FAILED = """
import contextlib, queue
from pathlib import Path
import torch
import torch.distributed as dist
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.utils import _DistWrapper
from adaptor import context, patches, patching
from adaptor.frameworks.failed_saves import SaveAgreement
from adaptor.frameworks.regular_save import RegularSaves, _Save

patches.load("ttp")
patching.arm("ttp")
from megatron.core.dist_checkpointing.strategies import filesystem_async, state_dict_saver

dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
torch.cuda.current_device = lambda: "cpu"
agreement = SaveAgreement(dist.group.WORLD, Path("save"))
context.part(RegularSaves)._running.save = _Save(Path("save"), 4, False, agreement=agreement)
writer = filesystem_async.FileSystemWriterAsync("save")
writer.write_buckets, writer.results_queue = [object()], queue.Queue()
writer.results_queue.put(OSError(28, "No space left on device"))
gathered = []

class Ranks(_DistWrapper):
    def gather_object(self, object):
        gathered.append(object)
        return super().gather_object(object)

state_dict_saver.save_state_dict_async_finalize(writer, Metadata({}), Ranks(None, True, 0))
assert gathered == [[]], "other ranks wait there"
assert agreement.error == "No space left on device (save)", agreement.error

def gather_object(object):
    raise torch.OutOfMemoryError("out of memory")

ranks = _DistWrapper(None, True, 0)
ranks.gather_object = gather_object
with contextlib.suppress(torch.OutOfMemoryError):
    state_dict_saver.save_state_dict_async_finalize(writer, Metadata({}), ranks)
    raise SystemExit("a rank that has left the gather alone does not go on")
"""


@pytest.mark.parametrize("find", [prepare.megatron_lm, prepare.megatron_core])
def test_a_rank_whose_writers_have_failed_joins_the_gather(find: Callable[[], Path], tmp_path: Path) -> None:
    """With Megatron's own end of a `torch_dist` save and the queue of its writers."""
    try:
        framework = find()
    except prepare.NotPreparedError as error:
        pytest.skip(str(error))
    path = f"{framework}{os.pathsep}{Path(__file__).resolve().parents[2]}"
    command = [sys.executable, "-c", WRITERS_HAVE_FAILED]
    warm.run(command, env={**os.environ, "PYTHONPATH": path}, cwd=tmp_path, code=0)
