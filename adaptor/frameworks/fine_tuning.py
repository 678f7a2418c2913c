"""The ways of fine-tuning that are refused: a restart would go on from another model, or nobody has tried it.

MindSpeed-LLM and ModelLink add them to Megatron-LM's options. LoRA is protected where checkpoints have the
whole model, the weights that are not trained included.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

from adaptor.errors import UnsupportedError
from adaptor.frameworks import supported_options

# As `supported_options` has them for Megatron-LM.
ALLOWED_VALUES: supported_options.Values = (
    ("lora_ckpt_filter", (False, None), "LoRA whose checkpoints lack the model that it began from"),
    ("lu_lora_final_layer_index", (None,), "LU-LoRA, which changes weights in the forward pass,"),
    ("qlora", (False, None), "QLoRA, whose 4-bit weights were never saved in a test,"),
    ("stage", (None, "sft", "dpo"), "a stage whose other models were never loaded in a test"),
)

# MindSpeed-LLM has core models by default since then, and its others save the whole model, too.
_SINCE_2_2 = "deprecated_use_mcore_models"


def checks(config: Any) -> Iterator[Callable[[], None]]:
    """Return the refusals; each raises UnsupportedError.

    Args:
        config: the parsed arguments of the framework.
    """
    yield from supported_options.checks_of_values(ALLOWED_VALUES, config)
    yield partial(_require_whole_model, config)
    yield partial(_require_reference_model, config)


def _require_whole_model(config: Any) -> None:
    modules = getattr(config, "lora_target_modules", None)
    if not modules:
        return
    if not hasattr(config, "lora_ckpt_filter"):  # as in ModelLink
        which = "this version"
    elif getattr(config, "use_mcore_models", None) is False and not hasattr(config, _SINCE_2_2):
        which = "models without --use-mcore-models"
    else:
        return
    raise UnsupportedError(
        f"--lora-target-modules is {modules}: checkpoints of {which} lack the model that LoRA began from; "
        "leave it out, or set ENABLE_TTP=False"
    )


def _require_reference_model(config: Any) -> None:
    if getattr(config, "stage", None) == "dpo" and not getattr(config, "ref_model", None):
        raise UnsupportedError(
            "--stage is dpo without --ref-model: after a restart the framework would take the model in "
            "training for the reference model; add --ref-model, or set ENABLE_TTP=False"
        )
