"""The layout file of a checkpoint replaces the rules; an incomplete description is refused."""

from __future__ import annotations

import json
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest

from adaptor.__main__ import main
from adaptor.checkpoint import layout_file
from adaptor.errors import CheckpointError
from adaptor.protocol import naming
from tests.unit import small_checkpoint
from tests.unit.small_checkpoint import SMALL, STEP, transform

FOLDER = naming.final_name(STEP)
_NAME, _OTHER = "decoder.final_layernorm.weight", "decoder.layers.0.input_layernorm.weight"


def test_an_optimizer_that_no_rule_knows(tmp_path: Path) -> None:
    """The layout file places its params; without the file the rules find wrong main params."""
    small_checkpoint.write(tmp_path / "odd", described=True)
    small_checkpoint.write(tmp_path / "plain")
    sizes = ("--tp", "2", "--pp", "2")
    assert transform(tmp_path / "odd", tmp_path / "a", *sizes, "--verify") == 0
    assert transform(tmp_path / "plain", tmp_path / "b", *sizes) == 0
    assert small_checkpoint.contents(tmp_path / "a") == small_checkpoint.contents(tmp_path / "b")
    (tmp_path / "odd" / FOLDER / naming.LAYOUT).unlink()
    (tmp_path / "odd" / FOLDER / naming.MANIFEST).unlink()
    assert transform(tmp_path / "odd", tmp_path / "c", *sizes) == 2


def test_a_transformed_checkpoint_has_its_own_layout_file(tmp_path: Path) -> None:
    """The layout file is sufficient to restore the first layout."""
    small_checkpoint.write(tmp_path / "odd", described=True)
    assert transform(tmp_path / "odd", tmp_path / "a", "--tp", "3", "--pp", "2") == 0
    layout = layout_file.read(tmp_path / "a" / FOLDER / naming.LAYOUT)
    assert [rank.folder for rank in layout.ranks] == [
        f"mp_rank_0{tp}_00{pp}" for pp in range(2) for tp in range(3)
    ]
    last = {entry.name: entry for entry in layout.ranks[-1].chunks["model"]}
    assert last["output_layer.weight"].tied
    assert last["decoder.layers.1.mlp.linear_fc1.weight"].layer == 3
    first = str(tmp_path / "odd" / FOLDER / naming.LAYOUT)
    assert transform(tmp_path / "a", tmp_path / "b", "--layout", first) == 0
    assert small_checkpoint.contents(tmp_path / "b") == small_checkpoint.contents(tmp_path / "odd")


def test_files_written_for_another_layout_are_rewritten(tmp_path: Path) -> None:
    """Two machines got different files, or a file was replaced."""
    small_checkpoint.write(tmp_path / "odd", described=True)
    assert transform(tmp_path / "odd", tmp_path / "by rules") == 0
    odd, rules = (str(tmp_path / name / FOLDER / naming.LAYOUT) for name in ("odd", "by rules"))
    assert transform(tmp_path / "odd", tmp_path / "a", "--layout", odd, "--rank", "tp=0") == 0
    assert transform(tmp_path / "odd", tmp_path / "a", "--layout", rules, "--resume") == 0
    assert transform(tmp_path / "odd", tmp_path / "b", "--layout", rules) == 0
    assert small_checkpoint.contents(tmp_path / "a") == small_checkpoint.contents(tmp_path / "b")


def test_files_written_from_another_layout_of_the_source_are_rewritten(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    small_checkpoint.write(tmp_path / "odd", described=True)
    (layout,) = layout_file.read(tmp_path / "odd" / FOLDER / naming.LAYOUT).ranks
    assert transform(tmp_path / "odd", tmp_path / "a", "--tp", "2", "--rank", "tp=0") == 0
    other_layout = msgspec.structs.replace(layout, core="0.15.1")
    (tmp_path / "odd" / FOLDER / naming.LAYOUT).write_bytes(
        layout_file.join([layout_file.encode(other_layout)])
    )
    (tmp_path / "odd" / FOLDER / naming.MANIFEST).unlink()
    assert transform(tmp_path / "odd", tmp_path / "a", "--tp", "2", "--resume") == 0
    assert "were there already" not in capsys.readouterr().err


def _layout(**options: Any) -> bytes:
    return small_checkpoint.layout(SMALL, {_NAME: 0}, 20, **options)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"{}", "is no layout file"),
        (layout_file.join([_layout()])[:-30], "is no layout file"),
        (json.dumps({"format": 2, "ranks": []}).encode(), "format 2; this version reads format 1"),
        (layout_file.join([]), "has no layout of any rank"),
        (layout_file.join([_layout(tp=1)]), "has no layout of tensor rank 0 of stage 0"),
        (
            layout_file.join([_layout(), _layout(core="0.16.0")]),
            "the layouts of mp_rank_00 and mp_rank_00 are of two jobs",
        ),
        (
            layout_file.join([small_checkpoint.layout(SMALL, {_NAME: 0}, 10)]),
            "params lie on each other or outside",
        ),
        (
            layout_file.join(
                [small_checkpoint.layout(SMALL, {_NAME: 0, "decoder.layers.0.input_layernorm.weight": 3}, 99)]
            ),
            "params lie on each other or outside",
        ),
    ],
    ids=["nothing", "cut", "newer", "empty", "rank", "two", "outside", "overlap"],
)
def test_invalid_layout_files_are_refused(tmp_path: Path, content: bytes, message: str) -> None:
    (tmp_path / "x").write_bytes(content)
    with pytest.raises(CheckpointError) as caught:
        layout_file.read(tmp_path / "x")
    assert message in str(caught.value)
    assert str(tmp_path / "x") in str(caught.value)


def test_a_layout_file_takes_memory_for_its_content(tmp_path: Path) -> None:
    """The reader reserves no memory for the largest accepted file of 2 GiB, which limited memory could not
    hold.
    """
    (tmp_path / "x").write_bytes(layout_file.join([_layout()]))
    tracemalloc.start()
    try:
        layout_file.read(tmp_path / "x")
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < 16 << 20


def test_a_layout_file_of_another_model(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    small_checkpoint.write(tmp_path / "a", described=True)
    small_checkpoint.write(tmp_path / "b", small_checkpoint.Shape(hidden=24), described=True)
    other_path = str(tmp_path / "b" / FOLDER / naming.LAYOUT)
    assert transform(tmp_path / "a", tmp_path / "c", "--layout", other_path) == 2
    assert (
        "is [20, 24] in the layout of mp_rank_00, and [20, 12] in the checkpoint" in capsys.readouterr().err
    )
    assert transform(tmp_path / "a", tmp_path / "c", "--layout", other_path, "--tp", "2") == 2
    assert "--tp 2: --layout" in capsys.readouterr().err
    assert not (tmp_path / "c").exists()


def _stages(root: Path) -> Path:
    """The layout of two tensor ranks and two stages, one file per stage."""
    small_checkpoint.write(root / "a", described=True)
    assert transform(root / "a", root / "b", "--tp", "2", "--pp", "2") == 0
    (root / "stages").mkdir()
    for stage in range(2):
        ranks = layout_file.read(root / "b" / FOLDER / naming.LAYOUT).ranks
        content = layout_file.join(layout_file.encode(rank) for rank in ranks if rank.pp == stage)
        (root / "stages" / f"stage{stage}.json.gz").write_bytes(content)
    return root / "stages"


def _merge(folder: Path, out: Path) -> int:
    return main(["layout", "merge", str(folder), str(out)])


def test_layouts_of_stages_are_joined(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    stages, out = _stages(tmp_path), tmp_path / "whole.json.gz"
    # An identical second copy of a rank does no harm.
    (stages / "again.json.gz").write_bytes((stages / "stage1.json.gz").read_bytes())
    assert _merge(stages, out) == 0
    assert capsys.readouterr().out.endswith(
        f"{out}: the layout of 4 ranks is written (TP2 PP2 VPP1 EP1 ETP2 DP1 CP1)\n"
    )
    assert layout_file.read(out) == layout_file.read(tmp_path / "b" / FOLDER / naming.LAYOUT)
    assert transform(tmp_path / "a", tmp_path / "c", "--layout", str(out)) == 0
    assert small_checkpoint.contents(tmp_path / "c") == small_checkpoint.contents(tmp_path / "b")


def _alone(stages: Path) -> None:
    (stages / "stage0.json.gz").unlink()


def _none(stages: Path) -> None:
    for path in stages.iterdir():
        path.unlink()


def _damaged(stages: Path) -> None:
    (stages / "stage1.json.gz").write_bytes((stages / "stage1.json.gz").read_bytes()[:-40])


def _of_another_job(stages: Path) -> None:
    (stages / "x.json.gz").write_bytes(layout_file.join([_layout(folder="mp_rank_07", tp=7)]))


def _contradicting(stages: Path) -> None:
    (stages / "x.json.gz").write_bytes(layout_file.join([_layout()]))


def _of_a_checkpoint(stages: Path) -> None:
    (stages / naming.MANIFEST).touch()
    (stages / naming.LAYOUT).touch()


def _of_checkpoints(stages: Path) -> None:
    _none(stages)
    (stages / "iter_0000005").mkdir()
    (stages / "iter_0000005" / naming.MANIFEST).touch()


def _gone(stages: Path) -> None:
    _none(stages)
    stages.rmdir()


@pytest.mark.parametrize(
    ("edit", "message"),
    [
        (_alone, "stages: has no layout of tensor rank 0 of stage 0"),
        (_none, "stages: has no layout file, *.json.gz or *.json"),
        (_damaged, "stage1.json.gz: is no layout file"),
        (_of_another_job, "x.json.gz: is of another job than "),
        (_contradicting, "x.json.gz: says something else of mp_rank_00 than "),
        (_of_a_checkpoint, f"stages/{naming.LAYOUT} is the layout of all ranks, for transform --layout; "),
        (_of_checkpoints, "stages: has checkpoints without a layout file; ttprun --ttp-layout-only FILE "),
        (_gone, "stages: No such file or directory"),
    ],
)
def test_layouts_that_are_not_joined(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], edit: Callable[[Path], None], message: str
) -> None:
    stages, out = _stages(tmp_path), tmp_path / "whole.json.gz"
    edit(stages)
    capsys.readouterr()
    assert _merge(stages, out) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("python -m adaptor layout: ")
    assert message in line
    assert not out.exists()
