"""Runs a script of Megatron-LM in a copied loop: `own_loop.py pretrain_gpt.py args...`.

As in FlagScale, the loop is a copy of Megatron-LM's under another name; arguments, checkpoints and the step
itself are Megatron-LM's.
"""

from __future__ import annotations

import re
import runpy
import sys
from pathlib import Path
from types import ModuleType


def main() -> None:
    del sys.argv[0]
    sys.path.insert(0, str(Path(sys.argv[0]).resolve().parent))
    import megatron.training
    from megatron.training import training

    own_module = sys.modules["own_loop_training"] = ModuleType("own_loop_training")
    text = re.sub(
        r"^from \.(\w*)", r"from megatron.training.\1", Path(training.__file__).read_text(), flags=re.M
    )
    text = text.replace("from megatron.training. import", "from megatron.training import")
    exec(compile(text, "own_loop_training.py", "exec"), vars(own_module))
    vars(own_module)["train_step"] = training.train_step
    vars(megatron.training)["pretrain"] = vars(own_module)["pretrain"]
    runpy.run_path(sys.argv[0], run_name="__main__")


if __name__ == "__main__":
    main()
