from __future__ import annotations

from typing import Any


def check_json_format(value: dict[str, Any]) -> dict[str, Any]:
    return {
        name: item if isinstance(item, (int, float, str, bool)) else str(item) for name, item in value.items()
    }
