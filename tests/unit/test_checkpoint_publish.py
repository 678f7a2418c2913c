from __future__ import annotations

import errno
import functools
import os
import shutil
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from adaptor.checkpoint import disk, left_overs, manifest, publish, regular_folder, tracker
from adaptor.checkpoint.hashing import HashingFile
from adaptor.checkpoint.manifest import Manifest
from adaptor.checkpoint.tracker import locked
from adaptor.controller.save_attempts import PublishTarget
from adaptor.errors import CheckpointError
from adaptor.protocol import naming
from adaptor.protocol.naming import FileEntry
from tests.unit.threads import LONG_S, Thread

STEP = 20
FURTHER = "latest_model.pt"  # a tracker that a framework reads first
OLDER = 10


class Crash(BaseException):
    """The process dies: nothing after this point happens."""


class _Clock:
    """Counts the system calls, and crashes before call number `at`.

    thread  the thread whose calls count; threads of other tests may run, too
    """

    def __init__(self) -> None:
        self.armed = False
        self.thread = 0
        self.at = 0
        self.calls: list[str] = []

    def tick(self, operation: str) -> None:
        if not self.armed or threading.get_ident() != self.thread:
            return
        self.calls.append(operation)
        if len(self.calls) == self.at:
            self.armed = False
            raise Crash(operation)


CLOCK = _Clock()
WATCHED = ("os.rename", "os.remove", "os.rmdir", "os.mkdir", "os.listdir", "os.scandir", "shutil.rmtree")


def _heard(event: str, args: tuple[Any, ...]) -> None:
    if event in WATCHED or (event == "open" and "r" not in str(args[1])):
        CLOCK.tick(event)


# Audit hooks see the calls of pathlib, os and shutil. They cannot be removed; this hook is idle unless armed.
sys.addaudithook(_heard)


@contextmanager
def crash_before(call: int) -> Iterator[_Clock]:
    """Crash before the `call`th operation on the disk; 0 only counts."""
    CLOCK.thread, CLOCK.at, CLOCK.calls = threading.get_ident(), call, []
    CLOCK.armed = True
    try:
        yield CLOCK
    finally:
        CLOCK.armed = False


@pytest.fixture(autouse=True)
def _watch_calls_without_events(monkeypatch: pytest.MonkeyPatch) -> None:
    """fsync and the exchange of two names raise no audit event."""
    fsync, exchange = os.fsync, disk.exchange

    def watched_fsync(descriptor: int) -> None:
        CLOCK.tick("os.fsync")
        fsync(descriptor)

    def watched_exchange(first: Path, second: Path) -> bool:
        CLOCK.tick("renameat2")
        return exchange(first, second)

    monkeypatch.setattr(os, "fsync", watched_fsync)
    monkeypatch.setattr(disk, "exchange", watched_exchange)


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """A folder with a published checkpoint of step 10."""
    publish.publish(tmp_path, OLDER, write(publish.prepare(tmp_path, OLDER), b"older"), {}, 2)
    return tmp_path


def write(folder: Path, content: bytes, attempt: int | None = None) -> list[FileEntry]:
    entries = []
    for name in ("mp_rank_00/model.pt", "mp_rank_01/model.pt"):
        (folder / name).parent.mkdir(exist_ok=True)
        with HashingFile(folder / FileEntry(name, 0, None, attempt).draft) as file:
            file.write(content + name.encode())
        entries.append(file.entry(name, attempt))
    return entries


def dump(root: Path, content: bytes = b"new", generation: str = "") -> bool:
    entries = write(publish.prepare(root, STEP, generation=generation), content)
    return publish.publish(root, STEP, entries, {"dense": {"0": 1}}, 2, generation)


def content_of(root: Path, step: int) -> bytes:
    return (root / naming.final_name(step) / "mp_rank_00/model.pt").read_bytes()


def tracked(root: Path) -> str:
    return (root / naming.TRACKER).read_text()


def check_promises(root: Path) -> None:
    """Assert what must hold at any time, whatever crashed before."""
    assert content_of(root, OLDER) == b"oldermp_rank_00/model.pt"
    assert manifest.defects(root / naming.final_name(OLDER)) == []
    named = int(tracked(root))
    assert named in (OLDER, STEP)
    assert named_is_there(root, named)
    if (root / naming.final_name(STEP)).is_dir() and is_sound(root):
        assert manifest.defects(root / naming.final_name(STEP)) == []


def named_is_there(root: Path, named: int) -> bool:
    return (root / naming.final_name(named)).is_dir()


def is_sound(root: Path) -> bool:
    """Return whether the adaptor published the folder with the final name."""
    return True


def survive_every_crash(
    copy: Callable[[], Path], act: Callable[[Path], object], recover: Callable[[Path], object]
) -> list[str]:
    """Crash `act` before each of its operations, on a fresh copy each time; return the operations.

    The promises must hold after the crash and after `recover`, which must leave no temporary files.
    """
    copied_root = copy()
    with crash_before(0) as clock:
        act(copied_root)
    operations = clock.calls
    for call, operation in enumerate(operations, 1):
        copied_root = copy()
        with pytest.raises(Crash), crash_before(call):
            act(copied_root)
        check_promises(copied_root)
        recover(copied_root)
        check_promises(copied_root)
        assert left_over(copied_root) == [], f"crash before {operation}, call {call}"
    return operations


def left_over(root: Path) -> list[str]:
    expected = {naming.TRACKER, FURTHER, naming.final_name(OLDER), naming.final_name(STEP)}
    return sorted(path.name for path in root.iterdir() if path.name not in expected)


@pytest.fixture
def copies(tmp_path: Path, tmp_path_factory: pytest.TempPathFactory) -> Callable[[], Path]:
    return lambda: Path(shutil.copytree(tmp_path, tmp_path_factory.mktemp("copy") / "root"))


def test_a_dump_gets_its_name_and_the_tracker_names_it(root: Path) -> None:
    folder = publish.prepare(root, STEP)
    write(folder, b"of an attempt that was abandoned", 2)
    entries = write(folder, b"new", 3)
    (folder / "mp_rank_07").mkdir()
    assert publish.publish(root, STEP, entries, {"dense": {"0": 1}}, 2)
    final = root / naming.final_name(STEP)
    assert sorted(p.relative_to(final).as_posix() for p in final.rglob("*") if p.is_file()) == [
        "mp_rank_00/model.pt",
        "mp_rank_01/model.pt",
        naming.MANIFEST,
    ]
    assert not (final / "mp_rank_07").exists()
    assert manifest.defects(final) == []
    read = manifest.read(final)
    assert (read.step, read.world_size, read.groups) == (STEP, 2, {"dense": {"0": 1}})
    assert tracked(root) == "20"
    assert left_over(root) == []


def test_an_attempt_that_was_given_up_removes_its_files_meanwhile(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = publish.prepare(root, STEP)
    given_up, written = write(folder, b"old", attempt=1), write(folder, b"new", attempt=2)
    listed = disk.files

    def then_removed(place: Path) -> Iterator[Path]:
        listing = list(listed(place))
        for entry in given_up:
            (folder / entry.draft).unlink(missing_ok=True)
        return iter(listing)

    monkeypatch.setattr(disk, "files", then_removed)
    publish.publish(root, STEP, written, {}, 2)
    assert tracked(root) == str(STEP)
    assert content_of(root, STEP).startswith(b"new")


def test_publishing_twice_is_publishing_once(root: Path) -> None:
    entries = write(publish.prepare(root, STEP), b"new")
    assert publish.publish(root, STEP, entries, {}, 2)
    manifest_before = (root / naming.final_name(STEP) / naming.MANIFEST).read_bytes()
    assert not publish.publish(root, STEP, entries, {}, 2)
    assert (root / naming.final_name(STEP) / naming.MANIFEST).read_bytes() == manifest_before
    assert tracked(root) == "20"


def recover_by_a_new_dump(root: Path) -> None:
    dump(root)
    assert tracked(root) == "20"
    left_overs.clean(root)


def recover_by_a_new_save(root: Path) -> None:
    left_overs.clean(root)
    if not tracker.is_complete(root, STEP):
        (root / naming.regular_name(STEP)).mkdir()
        write(root / naming.regular_name(STEP), b"again")
    regular_folder.publish_regular(root, STEP)
    tracker.advance(root, STEP)
    assert tracked(root) == "20"


def test_no_crash_breaks_a_promise(root: Path, copies: Callable[[], Path]) -> None:
    entries = write(publish.prepare(root, STEP), b"new", 3)
    operations = survive_every_crash(
        copies,
        lambda crashed_root: publish.publish(crashed_root, STEP, entries, {}, 2),
        recover_by_a_new_dump,
    )
    assert {"os.fsync", "os.rename", "open"} <= set(operations)


def test_a_further_tracker_is_never_behind_the_tracker(root: Path, copies: Callable[[], Path]) -> None:
    first, *other_entries = write(publish.prepare(root, STEP), b"new", 3)
    entries = [replace(first, tracker=FURTHER), *other_entries]

    def check(crashed_root: Path) -> None:
        if tracked(crashed_root) == str(STEP):
            assert (crashed_root / FURTHER).read_bytes() == content_of(crashed_root, STEP)

    def publish_it(crashed_root: Path) -> None:
        publish.publish(crashed_root, STEP, entries, {}, 2)

    def recover(crashed_root: Path) -> None:
        check(crashed_root)
        publish_it(crashed_root)
        assert tracked(crashed_root) == str(STEP)
        check(crashed_root)

    survive_every_crash(copies, publish_it, recover)
    publish_it(root)
    (root / naming.TRACKER).write_text("30")  # of a later step, which owns the further tracker
    (root / FURTHER).write_bytes(b"of step 30")
    with pytest.raises(CheckpointError, match="so step 20 would not be resumed from"):
        publish_it(root)
    assert (root / FURTHER).read_bytes() == b"of step 30"


@pytest.mark.parametrize("name", ["../up", "folder/name", "/absolute", ""])
def test_a_further_tracker_outside_of_the_save_folder_is_refused(root: Path, name: str) -> None:
    first, *other_entries = write(publish.prepare(root, STEP), b"new")
    with pytest.raises(CheckpointError, match="is no name of a file in the save folder"):
        publish.publish(root, STEP, [replace(first, tracker=name), *other_entries], {}, 2)


def test_publishing_goes_on_where_it_crashed(root: Path, copies: Callable[[], Path]) -> None:
    entries = write(publish.prepare(root, STEP), b"new", 3)

    def act(crashed_root: Path) -> None:
        publish.publish(crashed_root, STEP, entries, {}, 2)

    survive_every_crash(copies, act, act)


def test_no_crash_while_preparing_breaks_a_promise(root: Path, copies: Callable[[], Path]) -> None:
    write(publish.prepare(root, STEP), b"stale")
    survive_every_crash(
        copies, lambda crashed_root: publish.prepare(crashed_root, STEP), recover_by_a_new_dump
    )


def test_no_crash_breaks_a_promise_when_the_folder_is_there_already(
    root: Path, copies: Callable[[], Path]
) -> None:
    dump(root)
    (root / naming.TRACKER).write_text("10")
    entries = write(publish.prepare(root, STEP), b"new")
    survive_every_crash(
        copies,
        lambda crashed_root: publish.publish(crashed_root, STEP, entries, {}, 2),
        recover_by_a_new_dump,
    )


def test_no_crash_breaks_a_promise_beside_an_incomplete_folder(
    root: Path, copies: Callable[[], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    (root / naming.final_name(STEP)).mkdir()
    entries = write(publish.prepare(root, STEP), b"new")

    def recover(crashed_root: Path) -> None:
        recover_by_a_new_dump(crashed_root)
        (aside,) = crashed_root.glob("aside*")
        shutil.rmtree(aside)

    def is_sound(root: Path) -> bool:
        """Return whether the final name holds a checkpoint with a manifest; an unprotected save may have left
        other files.
        """
        return (root / naming.final_name(STEP) / naming.MANIFEST).exists()

    monkeypatch.setattr(sys.modules[__name__], "is_sound", is_sound)
    survive_every_crash(
        copies, lambda crashed_root: publish.publish(crashed_root, STEP, entries, {}, 2), recover
    )


@pytest.mark.parametrize("can_exchange", [True, False])
def test_no_crash_breaks_a_regular_save(
    root: Path, copies: Callable[[], Path], monkeypatch: pytest.MonkeyPatch, can_exchange: bool
) -> None:
    if not can_exchange:
        monkeypatch.setattr(disk, "exchange", lambda left, right: False)
    (root / naming.regular_name(STEP)).mkdir()
    write(root / naming.regular_name(STEP), b"regular")
    survive_every_crash(
        copies, lambda crashed_root: regular_folder.publish_regular(crashed_root, STEP), recover_by_a_new_save
    )


@pytest.mark.parametrize("can_exchange", [True, False])
def test_a_newer_save_of_the_same_step_replaces_the_older_one(
    root: Path, copies: Callable[[], Path], monkeypatch: pytest.MonkeyPatch, can_exchange: bool
) -> None:
    if not can_exchange:
        monkeypatch.setattr(disk, "exchange", lambda left, right: False)
        # For a moment no folder bears the name; clean() ends that moment.
        monkeypatch.setattr(sys.modules[__name__], "named_is_there", lambda root, named: True)
    dump(root, b"first")
    (root / naming.regular_name(STEP)).mkdir()
    write(root / naming.regular_name(STEP), b"second")

    def recover(crashed_root: Path) -> None:
        left_overs.clean(crashed_root)
        assert content_of(crashed_root, STEP) in (b"firstmp_rank_00/model.pt", b"secondmp_rank_00/model.pt")

    survive_every_crash(
        copies, lambda crashed_root: regular_folder.publish_regular(crashed_root, STEP), recover
    )
    regular_folder.publish_regular(root, STEP)
    assert content_of(root, STEP) == b"secondmp_rank_00/model.pt"
    assert left_over(root) == []


def test_two_names_are_exchanged_where_the_filesystem_can(tmp_path: Path) -> None:
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
        (tmp_path / name / name).touch()
    if not disk.exchange(tmp_path / "a", tmp_path / "b"):
        pytest.skip("this filesystem cannot exchange two names")
    assert (tmp_path / "a" / "b").exists()
    assert (tmp_path / "b" / "a").exists()
    with pytest.raises(OSError, match="No such file"):
        disk.exchange(tmp_path / "a", tmp_path / "missing")


def test_a_complete_checkpoint_of_the_framework_wins(root: Path) -> None:
    (root / naming.final_name(STEP)).mkdir()
    write(root / naming.final_name(STEP), b"framework")
    (root / naming.TRACKER).write_text(str(STEP))
    assert not dump(root)
    assert content_of(root, STEP) == b"frameworkmp_rank_00/model.pt"
    assert left_over(root) == []


def test_a_complete_checkpoint_of_an_earlier_run_is_moved_aside(root: Path) -> None:
    """Whatever its time: the clock may have been changed in between."""
    assert dump(root, b"earlier")
    entries = write(publish.prepare(root, STEP, generation="second"), b"now")
    (root / naming.TRACKER).write_text(str(OLDER))
    assert publish.publish(root, STEP, entries, {}, 2, "second")
    assert content_of(root, STEP).startswith(b"now")
    assert [path.name for path in root.glob("aside*")] == [naming.aside_name(STEP, 1)]
    entries = write(publish.prepare(root, STEP, generation="second"), b"again")
    assert not publish.publish(root, STEP, entries, {}, 2, "second")
    assert content_of(root, STEP).startswith(b"now")


def test_a_regular_save_of_the_same_generation_wins(root: Path) -> None:
    (root / naming.regular_name(STEP, "second")).mkdir()
    write(root / naming.regular_name(STEP, "second"), b"regular")
    regular_folder.publish_regular(root, STEP, "second")
    entries = write(publish.prepare(root, STEP, generation="second"), b"now")
    assert not publish.publish(root, STEP, entries, {}, 2, "second")
    assert content_of(root, STEP).startswith(b"regular")
    assert list(root.glob("aside*")) == []


def test_an_incomplete_one_is_moved_aside_and_kept(root: Path) -> None:
    for _ in range(2):
        (root / naming.final_name(STEP) / "mp_rank_00").mkdir(parents=True)
        (root / naming.final_name(STEP) / "mp_rank_00" / "model.pt").write_bytes(b"half")
        assert dump(root)
        for path in (root / naming.final_name(STEP)).rglob("*.pt"):
            path.unlink()
        (root / naming.TRACKER).write_text("10")
        shutil.rmtree(root / naming.final_name(STEP))
    assert sorted(p.name for p in root.glob("aside*")) == ["aside_iter_0000020.1", "aside_iter_0000020.2"]


@pytest.mark.parametrize(
    ("tracker_before", "tracker_after"),
    [("5", "20"), ("20", "20"), ("release", "20"), ("", "20"), ("x7", "20")],
)
def test_the_tracker_never_goes_backwards(root: Path, tracker_before: str, tracker_after: str) -> None:
    (root / naming.TRACKER).write_text(tracker_before)
    dump(root)
    assert tracked(root) == tracker_after


@pytest.mark.parametrize("tracker_before", ["30", " 30\n"])
def test_a_tracker_of_a_later_step_is_not_touched_and_said(root: Path, tracker_before: str) -> None:
    (root / naming.TRACKER).write_text(tracker_before)
    with pytest.raises(CheckpointError, match="names step 30, so step 20 would not be resumed from"):
        dump(root)
    assert tracked(root) == tracker_before


def test_a_missing_tracker_is_made(tmp_path: Path) -> None:
    dump(tmp_path / "new" / "root")
    assert tracked(tmp_path / "new" / "root") == "20"


@pytest.mark.parametrize("damage", ["missing", "short", "none"])
def test_damaged_parts_are_not_published(root: Path, damage: str) -> None:
    folder = publish.prepare(root, STEP)
    entries = write(folder, b"new", 1)
    if damage == "missing":
        (folder / entries[1].draft).unlink()
    elif damage == "short":
        (folder / entries[1].draft).write_bytes(b"")
    else:
        entries = []
    with pytest.raises(CheckpointError) as caught:
        publish.publish(root, STEP, entries, {}, 2)
    assert "\n" not in str(caught.value)
    check_promises(root)
    assert tracked(root) == "10"


def test_a_full_disk_is_one_line(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = publish.prepare(root, STEP)
    entries = write(folder, b"new")

    def full(descriptor: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(CheckpointError, match="No space left on device"):
        publish.publish(root, STEP, entries, {}, 2)


def test_prepare_begins_with_an_empty_folder(root: Path) -> None:
    write(publish.prepare(root, STEP), b"stale")
    assert list(publish.prepare(root, STEP).iterdir()) == []


def test_clean_leaves_checkpoints_and_unknown_files(root: Path) -> None:
    for name in (
        "iter_0000021_tmp",
        "iter_0000022_saving",
        "iter_0000023",
        "aside_iter_0000024.1",
        "mine_tmp",
    ):
        (root / name).mkdir()
        (root / name / "file").touch()
    assert left_overs.clean(root) == ["iter_0000021_tmp", "iter_0000022_saving"]
    assert sorted(path.name for path in root.iterdir()) == [
        "aside_iter_0000024.1",
        "iter_0000010",
        "iter_0000023",
        naming.TRACKER,
        "mine_tmp",
    ]
    assert left_overs.clean(root / "missing") == []


def test_both_sides_of_a_cut_network_publish(root: Path) -> None:
    """Of two concurrent saves of a step one is published, and the folder of the other is removed."""
    published = {}
    sides = [write(publish.prepare(root, STEP, term, 0, "ours"), b"new") for term in (0, 1)]

    def save(term: int) -> None:
        published[term] = publish.publish(root, STEP, sides[term], {}, 2, "ours", term)

    with Thread(save, 0), Thread(save, 1):
        pass
    assert sorted(published.values()) == [False, True]
    assert tracked(root) == str(STEP)
    check_promises(root)
    assert left_over(root) == []


def test_an_agent_that_was_given_up_comes_back_late(root: Path) -> None:
    """The successor of a late agent has a folder of its own, without the files of the late agent."""
    entries = write(publish.prepare(root, STEP, number=1, generation="ours"), b"new")
    late = publish.prepare(root, STEP, generation="ours")
    write(late, b"late")
    assert publish.publish(root, STEP, entries, {}, 2, "ours", number=1)
    check_promises(root)
    assert left_overs.clean(root, 0, "ours") == [late.name]


def test_whoever_publishes_may_be_lost_anywhere(root: Path, copies: Callable[[], Path]) -> None:
    """A second agent takes over, may be lost as well, and a third agent takes over from either."""
    entries = write(publish.prepare(root, STEP), b"new", 3)

    def act(crashed_root: Path, number: int) -> None:
        publish.publish(crashed_root, STEP, entries, {}, 2, number=number, written=0)
        left_overs.clean(crashed_root)

    third = functools.partial(act, number=2)
    for first in (0, 1):
        assert "os.fsync" in survive_every_crash(copies, functools.partial(act, number=first), third)


def test_an_agent_that_stopped_while_it_published_comes_back_late(root: Path) -> None:
    """Its successor's folder changes neither by name nor through an open file."""
    late = publish.prepare(root, STEP, generation="ours")
    entries = write(late, b"new")
    with (late / naming.MANIFEST).open("wb") as file:
        assert publish.publish(root, STEP, entries, {}, 2, "ours", number=2, written=0)
        file.write(b"late")
    with pytest.raises(FileNotFoundError):
        disk.write(late, naming.MANIFEST, b"late")
    check_promises(root)
    assert left_over(root) == []
    assert manifest.defects(root / naming.final_name(STEP)) == []


def test_a_late_publisher_finds_the_published_checkpoint(root: Path) -> None:
    entries = write(publish.prepare(root, STEP, generation="ours"), b"new")
    assert publish.publish(root, STEP, entries, {}, 2, "ours", number=1, written=0)
    assert not publish.publish(root, STEP, entries, {}, 2, "ours", number=2, written=0)
    assert not publish.publish(root, STEP, entries, {}, 2, "ours")
    check_promises(root)
    assert left_over(root) == []


def test_many_sides_publish_different_steps(root: Path) -> None:
    """The tracker never goes backwards, and ends at the newest step."""
    steps = range(STEP, STEP + 6)
    entries = {step: write(publish.prepare(root, step, step, 0, "ours"), b"new") for step in steps}
    steps_seen: list[int] = []
    event = threading.Event()

    def look() -> None:
        while not event.is_set():
            steps_seen.append(int(tracked(root)))

    with ExitStack() as stack:
        stack.enter_context(Thread(look))
        stack.callback(event.set)
        for step in steps:
            stack.enter_context(Thread(publish.publish, root, step, entries[step], {}, 2, "ours", step))
    assert steps_seen == sorted(steps_seen)
    assert tracked(root) == str(steps[-1])
    assert [naming.step_of(path.name) for path in sorted(root.glob("iter_*"))] == [OLDER, *steps]


def test_a_newer_step_of_this_run_stays(root: Path) -> None:
    entries = write(publish.prepare(root, STEP, 1, 0, "ours"), b"ours")
    theirs = write(publish.prepare(root, STEP + 1, generation="ours"), b"theirs")
    assert publish.publish(root, STEP + 1, theirs, {}, 2, "ours")
    assert publish.publish(root, STEP, entries, {}, 2, "ours", 1)
    assert tracked(root) == str(STEP + 1)
    assert content_of(root, STEP).startswith(b"ours")


def _leftovers_of_a_turn(root: Path) -> list[Path]:
    draft, lock = root / f"{naming.TRACKER}.0badf00d.tmp", root / naming.LOCK
    draft.write_text("99")
    lock.touch(0o600)
    return [draft, lock]


def test_leftovers_of_a_process_that_died_in_its_turn_are_removed(root: Path) -> None:
    leftovers = _leftovers_of_a_turn(root)
    assert dump(root)
    assert tracked(root) == str(STEP)
    assert not any(path.exists() for path in leftovers)
    leftovers = _leftovers_of_a_turn(root)
    left_overs.clean(root, 1)
    assert not any(path.exists() for path in leftovers)


def test_nothing_is_removed_in_the_turn_of_another(root: Path) -> None:
    with locked(root):
        (draft, lock) = _leftovers_of_a_turn(root)
        left_overs.clean(root, 1)
        assert draft.exists()
        assert lock.exists()
    assert not lock.exists()


def test_one_side_does_not_clean_up_after_the_other(root: Path) -> None:
    names = ("iter_0000021_tmp", "iter_0000021_tmp1", "iter_0000021_tmp2", "iter_0000022_saving")
    for name in names:
        (root / name).mkdir()
    assert left_overs.clean(root, 1) == ["iter_0000021_tmp1"]
    assert left_overs.clean(root, 0) == ["iter_0000021_tmp", "iter_0000022_saving"]
    assert left_overs.clean(root) == ["iter_0000021_tmp2"]


def test_a_disk_that_hung_wakes_in_a_later_generation(root: Path) -> None:
    """Its old requests do not touch the files being written now."""
    new_names = [naming.temporary_name(21, generation="new"), naming.regular_name(21, "new")]
    for name in new_names:
        (root / name).mkdir()
        (root / name / "shard.pt").touch()
    publish.prepare(root, 21, generation="old")
    with pytest.raises(CheckpointError, match="nothing was written"):
        publish.publish(root, 21, (), {}, 2, "old")
    assert left_overs.clean(root, 0, "old") == [naming.temporary_name(21, generation="old")]
    assert all((root / name / "shard.pt").exists() for name in new_names)


def _regular(root: Path, step: int, generation: str) -> Path:
    regular_folder.prepare_regular(root, step, generation)
    folder = root / naming.regular_name(step, generation)
    (folder / "shard.pt").write_bytes(b"half")
    return folder


@pytest.mark.robustness(
    "B8",
    "a regular save is half written when last words are to be",
    "it is removed first, its room is free at once",
)
def test_regular_saves_that_cannot_be_completed_make_room(root: Path) -> None:
    """A worker may keep writing: its open files use no disk space beyond their later writes."""
    folder = _regular(root, STEP, "mine")
    with (folder / "shard.pt").open("r+b") as still_open:
        prepared = publish.prepare(root, STEP, generation="mine", first=True)
        assert still_open.seek(0, os.SEEK_END) == 0
    assert left_over(root) == [prepared.name]
    with pytest.raises(CheckpointError, match="missing, so the save of step 20 cannot be completed"):
        regular_folder.publish_regular(root, STEP, "mine")


def test_a_later_incident_of_a_job_that_was_recovered_makes_room_too(root: Path) -> None:
    """The first folder of the later incident has a higher number than those of earlier incidents."""
    folder = _regular(root, STEP, "mine")
    target = PublishTarget({0, 1}, first=2)
    assert target.is_first
    publish.prepare(root, STEP, 0, target.number, "mine", first=target.is_first)
    assert not folder.exists()
    target.hand_over()
    assert not target.is_first


def test_regular_saves_of_others_stay(root: Path) -> None:
    """Saves of another generation stay, and saves that another controller's rank 0 may complete."""
    folders = [_regular(root, STEP, generation) for generation in ("mine", "another")]
    publish.prepare(root, STEP, term=1, generation="mine")
    publish.prepare(root, STEP, number=1, generation="mine")
    publish.prepare(root, STEP, generation="third", first=True)
    assert all((folder / "shard.pt").exists() for folder in folders)


def test_a_regular_save_that_is_being_published_is_left_to_its_publisher(root: Path) -> None:
    folder = _regular(root, STEP, "mine")
    with locked(root):
        publish.prepare(root, STEP, generation="mine", first=True)
    assert (folder / "shard.pt").exists()


def test_a_published_checkpoint_without_a_tracker_is_found(root: Path) -> None:
    """The publisher died before it replaced the tracker."""
    with pytest.raises(CheckpointError, match="no checkpoint of step 20"):
        publish.find(root, STEP, "mine")
    assert dump(root, generation="mine")
    (root / naming.TRACKER).write_text("10")
    with pytest.raises(CheckpointError, match="no checkpoint of step 20, or a later one, of this run"):
        publish.find(root, STEP, "another")
    assert tracked(root) == "10"
    assert publish.find(root, 15, "mine") == STEP
    assert tracked(root) == str(STEP)


def test_last_words_of_an_earlier_step_are_found_and_no_regular_save(root: Path) -> None:
    """Ranks had gone back to the step; a regular save of the step would lose the later steps."""
    (root / naming.regular_name(STEP, "mine")).mkdir()
    write(root / naming.regular_name(STEP, "mine"), b"regular")
    regular_folder.publish_regular(root, STEP, "mine")
    with pytest.raises(CheckpointError, match="no checkpoint of step 22"):
        publish.find(root, STEP + 2, "mine")
    entries = write(publish.prepare(root, STEP + 1, generation="mine"), b"new")
    assert publish.publish(root, STEP + 1, entries, {"dense": [0, 1]}, 2, "mine")
    (root / naming.TRACKER).write_text("10")
    with pytest.raises(CheckpointError, match="no checkpoint of step 22"):
        publish.find(root, STEP + 2, "another")
    assert publish.find(root, STEP + 2, "mine") == STEP + 1
    assert tracked(root) == str(STEP + 1)


def test_a_regular_save_that_is_not_there_is_one_line(root: Path) -> None:
    with pytest.raises(CheckpointError, match="iter_0000020_saving: missing"):
        regular_folder.publish_regular(root, STEP)


def test_a_regular_save_knows_that_it_is_complete_before_the_tracker_says_so(root: Path) -> None:
    (root / naming.regular_name(STEP)).mkdir()
    write(root / naming.regular_name(STEP), b"regular")
    regular_folder.publish_regular(root, STEP)
    regular_folder.publish_regular(root, STEP)
    assert tracked(root) == "10"
    assert tracker.is_complete(root, STEP)
    assert not dump(root)
    assert content_of(root, STEP) == b"regularmp_rank_00/model.pt"
    assert manifest.read(root / naming.final_name(STEP)).files[0] == FileEntry(
        "mp_rank_00/model.pt", 26, None
    )
    assert isinstance(manifest.read(root / naming.final_name(STEP)), Manifest)


def test_last_words_do_not_wait_for_a_disk_that_removes_slowly(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = _regular(root, STEP, "mine")
    discard, answers, discarded = disk.discard, threading.Event(), threading.Event()

    def slow(path: Path) -> None:
        answers.wait()
        discard(path)
        discarded.set()

    monkeypatch.setattr(disk, "discard", slow)
    monkeypatch.setattr(left_overs, "REMOVAL_WAIT_S", 0.01)
    prepared = publish.prepare(root, STEP, generation="mine", first=True)
    assert not folder.exists(), "whoever would publish it finds nothing"
    assert len(left_over(root)) == 2, "it is still there"
    answers.set()
    discarded.wait()
    assert left_over(root) == [prepared.name]


class SlowDisk:
    """A disk that removes nothing until `answers` is set."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.answers = threading.Event()
        remove = os.unlink

        def unlink(*args: Any, **kwargs: Any) -> None:
            if threading.current_thread() is not threading.main_thread():
                self.answers.wait(LONG_S)
            elif Path(args[0]).name.startswith("shard"):
                pytest.fail(f"somebody waits until {args[0]} is removed")
            remove(*args, **kwargs)

        monkeypatch.setattr(os, "unlink", unlink)
        for patience in ("REMOVAL_WAIT_S", "_LEFT_OVER_S"):
            monkeypatch.setattr(left_overs, patience, 0.01)

    def answer(self) -> None:
        """Return when all removals are done."""
        self.answers.set()
        for thread in threading.enumerate():
            if thread.name == "ttp-remove":
                thread.join(LONG_S)


@pytest.fixture
def slow_disk(monkeypatch: pytest.MonkeyPatch) -> SlowDisk:
    return SlowDisk(monkeypatch)


def _large(folder: Path) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "shard.pt").write_bytes(b"of a terabyte")
    return folder


SLOW = ("a folder of a terabyte is to be removed, on a slow disk", "nobody waits for it: the save is made")


@pytest.mark.robustness("B8", *SLOW)
@pytest.mark.parametrize("times", [1, 2])
def test_last_words_do_not_wait_until_a_stale_folder_is_removed(
    root: Path, slow_disk: SlowDisk, times: int
) -> None:
    for _ in range(times):
        _large(root / naming.temporary_name(STEP, generation="mine"))
        prepared = publish.prepare(root, STEP, generation="mine")
        assert list(prepared.iterdir()) == []
    slow_disk.answer()
    assert left_over(root) == [prepared.name]


@pytest.mark.robustness("B8", *SLOW)
def test_last_words_that_are_there_already_are_published_at_once(root: Path, slow_disk: SlowDisk) -> None:
    dump(root, generation="mine")
    prepared = publish.prepare(root, STEP, generation="mine")
    entries = write(_large(prepared), b"again")
    assert not publish.publish(root, STEP, entries, {}, 2, "mine")
    slow_disk.answer()
    assert left_over(root) == []


@pytest.mark.robustness("B8", *SLOW)
@pytest.mark.parametrize("exchanges", [True, False], ids=["renameat2", "as NFS"])
def test_a_regular_save_does_not_wait_until_an_older_version_is_removed(
    root: Path, slow_disk: SlowDisk, monkeypatch: pytest.MonkeyPatch, exchanges: bool
) -> None:
    if not exchanges:
        monkeypatch.setattr(disk, "exchange", lambda left, right: False)
    for content in (b"older", b"newer"):
        folder = _large(root / naming.regular_name(STEP))
        (folder / "other.pt").write_bytes(content)
        _large(root / naming.replaced_name(STEP))
        regular_folder.publish_regular(root, STEP)
    assert (root / naming.final_name(STEP) / "other.pt").read_bytes() == b"newer"
    slow_disk.answer()
    if not exchanges:
        assert left_over(root) == []


@pytest.mark.robustness("B8", *SLOW)
def test_a_start_does_not_wait_for_ever_until_an_earlier_job_s_folders_are_removed(
    root: Path, slow_disk: SlowDisk, capsys: pytest.CaptureFixture[str]
) -> None:
    _large(root / naming.temporary_name(STEP, generation="earlier"))
    assert left_overs.clean(root) == []
    assert (
        f"[ttp] {root}: what earlier jobs have left there is still being removed" in capsys.readouterr().out
    )
    prepared = publish.prepare(root, STEP, generation="mine")
    slow_disk.answer()
    assert left_over(root) == [prepared.name]


def test_a_regular_save_without_a_file_is_none(root: Path) -> None:
    regular_folder.prepare_regular(root, STEP)
    with pytest.raises(CheckpointError, match="nothing was written"):
        regular_folder.publish_regular(root, STEP)
    (root / naming.final_name(STEP)).mkdir()
    disk.write(root / naming.final_name(STEP), naming.MANIFEST, Manifest.now(STEP, [], {}, 0).encode())
    assert not tracker.is_complete(root, STEP)


def test_temporary_files_of_a_server_are_no_part_of_a_regular_save(root: Path) -> None:
    folder = _regular(root, STEP, "mine")
    (folder / ".nfs0001").touch()
    regular_folder.sync_regular(root, STEP, "mine")
    regular_folder.publish_regular(root, STEP, "mine")
    entries = manifest.read(root / naming.final_name(STEP)).files
    assert [entry.path for entry in entries] == ["shard.pt"]


def test_an_older_version_is_removed_after_the_turn(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    _regular(root, STEP, "")
    regular_folder.publish_regular(root, STEP)
    _regular(root, STEP, "")
    remove = disk.remove

    def without_the_turn(path: Path) -> None:
        with locked(root, patience_s=0):
            remove(path)

    with monkeypatch.context() as patch:
        patch.setattr(disk, "remove", without_the_turn)
        regular_folder.publish_regular(root, STEP)
    assert left_over(root) == []


@pytest.mark.parametrize("code", [errno.EOPNOTSUPP, errno.ENOSYS, errno.EINVAL, errno.EPERM])
def test_no_save_is_lost_for_its_rights(root: Path, code: int, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*args: object, **kwargs: object) -> None:
        raise OSError(code, os.strerror(code))

    entries = write(publish.prepare(root, STEP), b"new")
    monkeypatch.setattr(Path, "chmod", refuse)
    monkeypatch.setattr(os, "chmod", refuse)
    assert publish.publish(root, STEP, entries, {}, 2)
    assert tracker.is_complete(root, STEP)
