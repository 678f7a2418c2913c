"""`python convert_back.py ...`, in the framework's folder: convert_ckpt_v2.py, also for trained checkpoints.

From commit 118f67a (2026-07-30) on, the framework's conversion to Hugging Face takes the number of key-value
heads from `num_key_value_heads` of the checkpoint's arguments alone. Those of a trained checkpoint call it
`num_query_groups`; without it the conversion takes the number of heads, and ends in an error of `reshape`, or
writes wrong weights where the sizes happen to divide. Up to v26.1.0 it reads `num_query_groups`.
"""

from __future__ import annotations

import runpy
import sys
from pathlib import Path
from typing import Any


def main() -> None:
    sys.path[0] = str(Path.cwd())
    from mindspeed_llm.tasks.checkpoint import model_builder

    load = model_builder.MegatronModel.load_mg_args

    def load_mg_args(self: Any, args: Any) -> None:
        load(self, args)
        groups = getattr(self, "num_query_groups", None)
        if getattr(self, "num_key_value_heads", None) is None and groups is not None:
            self.num_key_value_heads = groups

    model_builder.MegatronModel.load_mg_args = load_mg_args
    sys.argv[0] = "convert_ckpt_v2.py"
    runpy.run_path(sys.argv[0], run_name="__main__")


if __name__ == "__main__":
    main()
