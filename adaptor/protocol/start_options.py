"""The frameworks' options that say what a run takes from a checkpoint, or leaves out of it."""

from __future__ import annotations

# Options that say how a run begins from a checkpoint, not how it goes on from one: by their names in the
# parsed arguments, with the values of those that are not given.
START_ONLY: dict[str, bool | None] = {
    "finetune": False,
    "no_load_optim": None,
    "no_load_rng": None,
    "load_main_params_from_ckpt": False,  # which the framework takes with no_load_optim alone
    "ckpt_step": None,
    # Of ModelLink.
    "no_load_lr_state": False,
    "reset_iteration": False,
    # Of MindSpeed-LLM: adapters that would replace those of --save, a conversion of what is in --load.
    "lora_load": None,
    "enable_hf2mg_convert": False,
}

# Options that leave something out of regular saves, and those with which a checkpoint without it is loaded.
LEFT_OUT = {"no_save_optim": "no_load_optim", "no_save_rng": "no_load_rng"}
