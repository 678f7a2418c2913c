"""The frameworks' options that say how a run begins from a checkpoint, not how it goes on from one."""

from __future__ import annotations

# By their names in the parsed arguments, with the values of those that are not given.
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
