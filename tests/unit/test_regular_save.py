"""The folder names of regular saves, however the user writes the path."""

from __future__ import annotations

import contextlib
import errno
import os
import shutil
import threading
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
import torch

from adaptor import context
from adaptor.checkpoint import disk, hashing, manifest, regular_folder
from adaptor.checkpoint.lease_content import LeaseContent, Owner
from adaptor.frameworks.regular_save import RegularSaves
from adaptor.protocol import naming
from adaptor.protocol.environment import Generation, WorkerPlace
from adaptor.protocol.naming import MANIFEST, TRACKER, FileEntry

FILE = "iter_0000003/mp_rank_00/model_optim_rng.pt"


def saves() -> RegularSaves:
    return context.part(RegularSaves)


@pytest.fixture(autouse=True)
def _in_a_folder_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


@pytest.mark.parametrize("root", ["ckpt", "./ckpt", "ckpt/", "ckpt//", "{here}/./ckpt", "{here}/ckpt"])
def test_a_save_has_a_folder_of_its_own(root: str, tmp_path: Path) -> None:
    root = root.format(here=tmp_path)
    with saves().regular(root, 3):
        named = Path(saves().renamed(os.path.join(root, FILE)))  # noqa: PTH118
        base = Path(saves().renamed(os.path.join(root, "iter_0000003")))  # noqa: PTH118
    assert named == Path(root) / FILE.replace("iter_0000003", "iter_0000003_saving")
    assert base == Path(root) / "iter_0000003_saving"
    assert saves().renamed(os.path.join(root, FILE)) == os.path.join(root, FILE)  # noqa: PTH118


def test_other_steps_and_folders_keep_their_names() -> None:
    with saves().regular("ckpt", 3):
        for path in ("ckpt/iter_0000002/a.pt", "elsewhere/iter_0000003/a.pt", "ckpt/iter_00000031"):
            assert saves().renamed(path) == path


def test_a_dump_beside_a_save_is_none() -> None:
    names = []
    with saves().regular("ckpt", 3):
        thread = threading.Thread(target=lambda: names.append(saves().renamed(f"ckpt/{FILE}")))
        thread.start()
        thread.join()
    assert names == [f"ckpt/{FILE}"]


@pytest.mark.robustness(
    "A2",
    "a thread of the script saves while the training saves another step",
    "each writes to its own folder",
)
def test_saves_in_two_threads() -> None:
    names: dict[str, str] = {}

    def save() -> None:
        with saves().regular("ckpt", 4):
            names["other"] = saves().renamed("ckpt/iter_0000004/a.pt")

    with saves().regular("ckpt", 3):
        thread = threading.Thread(target=save)
        thread.start()
        thread.join()
        names["main"] = saves().renamed(f"ckpt/{FILE}")
    assert names == {
        "other": "ckpt/iter_0000004_saving/a.pt",
        "main": f"ckpt/{FILE.replace('iter_0000003', 'iter_0000003_saving')}",
    }
    assert saves().renamed(f"ckpt/{FILE}") == f"ckpt/{FILE}"


@pytest.mark.usefixtures("rank_0")
def test_the_tracker_is_rewritten_whole(tmp_path: Path) -> None:
    """ModelLink does not truncate the tracker: 999 written over 1000 would read 9990."""
    (tmp_path / TRACKER).write_text("1000")
    with saves().regular(str(tmp_path), 999):
        (Path(saves().renamed(str(tmp_path / "iter_0000999"))) / "shard.pt").touch()
        tracker = os.open(saves().tracker(str(tmp_path / TRACKER)), os.O_WRONLY | os.O_CREAT)
        with os.fdopen(tracker, "w") as file:
            file.write("999")
    assert (tmp_path / TRACKER).read_text() == "1000"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["iter_0000999", TRACKER]


@pytest.mark.usefixtures("rank_0")
def test_files_that_are_written_after_the_tracker_are_in_the_named_folder(tmp_path: Path) -> None:
    final_folder = tmp_path / "iter_0000003"
    with saves().regular(str(tmp_path), 3):
        (Path(saves().renamed(str(final_folder))) / "shard.pt").touch()
        Path(saves().tracker(str(tmp_path / TRACKER))).write_text("3")
        tokenizer = Path(saves().renamed(str(final_folder))) / "tokenizer"
        tokenizer.mkdir(parents=True)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["iter_0000003", TRACKER]
    assert (final_folder / "tokenizer").is_dir()
    assert manifest.defects(final_folder) == []


def _request(*finalizers: Callable[[], Any]) -> SimpleNamespace:
    """Return the used parts of Megatron's AsyncRequest, with these finalizers."""
    functions = list(finalizers)
    return SimpleNamespace(finalize_fns=functions, add_finalize_fn=functions.append)


@pytest.mark.usefixtures("rank_0")
def test_an_asynchronous_save_has_its_name_when_it_is_finalized(tmp_path: Path) -> None:
    with saves().regular(str(tmp_path), 3, asynchronous=True):
        folder = Path(saves().renamed(str(tmp_path / "iter_0000003")))
        tracker = Path(saves().tracker(str(tmp_path / TRACKER)))
        request = _request(lambda: tracker.write_text("3"))
        saves().scheduled(request)
    (folder / "shard.pt").write_bytes(b"in the background")
    assert [path.name for path in tmp_path.iterdir()] == ["iter_0000003_saving"]
    for put_off in request.finalize_fns:
        put_off()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["iter_0000003", TRACKER]
    assert (tmp_path / TRACKER).read_text() == "3"
    assert manifest.defects(tmp_path / "iter_0000003") == []


@pytest.mark.usefixtures("rank_0")
def test_an_asynchronous_save_has_its_name_before_the_framework_removes_the_one_before(
    tmp_path: Path,
) -> None:
    """With `--save-retain-interval` the writer of the tracker first reads the step to remove."""
    (tmp_path / TRACKER).write_text("3")
    (tmp_path / "iter_0000003").mkdir()
    events: list[tuple[str, list[str], str]] = []
    with saves().regular(str(tmp_path), 6, asynchronous=True):
        folder = Path(saves().renamed(str(tmp_path / "iter_0000006")))
        tracker = Path(saves().tracker(str(tmp_path / TRACKER)))

        def ranks_have_written() -> None:
            (folder / "shard.pt").write_bytes(b"of all")
            events.append(("written", sorted(path.name for path in tmp_path.iterdir()), tracker.read_text()))

        def iter_finalize_fn() -> None:
            events.append(("tracker", sorted(path.name for path in tmp_path.iterdir()), tracker.read_text()))
            tracker.write_text("6")

        request = _request(ranks_have_written, iter_finalize_fn)
        saves().scheduled(request)
    for put_off in request.finalize_fns:
        put_off()
    assert events == [
        ("written", ["iter_0000003", "iter_0000006_saving", TRACKER], "0"),
        ("tracker", ["iter_0000003", "iter_0000006", TRACKER], "3"),
    ]
    assert (tmp_path / TRACKER).read_text() == "6"
    assert [file.path for file in manifest.read(tmp_path / "iter_0000006").files] == ["shard.pt"]


@pytest.mark.usefixtures("rank_0")
def test_a_tracker_finalizer_of_another_name_finds_no_step_to_remove(tmp_path: Path) -> None:
    (tmp_path / TRACKER).write_text("3")
    read: list[str] = []
    with saves().regular(str(tmp_path), 6, asynchronous=True):
        (Path(saves().renamed(str(tmp_path / "iter_0000006"))) / "shard.pt").touch()
        tracker = Path(saves().tracker(str(tmp_path / TRACKER)))
        request = _request(lambda: read.append(tracker.read_text()))
        saves().scheduled(request)
    for put_off in request.finalize_fns:
        put_off()
    assert read == ["0"]
    assert (tmp_path / TRACKER).read_text() == "6"
    assert manifest.defects(tmp_path / "iter_0000006") == []


def test_callers_are_notified_once_the_folder_has_its_name() -> None:
    """Also on the last rank, which does not rename: Weights & Biases refuses a missing folder."""
    notified: list[tuple[str, str]] = []
    with saves().regular("ckpt", 3):
        saves().tell(
            saves().renamed(f"ckpt/{FILE}"), f"ckpt/{TRACKER}", lambda *named: notified.append(named)
        )
        assert not notified
    assert notified == [(f"ckpt/{FILE}", f"ckpt/{TRACKER}")]
    saves().tell("elsewhere/a.pt", "elsewhere/t", lambda *named: notified.append(named))
    assert notified[1:] == [("elsewhere/a.pt", "elsewhere/t")]


def test_a_failed_save_notifies_nobody() -> None:
    def save() -> None:
        with saves().regular("ckpt", 3):
            saves().tell(saves().renamed(f"ckpt/{FILE}"), f"ckpt/{TRACKER}", pytest.fail)
            raise OSError("no space")

    with pytest.raises(OSError, match="no space"):
        save()


@pytest.mark.usefixtures("rank_0")
def test_an_asynchronous_save_notifies_once_all_ranks_have_met(tmp_path: Path) -> None:
    events: list[tuple[str, list[str]]] = []

    def look(event: str) -> None:
        events.append((event, sorted(path.name for path in tmp_path.iterdir())))

    with saves().regular(str(tmp_path), 3, asynchronous=True):
        folder = Path(saves().renamed(str(tmp_path / "iter_0000003")))
        (folder / "shard.pt").touch()
        saves().tracker(str(tmp_path / TRACKER))
        request = _request(lambda: saves().tell(str(folder), "", lambda *named: look(named[0])))
        saves().scheduled(request, lambda: look("met"))
    for put_off in request.finalize_fns:
        put_off()
    named = ["iter_0000003", TRACKER]
    assert events == [("met", named), (str(tmp_path / "iter_0000003"), named)]


@pytest.mark.usefixtures("rank_0", "armed")
def test_a_changed_byte_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Files that `torch.save` writes into the save are hashed; copies elsewhere are not."""
    monkeypatch.setattr(regular_folder, "_SMALL", -1)  # or unhashed small files would be hashed, too
    with saves().regular(str(tmp_path), 3):
        folder = Path(saves().renamed(str(tmp_path / "iter_0000003")))
        (folder / "mp_rank_00").mkdir()
        for path in (str(folder / "mp_rank_00" / "a.pt"), folder / "b.pt", tmp_path / "c.pt"):
            torch.save({"a": torch.arange(10)}, path)
        torch.save(torch.zeros(2 << 20), folder / "large.pt")
        (folder / "d.pt").write_bytes(b"written by another process")
        saves().tracker(str(tmp_path / TRACKER))
    final = tmp_path / "iter_0000003"
    assert {path.name for path in final.rglob("*")} == {
        *("mp_rank_00", "a.pt", "b.pt", "d.pt", "large.pt", MANIFEST)
    }
    assert torch.load(final / "mp_rank_00" / "a.pt")["a"].tolist() == list(range(10))
    assert {path.name for path in tmp_path.iterdir()} == {"iter_0000003", "c.pt", TRACKER}
    hashed = {entry.path: entry.xxh3_128 is not None for entry in manifest.read(final).files}
    assert hashed == {"mp_rank_00/a.pt": True, "b.pt": True, "d.pt": False, "large.pt": True}
    divided = [entry.path for entry in manifest.read(final).files if entry.xxh3_128_blocks is not None]
    assert divided == ["large.pt"]
    assert manifest.defects(final) == []
    content = bytearray((final / "b.pt").read_bytes())
    content[len(content) // 2] ^= 1
    (final / "b.pt").write_bytes(content)
    assert manifest.defects(final) == [f"{final / 'b.pt'}: checksum differs from the manifest"]


def test_checksums_survive_a_crash_before_the_name(tmp_path: Path) -> None:
    """The manifest exists, the notes are gone, the final name is missing: the next call has the checksums."""
    folder = tmp_path / "iter_0000003_saving"
    regular_folder.prepare_regular(tmp_path, 3)
    (folder / "a.pt").write_bytes(b"content")
    regular_folder.leave_note(folder, FileEntry("a.pt", 7, hashing.hash_file(folder / "a.pt")))
    copy = tmp_path / "copy"
    shutil.copytree(folder, copy / folder.name)
    regular_folder.publish_regular(tmp_path, 3)
    (tmp_path / "iter_0000003").rename(folder)
    regular_folder.publish_regular(tmp_path, 3)
    (entry,) = manifest.read(tmp_path / "iter_0000003").files
    assert entry.xxh3_128 == hashing.hash_file(tmp_path / "iter_0000003" / "a.pt")
    # A file rewritten after its note has another size: it gets no checksum.
    (copy / folder.name / "a.pt").write_bytes(b"other content")
    regular_folder.publish_regular(copy, 3)
    (entry,) = manifest.read(copy / "iter_0000003").files
    assert (entry.bytes, entry.xxh3_128) == (13, None)


@pytest.mark.usefixtures("armed")
def test_a_file_without_room_for_its_checksum_note_is_saved(tmp_path: Path) -> None:
    """The file name has no room for a suffix; the earlier note of another file is stale."""
    with saves().regular(str(tmp_path), 3):
        folder = Path(saves().renamed(str(tmp_path / "iter_0000003")))
        name = f"{'n' * 248}.pt"
        for path in (folder / name, folder / "a.pt"):
            torch.save({"a": 1}, path)
        note = folder / "a.pt.ttp-xxh3"
        note.unlink()
        note.mkdir()  # the next note cannot be written, and this note cannot be removed
        torch.save({"a": 2}, folder / "a.pt")
    regular_folder.publish_regular(tmp_path, 3)
    checksums = {entry.path: entry.xxh3_128 for entry in manifest.read(tmp_path / "iter_0000003").files}
    assert checksums == {name: None, "a.pt": None}


def test_a_note_of_an_earlier_file_is_not_read(tmp_path: Path) -> None:
    (folder := tmp_path / "iter_0000003_saving").mkdir()
    file = folder / "a.pt"
    file.write_bytes(b"earlier")
    regular_folder.leave_note(folder, FileEntry("a.pt", 7, hashing.hash_file(file)))
    assert regular_folder.noted_entries(folder, [file])[0].xxh3_128 is not None
    written = (folder / "a.pt.ttp-xxh3").stat().st_mtime_ns
    file.write_bytes(b"another")
    os.utime(file, ns=(written + 1, written + 1))
    assert regular_folder.noted_entries(folder, [file])[0].xxh3_128 is None


def test_a_note_that_cannot_be_removed_stays(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (folder := tmp_path / "iter_0000003_saving").mkdir()
    (folder / "a.pt").write_bytes(b"written")
    regular_folder.leave_note(folder, FileEntry("a.pt", 7, hashing.hash_file(folder / "a.pt")))
    unlink = Path.unlink

    def refuses(path: Path, missing_ok: bool = False) -> None:
        if regular_folder.is_note(path):
            raise OSError(errno.ESTALE, os.strerror(errno.ESTALE), str(path))
        unlink(path, missing_ok)

    monkeypatch.setattr(Path, "unlink", refuses)
    regular_folder.publish_regular(tmp_path, 3)
    assert manifest.defects(tmp_path / "iter_0000003") == []


def test_torch_dist_tensors_have_a_checksum_before_their_writer_reports_them(tmp_path: Path) -> None:
    folder = tmp_path / naming.regular_name(3)
    folder.mkdir()
    file = folder / "__0_0.distcp"
    file.write_bytes(b"tensors")
    noted = []

    class Results:
        def put(self, result: str) -> None:
            noted.append((result, regular_folder.noted_entries(folder, [file])))

    results = Results()
    saves().hashing(file, results).put("written")
    assert noted == [("written", [FileEntry("__0_0.distcp", 7, hashing.hash_file(file))])]
    elsewhere = tmp_path / "x.distcp"
    assert saves().hashing(elsewhere, results) is results


def test_unhashed_files_get_a_checksum_unless_they_are_large(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    saving = tmp_path / naming.regular_name(3)
    saving.mkdir()
    for name, size in ((".metadata", 10), ("__0_0.distcp", 11)):
        (saving / name).write_bytes(bytes(size))
    monkeypatch.setattr(regular_folder, "_SMALL", 10)
    regular_folder.sync_regular(tmp_path, 3)
    regular_folder.publish_regular(tmp_path, 3)
    final = tmp_path / "iter_0000003"
    entries = {entry.path: entry for entry in manifest.read(final).files}
    assert entries[".metadata"].xxh3_128 == hashing.hash_file(final / ".metadata")
    assert entries["__0_0.distcp"].xxh3_128 is None
    assert {path.name for path in final.iterdir()} == {*entries, MANIFEST}
    (final / ".metadata").write_bytes(bytes(9) + b"x")
    assert manifest.defects(final) == [f"{final / '.metadata'}: checksum differs from the manifest"]


@pytest.fixture
def _node_1(monkeypatch: pytest.MonkeyPatch, rank_0: None) -> None:
    """Act as the first rank of the second node, under ttprun."""
    monkeypatch.setattr(context.part(WorkerPlace), "node", 1)
    monkeypatch.setattr(context.part(Generation), "name", "0f3a5c21")


@pytest.mark.usefixtures("_node_1")
def test_a_save_on_a_disk_of_the_node_gets_its_name_there(tmp_path: Path) -> None:
    """Node 0 cannot rename on that disk."""
    with saves().regular(str(tmp_path), 3):
        (Path(saves().renamed(str(tmp_path / "iter_0000003"))) / "shard.pt").write_bytes(b"of this node")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["iter_0000003", TRACKER]
    assert (tmp_path / TRACKER).read_text() == "3"
    assert [file.path for file in manifest.read(tmp_path / "iter_0000003").files] == ["shard.pt"]
    with saves().regular(str(tmp_path), 6):
        pass
    assert sorted(path.name for path in tmp_path.iterdir()) == ["iter_0000003", TRACKER], (
        "nothing was written"
    )


@pytest.mark.parametrize("reason", ["the lease is seen", "it has its name", "an exception"])
@pytest.mark.usefixtures("_node_1")
def test_a_shared_save_gets_its_name_from_rank_0_alone(reason: str, tmp_path: Path) -> None:
    saving = tmp_path / naming.regular_name(3, "0f3a5c21")
    if reason == "the lease is seen":
        owner = Owner.of(os.getpid())
        lease = LeaseContent(**msgspec.structs.asdict(owner), generation="0f3a5c21")
        (tmp_path / naming.LEASE).write_bytes(msgspec.json.encode(lease))
    with contextlib.suppress(ZeroDivisionError), saves().regular(str(tmp_path), 3):
        (saving / "shard.pt").write_bytes(b"of this node")
        if reason == "it has its name":
            saving.rename(tmp_path / "iter_0000003")
        elif reason == "an exception":
            raise ZeroDivisionError
    assert not (tmp_path / TRACKER).exists()
    assert not (tmp_path / "iter_0000003" / MANIFEST).exists()


@pytest.mark.usefixtures("_node_1")
def test_an_older_version_on_its_way_out_is_no_save_of_this_node(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A shared folder without a lease, in which a step is saved again while the disk slowly removes files."""
    saving = tmp_path / naming.regular_name(3, "0f3a5c21")
    for content in (b"older", b"newer"):
        with saves().regular(str(tmp_path), 3):
            (saving / "shard.pt").write_bytes(content)
            with monkeypatch.context() as patch:
                patch.setattr(disk, "remove", lambda path: None)
                regular_folder.publish_regular(tmp_path, 3, "0f3a5c21")
    assert (tmp_path / "iter_0000003" / "shard.pt").read_bytes() == b"newer"


@pytest.mark.usefixtures("_node_1")
def test_a_shared_folder_without_a_lease_stops_no_job(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rank 0 has renamed the save in a shared folder, and the answer to this node's rename is lost."""

    def rename(path: Path, target: Path) -> None:
        raise OSError(errno.ESTALE, os.strerror(errno.ESTALE), str(path))

    with saves().regular(str(tmp_path), 3):
        (tmp_path / naming.regular_name(3, "0f3a5c21") / "shard.pt").write_bytes(b"of all")
        regular_folder.publish_regular(tmp_path, 3, "0f3a5c21")
        monkeypatch.setattr(Path, "rename", rename)
    assert manifest.defects(tmp_path / "iter_0000003") == []
    assert not (tmp_path / TRACKER).exists()


def test_nodes_that_share_another_disk_name_a_save_once(tmp_path: Path) -> None:
    """A folder left by an incident at the same step is on the disk, too."""
    saving = tmp_path / naming.regular_name(3, "0f3a5c21")
    for folder in (saving, tmp_path / naming.abandoned_name(saving.name)):
        folder.mkdir()
        (folder / "shard.pt").write_bytes(b"of these nodes")
    taken = regular_folder.take_on_own_disk(tmp_path, 3, "0f3a5c21")
    assert taken is not None
    assert regular_folder.take_on_own_disk(tmp_path, 3, "0f3a5c21") is None
    regular_folder.sync_regular(tmp_path, 3, "0f3a5c21", taken)
    regular_folder.publish_regular(tmp_path, 3, "0f3a5c21", taken)
    assert manifest.defects(tmp_path / "iter_0000003") == []
    assert manifest.read(tmp_path / "iter_0000003").part
