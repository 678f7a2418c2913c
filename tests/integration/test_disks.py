"""The disk fails during last words: the job reports the error and keeps earlier checkpoints; a slow disk is
awaited.
"""

from __future__ import annotations

import subprocess
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack
from pathlib import Path
from typing import TypeVar

import pytest

from tests.faults import cgroups, disks, harness, outcome
from tests.faults.harness import DP2, DP4, Ended, Job, Layout
from tests.faults.same import differences
from tests.faults.scenario import Baseline, BaselineOf, assert_last_words
from tests.integration.test_formats import DIST as TORCH_DIST
from tests.integration.test_formats import OPTIONS_OF_ASYNC_SAVES

_T = TypeVar("_T")
KILL = "rank=1,step=7,phase=backward,kind=sigkill"
TROUBLE = "rank=1,step=7,phase=backward,kind=disk"
MIB = 1 << 20


@pytest.fixture
def stack() -> Iterator[ExitStack]:
    with ExitStack() as stack:
        yield stack


def _enter(stack: ExitStack, make: Callable[..., AbstractContextManager[_T]], *arguments: object) -> _T:
    try:
        return stack.enter_context(make(*arguments))
    except OSError as error:
        pytest.skip(f"not on this machine, or not for this user: {error}")


def _refused(job: Job, baseline: Baseline, *fragments: str) -> Ended:
    """Assert that the job is lost, and that the regular save of step 4 is the only checkpoint."""
    assert job.save is not None
    result = harness.run(job)
    folder = outcome.assert_saved(job.save, 4)
    assert outcome.steps_in(job.save) == [4]
    assert differences(folder, baseline.checkpoints / folder.name) == []
    assert result.code == 137
    for word in ("the state cannot be saved: ", *fragments):
        assert word in result.last_line
    assert result.last_line.endswith(f"the newest checkpoint in {job.save} is step 4")
    return result


def test_the_disk_is_full(tmp_path: Path, baseline_of: BaselineOf, stack: ExitStack) -> None:
    baseline = baseline_of(DP2)
    checkpoint_size = sum(
        path.stat().st_size for path in (baseline.checkpoints / "iter_0000004").rglob("*.*")
    )
    disk = _enter(stack, disks.memory, tmp_path / "disk", checkpoint_size * 3 // 2)
    job = Job(tmp_path / "job", DP2, save=disk.place, save_interval=4, faults=[KILL])
    _refused(job, baseline, "No space left on device")


@pytest.mark.robustness(
    "B8",
    "the disk has no room for last words beside a regular save that a kill has cut short",
    "the half-written save is removed first, no step is lost",
)
def test_a_regular_save_that_was_cut_short_makes_room(
    tmp_path: Path, baseline_of: BaselineOf, stack: ExitStack
) -> None:
    baseline = baseline_of(DP2)
    checkpoint_size = sum(
        path.stat().st_size for path in (baseline.checkpoints / "iter_0000004").rglob("*.*")
    )
    disk = _enter(stack, disks.memory, tmp_path / "disk", checkpoint_size * 5 // 2)
    faults = ["rank=0,step=8,phase=save-tracker,kind=sigkill"]
    result = harness.run(Job(tmp_path / "job", DP2, save=disk.place, save_interval=4, faults=faults))
    assert "step 8 is saved, no finished step is lost" in result.last_line
    assert_last_words(disk.place, 8, baseline)


@pytest.mark.parametrize(
    ("make", "trouble", "message"),
    [
        pytest.param(disks.memory, "read-only", "Read-only file system", id="read-only"),
        # Every write succeeds, and fsync tells of the error: the device fails, not the file system.
        pytest.param(
            disks.block, "fail", "mp_rank_00 could not be written: CheckpointError: ", id="loses what it took"
        ),
    ],
)
def test_the_disk_gets_worse(
    make: Callable[[Path, int], AbstractContextManager[disks.Disk]],
    trouble: str,
    message: str,
    tmp_path: Path,
    baseline_of: BaselineOf,
    stack: ExitStack,
) -> None:
    disk = _enter(stack, make, tmp_path / "disk", 64 * MIB)
    environment = dict(disk.will(trouble))
    job = Job(
        tmp_path / "job", DP2, save=disk.place, save_interval=4, faults=[TROUBLE], environment=environment
    )
    _refused(job, baseline_of(DP2), message)


@pytest.mark.parametrize(
    ("trouble", "layout", "arguments"),
    [
        ("inodes", DP2, ()),
        ("full", TORCH_DIST, ()),
        ("full", TORCH_DIST, ("--async-save",)),
    ],
    ids=["inodes", "torch_dist", "async"],
)
def test_training_goes_on_while_nothing_can_be_saved(
    trouble: str,
    layout: Layout,
    arguments: Sequence[str],
    tmp_path: Path,
    baseline_of: BaselineOf,
    stack: ExitStack,
) -> None:
    """A rank is replaced, a regular save fails, and is made later: all state is alive, so no step is lost."""
    baseline = baseline_of(layout)
    disk = _enter(stack, disks.memory, tmp_path / "disk", 64 * MIB)
    faults = [
        "rank=1,step=3,phase=backward,kind=disk",
        "rank=0,step=6,phase=forward,kind=disk-mended",
        "rank=0,step=6,phase=update,kind=pause",
    ]
    job = Job(
        tmp_path / "job",
        layout,
        save=disk.place,
        save_interval=4,
        restarts=1,
        faults=faults,
        options=("--ttp-online", "60", "--ttp-spares", "0"),
        arguments=arguments,
        environment=dict(disk.will(trouble)),
    )
    result = harness.run(job, code=0)
    assert "step 2 could not be saved meanwhile" in result.log
    (failed,) = [line for line in result.said if "step 4 could not be saved: rank " in line]
    assert "training goes on" in failed
    assert any(line.endswith("is saved; 1 save had failed before") for line in result.said), result.said
    assert {line["restart"] for lines in result.records.values() for line in lines} == {0}
    outcome.assert_same_training(result, baseline.records)
    # The save of step 4 is made later, when its pause is over; that of an asynchronous save begins later.
    saved = outcome.steps_in(disk.place)
    assert saved == [6, 8] or (arguments and saved[-1] == 8)
    for step in saved:
        name = f"iter_{step:07d}"
        unlike = differences(disk.place / name, baseline.checkpoints / name)
        assert [line for line in unlike if not OPTIONS_OF_ASYNC_SAVES.search(line)] == []
    outcome.assert_saved(disk.place, 8)


def test_the_disk_is_slow(tmp_path: Path, baseline_of: BaselineOf, stack: ExitStack) -> None:
    """The save takes longer than an incident may last, 13 s, and moves: a block every 2.5 s."""
    disk = _enter(stack, disks.block, tmp_path / "disk", 64 * MIB)
    assert disk.device is not None
    group = _enter(stack, cgroups.slow_writes, disk.device, MIB * 2 // 5)
    job = Job(
        tmp_path / "job",
        DP2,
        save=disk.place,
        options=["--ttp-ot", "10"],
        faults=["rank=1,step=7,phase=backward,kind=slow-disk"],
        environment={cgroups.SLOW: str(group)},
    )
    result = harness.run(job)
    assert "step 6 is saved, no finished step is lost" in result.last_line
    assert_last_words(disk.place, 6, baseline_of(DP2))
    assert result.seconds_after_the_fault > 10.0


def test_a_disk_goes_whoever_has_a_copy_of_it(tmp_path: Path, stack: ExitStack) -> None:
    """Other tests make mount namespaces at the same time, which also have the disk mounted."""
    disk = _enter(stack, disks.block, tmp_path / "disk", 64 * MIB)
    holds = "echo; read wait"
    command = ("unshare", "--mount", "sh", "-c", holds)
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as namespace:
        assert namespace.stdout is not None
        namespace.stdout.readline()
        stack.close()
        assert not disk.place.is_mount()
        assert disk.below is not None
        assert not disk.below.is_mount()
        namespace.communicate()


def test_a_disk_hangs_on_one_node(tmp_path: Path, baseline_of: BaselineOf) -> None:
    """A write on that node never returns, while its process answers: another node writes in its place."""
    save = tmp_path / "save"
    job = Job(
        tmp_path / "job",
        DP4,
        save=save,
        nodes=2,
        options=["--ttp-ot", "24"],
        faults=["rank=3,step=6,phase=backward,kind=sigkill", "rank=0,phase=dump-write,kind=deadlock"],
    )
    result = harness.run(job, code=137)
    for log in result.logs:
        assert (
            "[ttp] rank 3 was ended by SIGKILL; step 5 is saved, no finished step is lost; "
            "the save folder does not answer on node 0; " in log
        )
    assert_last_words(save, 5, baseline_of(DP4))
