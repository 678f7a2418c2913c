"""Newton and Schulz's iteration."""

from __future__ import annotations

from typing import Any

import torch

_COEFFICIENTS = (3.4445, -4.7750, 2.0315)


def newton_schulz_tp(
    grad: torch.Tensor,
    steps: int,
    coefficient_type: str,
    tp_group: Any,
    partition_dim: int | None = None,
    mode: str = "duplicated",
) -> torch.Tensor:
    """Return `grad` orthogonalized, if the rank has the whole matrix; other ranks would have to be asked."""
    assert partition_dim is None or tp_group.size() == 1, "the parts of a matrix are gathered in the update"
    rows, columns = grad.shape
    wide = torch.nn.functional.normalize(grad if rows <= columns else grad.mT, p=2, dim=(-2, -1), eps=1e-7)
    for _ in range(steps):
        first, second, third = _COEFFICIENTS
        square = wide @ wide.mT
        wide = first * wide + (second * square + third * square @ square) @ wide
    return wide if rows <= columns else wide.mT
