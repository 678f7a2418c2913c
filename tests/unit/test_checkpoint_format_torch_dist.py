"""The stand-ins for building a sharded state with the framework's own functions; training tests cover the
rest.
"""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch

from adaptor.checkpoint import format_torch_dist, shards, state_writer
from adaptor.checkpoint.format_torch_dist import Sharding
from adaptor.checkpoint.shards import Exchange
from adaptor.checkpoint.trainee import MegatronTrainee
from adaptor.checkpoint.training_state import TrainingState
from adaptor.errors import UnsupportedError
from tests.unit.test_checkpoint_dump import BUCKETS, PADDED, Rank, whole_state


class RecordingOptimizer(SimpleNamespace):
    """Saves the values found for each param: by main param, and by place in the gathered state."""

    def _build_gbuf_range_map(self, buffer: Any) -> Any:
        return [(bucket.offset, bucket.grad_data.numel()) for bucket in buffer.buckets]

    def sharded_state_dict(self, model: Any, metadata: Any) -> Any:
        group = self.data_parallel_group
        ((_, world),) = self.get_parameter_state_dp_zero(use_gloo_comm=True)[0].items()
        return {
            "group": (group.rank(), group.size(), self.distributed_optimizer_instance_id),
            "ranges": self.gbuf_ranges,
            "plain": self.state_dict(),
            "by param": {
                param: self._get_main_param_and_optimizer_states(param)
                for param in self.buffers[0].param_index_map
            },
            "by place": {
                param: world["exp_avg"][start:end]
                for param, (start, end, _) in self.buffers[0].param_index_map.items()
            },
        }


def optimizer_of(rank: Rank) -> tuple[RecordingOptimizer, dict[Any, slice]]:
    """Return a rank's optimizer, and the places of its params in the padded buffer."""
    optimizer = RecordingOptimizer(**vars(rank.optimizer), distributed_optimizer_instance_id=1)
    start, places, index = 0, {}, {}
    for number, (members, padded) in enumerate(zip(BUCKETS, PADDED, strict=True)):
        first = start
        for name, shape in members:
            end = first + torch.Size(shape).numel()
            param = getattr(rank.model, name)
            places[param] = slice(first, end)
            index[param] = (first, end, number)
            first = end
        start += padded
    optimizer.buffers[0].param_index_map = index
    return optimizer, places


@pytest.mark.parametrize("stored", [True, False])
def test_an_optimizer_with_the_whole_state_in_a_group_of_one(stored: bool) -> None:
    rank = Rank(0, 1)
    optimizer, places = optimizer_of(rank)
    state = TrainingState([rank.model], optimizer, None, "mp_rank_00", stored=(stored,))
    world = shards.gather(optimizer, 0, Exchange(None, 0, [[0]]))
    saved = Sharding(0, {}, (), ()).optimizer(state, {}, [{"optimizer": 7}], [world])
    assert saved["group"] == (0, 1, 0 if stored else 1)
    assert saved["ranges"] == [[(0, 22), (22, 2)]], "buckets without padding"
    assert saved["plain"] == {"optimizer": 7}
    for param, place in places.items():
        for key, full_state in whole_state().items():
            assert torch.equal(saved["by param"][param][key], full_state[place])
        assert torch.equal(saved["by place"][param], whole_state()["exp_avg"][place])
    assert optimizer.distributed_optimizer_instance_id == 1, "the live one is what it was"
    assert optimizer.data_parallel_group is rank.optimizer.data_parallel_group


class PlainOptimizer:
    """An unsharded optimizer whose saved groups Megatron-core 0.20 compares with its own."""

    def __init__(self, weights: list[list[torch.nn.Parameter]]) -> None:
        self.float16_groups = weights
        self.fp32_from_float16_groups = [
            [torch.nn.Parameter(weight.detach().clone()) for weight in group] for group in weights
        ]
        self.optimizer = torch.optim.Adam([{"params": group} for group in self.fp32_from_float16_groups])

    def state_dict(self) -> dict[str, Any]:
        return {
            "optimizer": self.optimizer.state_dict(),
            "fp32_from_fp16_params": self.fp32_from_float16_groups,
        }

    def sharded_state_dict(self, model: Any, metadata: Any) -> Any:
        saved = self.state_dict()
        inner = saved["optimizer"]
        groups = zip(inner["param_groups"], self.optimizer.param_groups, strict=True)
        ids = [list(zip(group["params"], own_group["params"], strict=True)) for group, own_group in groups]
        assert len(ids) == len(saved["fp32_from_fp16_params"])
        weights = {
            id(main): weight
            for mains, group in zip(self.fp32_from_float16_groups, self.float16_groups, strict=True)
            for main, weight in zip(mains, group, strict=True)
        }
        return {
            "state": inner["state"],
            "names": [model[weights[id(main)]] for pairs in ids for _, main in pairs],
        }


def test_the_rehearsal_of_an_optimizer_without_shards_has_its_groups() -> None:
    weights = [[torch.nn.Parameter(torch.ones(2))], [torch.nn.Parameter(torch.ones(3))]]
    optimizer = PlainOptimizer(weights)
    for main in optimizer.optimizer.param_groups[0]["params"]:
        main.grad = torch.ones(2)
    optimizer.optimizer.step()
    names = {weights[0][0]: "first", weights[1][0]: "second"}
    state = TrainingState([], optimizer, None, "mp_rank_00")
    plain = format_torch_dist._before_first_update(optimizer)
    saved = Sharding(0, {}, (), ()).optimizer(state, names, [plain], [None])
    assert saved == {"state": {}, "names": ["first", "second"]}
    assert optimizer.optimizer.state, "the live optimizer has kept its moments"


@pytest.mark.parametrize(
    ("kind", "missing", "state_name"),
    [
        ("fsdp_dtensor", "", "optimizer state of the kind fsdp_dtensor"),
        ("dp_reshardable", "gbuf_ranges", "the optimizer of this version"),
    ],
)
def test_unsupported_states_are_refused(kind: str, missing: str, state_name: str) -> None:
    rank = Rank(0, 1)
    optimizer, _ = optimizer_of(rank)
    if missing:
        delattr(optimizer, missing)
    state = TrainingState([rank.model], optimizer, None, "mp_rank_00")
    with pytest.raises(
        UnsupportedError, match=f"--ckpt-format is torch_dist: {state_name} cannot be written by"
    ):
        format_torch_dist.agree(state, {"distrib_optim_sharding_type": kind}, None, 0, cast(Any, None))


def test_states_that_the_framework_could_not_load_are_refused() -> None:
    rank = Rank(0, 1)
    optimizer, _ = optimizer_of(rank)
    optimizer.ddp_config = SimpleNamespace(num_distributed_optimizer_instances=2)
    state = TrainingState([rank.model], optimizer, None, "mp_rank_00")
    metadata = {"distrib_optim_sharding_type": "dp_zero_gather_scatter"}
    with pytest.raises(UnsupportedError, match="with 2 optimizer instances; use TTP_REPLICA=mirror, or"):
        format_torch_dist.agree(state, metadata, None, 0, cast(Any, None))


class OtherRandomStates(Sharding):
    """Writes its large files like `Sharding`."""

    def rng(self, states: Any) -> Any:
        return states


class OtherFiles(Sharding):
    """Writes a file unknown to `planned_files` of `Sharding`."""

    def files(self, state: Any, body: Any, gathered: Any) -> Any:
        return {**super().files(state, body, gathered), "further.pt": lambda file: None}


@pytest.mark.parametrize(
    ("kind", "is_planned"), [(Sharding, True), (OtherRandomStates, True), (OtherFiles, False)]
)
def test_a_subclass_is_written_in_place_unless_it_has_other_files(
    kind: type[Sharding], is_planned: bool
) -> None:
    assert state_writer._plans_its_files(kind(0, {}, (), ())) is is_planned


def test_an_own_loop_that_does_not_say_how_its_state_is_sharded_is_refused() -> None:
    state = replace(Rank(0, 1).state, args=None)
    with pytest.raises(UnsupportedError, match="needs contents with metadata and random"):
        format_torch_dist.make(state, 0)


@pytest.mark.parametrize("own_format", [None, Sharding(0, {}, (), ())])
def test_a_trainee_reports_that_last_words_are_joined_of_parts(own_format: Any) -> None:
    state = replace(Rank(0, 1).state, format=own_format)
    trainee = MegatronTrainee(state, "/save", (), cast(Any, None), dict, dict, int, lambda: None)
    assert trainee.in_parts is (own_format is not None)
