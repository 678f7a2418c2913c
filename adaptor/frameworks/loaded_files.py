"""Says which files of a checkpoint of Megatron-LM a rank is about to load, for who checks them before."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from adaptor.checkpoint import shards
from adaptor.checkpoint.step_record import chain
from adaptor.protocol import naming


def loaded_here(load: str, optimizer: Any) -> tuple[str, ...]:
    """Return with what the paths of these files begin, below the folder of the checkpoint.

    In the format `torch` a rank loads the model of its model-parallel rank; the state of a distributed
    optimizer is loaded by the first of the ranks that share it, which sends the others theirs. In the format
    `torch_dist` most of what a rank needs is in the files of the rank with its number, where sizes have not
    changed.

    Args:
        load: the folder that is loaded from.
        optimizer: that of the job, or None.
    """
    import torch.distributed as dist
    from megatron.training.checkpointing import get_checkpoint_name

    folder = Path(get_checkpoint_name(load, 0)).parent.name
    loads = [f"{folder}/{naming.MODEL_FILE}", f"__{dist.get_rank()}_"]
    if any(
        shards.is_sharded(chained_optimizer) and chained_optimizer.data_parallel_group.rank() == 0
        for chained_optimizer in chain(optimizer)
    ):
        loads.append(f"{folder}/{naming.OPTIMIZER_FILE}")
    return tuple(loads)
