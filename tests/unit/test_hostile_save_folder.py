"""Whatever lies in a save folder: no start and no save crashes or waits; the newest intact one is used."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import json
import os
import shutil
import socket
import stat
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from adaptor.checkpoint import left_overs, manifest, publish, regular_folder, tracker
from adaptor.checkpoint.hashing import HashingFile
from adaptor.checkpoint.tracker import locked
from adaptor.errors import CheckpointError, ResumeError
from adaptor.protocol import naming
from adaptor.protocol.naming import FileEntry
from tests.unit.launching import said
from tests.unit.test_resume_check import (
    FILES,
    NEWER,
    OLDER,
    content,
    folder,
    pristine,
    resume,
    root,
)
from tests.waiting import captured

__all__ = ["pristine", "root"]  # fixtures

pytestmark = pytest.mark.usefixtures("group_of_one")


OTHER_USER = 65534
IN_MANIFEST = "a manifest that no sound writer makes"
SET_ASIDE = "it is set aside in one line, the newest intact checkpoint is used"
needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="another user's files can only be made by root")


def assert_goes_back(root: Path) -> str:
    """Assert that the newest checkpoint was set aside and the older one used; return the reported line."""
    (line,) = resume(root).splitlines()
    assert line.isprintable()
    assert len(line) < 5000
    assert line.endswith(f"the newest intact checkpoint is step {OLDER}")
    assert tracker.tracked_step(root) == OLDER
    assert os.path.lexists(root / naming.aside_name(NEWER, 1))
    assert resume(root) == ""
    return line


def change_manifest(root: Path, change: Callable[[dict[str, Any]], object]) -> None:
    path = root / folder(NEWER) / naming.MANIFEST
    body = json.loads(path.read_text())
    change(body)
    path.write_text(json.dumps(body))


def _file(body: dict[str, Any]) -> dict[str, Any]:
    return dict(body["files"][FILES[0]])


@pytest.mark.robustness("B3", IN_MANIFEST, SET_ASIDE)
@pytest.mark.parametrize(
    "text",
    [
        '"bytes": 1e999',
        '"bytes": -1',
        '"bytes": 1.5',
        '"bytes": true',
        '"bytes": "35"',
        '"bytes": null',
        '"bytes": NaN',
        '"bytes": -Infinity',
        f'"bytes": {"9" * 5000}',
        f'"bytes": {"9" * 30}',
        f'"bytes": {"[" * 100_000}',
    ],
)
def test_a_size_that_is_none(root: Path, text: str) -> None:
    path = root / folder(NEWER) / naming.MANIFEST
    text_before = path.read_text()
    size = json.loads(text_before)["files"][FILES[0]]["bytes"]
    path.write_text(text_before.replace(f'"bytes": {size}', text, 1))
    assert "is not a manifest" in assert_goes_back(root)


@pytest.mark.robustness("B3", IN_MANIFEST, SET_ASIDE)
@pytest.mark.parametrize("step", ["Infinity", "NaN", "1e999", "-20", "20.0", '"20"', "9" * 5000, "[]"])
def test_a_step_that_is_none(root: Path, step: str) -> None:
    path = root / folder(NEWER) / naming.MANIFEST
    path.write_text(path.read_text().replace(f'"step": {NEWER}', f'"step": {step}'))
    assert_goes_back(root)


@pytest.mark.robustness("B3", IN_MANIFEST, SET_ASIDE)
@pytest.mark.parametrize("number", ["nan", "inf", "-inf"])
def test_a_number_that_json_does_not_have(root: Path, number: str) -> None:
    """A float that the adaptor would accept, but other readers of the file could not read."""
    path = root / folder(NEWER) / naming.MANIFEST
    path.write_text(json.dumps({**json.loads(path.read_text()), "groups": {"dense": float(number)}}))
    assert "is not a manifest" in assert_goes_back(root)


@pytest.mark.robustness("B3", IN_MANIFEST, SET_ASIDE)
@pytest.mark.parametrize(
    "text",
    [
        b"",
        b"\xff\xfe",
        b"null",
        b"[]",
        b'"x"',
        b"[" * 1_000_000,
        b'{"a":' * 100_000,
        b"{}",
        b'{"format": 2}',
        b'{"format": 1}',
        b"\0" * 1000,
    ],
    ids=range(11),
)
def test_a_manifest_that_is_none(root: Path, text: bytes) -> None:
    (root / folder(NEWER) / naming.MANIFEST).write_bytes(text)
    assert_goes_back(root)


@pytest.mark.robustness("B3", "a manifest larger than memory", SET_ASIDE)
def test_a_huge_manifest_is_not_read(root: Path) -> None:
    os.truncate(root / folder(NEWER) / naming.MANIFEST, 1 << 40)
    assert f"Larger than {manifest.LARGEST} bytes" in assert_goes_back(root)


@pytest.mark.robustness("B3", "names in a manifest that lead elsewhere, or that no file has", SET_ASIDE)
@pytest.mark.parametrize(
    "name",
    [
        "/etc/passwd",
        "../iter_0000010/x",
        "mp_rank_00/../../x",
        "",
        ".",
        "a\0b",
        "\ud800",
        "x\ud800\nAll is well",
    ],
)
def test_names_that_lead_elsewhere(root: Path, name: str) -> None:
    change_manifest(root, lambda body: body["files"].update({name: _file(body)}))
    assert "is no name of a file below the folder" in assert_goes_back(root)


@pytest.mark.robustness(
    "B3", "a name in a manifest with line ends and of any length", "one line of a bounded size"
)
@pytest.mark.parametrize("name", ["x\n[ttp] all is well", "\x1b[2Jx", "y" * 100_000, "caf\udce9.bin"])
def test_the_message_is_one_line(root: Path, name: str) -> None:
    change_manifest(root, lambda body: body["files"].update({name: _file(body)}))
    assert_goes_back(root)


def _fifo(path: Path) -> None:
    os.mkfifo(path)


def _socket(path: Path) -> None:
    folder_before = Path.cwd()
    os.chdir(path.parent)  # the name of a socket is short
    try:
        with socket.socket(socket.AF_UNIX) as listener:
            listener.bind(path.name)
    finally:
        os.chdir(folder_before)


def _device(path: Path) -> None:
    try:
        os.mknod(path, stat.S_IFCHR | 0o666, os.makedev(1, 5))
        path.open("rb").close()
    except OSError:
        pytest.skip("no devices can be made or opened here")


def _loop(path: Path) -> None:
    path.symlink_to(path.name)


def _link_to_a_device(path: Path) -> None:
    path.symlink_to("/dev/zero")


def _folder(path: Path) -> None:
    path.mkdir()
    (path / "x").touch()


ODD = pytest.mark.parametrize("make", [_fifo, _socket, _device, _loop, _link_to_a_device, _folder])


@pytest.mark.robustness("B3", "a FIFO, socket, device, link loop or folder in place of a file", SET_ASIDE)
@ODD
@pytest.mark.parametrize("name", [FILES[0], naming.MANIFEST])
def test_no_regular_file(root: Path, make: Callable[[Path], None], name: str) -> None:
    path = root / folder(NEWER) / name
    path.unlink()
    make(path)
    change = {"bytes": 0} if path.name != naming.MANIFEST else {}
    if change:  # the size that the system tells of it
        change_manifest(root, lambda body: body["files"][name].update(change))
    assert_goes_back(root)
    assert not tracker.is_complete(root, NEWER)


@pytest.mark.robustness("B3", "the folder of a checkpoint is a file, FIFO or link loop", SET_ASIDE)
@pytest.mark.parametrize("make", [_fifo, _loop, Path.touch])
def test_no_folder(root: Path, make: Callable[[Path], None]) -> None:
    shutil.rmtree(root / folder(NEWER))
    make(root / folder(NEWER))
    assert "is not a folder" in assert_goes_back(root)


@pytest.mark.robustness(
    "B3",
    "a FIFO, socket, device, link loop or folder in place of the tracker",
    "training goes on from the newest intact checkpoint, and the tracker is a file again",
)
@ODD
def test_the_tracker_is_no_file(root: Path, make: Callable[[Path], None]) -> None:
    (root / naming.TRACKER).unlink()
    make(root / naming.TRACKER)
    assert tracker.tracked_step(root) is None
    assert resume(root).endswith(f"the newest intact checkpoint is step {NEWER}\n")
    assert tracker.tracked_step(root) == NEWER
    assert not (root / naming.TRACKER).is_symlink()


@pytest.mark.robustness(
    "B3", "a FIFO in place of the tracker, no checkpoint", "the start is refused in one line"
)
def test_the_tracker_of_an_empty_folder_is_no_file(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / naming.TRACKER)
    with pytest.raises(ResumeError, match="is not a file, so nothing can be loaded: remove it"):
        resume(tmp_path)


@pytest.mark.robustness(
    "B3", "a tracker of 5,000 digits, a terabyte, other alphabets", "the newest intact checkpoint is used"
)
@pytest.mark.parametrize(
    "text",
    [b"9" * 5000, b"9" * 19, b"-5", b"\xff\xfe", "٢٠".encode(), b"1e3", b"0x14", b"20\n30", b"\0", None],
)
def test_a_tracker_that_names_nothing(root: Path, text: bytes | None) -> None:
    if text is None:
        os.truncate(root / naming.TRACKER, 1 << 40)
    else:
        (root / naming.TRACKER).write_bytes(text)
    (line,) = resume(root).splitlines()
    assert "names no step" in line
    assert tracker.tracked_step(root) == NEWER


@pytest.mark.robustness(
    "B3",
    "a stray folder iter_00000015, files named iter_N_tmp_x, steps of other alphabets",
    "ignored in one line",
)
def test_folders_with_similar_names_are_ignored(root: Path) -> None:
    for name in ("iter_00000025", "iter_٠٠٠٠٠٢٥", f"iter_{'9' * 30}", "iter_0000025.bak"):
        shutil.copytree(root / folder(NEWER), root / name)
    for name in ("iter_0000030_tmp_x", "iter_0000031_saving"):
        (root / name).write_text("whose is it?")
    (root / "iter_0000032_tmp_y").symlink_to("/etc")
    content_before = content(root)
    for _ in range(3):
        assert left_overs.clean(root) == []
        (line,) = resume(root).splitlines()
        assert "no checkpoint, and ignored: iter_00000025, " in line
        assert "(and 2 more)" in line
    assert content(root) == content_before
    assert publish.prepare(root, 30, generation="x").name == "iter_0000030_tmp_x", "it takes its place"


@pytest.mark.robustness(
    "B3",
    "a copy of a checkpoint under the name of a later step",
    "it is not taken for what this run has saved",
)
def test_a_copy_under_another_name_is_not_found(root: Path) -> None:
    shutil.copytree(root / folder(NEWER), root / folder(99))
    assert publish.find(root, NEWER, "") == NEWER
    assert not tracker.is_complete(root, 99)


@pytest.mark.robustness("B3", "a left-over folder that cannot be removed", "one line, and the job starts")
def test_a_folder_that_cannot_be_removed_is_left(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    left_over = root / naming.temporary_name(30)
    left_over.mkdir()
    parent = os.open(left_over, os.O_RDONLY)
    for _ in range(3000):  # more than anybody can walk
        os.mkdir("d", dir_fd=parent)
        child = os.open("d", os.O_RDONLY, dir_fd=parent)
        os.close(parent)
        parent = child
    os.close(parent)
    try:
        left_overs.clean(root)
        assert left_over.exists() == ("cannot be removed" in said(capsys))
    finally:
        subprocess.run(["rm", "-rf", str(left_over)], check=True)


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(st.characters()),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(st.characters()), inner),
    max_leaves=8,
)


@pytest.mark.robustness("B3", "any JSON in a manifest", "it is understood, or refused in one line")
@given(
    body=st.fixed_dictionaries(
        {},
        optional=dict.fromkeys(
            ("format", "step", "files", "groups", "world_size", "created", "generation"), JSON
        ),
    )
    | JSON,
    file=JSON,
)
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_any_manifest_is_understood_or_refused(tmp_path: Path, body: Any, file: Any) -> None:
    if isinstance(body, dict) and isinstance(body.get("files"), dict):
        body["files"] = dict.fromkeys(body["files"], file)
    (tmp_path / naming.MANIFEST).write_bytes(json.dumps(body).encode())
    with contextlib.suppress(CheckpointError):
        read = manifest.read(tmp_path)
        assert read.step >= 0
        assert all(entry.bytes >= 0 for entry in read.files)


@pytest.mark.robustness("B3", "any bytes in a tracker", "a step, or none")
@given(text=st.binary(max_size=40))
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_any_tracker_names_a_step_or_none(tmp_path: Path, text: bytes) -> None:
    (tmp_path / naming.TRACKER).write_bytes(text)
    step = tracker.tracked_step(tmp_path)
    assert step is None or naming.step_of(naming.final_name(step)) == step


@pytest.mark.robustness(
    "B3", "any name in a save folder", "no error, and no step but of a folder that is looked for"
)
@given(name=st.text(st.characters(exclude_characters="/\0", codec="utf-8"), min_size=1, max_size=40))
def test_any_name_is_understood(name: str) -> None:
    step = naming.step_of(name)
    assert step is None or naming.final_name(step) == name
    naming.is_temporary(name)
    naming.term_of(name)
    naming.step_of_replaced(name)


# Drafts


LINK = "a link where a draft will be written"
NOT_FOLLOWED = "the file that it leads to is untouched, the save is made or refused in one line"


@pytest.fixture
def victim(tmp_path: Path) -> Iterator[Path]:
    """A file of the owner that somebody else wants to be overwritten."""
    path = tmp_path / "victim" / "file"
    path.parent.mkdir()
    path.write_text("precious")
    yield path
    assert path.read_text() == "precious"
    assert sorted(path.parent.iterdir()) == [path]


@pytest.mark.robustness("C1", LINK, NOT_FOLLOWED)
def test_the_tracker_is_not_written_through_a_link(root: Path, victim: Path) -> None:
    for name in (f"{naming.TRACKER}.tmp", naming.LOCK, f"{naming.TRACKER}.30.saving"):
        (root / name).symlink_to(victim)
    assert tracker.advance(root, 30)
    assert tracker.tracked_step(root) == 30
    (root / naming.TRACKER).unlink()
    (root / naming.TRACKER).symlink_to(victim)
    assert tracker.advance(root, 31)
    assert not (root / naming.TRACKER).is_symlink()


@pytest.mark.robustness("C1", LINK, NOT_FOLLOWED)
@pytest.mark.parametrize("kind", ["file", "folder", "dangling"])
def test_a_file_of_a_dump_is_not_written_through_a_link(root: Path, victim: Path, kind: str) -> None:
    prepared = publish.prepare(root, 30)
    path = prepared / "mp_rank_00" / "model.pt.1"
    if kind == "folder":
        path.parent.symlink_to(victim.parent)
        with pytest.raises(OSError, match="mp_rank_00"):
            HashingFile(path, base_folder=prepared)
        return
    path.parent.mkdir()
    path.symlink_to(victim if kind == "file" else victim.with_name("new"))
    with HashingFile(path, base_folder=prepared) as file:
        file.write(b"mine")
    publish.publish(root, 30, [file.entry("mp_rank_00/model.pt", 1)], {}, 1)
    assert (root / folder(30) / "mp_rank_00/model.pt").read_bytes() == b"mine"


@pytest.mark.robustness("C1", LINK, NOT_FOLLOWED)
def test_a_folder_of_a_dump_is_not_a_link(root: Path, victim: Path) -> None:
    temporary = root / naming.temporary_name(30)
    temporary.symlink_to(victim.parent)
    with pytest.raises(OSError, match="iter_0000030_tmp"):
        HashingFile(temporary / "mp_rank_00" / "model.pt.1", base_folder=temporary)
    assert publish.prepare(root, 30) == temporary
    assert not temporary.is_symlink()


@pytest.mark.robustness("C1", LINK, NOT_FOLLOWED)
def test_a_manifest_is_not_written_through_a_link(root: Path, victim: Path) -> None:
    prepared = publish.prepare(root, 30)
    with HashingFile(prepared / "model.pt") as file:
        file.write(b"mine")
    (prepared / naming.MANIFEST).symlink_to(victim)
    publish.publish(root, 30, [file.entry("model.pt")], {}, 1)
    assert manifest.defects(root / folder(30)) == []
    saving = root / naming.regular_name(40)
    regular_folder.prepare_regular(root, 40)
    (saving / "model.pt").touch()
    (saving / naming.MANIFEST).symlink_to(victim)
    regular_folder.publish_regular(root, 40)
    assert manifest.defects(root / folder(40)) == []


@pytest.mark.robustness("C1", LINK, NOT_FOLLOWED)
def test_a_regular_save_goes_into_no_link(root: Path, victim: Path) -> None:
    (root / naming.regular_name(30)).symlink_to(victim.parent)
    with pytest.raises(CheckpointError, match="is not a folder, so nothing is written there"):
        regular_folder.prepare_regular(root, 30)


@needs_root
@pytest.mark.robustness(
    "C1", "another user's folder where a regular save will be written", "refused in one line"
)
def test_a_regular_save_goes_into_no_folder_of_another(root: Path) -> None:
    (root / naming.regular_name(30)).mkdir()
    os.chown(root / naming.regular_name(30), OTHER_USER, OTHER_USER)
    with pytest.raises(CheckpointError, match="belongs to user 65534"):
        regular_folder.prepare_regular(root, 30)


@pytest.mark.robustness(
    "C1",
    "another user puts files into a save while it is written",
    "its folder is 0700 until it has its name",
)
@pytest.mark.parametrize("mask", [0o022, 0o002, 0o077])
def test_an_unfinished_save_is_private(root: Path, mask: int) -> None:
    mask_before = os.umask(mask)
    try:
        prepared = publish.prepare(root, 30)
        regular_folder.prepare_regular(root, 40)
        drafts = (prepared, root / naming.regular_name(40))
        assert [stat.S_IMODE(path.stat().st_mode) for path in drafts] == [0o700, 0o700]
        for path in drafts:
            with HashingFile(path / "model.pt") as file:
                file.write(b"x")
        publish.publish(root, 30, [file.entry("model.pt")], {}, 1)
        regular_folder.publish_regular(root, 40)
    finally:
        os.umask(mask_before)
    for step in (30, 40):
        assert stat.S_IMODE((root / folder(step)).stat().st_mode) == 0o777 & ~mask


@pytest.mark.robustness("C1", "a forged report of files outside of the folder", "refused in one line")
@pytest.mark.parametrize("name", ["../../victim/file", "/etc/passwd", ""])
def test_files_that_were_reported_elsewhere_are_refused(root: Path, victim: Path, name: str) -> None:
    prepared = publish.prepare(root, 30)
    (prepared / "x").touch()
    with pytest.raises(CheckpointError, match="is no name of a file below the folder"):
        publish.publish(root, 30, [FileEntry("x", 0, None), FileEntry(name, 8, None)], {}, 1)


# The lock


def _hold(path: Path, ready: threading.Event, release: threading.Event) -> None:
    descriptor = os.open(path, os.O_RDONLY | os.O_CREAT, 0o644)
    fcntl.flock(descriptor, fcntl.LOCK_SH)
    ready.set()
    release.wait()  # longer than any save is patient
    os.close(descriptor)


@contextlib.contextmanager
def held(path: Path) -> Iterator[None]:
    ready, release = threading.Event(), threading.Event()
    thread = threading.Thread(target=_hold, args=(path, ready, release))
    thread.start()
    assert ready.wait(60)
    try:
        yield
    finally:
        release.set()
        thread.join()


@pytest.mark.robustness(
    "C2", "another user holds a lock on a file of the save folder", "every save is made as ever"
)
@pytest.mark.parametrize("name", [naming.LOCK, f"{naming.TRACKER}.tmp", naming.TRACKER])
def test_a_lock_of_another_user_stops_no_save(root: Path, name: str) -> None:
    """A lock file that other users could open is not a lock of the adaptor."""
    with held(root / name):
        assert tracker.advance(root, 30)
        assert tracker.tracked_step(root) == 30
    assert tracker.tracked_step(root) == 30
    assert not (root / naming.LOCK).exists()


@needs_root
@pytest.mark.robustness(
    "C2", "the lock's file belongs to another user", "it is removed, and the save is made"
)
def test_a_lock_s_file_of_another_user_is_removed(root: Path) -> None:
    (root / naming.LOCK).touch(0o600)
    os.chown(root / naming.LOCK, OTHER_USER, OTHER_USER)
    with held(root / naming.LOCK):
        assert tracker.advance(root, 30)


@pytest.mark.robustness(
    "C2", "a FIFO, socket, device, link or folder in place of the lock", "the save is made"
)
@ODD
def test_no_lock_but_something_else(root: Path, make: Callable[[Path], None]) -> None:
    make(root / naming.LOCK)
    with locked(root):
        assert stat.S_ISREG((root / naming.LOCK).lstat().st_mode), "a lock on a device is not of this folder"
    make(root / naming.LOCK)
    assert tracker.advance(root, 30)
    assert not os.path.lexists(root / naming.LOCK)


@needs_root
@pytest.mark.robustness("C2", "another user tries to open the lock", "it cannot: the file is 0600, and goes")
def test_no_other_user_can_open_the_lock(root: Path) -> None:
    for path in (root, *root.parents):
        if path.stat().st_mode & 0o005 != 0o005 and path.is_relative_to("/tmp"):
            path.chmod(0o755)
    look = (
        f"import os; os.setuid({OTHER_USER}); os.stat({str(root)!r}); os.open({str(root / naming.LOCK)!r}, 0)"
    )
    with locked(root):
        completed = captured([sys.executable, "-c", look])
        assert "PermissionError" in completed.stderr
        assert naming.LOCK in completed.stderr
    assert not (root / naming.LOCK).exists()


@pytest.mark.robustness(
    "C2",
    "a stopped process of this user holds the lock",
    "a save fails in one line after a deadline, and names it",
)
def test_a_turn_is_waited_for_until_a_deadline(root: Path) -> None:
    with (
        locked(root),
        pytest.raises(CheckpointError, match=rf"process {os.getpid()} has held it for 0\.1 s") as caught,
        locked(root, patience_s=0.1),
    ):
        pass
    assert "\n" not in str(caught.value)
    with locked(root, patience_s=0):
        pass


def test_a_folder_that_refuses_a_lock_says_so(tmp_path: Path) -> None:
    with pytest.raises(OSError, match=os.strerror(errno.ENOENT)), locked(tmp_path / "gone"):
        pass
