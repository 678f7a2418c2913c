"""The names of a regular save, however the user writes the folder."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from adaptor.checkpoint import manifest
from adaptor.checkpoint.naming import TRACKER
from adaptor.control import runtime
from adaptor.control.board import Board, BoardMemory
from adaptor.control.session import Session
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


@pytest.fixture
def _rank_0(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    memory = BoardMemory([0])
    session = Session(Board(0, memory.path, memory.slots), lambda *_: None, lambda _: None)
    monkeypatch.setattr(runtime, "get", lambda: SimpleNamespace(rank=0, session=session))
    yield
    memory.close()


@pytest.mark.usefixtures("_rank_0")
def test_a_framework_that_writes_over_the_tracker(tmp_path: Path) -> None:
    """ModelLink does not empty it before it writes: 999 over 1000 would be 9990."""
    (tmp_path / TRACKER).write_text("1000")
    with _saving.regular(str(tmp_path), 999):
        Path(_saving.renamed(str(tmp_path / "iter_0000999"))).mkdir()
        tracker = os.open(_saving.tracker(str(tmp_path / TRACKER)), os.O_WRONLY | os.O_CREAT)
        with os.fdopen(tracker, "w") as file:
            file.write("999")
    assert (tmp_path / TRACKER).read_text() == "1000"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["iter_0000999", TRACKER]


@pytest.mark.usefixtures("_rank_0")
def test_an_asynchronous_save_has_its_name_when_it_is_finalized(tmp_path: Path) -> None:
    put_off: list[Callable[[], Any]] = []
    with _saving.regular(str(tmp_path), 3, asynchronous=True):
        folder = Path(_saving.renamed(str(tmp_path / "iter_0000003")))
        folder.mkdir()
        tracker = Path(_saving.tracker(str(tmp_path / TRACKER)))
        _saving.scheduled(SimpleNamespace(add_finalize_fn=put_off.append))
    (folder / "shard.pt").write_bytes(b"in the background")
    assert [path.name for path in tmp_path.iterdir()] == ["iter_0000003_saving"]
    tracker.write_text("3")  # the framework does, before what was put off
    (finalize,) = put_off
    finalize()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["iter_0000003", TRACKER]
    assert (tmp_path / TRACKER).read_text() == "3"
    assert manifest.verify(tmp_path / "iter_0000003") == []


def test_who_asks_for_a_folder_is_told_when_it_has_its_name() -> None:
    """On the last rank, which does not give it: Weights & Biases takes no folder that is not there."""
    told: list[tuple[str, str]] = []
    with _saving.regular("ckpt", 3):
        _saving.tell(_saving.renamed(f"ckpt/{FILE}"), f"ckpt/{TRACKER}", lambda *named: told.append(named))
        assert not told
    assert told == [(f"ckpt/{FILE}", f"ckpt/{TRACKER}")]
    _saving.tell("elsewhere/a.pt", "elsewhere/t", lambda *named: told.append(named))
    assert told[1:] == [("elsewhere/a.pt", "elsewhere/t")]


def test_nobody_is_told_of_a_save_that_has_failed() -> None:
    def save() -> None:
        with _saving.regular("ckpt", 3):
            _saving.tell(_saving.renamed(f"ckpt/{FILE}"), f"ckpt/{TRACKER}", pytest.fail)
            raise OSError("no space")

    with pytest.raises(OSError, match="no space"):
        save()


@pytest.mark.usefixtures("_rank_0")
def test_of_an_asynchronous_save_they_are_told_when_all_ranks_have_met(tmp_path: Path) -> None:
    at_the_end: list[Callable[[], Any]] = []
    seen: list[tuple[str, list[str]]] = []

    def look(what: str) -> None:
        seen.append((what, sorted(path.name for path in tmp_path.iterdir())))

    with _saving.regular(str(tmp_path), 3, asynchronous=True):
        folder = Path(_saving.renamed(str(tmp_path / "iter_0000003")))
        folder.mkdir()
        _saving.tracker(str(tmp_path / TRACKER))
        at_the_end.append(lambda: _saving.tell(str(folder), "", lambda *named: look(named[0])))
        request = SimpleNamespace(add_finalize_fn=at_the_end.append)
        _saving.scheduled(request, lambda: look("met"))
    for act in at_the_end:
        act()
    named = ["iter_0000003", TRACKER]
    assert seen == [("met", named), (str(tmp_path / "iter_0000003"), named)]
