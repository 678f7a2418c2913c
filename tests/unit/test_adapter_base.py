"""Checkpoints with adapters alone name their base, and are loaded with it or not at all."""

from __future__ import annotations

import json
import sys
import types
from argparse import Namespace
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from adaptor import context
from adaptor.checkpoint.format_torch import MODEL_FILE, TorchFormat
from adaptor.checkpoint.hashing import HashingFile
from adaptor.checkpoint.training_state import TrainingState
from adaptor.errors import ResumeError
from adaptor.frameworks import adapter_base
from adaptor.frameworks.adapter_base import AdapterBase
from adaptor.protocol import naming

BASE_STEP, SAVED_STEP = 8, 3


def _name(folder: str, iteration: int, release: bool = False) -> str:
    return f"{folder}/{'release' if release else f'iter_{iteration:07d}'}/mp_rank_00/{MODEL_FILE}"


def _metadata(tracker: str) -> tuple[int, bool]:
    text = Path(tracker).read_text()
    return (0, True) if text == "release" else (int(text), False)


@pytest.fixture(autouse=True)
def framework(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[None]:
    """The names of Megatron's files, and a job of one rank."""
    checkpointing = types.ModuleType("megatron.training.checkpointing")
    vars(checkpointing)["get_checkpoint_name"] = _name  # alone: `read_metadata` is collective
    for name in ("megatron", "megatron.training"):
        monkeypatch.setitem(sys.modules, name, types.ModuleType(name))
    monkeypatch.setitem(sys.modules, checkpointing.__name__, checkpointing)
    context.begin({})
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()
    context.forget()


def _checkpoint(folder: Path, step: int, model: dict[str, int]) -> Path:
    path = Path(_name(str(folder), step))
    path.parent.mkdir(parents=True)
    torch.save({"model": model, "iteration": step}, path)
    (folder / naming.TRACKER).write_text(str(step))
    return path


def _load(folder: str, *other_arguments: object) -> tuple[dict[str, Any], str, bool, None]:
    """Load as the framework's `_load_base_checkpoint`."""
    step, release = _metadata(f"{folder}/{naming.TRACKER}")
    name = _name(folder, step, release)
    return torch.load(name), name, release, None


@pytest.fixture
def folders(tmp_path: Path) -> tuple[Path, Path]:
    """A base, and the save folder of a job started from the base."""
    base, save = tmp_path / "base", tmp_path / "save"
    _checkpoint(base, BASE_STEP, {"a.weight": 1, "b.weight": 2})
    adapter_base.settle(base, base.parent / "save")
    _checkpoint(save, SAVED_STEP, {"a.lora_A.weight": 3})
    adapter_base.write_beside(str(save), SAVED_STEP)
    context.begin({})
    return base, save


def test_a_start_from_the_base_notes_it_and_adds_nothing(tmp_path: Path) -> None:
    base = tmp_path / "base"
    path = _checkpoint(base, BASE_STEP, {"a.weight": 1})
    adapter_base.settle(base, base.parent / "save")
    note = context.part(AdapterBase).note
    assert note is not None
    assert (note.load, note.file) == (str(base), str(path.relative_to(base)))
    assert note.size == path.stat().st_size
    loaded, *_ = adapter_base.load_with_base(_load, (str(base),), {})
    assert loaded["model"] == {"a.weight": 1}
    adapter_base.require_added()


def test_adapters_are_loaded_with_their_base(folders: tuple[Path, Path]) -> None:
    _, save = folders
    adapter_base.settle(save, save.parent / "save")
    loaded, name, *_ = adapter_base.load_with_base(_load, (str(save), Namespace()), {})
    assert loaded == {"model": {"a.weight": 1, "b.weight": 2, "a.lora_A.weight": 3}, "iteration": SAVED_STEP}
    assert name == _name(str(save), SAVED_STEP)
    adapter_base.require_added()
    noted = json.loads((Path(name).parent / naming.BASE).read_text())
    assert json.loads(context.part(AdapterBase).files()[naming.BASE]) == noted  # for the next save


def test_a_framework_that_does_not_let_the_base_be_added_is_refused(folders: tuple[Path, Path]) -> None:
    adapter_base.settle(folders[1], folders[1])
    with pytest.raises(
        ResumeError, match="has adapters alone, and this version of the framework does not let"
    ):
        adapter_base.require_added()


def _change(base: Path) -> None:
    torch.save({"model": {"a.weight": 9, "b.weight": 2}, "iteration": BASE_STEP}, _name(str(base), BASE_STEP))


@pytest.mark.parametrize(
    ("harm", "message"),
    [
        (lambda base: Path(_name(str(base), BASE_STEP)).unlink(), "which is gone: put it back"),
        (lambda base: base.rename(base.with_name("moved")), "which is gone: put it back"),
        (_change, "which has changed: put back that of"),
        (
            lambda base: (base / naming.TRACKER).write_text("release"),
            "and the tracker there names another checkpoint now",
        ),
    ],
    ids=["file-gone", "folder-moved", "changed", "tracker"],
)
def test_a_base_that_is_gone_or_changed_is_one_line(
    harm: Any, message: str, folders: tuple[Path, Path]
) -> None:
    base, save = folders
    harm(base)
    with pytest.raises(ResumeError) as caught:
        adapter_base.settle(save, save.parent / "save")
    line = str(caught.value)
    assert line.startswith(f"the adapters in {save}/iter_0000003/mp_rank_00 were trained on {base}/")
    assert message in line
    assert len(line.splitlines()) == 1


def test_a_folder_without_a_base_and_a_note_that_is_none(folders: tuple[Path, Path], tmp_path: Path) -> None:
    with pytest.raises(ResumeError, match=r"/none has no checkpoint, and --lora-ckpt-filter needs the base"):
        adapter_base.settle(tmp_path / "none", tmp_path / "save")
    (folders[1] / "iter_0000003/mp_rank_00" / naming.BASE).write_text("{}")
    with pytest.raises(ResumeError, match=r"the base of adapters, .*, cannot be read"):
        adapter_base.settle(folders[1], folders[1])


def test_last_words_have_the_note_beside_the_model(tmp_path: Path) -> None:
    state = TrainingState([], Namespace(), None, "mp_rank_00", beside={naming.BASE: b"{}\n"})
    files = TorchFormat().files(state, {"model": {}}, [None])
    assert list(files) == [f"mp_rank_00/{MODEL_FILE}", f"mp_rank_00/{naming.BASE}"]
    with HashingFile(tmp_path / "note") as file:
        files[f"mp_rank_00/{naming.BASE}"](file)
    assert (tmp_path / "note").read_bytes() == b"{}\n"


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({"lora_ckpt_filter": True, "lora_target_modules": ["a"]}, True),
        ({"lora_ckpt_filter": True, "lora_target_modules": ["a"], "ckpt_format": "torch_dist"}, False),
        ({"lora_ckpt_filter": True, "lora_target_modules": []}, False),
        ({"lora_ckpt_filter": False, "lora_target_modules": ["a"]}, False),
        ({}, False),
    ],
)
def test_checkpoints_with_adapters_alone_are_recognised(options: dict[str, Any], expected: bool) -> None:
    assert adapter_base.is_filtered(Namespace(**options)) is expected
    assert [name for name in ("a.lora_A.default.weight", "a.weight") if adapter_base.is_kept(name)] == [
        "a.lora_A.default.weight"
    ]


def test_saves_do_not_go_into_the_folder_of_the_base(tmp_path: Path) -> None:
    _checkpoint(tmp_path / "base", BASE_STEP, {"a.weight": 1})
    (tmp_path / "link").symlink_to(tmp_path / "base")
    with pytest.raises(
        ResumeError, match=r"which has the base of the adapters: .* name another folder as --save"
    ):
        adapter_base.settle(tmp_path / "base", tmp_path / "link")


def test_a_base_behind_a_link_is_found_again(tmp_path: Path) -> None:
    """The checkpoint is reached through links, as in caches of models."""
    store, base, save = (tmp_path / name for name in ("store", "base", "save"))
    _checkpoint(store, BASE_STEP, {"a.weight": 1})
    base.mkdir()
    (base / naming.TRACKER).write_text(str(BASE_STEP))
    (base / naming.final_name(BASE_STEP)).symlink_to(store / naming.final_name(BASE_STEP))
    adapter_base.settle(base, save)
    _checkpoint(save, SAVED_STEP, {"a.lora_A.weight": 3})
    adapter_base.write_beside(str(save), SAVED_STEP)
    context.begin({})
    adapter_base.settle(save, save)
    assert set(adapter_base.load_with_base(_load, (str(save),), {})[0]["model"]) == {
        "a.weight",
        "a.lora_A.weight",
    }
