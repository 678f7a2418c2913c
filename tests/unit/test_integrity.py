"""`integrity.json`, which Megatron-LM's `--verify-integrity` writes and checks since core 0.17."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from adaptor.checkpoint import dcp, manifest, publish, regular_folder
from adaptor.checkpoint.hashing import HashingFile
from adaptor.errors import CheckpointError
from adaptor.protocol import naming
from adaptor.protocol.naming import FileEntry
from tests.unit import test_checkpoint_dcp

STEP = 3
FINAL = naming.final_name(STEP)


def framework_checks(folder: Path) -> list[str]:
    """Check the digests as `verify_integrity_manifest` does; return the names of the files."""
    integrity = json.loads((folder / "integrity.json").read_text())
    assert integrity["algorithm"] == "sha256"
    for name, digest in integrity["files"].items():
        assert hashlib.sha256((folder / name).read_bytes()).hexdigest() == digest, name
    return list(integrity["files"])


def _framework_saves(folder: Path) -> None:
    """Write the file as `save_integrity_manifest` does in the folder of a save."""
    files = {
        path.name: hashlib.sha256(path.read_bytes()).hexdigest()
        for path in sorted(folder.iterdir())
        if path.is_file()
    }
    (folder / "integrity.json").write_text(json.dumps({"algorithm": "sha256", "files": files}, indent=2))


def _dump(folder: Path) -> list[FileEntry]:
    """Return the files of two writers, as in last words."""
    entries = []
    for number, planner in enumerate(test_checkpoint_dcp.HALVES):
        part = dcp.RankPart(planner.rank, planner)
        files: dict[str, Callable[[Any], Any]] = {}
        if number == 0:
            files["metadata.json"] = lambda file: file.write(b"{}")
        files |= {part.data_file: part.write_data, part.part_file: part.write_part}
        for name, act in dcp.with_integrity_part(files, planner.rank).items():
            with HashingFile(folder / f"{name}.1") as file:
                act(file)
            entries.append(file.entry(name, 1))
    return entries


def test_last_words_pass_verify_integrity(tmp_path: Path) -> None:
    entries = _dump(publish.prepare(tmp_path, STEP))
    assert publish.publish(tmp_path, STEP, entries, {}, 11)
    names = [".metadata", "__10_0.distcp", "__2_0.distcp", "metadata.json"]
    assert framework_checks(tmp_path / FINAL) == names
    assert manifest.defects(tmp_path / FINAL) == []
    assert {path.name for path in (tmp_path / FINAL).iterdir()} == {*names, "integrity.json", naming.MANIFEST}


@pytest.mark.parametrize("last", ["_drop_others", "move_in", "_tell_tracker"])
def test_publishing_again_after_a_crash(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, last: str) -> None:
    entries = _dump(publish.prepare(tmp_path, STEP))
    real = getattr(publish, last)

    def crashes(*args: Any) -> None:
        real(*args)
        raise KeyboardInterrupt

    monkeypatch.setattr(publish, last, crashes)
    with pytest.raises(KeyboardInterrupt):
        publish.publish(tmp_path, STEP, entries, {}, 2)
    monkeypatch.undo()
    publish.publish(tmp_path, STEP, entries, {}, 2)
    assert len(framework_checks(tmp_path / FINAL)) == 4
    assert manifest.defects(tmp_path / FINAL) == []


def test_a_part_that_differs_from_its_report_is_refused(tmp_path: Path) -> None:
    folder = publish.prepare(tmp_path, STEP)
    entries = _dump(folder)
    part = next(entry for entry in entries if entry.path == ".integrity.2")
    (folder / part.draft).write_bytes(b"x" * part.bytes)
    with pytest.raises(CheckpointError, match=r"\.integrity\.2\.1: checksum differs .*: it was reported"):
        publish.publish(tmp_path, STEP, entries, {}, 2)


def test_a_regular_save_lists_no_temporary_file(tmp_path: Path) -> None:
    """The framework also lists the notes of checksums, which are no part of the checkpoint."""
    regular_folder.prepare_regular(tmp_path, STEP)
    folder = tmp_path / naming.regular_name(STEP)
    (folder / "__0_0.distcp").write_bytes(b"tensors")
    regular_folder.hash_and_leave(folder, folder / "__0_0.distcp")
    _framework_saves(folder)
    assert len(framework_checks(folder)) == 2
    regular_folder.sync_regular(tmp_path, STEP)
    regular_folder.publish_regular(tmp_path, STEP)
    assert framework_checks(tmp_path / FINAL) == ["__0_0.distcp"]
    assert manifest.defects(tmp_path / FINAL) == []


@pytest.mark.parametrize("content", [b"{}", b"[1", b'{"algorithm": "md5", "files": {"a": 1}}'])
def test_a_file_of_unknown_form_is_left_unchanged(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "integrity.json").write_bytes(content)
    regular_folder.settle_integrity(tmp_path)
    assert (tmp_path / "integrity.json").read_bytes() == content
