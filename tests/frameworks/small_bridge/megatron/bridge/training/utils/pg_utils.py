from __future__ import annotations

from typing import Any

from megatron.core.process_groups_config import ProcessGroupCollection


def get_pg_collection(model: Any) -> Any:
    return ProcessGroupCollection.use_mpu_process_groups()
