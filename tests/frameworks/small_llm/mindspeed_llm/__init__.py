"""A framework like MindSpeed-LLM: its own training loop on Megatron-LM. See `pretrain.py` in this folder."""
