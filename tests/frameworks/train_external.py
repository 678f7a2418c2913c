"""Runs Megatron-LM's pretrain_gpt.py with a data loader whose state is saved (--dataloader-save).

The loader is like that of the framework's multimodal example: it reads on the first tensor-parallel rank, has
`save_state`, and begins at the state in the `--dataloader-save` file of the loaded step.
"""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pretrain_gpt
import torch
from megatron.core import mpu
from megatron.core.enums import ModelType
from megatron.training import get_args, pretrain
from megatron.training.checkpointing import get_checkpoint_name


class Rows:
    """Rows of tokens that depend on their number and on the data-parallel rank."""

    def __init__(self, row: int) -> None:
        self._row = row

    def __iter__(self) -> Rows:
        return self

    def __next__(self) -> dict[str, torch.Tensor]:
        args = get_args()
        self._row += 1
        seed = 1000 * mpu.get_data_parallel_rank() + self._row
        numbers = torch.Generator().manual_seed(seed)
        tokens = torch.randint(4000, (args.micro_batch_size, args.seq_length + 1), generator=numbers)
        shape = (args.micro_batch_size, args.seq_length)
        return {
            "tokens": tokens[:, :-1].contiguous(),
            "labels": tokens[:, 1:].contiguous(),
            "loss_mask": torch.ones(shape),
            "position_ids": torch.arange(args.seq_length).expand(shape).contiguous(),
            "attention_mask": torch.ones(shape[0], 1, shape[1], shape[1]).tril() < 0.5,
        }

    def save_state(self) -> Any:
        return {"row": self._row}


def provider(samples: Any) -> tuple[Rows, None, None]:
    args, row = get_args(), 0
    name = f"train_dataloader_dprank{mpu.get_data_parallel_rank():03d}.pt"
    path = Path(get_checkpoint_name(args.dataloader_save, args.iteration, pipeline_rank=0, basename=name))
    if args.load is not None and path.exists():
        row = torch.load(path)["dataloader_state_dict"]["row"]
        print(f"rank {torch.distributed.get_rank()}: the loader begins at row {row}\n", end="", flush=True)
    return Rows(row), None, None


def arguments(parser: Any) -> Any:
    parser.add_argument("--dataloader-save")
    return parser


if __name__ == "__main__":
    pretrain(
        provider,
        partial(pretrain_gpt.model_provider, pretrain_gpt.gpt_builder),
        ModelType.encoder_or_decoder,
        pretrain_gpt.forward_step,
        extra_args_provider=arguments,
    )
