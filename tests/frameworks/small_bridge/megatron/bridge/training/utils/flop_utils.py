from __future__ import annotations

from typing import Any


def num_floating_point_operations(cfg: Any, batch_size: int = 1) -> int:
    return 1000 * batch_size
