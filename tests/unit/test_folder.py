"""What a save folder has to be."""

from __future__ import annotations

from pathlib import Path

import pytest

from adaptor.checkpoint import folder
from adaptor.errors import ConfigError


def test_a_folder_is_made(tmp_path: Path) -> None:
    folder.require_writable(tmp_path / "a" / "b")
    folder.require_writable(str(tmp_path / "12:30"))
    assert [path.name for path in sorted(tmp_path.iterdir())] == ["12:30", "a"]


@pytest.mark.parametrize("save", ["msc://profile/folder", Path("msc://profile/folder"), "s3://bucket"])
def test_an_object_store_is_no_folder(
    save: str | Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Last words, and the regular saves beside them, would be in a folder `msc:` of one machine."""
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigError, match=r"--save is .*: last words need a folder of a file system"):
        folder.require_writable(save)
    assert list(tmp_path.iterdir()) == []
