"""A dump over a real gloo group with a stand-in for the framework's optimizer: padding, uneven shards."""

from __future__ import annotations

import dataclasses
import threading
import types
from collections.abc import Callable
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import distributed as dist

from adaptor.checkpoint import manifest, publish, shards, state_writer, training_state
from adaptor.checkpoint.shards import DumpCancelled, Exchange
from adaptor.checkpoint.step_record import StepRecord
from adaptor.checkpoint.training_state import TrainingState
from adaptor.checkpoint.weights import Weights
from adaptor.errors import CheckpointError
from tests.unit.threads import LONG_S

# Two buckets; the second is smaller than a shard's share of its padding.
BUCKETS = ((("a", (3, 5)), ("b", (7,))), (("c", (2,)),))
PADDED = (32, 16)


class _Model(torch.nn.Module):
    """A model whose trained params are views of one buffer; it also has a frozen param and a buffer."""

    def __init__(self, data: torch.Tensor, places: dict[str, tuple[int, tuple[int, ...]]]) -> None:
        super().__init__()
        for name, (start, shape) in places.items():
            numel = torch.Size(shape).numel()
            self.register_parameter(name, torch.nn.Parameter(data[start : start + numel].view(shape)))
        self.tied = self.a
        self.frozen = torch.nn.Parameter(torch.arange(4.0), requires_grad=False)
        self.register_buffer("mask", torch.ones(2, dtype=torch.bool))

    def state_dict_for_save_checkpoint(self) -> dict[str, Any]:
        return self.state_dict()


class Rank:
    """One rank: a distributed optimizer with shard `index` of `count`, and the model in `dtype`."""

    def __init__(self, index: int, count: int, dtype: torch.dtype = torch.bfloat16) -> None:
        data = torch.full((sum(PADDED),), 7.0, dtype=dtype)
        places: dict[str, tuple[int, tuple[int, ...]]] = {}
        buckets, ranges, offset = [], [], 0
        for members, padded in zip(BUCKETS, PADDED, strict=True):
            start = offset
            for name, shape in members:
                places[name] = (start, shape)
                start += torch.Size(shape).numel()
            buckets.append(
                types.SimpleNamespace(
                    offset=offset, numel_unpadded=start - offset, grad_data=torch.empty(padded)
                )
            )
            offset += padded
        self.model = _Model(data, places)
        self.states: dict[Any, dict[str, torch.Tensor]] = {}
        for bucket, (members, padded) in zip(buckets, zip(BUCKETS, PADDED, strict=True), strict=True):
            shard = padded // count
            begin = bucket.offset + index * shard
            param_map = {}
            for name, shape in members:
                first, last = places[name][0], places[name][0] + torch.Size(shape).numel()
                low, high = max(first, begin), min(last, begin + shard)
                if low < high:
                    param = getattr(self.model, name)
                    param_map[param] = {
                        "gbuf_local": types.SimpleNamespace(start=low - begin, end=high - begin)
                    }
                    self.states[param] = {key: full[low:high].clone() for key, full in whole_state().items()}
            ranges.append({"param_map": param_map})
        buffer = types.SimpleNamespace(
            buckets=buckets,
            numel_unpadded=sum(b.numel_unpadded for b in buckets),
            param_data=data,
            param_dtype=dtype,
            grad_dtype=torch.float32,
            param_index_map={
                getattr(self.model, name): (first, first + torch.Size(shape).numel(), number)
                for number, members in enumerate(BUCKETS)
                for name, shape in members
                for first in (places[name][0],)
            },
        )
        group = types.SimpleNamespace(rank=lambda: index, size=lambda: count)
        self.optimizer = types.SimpleNamespace(
            is_stub_optimizer=False,
            data_parallel_group=group,
            buffers=[buffer],
            gbuf_ranges=[{(dtype, torch.float32): ranges}],
            get_parameter_state_dp_zero=None,
            _get_main_param_and_optimizer_states=self.states.__getitem__,
            state_dict=lambda: {"optimizer": {"param_groups": [{"lr": 9.0, "step": 3}]}, "grad_scaler": {}},
        )
        self.state = TrainingState(
            model=[self.model],
            optimizer=self.optimizer,
            scheduler=None,
            folder="mp_rank_00",
            args=types.SimpleNamespace(
                consumed_train_samples=99, curr_iteration=50, rank=3, no_save_rng=False
            ),
            args_overrides={"rank": 0},
        )


def whole_state() -> dict[str, torch.Tensor]:
    numbers = torch.arange(sum(PADDED), dtype=torch.float32)
    return {"param": numbers / 3, "exp_avg": -numbers, "exp_avg_sq": numbers * numbers}


def without_padding(padded: torch.Tensor) -> torch.Tensor:
    return torch.cat([padded[:22], padded[32:34]])


RECORD = StepRecord(
    step=12,
    counters={"consumed_train_samples": 96, training_state.FLOPS: 2.5},
    scheduler={"num_steps": 96},
    groups=(({"lr": 0.5},),),
    scalers=({"scale": torch.tensor([8.0])},),
    rng=[{"torch_rng_state": torch.zeros(2, dtype=torch.uint8)}],
    buffers=(torch.tensor([True, False]),),
)


def together(tmp_path: Path, work: list[Callable[[Any], Any]], seconds: float = LONG_S) -> list[Any]:
    """Run each function in a thread with its rank of one gloo group; return results or errors."""
    results: list[Any] = [None] * len(work)

    def run(rank: int) -> None:
        store = dist.FileStore(str(tmp_path / "store"), len(work))
        try:
            group = dist.ProcessGroupGloo(store, rank, len(work), timedelta(seconds=seconds))
            results[rank] = work[rank](group)
        except Exception as error:
            results[rank] = error.with_traceback(
                None
            )  # its frames would keep the group and its connections alive

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(len(work))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(2 * LONG_S)
    return results


def dump(
    tmp_path: Path, count: int, writer: int, *, in_place: bool = False, **options: Any
) -> tuple[list[Any], Path]:
    """A dump by `count` holders, shard s on rank count-1-s of the group, into a new folder.

    With `in_place` they write their shards themselves.
    """
    root = tmp_path / "iter_0000012_tmp"
    root.mkdir()
    sources = [[count - 1 - shard for shard in range(count)]]

    def part(rank: int) -> Callable[[Any], Any]:
        def act(group: Any) -> Any:
            folder = root if in_place else None
            exchange = Exchange(group, rank, sources, tag=5, folder=folder, **options)
            state = Rank(count - 1 - rank, count).state
            if rank == writer:
                return state_writer.write_files(state, RECORD, exchange, root, 3)
            return state_writer.send_shards(state, writer, exchange)

        return act

    results = together(tmp_path, [part(rank) for rank in range(count)])
    publish.publish(tmp_path, 12, results[writer].files, {}, count)
    return results, tmp_path / "iter_0000012"


def load(path: Path) -> Any:
    return torch.load(path, weights_only=False)


@pytest.mark.parametrize("count", [1, 2, 4])
@pytest.mark.parametrize("message", [1 << 23, 3])
def test_shards_make_a_whole_wherever_they_come_from(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, count: int, message: int
) -> None:
    monkeypatch.setattr(shards, "_MESSAGE", message)
    results, root = dump(tmp_path, count, writer=count // 2)
    written = results[count // 2]
    assert [entry.path for entry in written.files] == [
        "mp_rank_00/distrib_optim.pt",
        "mp_rank_00/model_optim_rng.pt",
    ]
    assert manifest.defects(root) == []
    state = load(root / "mp_rank_00/distrib_optim.pt")
    assert list(state) == ["buckets_coalesced", 0]
    world = state[0][(torch.bfloat16, torch.float32)]
    assert list(world) == ["param", "exp_avg", "exp_avg_sq", "numel_unpadded"]
    assert world["numel_unpadded"] == 24
    for key, full in whole_state().items():
        assert torch.equal(world[key], without_padding(full))


def test_up_to_0_6_buckets_are_saved_with_their_padding(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    original_init = Rank.__init__

    def as_in_0_6(self: Rank, *arguments: Any) -> None:
        original_init(self, *arguments)
        (buffer,) = self.optimizer.buffers
        del buffer.numel_unpadded
        self.optimizer.per_bucket_numel = [{(torch.bfloat16, torch.float32): list(PADDED)}]
        self.optimizer.per_bucket_numel_unpadded = [{(torch.bfloat16, torch.float32): [22, 2]}]

    monkeypatch.setattr(Rank, "__init__", as_in_0_6)
    _, root = dump(tmp_path, 2, writer=0)
    state = load(root / "mp_rank_00/distrib_optim.pt")
    dtypes = (torch.bfloat16, torch.float32)
    assert list(state) == ["per_bucket_numel", "per_bucket_numel_unpadded", 0]
    assert state["per_bucket_numel"] == [{dtypes: [32, 16]}]
    assert state["per_bucket_numel_unpadded"] == [{dtypes: [22, 2]}]
    assert list(state[0][dtypes]) == ["param", "exp_avg", "exp_avg_sq"]
    for key, full in whole_state().items():
        first, second = state[0][dtypes][key]
        assert torch.equal(first, torch.cat([full[:22], torch.zeros(10)]))
        assert torch.equal(second, torch.cat([full[32:34], torch.zeros(14)]))


def test_a_rank_provides_its_shard_and_its_copy_of_another(tmp_path: Path) -> None:
    """Four shards on two ranks: rank 0 has shard 1 and a copy of 0, rank 1 shard 2 and a copy of 3."""
    root = tmp_path / "iter_0000012_tmp"
    root.mkdir()

    def part(rank: int) -> Callable[[Any], Any]:
        def act(group: Any) -> Any:
            own_shard, copied = Rank((1, 2)[rank], 4), Rank((0, 3)[rank], 4)

            def shard(buffer: int, bucket: int) -> Any:
                (ranges,) = copied.optimizer.gbuf_ranges[buffer].values()
                for param, ranges_of_param in ranges[bucket]["param_map"].items():
                    yield (
                        ranges_of_param["gbuf_local"].start,
                        ranges_of_param["gbuf_local"].end,
                        copied.states[param],
                    )

            mirror: Any = types.SimpleNamespace(index=(0, 3)[rank], shard=shard)
            exchange = Exchange(group, rank, [[0, 0, 1, 1]], (mirror,), tag=5)
            if rank == 0:
                return state_writer.write_files(own_shard.state, RECORD, exchange, root, 3)
            return state_writer.send_shards(own_shard.state, 0, exchange)

        return act

    results = together(tmp_path, [part(0), part(1)])
    publish.publish(tmp_path, 12, results[0].files, {}, 2)
    state = load(tmp_path / "iter_0000012/mp_rank_00/distrib_optim.pt")
    for key, full in whole_state().items():
        assert torch.equal(state[0][(torch.bfloat16, torch.float32)][key], without_padding(full))


def test_weights_come_from_the_main_params_and_the_rest_from_the_model(tmp_path: Path) -> None:
    _, root = dump(tmp_path, 2, writer=0)
    model = load(root / "mp_rank_00/model_optim_rng.pt")["model"]
    full = whole_state()["param"].to(torch.bfloat16)
    assert set(model) == {"a", "b", "c", "frozen", "tied", "mask"}
    assert torch.equal(model["a"], full[:15].view(3, 5))
    assert torch.equal(model["tied"], model["a"])
    assert torch.equal(model["b"], full[15:22])
    assert torch.equal(model["c"], full[32:34])
    assert torch.equal(model["frozen"], torch.arange(4.0))
    assert model["mask"].tolist() == [True, False], "as it was at the end of the step"


def test_the_state_of_the_step_comes_from_the_record(tmp_path: Path) -> None:
    _, root = dump(tmp_path, 2, writer=1)
    body = load(root / "mp_rank_00/model_optim_rng.pt")
    assert list(body) == [
        "args",
        "checkpoint_version",
        "iteration",
        "model",
        "optimizer",
        "opt_param_scheduler",
        "rng_state",
        "num_floating_point_operations_so_far",
    ]
    args = body["args"]
    assert (args.consumed_train_samples, args.curr_iteration, args.rank) == (96, 11, 0)
    assert not hasattr(args, training_state.FLOPS)
    assert (body["checkpoint_version"], body["iteration"], body[training_state.FLOPS]) == (3.0, 12, 2.5)
    assert body["optimizer"]["optimizer"]["param_groups"] == [{"lr": 0.5, "step": 3}]
    assert body["optimizer"]["grad_scaler"]["scale"].item() == 8.0
    assert body["opt_param_scheduler"] == {"num_steps": 96}
    assert torch.equal(body["rng_state"][0]["torch_rng_state"], torch.zeros(2, dtype=torch.uint8))


def _alone(rank: Rank, tmp_path: Path, **changes: Any) -> Any:
    state = TrainingState(**{**vars(rank.state), **changes})
    written = state_writer.write_files(state, RECORD, Exchange(None, 0, [[0]]), tmp_path, 1)
    for entry in written.files:
        (tmp_path / entry.draft).rename(tmp_path / entry.path)
    return written


def test_a_library_user_has_no_args_and_may_add_entries(tmp_path: Path) -> None:
    _alone(Rank(0, 1), tmp_path, args=None, args_overrides={}, extra={"mine": 1})
    body = load(tmp_path / "mp_rank_00/model_optim_rng.pt")
    assert "args" not in body
    assert body["mine"] == 1
    assert body["iteration"] == 12


def test_last_words_have_all_that_regular_saves_leave_out(tmp_path: Path) -> None:
    """Their arguments say so, for the loader."""
    args = types.SimpleNamespace(no_save_optim=True, no_save_rng=True)
    written = _alone(Rank(0, 1), tmp_path, args=args)
    files = ["mp_rank_00/model_optim_rng.pt", "mp_rank_00/distrib_optim.pt"]
    assert sorted(entry.path for entry in written.files) == sorted(files)
    body = load(tmp_path / "mp_rank_00/model_optim_rng.pt")
    assert {"optimizer", "opt_param_scheduler", "rng_state"} <= set(body)
    assert (body["args"].no_save_optim, body["args"].no_save_rng) == (None, None)
    assert (args.no_save_optim, args.no_save_rng) == (True, True)


@pytest.mark.parametrize(("rerun", "saved"), [({"mode": "disabled"},) * 2, ({}, None)])
def test_the_rerun_state_of_a_version_that_saves_it_stands_before_the_random_states(
    rerun: dict[str, str], saved: dict[str, str] | None, tmp_path: Path
) -> None:
    record = dataclasses.replace(RECORD, rerun=rerun)
    state_writer.write_files(Rank(0, 1).state, record, Exchange(None, 0, [[0]]), tmp_path, 1)
    body = load(tmp_path / "mp_rank_00/model_optim_rng.pt.1")
    assert body["rerun_state_machine"] == saved
    assert list(body)[-3:] == ["rerun_state_machine", "rng_state", "num_floating_point_operations_so_far"]


def test_fp32_weights_are_rebuilt_as_well(tmp_path: Path) -> None:
    _alone(Rank(0, 1, torch.float32), tmp_path)
    model = load(tmp_path / "mp_rank_00/model_optim_rng.pt")["model"]
    assert torch.equal(model["c"], whole_state()["param"][32:34])


def test_weights_are_rebuilt_while_their_buffers_are_offloaded() -> None:
    """Buffers without memory have no address to identify a weight."""
    ranks = [Rank(0, 1), Rank(0, 1)]
    weights = Weights(lambda tensor: tensor)
    for number, rank in enumerate(ranks):
        rank.model.a.untyped_storage().resize_(0)
        world = {"param": without_padding(whole_state()["param"]) + number}
        weights.add_sharded(rank.optimizer, {0: {(torch.bfloat16, torch.float32): world}})
    for number, rank in enumerate(ranks):
        saved = rank.model.state_dict_for_save_checkpoint()
        places = [(name, value, partial(saved.__setitem__, name)) for name, value in saved.items()]
        assert weights.rebuild(rank.model, places, {}) == []
        expected = (whole_state()["param"] + number).to(torch.bfloat16)
        assert torch.equal(saved["tied"], expected[:15].view(3, 5))
        assert torch.equal(saved["b"], expected[15:22])
        assert torch.equal(saved["c"], expected[32:34])


def test_a_distributed_optimizer_of_an_older_framework_gives_the_same(tmp_path: Path) -> None:
    """Up to 0.10 it has no method to find main params, and no stub optimizers."""
    rank = Rank(0, 1)
    older = rank.optimizer
    del older.is_stub_optimizer, older._get_main_param_and_optimizer_states
    state = {entry["param"]: entry for entry in rank.states.values()}
    older.optimizer = types.SimpleNamespace(
        param_groups=[{"params": list(state)}],
        state={
            main: {"exp_avg": entry["exp_avg"], "exp_avg_sq": entry["exp_avg_sq"]}
            for main, entry in state.items()
        },
    )
    older.model_param_group_index_map = {param: (0, order) for order, param in enumerate(rank.states)}
    _alone(rank, tmp_path)
    saved = load(tmp_path / "mp_rank_00/distrib_optim.pt")
    for key, full in whole_state().items():
        assert torch.equal(saved[0][(torch.bfloat16, torch.float32)][key], without_padding(full))


@pytest.mark.parametrize("value", [1.0, -1.0])
def test_weights_that_are_not_finite_are_named(tmp_path: Path, value: float) -> None:
    """Main params too large for the weights; the test of shards covers the optimizer state."""
    rank = Rank(0, 1, torch.float16)
    rank.states[rank.model.b]["param"][2] = 1e30 if value > 0 else -1e30
    assert _alone(rank, tmp_path).not_finite == "model.b is not finite"


def test_a_trained_weight_without_a_main_param_is_one_line(tmp_path: Path) -> None:
    rank = Rank(0, 1)
    rank.model.frozen.requires_grad_(True)
    with pytest.raises(CheckpointError, match="frozen: no optimizer of this rank has its main param"):
        _alone(rank, tmp_path)


def test_before_the_first_update_nothing_is_saved(tmp_path: Path) -> None:
    rank = Rank(0, 1)
    for tensors in rank.states.values():
        del tensors["exp_avg"], tensors["exp_avg_sq"]
    with pytest.raises(CheckpointError, match="no update has been made"):
        _alone(rank, tmp_path)
    assert not (tmp_path / "mp_rank_00").exists()


def test_an_abandoned_attempt_leaves_nothing_and_touches_no_other(tmp_path: Path) -> None:
    folder = tmp_path / "mp_rank_00"
    folder.mkdir()
    other_files = ["model_optim_rng.pt", "model_optim_rng.pt.2", "model_optim_rng.pt.11"]
    for name in other_files:
        (folder / name).write_bytes(b"of another attempt")
    calls = 0

    def cancelled() -> bool:
        nonlocal calls
        calls += 1
        return calls > allowed

    allowed = -1
    while True:
        allowed, calls = allowed + 1, 0
        exchange = Exchange(None, 0, [[0]], cancelled=cancelled)
        try:
            written = state_writer.write_files(Rank(0, 1).state, RECORD, exchange, tmp_path, 1)
        except DumpCancelled:
            assert sorted(path.name for path in folder.iterdir()) == sorted(other_files)
        else:
            break
    assert allowed > 5
    assert [entry.draft for entry in written.files] == [
        "mp_rank_00/distrib_optim.pt.1",
        "mp_rank_00/model_optim_rng.pt.1",
    ]
    assert {path.read_bytes() for path in map(folder.joinpath, other_files)} == {b"of another attempt"}


def test_a_holder_that_sends_nothing_ends_the_dump(tmp_path: Path) -> None:
    def writer(group: Any) -> Any:
        state = Rank(0, 2).state
        return state_writer.write_files(state, RECORD, Exchange(group, 0, [[0, 1]]), tmp_path / "out", 1)

    results = together(tmp_path, [writer, lambda group: None], seconds=2)
    assert isinstance(results[0], RuntimeError)
    assert not (tmp_path / "out").exists()


def test_a_sender_may_drop_its_group_once_it_returns(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    gathered = threading.Event()
    acknowledge = shards.acknowledge

    def late(*args: Any) -> None:
        gathered.set()
        acknowledge(*args)

    monkeypatch.setattr(shards, "acknowledge", late)
    (tmp_path / "out").mkdir()

    def sender(group: Any) -> bool:
        state_writer.send_shards(Rank(0, 2).state, 1, Exchange(group, 0, [[0, 1]]))
        return gathered.is_set()

    def writer(group: Any) -> Any:
        return state_writer.write_files(
            Rank(1, 2).state, RECORD, Exchange(group, 1, [[0, 1]]), tmp_path / "out", 1
        )

    results = together(tmp_path, [sender, writer])
    assert results[0] is True
    assert len(results[1].files) == 2


@pytest.mark.parametrize("sources", [[1, 0], [0, 0], [0], [0, 1, 2]])
def test_sources_that_would_leave_a_hole_are_refused(tmp_path: Path, sources: list[int]) -> None:
    exchange = Exchange(None, 0, [sources])
    with pytest.raises(CheckpointError, match="rank 0 of the dump holds shard 0 of 2"):
        state_writer.write_files(Rank(0, 2).state, RECORD, exchange, tmp_path, 1)
    with pytest.raises(CheckpointError, match="rank 0 of the dump holds shard 0 of 2"):
        state_writer.send_shards(Rank(0, 2).state, 1, exchange)


def test_a_full_disk_is_one_line(tmp_path: Path) -> None:
    (tmp_path / "mp_rank_00").write_text("in the way")
    with pytest.raises(CheckpointError, match="mp_rank_00") as caught:
        _alone(Rank(0, 1), tmp_path)
    assert "\n" not in str(caught.value)


def test_plain_data_parallel_weights_come_from_float32_copies(tmp_path: Path) -> None:
    model = _Model(
        torch.zeros(40, dtype=torch.bfloat16), {"a": (0, (3, 5)), "b": (15, (7,)), "c": (32, (2,))}
    )
    params = [model.a, model.b, model.c]
    mains = [torch.full(p.shape, 1 / 3 + n) for n, p in enumerate(params)]
    optimizer = types.SimpleNamespace(
        is_stub_optimizer=False,
        float16_groups=[params],
        fp32_from_float16_groups=[mains],
        get_parameters=lambda: mains,
        state_dict=lambda: {
            "optimizer": {"state": {}, "param_groups": [{"lr": 9.0}]},
            "fp32_from_fp16_params": [mains],
        },
    )
    state = TrainingState([model], optimizer, None, "mp_rank_00")
    written = state_writer.write_files(state, RECORD, Exchange(None, 0, [[0]]), tmp_path, 1)
    assert [entry.path for entry in written.files] == ["mp_rank_00/model_optim_rng.pt"]
    body = load(tmp_path / "mp_rank_00/model_optim_rng.pt.1")
    for name, main in zip(("a", "b", "c", "tied"), [*mains, mains[0]], strict=True):
        assert torch.equal(body["model"][name], main.to(torch.bfloat16))
    assert torch.equal(body["optimizer"]["fp32_from_fp16_params"][0][1], mains[1])
    assert body["optimizer"]["optimizer"]["param_groups"] == [{"lr": 0.5}]


def test_a_sender_waits_for_its_own_shards_alone(tmp_path: Path) -> None:
    """Rank 2 provides a shard of the second optimizer after rank 1, with one of the first, has left."""
    has_left = threading.Event()
    sources = [[0, 1], [0, 2]]
    record = dataclasses.replace(RECORD, groups=2 * RECORD.groups, scalers=2 * RECORD.scalers)
    (tmp_path / "out").mkdir()

    def state(index: int) -> TrainingState:
        rank = Rank(index, 2)
        optimizers = types.SimpleNamespace(chained_optimizers=[rank.optimizer, Rank(index, 2).optimizer])
        return dataclasses.replace(rank.state, optimizer=optimizers)

    def writer(group: Any) -> Any:
        return state_writer.write_files(state(0), record, Exchange(group, 0, sources), tmp_path / "out", 1)

    def first(group: Any) -> None:
        state_writer.send_shards(state(1), 0, Exchange(group, 1, sources))
        has_left.set()

    def second(group: Any) -> bool:
        is_in_time = has_left.wait(LONG_S)
        state_writer.send_shards(state(1), 0, Exchange(group, 2, sources))
        return is_in_time

    written, _, is_in_time = together(tmp_path, [writer, first, second])
    assert is_in_time is True
    dtypes = (torch.bfloat16, torch.float32)
    for saved in load(tmp_path / "out" / written.files[0].draft):
        for key, full in whole_state().items():
            assert torch.equal(saved[0][dtypes][key], without_padding(full))
