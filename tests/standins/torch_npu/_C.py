"""Names that scripts look for in the extension's compiled part, by `hasattr`."""

from __future__ import annotations

from typing import Any


class _distributed_c10d:
    class ProcessGroupHCCL:
        class Options:
            """Options of a group on HCCL; gloo, which runs in tests, takes none."""

            def __init__(self, *args: Any, **kwargs: Any) -> None:
                self.hccl_config: dict[str, Any] = {}
