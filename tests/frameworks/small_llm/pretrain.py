"""Runs Megatron-LM's pretrain_gpt.py with the loop of `mindspeed_llm` beside this file.

The first argument is the script of Megatron-LM.
"""

from __future__ import annotations

import runpy
import sys
from pathlib import Path

if __name__ == "__main__":
    del sys.argv[0]
    sys.path.insert(0, str(Path(sys.argv[0]).resolve().parent))
    from megatron.training import training
    from mindspeed_llm.training.training import train

    training.train = train
    runpy.run_path(sys.argv[0], run_name="__main__")
