"""Checkpoints on the nodes' own disks are neither lost nor mixed, whatever their history."""

from __future__ import annotations

import itertools
import os
import shutil
from pathlib import Path

import pytest

from adaptor.checkpoint import disk, regular_folder, resume_selection, tracker
from adaptor.protocol import naming
from tests.unit.test_checkpoint_publish import Crash, _watch_calls_without_events, crash_before  # noqa: F401
from tests.unit.test_own_disks import (
    FIRST,
    FOLDERS,
    NEWER,
    OLDER,
    SECOND,
    THIRD,
    content,
    disks,
    is_whole,
    name,
    resume,
    save,
    write,
)


def _same_second(places: list[Path], step: int) -> None:
    """Set the manifests of all nodes to the same time, as on file systems with a resolution of seconds."""
    for place in places:
        path = place / "save" / naming.final_name(step) / naming.MANIFEST
        os.utime(path, ns=(10**18, 10**18))


def test_nodes_that_have_named_a_save_in_the_same_second(tmp_path: Path) -> None:
    """Node 1 has lost a file of step 20: both go back."""
    places = disks(tmp_path, 2)
    roots = [place / "save" for place in places]
    save(roots, NEWER, SECOND)
    for step in (OLDER, NEWER):
        _same_second(places, step)
    (roots[1] / naming.final_name(NEWER) / FOLDERS[1] / naming.MODEL_FILE).unlink()
    refused, output = resume(tmp_path, places)
    assert refused == [["", ""]]
    assert output.endswith(f"the newest that is intact on every node is step {OLDER}")
    assert [tracker.tracked_step(root) for root in roots] == [OLDER, OLDER]
    assert all((root / naming.aside_name(NEWER, 1)).is_dir() for root in roots)


@pytest.mark.parametrize("tracker_text", ["20", "", "release"])
def test_disks_with_the_very_same_copy(tmp_path: Path, tracker_text: str) -> None:
    """Step 10 was copied with its times, so the disks look alike. Node 1 also has a step 20.

    The framework takes the largest step that any rank reads: it would load a step 20 that was never compared.
    """
    places = [tmp_path / "node0", tmp_path / "node1"]
    for node in (0, 1):
        write(places[0] / "save", node, OLDER, FIRST)
    name(places[0] / "save", 0, OLDER, FIRST)
    shutil.copytree(places[0], places[1])
    save([place / "save" for place in places], NEWER, SECOND)
    (places[0] / "save" / naming.TRACKER).write_text(str(OLDER))
    (places[1] / "save" / naming.TRACKER).write_text(tracker_text)
    refused, output = resume(tmp_path, places)
    assert refused == [["", ""]]
    assert [tracker.tracked_step(place / "save") for place in places] == [OLDER, OLDER]
    later_line = (
        f"[ttp] save/{naming.TRACKER} says {OLDER}: training goes on from step {OLDER}, not from step 20,"
        " which is saved beside it; write 20 into the file to go on from there"
    )
    moved = f"[ttp] node 1: save/{naming.TRACKER} named step 20, and names step {OLDER} now, as on node 0"
    assert output.splitlines() == ([later_line, moved] if tracker_text == "20" else [later_line])
    (places[1] / "save" / naming.TRACKER).write_text(tracker_text)
    contents_before = [content(place) for place in places]
    ((reason, other_reason),) = resume(tmp_path, places, ["elsewhere"], load="save")[0]
    assert reason == other_reason
    assert reason.startswith(
        f"node 1: save/{naming.TRACKER}: names {'step 20' if tracker_text == '20' else 'no step'}, "
    )
    assert reason.endswith("let all name the same step, or choose one with --ckpt-step")
    assert [content(place) for place in places] == contents_before


@pytest.mark.parametrize("texts", [("release", None), (None, "release"), ("release", "10")])
def test_a_release_that_not_every_node_has(tmp_path: Path, texts: tuple[str | None, str | None]) -> None:
    """Some ranks would start from the release, others from scratch."""
    places = [tmp_path / "node0", tmp_path / "node1"]
    for place, text in zip(places, texts, strict=True):
        (place / "save").mkdir(parents=True)
        if text:
            (place / "save" / naming.TRACKER).write_text(text)
    tracker_names = {"release": "a release", "10": "step 10", None: "no checkpoint"}
    ((reason, other_reason),) = resume(tmp_path, places)[0]
    assert reason == other_reason
    assert reason.startswith(
        f"save: node 0 has {tracker_names[texts[0]]}, node 1 has {tracker_names[texts[1]]}; the nodes do not"
    )


def test_a_release_that_every_node_has(tmp_path: Path) -> None:
    places = [tmp_path / "node0", tmp_path / "node1"]
    for place in places:
        (place / "save").mkdir(parents=True)
        (place / "save" / naming.TRACKER).write_text("release\n")
    assert resume(tmp_path, places) == ([["", ""]], "")


def test_a_save_is_completed_beside_another_save_of_its_step(tmp_path: Path) -> None:
    """Step 20 was saved; all ranks went back and saved it anew; the job ended before node 1 renamed its
    folder.
    """
    places = disks(tmp_path, 2)
    roots = [place / "save" for place in places]
    save(roots, NEWER, SECOND)
    for node, root in enumerate(roots):
        write(root, node, NEWER, THIRD)
    name(roots[0], 0, NEWER, THIRD)
    refused, output = resume(tmp_path, places)
    assert refused == [["", ""]]
    assert output == (
        f"[ttp] node 1: save/{naming.final_name(NEWER)}: the end of the job had cut its save short when all"
        " was written; it is complete now"
    )
    assert all(is_whole(root, node, NEWER, THIRD) for node, root in enumerate(roots))
    assert [tracker.tracked_step(root) for root in roots] == [NEWER, NEWER]


def test_a_save_is_not_made_of_another_folder_than_was_looked_at(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A client of a shared folder shows a save under its old name, which now holds the replaced version."""
    root = tmp_path / "save"
    saving = write(root, 1, NEWER, SECOND)
    older = write(tmp_path / "other", 1, NEWER, FIRST)
    regular_folder.publish_regular(tmp_path / "other", NEWER, FIRST)
    older = tmp_path / "other" / naming.final_name(NEWER)
    rename = Path.rename

    def late(path: Path, target: Path) -> Path:
        if path == saving and older.exists():
            shutil.rmtree(saving)
            rename(older, saving)
        return rename(path, target)

    monkeypatch.setattr(Path, "rename", late)
    assert not regular_folder.complete_on_own_disk(root, NEWER, SECOND)
    assert not (root / naming.final_name(NEWER)).exists()


TROUBLE = """
import errno, os
from pathlib import Path
from adaptor.checkpoint import disk
from adaptor.protocol import naming
if os.environ["GROUP_RANK"] == "1":
    write, read = disk.write, disk.read
    def full(folder, name, content):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(folder / name))
    def hard(path, limit):
        if %s:
            raise OSError(errno.EIO, os.strerror(errno.EIO), str(path))
        return read(path, limit)
    if os.environ["TROUBLE"] == "full":
        disk.write = full
    else:
        disk.read = hard
"""


@pytest.mark.robustness(
    "B8",
    "a disk of a node's own is full, or has I/O errors, when a save that was cut short could be completed",
    "the start is refused in a line, and nothing of the save is removed",
)
@pytest.mark.parametrize(
    ("trouble", "message"),
    [
        ("full", "was written, and cannot get its name now: "),
        ("note", "was written, and cannot get its name now: "),
        ("manifest", f"{naming.MANIFEST}: cannot be read (Input/output error)"),
    ],
)
def test_a_disk_in_trouble_does_not_take_the_newest_save(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, trouble: str, message: str
) -> None:
    places = disks(tmp_path, 2)
    roots = [place / "save" for place in places]
    for node, root in enumerate(roots):
        write(root, node, NEWER, SECOND)
    name(roots[0], 0, NEWER, SECOND)
    if trouble == "manifest":
        name(roots[1], 1, NEWER, SECOND)
    site = tmp_path / "site"
    site.mkdir()
    suffix = {
        "note": '.ttp-xxh3"',
        "manifest": f'{naming.final_name(NEWER)}/{naming.MANIFEST}"',
        "full": '-"',
    }
    (site / "trouble.py").write_text(TROUBLE % f'str(path).endswith("{suffix[trouble]})')
    monkeypatch.setenv("TROUBLE", trouble)
    monkeypatch.setenv("SETUP", str(site / "trouble.py"))
    content_before = content(places[0])
    ((reason, other_reason),) = resume(tmp_path, places)[0]
    assert reason == other_reason
    assert message in reason
    assert "node 1" in reason or "rank 1" in reason
    assert "it may be intact, so nothing was changed: start again" in reason
    assert content(places[0]) == content_before
    monkeypatch.delenv("SETUP")
    assert resume(tmp_path, places)[0] == [["", ""]]
    assert all(is_whole(root, node, NEWER, SECOND) for node, root in enumerate(roots))


@pytest.mark.integration
@pytest.mark.parametrize("exchanges", [True, False], ids=["exchange", "two-renames"])
@pytest.mark.parametrize("old_save_exists", [False, True], ids=["alone", "beside-another-save"])
def test_wherever_a_start_ends_that_completes_a_save(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, old_save_exists: bool, exchanges: bool
) -> None:
    """The start ends before each operation on node 1's disk; the next start completes the save."""
    places = disks(tmp_path, 2)
    roots = [place / "save" for place in places]
    if old_save_exists:
        save(roots, NEWER, SECOND)
    for node, root in enumerate(roots):
        write(root, node, NEWER, THIRD)
    name(roots[0], 0, NEWER, THIRD)
    if not exchanges:
        monkeypatch.setattr(disk, "exchange", lambda first, other_reason: False)
    cases = []
    for call in itertools.count(1):
        case_name = f"{call:03d}"
        for place in places:
            shutil.copytree(place / "save", place / case_name)
        try:
            with crash_before(call):
                assert resume_selection.complete(places[1] / case_name, naming.final_name(NEWER), THIRD) == ""
            break
        except Crash:
            cases.append(case_name)
    assert len(cases) > 8
    refused, _ = resume(tmp_path, places, cases)
    assert refused == [["", ""]] * len(cases)
    for case_name in cases:
        for node, place in enumerate(places):
            assert tracker.tracked_step(place / case_name) == NEWER, case_name
            assert is_whole(place / case_name, node, NEWER, THIRD), case_name
            names = [path.name for path in (place / case_name).iterdir()]
            assert not any(map(naming.is_temporary, names)), (case_name, names)


# Rank 1 completes the save once rank 2 has seen it at work; two FIFOs synchronise them.
MEET = """
import os, sys
from adaptor.checkpoint import resume_selection
rank, last = sys.argv[2], os.environ["LAST_NODE"]
os.environ["GROUP_RANK"] = min(rank, last)
complete, fsync, met = resume_selection.complete, os.fsync, []

def meet():
    if not met:
        met.append(True)
        open("at-work", "wb").close()
        open("refused", "rb").close()

def bring(descriptor):
    meet()
    fsync(descriptor)

def work(*args):
    why = complete(*args)
    meet()
    return why

def come(*args):
    open("at-work", "rb").close()
    why = complete(*args)
    open("refused", "wb").close()
    return why

if rank == "1":
    resume_selection.complete, os.fsync = work, bring
if rank == "2":
    resume_selection.complete = come
"""


@pytest.mark.parametrize("is_noted", [True, False], ids=["completed", "not-whole"])
@pytest.mark.parametrize("nodes", [2, 3])
def test_ranks_that_share_another_disk_than_node_0(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, nodes: int, is_noted: bool
) -> None:
    """Both ranks see the same unfinished work on the shared disk; the first rank does the work."""
    places = [tmp_path / "node0", tmp_path / "shared", tmp_path / "shared"]
    roots = [place / "save" for place in places]
    for step, generation in ((OLDER, FIRST), (NEWER, SECOND)):
        for node, root in enumerate(roots):
            write(root, node, step, generation)
        for node, root in enumerate(roots[:2] if step == OLDER else roots[:1]):
            name(root, node, step, generation)
    if not is_noted:
        (roots[1] / naming.regular_name(NEWER, SECOND) / FOLDERS[2] / naming.MODEL_FILE).unlink()
    for fifo in ("at-work", "refused"):
        os.mkfifo(places[1] / fifo)
    (tmp_path / "meet.py").write_text(MEET)
    monkeypatch.setenv("SETUP", str(tmp_path / "meet.py"))
    monkeypatch.setenv("LAST_NODE", str(nodes - 1))
    refused, output = resume(tmp_path, places)
    assert refused == [["", "", ""]]
    assert len(output.splitlines()) == 1
    step, generation = (NEWER, SECOND) if is_noted else (OLDER, FIRST)
    for node, root in enumerate(roots):
        assert tracker.tracked_step(root) == step
        assert is_whole(root, node, step, generation)
        assert not any(naming.is_temporary(path.name) for path in root.iterdir())
    if not is_noted:
        assert f"(node{'s 1, 2' if nodes == 3 else ' 1'}: save/{naming.final_name(NEWER)}: missing)" in output


CHOSEN = """
import functools, sys
from adaptor.checkpoint import resume_check
if sys.argv[2] == "1":
    resume_check.require_intact = functools.partial(resume_check.require_intact, chosen=5)
"""


def test_a_rank_that_does_not_know_yet_that_it_restarts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without a tracker the rank still has --ckpt-step, which does not apply to a restart: rank 0 decides."""
    places = disks(tmp_path, 2)
    (places[1] / "save" / naming.TRACKER).unlink()
    (tmp_path / "chosen.py").write_text(CHOSEN)
    monkeypatch.setenv("SETUP", str(tmp_path / "chosen.py"))
    assert resume(tmp_path, places) == ([["", ""]], "")
    assert tracker.tracked_step(places[1] / "save") == OLDER
