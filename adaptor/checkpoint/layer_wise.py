"""Megatron-core's layer-wise optimizer (Muon): each matrix has its whole state on one data-parallel rank.

So each rank of a data-parallel group is a group of its own in a checkpoint, like a rank with experts that no
other rank has: the rank saves the weights of its own updates, with their state. The first rank of the
data-parallel group saves the rest, as in the framework: buffers, and since 0.18 embeddings and vectors, which
have a distributed optimizer.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

from adaptor.errors import UnsupportedError

IN_TORCH = (
    "--ckpt-format is torch: with --optimizer dist_muon, or muon and --use-distributed-optimizer, each"
    " rank saves its optimizer state in a file of its own (layer_wise_optimizer_N.pt), which last words do"
    " not have; use torch_dist, or set ENABLE_TTP=False"
)
_KIND = "LayerWiseDistributedOptimizer"


def parts_of(optimizer: Any) -> Iterator[Any]:
    """Yield the layer-wise optimizers of a chain."""
    if type(optimizer).__name__ == _KIND:
        yield optimizer
    for part in getattr(optimizer, "chained_optimizers", None) or ():
        yield from parts_of(part)


def has_owners(optimizer: Any) -> bool:
    """Return whether ranks with the same model update different params, each as a whole."""
    return any(part.dp_cp_params_list is not None for part in parts_of(optimizer))


def group_of(folder: str, optimizer: Any) -> str:
    """Return the name of the rank's group in checkpoints.

    Args:
        folder: the name for all ranks with the model of this rank.
    """
    for part in parts_of(optimizer):
        if part.dp_cp_params_list is not None:
            return f"{folder}_owner_{part.pg_collection.dp_cp.rank():03d}"
    return folder


def mark(optimizer: Any, bases: Iterable[Any]) -> list[tuple[str, Any]]:
    """Return key and replica id of each saved entry of the model, so that the rank saves what it updates.

    Args:
        bases: the entries, with the replica ids of the framework: (pipeline, tensor, data parallel).

    Raises:
        UnsupportedError: a param that the rank updates is no entry.
    """
    updated_here = {param.data_ptr() for part in parts_of(optimizer) for param in _own_params(part)}
    updated = {param.data_ptr() for part in parts_of(optimizer) for param in _params_of_all_ranks(part)}
    marks, missing = [], set(updated_here)
    for base in bases:
        replica = base.replica_id
        address = base.data.data_ptr() if hasattr(base.data, "data_ptr") and base.data.numel() else 0
        if address in updated_here or address in updated:
            replica = (*replica[:-1], 0 if address in updated_here else 1)
        missing.discard(address)
        marks.append((base.key, replica))
    if missing:
        raise UnsupportedError(
            f"{len(missing)} of the params that the layer-wise optimizer updates are saved in parts, which"
            " cannot be protected; use another optimizer, or set ENABLE_TTP=False"
        )
    return marks


def _own_params(part: Any) -> Iterator[Any]:
    for optimizer in part.chained_optimizers:
        for group in (*optimizer.float16_groups, *optimizer.fp32_from_fp32_groups):
            yield from group


def _params_of_all_ranks(part: Any) -> Iterator[Any]:
    for params_by_rank in (part.dp_cp_params_list, part.expt_dp_params_list):
        for params in params_by_rank or ():
            yield from params


def sharded_state_dict(part: Any, model: Any, is_loading: bool = False, **options: Any) -> Any:
    """Return the state of a layer-wise optimizer as the framework saves it, without a collective.

    The framework's own method takes the scalars of a param group without params from a rank with params. They
    are the same but for the count of updates, which the rank's other groups have, too.
    """
    from megatron.core.dist_checkpointing.dict_utils import nested_values
    from megatron.core.dist_checkpointing.mapping import LocalNonpersistentObject

    saved = super(type(part), part).sharded_state_dict(model, is_loading, **options)
    for base in nested_values(saved):
        if hasattr(base, "replica_id"):
            is_number = isinstance(base.replica_id, int)
            base.replica_id = 0 if is_number else (*base.replica_id[:2], 0)
    for state in (saved,) if len(part.chained_optimizers) == 1 else saved.values():
        state["fp32_from_fp16_params"] = {
            number: mains or LocalNonpersistentObject(mains)
            for number, mains in enumerate(state["fp32_from_fp16_params"])
        }
        inner = state["optimizer"]
        inner["state"] = inner["state"] or LocalNonpersistentObject(inner["state"])
        counts = {group["step"] for group in inner["param_groups"] if "step" in group}
        for group in inner["param_groups"] if len(counts) == 1 else ():
            group["step"] = next(iter(counts))
    return saved
