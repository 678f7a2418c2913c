"""The frameworks' options for the parts that a run takes from a checkpoint, or leaves out of a checkpoint."""

from __future__ import annotations

# Options for the begin of a run from a checkpoint, not for its continuation: by their names in the parsed
# arguments, with the default values.
START_ONLY: dict[str, bool | None] = {
    "finetune": False,
    "no_load_optim": None,
    "no_load_rng": None,
    "load_main_params_from_ckpt": False,  # taken by the framework only with no_load_optim
    "ckpt_step": None,
    # Of ModelLink.
    "no_load_lr_state": False,
    "reset_iteration": False,
    # Of MindSpeed-LLM: adapters that would replace the adapters of --save, a conversion of the --load folder.
    "lora_load": None,
    "enable_hf2mg_convert": False,
}

# Options that leave a part out of regular saves, and the options to load a checkpoint without the part.
LEFT_OUT = {"no_save_optim": "no_load_optim", "no_save_rng": "no_load_rng"}
