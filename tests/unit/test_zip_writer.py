"""The zip files that a transform writes, read by the standard library and by torch."""

from __future__ import annotations

import zipfile
from pathlib import Path

import pytest
import torch

from adaptor.transform.writing import ZipWriter

LARGE = 1 << 30


def test_zipfile_and_torch_read_the_written_archive(tmp_path: Path) -> None:
    files = {
        "a/version": b"3\n",
        "a/data.pkl": b"x" * 99,
        "a/empty": b"",
        "a/data/0": bytes(range(256)) * 999,
    }
    with (tmp_path / "a.zip").open("wb") as file:
        writer = ZipWriter(file.write, file.tell)
        for name, content in files.items():
            writer.add(name, len(content), [content[:7], memoryview(content)[7:]])
        writer.close()
    with zipfile.ZipFile(tmp_path / "a.zip") as archive:
        assert archive.namelist() == list(files)
        assert {name: archive.read(name) for name in files} == files
        assert archive.testzip() is None
    reader = torch._C.PyTorchFileReader(str(tmp_path / "a.zip"))
    for name, content in files.items():
        assert reader.get_record(name.removeprefix("a/")) == content
        assert reader.get_record_offset(name.removeprefix("a/")) % 64 == 0


def test_pieces_of_another_total_size_are_refused(tmp_path: Path) -> None:
    with (tmp_path / "a.zip").open("wb") as file, pytest.raises(ValueError, match="a/b: has 3 bytes, 4 were"):
        ZipWriter(file.write, file.tell).add("a/b", 4, [b"xyz"])


def test_an_archive_may_start_at_an_offset(tmp_path: Path) -> None:
    with (tmp_path / "a.zip").open("wb") as file:
        file.write(b"other bytes")
        writer = ZipWriter(file.write, file.tell)
        writer.add("a/b", 4, [b"data"])
        writer.close()
    content = (tmp_path / "a.zip").read_bytes()
    (tmp_path / "alone.zip").write_bytes(content[len(b"other bytes") :])
    with zipfile.ZipFile(tmp_path / "alone.zip") as archive:
        assert archive.read("a/b") == b"data"
        assert archive.infolist()[0].header_offset == 0


def test_zip64_sizes_and_offsets(tmp_path: Path) -> None:
    """The zeros are holes of a sparse file."""
    zeros = memoryview(bytes(LARGE))
    with (tmp_path / "a.zip").open("wb") as file:

        def write(data: bytes | bytearray | memoryview) -> None:
            if len(data) == LARGE:
                file.seek(LARGE, 1)
            else:
                file.write(data)

        writer = ZipWriter(write, file.tell)
        writer.add("a/version", 2, [b"3\n"])
        writer.add("a/large", 5 * LARGE, [zeros] * 5)
        writer.add("a/middle", 3 * LARGE, [zeros] * 3)
        writer.add("a/behind", 6, [b"behind"])
        writer.close()
    with zipfile.ZipFile(tmp_path / "a.zip") as archive:
        sizes = {info.filename: info.file_size for info in archive.infolist()}
        assert sizes == {"a/version": 2, "a/large": 5 * LARGE, "a/middle": 3 * LARGE, "a/behind": 6}
        assert archive.read("a/behind") == b"behind"
        with archive.open("a/large") as large:
            assert large.read(9) == bytes(9)
    assert torch._C.PyTorchFileReader(str(tmp_path / "a.zip")).get_record("behind") == b"behind"
