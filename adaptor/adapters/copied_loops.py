"""FlagScale and MindSpeed-MM: copies of Megatron-LM's loop get the wrappers of Megatron-LM's own loop.

Arguments and checkpoints come from megatron.training. Patches for online recovery:
`patches/megatron_online.py`; MindSpeed-MM has none.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from typing import Any

import adaptor
from adaptor import patching
from adaptor.patches import megatron_training  # noqa: F401 (declares the wrappers)

flagscale = patching.Unit("flagscale", framework="flagscale", tested=">=0.8,<1")
mindspeed_mm = patching.Unit("mindspeed-mm", framework="mindspeed_mm", tested=">=0.1")

# What a loop calls from megatron.training is patched there. Of MindSpeed-MM no other module is patched: the
# import of a patched module claims the job, and scripts that only evaluate import most others.
_COPIED = ("pretrain", "train", "train_step", "training_log")
for unit, module, names in (
    (
        flagscale,
        "flagscale.train.train",
        (*_COPIED, "evaluate_and_print_results", "checkpoint_and_decide_exit"),
    ),
    (mindspeed_mm, "mindspeed_mm.training", _COPIED),
):
    for name in names:
        unit.patch_copy(f"{module}:{name}", of=f"megatron.training.training:{name}")

# Arguments of MindSpeed-MM, entries of its file --mm-model, and entries of `patch` in that file.
_REFUSED = {
    "lora_target_modules": "checkpoints lack the model that LoRA began from",
    "use_data_balance": "samples are moved between ranks",
    "use_txt_dynamic_batching": "the data decide how many samples a step has",
    "enable_dummy_optimizer": "ranks without weights have no optimizer state",
    "hetero_parallel": "an encoder has parallel sizes of its own",
    "dist_train": "models have ranks of their own",
    "use_dynamic_dpcp": "process groups change between two steps",
    "layerwise_disaggregated_training": "the last stage of the pipeline is on the ranks of the first",
    "use_fsdp1": "FSDP is not protected",
    "muon_optimizer": "the state of Muon is not protected",
    "adaptive_clip_grad_norm": "its moving averages are in no checkpoint",
}
_PREFERENCES = "mindspeed_mm.tasks.rl.dpo.dpo_trainer"


@mindspeed_mm.patch(
    "mindspeed_mm.training:train",  # around the wrapper above
    why="options and entries of --mm-model that cannot be protected are refused before the first step",
    accepts="(forward_step_func, model, ...)",
)
def the_model_is_checked(wrapped: Any, instance: Any, args: Any, kwargs: Any) -> Any:
    from megatron.training import get_args

    for refusal in refused(get_args()):
        raise adaptor.UnsupportedError(f"{refusal}; change it, or set ENABLE_TTP=False")
    return wrapped(*args, **kwargs)


def refused(options: Any) -> Iterator[str]:
    """Yield the reasons against the protection of a job of MindSpeed-MM, each with the option or entry.

    Args:
        options: parsed; `mm.model` has the entries of the file --mm-model.
    """
    model = options.mm.model
    for name, reason in _REFUSED.items():
        if any(getattr(place, name, None) for place in (options, model, getattr(model, "patch", None))):
            yield f"{name} is set in the arguments or in the file --mm-model: {reason}"
    if _PREFERENCES in sys.modules:
        yield f"{_PREFERENCES} is imported: a restart would load its reference model from the --save folder"
