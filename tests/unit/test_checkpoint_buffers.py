"""Buffers of a model are saved as they were at the end of the step."""

from __future__ import annotations

import torch

from adaptor.checkpoint.training_state import Buffers


class _Router(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("bias", torch.zeros(3))
        self.register_buffer("counted", torch.zeros(3), persistent=False)
        self.register_buffer("absent", None)
        self.weight = torch.nn.Parameter(torch.ones(2))


def test_what_was_taken_is_found_by_where_the_live_buffer_lies_now() -> None:
    model = torch.nn.Sequential(_Router(), _Router())
    buffers = Buffers([model, _Router()])
    taken = buffers.take()
    first, second = model[0], model[1]
    assert isinstance(first, _Router)
    assert isinstance(second, _Router)
    first.bias.add_(1.0)
    second.bias = torch.full((3,), 2.0)  # other memory
    copies = buffers.copies(taken)
    assert len(copies) == 3
    assert all(torch.equal(copies[router.bias.data_ptr()], torch.zeros(3)) for router in (first, second))
    assert copies.keys().isdisjoint({first.counted.data_ptr(), first.weight.data_ptr()})


def test_a_model_without_buffers_has_nothing_to_take() -> None:
    buffers = Buffers([torch.nn.Linear(2, 2)])
    assert buffers.take() == ()
    assert buffers.copies(()) == {}
