"""The names of a regular save, however the user writes the folder."""

from __future__ import annotations

import os
import threading
from pathlib import Path

import pytest

from adaptor.patches import _saving

FILE = "iter_0000003/mp_rank_00/model_optim_rng.pt"


@pytest.mark.parametrize("root", ["ckpt", "./ckpt", "ckpt/", "ckpt//", "/x/./ckpt", "/x/ckpt"])
def test_a_save_has_a_folder_of_its_own(root: str) -> None:
    with _saving.regular(root, 3):
        named = Path(_saving.renamed(os.path.join(root, FILE)))  # noqa: PTH118
        base = Path(_saving.renamed(os.path.join(root, "iter_0000003")))  # noqa: PTH118
    assert named == Path(root) / FILE.replace("iter_0000003", "iter_0000003_saving")
    assert base == Path(root) / "iter_0000003_saving"
    assert _saving.renamed(os.path.join(root, FILE)) == os.path.join(root, FILE)  # noqa: PTH118


def test_other_steps_and_folders_keep_their_names() -> None:
    with _saving.regular("ckpt", 3):
        for path in ("ckpt/iter_0000002/a.pt", "elsewhere/iter_0000003/a.pt", "ckpt/iter_00000031"):
            assert _saving.renamed(path) == path


def test_a_dump_beside_a_save_is_none() -> None:
    seen = []
    with _saving.regular("ckpt", 3):
        beside = threading.Thread(target=lambda: seen.append(_saving.renamed(f"ckpt/{FILE}")))
        beside.start()
        beside.join()
    assert seen == [f"ckpt/{FILE}"]
