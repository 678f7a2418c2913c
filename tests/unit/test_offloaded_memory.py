"""A second copy of an optimizer on the host: bitwise equal, with the param groups of its owner alone."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from adaptor.errors import UnsupportedError
from adaptor.frameworks.offloaded_memory import OffloadedMemory
from adaptor.replica import twin


def _memory(**changed: Any) -> OffloadedMemory:
    kinds = {"cpu_optimizer_cls": torch.optim.AdamW, "gpu_optimizer_cls": torch.optim.SGD}
    hybrid = SimpleNamespace(**{"gpu_optimizer": None, **kinds, **changed})
    return OffloadedMemory(SimpleNamespace(optimizer=hybrid, buffers=[]))


def test_a_twin_updates_as_the_optimizers_of_its_owner() -> None:
    group = {"lr": 0.1, "betas": [0.9, 0.95], "eps": 1e-8, "weight_decay": 0.1, "fused": True, "wd_mult": 1.0}
    mains = [torch.randn(5), torch.randn(300)]
    parts = [torch.optim.AdamW([{**group, "params": [main.clone()]}]) for main in mains]
    twin_optimizer = _memory().make_twin([[main.clone() for main in mains], []], [group, group])
    for _ in range(3):
        for part, copied in zip(parts, twin.params(twin_optimizer), strict=True):
            (main,) = twin.params(part)
            main.grad = torch.randn_like(main)
            copied.grad = main.grad.clone()
            part.step()
        twin_optimizer.step()
        assert twin.scalars(twin_optimizer) == [group, group]
    for part, copied in zip(parts, twin.params(twin_optimizer), strict=True):
        (main,) = twin.params(part)
        assert torch.equal(main, copied)
        assert all(
            torch.equal(value, twin_optimizer.state[copied][key]) for key, value in part.state[main].items()
        )


def test_an_optimizer_that_is_on_the_device_in_part_is_refused() -> None:
    with pytest.raises(UnsupportedError, match=r"use .* --optimizer-offload-fraction 1\.0"):
        _memory(gpu_optimizer=torch.optim.SGD([torch.zeros(1)]))
