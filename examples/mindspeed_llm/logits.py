"""`LOGITS=OUT torchrun ... logits.py ...`, in the framework's folder: the logits of 32 tokens, to compare."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import torch

TOKENS = 32


def main() -> None:
    sys.path[0] = str(Path.cwd())
    from mindspeed_llm import megatron_adaptor  # noqa: F401, I001  before megatron, as the framework's scripts do
    import inference
    from megatron.training import get_args, get_model
    from megatron.training.checkpointing import load_checkpoint
    from megatron.training.initialize import initialize_megatron

    initialize_megatron(args_defaults={"no_load_rng": True, "no_load_optim": True})
    model = get_model(inference.model_provider, wrap_with_ddp=False)
    load_checkpoint(model, None, None)
    model[0].eval()
    tokens = torch.arange(TOKENS).unsqueeze(0) * 7 % get_args().padded_vocab_size
    positions = torch.arange(TOKENS).unsqueeze(0)
    mask = torch.ones(1, 1, TOKENS, TOKENS, dtype=torch.bool).triu(1)
    device = torch.cuda.current_device()
    with torch.no_grad():
        output = model[0](tokens.to(device), positions.to(device), mask.to(device))
    if torch.distributed.get_rank() == 0:
        torch.save({"tokens": tokens, "logits": output.float().cpu()}, os.environ["LOGITS"])


if __name__ == "__main__":
    main()
