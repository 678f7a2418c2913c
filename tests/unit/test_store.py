"""Checkpoints in object storage: a folder (`file://`), and an S3 server on this machine."""

from __future__ import annotations

import json
import os
import shutil
import sys
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from urllib.parse import urlparse

import pytest

from adaptor.checkpoint import manifest, publish, tracker
from adaptor.checkpoint.hashing import BLOCK, BlockDigest
from adaptor.errors import StoreError
from adaptor.launchers.cli.ttp import main
from adaptor.protocol import naming
from adaptor.protocol.naming import FileEntry
from adaptor.store import catalog, settings
from adaptor.store.client import PIECE, open_store
from adaptor.store.pull import pull, resume
from adaptor.store.push import push, read_folder
from tests.unit import azure_server, fault_proxy, object_store
from tests.unit.object_store import contents, save
from tests.waiting import captured


@pytest.fixture(scope="module")
def server() -> Iterator[str]:
    with object_store.server() as url:
        yield url


def _name_for(request: pytest.FixtureRequest) -> str:
    """Return a bucket or container name unique to the test."""
    return f"b{abs(hash(request.node.nodeid))}"


def _lead_to(endpoint: str, credentials: Mapping[str, str], monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {**credentials, "TTP_STORE_ENDPOINT": endpoint}.items():
        monkeypatch.setenv(name, value)


@pytest.fixture
def s3(server: str, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """An empty bucket; the environment points at its server."""
    bucket = _name_for(request)
    object_store.request(server, "PUT", f"/{bucket}")
    _lead_to(server, object_store.CREDENTIALS, monkeypatch)
    return f"s3://{bucket}/run 7"


@pytest.fixture(scope="module")
def azure_account() -> Iterator[str]:
    with azure_server.server() as url:
        yield url


@pytest.fixture
def az(azure_account: str, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """An empty container; the environment points at its account."""
    container = _name_for(request)
    azure_server.make_container(azure_account, container)
    _lead_to(azure_account, azure_server.CREDENTIALS, monkeypatch)
    return f"az://{container}/run 7"


@pytest.fixture(params=["file", "s3", "az"])
def url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    if request.param == "file":
        return f"file://{tmp_path}/the store"
    return str(request.getfixturevalue(request.param))


def _store(*arguments: object) -> int:
    return main(["store", *map(str, arguments)])


def _rows(url: str, capsys: pytest.CaptureFixture[str], action: str = "list") -> list[tuple[int, str]]:
    capsys.readouterr()
    assert _store(action, url, "--json") in (0, 1)
    return [(row["step"], row["state"]) for row in json.loads(capsys.readouterr().out)["checkpoints"]]


def _change(url: str, name: str, content: bytes) -> None:
    import obstore

    obstore.put(open_store(url, os.environ.get("TTP_STORE_ENDPOINT", ""))._client, name, content)


def test_a_pull_restores_the_pushed_files(
    url: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    save(tmp_path / "one", 12, first=2 * PIECE + 1)  # in several parts
    newest = save(tmp_path / "one", 24)
    assert _store("push", url, tmp_path / "one", "--step", "12") == 0
    assert _store("push", url, tmp_path / "one") == 0
    assert _rows(url, capsys) == [(12, "complete"), (24, "complete")]
    assert _store("pull", url, tmp_path / "two") == 0
    assert contents(tmp_path / "two" / newest.name) == contents(newest)
    assert tracker.tracked_step(tmp_path / "two") == 24
    assert _store("pull", url, tmp_path / "three", "--step", "12") == 0
    older = naming.final_name(12)
    assert contents(tmp_path / "three" / older) == contents(tmp_path / "one" / older)
    # A regular save has no checksums; a pulled checkpoint has.
    assert all(file.xxh3_128 for file in manifest.read(tmp_path / "three" / older).files)
    assert manifest.defects(tmp_path / "three" / older, step=12) == []
    assert not list((tmp_path / "three").glob("*_tmp*"))
    assert _rows(url, capsys, "verify") == [(12, "intact"), (24, "intact")]


def test_a_damaged_local_checkpoint_is_pulled_again(url: str, tmp_path: Path) -> None:
    """Otherwise a job of the same run would set it aside and load an older step."""
    folder = save(tmp_path / "one", 12)
    intact = contents(folder)
    store = open_store(url, os.environ.get("TTP_STORE_ENDPOINT", ""), make=True)
    push(store, tmp_path / "one", 12)
    largest = max((path for path in folder.rglob("*.pt")), key=lambda path: path.stat().st_size)
    largest.unlink()
    resumed = resume(store, tmp_path / "one")
    assert resumed is not None
    assert (resumed.step, resumed.there) == (12, False)
    assert contents(folder) == intact
    assert tracker.tracked_step(tmp_path / "one") == 12
    largest.write_bytes(b"")
    assert not pull(store, tmp_path / "one", 12).there
    assert contents(folder) == intact
    assert resume(store, tmp_path / "one").there  # type: ignore[union-attr]


def test_files_already_in_the_store_are_not_sent_again(
    url: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    save(tmp_path / "one", 12)
    store = open_store(url, os.environ.get("TTP_STORE_ENDPOINT", ""), make=True)
    first = push(store, tmp_path / "one", 12)
    assert (first.sent, first.there) == (first.bytes, False)
    assert push(store, tmp_path / "one", 12).there
    pull(store, tmp_path / "two")
    assert push(store, tmp_path / "two", 12).there, "it has the same files as what was pulled"
    assert pull(store, tmp_path / "two").there
    # Another run has the same step.
    save(tmp_path / "other", 12, generation="other")
    assert not push(store, tmp_path / "other", 12).there
    assert _rows(url, capsys) == [(12, "complete"), (12, "complete")]
    pull(store, tmp_path / "three")
    name = naming.final_name(12)
    assert contents(tmp_path / "three" / name) == contents(tmp_path / "other" / name), "the newer one"


def test_a_changed_object_gives_way_to_the_next_older_checkpoint(
    url: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for step in (12, 24, 36):
        save(tmp_path / "one", step)
        assert _store("push", url, tmp_path / "one") == 0
    store = open_store(url, os.environ.get("TTP_STORE_ENDPOINT", ""))
    newest, older = (catalog.places(store, step)[0][0] for step in (36, 24))
    file = f"mp_rank_01/{naming.MODEL_FILE}"
    _change(url, f"{newest}/{file}", os.urandom(1001))  # in its size
    _change(url, f"{older}/{naming.MANIFEST}", b"{}")
    capsys.readouterr()
    assert _store("pull", url, tmp_path / "two") == 0
    output = capsys.readouterr()
    assert f"{newest}/{file}" in output.err
    assert f"{older}/{naming.MANIFEST}" in output.err
    assert "step 12 is in" in output.out
    assert contents(tmp_path / "two" / "iter_0000012") == contents(tmp_path / "one" / "iter_0000012")
    assert [path.name for path in (tmp_path / "two").glob("iter_*")] == ["iter_0000012"]
    assert _rows(url, capsys, "verify") == [(12, "intact"), (24, "damaged"), (36, "damaged")]
    assert _store("verify", url) == 1
    assert _store("pull", url, tmp_path / "three", "--step", "36") == 2
    assert "no complete checkpoint of step 36" in capsys.readouterr().err


def test_a_pull_that_ended_before_the_tracker_is_completed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The process was killed, or the disk was full, after the folder had its final name."""
    url = f"file://{tmp_path}/store"
    for step in (12, 24):
        save(tmp_path / "one", step)
        assert _store("push", url, tmp_path / "one") == 0
        assert _store("pull", url, tmp_path / "two") == 0
    (tmp_path / "two" / naming.TRACKER).write_text("12")
    capsys.readouterr()
    assert _store("pull", url, tmp_path / "two") == 0
    assert capsys.readouterr().out == f"step 24 is in {tmp_path}/two already\n"
    assert tracker.tracked_step(tmp_path / "two") == 24
    (tmp_path / "two" / naming.TRACKER).unlink()
    assert _store("pull", url, tmp_path / "two", "--step", "12") == 0
    assert tracker.tracked_step(tmp_path / "two") == 12


def test_a_pull_replaces_another_checkpoint_of_the_same_step_and_sizes(tmp_path: Path) -> None:
    """All transformed checkpoints have the same generation."""
    url = f"file://{tmp_path}/store"
    folder = save(tmp_path / "one", 12, "transform", last_words=True)
    other_folder = save(tmp_path / "two", 12, "transform", last_words=True)
    contents_before = contents(other_folder)
    store = open_store(url, make=True)
    push(store, tmp_path / "one", 12)
    assert not pull(store, tmp_path / "two").there
    assert contents(other_folder) == contents(folder)
    (aside,) = (path for path in (tmp_path / "two").iterdir() if path.name.startswith("aside"))
    assert contents(aside) == contents_before
    assert pull(store, tmp_path / "two").there


@pytest.mark.parametrize("is_there", [False, True])
def test_a_later_step_without_its_folder_is_ignored(
    is_there: bool, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The tracker names the step, but the folder was moved away, or the job ended while setting it aside."""
    url, root = f"file://{tmp_path}/store", tmp_path / "two"
    save(tmp_path / "one", 12)
    assert _store("push", url, tmp_path / "one") == 0
    if is_there:
        assert _store("pull", url, root) == 0
    shutil.rmtree(save(root, 20))
    assert _store("pull", url, root) == 0
    assert f"{root}/iter_0000020: missing, though the tracker names it" in capsys.readouterr().err
    assert tracker.tracked_step(root) == 12
    assert contents(root / naming.final_name(12)) == contents(tmp_path / "one" / naming.final_name(12))
    shutil.rmtree(save(root, 20))
    save(root, 16)
    assert _store("pull", url, root) == 2
    assert "holds step 16, which is later than step 12" in capsys.readouterr().err
    assert tracker.tracked_step(root) == 20


@pytest.mark.parametrize("damage", ["manifest", "list of parts", "object"])
def test_a_damaged_checkpoint_is_passed_over_and_can_be_pushed_again(
    damage: str, url: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for step in (12, 24):
        save(tmp_path / "one", step)
        assert _store("push", url, tmp_path / "one") == 0
    store = open_store(url, os.environ.get("TTP_STORE_ENDPOINT", ""))
    ((prefix,), _) = catalog.places(store, 24)
    if damage == "object":
        store.delete([f"{prefix}/mp_rank_01/{naming.MODEL_FILE}"])
    else:
        name = naming.MANIFEST if damage == "manifest" else "ttp_parts/0.json"
        _change(url, f"{prefix}/{name}", b"not JSON")
    assert _rows(url, capsys) == [(12, "complete"), (24, "damaged")]
    assert _store("pull", url, tmp_path / "two") == 0
    assert f"{prefix}/" in capsys.readouterr().err
    assert tracker.tracked_step(tmp_path / "two") == 12
    # Another manifest of the same files: the damaged checkpoint is no copy of it.
    folder = tmp_path / "one" / naming.final_name(24)
    other_manifest = replace(manifest.read(folder), world_size=1)
    assert _store("push", url, tmp_path / "one") == 0
    assert (24, "complete") in _rows(url, capsys)
    (folder / naming.MANIFEST).write_bytes(other_manifest.encode())
    _change(url, f"{prefix}/{naming.MANIFEST}", b"not JSON")
    assert _store("push", url, tmp_path / "one") == 0
    assert sorted(_rows(url, capsys)) == [(12, "complete"), (24, "complete"), (24, "damaged")]


def test_a_copy_in_another_place_is_as_good(
    s3: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Copies by other tools have other etags: the content counts."""
    save(tmp_path / "one", 12)
    assert _store("push", s3, tmp_path / "one") == 0
    store = open_store(s3, os.environ["TTP_STORE_ENDPOINT"])
    (prefix,) = catalog.places(store, 12)[0]
    file = f"{prefix}/mp_rank_00/{naming.MODEL_FILE}"
    etag_before = store.objects(prefix)[file].etag
    content = store.get(file, 10_000)
    assert store.put_pieces(file, iter([content]), 6 << 20) != etag_before
    assert _rows(s3, capsys) == [(12, "complete")]


def test_azure_lists_etags_without_quotes(
    az: str, azure_account: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The etags still equal those of the upload: no file is read for comparison."""
    save(tmp_path / "one", 12)
    assert _store("push", az, tmp_path / "one") == 0
    with fault_proxy.proxy(azure_account.removesuffix(f"/{azure_server.ACCOUNT}")) as state:
        monkeypatch.setenv("TTP_STORE_ENDPOINT", f"{state.url}/{azure_server.ACCOUNT}")
        assert _store("list", az) == 0
        assert state.requests
        assert [path for _, path in state.requests if naming.MODEL_FILE in path] == []


def test_more_objects_than_an_answer_holds_are_listed(s3: str, server: str, tmp_path: Path) -> None:
    """The newest step is found in a listing of several answers."""
    bucket, count = urlparse(s3).netloc, 2 * object_store.NAMES + 10
    for step in range(1, count + 1):
        object_store.request(server, "PUT", f"/{bucket}/run%207/iter_{step:07d}/gone/x", b"x")
    assert b"<IsTruncated>true" in object_store.request(server, "GET", f"/{bucket}?list-type=2")
    store = open_store(s3, server)
    assert len(catalog.steps(store)) == count
    assert len(store.objects("")) == count
    save(tmp_path / "one", 70)
    push(store, tmp_path / "one", 70)
    assert next(catalog.newest_first(store, None, [])).saved_manifest.step == 70


def test_old_checkpoints_are_removed(url: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for step in (12, 24, 36):
        save(tmp_path / "one", step)
        assert _store("push", url, tmp_path / "one") == 0
    _change(url, f"{naming.final_name(6)}/gone/x", b"x")  # of an aborted upload
    _change(url, f"{naming.final_name(48)}/gone/x", b"x")  # of an upload that may be running
    assert _store("prune", url, "--keep", "2", "--dry-run") == 0
    assert len(_rows(url, capsys)) == 5
    assert _store("prune", url, "--keep", "2") == 0
    assert "steps 6, 12 are removed" in capsys.readouterr().out
    assert _rows(url, capsys) == [(24, "complete"), (36, "complete"), (48, "incomplete")]
    assert _store("prune", url, "--keep", "9") == 0
    assert len(_rows(url, capsys)) == 3, "there are fewer, so all stay"
    assert _store("prune", url, "--keep", "0") == 2
    assert "--keep is 0: it must be a number from 1 on" in capsys.readouterr().err


def test_leftovers_of_a_killed_upload_are_removed_with_their_step(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """obstore first writes a file under another name that no listing shows."""
    folder = tmp_path / "store"
    url = f"file://{folder}"
    leftover = folder / naming.final_name(12) / "gone" / "mp_rank_00" / f"{naming.MODEL_FILE}#1"
    leftover.parent.mkdir(parents=True)
    leftover.write_bytes(b"half")
    for step in (24, 36):
        save(tmp_path / "one", step)
        assert _store("push", url, tmp_path / "one") == 0
    assert _rows(url, capsys) == [(12, "incomplete"), (24, "complete"), (36, "complete")]
    assert _store("prune", url, "--keep", "1", "--dry-run") == 0
    assert leftover.exists()
    assert _store("prune", url, "--keep", "1") == 0
    assert "steps 12, 24 are removed" in capsys.readouterr().out
    assert [path.name for path in folder.iterdir()] == [naming.final_name(36)]


def test_leftovers_of_killed_uploads_are_removed_when_the_checkpoint_is_complete(tmp_path: Path) -> None:
    """Except files that another, slow node may be writing."""
    save(tmp_path / "one", 12)
    folder = tmp_path / "store" / catalog.place(read_folder(tmp_path / "one", 12)) / "mp_rank_00"
    folder.mkdir(parents=True)
    leftover, new = (folder / f"{naming.MODEL_FILE}#{number}" for number in (1, 2))
    for path, time in ((leftover, 0), (new, 2**32)):
        path.write_bytes(b"half")
        os.utime(path, (time, time))
    push(open_store(f"file://{tmp_path}/store", make=True), tmp_path / "one", 12)
    assert sorted(folder.iterdir()) == [folder / naming.MODEL_FILE, new]


def test_a_file_with_a_checksum_of_blocks_is_compared_with_it(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Several ranks write such a file together; in the store its checksum covers the whole file."""
    url = f"file://{tmp_path}/store"
    folder = publish.prepare(tmp_path / "one", 12, generation="0f3a5c21")
    content = os.urandom(BLOCK + 9)
    digest = BlockDigest()
    digest.update(content)
    (folder / "large.pt").write_bytes(content)
    entry = FileEntry("large.pt", len(content), None, xxh3_128_blocks=digest.hexdigest())
    publish.publish(tmp_path / "one", 12, [entry], {}, 1, "0f3a5c21")
    shutil.copytree(tmp_path / "one", tmp_path / "damaged")
    file = tmp_path / "damaged" / naming.final_name(12) / "large.pt"
    file.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
    assert _store("push", url, tmp_path / "damaged") == 2
    assert f"{file}: checksum differs from the manifest" in capsys.readouterr().err
    assert _store("push", url, tmp_path / "one") == 0
    assert _store("pull", url, tmp_path / "two") == 0
    assert manifest.defects(tmp_path / "two" / naming.final_name(12)) == []
    (pulled,) = manifest.read(tmp_path / "two" / naming.final_name(12)).files
    assert pulled.xxh3_128 is not None
    assert pulled.xxh3_128_blocks is None


def test_a_damaged_checkpoint_is_not_pushed(
    url: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    save(tmp_path / "one", 12, first=PIECE + 1)  # in two parts
    assert _store("push", url, tmp_path / "one") == 0
    assert _store("pull", url, tmp_path / "two") == 0  # its manifest has checksums
    for number in (0, 3):
        shutil.rmtree(tmp_path / "three", ignore_errors=True)
        shutil.copytree(tmp_path / "two", tmp_path / "three")
        folder = tmp_path / "three" / naming.final_name(12)
        other_manifest = replace(manifest.read(folder), generation="another1")
        (folder / naming.MANIFEST).write_bytes(other_manifest.encode())
        file = folder / f"mp_rank_{number:02d}" / naming.MODEL_FILE
        content = bytearray(file.read_bytes())
        content[-1] ^= 1
        file.write_bytes(content)
        assert _store("push", url, tmp_path / "three") == 2
        assert f"{file}: checksum differs from the manifest" in capsys.readouterr().err
        file.write_bytes(content[:-1])
        assert _store("push", url, tmp_path / "three") == 2
        assert f"{file}: has another size" in capsys.readouterr().err
        store = open_store(url, os.environ.get("TTP_STORE_ENDPOINT", ""))
        names = [name for name in store.objects(naming.final_name(12)) if "/another1" in name]
        assert [name for name in names if f"mp_rank_{number:02d}" in name] == []
        store.delete(names)


@pytest.mark.parametrize("url", ["s3://bucket/run7", "file:///there/run7"])
def test_the_url_comes_first(url: str, capsys: pytest.CaptureFixture[str]) -> None:
    for action in ("push", "pull"):
        assert _store(action, "saved", url) == 2
        assert capsys.readouterr().err.endswith(f": the URL comes first: ttp store {action} {url} saved\n")


def test_a_store_in_a_folder_that_cannot_be_made(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(StoreError, match=rf"; make {tmp_path}/none first, or correct the URL$"):
        open_store(f"file://{tmp_path}/none/run7", "", make=True)


@pytest.mark.parametrize(
    ("url", "reason"),
    [
        ("run7", "is no URL of a store"),
        ("ftp://bucket/run7", "ftp:// is no store that is known"),
        ("s3://user:word@bucket/run7", "holds credentials"),
        ("s3://bucket/run7?key=word", "holds credentials or options"),
        ("s3:///run7", "'' is no name of a bucket"),
        ("s3://Bucket/run7", "'Bucket' is no name of a bucket"),
        ("s3://bucket/../run7", "a part of the path is . or .."),
        ("file://run7", "three slashes"),
        ("file:///", "names no folder"),
        ("file:///not/there", "there is no such folder"),
    ],
)
def test_a_url_that_names_no_store_is_one_line(
    url: str, reason: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert _store("list", url) == 2
    stderr = capsys.readouterr().err
    assert reason in stderr
    assert len(stderr.splitlines()) == 1
    assert "word" not in stderr


def test_a_folder_that_cannot_be_made_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    save(tmp_path / "one", 12)
    (tmp_path / "file").touch()
    assert _store("push", f"file://{tmp_path}/store", tmp_path / "one") == 0
    assert _store("pull", f"file://{tmp_path}/store", tmp_path / "file/below") == 2
    assert capsys.readouterr().err == f"ttp: error: {tmp_path}/file/below: Not a directory\n"


def test_azure_without_an_account_names_the_variables(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in azure_server.CREDENTIALS:
        monkeypatch.delenv(name, raising=False)
    assert _store("list", "az://container/run7") == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.endswith("AZURE_STORAGE_ACCOUNT_NAME with AZURE_STORAGE_ACCOUNT_KEY or AZURE_STORAGE_SAS_KEY")


def test_a_store_that_refuses_is_one_line(
    s3: str, server: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    save(tmp_path / "one", 12)

    def error_line(*arguments: object) -> str:
        assert _store(*arguments) == 2
        (line,) = capsys.readouterr().err.splitlines()
        assert object_store.CREDENTIALS["AWS_SECRET_ACCESS_KEY"] not in line
        return str(line)

    for action in (("list",), ("push", tmp_path / "one"), ("pull", tmp_path / "two")):
        line = error_line(action[0], "s3://is-not-there/run7", *action[1:])
        assert f"there is no bucket is-not-there in {server}" in line
    assert "there is no complete checkpoint in it" in error_line("pull", s3, tmp_path / "two")
    assert "no tracker names a step" in error_line("push", s3, tmp_path)
    assert "there is no such folder" in error_line("push", s3, tmp_path / "nothing")
    assert error_line("push", s3, tmp_path / "one", "--step", "9").endswith(
        f"{tmp_path}/one/iter_0000009: there is no such checkpoint"
    )
    (tmp_path / "one/iter_0000009").mkdir()
    line = error_line("push", s3, tmp_path / "one", "--step", "9")
    assert "/iter_0000009: has no ttp_manifest.json, as what is saved without the adaptor" in line
    assert "--step is -1" in error_line("pull", s3, tmp_path / "two", "--step", "-1")
    monkeypatch.delenv("AWS_SECRET_ACCESS_KEY")
    assert "AWS_ACCESS_KEY_ID is set, but AWS_SECRET_ACCESS_KEY is not" in error_line("list", s3)
    monkeypatch.delenv("AWS_ACCESS_KEY_ID")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert "needs credentials, and there are none" in error_line("list", s3)
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(tmp_path / "keys"))
    assert "there is no such file" in error_line("list", s3)
    (tmp_path / "keys").write_text("keep-this-secret\n")
    assert "is no file of credentials" in error_line("list", s3)
    (tmp_path / "keys").write_text("[other]\naws_access_key_id = a\naws_secret_access_key = %b\n")
    assert "has no profile [default]" in error_line("list", s3)
    monkeypatch.setenv("AWS_PROFILE", "other")
    assert _store("list", s3) == 0
    monkeypatch.setenv("TTP_STORE_ENDPOINT", "https://user:word@host")
    assert "TTP_STORE_ENDPOINT holds a text (not shown)" in error_line("list", s3)
    monkeypatch.delenv("TTP_STORE_ENDPOINT")
    assert "TTP_STORE_ENDPOINT is not set" in error_line("list", "obs://bucket/run7")


def test_later_steps_of_a_folder_stay(s3: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    save(tmp_path / "one", 12)
    assert _store("push", s3, tmp_path / "one") == 0
    later_folder = save(tmp_path / "two", 24)
    contents_before = contents(later_folder)
    assert _store("pull", s3, tmp_path / "two") == 2
    assert "holds step 24, which is later than step 12" in capsys.readouterr().err
    assert (contents(later_folder), tracker.tracked_step(tmp_path / "two")) == (contents_before, 24)


def test_a_store_without_its_package_is_one_line() -> None:
    script = (
        "import sys; sys.modules['obstore'] = None\n"
        "from adaptor.launchers.cli.ttp import main; sys.exit(main(['store', 'list', 's3://bucket/run7']))"
    )
    completed = captured([sys.executable, "-c", script], code=2)
    assert completed.stderr.count("\n") == 1
    assert "pip install '.[store]' in the folder of the adaptor's sources" in completed.stderr


def test_obs_urls_put_the_bucket_in_the_host_name(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in (("OBS_ACCESS_KEY_ID", "a"), ("OBS_SECRET_ACCESS_KEY", "b")):
        monkeypatch.setenv(name, value)
    store = open_store("obs://bucket/run7", "https://obs.example.invalid")
    assert "bucket.obs.example.invalid" in json.dumps(store._client.config)  # type: ignore[attr-defined]


def test_a_url_is_shown_unchanged() -> None:
    for url in ("s3://bucket/run7/a", "file:///folder/run7", "gs://bucket"):
        assert str(settings.parse(url)) == url
    with pytest.raises(StoreError, match="cannot be printed"):
        settings.parse("s3://bucket/a\nb")
