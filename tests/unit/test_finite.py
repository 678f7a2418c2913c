"""Numbers that are not finite are reported at the dump, with the shard and the holder."""

from __future__ import annotations

import math
import types
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from adaptor.checkpoint import shards, state_writer, training_state
from adaptor.checkpoint.shards import Exchange
from adaptor.checkpoint.trainee import MegatronTrainee
from adaptor.errors import CheckpointError
from adaptor.protocol.messages import GroupOrder
from adaptor.protocol.state_provider import DumpRun, NotFiniteError
from tests.unit.test_checkpoint_dump import RECORD, Rank, load, together

NOT_FINITE = [math.nan, math.inf, -math.inf]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
@pytest.mark.parametrize("place", [0, 1, 998, 999])
def test_any_element_may_be_not_finite(dtype: torch.dtype, place: int) -> None:
    tensor = torch.linspace(-1e4, 1e4, 1000, dtype=dtype)
    assert shards.is_finite(tensor)
    for value in NOT_FINITE:
        tensor[place] = value
        assert not shards.is_finite(tensor)
        assert not shards.all_finite({"a": [torch.ones(3), {"b": tensor}], "c": 1})


def test_tensors_without_numbers_are_finite() -> None:
    assert shards.is_finite(torch.empty(0))
    assert shards.is_finite(torch.ones(3, dtype=torch.int64))
    assert shards.all_finite(None)


def test_some_are_named() -> None:
    assert shards.not_finite_words([]) == ""
    assert shards.not_finite_words(["a"]) == "a is not finite"
    assert shards.not_finite_words(["a", "b", "c", "d", "e"]) == "a, b, c and 2 more are not finite"


def _spoil(rank: Rank, name: str, key: str, value: float = math.nan) -> Rank:
    rank.states[getattr(rank.model, name)][key][0] = value
    return rank


class _Refused(Exception):
    pass


def _dump(tmp_path: Path, spoilt: int, key: str, value: float, doubt: Callable[..., None]) -> list[Any]:
    """Rank 0 of the group provides shard 1, rank 1 writes; shard `spoilt` is not finite."""

    def part(shard: int) -> Rank:
        return (
            _spoil(Rank(shard, 2), "b" if shard else "a", key, value) if shard == spoilt else Rank(shard, 2)
        )

    def sender(group: Any) -> None:
        state_writer.send_shards(part(1).state, 1, Exchange(group, 0, [[1, 0]]))

    def writer(group: Any) -> Any:
        exchange = Exchange(group, 1, [[1, 0]], on_not_finite=doubt)
        return state_writer.write_files(part(0).state, RECORD, exchange, tmp_path, 1)

    return together(tmp_path, [sender, writer])


@pytest.mark.parametrize("value", NOT_FINITE)
@pytest.mark.parametrize("key", shards.KEYS)
@pytest.mark.parametrize("shard", [0, 1])
def test_a_shard_is_doubted_before_anything_is_written(
    tmp_path: Path, shard: int, key: str, value: float
) -> None:
    def refuse(text: str, ranks: Sequence[int]) -> None:
        raise _Refused(text, list(ranks))

    sent, refused = _dump(tmp_path, shard, key, value, refuse)
    assert sent is None, "who gave it has done its part"
    assert isinstance(refused, _Refused)
    assert refused.args == (f"shard {shard} of 2 ({key}) is not finite", [1 - shard])
    assert not (tmp_path / "mp_rank_00").exists()


def test_an_accepted_shard_is_written_unchanged(tmp_path: Path) -> None:
    _, written = _dump(tmp_path, 1, "exp_avg", math.nan, lambda text, ranks: None)
    assert written.not_finite == "shard 1 of 2 (exp_avg) is not finite"
    saved = load(tmp_path / "mp_rank_00/distrib_optim.pt.1")[0][torch.bfloat16, torch.float32]["exp_avg"]
    assert saved.isnan().sum() == 1


def test_an_optimizer_without_shards(tmp_path: Path) -> None:
    model = torch.nn.Linear(2, 2)
    model.state_dict_for_save_checkpoint = model.state_dict  # type: ignore[assignment, operator]
    exp_avg = torch.tensor([1.0, math.nan])
    optimizer = types.SimpleNamespace(
        is_stub_optimizer=False,
        get_parameters=lambda: list(model.parameters()),
        state_dict=lambda: {"optimizer": {"state": {0: {"exp_avg": exp_avg}}, "param_groups": [{}]}},
    )
    heard: list[Any] = []
    exchange = Exchange(None, 0, [[0]], on_not_finite=lambda *message: heard.append(message))
    state = training_state.TrainingState([model], optimizer, None, "mp_rank_00")
    written = state_writer.write_files(state, replace(RECORD, buffers=()), exchange, tmp_path, 1)
    assert heard == [("the optimizer state is not finite", [0])]
    assert written.not_finite == "the optimizer state is not finite"


def test_the_doubted_holder_is_named_by_its_rank_in_the_job(tmp_path: Path) -> None:
    rank = _spoil(_spoil(Rank(0, 1), "a", "param"), "b", "exp_avg")
    trainee = MegatronTrainee(
        rank.state, str(tmp_path), (), None, counters=dict, growth=dict, increment=int, barrier=lambda: None
    )
    order = GroupOrder("mp_rank_00", (5,), 5)
    remarks: list[str] = []
    (tmp_path / "iter_0000005_tmp").mkdir()

    def dump(as_is: bool) -> None:
        run = DumpRun(
            rank=5,
            folder=str(tmp_path / "iter_0000005_tmp"),
            attempt=1,
            connect=lambda ranks: None,
            progress=lambda count: None,
            cancelled=lambda: False,
            past=False,
            as_is=as_is,
            remark=remarks.append,
        )
        trainee.dump(RECORD, order, run)

    with pytest.raises(NotFiniteError) as caught:
        dump(as_is=False)
    assert caught.value.ranks == (5,)
    assert str(caught.value) == "shard 0 of 1 (param, exp_avg) is not finite"
    dump(as_is=True)
    assert remarks == [str(caught.value)]


@pytest.mark.robustness(
    "C1",
    "a forged order to write last words elsewhere",
    "the worker refuses it in one line, nothing is written",
)
@pytest.mark.parametrize(
    "folder",
    ["precious", "save", "save/iter_0000005", "save/../iter_0000005_tmp", "precious/iter_0000005_tmp", ""],
)
def test_no_worker_writes_outside_of_the_save_folder(tmp_path: Path, folder: str) -> None:
    for name in ("save/iter_0000005", "precious/iter_0000005_tmp", "iter_0000005_tmp"):
        (tmp_path / name).mkdir(parents=True)
    save = str(tmp_path / "save")
    state = Rank(0, 1).state
    trainee = MegatronTrainee(
        state, save, (), None, counters=dict, growth=dict, increment=int, barrier=lambda: None
    )
    run = DumpRun(
        rank=5,
        folder=str(tmp_path / folder) if folder else "",
        attempt=1,
        connect=lambda ranks: None,
        progress=lambda count: None,
        cancelled=lambda: False,
        past=False,
    )
    with pytest.raises(CheckpointError, match=f"is no folder for last words in {save}, where this job saves"):
        trainee.dump(RECORD, GroupOrder("mp_rank_00", (5,), 5), run)
    assert [path for path in tmp_path.rglob("*") if path.is_file()] == []


def test_a_writer_that_does_not_see_the_folder_names_the_folder(tmp_path: Path) -> None:
    """Another node's agent made the folder on that node's disk."""
    (tmp_path / "save").mkdir()
    trainee = MegatronTrainee(
        Rank(0, 1).state,
        str(tmp_path / "save"),
        (),
        None,
        counters=dict,
        growth=dict,
        increment=int,
        barrier=lambda: None,
    )
    run = DumpRun(
        rank=5,
        folder=str(tmp_path / "save" / "iter_0000005_tmp"),
        attempt=1,
        connect=lambda ranks: None,
        progress=lambda count: None,
        cancelled=lambda: False,
        past=False,
    )
    with pytest.raises(
        CheckpointError, match=r"is not there on node 0 .*need a --save folder that they share"
    ):
        trainee.dump(RECORD, GroupOrder("mp_rank_00", (5,), 5), run)
    assert list((tmp_path / "save").iterdir()) == []
