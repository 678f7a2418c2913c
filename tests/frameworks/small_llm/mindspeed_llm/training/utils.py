"""The loop's count of operations from the data of a step, in versions since 2.3."""

from __future__ import annotations

ratios: list[float] = []


def clear_actual_attn_ratio() -> None:
    ratios.clear()
