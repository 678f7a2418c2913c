"""Runs Megatron-LM's pretrain_gpt.py with user buffers, of a stand-in, in each reduce-scatter.

The first argument is the script of Megatron-LM, which finds no Transformer Engine, as in all tests.
"""

from __future__ import annotations

import importlib
import runpy
import sys
from pathlib import Path
from typing import Any

STANDIN = Path(__file__).resolve().parents[2] / "standins" / "user_buffers"


def _use_buffers() -> None:
    from megatron.core.tensor_parallel import layers
    from megatron.training import get_args, initialize

    sys.path.insert(0, str(STANDIN))
    base = importlib.import_module("transformer_engine.pytorch.module.base")
    sys.path.remove(str(STANDIN))
    del sys.modules["transformer_engine"]
    reduce_scatter = layers.reduce_scatter_to_sequence_parallel_region

    def with_buffer(*args: Any, **kwargs: Any) -> Any:
        base.get_ub("proj_fprop").use()
        return reduce_scatter(*args, **kwargs)

    def initialize_buffers() -> None:
        args = get_args()
        base.initialize_ub([args.seq_length, args.hidden_size], args.tensor_model_parallel_size)

    layers.reduce_scatter_to_sequence_parallel_region = with_buffer
    initialize._initialize_tp_communicators = initialize_buffers


if __name__ == "__main__":
    del sys.argv[0]
    sys.path.insert(0, str(Path(sys.argv[0]).resolve().parent))
    _use_buffers()
    runpy.run_path(sys.argv[0], run_name="__main__")
