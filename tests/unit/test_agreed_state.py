"""Refusal of a checkpoint whose state differs from its holders' agreement, at write and at load."""

from __future__ import annotations

import dataclasses
import gc
import random
from collections.abc import Callable, Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.distributed.checkpoint.metadata import MetadataIndex

from adaptor import context
from adaptor.checkpoint import manifest, publish, state_writer, step_record, tracker
from adaptor.checkpoint.shards import Exchange
from adaptor.checkpoint.training_state import TrainingState
from adaptor.errors import CheckpointError
from adaptor.frameworks import state_comparison
from adaptor.frameworks.regular_save import RegularSaves
from adaptor.protocol import naming
from adaptor.protocol.board import Phase
from adaptor.protocol.messages import BoardRecord, Share
from adaptor.verification import agreed_state, given_sums, save_check, state_sums
from adaptor.verification.agreed_state import (
    MASK,
    AgreedGroup,
    AgreedState,
    HeldState,
    agree,
    differences,
    ranks_with_other_random_states,
)
from adaptor.verification.given_sums import GivenSums
from adaptor.verification.placed_sums import placed_sum
from adaptor.verification.save_check import PlannedWrites, SaveCheck
from tests.unit.test_checkpoint_dump import RECORD, Rank, together, whole_state, without_padding

STEP = 12
Tensors = dict[str, torch.Tensor]
EARLIER = {key: value + 1 for key, value in whole_state().items()}


def _stale_moment(tensors: Tensors, earlier: Tensors) -> None:
    tensors["exp_avg"] = earlier["exp_avg"]


def _half_of_the_params_stale(tensors: Tensors, earlier: Tensors) -> None:
    half = tensors["param"].numel() // 2
    tensors["param"] = torch.cat([earlier["param"][:half], tensors["param"][half:]])


def _nan(tensors: Tensors, earlier: Tensors) -> None:
    tensors["param"] = tensors["param"].clone()
    tensors["param"][3] = float("nan")


def _swapped(tensors: Tensors, earlier: Tensors) -> None:
    for key, value in tensors.items():
        if isinstance(value, torch.Tensor):
            half = value.numel() // 2
            tensors[key] = torch.cat([value[half : 2 * half], value[:half], value[2 * half :]])


def _truncated(tensors: Tensors, earlier: Tensors) -> None:
    tensors["exp_avg_sq"] = tensors["exp_avg_sq"].clone()
    tensors["exp_avg_sq"][-4:] = 0


def _one_bit(tensors: Tensors, earlier: Tensors) -> None:
    tensors["param"] = tensors["param"].clone()
    tensors["param"].view(torch.int32)[5] ^= 1


def _another_step(tensors: Tensors, earlier: Tensors) -> None:
    tensors.update(earlier)


LIES = [
    _stale_moment, _half_of_the_params_stale, _nan, _swapped, _truncated, _one_bit, _another_step
]  # fmt: skip
Lie = Callable[[Tensors, Tensors], None]


def _true(tensors: Tensors, earlier: Tensors) -> None:
    """Change nothing."""


def _shares(index: int, count: int) -> tuple[Share, ...]:
    return (Share("mp_rank_00", index, count),)


def _held(ranks: list[Rank]) -> list[HeldState]:
    return [
        state_sums.held_by(rank.state, (), _shares(index, len(ranks)), whole_weights=True)
        for index, rank in enumerate(ranks)
    ]


def _rounded(rank: Rank) -> Rank:
    """Give the model the rounded main params as its weights, as after an update."""
    full_params = whole_state()["param"]
    with torch.no_grad():
        rank.optimizer.buffers[0].param_data.copy_(full_params)
    return rank


def _ranks(count: int) -> list[Rank]:
    return [_rounded(Rank(index, count)) for index in range(count)]


def _check() -> SaveCheck:
    ranks = _ranks(2)
    return SaveCheck(STEP, ranks[0].state, agree(STEP, _held(ranks)))


@pytest.fixture(autouse=True)
def _verify_saves(monkeypatch: pytest.MonkeyPatch) -> None:
    settings = dataclasses.replace(context.get().settings, verify_saves=True)
    monkeypatch.setattr(context.get(), "settings", settings)


def _saves() -> RegularSaves:
    return context.part(RegularSaves)


def _regular_in_torch(tmp_path: Path, lie: Lie) -> None:
    """Write the optimizer's archive of a regular save as the framework does."""
    world: Tensors = {key: without_padding(value) for key, value in whole_state().items()}
    lie(world, {key: without_padding(value) for key, value in EARLIER.items()})
    content = {"buckets_coalesced": True, 0: {("bf16", "fp32"): {**world, "numel_unpadded": 24}}}
    with _saves().regular(str(tmp_path), STEP, agree=lambda step: _check()):
        folder = Path(_saves().renamed(str(tmp_path / naming.final_name(STEP))))
        torch.save(content, folder / "distrib_optim.pt")
        _saves().tracker(str(tmp_path / naming.TRACKER))


@dataclasses.dataclass(frozen=True)
class _Item:
    index: MetadataIndex


class _Planner:
    def __init__(self, tensors: Mapping[str, torch.Tensor]) -> None:
        self.tensors = tensors

    def resolve_data(self, item: _Item) -> torch.Tensor:
        return self.tensors[item.index.fqn]

    def buckets(self, folder: Path) -> list[Any]:
        items = [(_Item(MetadataIndex(key, torch.Size([0]))), value) for key, value in self.tensors.items()]
        return [(str(folder / "__0_0.distcp"), "__0_0.distcp", ([], items))]


def _regular_in_torch_dist(tmp_path: Path, lie: Lie) -> None:
    """Let a writer of the framework write other tensors than planned."""
    check = _check()
    _, live = next(iter(Rank(0, 1).states.items()))
    with _saves().regular(str(tmp_path), STEP, agree=lambda step: check):
        folder = Path(_saves().renamed(str(tmp_path / naming.final_name(STEP))))
        plan = _Planner(live)
        context.part(PlannedWrites).plan(check, plan.buckets(folder), plan)
        # An asynchronous save may end after the next save was planned.
        context.part(PlannedWrites).plan(check, plan.buckets(tmp_path / "next"), plan)
        handed = dict(live)
        lie(handed, {key: value + 1 for key, value in live.items()})
        ((path, _, (_, tensors)),) = _Planner(handed).buckets(folder)
        Path(path).write_bytes(b"tensors")
        _saves().hashing(path, _Results(), lambda: state_comparison.sums_of(path, tensors)).put("written")
        state_comparison.require_written(folder)
        _saves().tracker(str(tmp_path / naming.TRACKER))


@pytest.mark.usefixtures("rank_0")
def test_the_plan_of_a_save_that_is_abandoned_is_dropped(tmp_path: Path) -> None:
    _, live = next(iter(Rank(0, 1).states.items()))
    plan = _Planner(live)
    with _saves().regular(str(tmp_path), STEP, asynchronous=True, agree=lambda step: _check()):
        folder = Path(_saves().renamed(str(tmp_path / naming.final_name(STEP))))
        ((path, _, (_, tensors)),) = plan.buckets(folder)
        check = _saves().check_in()
        assert check is not None
        context.part(PlannedWrites).plan(check, plan.buckets(folder), plan)
        _saves().scheduled(SimpleNamespace(finalize_fns=[], add_finalize_fn=lambda function: None))
    del check
    gc.collect()
    assert len(state_comparison.sums_of(path, tensors)) == len(live)
    _saves().abandon()
    gc.collect()
    assert state_comparison.sums_of(path, tensors) == {}


class _Results:
    def put(self, result: str) -> None:
        """Accept a writer's report."""


def _last_words(tmp_path: Path, lie: Lie, *, in_place: bool) -> None:
    """Write last words for which a holder sends other tensors than it summed."""
    root = publish.prepare(tmp_path, STEP)
    folder = root if in_place else None

    def writer(group: Any) -> Any:
        rank = _rounded(Rank(0, 2))
        exchange = Exchange(group, 0, [[0, 1]], folder=folder)
        sums = GivenSums(rank.state, exchange, 0)
        states = rank.states[rank.model.a]
        lie(states, {key: EARLIER[key][:15] for key in states})
        agreed = sums.agreed((0, 1))
        assert agreed is not None
        exchange = dataclasses.replace(exchange, observer=sums)
        return state_writer.write_files(rank.state, RECORD, exchange, root, 1, agreed)

    def holder(group: Any) -> Any:
        rank = _rounded(Rank(1, 2))
        exchange = Exchange(group, 1, [[0, 1]], folder=folder)
        sums = GivenSums(rank.state, exchange, 1)
        sums.send(0)
        exchange = dataclasses.replace(exchange, observer=sums)
        return state_writer.send_shards(rank.state, 0, exchange)

    written, _ = together(tmp_path, [writer, holder])
    if isinstance(written, Exception):
        assert [path for path in root.rglob("*") if path.is_file()] == []
        raise written
    publish.publish(tmp_path, STEP, written.files, {}, 2)


WAYS = {
    "regular-torch": _regular_in_torch,
    "regular-torch_dist": _regular_in_torch_dist,
    "gathered": lambda tmp_path, lie: _last_words(tmp_path, lie, in_place=False),
    "in-place": lambda tmp_path, lie: _last_words(tmp_path, lie, in_place=True),
}


@pytest.mark.usefixtures("rank_0", "armed")
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("lie", LIES)
def test_tensors_that_differ_from_memory_are_refused(tmp_path: Path, lie: Lie, way: str) -> None:
    _publish_earlier(tmp_path)
    with pytest.raises(CheckpointError, match="other bits than"):
        WAYS[way](tmp_path, lie)
    assert tracker.tracked_step(tmp_path) == 3
    assert not (tmp_path / naming.final_name(STEP)).exists()


@pytest.mark.usefixtures("rank_0", "armed")
@pytest.mark.parametrize("way", WAYS)
def test_the_manifest_has_the_agreed_state(tmp_path: Path, way: str) -> None:
    WAYS[way](tmp_path, _true)
    saved = manifest.read(tmp_path / naming.final_name(STEP))
    expected = agree(STEP, _held(_ranks(2)))
    assert saved.state is not None
    assert saved.state.step == STEP
    shards = saved.state.groups["mp_rank_00"].shards
    assert [shard.sums for shard in shards] == [shard.sums for shard in expected.groups["mp_rank_00"].shards]
    assert manifest.defects(tmp_path / naming.final_name(STEP)) == []


@pytest.mark.usefixtures("rank_0", "armed")
def test_an_archive_of_another_step_is_refused(tmp_path: Path) -> None:
    check = _check()
    with _saves().regular(str(tmp_path), STEP, agree=lambda step: check):
        folder = Path(_saves().renamed(str(tmp_path / naming.final_name(STEP))))
        with pytest.raises(CheckpointError, match="the archive of step 6 was to be written for step 12"):
            torch.save({"iteration": 6, "model": {}}, folder / "a.pt")
        torch.save({"iteration": STEP, "model": check.state.model[0].state_dict()}, folder / "a.pt")
        stale = {name: value + 1 for name, value in check.state.model[0].state_dict().items()}
        with pytest.raises(CheckpointError, match="weight of mp_rank_00 was to be written with other bits"):
            torch.save({"iteration": STEP, "model": stale}, folder / "a.pt")
        with pytest.raises(CheckpointError, match=r"a.pt: has \d+ bytes, .* it was cut off"):
            _saves().tracker(str(tmp_path / naming.TRACKER))


@pytest.mark.parametrize("lie", [_true, _stale_moment, _nan, _one_bit, _another_step])
def test_the_state_of_an_optimizer_without_shards_is_compared(lie: Lie) -> None:
    model = torch.nn.Linear(3, 4, bias=False, dtype=torch.bfloat16)
    main = torch.nn.Parameter(model.weight.detach().float().reshape(-1))
    inner = torch.optim.AdamW([main])
    main.grad = torch.ones_like(main)
    inner.step()
    optimizer = SimpleNamespace(
        optimizer=inner, float16_groups=[[model.weight]], fp32_from_float16_groups=[[main]]
    )
    with torch.no_grad():
        model.weight.copy_(main.view(4, 3))
    state = TrainingState(model=[model], optimizer=optimizer, scheduler=None, folder="mp_rank_00")
    own_state = state_sums.held_by(state, (), _shares(0, 1))
    assert own_state.problem == ""
    check = SaveCheck(STEP, state, agree(STEP, [own_state, own_state]))
    tensors = {"param": main.detach(), **inner.state[main]}
    lie(tensors, {key: value + 1 for key, value in tensors.items()})
    saved = {
        "optimizer": {"state": {0: {key: value for key, value in tensors.items() if key != "param"}}},
        "fp32_from_fp16_params": [[tensors["param"]]],
    }
    content = {"iteration": STEP, "model": model.state_dict(), "optimizer": saved}
    if lie is _true:
        check.require_archive(content)
        return
    with pytest.raises(CheckpointError, match="was to be written with other bits than"):
        check.require_archive(content)


def test_a_plan_that_keeps_tensors_of_an_earlier_save_is_refused(tmp_path: Path) -> None:
    """Later saves would write the tensors of the first save (NeMo-RL#3312)."""
    check = _check()
    live = {name: param.detach() for name, param in check.state.model[0].named_parameters()}
    plans = PlannedWrites(context.get())
    plans.plan(check, _Planner(live).buckets(tmp_path), _Planner(live))
    first = {name: param.clone() for name, param in live.items()}
    with pytest.raises(CheckpointError, match=r"a at \[0\] was to be written from a copy"):
        plans.plan(check, _Planner(first).buckets(tmp_path), _Planner(first))


def _publish_earlier(root: Path) -> None:
    with _saves().regular(str(root), 3):
        Path(_saves().renamed(str(root / naming.final_name(3))), "a.pt").write_bytes(b"earlier")
        _saves().tracker(str(root / naming.TRACKER))


# Loaders that load another state.


def _left_out(ranks: list[Rank]) -> None:
    for rank in ranks:
        for tensors in rank.states.values():
            tensors["exp_avg"] = torch.zeros_like(tensors["exp_avg"])


def _of_another_rank(ranks: list[Rank]) -> None:
    (first, second) = ranks
    first_state, second_state = first.states[first.model.b], second.states[second.model.b]
    for key in first_state:
        first_state[key][:1], second_state[key][:1] = (
            second_state[key][:1].clone(),
            first_state[key][:1].clone(),
        )


def _of_an_earlier_step(ranks: list[Rank]) -> None:
    for tensors in ranks[1].states.values():
        tensors["param"] = tensors["param"] + 1


def _other_weights(ranks: list[Rank]) -> None:
    with torch.no_grad():
        ranks[1].model.a[0, 0] += 1


@pytest.mark.parametrize(
    ("lie", "message"),
    [
        (_left_out, "exp_avg of shard 0 of mp_rank_00 on rank 0"),
        (_of_another_rank, "exp_avg of shard 0 of mp_rank_00 on rank 0"),
        (_of_an_earlier_step, "param of shard 1 of mp_rank_00 on rank 1"),
        (_other_weights, "weight of mp_rank_00 on rank 1"),
    ],
)
def test_a_state_that_differs_from_the_agreement_is_found_after_a_load(
    lie: Callable[[list[Rank]], None], message: str
) -> None:
    agreed = agree(STEP, _held(_ranks(2)))
    loaded = _ranks(2)
    assert differences(agreed, _held(loaded), has_optimizer=True) == []
    lie(loaded)
    problems = differences(agreed, _held(loaded), has_optimizer=True)
    assert message in problems
    assert agreed_state.in_words(problems).startswith(problems[0])


@pytest.mark.usefixtures("group_of_one")
def test_a_loop_of_its_own_that_has_loaded_another_state_has_a_line(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    ranks = _ranks(1)
    saved_manifest = manifest.Manifest.now(STEP, (), {}, 1, "", state=agree(STEP, _held(ranks)))
    folder = tmp_path / naming.final_name(STEP)
    folder.mkdir()
    (folder / naming.MANIFEST).write_bytes(saved_manifest.encode())

    def lines_of(step: int) -> list[str]:
        trainee: Any = SimpleNamespace(state=ranks[0].state, shares=_shares(0, 1))
        state_comparison.compare_own_load(tmp_path, step, trainee)
        return "".join(capfd.readouterr()).splitlines()

    assert lines_of(STEP) == []
    _left_out(ranks)
    (line,) = lines_of(STEP)
    assert "exp_avg of shard 0 of mp_rank_00 on rank 0: training goes on" in line
    assert lines_of(STEP - 1) == [], "the script has loaded a save of its own"


def test_a_job_of_another_size_compares_what_it_has_loaded() -> None:
    agreed = agree(STEP, _held(_ranks(4)))
    for count in (1, 2):
        loaded = _ranks(count)
        assert differences(agreed, _held(loaded), has_optimizer=True) == []
        loaded[0].states[loaded[0].model.a]["exp_avg_sq"][3] = float("nan")
        assert differences(agreed, _held(loaded), has_optimizer=True) == ["exp_avg_sq of mp_rank_00"]


def test_a_load_without_the_optimizer_compares_the_weights() -> None:
    agreed = agree(STEP, _held(_ranks(2)))
    loaded = _ranks(2)
    _left_out(loaded)
    assert differences(agreed, _held(loaded), has_optimizer=False) == []
    _other_weights(loaded)
    assert differences(agreed, _held(loaded), has_optimizer=False) == ["weight of mp_rank_00 on rank 1"]


def test_another_model_is_named_and_not_compared() -> None:
    agreed = agree(STEP, _held(_ranks(2)))
    other_ranks = [_rounded(Rank(index, 2, torch.float32)) for index in range(2)]
    assert agreed_state.other_layouts(agreed, _held(_ranks(2))) == []
    assert agreed_state.other_layouts(agreed, _held(other_ranks)) == [
        "mp_rank_00 (it has other params than the checkpoint's)"
    ]
    assert differences(agreed, _held(other_ranks), has_optimizer=True) == []


def test_random_states_that_no_rank_has_saved_are_found_after_a_load() -> None:
    saved = step_record.take_random(SimpleNamespace(get_states=lambda: {"model-parallel": torch.arange(8)}))
    other_states = {**saved, "torch_rng_state": saved["torch_rng_state"] ^ 1}
    ranks = _ranks(2)
    states = [dataclasses.replace(state, random=state_sums.random_key(saved)) for state in _held(ranks)]
    agreed = agree(STEP, states)
    assert ranks_with_other_random_states(agreed, states) == []
    states[1] = dataclasses.replace(states[1], random=state_sums.random_key(other_states))
    assert ranks_with_other_random_states(agreed, states) == [1]
    states[1] = dataclasses.replace(states[1], random="")
    assert ranks_with_other_random_states(agreed, states) == [], "a user may load none"


def test_the_checkpoint_of_the_tracker_was_to_be_loaded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The loader may load another step, or none."""
    monkeypatch.setattr(save_check.dist, "get_rank", lambda: 0)
    monkeypatch.setattr(save_check.dist, "broadcast_object_list", lambda values, src: None)
    assert save_check.chosen_checkpoint(tmp_path, None, 4) == (4, None)
    (tmp_path / naming.TRACKER).write_text("6")
    assert [save_check.chosen_checkpoint(tmp_path, None, loaded)[0] for loaded in (0, 4)] == [6, 6]
    assert save_check.chosen_checkpoint(tmp_path, 2, 2) == (2, None)


def test_each_rank_has_its_own_of_several_random_states() -> None:
    states: list[dict[str, Any]] = [{"torch_rng_state": torch.full((4,), rank)} for rank in range(2)]
    keys = state_sums.random_keys(states)
    held_states = [
        dataclasses.replace(state, random=keys[rank]) for rank, state in enumerate(_held(_ranks(2)))
    ]
    agreed = agree(STEP, held_states)
    assert ranks_with_other_random_states(agreed, held_states) == []
    held_states[0] = dataclasses.replace(held_states[0], random=state_sums.random_key(states[1], 0))
    assert ranks_with_other_random_states(agreed, held_states) == [0]
    held_states[0] = dataclasses.replace(held_states[0], random=state_sums.random_key(states[0]))
    assert ranks_with_other_random_states(agreed, held_states) == [], (
        "the job has other options than the save"
    )


def test_random_states_of_a_rank_with_other_experts_are_no_difference() -> None:
    """A format may have one place for the random states of all ranks with the same dense model."""
    held_states = [
        dataclasses.replace(state, group=f"mp_rank_00_00{rank}", random=f"{rank}", peers=(0, 1))
        for rank, state in enumerate(_held(_ranks(2)))
    ]
    agreed = AgreedState(
        STEP, {state.group: AgreedGroup(state.layout, [], None, (state.random,)) for state in held_states}
    )
    loaded = [dataclasses.replace(state, random="0") for state in held_states]
    assert ranks_with_other_random_states(agreed, loaded) == []
    alone = [dataclasses.replace(state, peers=(rank,)) for rank, state in enumerate(loaded)]
    assert ranks_with_other_random_states(agreed, alone) == [1]


def test_holders_that_differ_do_not_agree() -> None:
    ranks = _ranks(1)
    twin = _ranks(1)
    held_states = [_held(ranks)[0], _held(twin)[0]]
    assert agree(STEP, held_states).groups["mp_rank_00"].shards[0].holders == (0, 1)
    twin[0].states[twin[0].model.c]["exp_avg"].view(torch.int32)[0] ^= 1 << 20
    held_states = [_held(ranks)[0], _held(twin)[0]]
    with pytest.raises(CheckpointError) as raised:
        agree(STEP, held_states)
    assert str(raised.value) == (
        "the state of step 12 is not agreed: ranks 0 and 1 hold different bits of exp_avg of shard 0 of"
        " mp_rank_00"
    )


def test_sums_add_up_over_parts_and_depend_on_places() -> None:
    tensor = torch.randn(70_001)
    total = placed_sum(tensor)
    for cut in random.Random(7).sample(range(70_001), 40):
        assert (placed_sum(tensor[:cut]) + placed_sum(tensor[cut:], cut)) & MASK == total
    swapped = tensor.clone()
    swapped[[3, 60_000]] = swapped[[60_000, 3]]
    assert placed_sum(swapped) != total
    for dtype in (torch.bfloat16, torch.float64, torch.bool):
        part = tensor.to(dtype)
        assert (placed_sum(part[:333]) + placed_sum(part[333:], 333)) & MASK == placed_sum(part)


def test_a_manifest_keeps_the_agreed_state() -> None:
    state = agree(STEP, _held(_ranks(2)))
    state = AgreedState(STEP, state.groups, ("weights under other names than in the model",))
    described = manifest.Manifest.now(STEP, [], {}, 2, state=state)
    assert manifest.decode(described.encode(), "file").state == state
    assert manifest.decode(manifest.Manifest.now(STEP, [], {}, 2).encode(), "file").state is None


def test_a_drill_says_whether_a_step_could_be_saved_without_a_rank() -> None:
    ranks = [*_ranks(1), *_ranks(1)]  # two holders of the only shard
    held_states = [_held([rank])[0] for rank in ranks]
    shares = {rank: _shares(0, 1) for rank in range(2)}
    boards = {rank: BoardRecord(rank, phase=Phase.RUNNING, oldest=STEP, finished=STEP) for rank in range(2)}
    assert given_sums.problem(STEP, 1, boards, shares, held_states) == ""
    alone = given_sums.problem(STEP, 0, {0: boards[0]}, {0: shares[0]}, held_states[:1])
    assert alone == "shard 0 of 1 of group mp_rank_00 has no live holder, it was on rank 0"
    ranks[0].states[ranks[0].model.c]["exp_avg"].view(torch.int32)[0] ^= 1
    held_states[0] = _held(ranks[:1])[0]
    assert given_sums.problem(STEP, 1, boards, shares, held_states) == (
        "ranks 0 and 1 hold different bits of exp_avg of shard 0 of mp_rank_00"
    )
