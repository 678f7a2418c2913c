"""The kept losses of a step are read back bit for bit as the framework would add them up."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
import torch

from adaptor.frameworks import step_log
from adaptor.frameworks.step_log import MOST_LOSSES
from adaptor.protocol import board


def told(value: Any) -> Any:
    """Return `value` as a new process reads it."""
    packed = msgspec.msgpack.encode(value)
    assert len(packed) < board._KEPT_SIZE / 2
    return msgspec.msgpack.decode(packed)


def numbers(count: int, dtype: torch.dtype, shape: tuple[int, ...]) -> list[dict[str, torch.Tensor]]:
    source = torch.Generator().manual_seed(1)
    return [{"lm loss": (torch.rand(shape, generator=source) * 30).to(dtype)} for _ in range(count)]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64, torch.int64])
@pytest.mark.parametrize("shape", [(), (1,), (2,)])
@pytest.mark.parametrize("count", [1, MOST_LOSSES])
def test_losses_of_micro_batches(count: int, dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    losses = numbers(count, dtype, shape)
    losses[0]["lm loss"].view(-1)[0] = float("nan") if dtype.is_floating_point else 2**62 + 1
    assert step_log.are_few(losses)
    back = step_log.losses_of_numbers(told(step_log.numbers_of_losses(losses)), "cpu")
    assert len(back) == count
    for read, kept in zip(back, losses, strict=True):
        assert (read["lm loss"].dtype, read["lm loss"].shape) == (dtype, torch.Size(shape))
        assert torch.equal(
            read["lm loss"].view(-1).view(torch.uint8), kept["lm loss"].view(-1).view(torch.uint8)
        )


def test_a_rank_without_losses() -> None:
    """A rank without losses has no part of the last pipeline stage."""
    assert step_log.are_few([])
    assert step_log.losses_of_numbers(told(step_log.numbers_of_losses([])), "cpu") == []


@pytest.mark.parametrize(
    "losses",
    [
        numbers(MOST_LOSSES + 1, torch.float32, (2,)),
        [{"a": torch.ones(1), "b": torch.ones(1)}] * (MOST_LOSSES // 2 + 1),
        numbers(1, torch.float32, (64,)),
        [{"a": torch.ones(1, device="meta")}],
        [{"a": (torch.ones(1), torch.ones(1))}],  # Megatron-LM to 0.12
        [{"a": 1.0}],
    ],
)
def test_losses_that_must_be_added_up_first(losses: list[dict[str, Any]]) -> None:
    """Too many losses for the record, a loss that is not on the host, or a loss that is no tensor."""
    assert not step_log.are_few(losses)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64, torch.int64])
@pytest.mark.parametrize("shape", [(), (1,), (2,)])
def test_sums(dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    (loss,) = numbers(1, dtype, shape)
    sums = {**loss, "advanced iterations": 3, "nan iterations": False, "got": 0.1}
    back = step_log.sums_of_numbers(told(step_log.numbers_of_sums(sums)), "cpu")
    assert list(back) == list(sums)
    assert (back["lm loss"].dtype, back["lm loss"].shape) == (dtype, torch.Size(shape))
    assert torch.equal(back["lm loss"], loss["lm loss"])
    assert {name: back[name] for name in back if name != "lm loss"} == {
        "advanced iterations": 3,
        "nan iterations": False,
        "got": 0.1,
    }
    with pytest.raises(AttributeError):
        step_log.numbers_of_sums({"lm loss": "none"})
