"""How tensors are pickled."""

from __future__ import annotations

from typing import Any

import torch

_original = torch.Tensor.__reduce_ex__


def _reduce_ex(self: torch.Tensor, proto: int) -> Any:
    """As torch pickles a tensor."""
    return _original(self, proto)
