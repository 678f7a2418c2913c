"""Options of the frameworks that concern the parts and layers of a checkpoint, by their parsed names."""

from __future__ import annotations

# Options for the begin of a run from a checkpoint, not for its continuation, with the default values.
START_ONLY: dict[str, bool | None] = {
    "finetune": False,
    "no_load_optim": None,
    "no_load_rng": None,
    "load_main_params_from_ckpt": False,  # taken by the framework only with no_load_optim
    "ckpt_step": None,
    "override_ckpt_iteration": None,
    # Of ModelLink.
    "no_load_lr_state": False,
    "reset_iteration": False,
    # Of MindSpeed-LLM: adapters that would replace the adapters of --save, a conversion of the --load folder.
    "lora_load": None,
    "enable_hf2mg_convert": False,
}

# Options that leave a part out of regular saves, and the options to load a checkpoint without the part.
LEFT_OUT = {"no_save_optim": "no_load_optim", "no_save_rng": "no_load_rng"}

# Arguments that move layers between stages. A layout file describes the result, no rule does.
UNEVEN = {
    "decoder_first_pipeline_num_layers": "--decoder-first-pipeline-num-layers",
    "decoder_last_pipeline_num_layers": "--decoder-last-pipeline-num-layers",
    "pipeline_model_parallel_layout": "--pipeline-model-parallel-layout",
    "account_for_embedding_in_pipeline_split": "--account-for-embedding-in-pipeline-split",
    "account_for_loss_in_pipeline_split": "--account-for-loss-in-pipeline-split",
}
