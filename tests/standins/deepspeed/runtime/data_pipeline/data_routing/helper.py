"""Names alone."""

from __future__ import annotations

from typing import Any


def convert_to_random_ltd(*args: Any, **kwargs: Any) -> Any:
    raise NotImplementedError("convert_to_random_ltd")
