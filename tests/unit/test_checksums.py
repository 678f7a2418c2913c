"""Checksums of shards: every change of bits shows, equal states have equal sums, scalars count by value."""

from __future__ import annotations

import math
import random
from typing import Any

import pytest
import torch

from adaptor.replica import optimizer_state, twin
from adaptor.replica.mirror import _Update
from adaptor.verification import checksums

BOTH = pytest.mark.parametrize("weighted", [False, True], ids=["xxh3", "weighted"])


def sum_of(tensor: torch.Tensor, weighted: bool) -> str:
    return checksums.tensors_sum([tensor], weighted)


@BOTH
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64, torch.uint8], ids=str)
def test_each_flip_of_a_bit_is_seen(dtype: torch.dtype, weighted: bool) -> None:
    tensor = (torch.arange(33) * 3).to(dtype)
    memory = tensor.view(torch.uint8)
    sums = {sum_of(tensor, weighted)}
    for bit in range(8 * memory.numel()):
        memory[bit // 8] ^= 1 << bit % 8
        sums.add(sum_of(tensor, weighted))
        memory[bit // 8] ^= 1 << bit % 8
    assert len(sums) == 1 + 8 * memory.numel()


@BOTH
def test_runs_swaps_and_shifts_are_seen(weighted: bool) -> None:
    drawn = random.Random(1)
    tensor = torch.randint(-(2**31), 2**31, (1 << 12,), dtype=torch.int32)
    sum_before = sum_of(tensor, weighted)
    for _ in range(500):
        changed, start, length = tensor.clone(), drawn.randrange(4000), 2 ** drawn.randrange(1, 7)
        kind = drawn.randrange(3)
        if kind == 0:  # the same bit inverted in neighbouring words, which factors of 1, 3, 5, ... miss
            changed[start : start + length] ^= 1 << drawn.randrange(31)
        elif kind == 1:
            changed[start], changed[start + 1] = tensor[start + 1], tensor[start]
        else:
            changed = changed.roll(1)
        assert sum_of(changed, weighted) != sum_before or torch.equal(changed, tensor)


@BOTH
def test_bits_count_not_values(weighted: bool) -> None:
    assert sum_of(torch.tensor([0.0]), weighted) != sum_of(torch.tensor([-0.0]), weighted)
    not_a_number = torch.tensor([math.nan])
    other_bits = (not_a_number.view(torch.int32) ^ 1).view(torch.float32)
    assert sum_of(not_a_number, weighted) == sum_of(not_a_number.clone(), weighted)
    assert sum_of(not_a_number, weighted) != sum_of(other_bits, weighted)


@BOTH
def test_sums_of_large_tensors_depend_on_each_chunk(weighted: bool) -> None:
    tensor = torch.ones((1 << 21) + 3, dtype=torch.bfloat16)
    sums = {sum_of(tensor, weighted)}
    for place in (0, 1 << 20, (1 << 21) + 2):
        changed = tensor.clone()
        changed[place] = 2
        sums.add(sum_of(changed, weighted))
    assert len(sums) == 4


def optimizer_of(betas: Any = (0.9, 0.95)) -> torch.optim.AdamW:
    torch.manual_seed(4)
    params = [torch.randn(size, requires_grad=True) for size in (5, 1, 0, 8)]
    optimizer = torch.optim.AdamW(
        [{"params": params[:2], "wd_mult": 0.0}, {"params": params[2:]}], 1e-2, betas
    )
    for param in params:
        param.grad = torch.randn_like(param)
    optimizer.step()
    return optimizer


def test_a_twin_whose_scalars_came_by_message_has_the_sums_of_its_owner() -> None:
    owner = optimizer_of()
    message = optimizer_state.encode(_Update(twin.scalars(owner), b""))
    received: _Update = optimizer_state.decode(message, _Update)
    assert isinstance(received.groups[0]["betas"], list)
    params = [[param.detach().clone() for param in group["params"]] for group in owner.param_groups]
    copy = twin.make(owner, params, received.groups)
    for param, own_param in zip(twin.params(copy), twin.params(owner), strict=True):
        copy.state[param] = {key: value.clone() for key, value in owner.state[own_param].items()}
        param.grad = None if own_param.grad is None else own_param.grad.clone()
    assert checksums.shard_sums(owner) == checksums.shard_sums(copy)
    assert checksums.start_gradient_sums(owner).read() == checksums.start_gradient_sums(copy).read()


@pytest.mark.parametrize("key", ["param", "exp_avg", "exp_avg_sq", "state.step", "group.lr", "group.betas"])
def test_a_change_is_seen_under_its_key_alone(key: str) -> None:
    optimizer = optimizer_of()
    sums_before = checksums.shard_sums(optimizer)
    param = optimizer.param_groups[0]["params"][0]
    if key == "param":
        param.data.view(torch.int32)[3] ^= 1
    elif key.startswith("exp_"):
        optimizer.state[param][key].view(torch.int32)[0] ^= 1 << 20
    elif key == "state.step":
        optimizer.state[param]["step"] += 1
    else:
        optimizer.param_groups[1][key.removeprefix("group.")] = (0.5, 0.95)
    sums_after = checksums.shard_sums(optimizer)
    assert [name for name in sums_before if sums_before[name] != sums_after[name]] == [key]


def test_before_the_first_update_there_are_no_moments() -> None:
    sums = checksums.shard_sums(torch.optim.AdamW([torch.zeros(2, requires_grad=True)]))
    assert "param" in sums
    assert "exp_avg" not in sums
