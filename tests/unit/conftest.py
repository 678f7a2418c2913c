"""Unit tests: no training, real sockets and processes where they are cheap.

What starts whole jobs with ttprun stands beside the unit tests of the same subject, and is an integration
test: one by one these jobs wait longer than all unit tests take.
"""

from __future__ import annotations

import asyncio
import inspect
import sys
from collections.abc import Iterator
from datetime import timedelta
from types import SimpleNamespace

import pytest
from hypothesis import settings

from adaptor.checkpoint import left_overs
from tests.waiting import LONG_S

# Fixtures that start ttprun.
STARTS_JOBS = {"launcher", "warm_launcher", "zygote"}

# A loaded machine is no failure of the code.
settings.register_profile("unit", deadline=None)
settings.load_profile("unit")


def pytest_itemcollected(item: pytest.Item) -> None:
    if isinstance(item, pytest.Function) and not STARTS_JOBS.isdisjoint(item.fixturenames):
        item.add_marker(pytest.mark.integration)


@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> bool | None:
    """Run a test that is a coroutine in an event loop of its own."""
    if not inspect.iscoroutinefunction(pyfuncitem.obj):
        return None
    arguments = {name: pyfuncitem.funcargs[name] for name in inspect.signature(pyfuncitem.obj).parameters}
    asyncio.run(pyfuncitem.obj(**arguments))
    return True


@pytest.fixture(scope="session", autouse=True)
def _patience() -> Iterator[None]:
    """What a save removes beside it is removed when it returns, however busy the disk."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(left_overs, "REMOVAL_WAIT_S", LONG_S)
        yield


@pytest.fixture
def restless() -> Iterator[None]:
    """Threads take turns a thousand times as often as usual."""
    before = sys.getswitchinterval()
    sys.setswitchinterval(5e-6)
    yield
    sys.setswitchinterval(before)


@pytest.fixture(scope="module")
def group_of_one() -> Iterator[None]:
    """A job of one rank, this process, for what is collective."""
    import torch.distributed as dist

    dist.init_process_group(
        "gloo", store=dist.HashStore(), rank=0, world_size=1, timeout=timedelta(seconds=60)
    )
    yield
    dist.destroy_process_group()


@pytest.fixture
def rank_0(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Let this process be rank 0 of a job, with a session."""
    from adaptor.protocol.board import Board, BoardMemory
    from adaptor.worker import runtime
    from adaptor.worker.session import Session

    memory = BoardMemory([0])
    session = Session(Board(0, memory.path, memory.slots), lambda *_: None, lambda _: None)
    monkeypatch.setattr(runtime, "get", lambda: SimpleNamespace(rank=0, session=session))
    yield
    memory.close()


@pytest.fixture
def armed() -> Iterator[None]:
    """Arm the patches of a worker."""
    from adaptor import patches, patching

    patches.load("worker")
    patching.arm("worker")
    yield
    patching.disarm("worker")
