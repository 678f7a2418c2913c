"""Runs Megatron-LM's pretrain_gpt.py with the loop of `mindspeed_llm` beside this file, and groups of HCCL.

The first argument is the script of Megatron-LM. Gloo stands in for HCCL (`tests/standins/hccl`).
"""

from __future__ import annotations

import functools
import importlib
import inspect
import runpy
import sys
from pathlib import Path
from typing import Any

import torch.distributed as dist
from torch.distributed import distributed_c10d


def _make_groups_of_hccl() -> None:
    """As `torch_npu.contrib.transfer_to_npu` does, where a framework asks for another backend."""
    importlib.import_module("torch_npu.distributed.distributed_c10d")

    def with_hccl(original: Any, default: str) -> Any:
        signature = inspect.signature(original)

        @functools.wraps(original)
        def make(*args: Any, **kwargs: Any) -> Any:
            call = signature.bind(*args, **kwargs)
            if call.arguments.get("backend") in (None, default):
                call.arguments["backend"] = "hccl"
            return original(*call.args, **call.kwargs)

        return make

    for name, default in (("init_process_group", "gloo"), ("new_group", "nccl")):
        make = with_hccl(getattr(dist, name), default)
        for module in (dist, distributed_c10d):
            setattr(module, name, make)


if __name__ == "__main__":
    _make_groups_of_hccl()
    del sys.argv[0]
    sys.path.insert(0, str(Path(sys.argv[0]).resolve().parent))
    from megatron.training import training
    from mindspeed_llm.training.training import train

    training.train = train
    runpy.run_path(sys.argv[0], run_name="__main__")
