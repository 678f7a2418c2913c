"""The ways of fine-tuning that are refused, because a restart would go on from another model, or nobody has
tried it.

MindSpeed-LLM and ModelLink add these ways to Megatron-LM's options. LoRA is protected if checkpoints contain
the whole model, including the untrained weights, or name their base (`adapter_base`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

from adaptor.checkpoint import save_folder_claim
from adaptor.errors import UnsupportedError
from adaptor.frameworks import adapter_base, supported_options

# As `supported_options` has them for Megatron-LM.
ALLOWED_VALUES: supported_options.Values = (
    ("lu_lora_final_layer_index", (None,), "LU-LoRA, which changes weights in the forward pass,"),
    ("qlora_save_dequantize", (False, None), "checkpoints whose weights come back in more than 4 bits"),
    ("stage", (None, "sft", "dpo"), "a stage whose other models were never loaded in a test"),
)

# What does not go together with checkpoints that have adapters alone, and why.
_NOT_FILTERED = (
    ("ckpt_step", "the base is what the tracker in its folder names"),
    ("pretrained_checkpoint", "the base is looked for in --load alone"),
    ("enable_hf2mg_convert", "the base is made anew at each start, and cannot be told from another one"),
    ("lora_modules_to_save", "these modules are trained, and no checkpoint has them"),
)
# MindSpeed-LLM has core models by default since then, and its others save the whole model, too.
_SINCE_2_2 = "deprecated_use_mcore_models"


def checks(config: Any) -> Iterator[Callable[[], None]]:
    """Return the refusals; each raises UnsupportedError."""
    yield from supported_options.checks_of_values(ALLOWED_VALUES, config)
    yield partial(_require_whole_model, config)
    yield partial(_require_reference_model, config)
    yield partial(_require_base, config)


def _require_whole_model(config: Any) -> None:
    modules = getattr(config, "lora_target_modules", None)
    if not modules or hasattr(config, _SINCE_2_2) or getattr(config, "use_mcore_models", None) is not False:
        return
    raise UnsupportedError(
        f"--lora-target-modules is {modules}: checkpoints of models without --use-mcore-models lack the "
        "model that LoRA began from; add --use-mcore-models, leave out LoRA, or set ENABLE_TTP=False"
    )


def _require_base(config: Any) -> None:
    """Refuse jobs whose checkpoints have adapters alone, and whose restart cannot find the rest."""
    if not adapter_base.is_filtered(config):
        return
    if getattr(config, "load", None) is None:
        raise UnsupportedError(
            "--lora-ckpt-filter is given without --load: checkpoints then have adapters alone, and a restart "
            "needs the model that they began from; give its folder as --load, or leave out --lora-ckpt-filter"
        )
    if getattr(config, "stage", None) == "dpo":
        raise UnsupportedError(
            "--stage is dpo with --lora-ckpt-filter: two models are loaded, and which of them lacks its base "
            "was never tried; leave out --lora-ckpt-filter, or set ENABLE_TTP=False"
        )
    for name, reason in _NOT_FILTERED:
        value = getattr(config, name, None)
        if value:
            flag = "--" + name.replace("_", "-")
            raise UnsupportedError(
                f"{flag} is {value} with --lora-ckpt-filter: {reason}; leave out one of them, or set "
                "ENABLE_TTP=False"
            )


def _require_reference_model(config: Any) -> None:
    """Refuse DPO jobs of which a restart would not find the same reference model."""
    if getattr(config, "stage", None) != "dpo":
        return
    if step := getattr(config, "ckpt_step", None):
        raise UnsupportedError(
            f"--ckpt-step is {step} with --stage dpo: the framework loads the reference model by it, and a"
            " restart has another step; let the tracker name the step, or set ENABLE_TTP=False"
        )
    if getattr(config, "ref_model", None):
        return
    load = getattr(config, "load", None)
    if not load or save_folder_claim.is_same(load, getattr(config, "save", None)):
        raise UnsupportedError(
            f"--stage is dpo without --ref-model, and --load is {load}: after a restart the framework would"
            " take the model in training for the reference model; add --ref-model, let --load name another"
            " folder than --save, or set ENABLE_TTP=False"
        )


def reference_model(args: Any) -> str:
    """Return the folder from which a DPO job has loaded its reference model by --load."""
    if not getattr(args, "enable_hf2mg_convert", False):
        return str(args.load)
    sizes = (args.tensor_model_parallel_size, args.pipeline_model_parallel_size)
    cut = "tp{}pp{}ep{}".format(*sizes, args.expert_model_parallel_size)
    return getattr(args, "mg_save_dir", None) or str(Path(args.load) / f"megatron_cache_{cut}")
