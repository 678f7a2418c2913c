"""The transform as Python functions, and checkpoints without the optimizer."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import adaptor
from adaptor.__main__ import main
from adaptor.checkpoint import manifest, tracker
from adaptor.errors import AdaptorError, CheckpointError, UnsupportedError
from adaptor.protocol import naming
from tests.unit import small_checkpoint
from tests.unit.small_checkpoint import STEP
from tests.unit.test_layout_file import _stages

STEP_FOLDER = naming.final_name(STEP)
FORMATS = ("torch", "torch_dist")


def _command(*arguments: str | Path) -> None:
    assert main([*map(str, arguments)]) == 0


def _files(root: Path) -> dict[str, bytes]:
    """Return the files of a checkpoint without the manifest, which holds a time."""
    folder = root / STEP_FOLDER
    paths = (path for path in folder.rglob("*") if path.is_file() and path.name != naming.MANIFEST)
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in paths}


def test_the_function_and_the_command_write_the_same_files(tmp_path: Path) -> None:
    small_checkpoint.write(tmp_path / "a")
    _command("transform", tmp_path / "a", tmp_path / "command", "--tp", "2", "--pp", "2")
    written = adaptor.transform_checkpoint(tmp_path / "a", tmp_path / "function", tp=2, pp=2, verify=True)
    assert written == tmp_path / "function" / STEP_FOLDER
    assert _files(tmp_path / "function") == _files(tmp_path / "command")
    assert tracker.tracked_step(tmp_path / "function") == STEP


@pytest.mark.parametrize("format", FORMATS)
def test_a_rank_is_made_from_the_ranks_that_it_needs(tmp_path: Path, format: str) -> None:
    """Each rank is written separately, from the files of its source ranks."""
    small_checkpoint.write(tmp_path / "a")
    adaptor.transform_checkpoint(tmp_path / "a", tmp_path / "b", pp=4, format=format)
    ranks = ["tp=0,pp=0", "tp=0,pp=1"]
    source_files = adaptor.ranks_needed(tmp_path / "b", ranks[1], pp=2)
    assert list(source_files) == [f"tp=0,pp={stage},ep=0" for stage in (0, 2, 3)], (
        "the embedding is on stage 0, too"
    )
    stage = source_files["tp=0,pp=2,ep=0"]
    folder = tmp_path / "b" / STEP_FOLDER
    assert stage == (
        [folder / "mp_rank_00_002" / name for name in (naming.OPTIMIZER_FILE, naming.MODEL_FILE)]
        if format == "torch"
        else [folder / "__2_0.distcp"]
    )
    for rank in ranks:
        adaptor.transform_rank(tmp_path / "b", tmp_path / "by-rank", rank, pp=2)
    assert not (tmp_path / "by-rank" / STEP_FOLDER).exists()
    adaptor.transform_checkpoint(tmp_path / "b", tmp_path / "by-rank", pp=2, resume=True)
    adaptor.transform_checkpoint(tmp_path / "b", tmp_path / "at-once", pp=2)
    assert _files(tmp_path / "by-rank") == _files(tmp_path / "at-once")


def test_layouts_are_merged(tmp_path: Path) -> None:
    stages = _stages(tmp_path)
    _command("layout", "merge", stages, tmp_path / "command.json.gz")
    written = adaptor.merge_layouts(stages, tmp_path / "function.json.gz")
    assert written.read_bytes() == (tmp_path / "command.json.gz").read_bytes()


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"tp": 0}, UnsupportedError, "--tp is 0: it must be a number from 1 on"),
        ({"tp": "2"}, UnsupportedError, "--tp is 2: it must be a number from 1 on"),
        ({"step": -1}, UnsupportedError, "--step is -1: it must be a number from 0 on"),
        ({"format": "safetensors"}, UnsupportedError, "--format is safetensors: it must be torch or torch_"),
        ({"tensor": 2}, TypeError, "tensor: is no option of a transform"),
    ],
)
def test_wrong_options(tmp_path: Path, options: Any, error: type[Exception], message: str) -> None:
    small_checkpoint.write(tmp_path / "a")
    with pytest.raises(error, match=message):
        adaptor.transform_checkpoint(tmp_path / "a", tmp_path / "b", **options)
    assert not (tmp_path / "b").exists()


@pytest.mark.parametrize("format", FORMATS)
def test_weights_only(tmp_path: Path, format: str) -> None:
    """The weights equal those of the full transform; the optimizer is neither read nor written."""
    weights = small_checkpoint.write(tmp_path / "a", no_save_optim=False)
    size = {path.name: path.stat().st_size for path in (tmp_path / "a").rglob("*.pt")}
    (tmp_path / "a" / STEP_FOLDER / naming.MANIFEST).unlink()
    (tmp_path / "a" / STEP_FOLDER / "mp_rank_00" / naming.OPTIMIZER_FILE).unlink()
    with pytest.raises(CheckpointError, match=r"distrib_optim\.pt: missing; give --weights-only"):
        adaptor.transform_checkpoint(tmp_path / "a", tmp_path / "b", tp=2, format=format)
    source_files = adaptor.ranks_needed(tmp_path / "a", "tp=1", tp=2, weights_only=True)
    assert [path.name for path in source_files["tp=0,pp=0,ep=0"]] == [naming.MODEL_FILE]
    options = ("--tp", "2", "--format", format, "--weights-only", "--verify")
    _command("transform", tmp_path / "a", tmp_path / "b", *options)
    folder = tmp_path / "b" / STEP_FOLDER
    assert manifest.defects(folder) == []
    assert not list(folder.rglob(naming.OPTIMIZER_FILE))
    written = sum(path.stat().st_size for path in folder.rglob("*.pt" if format == "torch" else "*.distcp"))
    assert written < 3 * size[naming.MODEL_FILE]
    # A checkpoint without an optimizer can only be transformed with weights_only.
    with pytest.raises(CheckpointError, match="give --weights-only for a checkpoint without an optimizer"):
        adaptor.transform_checkpoint(tmp_path / "b", tmp_path / "c", tp=1)
    adaptor.transform_checkpoint(tmp_path / "b", tmp_path / "c", tp=1, weights_only=True)
    body = torch.load(tmp_path / "c" / STEP_FOLDER / "mp_rank_00" / naming.MODEL_FILE, weights_only=False)
    assert body["args"].no_save_optim is True
    assert {"model", "iteration", "rng_state"} <= body.keys()
    assert not {"optimizer", "opt_param_scheduler"} & body.keys()
    assert all(torch.equal(body["model"][name], value) for name, value in weights.items())


@pytest.mark.parametrize("change", [{"optimizer": "sgd"}, {"use_distributed_optimizer": False}])
def test_weights_of_a_job_with_another_optimizer(tmp_path: Path, change: dict[str, Any]) -> None:
    small_checkpoint.write(tmp_path / "a", **change)
    with pytest.raises(AdaptorError, match="which is not transformed"):
        adaptor.transform_checkpoint(tmp_path / "a", tmp_path / "b", tp=2)
    adaptor.transform_checkpoint(tmp_path / "a", tmp_path / "b", tp=2, weights_only=True)


def test_ranks_written_with_the_optimizer_are_rewritten_without(tmp_path: Path) -> None:
    small_checkpoint.write(tmp_path / "a")
    adaptor.transform_rank(tmp_path / "a", tmp_path / "b", "tp=0", tp=2)
    adaptor.transform_checkpoint(tmp_path / "a", tmp_path / "b", tp=2, weights_only=True, resume=True)
    adaptor.transform_checkpoint(tmp_path / "a", tmp_path / "c", tp=2, weights_only=True)
    assert _files(tmp_path / "b") == _files(tmp_path / "c")
