"""An agent's jobs on the save folder, where the disk hangs."""

from __future__ import annotations

import asyncio
import os
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from adaptor import config
from adaptor.checkpoint import left_overs, publish
from adaptor.checkpoint.lease import Lease
from adaptor.checkpoint.lease_content import Owner
from adaptor.errors import CheckpointError
from adaptor.launchers.agent import save_folder_tasks
from adaptor.launchers.agent.agent_control import AgentControl
from adaptor.launchers.agent.host_copies import CopyFiles
from adaptor.launchers.agent.save_folder_tasks import SaveFolderTasks
from adaptor.launchers.rendezvous.waiting import OtherSideError
from adaptor.launchers.spares.spare_gate import StartCounts
from adaptor.protocol import naming
from adaptor.protocol.messages import Find, Prepare, Prepared, Publish, Published, PublishFailed
from adaptor.protocol.naming import FileEntry
from adaptor.protocol.wire import deadline
from tests.unit.threads import LONG_S
from tests.waiting import captured


@pytest.fixture
def disk(monkeypatch: pytest.MonkeyPatch) -> Iterator[threading.Event]:
    """Hangs until it is set."""
    goes_on = threading.Event()

    def hang(*args: object, **named: object) -> None:
        goes_on.wait(LONG_S)

    monkeypatch.setattr(left_overs, "clean", hang)
    monkeypatch.setattr(save_folder_tasks, "CLEAN_S", 0.01)
    yield goes_on
    goes_on.set()


async def test_nobody_waits_for_a_disk_that_hangs(disk: threading.Event, tmp_path: Path) -> None:
    async with deadline(LONG_S):
        threads_before = set(threading.enumerate())
        works = SaveFolderTasks()
        await works.clean(tmp_path, 0, "")
        assert works.busy, "nothing may be removed under it"
        threads = [
            thread for thread in {*threading.enumerate()} - threads_before if thread.name == "ttp-save-folder"
        ]
        assert threads
        assert all(thread.daemon for thread in threads), "none of them may keep ttprun from its end"
        disk.set()
        works.close()
        for thread in threads:
            await asyncio.to_thread(thread.join, LONG_S)
        assert not works.busy, "the loop has heard of it"


async def test_an_error_of_the_disk_is_an_answer(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    save = str(tmp_path / "file" / "save")
    works = SaveFolderTasks()
    works.saves.add(save)
    answer = await works.do(Prepare(1, save, 5, number=2), 3, "")
    assert isinstance(answer, Prepared)
    assert (answer.node, answer.folder, answer.number) == (3, "", 2)
    assert "Not a directory" in answer.reason
    assert not works.busy


@pytest.mark.parametrize("expected", [False, True])
def test_the_join_of_parts_is_imported_before_a_fault_if_needed(expected: bool) -> None:
    script = f"""
import sys, threading
from adaptor.launchers.agent.save_folder_tasks import SaveFolderTasks
from adaptor.launchers.rendezvous.waiting import OtherSideError
from adaptor.launchers.spares.spare_gate import StartCounts
works = SaveFolderTasks()
for _ in range(2 * {expected}):
    works.expect_parts()
works.close()
for thread in threading.enumerate()[1:]:
    thread.join()
print("torch.distributed.checkpoint.filesystem" in sys.modules)
"""
    completed = captured([sys.executable, "-c", script])
    assert completed.stdout == f"{expected}\n", completed.stderr


async def test_how_far_a_publish_is_is_known(tmp_path: Path) -> None:
    """A slow disk takes longer for thousands of files than the time limit for a hanging disk."""
    folder = publish.prepare(tmp_path, 5, generation="mine")
    entries = tuple(FileEntry(f"{name}.pt", 1, None, 1) for name in "abc")
    for entry in entries:
        (folder / entry.draft).write_bytes(b"x")
    works = SaveFolderTasks()
    works.saves.add(str(tmp_path))
    answer = await works.do(Publish(1, str(tmp_path), 5, entries, {}, 2), 3, "mine")
    assert answer == Published(3, 1, 5, str(tmp_path / naming.final_name(5)))
    assert works.moved == len(entries)


def test_an_error_is_raised_to_the_waiter(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def refuse(*args: object, **named: object) -> None:
        raise CheckpointError("no")

    monkeypatch.setattr(left_overs, "clean", refuse)
    with pytest.raises(CheckpointError, match="no"):
        asyncio.run(SaveFolderTasks().clean(tmp_path, 0, ""))


@pytest.mark.robustness(
    "C1",
    "a forged order to make, publish or find a checkpoint elsewhere",
    "refused in one line, nothing is touched",
)
@pytest.mark.parametrize("order", [Prepare, Publish, Find])
def test_an_order_for_another_folder_is_refused(
    tmp_path: Path, order: type[Prepare] | type[Publish] | type[Find]
) -> None:
    foreign_folder = tmp_path / "precious"
    orders = {
        Prepare: Prepare(1, str(foreign_folder), 5),
        Publish: Publish(1, str(foreign_folder), 5, (), {}, 2),
        Find: Find(1, str(foreign_folder), 5),
    }

    async def work(saves: set[str]) -> str:
        works = SaveFolderTasks()
        works.saves |= saves
        answer = await works.do(orders[order], 3, "mine")
        assert isinstance(answer, Prepared | PublishFailed)
        return answer.reason

    for saves in (set(), {str(tmp_path / "save")}):
        assert "is not the save folder of this node's workers" in asyncio.run(work(saves))
    assert list(tmp_path.iterdir()) == []


def test_later_workers_of_the_job_are_not_the_other_side_of_a_cut_network(tmp_path: Path) -> None:
    """The agent of a spare node in the place of node 0, which watches the lease of another agent."""
    save, owner = tmp_path / "save", Owner.of(os.getppid())
    save.mkdir()
    Lease(save, owner, "generation 2").take()
    control = AgentControl(config.load({"TTP_LOG_PATH": str(tmp_path)}), "", 1, tmp_path, CopyFiles())
    control.thread.start()
    try:
        control.lease.watch(str(save), "node 0")
        control.lease.require_own()
        Lease(save, owner, "generation 3").take()
        with pytest.raises(OtherSideError):
            control.lease.require_own()
        control.begin([0], 0, 2, may_restart=True, counts=StartCounts(), joins=False)
        control.lease.require_own()
    finally:
        control.thread.wait_for(control.workers.close())
        control.thread.stop()
        control.close()
