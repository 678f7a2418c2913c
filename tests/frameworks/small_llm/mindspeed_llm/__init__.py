"""The shape of MindSpeed-LLM: a training loop of its own on Megatron-LM. See `pretrain.py` beside it."""
