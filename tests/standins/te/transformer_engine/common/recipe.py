"""The recipes of fp8, by the names of Transformer Engine."""

from __future__ import annotations

import enum
from dataclasses import dataclass
from typing import Any, NamedTuple


class _Largest(NamedTuple):
    max_fwd: float
    max_bwd: float


class Format(enum.Enum):
    E4M3 = _Largest(448, 448)
    HYBRID = _Largest(448, 57344)


@dataclass
class Recipe:
    fp8_format: Format = Format.HYBRID

    def delayed(self) -> bool:
        return isinstance(self, DelayedScaling)


@dataclass(init=False)
class DelayedScaling(Recipe):
    margin: int = 0
    amax_history_len: int = 1024
    amax_compute_algo: str = "max"
    reduce_amax: bool = True
    fp8_dpa: bool = False
    fp8_mha: bool = False

    def __init__(self, **options: Any) -> None:
        """Ignore options of other versions, as pydantic does there."""
        vars(self).update((name, value) for name, value in options.items() if hasattr(type(self), name))


class Float8CurrentScaling(Recipe):
    pass


class Float8BlockScaling(Recipe):
    pass


class MXFP8BlockScaling(Recipe):
    pass
