from __future__ import annotations

import contextlib
import io
import os
import resource
from pathlib import Path

import pytest
import torch

from adaptor.checkpoint import disk, hashing, manifest
from adaptor.checkpoint.hashing import HashingFile
from adaptor.checkpoint.manifest import Manifest
from adaptor.errors import CheckpointError
from adaptor.protocol import naming
from adaptor.protocol.naming import FileEntry
from adaptor.verification.agreed_state import AgreedGroup, AgreedShard, AgreedState


def _folder(path: Path, **files: bytes) -> Manifest:
    """Make a folder with these files and its manifest."""
    entries = []
    for name, content in files.items():
        with HashingFile(path / name) as file:
            file.write(content)
        entries.append(file.entry(name))
    new_manifest = Manifest.now(7, entries, {"dense": 1}, 4)
    (path / naming.MANIFEST).write_bytes(new_manifest.encode())
    return new_manifest


def test_a_manifest_is_read_back_as_it_was_written(tmp_path: Path) -> None:
    new_manifest = _folder(tmp_path, a=b"one", b=b"")
    assert manifest.read(tmp_path) == new_manifest
    assert manifest.defects(tmp_path) == []


def test_every_kind_of_damage_is_named(tmp_path: Path) -> None:
    _folder(tmp_path, gone=b"x", short=b"long enough", changed=b"abc")
    (tmp_path / "gone").unlink()
    (tmp_path / "short").write_bytes(b"long")
    (tmp_path / "changed").write_bytes(b"abd")
    (tmp_path / "unknown").write_bytes(b"is fine")
    text = "\n".join(manifest.defects(tmp_path))
    assert "gone: missing" in text
    assert "short: 4 bytes, the manifest says 11" in text
    assert "changed: checksum differs" in text
    assert len(manifest.defects(tmp_path)) == 3
    assert len(manifest.defects(tmp_path, checksums=False)) == 2


def test_a_file_without_a_checksum_is_compared_by_size(tmp_path: Path) -> None:
    (tmp_path / "a").write_bytes(b"abc")
    (tmp_path / naming.MANIFEST).write_bytes(Manifest.now(1, [FileEntry("a", 3, None)], {}, 1).encode())
    assert manifest.defects(tmp_path) == []


@pytest.mark.parametrize("text", ["", "{", "[]", "{}", '{"format": 1, "step": 1}', '{"format": 99}'])
def test_a_damaged_manifest_is_one_line(tmp_path: Path, text: str) -> None:
    (tmp_path / naming.MANIFEST).write_text(text)
    with pytest.raises(CheckpointError) as caught:
        manifest.read(tmp_path)
    assert "\n" not in str(caught.value)
    assert manifest.defects(tmp_path) == [str(caught.value)]


def test_no_flipped_bit_of_a_manifest_goes_unnoticed() -> None:
    shard = AgreedShard({"param": "0123"}, (0, 1))
    state = AgreedState(12, {"mp_rank_00": AgreedGroup("abcd", [shard], 12, ("ff",))})
    files = [FileEntry("a.pt", 5, None, xxh3_128_blocks="aa")]
    written = Manifest.now(12, files, {}, 2, "first", state=state)
    text = written.encode()
    for place in range(8 * len(text)):
        changed = bytearray(text)
        changed[place // 8] ^= 1 << place % 8
        with contextlib.suppress(CheckpointError):
            assert manifest.decode(bytes(changed), "a manifest") == written, changed[place // 8 - 10 :][:20]


def test_a_missing_manifest_is_a_problem(tmp_path: Path) -> None:
    assert "cannot be read" in manifest.defects(tmp_path)[0]


def test_torch_saves_the_same_bytes_through_it(tmp_path: Path) -> None:
    state = {
        "a": torch.arange(3_000_000),
        "b": [torch.ones(3, dtype=torch.bfloat16), "text"],
        "c": torch.empty(0),
    }
    counts: list[int] = []
    with HashingFile(tmp_path / "ours", counts.append) as file:
        torch.save(state, file)  # type: ignore[arg-type]
    plain = io.BytesIO()
    torch.save(state, plain)
    assert (tmp_path / "ours").read_bytes() == plain.getvalue()
    assert file.bytes == sum(counts) == len(plain.getvalue())
    assert len(counts) > 5, "progress within one large tensor"
    assert file.entry("x") == hashing.entry_of(tmp_path / "ours", "x")
    assert file.entry("x").xxh3_128 == hashing.hash_file(tmp_path / "ours")


def test_an_exception_of_progress_ends_the_write(tmp_path: Path) -> None:
    class Stop(Exception):
        pass

    def stop(count: int) -> None:
        if count > 1000:
            raise Stop

    with pytest.raises(Stop), HashingFile(tmp_path / "file", stop) as file:
        torch.save({"a": torch.zeros(10_000_000)}, file)  # type: ignore[arg-type]
    assert file.bytes < 10_000_000


def test_a_short_write_is_continued(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = HashingFile(tmp_path / "file")
    real = file._file

    class Short:
        closed = False

        def write(self, data: memoryview) -> int:
            return real.write(data[:3])

        def fileno(self) -> int:
            return real.fileno()

    monkeypatch.setattr(file, "_file", Short())
    assert file.write(b"0123456789") == 10
    monkeypatch.setattr(file, "_file", real)
    file.close()
    assert (tmp_path / "file").read_bytes() == b"0123456789"
    assert file.bytes == 10


def test_a_large_file_has_a_checksum_of_its_blocks_too(tmp_path: Path) -> None:
    content = os.urandom(5 * hashing.BLOCK + 10)
    with HashingFile(tmp_path / "large") as large, HashingFile(tmp_path / "small") as small:
        large.write(content)
        small.write(content[: hashing.BLOCK])
    entry = large.entry("large")
    digests = hashing.block_digests(tmp_path / "large", 0, 9)
    assert len(digests) == 6 * hashing.DIGEST_BYTES
    assert digests == hashing.block_digests(tmp_path / "large", 0, 6, threads=3)
    assert entry.xxh3_128_blocks == hashing.join_blocks(digests)
    assert entry.xxh3_128 == hashing.hash_file(tmp_path / "large")
    assert entry == hashing.entry_of(tmp_path / "large", "large")
    assert small.entry("small").xxh3_128_blocks is None


def test_close_waits_for_the_disk_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    synced: list[int] = []
    monkeypatch.setattr(os, "fsync", synced.append)
    with HashingFile(tmp_path / "file") as file:
        file.write(b"x")
    file.close()
    assert len(synced) == 1


@pytest.mark.parametrize(
    ("seconds", "synced"), [(0.1, [4, 20, 36, 52]), (0.4, [4, 16, 32, 48]), (1.5, [4, 8, 12, 16])]
)
def test_a_slow_disk_is_asked_more_often(
    seconds: float, synced: list[int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The bytes between two syncs, for slices of four bytes and at most sixteen."""
    monkeypatch.setattr(hashing, "_SLICE", 4)
    monkeypatch.setattr(hashing, "_LONGEST", 16)
    clock, at = [0.0], []
    monkeypatch.setattr(hashing.time, "monotonic", lambda: clock[0])

    def sync(descriptor: int) -> None:
        at.append(os.fstat(descriptor).st_size)
        clock[0] += seconds

    monkeypatch.setattr(os, "fdatasync", sync)
    with HashingFile(tmp_path / "file") as file:
        for _ in range(15):
            file.write(b"four")
    assert at[:4] == synced


def test_the_disk_begins_between_two_syncs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hashing, "_SLICE", 4)
    monkeypatch.setattr(hashing, "_BEGIN", 8)
    monkeypatch.setattr(hashing, "_GROWTH", 8)
    calls: list[str] = []
    begin_to_write, fdatasync = disk.begin_to_write, os.fdatasync

    def begin(descriptor: int) -> None:
        begin_to_write(descriptor)
        calls.append(f"begin {os.fstat(descriptor).st_size}")

    def sync(descriptor: int) -> None:
        fdatasync(descriptor)
        calls.append(f"sync {os.fstat(descriptor).st_size}")

    monkeypatch.setattr(disk, "begin_to_write", begin)
    monkeypatch.setattr(os, "fdatasync", sync)
    monkeypatch.setattr(hashing.time, "monotonic", lambda: 0.0)
    with HashingFile(tmp_path / "file") as file:
        for _ in range(9):
            file.write(b"four")
    assert calls == ["sync 4", "begin 12", "begin 20", "begin 28", "sync 36"]


def test_a_file_system_that_takes_no_hint_is_no_error() -> None:
    reader, writer = os.pipe()
    try:
        disk.begin_to_write(writer)  # ESPIPE
    finally:
        os.close(reader)
        os.close(writer)


def test_a_file_that_cannot_be_opened_is_not_called_damaged(tmp_path: Path) -> None:
    """The process has no free descriptor; the file may be intact."""
    (tmp_path / "shard.pt").write_bytes(b"x")
    entries = [FileEntry("shard.pt", 1, "0"), FileEntry("gone.pt", 1, "0")]
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (0, hard))
    try:
        unreadable, missing = manifest.compare(tmp_path, entries)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    assert isinstance(unreadable, manifest.Unreadable)
    assert "shard.pt: cannot be read (Too many open files)" in unreadable
    assert not isinstance(missing, manifest.Unreadable)


def test_room_is_reserved_and_a_file_keeps_its_size(tmp_path: Path) -> None:
    """Without room or support for it, writing continues."""
    with (tmp_path / "file").open("wb") as file:
        disk.reserve(file.fileno(), 1 << 20)
        status = os.fstat(file.fileno())
        assert status.st_size == 0
        file.write(b"content")
        disk.reserve(file.fileno(), 1 << 62)  # ENOSPC or EFBIG
    assert (tmp_path / "file").read_bytes() == b"content"
    reader, writer = os.pipe()
    try:
        disk.reserve(writer, 1 << 20)  # ESPIPE
        os.write(writer, b"on")
        assert os.read(reader, 2) == b"on"
    finally:
        os.close(reader)
        os.close(writer)
