"""Large files sent in parts: the next upload continues an upload that was cut short."""

from __future__ import annotations

import contextlib
import json
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from adaptor.checkpoint import regular_folder
from adaptor.errors import CheckpointError, StoreError
from adaptor.launchers.cli.ttp import main
from adaptor.protocol import naming
from adaptor.store import catalog, large_file, push
from adaptor.store.client import Store, open_store
from adaptor.store.joint import JointPush, Others, Patience
from adaptor.store.multipart import Upload
from adaptor.store.prune import prune
from adaptor.store.settings import UploadSettings
from adaptor.store.uploader import Uploader
from adaptor.threads import AT_ONCE
from tests import waiting
from tests.unit import object_store
from tests.unit.fault_proxy import Chooses, Fault, FaultProxy, faults, server, url
from tests.unit.launching import HEARS_CTRL_C
from tests.unit.object_store import CREDENTIALS, SMALLEST_PART, contents, save

__all__ = ["faults", "server", "url"]

PART = SMALLEST_PART
PARTS = 24
LARGE = (PARTS - 1) * PART + 1000
# Wait for no other node.
HASTY = Patience(0, 0, 0, 3600, 0)
_PUSHER = (
    f"{HEARS_CTRL_C}\n"
    "import sys; from pathlib import Path; from adaptor.store import push; from adaptor.store.client import"
    " open_store\nstore = open_store(sys.argv[1], sys.argv[2], piece=int(sys.argv[3]))\n"
    "push.push(store, Path(sys.argv[4]), 12)\n"
)


@pytest.fixture
def root(tmp_path: Path) -> Path:
    return tmp_path / "save"


@pytest.fixture
def store(url: str, faults: FaultProxy) -> Store:
    return open_store(url, faults.url, piece=PART)


@pytest.fixture
def direct(url: str, server: str, faults: FaultProxy) -> Store:
    return open_store(url, server, piece=PART)


def _refuses(first: int, fault_kind: Fault = "403") -> Chooses:
    """Fail each part from number `first` on."""

    def fault(number: int, method: str, path: str) -> Fault:
        _, separator, part = path.partition("partNumber=")
        return fault_kind if separator and int(part.partition("&")[0]) >= first else ""

    return fault


def _cut_short(store: Store, faults: FaultProxy, root: Path, step: int) -> set[int]:
    """Push a checkpoint until the store refuses a part; return the noted parts."""
    faults.begin(_refuses(PARTS // 2))
    with pytest.raises(StoreError, match="does not allow these credentials to write"):
        push.push(store, root, step)
    _has_ended()
    faults.begin()
    noted = _noted(store, root)
    assert noted
    return noted


def _has_ended() -> None:
    """Wait until the failed push has no request in flight."""
    parts = lambda: [thread for thread in threading.enumerate() if thread.name.startswith("ttp-part")]  # noqa: E731
    waiting.until(lambda: not parts(), "all requests have ended")


def _noted(store: Store, root: Path) -> set[int]:
    notes = list(large_file.all_of(root, store.identity))
    return set(notes[0].parts) if notes else set()


def _begun(store: Store) -> int:
    assert store.multipart is not None
    return len(store.multipart.begun())


def _is_whole(direct: Store, root: Path, step: int) -> None:
    """Assert that the store holds the folder's checkpoint and no other upload."""
    (checkpoint,) = catalog.newest_first(direct, step, [])
    assert list(catalog.wrong_files(direct, checkpoint)) == []
    for path, content in contents(root / naming.final_name(step)).items():
        assert direct.get(f"{checkpoint.prefix}/{path}", LARGE + PART) == content
    assert _begun(direct) == 0
    assert not (root / naming.UPLOADS).exists()


@pytest.mark.integration
@pytest.mark.parametrize("fault", ["hold before", "hold after"])
def test_a_killed_push_of_a_large_file_is_continued(
    fault: Fault, faults: FaultProxy, url: str, server: str, root: Path
) -> None:
    """Killed repeatedly, a few parts later each time: each process sends only unnoted parts."""
    url = f"{url}-{fault[5:]}"
    store = open_store(url, server, piece=PART)
    proxied = open_store(url, faults.url, piece=PART)
    save(root, 12, first=LARGE)
    chance = random.Random(fault)
    noted: set[int] = set()
    killed = 0
    while True:
        extra_parts = chance.randint(2, 7)
        at = sorted(set(range(1, PARTS + 1)) - noted)[extra_parts:]
        faults.begin(_refuses(at[0] if at else PARTS + 1, fault))
        command = [sys.executable, "-c", _PUSHER, url, faults.url, str(PART), str(root)]
        with subprocess.Popen(command) as pusher:
            if not at:
                assert pusher.wait() == 0
                break
            assert faults.held.wait(60)
            waiting.until(
                lambda last=at[0]: _noted(proxied, root) >= set(range(1, last)), "the rest is noted"
            )
            pusher.kill()
        killed += 1
        sent = {number for number, _ in faults.parts}
        assert not sent & noted, "what is noted is not sent again"
        assert catalog.places(store, 12)[0] == [], "nobody takes it for a checkpoint"
        noted = _noted(proxied, root)
        assert len(sent - noted) <= AT_ONCE
        faults.release.set()
    assert killed >= 3
    assert {number for number, _ in faults.parts} == set(range(1, PARTS + 1)) - noted
    assert sum(size for _, size in faults.parts) == LARGE - (len(noted) * PART)
    _is_whole(store, root, 12)


def test_a_store_that_fails_for_long_gets_the_rest_when_it_answers_again(
    store: Store, direct: Store, faults: FaultProxy, root: Path
) -> None:
    save(root, 12, first=LARGE)
    noted = _cut_short(store, faults, root, 12)
    result = push.push(store, root, 12)
    assert {number for number, _ in faults.parts} == set(range(1, PARTS + 1)) - noted
    assert result.sent == result.bytes - len(noted) * PART
    _is_whole(direct, root, 12)


def test_a_store_that_stays_busy_is_given_up_and_gets_the_rest_later(
    url: str, direct: Store, faults: FaultProxy, root: Path
) -> None:
    save(root, 12, first=LARGE)
    store = open_store(url, faults.url, patience_s=1, piece=PART)
    faults.begin(_refuses(PARTS, "503"))
    with pytest.raises(StoreError, match=r"cannot write .*answers 503 Service Unavailable, SlowDown"):
        push.push(store, root, 12)
    _has_ended()
    faults.begin()
    push.push(store, root, 12)
    assert [number for number, _ in faults.parts] == [PARTS]
    _is_whole(direct, root, 12)


def test_a_file_that_has_changed_is_sent_from_its_beginning(
    store: Store, direct: Store, faults: FaultProxy, root: Path
) -> None:
    """A regular save has no checksums to show the change."""
    folder = save(root, 12, first=LARGE)
    _cut_short(store, faults, root, 12)
    file = folder / "mp_rank_00" / naming.MODEL_FILE
    with file.open("r+b") as opened:
        opened.write(b"other")
    lines: list[str] = []
    push.push(store, root, 12, tell=lines.append)
    assert lines == [
        f"{file}: has changed since its upload was begun, so the file is sent from its beginning"
    ]
    assert len(faults.parts) == PARTS
    _is_whole(direct, root, 12)


def test_credentials_that_may_remove_no_upload_send_a_changed_file_all_the_same(
    store: Store, direct: Store, faults: FaultProxy, root: Path
) -> None:
    folder = save(root, 12, first=LARGE)
    _cut_short(store, faults, root, 12)
    with (folder / "mp_rank_00" / naming.MODEL_FILE).open("r+b") as opened:
        opened.write(b"other")
    faults.begin(lambda number, method, path: "403" if method == "DELETE" else "")
    lines: list[str] = []
    push.push(store, root, 12, tell=lines.append)
    kept_line, anew = lines
    assert kept_line.startswith("the parts of an upload that was cut short stay in the store: ")
    assert "does not allow these credentials to remove an upload" in kept_line
    assert "has changed since its upload was begun" in anew
    (checkpoint,) = catalog.newest_first(direct, 12, [])
    assert list(catalog.wrong_files(direct, checkpoint)) == []
    assert not (root / naming.UPLOADS).exists()


def test_an_upload_that_the_store_has_removed_is_begun_anew(
    store: Store, direct: Store, faults: FaultProxy, root: Path
) -> None:
    """A bucket's lifecycle rule removes uploads after some days."""
    save(root, 12, first=LARGE)
    _cut_short(store, faults, root, 12)
    assert direct.multipart is not None
    for upload in direct.multipart.begun():
        direct.multipart.abort(upload)
    lines: list[str] = []
    push.push(store, root, 12, tell=lines.append)
    (line,) = lines
    assert "the store no longer has the upload that was begun, so the file is sent from" in line
    assert len(faults.parts) == PARTS
    _is_whole(direct, root, 12)


def test_an_upload_that_is_removed_while_it_goes_on_is_begun_anew_once(
    store: Store, direct: Store, faults: FaultProxy, root: Path
) -> None:
    save(root, 12, first=LARGE)
    lost: list[str] = []

    def once(number: int, method: str, path: str) -> Fault:
        if "partNumber=7" in path and not lost:
            lost.append(path)
            return "404"
        return ""

    faults.begin(once)
    lines: list[str] = []
    push.push(store, root, 12, tell=lines.append)
    assert len(lines) == 1
    _is_whole(direct, root, 12)
    faults.begin(_refuses(1, "404"))
    save(root, 24, first=LARGE)
    with pytest.raises(StoreError, match="the upload is not there"):
        push.push(store, root, 24, tell=lines.append)
    assert len(lines) == 3, "then it is given up"


def test_a_lost_answer_is_no_lost_upload(store: Store, direct: Store, faults: FaultProxy, root: Path) -> None:
    """The store has made the object, and answers the repeated request that the upload does not exist."""
    save(root, 12, first=LARGE)
    completed: list[str] = []

    def fault(number: int, method: str, path: str) -> Fault:
        if method == "POST" and "uploadId=" in path:
            completed.append(path)
            return "cut after" if len(completed) == 1 else "404"
        return ""

    faults.begin(fault)
    lines: list[str] = []
    push.push(store, root, 12, tell=lines.append)
    assert (lines, len(completed), len(faults.parts)) == ([], 2, PARTS)
    _is_whole(direct, root, 12)


def test_a_file_that_differs_from_its_manifest_leaves_no_upload(
    store: Store, direct: Store, faults: FaultProxy, root: Path
) -> None:
    folder = save(root, 12, first=LARGE, last_words=True)
    with (folder / "mp_rank_00" / naming.MODEL_FILE).open("r+b") as opened:
        opened.write(b"other")
    with pytest.raises(CheckpointError, match="checksum differs from the manifest"):
        push.push(store, root, 12)
    assert _begun(direct) == 0
    assert not (root / naming.UPLOADS).exists()


def _saved_anew(root: Path) -> int:
    save(root, 12, "another1", first=LARGE)
    return 12


def _later(root: Path) -> int:
    save(root, 24)
    return 24


@pytest.mark.parametrize("next_save", [_saved_anew, _later])
def test_abandoned_uploads_are_removed_after_the_next_checkpoint(
    next_save: Callable[[Path], int], url: str, server: str, faults: FaultProxy, root: Path
) -> None:
    url = f"{url}-{next_save.__name__}"
    store, direct = (open_store(url, endpoint, piece=PART) for endpoint in (faults.url, server))
    save(root, 12, first=LARGE)
    _cut_short(store, faults, root, 12)
    step = next_save(root)
    assert _begun(direct) == 1
    push.push(store, root, step)
    _is_whole(direct, root, step)


def test_uploads_of_a_later_checkpoint_stay(
    store: Store, direct: Store, faults: FaultProxy, root: Path
) -> None:
    save(root, 24, first=LARGE)
    noted = _cut_short(store, faults, root, 24)
    (root / naming.TRACKER).write_text("10")
    save(root, 12)
    push.push(store, root, 12)
    assert _begun(direct) == 1
    push.push(store, root, 24)
    assert len(faults.parts) == PARTS - len(noted)
    _is_whole(direct, root, 24)


def test_an_upload_that_cannot_be_removed_is_one_line(
    store: Store, direct: Store, faults: FaultProxy, root: Path
) -> None:
    save(root, 12, first=LARGE)
    _cut_short(store, faults, root, 12)
    save(root, 24)
    faults.begin(lambda number, method, path: "403" if method == "DELETE" else "")
    lines: list[str] = []
    push.push(store, root, 24, tell=lines.append)
    (line,) = lines
    assert line.startswith(
        "the parts of an upload that was cut short stay in the store until the next attempt"
    )
    assert catalog.places(direct, 24)[0]
    faults.begin()
    push.push(store, root, 24, tell=lines.append)
    assert len(lines) == 1
    assert _begun(direct) == 0


def test_prune_removes_uploads_of_old_steps(
    store: Store, direct: Store, faults: FaultProxy, root: Path, tmp_path: Path
) -> None:
    """Also of removed save folders, and of steps without any other object."""
    for step in (12, 36):
        save(tmp_path / f"gone {step}", step, first=LARGE)
        _cut_short(store, faults, tmp_path / f"gone {step}", step)
    for step in (18, 24):
        save(root, step)
        push.push(store, root, step)
    assert _begun(direct) == 2
    assert prune(store, 1, dry_run=True).uploads == 1
    assert _begun(direct) == 2
    result = prune(store, 1)
    assert (result.removed, result.uploads, result.unlisted) == ([18], 1, "")
    assert direct.multipart is not None
    (remaining,) = direct.multipart.begun()
    assert remaining.name.startswith("iter_0000036/"), "somebody may be at work on a later step"


def test_a_store_that_does_not_list_uploads_is_pruned_all_the_same(
    url: str,
    store: Store,
    faults: FaultProxy,
    root: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for step in (12, 24):
        save(root, step)
        push.push(store, root, step)
    faults.begin(lambda number, method, path: "403" if re.search(r"[?&]uploads\b", path) else "")
    monkeypatch.setenv("TTP_STORE_ENDPOINT", faults.url)
    assert main(["store", "prune", url, "--keep", "1"]) == 0
    printed = capsys.readouterr()
    assert "step 12 is removed" in printed.out
    (line,) = printed.err.splitlines()
    assert "uploads that were cut short may have left parts in the store, which cost money" in line
    assert "does not allow these credentials to list uploads that were cut short (403 Forbidden, " in line
    # The uploader reports it once.
    lines: list[str] = []
    uploader = Uploader(UploadSettings(url, faults.url, str(root), every=1, keep=1, rate=0), lines.append)
    thread = threading.Thread(target=uploader.run)
    thread.start()
    try:
        for step in (36, 48):
            save(root, step)
            waiting.until(lambda: any(f"step {step} is in" in line for line in lines), "it is sent")  # noqa: B023
    finally:
        uploader.end()
        thread.join()
    assert sum("which cost money" in line for line in lines) == 1
    assert catalog.steps(store) == [48]


@pytest.mark.parametrize("finisher", ["the same node", "node 0"])
def test_a_share_that_was_cut_short_is_continued(
    finisher: str, url: str, server: str, faults: FaultProxy, root: Path
) -> None:
    """The share is continued by its node, or by node 0, which shares the folder and gave the node up."""
    url = f"{url}-{finisher[-1]}"
    store, direct = (open_store(url, endpoint, piece=PART) for endpoint in (faults.url, server))
    saving = root / naming.regular_name(12, "0f3a5c21")
    for number, size in enumerate((LARGE + PART, LARGE)):  # node 0 sends the larger file
        file = saving / f"mp_rank_{number:02d}" / naming.MODEL_FILE
        file.parent.mkdir(parents=True)
        file.write_bytes(os.urandom(size))
    regular_folder.publish_regular(root, 12, "0f3a5c21")

    def joint(node: int) -> JointPush:
        return JointPush(store, root, 12, node, 2, lambda count: None, lambda seconds: None, HASTY)

    def sent() -> list[int]:
        paths = [path for _, path in faults.requests if "mp_rank_01" in path]
        return sorted(int(match[1]) for path in paths if (match := re.search(r"partNumber=(\d+)", path)))

    place = catalog.place(push.read_folder(root, 12))
    refuses = _refuses(PARTS // 2)
    faults.begin(lambda number, method, path: refuses(number, method, path) if "mp_rank_01" in path else "")
    with pytest.raises(StoreError, match="does not allow these credentials to write"):
        joint(1).follow(place)
    _has_ended()
    noted = _noted(store, root)
    assert noted
    faults.begin()
    if finisher == "the same node":
        joint(1).follow(place)
    joint(0).lead(Others(), lambda: True)
    assert sent() == sorted(set(range(1, PARTS + 1)) - noted)
    _is_whole(direct, root, 12)


def test_ctrl_c_waits_for_no_request_of_a_large_file(faults: FaultProxy, url: str, root: Path) -> None:
    save(root, 12, first=LARGE)
    faults.begin(_refuses(1, "hold before"))
    command = [sys.executable, "-c", _PUSHER, url, faults.url, str(PART), str(root)]
    with subprocess.Popen(command, stderr=subprocess.DEVNULL) as pusher:
        try:
            waiting.until(lambda: len(faults.parts) == AT_ONCE, "it waits for these")
            pusher.send_signal(signal.SIGINT)
            pusher.wait(60)  # the client would give up such a request after 120 s
        finally:
            pusher.kill()


def test_credentials_that_may_not_list_the_parts_go_on_by_the_note(
    store: Store, direct: Store, faults: FaultProxy, root: Path
) -> None:
    save(root, 12, first=LARGE)
    noted = _cut_short(store, faults, root, 12)
    faults.begin(lambda number, method, path: "403" if method == "GET" and "uploadId=" in path else "")
    push.push(store, root, 12)
    assert {number for number, _ in faults.parts} == set(range(1, PARTS + 1)) - noted
    _is_whole(direct, root, 12)


def test_a_file_completed_by_another_process_is_not_sent_again(
    store: Store, direct: Store, faults: FaultProxy, root: Path, tmp_path: Path
) -> None:
    """Both processes continue one upload; the second has a copy of the note, for another endpoint."""
    save(root, 12, first=LARGE)
    _cut_short(store, faults, root, 12)
    copied: list[Path] = []

    def overtakes(number: int, method: str, path: str) -> Fault:
        if "partNumber=" in path and not copied:
            copied.append(shutil.copytree(root, tmp_path / "copy", symlinks=True))
            (note,) = large_file.all_of(root, store.identity)
            sizes = note.begun.part, note.begun.bytes
            copy = large_file.note(copied[0], direct.identity, note.begun.seen, note.upload, sizes)
            for part in note.parts.values():
                copy.add(part)
            push.push(direct, copied[0], 12)
        return "404" if "partNumber=" in path else ""  # a store's answer once the upload is complete

    faults.begin(overtakes)
    lines: list[str] = []
    push.push(store, root, 12, tell=lines.append)
    assert lines == []
    assert [path for method, path in faults.requests if method == "POST" and "uploads" in path] == []
    _is_whole(direct, root, 12)


@pytest.mark.parametrize("listed", [False, True])
@pytest.mark.parametrize("number", [0, 1])
def test_a_file_that_has_changed_since_it_was_sent_is_sent_again(
    number: int, listed: bool, url: str, faults: FaultProxy, root: Path
) -> None:
    """The push ended before the commit. File 0 is the large file."""
    store = open_store(f"{url}-{number}-{listed}", faults.url, piece=PART)
    folder = save(root, 12, first=LARGE)
    saved = push.read_folder(root, 12)
    sending = push.Sending(store, root, saved, catalog.place(saved), lambda count: None)
    sending.send(saved.files)
    if listed:
        sending.tell(is_complete=False)
    with (folder / f"mp_rank_{number:02d}" / naming.MODEL_FILE).open("r+b") as opened:
        opened.write(b"other")
    result = push.push(store, root, 12)
    assert result.sent == (1001 if number else LARGE)
    _is_whole(store, root, 12)


def _read(faults: FaultProxy) -> list[str]:
    return [path for method, path in faults.requests if method == "GET" and naming.MODEL_FILE in path]


@pytest.mark.parametrize(
    ("method", "request_has"),
    [("POST", "uploadId="), ("GET", "list-type=")],
    ids=["Ceph's gateway", "a list"],
)
def test_an_etag_is_the_same_with_quotes_and_without(
    method: str,
    request_has: str,
    url: str,
    faults: FaultProxy,
    root: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A single answer of the store lacks the quotes of the others; no file is read for comparison."""
    url = f"{url}-{method}"
    faults.begin(
        lambda number, requested, path: "bare etags" if requested == method and request_has in path else ""
    )
    save(root, 12, first=LARGE)
    push.push(open_store(url, faults.url, piece=PART), root, 12)
    assert any(requested == method and request_has in path for requested, path in faults.requests)
    monkeypatch.setenv("TTP_STORE_ENDPOINT", faults.url)
    assert main(["store", "list", url]) == 0
    assert "step 12: complete, 4 files" in capsys.readouterr().out
    assert _read(faults) == []


def test_a_list_of_an_earlier_version_counts(store: Store, faults: FaultProxy, root: Path) -> None:
    """Its etags have the quotes of the answers."""
    save(root, 12)
    place = push.push(store, root, 12).where
    name = catalog.parts_name(place, 0)
    part_list = json.loads(store.get(name, catalog.LARGEST_LIST))
    for file in part_list["files"]:
        file["etag"] = f'"{file["etag"]}"'
    store.put(name, json.dumps(part_list).encode())
    faults.begin()
    assert catalog.examine(store, place).saved_manifest.step == 12
    assert _read(faults) == []


def test_parts_of_another_size_are_not_mixed(
    store: Store, direct: Store, url: str, faults: FaultProxy, root: Path
) -> None:
    """Another version began the upload, or the note is damaged."""
    folder = save(root, 12, first=LARGE)
    _cut_short(store, faults, root, 12)
    lines: list[str] = []
    push.push(open_store(url, faults.url, piece=2 * PART), root, 12, tell=lines.append)
    file = folder / "mp_rank_00" / naming.MODEL_FILE
    assert lines == [
        f"{file}: its upload was begun with parts of another size, so the file is sent from its beginning"
    ]
    _is_whole(direct, root, 12)


def test_a_note_of_another_process_stays(root: Path) -> None:
    """Two processes began to upload the same object; the second noted its own upload."""
    root.mkdir()
    url, name = "s3://bucket/run7", "iter_0000012/0f3a5c21-1/file"
    first, second = (
        large_file.note(root, url, "", Upload(name, mark), (PART, LARGE)) for mark in ("one", "other")
    )
    second.add(large_file.Arrived(1, "checksum", "etag"))
    first.add(large_file.Arrived(2, "checksum", "etag"))
    first.forget()
    noted = large_file.find(root, url, name)
    assert noted is not None
    assert (noted.upload, set(noted.parts)) == (second.upload, {1})
    second.forget()
    assert not (root / naming.UPLOADS).exists()


def test_buckets_of_the_same_name_at_two_endpoints_are_two(
    store: Store, direct: Store, faults: FaultProxy, root: Path, tmp_path: Path
) -> None:
    """An upload to one endpoint is neither listed nor removed at the other, and continues later."""
    save(root, 12, first=LARGE)
    noted = _cut_short(store, faults, root, 12)
    with object_store.server() as elsewhere:
        object_store.request(elsewhere, "PUT", f"/{store.address.bucket}")
        other_store = open_store(str(store), f"{elsewhere}/", piece=PART)
        lines: list[str] = []
        push.push(other_store, root, 12, tell=lines.append)
        assert lines == []
        assert next(catalog.newest_first(other_store, None, [])).saved_manifest.step == 12
    assert _noted(store, root) == noted
    faults.begin()
    push.push(store, root, 12)
    assert len(faults.parts) == PARTS - len(noted)
    _is_whole(direct, root, 12)


def test_an_endpoint_of_the_environment_counts(
    url: str, faults: FaultProxy, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://one.example/")
    assert open_store(url).identity == open_store(url, "http://one.example").identity
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://two.example/")
    assert open_store(url).identity != open_store(url, "http://one.example").identity


def test_a_folder_that_takes_no_notes_keeps_nobody_from_sending(
    store: Store, direct: Store, faults: FaultProxy, root: Path
) -> None:
    save(root, 12, first=LARGE)
    (root / naming.UPLOADS).write_text("a file is in its place")
    push.push(store, root, 12)
    (root / naming.UPLOADS).unlink()
    _is_whole(direct, root, 12)


def test_a_damaged_note_is_ignored(store: Store, direct: Store, faults: FaultProxy, root: Path) -> None:
    save(root, 12, first=LARGE)
    noted = _cut_short(store, faults, root, 12)
    (note,) = (root / naming.UPLOADS).iterdir()
    content = note.read_bytes()
    note.write_bytes(content.rstrip()[:-9])  # with a truncated last line
    push.push(store, root, 12)
    assert len(faults.parts) == PARTS - len(noted) + 1
    _is_whole(direct, root, 12)
    save(root, 24, first=LARGE)
    _cut_short(store, faults, root, 24)
    (note,) = (root / naming.UPLOADS).iterdir()
    note.write_bytes(b"\x00" * 100)
    push.push(store, root, 24)
    assert len(faults.parts) == PARTS


def test_without_botocore_nothing_is_begun(url: str, server: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in CREDENTIALS.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setitem(sys.modules, "botocore", None)
    open_store(url, server)  # for reading
    with pytest.raises(StoreError, match=r"uploads to s3:// need the package botocore, too: run pip install"):
        open_store(url, server, make=True)


def test_settings_of_other_tools_change_nothing(
    store: Store,
    direct: Store,
    faults: FaultProxy,
    root: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """botocore ignores files and variables that obstore does not read."""
    (tmp_path / "config").write_text("[default]\nendpoint_url = http://127.0.0.1:9\nregion = nowhere\n")
    monkeypatch.setenv("AWS_CONFIG_FILE", str(tmp_path / "config"))
    monkeypatch.setenv("AWS_PROFILE", "of-another-tool")
    save(root, 12, first=LARGE)
    push.push(store, root, 12)
    assert faults.keys == {CREDENTIALS["AWS_ACCESS_KEY_ID"]}
    _is_whole(direct, root, 12)


@contextlib.contextmanager
def _machine_with_a_role(key: str) -> Iterator[str]:
    """Run AWS's metadata service for credentials; yield its URL."""
    role = {
        "Code": "Success",
        "Type": "AWS-HMAC",
        "AccessKeyId": key,
        "SecretAccessKey": "of-the-role",
        "Token": "token",
        "LastUpdated": "2026-01-01T00:00:00Z",
        "Expiration": "2036-01-01T00:00:00Z",
    }
    answers = {"/latest/api/token": "t", "/latest/meta-data/iam/security-credentials": "role"}

    class Handler(BaseHTTPRequestHandler):
        def _serve(self) -> None:
            path = self.path.rstrip("/")
            content = (answers.get(path) or json.dumps(role)).encode()
            self.send_response(200)
            self.send_header("Content-Length", str(len(content)))
            self.end_headers()
            self.wfile.write(content)

        do_GET = do_PUT = _serve

        def log_message(self, *arguments: object) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as listening:
        thread = threading.Thread(target=listening.serve_forever, args=(0.05,))
        thread.start()
        try:
            yield f"http://127.0.0.1:{listening.server_port}"
        finally:
            listening.shutdown()
            thread.join()


@pytest.mark.parametrize("source", ["file", "machine"])
def test_large_files_use_the_same_credentials(
    source: str, url: str, faults: FaultProxy, root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in CREDENTIALS:
        monkeypatch.delenv(name)
    save(root, 12, first=LARGE)
    with contextlib.ExitStack() as stack:
        key = f"AKIAOFTHE{source.upper()}"
        if source == "file":
            content = f"[of the job]\naws_access_key_id={key}\naws_secret_access_key=secret\n"
            (tmp_path / "credentials").write_text(content)
            monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(tmp_path / "credentials"))
            monkeypatch.setenv("AWS_PROFILE", "of the job")
        else:
            monkeypatch.setenv("HOME", str(tmp_path))
            monkeypatch.setenv("AWS_METADATA_ENDPOINT", stack.enter_context(_machine_with_a_role(key)))
        push.push(open_store(f"{url}-{source}", faults.url, piece=PART), root, 12)
    assert len(faults.parts) == PARTS
    assert faults.keys == {key}


def test_a_token_of_the_cluster_gives_a_role(
    url: str, server: str, faults: FaultProxy, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """obstore requests a role only over https, so it is left out here."""
    for name in CREDENTIALS:
        monkeypatch.delenv(name)
    (tmp_path / "token").write_text("a token")
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("AWS_WEB_IDENTITY_TOKEN_FILE", str(tmp_path / "token"))
    monkeypatch.setenv("AWS_ROLE_ARN", "arn:aws:iam::123456789012:role/job")
    monkeypatch.setenv("AWS_ENDPOINT_URL_STS", server)
    multipart = open_store(url, faults.url).multipart
    assert multipart is not None
    assert multipart.begun() == []
    (key,) = faults.keys
    assert key.startswith("ASIA"), "of a session"
