"""Stands in for torchair, which compiles graphs for the NPU: nothing is compiled for a CPU."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torchair import ge

__all__ = ["ge", "register_fx_node_ge_converter"]


def register_fx_node_ge_converter(operator: Any) -> Callable[[Any], Any]:
    """Declares the converter of an operator; nobody asks for one."""
    return lambda converter: converter
