"""The record of a step packed into bytes and back: bitwise equal, without pickle."""

from __future__ import annotations

import enum
import random
import sys

import msgspec
import numpy
import pytest
import torch

from adaptor.online import transfer


class Colour(enum.Enum):
    RED = 1


@pytest.mark.parametrize(
    "value",
    [
        None,
        True,
        -1,
        1 << 80,
        0.1,
        float("inf"),
        "a",
        b"\0",
        [1, (2, [3])],
        {"a": {"b": (1, None)}},
        {1: 2},
        random.Random(3).getstate(),
        {"state": pytest.ExitCode.USAGE_ERROR, "of": [Colour.RED]},
    ],
)
def test_plain_values(value: object) -> None:
    assert transfer.unpack(transfer.pack(value)) == value


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.uint8, torch.int64, torch.bool])
@pytest.mark.parametrize("shape", [(), (0,), (2, 3)])
def test_tensors(dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    tensor = torch.ones(shape).to(dtype)
    back = transfer.unpack(transfer.pack({"a": (tensor,)}))["a"][0]
    assert (back.dtype, back.shape) == (dtype, shape)
    assert torch.equal(back, tensor)


def test_random_states_continue_their_sequence() -> None:
    numpy.random.seed(5)
    numpy.random.standard_normal()
    states = transfer.unpack(
        transfer.pack((torch.get_rng_state(), numpy.random.get_state(), random.getstate()))
    )
    expected = torch.rand(3), numpy.random.standard_normal(3), random.random()
    torch.set_rng_state(states[0])
    numpy.random.set_state(states[1])
    random.setstate(states[2])
    assert torch.equal(torch.rand(3), expected[0])
    assert numpy.array_equal(numpy.random.standard_normal(3), expected[1])
    assert random.random() == expected[2]


def test_a_generator_of_torch() -> None:
    generator = torch.Generator().manual_seed(7)
    torch.rand(2, generator=generator)
    back = transfer.unpack(transfer.pack(generator))
    assert torch.equal(torch.rand(2, generator=back), torch.rand(2, generator=generator))


def test_an_unsupported_value_is_named() -> None:
    with pytest.raises(TypeError, match="Random cannot be passed on"):
        transfer.pack({"a": [random.Random()]})


@pytest.mark.parametrize(
    ("module", "kind"), [("this", "Colour"), ("builtins", "getattr"), (__name__, "random.Random")]
)
def test_only_members_of_enums_are_looked_up_and_nothing_is_imported(module: str, kind: str) -> None:
    """`transfer.pack` writes no such name."""
    member = msgspec.msgpack.Ext(6, transfer.pack([module, kind, "RED"]))
    with pytest.raises(TypeError, match="is no member of an enum here"):
        transfer.unpack(msgspec.msgpack.encode(member))
    assert "this" not in sys.modules
