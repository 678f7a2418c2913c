"""The layout file of a checkpoint: what it says holds, in place of rules; what it cannot say is refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from adaptor.__main__ import main
from adaptor.checkpoint import layout_file
from adaptor.errors import CheckpointError
from adaptor.protocol import naming
from tests.unit import small_checkpoint
from tests.unit.small_checkpoint import SMALL, STEP

FOLDER = naming.final_name(STEP)
_NAME, _OTHER = "decoder.final_layernorm.weight", "decoder.layers.0.input_layernorm.weight"


def _transform(source: Path, target: Path, *options: str) -> int:
    return main(["transform", str(source), str(target), "--workers", "1", *options])


def test_an_optimizer_that_no_rule_knows(tmp_path: Path) -> None:
    """The layout file says where its params are; without the file the rules find other main params."""
    small_checkpoint.write(tmp_path / "odd", described=True)
    small_checkpoint.write(tmp_path / "plain")
    sizes = ("--tp", "2", "--pp", "2")
    assert _transform(tmp_path / "odd", tmp_path / "a", *sizes, "--verify") == 0
    assert _transform(tmp_path / "plain", tmp_path / "b", *sizes) == 0
    assert small_checkpoint.contents(tmp_path / "a") == small_checkpoint.contents(tmp_path / "b")
    (tmp_path / "odd" / FOLDER / naming.LAYOUT).unlink()
    (tmp_path / "odd" / FOLDER / naming.MANIFEST).unlink()
    assert _transform(tmp_path / "odd", tmp_path / "c", *sizes) == 2


def test_what_is_written_has_a_layout_file_of_its_own(tmp_path: Path) -> None:
    """From it the first layout is made again, with that of the first as the target."""
    small_checkpoint.write(tmp_path / "odd", described=True)
    assert _transform(tmp_path / "odd", tmp_path / "a", "--tp", "3", "--pp", "2") == 0
    made = layout_file.read(tmp_path / "a" / FOLDER / naming.LAYOUT)
    assert [rank.folder for rank in made.ranks] == [
        f"mp_rank_0{tp}_00{pp}" for pp in range(2) for tp in range(3)
    ]
    last = {entry.name: entry for entry in made.ranks[-1].chunks["model"]}
    assert last["output_layer.weight"].tied
    assert last["decoder.layers.1.mlp.linear_fc1.weight"].layer == 3
    first = str(tmp_path / "odd" / FOLDER / naming.LAYOUT)
    assert _transform(tmp_path / "a", tmp_path / "b", "--layout", first) == 0
    assert small_checkpoint.contents(tmp_path / "b") == small_checkpoint.contents(tmp_path / "odd")


def _layout(**more: Any) -> bytes:
    return small_checkpoint.layout(SMALL, {_NAME: 0}, 20, **more)


@pytest.mark.parametrize(
    ("content", "words"),
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
def test_what_is_no_layout_file(tmp_path: Path, content: bytes, words: str) -> None:
    (tmp_path / "x").write_bytes(content)
    with pytest.raises(CheckpointError) as caught:
        layout_file.read(tmp_path / "x")
    assert words in str(caught.value)
    assert str(tmp_path / "x") in str(caught.value)


def test_a_layout_file_of_another_model(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    small_checkpoint.write(tmp_path / "a", described=True)
    small_checkpoint.write(tmp_path / "b", small_checkpoint.Shape(hidden=24), described=True)
    other = str(tmp_path / "b" / FOLDER / naming.LAYOUT)
    assert _transform(tmp_path / "a", tmp_path / "c", "--layout", other) == 2
    assert (
        "is [20, 24] in the layout of mp_rank_00, and [20, 12] in the checkpoint" in capsys.readouterr().err
    )
    assert _transform(tmp_path / "a", tmp_path / "c", "--layout", other, "--tp", "2") == 2
    assert "--tp 2: --layout" in capsys.readouterr().err
    assert not (tmp_path / "c").exists()
