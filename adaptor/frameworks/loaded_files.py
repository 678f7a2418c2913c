"""Lists the files of a checkpoint of Megatron-LM that a rank is about to load, for a check before the
load.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from adaptor.checkpoint import shards
from adaptor.checkpoint.step_record import chain
from adaptor.protocol import naming


def loaded_here(load: str, optimizer: Any) -> tuple[str, ...]:
    """Return the prefixes of the files' paths, relative to the folder of the checkpoint.

    In the format `torch` a rank loads the model of its model-parallel rank; the first rank of each group with
    a shared distributed optimizer loads the optimizer's state and sends the others their parts. In the format
    `torch_dist` most data of a rank is in the files with the rank's number, if sizes have not changed.

    Args:
        load: the folder to load from.
        optimizer: the job's optimizer, or None.
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
