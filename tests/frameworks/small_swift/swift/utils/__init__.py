from __future__ import annotations

import os
from typing import Any


def is_master() -> bool:
    return os.environ["RANK"] == "0"


def is_dist() -> bool:
    return "LOCAL_RANK" in os.environ


def check_json_format(value: dict[str, Any]) -> dict[str, Any]:
    return {
        name: item if isinstance(item, (int, float, str, bool)) else str(item) for name, item in value.items()
    }
