"""The requirements for a save folder."""

from __future__ import annotations

from pathlib import Path

import pytest

from adaptor.checkpoint import publish, save_folder_claim
from adaptor.checkpoint.hashing import HashingFile
from adaptor.errors import ConfigError
from adaptor.protocol import naming
from tests.unit.launching import said


def test_a_folder_is_made(tmp_path: Path) -> None:
    save_folder_claim.require_writable(tmp_path / "a" / "b")
    save_folder_claim.require_writable(str(tmp_path / "12:30"))
    assert [path.name for path in sorted(tmp_path.iterdir())] == ["12:30", "a"]


@pytest.mark.parametrize("save", ["msc://profile/folder", Path("msc://profile/folder"), "s3://bucket"])
def test_an_object_store_is_no_folder(
    save: str | Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Last words and regular saves would land in a folder named `msc:` on one machine."""
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigError, match=r"--save is .*: the checkpoint after a failure needs a folder"):
        save_folder_claim.require_writable(save)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.robustness(
    "B9", "training begins anew in a folder whose tracker is gone", "one line names the newest checkpoint"
)
def test_checkpoints_without_a_tracker_are_reported(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    written = publish.prepare(tmp_path, 30)
    with HashingFile(written / "model.pt") as file:
        file.write(b"x")
    publish.publish(tmp_path, 30, [file.entry("model.pt")], {}, 1)
    (tmp_path / naming.final_name(20)).mkdir()
    refused = f"--save {tmp_path} holds step 30, but training begins at step"
    remedy = "load step 30, or choose another folder"
    back = f"; to go back to step 20, write 20 into {tmp_path / naming.TRACKER}"
    for step, advice in ((0, ""), (20, back)):
        with pytest.raises(ConfigError) as caught:
            save_folder_claim.require_no_later_step(tmp_path, step)
        assert str(caught.value) == f"{refused} {step}: {remedy}{advice}"
    assert said(capsys) == ""
    (tmp_path / naming.TRACKER).unlink()
    save_folder_claim.require_no_later_step(tmp_path, 0)
    assert "holds checkpoints up to step 30 that no tracker names" in said(capsys)
    save_folder_claim.require_no_later_step(tmp_path, 30)
    assert said(capsys) == ""
