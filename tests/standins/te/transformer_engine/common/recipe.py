"""The recipes of fp8, by the names of Transformer Engine."""

from __future__ import annotations

import enum
from dataclasses import dataclass
from typing import Any


class Format(enum.Enum):
    E4M3 = "e4m3"
    HYBRID = "hybrid"


@dataclass
class Recipe:
    fp8_format: Format = Format.HYBRID


class DelayedScaling(Recipe):
    def __init__(self, **_options: Any) -> None:
        raise NotImplementedError("this stand-in has no delayed scaling")


class Float8CurrentScaling(Recipe):
    pass


class Float8BlockScaling(Recipe):
    pass


class MXFP8BlockScaling(Recipe):
    pass
