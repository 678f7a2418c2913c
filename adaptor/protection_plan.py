"""Calculates the gains and costs of protection before a job exists; nothing is trained.

The formulas are those of docs/costs.md, which benchmarks/results/layouts.md compares with measurements.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from adaptor.protocol.messages import Share
from adaptor.protocol.records import ProtectionPlan, Replicas
from adaptor.replica import tolerance

# Main params and two moments of a parameter, in an optimizer and in a checkpoint.
_STATE = 12
# Of a second copy: with `mirror` also the gradients.
COPY = {"split": _STATE, "mirror": 16}
# The copies in host memory that are kept of what a rank updates; of a mirror its owner makes them.
_HOST_COPIES = 2
# What a rank sends more in a step, for each parameter of a shard.
_SENT = {"split": 8, "mirror": 4}
_GRADIENT = 4


@dataclass(frozen=True)
class ModelSize:
    """The sizes of a model, from the framework's arguments.

    Args:
        dense: parameters of the rank with most parameters, without experts.
        experts: parameters of experts on a rank.
        total: dense parameters of all pipeline stages with one tensor rank.
        weight_copies: how often a checkpoint has each dense weight: in the format `torch` with each set of
            experts.
    """

    tensor: int
    dense: float
    experts: float
    total: float
    weight: int
    weight_copies: int


@dataclass(frozen=True)
class ParallelLayout:
    """The sizes that determine the replicas, from the framework's arguments.

    Args:
        data_parallel: ranks that share the optimizer state, context parallel included.
        experts: ranks with the same experts, 0 without experts.
        sharded: whether the optimizer is distributed.
        instances: the optimizer instances in the framework's arguments.
        tensor: neighbouring ranks with different parts of the dense model: the tensor parallel size.
        expert: neighbouring ranks with different experts, their own tensor parallel size included.
        may_copy: whether ranks may have copies in host memory (TTP_HOST_COPY).
        lone: why a part of the state has no second holder with any replicas; empty: it has.
    """

    world_size: int
    data_parallel: int
    experts: int
    sharded: bool
    instances: int
    tensor: int = 1
    expert: int = 1
    may_copy: bool = True
    lone: str = ""


def plan(
    layout: ParallelLayout,
    model: ModelSize | None,
    chosen: str,
    ranks_per_node: int | None = None,
    racks: Sequence[str] = (),
    host_copy: int | None = 0,
) -> ProtectionPlan:
    """Return the plan of a job.

    Args:
        model: its sizes; None if unknown.
        chosen: the kind of replicas of the job.
        ranks_per_node: None: all ranks are on one node. Ranks have the framework's usual order: tensor,
            context, data, pipeline.
        racks: the rack of each node; empty: not known.
        host_copy: after how many steps copies in host memory are made; 0: never; None: auto.
    """
    ranks = layout.world_size
    ranks_per_node = ranks_per_node or ranks
    host_copy = host_copy if layout.may_copy else 0
    copied = tolerance.steps_between_copies(host_copy)
    node_of = {rank: rank // ranks_per_node for rank in range(ranks)}
    kinds = ("whole",) if not layout.sharded and chosen != "none" else ("split", "mirror", "none")
    if layout.lone:
        kinds = ("none",)
    sizes = {size for size in (layout.data_parallel, layout.experts) if size}
    fits = {"split": all(size % 2 == 0 for size in sizes), "mirror": layout.data_parallel > 1}
    rows = [
        _replicas(kind, layout, model, kind == chosen, node_of, racks, copied)
        for kind in kinds
        if kind == chosen or fits.get(kind, True)
    ]
    has_lone_shards = any(row.chosen and row.survives.startswith("exceptions") for row in rows)
    return ProtectionPlan(
        ranks=ranks,
        nodes=-(-ranks // ranks_per_node),
        parameters=model.dense + model.experts if model is not None else None,
        training=_training(layout, model) if model is not None else None,
        replicas=tuple(rows),
        save=_save(layout, model) if model is not None else None,
        writer=_STATE * model.dense if model is not None else None,
        remedy=tolerance.REMEDY if has_lone_shards and not copied and layout.may_copy else "",
        makes_copies=has_lone_shards if host_copy is None else copied > 0,
    )


def _shard(layout: ParallelLayout, model: ModelSize) -> float:
    """Return the parameters whose state a rank has without replicas."""
    if not layout.sharded:
        return model.dense + model.experts
    return model.dense / layout.data_parallel + (model.experts / layout.experts if layout.experts else 0)


def _mirrored(layout: ParallelLayout, model: ModelSize) -> float:
    """Return the number of parameters of a shard with a second copy: all but experts on one rank alone."""
    if not layout.sharded:
        return 0.0
    experts = model.experts / layout.experts if layout.experts > 1 else 0
    return experts + (model.dense / layout.data_parallel if layout.data_parallel > 1 else 0)


def _training(layout: ParallelLayout, model: ModelSize) -> float:
    weights = model.dense + model.experts
    return weights * (model.weight + _GRADIENT) + _STATE * _shard(layout, model)


def _save(layout: ParallelLayout, model: ModelSize) -> float:
    dense = model.total * model.tensor
    ranks_with_other_experts = layout.world_size / layout.experts if layout.experts else 0
    experts = model.experts * ranks_with_other_experts
    return _STATE * (dense + experts) + model.weight * (dense * model.weight_copies + experts)


def _replicas(
    kind: str,
    layout: ParallelLayout,
    model: ModelSize | None,
    chosen: bool,
    node_of: dict[int, int],
    racks: Sequence[str],
    copied: int,
) -> Replicas:
    memory = local = host = sent = None
    if model is not None:
        shard, mirrored = _shard(layout, model), _mirrored(layout, model)
        memory, sent = COPY.get(kind, 0) * mirrored, _SENT.get(kind, 0) * mirrored
        local = _STATE * (shard + (mirrored if kind in COPY else 0))
        host = _HOST_COPIES * _STATE * (shard + (mirrored if kind == "split" else 0))
    shares = _shares(kind, layout, node_of)
    survival = tolerance.survives(kind, shares, node_of, copied)
    survival = survival.removeprefix(f"{kind}; ").partition(":")[
        0
    ]  # behind it are words for the job's first line
    any_rack, better = _racks(shares, node_of, racks) if racks else (None, None)
    return Replicas(kind, chosen, memory, local, host, sent, survival, any_rack, better)


def _racks(
    shares: dict[int, list[Share]], node_of: dict[int, int], racks: Sequence[str]
) -> tuple[bool, tuple[int, ...] | None]:
    """Return whether any 1 rack may be lost; if not, an order of nodes in which it may."""

    def fits(order: Sequence[int]) -> bool:
        return tolerance.spare(shares, lambda rank: racks[order[node_of[rank]]]) > 0

    nodes = range(len(racks))
    if fits(nodes):
        return True, None
    # Second copies are half a group away (split), or on the next node (mirror): rack after rack puts the
    # former apart, one node of each rack in turn the latter.
    sizes = Counter(racks)
    sorted_nodes = sorted(nodes, key=lambda node: (-sizes[racks[node]], racks[node]))
    turn = {node: racks[:node].count(racks[node]) for node in nodes}
    in_turn = sorted(nodes, key=lambda node: (turn[node], sorted_nodes.index(node)))
    return False, next((tuple(order) for order in (sorted_nodes, in_turn) if fits(order)), None)


def _shares(kind: str, layout: ParallelLayout, node_of: dict[int, int]) -> dict[int, list[Share]]:
    """Return the shards of each rank."""
    from adaptor.replica.ring import stride  # torch, which is for the script to import

    shares: dict[int, list[Share]] = {rank: [] for rank in node_of}
    parts = (("group", layout.data_parallel, layout.tensor), ("experts", layout.experts, layout.expert))
    for name, size, inner in parts:
        for number, group in enumerate(_groups(len(node_of), size, inner) if size else ()):
            apart = stride([node_of[rank] for rank in group]) if kind == "mirror" and size > 1 else 0
            _share(shares, f"{name} {number}", group, kind, layout.instances, apart)
    return shares


def _groups(ranks: int, size: int, inner: int) -> list[list[int]]:
    """Return the groups of `size` ranks with the same part of the model, `inner` ranks apart."""
    return [
        [outer + first + inner * place for place in range(size)]
        for outer in range(0, ranks, size * inner)
        for first in range(inner)
    ]


def _share(
    shares: dict[int, list[Share]], name: str, group: Sequence[int], kind: str, instances: int, apart: int
) -> None:
    """Add the shards of each rank of a group."""
    size = len(group)
    count = {"whole": 1, "split": max(1, size // max(2, instances))}.get(kind, size)
    for place, rank in enumerate(group):
        held_shards = {place % count}
        if kind == "mirror":
            held_shards.add((place - apart) % count)
        shares[rank] += [Share(name, shard, count) for shard in sorted(held_shards)]
