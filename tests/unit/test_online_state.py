"""The state of a survivor that continues in an online recovery."""

from __future__ import annotations

import math

import pytest
import torch

from adaptor.online import state
from adaptor.worker.processor import CannotRejoinError


@pytest.mark.parametrize("place", ["parameter", "exp_avg"])
def test_a_state_that_is_not_finite_is_refused(place: str) -> None:
    intact, damaged = (torch.optim.Adam([torch.nn.Parameter(torch.ones(4))]) for _ in range(2))
    for optimizer in (intact, damaged):
        (param,) = optimizer.param_groups[0]["params"]
        param.grad = torch.ones(4)
        optimizer.step()
    state.require_finite([intact, damaged])
    (param,) = damaged.param_groups[0]["params"]
    (param.data if place == "parameter" else damaged.state[param][place])[2] = math.nan
    state.require_finite([intact])
    with pytest.raises(CannotRejoinError, match="its optimizer state is not finite"):
        state.require_finite([intact, damaged])
