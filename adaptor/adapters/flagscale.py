"""FlagScale: its copy of Megatron-LM's loop, by the wrappers that Megatron-LM's own loop has.

Arguments and checkpoints are those of megatron.training. A fault starts all ranks again.
"""

from __future__ import annotations

from adaptor import patching

flagscale = patching.Unit("flagscale", framework="flagscale", tested=">=0.8,<1")

for name in ("pretrain", "train", "train_step", "evaluate_and_print_results", "training_log"):
    flagscale.patch_copy(f"flagscale.train.train:{name}", of=f"megatron.training.training:{name}")
