"""FlagScale: the copy of Megatron-LM's loop gets the wrappers of Megatron-LM's own loop.

Arguments and checkpoints come from megatron.training. Patches for online recovery:
`patches/megatron_online.py`.
"""

from __future__ import annotations

from adaptor import patching

flagscale = patching.Unit("flagscale", framework="flagscale", tested=">=0.8,<1")

for name in (
    *("pretrain", "train", "train_step", "evaluate_and_print_results", "training_log"),
    "checkpoint_and_decide_exit",
):
    flagscale.patch_copy(f"flagscale.train.train:{name}", of=f"megatron.training.training:{name}")
