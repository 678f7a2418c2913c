"""Unit tests: no training, real sockets and processes where they are cheap.

A test that starts whole jobs with ttprun stands beside the unit tests of its subject and is marked as an
integration test: run alone, these jobs take longer than all unit tests.
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
    """Run a coroutine test in an event loop of its own."""
    if not inspect.iscoroutinefunction(pyfuncitem.obj):
        return None
    arguments = {name: pyfuncitem.funcargs[name] for name in inspect.signature(pyfuncitem.obj).parameters}
    asyncio.run(pyfuncitem.obj(**arguments))
    return True


@pytest.fixture(scope="session", autouse=True)
def _patience() -> Iterator[None]:
    """Let a save wait for the removal of old folders, however busy the disk is."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(left_overs, "REMOVAL_WAIT_S", LONG_S)
        yield


@pytest.fixture
def restless() -> Iterator[None]:
    """Threads take turns a thousand times as often as usual."""
    interval = sys.getswitchinterval()
    sys.setswitchinterval(5e-6)
    yield
    sys.setswitchinterval(interval)


@pytest.fixture(scope="module")
def group_of_one() -> Iterator[None]:
    """Make this process a job of one rank, for tests of collective functions."""
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
