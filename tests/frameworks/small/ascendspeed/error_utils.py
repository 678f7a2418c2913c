"""Checks."""

from __future__ import annotations

from typing import Any


def check_equal(tensor_a: Any, tensor_b: Any, error_info: str = "") -> None:
    if tensor_a != tensor_b:
        raise ValueError(f"{error_info} {tensor_a} is not {tensor_b}")
