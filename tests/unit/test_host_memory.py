"""Processes that the kernel killed for lack of memory."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from adaptor import host_memory
from adaptor.host_memory import OutOfMemoryKills


@pytest.fixture
def group(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A version 2 control group with the processes 70 and 71; the kernel has killed one process."""
    group = tmp_path / "job" / "step"
    group.mkdir(parents=True)
    (group.parent / "memory.max").write_text(f"{1 << 30}\n")
    (group / "memory.max").write_text("max\n")
    (group / "memory.peak").write_text(f"{1000 << 20}\n")
    _kills(group, 1)
    monkeypatch.setattr(host_memory, "_groups_around", lambda _: [(group, host_memory._VERSION_2)])
    return group


def _kills(group: Path, count: int) -> None:
    (group / "memory.events").write_text(f"low 0\nhigh 0\nmax 9\noom {count}\noom_kill {count}\n")


def test_no_more_deaths_are_explained_than_the_kernel_has_killed(group: Path) -> None:
    kills = OutOfMemoryKills()
    for pid in (70, 71, 72):
        kills.note(pid)
    assert kills.explain(70) == ""
    _kills(group, 2)
    reason = (
        "killed by the kernel: out of memory, the limit of its control group is 1024 MiB, the peak 1000 MiB"
    )
    assert (kills.explain(71), kills.explain(72)) == (reason, "")


def test_a_kill_before_a_new_process_is_not_its_own(group: Path) -> None:
    kills = OutOfMemoryKills()
    kills.note(70)
    _kills(group, 2)  # a data loader was killed
    kills.note(71)
    assert kills.explain(71) == ""


def test_without_a_control_group_the_count_of_the_machine_explains_a_death(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(host_memory, "_groups_around", lambda _: [])
    monkeypatch.setattr(host_memory, "_PROC", tmp_path)
    counts = tmp_path / "vmstat"
    counts.write_text("nr_free_pages 7\noom_kill 3\n")
    kills = OutOfMemoryKills()
    for pid in (70, 71):
        kills.note(pid)
    counts.write_text("nr_free_pages 7\noom_kill 4\n")
    reason = "killed by the kernel: out of memory, by the count of the whole machine"
    assert (kills.explain(70), kills.explain(71)) == (reason, "")


def test_a_kernel_that_counts_nothing_explains_nothing(group: Path) -> None:
    (group / "memory.events").unlink()
    kills = OutOfMemoryKills()
    kills.note(os.getpid())
    assert kills.explain(os.getpid()) == ""
