"""The state with which a survivor goes on in an online recovery."""

from __future__ import annotations

import math

import pytest
import torch

from adaptor.online import state
from adaptor.worker.processor import CannotRejoinError


@pytest.mark.parametrize("place", ["parameter", "exp_avg"])
def test_a_state_that_is_not_finite_is_not_gone_on_with(place: str) -> None:
    whole, other = (torch.optim.Adam([torch.nn.Parameter(torch.ones(4))]) for _ in range(2))
    for optimizer in (whole, other):
        (param,) = optimizer.param_groups[0]["params"]
        param.grad = torch.ones(4)
        optimizer.step()
    state.require_finite([whole, other])
    (param,) = other.param_groups[0]["params"]
    (param.data if place == "parameter" else other.state[param][place])[2] = math.nan
    state.require_finite([whole])
    with pytest.raises(CannotRejoinError, match="its optimizer state is not finite"):
        state.require_finite([whole, other])
