"""Main params that MindSpeed moves between two updates are read and written bitwise."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from adaptor.checkpoint import shards
from adaptor.errors import UnsupportedError
from adaptor.frameworks import mindspeed_memory
from adaptor.replica import optimizer_state, twin

SIZES = (6, 3, 11)  # of params; 3 unused elements lie between the second and the third
STARTS = (0, 6, 12)
NUMEL = 24  # padded


def reuse_data_ptr(des: torch.Tensor, src: torch.Tensor, offset: int) -> None:
    des.set_(src.untyped_storage(), offset, des.shape, des.stride())  # type: ignore[call-overload]


class Reused:
    """A distributed optimizer with one bucket in MindSpeed's memory layout."""

    def __init__(self, rank: int, count: int, weights: torch.Tensor) -> None:
        self.data_parallel_group = SimpleNamespace(rank=lambda: rank, size=lambda: count)
        self._rank, self._count = rank, count
        self.first_sub_flag = True
        self.param_data = weights.clone()
        ends = [start + size for start, size in zip(STARTS, SIZES, strict=True)]
        self.model_params = [
            torch.nn.Parameter(self.param_data[s:e]) for s, e in zip(STARTS, ends, strict=True)
        ]
        bucket = SimpleNamespace(
            param_data=self.param_data, grad_data=torch.zeros(NUMEL), offset=0, numel_unpadded=ends[-1]
        )
        index_map = {p: (s, e, 0) for p, s, e in zip(self.model_params, STARTS, ends, strict=True)}
        self.buffers = [
            SimpleNamespace(
                param_data=self.param_data,
                buckets=[bucket],
                param_index_map=index_map,
                numel_unpadded=ends[-1],
                param_dtype=torch.bfloat16,
                grad_dtype=torch.float32,
            )
        ]
        size = NUMEL // count
        self.size, begin = size, rank * size
        ranges = {}
        for param, (start, end, _) in index_map.items():
            if max(start, begin) < min(end, begin + size):
                local = SimpleNamespace(start=max(start, begin) - begin, end=min(end, begin + size) - begin)
                ranges[param] = {"gbuf_local": local}
        self.gbuf_ranges: list[Any] = [{"dtypes": [{"param_map": ranges}]}]
        self.mains = [
            torch.empty(item["gbuf_local"].end - item["gbuf_local"].start) for item in ranges.values()
        ]
        self.model_param_group_index_map = {param: (0, order) for order, param in enumerate(ranges)}
        self.optimizer = torch.optim.AdamW(self.mains, lr=0.1)
        if count == 1:
            self.memory = torch.zeros(2 * NUMEL, dtype=torch.bfloat16)
            self.shard_main_param_res_buffers = [self.memory]
            for main, param, (start, end, _) in zip(self.mains, index_map, index_map.values(), strict=True):
                reuse_data_ptr(main, self.memory, start)
                upper = self.memory[start + end : 2 * end]
                upper.copy_(param.detach())
                param.data = upper
        else:
            self.shard_main_param_res_buffers = [torch.zeros(size, dtype=torch.bfloat16)]
            self.model_param_bucket_and_res_map = {self.param_data: self.shard_main_param_res_buffers[0]}
            for main, item in zip(self.mains, ranges.values(), strict=True):
                offset = max(0, rank - 1) * size // 2 + item["gbuf_local"].start
                reuse_data_ptr(main, self.param_data, offset)

    def fp16_tensor_convert_to_fp32_tensor(self) -> None:
        """Join the halves of all elements and subtract 32768, as MindSpeed does."""
        for full, lower, upper in self._parts():
            joined = torch.stack((lower, upper), -1).reshape(-1).clone()
            full.copy_(joined)
            if not self.first_sub_flag:
                full.view(torch.int32).sub_(32768)

    def fp32_tensor_convert_to_fp16_tensor(self) -> None:
        self.first_sub_flag = False
        for full, lower, upper in self._parts():
            full.view(torch.int32).add_(32768)
            halves = full.view(-1, 2).clone()
            lower.copy_(halves[:, 0])
            upper.copy_(halves[:, 1])

    def _parts(self) -> list[tuple[torch.Tensor, torch.Tensor, torch.Tensor]]:
        if self._count == 1:
            return [
                (
                    self.memory[2 * start : 2 * end],
                    self.memory[2 * start : start + end],
                    self.memory[start + end : 2 * end],
                )
                for start, end, _ in self.buffers[0].param_index_map.values()
            ]
        size, data_before = self.size, max(0, self._rank - 1) * self.size
        upper = self.param_data[self._rank * size : (self._rank + 1) * size]
        return [
            (
                self.param_data[data_before : data_before + 2 * size],
                self.shard_main_param_res_buffers[0],
                upper,
            )
        ]


def _updated(count: int) -> tuple[list[Reused], list[Any], list[torch.Tensor]]:
    """Return optimizers after two updates, their states, and the main params inside the last update."""
    torch.manual_seed(5)
    weights = torch.randn(NUMEL).to(torch.bfloat16)
    weights[9:12] = 0
    weights[23:] = 0
    optimizers = [Reused(rank, count, weights) for rank in range(count)]
    memories = [mindspeed_memory.attach(optimizer) for optimizer in optimizers]
    expected: list[torch.Tensor] = []
    for _ in range(2):
        expected = []
        for optimizer, memory in zip(optimizers, memories, strict=True):
            memory.before_update()
            for main in optimizer.mains:
                main.grad = torch.randn_like(main)
            optimizer.optimizer.step()
            expected += [main.clone() for main in optimizer.mains]
            memory.after_update()
        if count > 1:  # the gather gives every rank all weights
            own_weights = [
                optimizer.param_data.split(optimizer.size)[rank] for rank, optimizer in enumerate(optimizers)
            ]
            gathered = torch.cat(own_weights)
            for optimizer in optimizers:
                optimizer.param_data.copy_(gathered)
    return optimizers, memories, expected


def _world(optimizers: list[Reused]) -> dict[Any, Any]:
    tensors = {key: torch.zeros(23) for key in shards.KEYS}
    for optimizer in optimizers:
        (bucket,) = shards.buckets_of(optimizer, optimizer.buffers[0])
        begin, _ = bucket.extent(shards.shard_of(optimizer)[0])
        for start, end, part in shards.part_of(optimizer, 0, 0):
            for key in shards.KEYS:
                tensors[key][begin + start : begin + end] = part[key]
    return {"buckets_coalesced": True, 0: {"dtypes": {**tensors, "numel_unpadded": 23}}}


@pytest.mark.parametrize("count", [1, 2, 3])
def test_main_params_are_read_between_updates(count: int) -> None:
    optimizers, _, expected = _updated(count)
    read = [value for optimizer in optimizers for value in optimizer_state.values_of(optimizer.optimizer)]
    assert all(
        torch.equal(actual, expected_tensor) for actual, expected_tensor in zip(read, expected, strict=True)
    )


@pytest.mark.parametrize("count", [1, 2, 3])
def test_the_memory_is_saved_unchanged(count: int) -> None:
    """`get_parameter_state_dp_zero` saves the raw memory as main params, and the residuals."""
    optimizers, memories, _ = _updated(count)
    saved = memories[0].as_saved(_world(optimizers))
    param = torch.zeros(23)
    for rank, optimizer in enumerate(optimizers):
        begin = rank * optimizer.size
        for model_param, ranges in optimizer.gbuf_ranges[0]["dtypes"][0]["param_map"].items():
            local = ranges["gbuf_local"]
            _, order = optimizer.model_param_group_index_map[model_param]
            param[begin + local.start : begin + local.end] = optimizer.mains[order]
    assert torch.equal(saved[0]["dtypes"]["param"].view(torch.int32), param.view(torch.int32))
    if count == 1:
        assert "shard_main_param_res" not in saved
    else:
        residuals = torch.cat([optimizer.shard_main_param_res_buffers[0] for optimizer in optimizers])
        (lower,) = saved["shard_main_param_res"]
        assert lower.dtype == torch.float16
        assert torch.equal(lower.view(torch.int16), residuals.view(torch.int16))


@pytest.mark.parametrize("count", [1, 3])
def test_another_process_gets_the_state(count: int) -> None:
    """Memory, residuals between params, moments and counts equal those of the source process."""
    optimizers, _, _ = _updated(count)
    for giver in optimizers:
        index = shards.shard_of(giver)[0]
        taker = Reused(index, count, torch.zeros(NUMEL, dtype=torch.bfloat16))
        mindspeed_memory.attach(taker)
        filled = optimizer_state.to_be_filled(taker.optimizer)
        values = list(optimizer_state.values_of(giver.optimizer))
        for param, main, value in zip(twin.params(filled), giver.mains, values, strict=True):
            param.copy_(value)
            filled.state[param] = {key: entry.clone() for key, entry in giver.optimizer.state[main].items()}
        filled.param_groups[0]["lr"] = 0.7
        optimizer_state.keep(taker.optimizer, filled)
        assert taker.optimizer.param_groups[0]["lr"] == 0.7
        for (_, *halves), (_, *expected_halves) in zip(taker._parts(), giver._parts(), strict=True):
            assert all(
                torch.equal(actual.view(torch.int16), expected_tensor.view(torch.int16))
                for actual, expected_tensor in zip(halves, expected_halves, strict=True)
            )
        taken = optimizer_state.tensors_of(taker.optimizer)
        assert all(map(torch.equal, taken, optimizer_state.tensors_of(giver.optimizer)))


def test_weights_are_the_upper_halves() -> None:
    """A tie is rounded away from zero; torch rounds it to even."""
    tie = torch.tensor([0x3F808000, 0x3F818000, 0x3F807FFF], dtype=torch.int32).view(torch.float32)
    _, (memory, *_), _ = _updated(2)
    assert memory.cast(tie, torch.bfloat16).view(torch.int16).tolist() == [0x3F81, 0x3F82, 0x3F80]


def test_the_framework_converts_nothing_by_itself() -> None:
    """The framework would convert before the door, where this rank may still have to provide its state."""
    (optimizer, _), _, _ = _updated(2)
    data_before = optimizer.param_data.clone()
    optimizer.fp16_tensor_convert_to_fp32_tensor()
    optimizer.fp32_tensor_convert_to_fp16_tensor()
    assert torch.equal(optimizer.param_data, data_before)


def test_weights_that_are_not_bf16_are_refused() -> None:
    optimizer = Reused(0, 2, torch.zeros(NUMEL, dtype=torch.bfloat16))
    optimizer.buffers[0].param_data = torch.zeros(NUMEL)
    with pytest.raises(
        UnsupportedError, match="--reuse-fp32-param is True: only a distributed optimizer whose"
    ):
        mindspeed_memory.attach(optimizer)


class O2AdamW(torch.optim.AdamW):
    """An optimizer with the name of MindSpeed-LLM's, with moments in bf16."""


def test_moments_in_bf16_are_so_again_after_a_load() -> None:
    """torch casts loaded moments to the type of their params."""
    main = torch.arange(4.0)
    torchs = O2AdamW([main])
    halves = {key: torch.full((4,), 0.1, dtype=torch.bfloat16) for key in ("exp_avg", "exp_avg_sq")}
    torchs.state[main] = {"step": torch.tensor(3.0), **halves}
    mindspeed_memory.attach(SimpleNamespace(optimizer=torchs))
    torchs.load_state_dict(torchs.state_dict())
    assert all(torch.equal(torchs.state[main][key], half) for key, half in halves.items())
    assert torchs.state[main]["step"].dtype == torch.float32


def test_swapped_state_is_read_and_written_on_the_host() -> None:
    main, weight = torch.arange(4.0), torch.zeros(4, dtype=torch.bfloat16)
    torchs = torch.optim.AdamW([main])
    on_host: dict[str, Any] = {"param": main.clone(), "exp_avg": torch.ones(4), "max_exp_avg_sq": None}
    torchs.state[main] = {"exp_avg": torch.empty(4), "max_exp_avg_sq": None}
    torchs.state[main]["exp_avg"].untyped_storage().resize_(0)
    optimizer = SimpleNamespace(
        optimizer=torchs,
        param_to_cpu_states_map={main: on_host},
        main_param_to_model_param_map={main: weight},
    )
    mindspeed_memory.attach(optimizer)
    main.untyped_storage().resize_(0)
    assert [value.tolist() for value in optimizer_state.values_of(torchs)] == [[0, 1, 2, 3]]
    assert [value.tolist() for value in optimizer_state.tensors_of(torchs)] == [[1, 1, 1, 1]]
    filled = optimizer_state.to_be_filled(torchs)
    (param,) = twin.params(filled)
    param.fill_(7.0)
    filled.state[param] = {"exp_avg": torch.full((4,), 8.0)}
    optimizer_state.keep(torchs, filled)
    optimizer_state.storage_of(torchs).make_weights()  # type: ignore[union-attr]
    assert (on_host["param"].tolist(), on_host["exp_avg"].tolist()) == ([7] * 4, [8] * 4)
    assert weight.tolist() == [7] * 4
    assert main.untyped_storage().size() == 0
