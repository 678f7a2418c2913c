"""`make demo`: Megatron-LM's own pretraining script on real text, a process killed midway, nothing lost."""
