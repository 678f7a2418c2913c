"""The plan of memory, traffic and tolerated losses, by the formulas of docs/costs.md and the layout."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from adaptor.preflight import Findings
from adaptor.protection_plan import ModelSize, ParallelLayout, ProtectionPlan, Replicas, plan

COSTS = (Path(__file__).parents[2] / "docs" / "costs.md").read_text()
MEMORY = COSTS.partition("## Memory")[2].partition("\n## ")[0]


def model(parameters: float, tensor: int = 1, pipeline: int = 1, experts: float = 0.0) -> ModelSize:
    return ModelSize(
        tensor=tensor,
        dense=parameters,
        experts=experts,
        total=parameters * pipeline,
        weight=2,
        weight_copies=1,
    )


def row(planned: ProtectionPlan, kind: str) -> Replicas:
    return next(replica for replica in planned.replicas if replica.kind == kind)


@pytest.mark.parametrize(
    ("column", "billions", "d", "tensor", "pipeline"), [(2, 7, 64, 1, 1), (3, 7, 4, 2, 1), (4, 70, 16, 8, 4)]
)
def test_the_figures_match_the_cost_page(
    column: int, billions: int, d: int, tensor: int, pipeline: int
) -> None:
    shards = tensor * pipeline
    layout = ParallelLayout(d * shards, d, experts=0, sharded=True, instances=1)
    planned = plan(layout, model(billions * 1e9 / shards, tensor, pipeline), "split", 8)
    for name, memory in (
        ("`split`", row(planned, "split").memory),
        ("`mirror`", row(planned, "mirror").memory),
        ("`TTP_LOCAL_COPY`, in addition", row(planned, "mirror").local_copy),
    ):
        (line,) = (line for line in MEMORY.splitlines() if line.startswith(f"| {name} |"))
        assert memory is not None
        assert f"{memory / 1e9:.1f} GB" == line.split("|")[column + 1].strip()
    assert planned.save == billions * 1e9 * 14


def test_the_traffic_matches_the_cost_page() -> None:
    layout = ParallelLayout(512, 16, experts=0, sharded=True, instances=1)
    planned = plan(layout, model(70e9 / 32, 8, 4), "split", 8)
    match = re.search(r"Calculated for the 70B model above: ([\d.]+) GB and ([\d.]+) GB", COSTS)
    assert match is not None
    planned_bytes = [row(planned, kind).sent or 0.0 for kind in ("split", "mirror")]
    assert [f"{amount / 1e9:.1f}" for amount in planned_bytes] == list(match.groups())


@pytest.mark.parametrize(
    ("d", "tensor", "per_node", "split", "mirror"),
    [
        (8, 1, 8, "any 1 rank", "any 1 rank"),
        (8, 1, 4, "any 1 rank, any 1 node", "any 1 rank, any 1 node"),
        (8, 1, 6, "any 1 rank, but no whole node", "any 1 rank, but no whole node"),
        (8, 1, 1, "any 1 rank, any 1 node", "any 1 rank, any 1 node"),
        (4, 8, 8, "any 1 rank, any 1 node", "any 1 rank, any 1 node"),
        (4, 4, 8, "any 1 rank, any 1 node", "any 1 rank, any 1 node"),
        (3, 1, 1, None, "any 1 rank, any 1 node"),
    ],
)
def test_the_tolerated_losses(d: int, tensor: int, per_node: int, split: str | None, mirror: str) -> None:
    layout = ParallelLayout(d * tensor, d, experts=0, sharded=True, instances=1, tensor=tensor)
    planned = plan(layout, model(1e6, tensor), "mirror", per_node)
    survivals = {replica.kind: replica.survives for replica in planned.replicas}
    assert survivals.get("split") == split
    assert survivals["mirror"] == mirror
    assert survivals["none"] == "exceptions alone"


@pytest.mark.parametrize("sizes", [model(1e6, experts=1e6), None], ids=["sizes", "no sizes"])
def test_experts_that_no_two_ranks_share(sizes: ModelSize | None) -> None:
    """They need no memory for a copy, and the tolerated losses stay unnamed."""
    layout = ParallelLayout(4, 4, experts=1, sharded=True, instances=1, expert=4)
    planned = plan(layout, sizes, "mirror", 1)
    assert [(replica.kind, replica.survives) for replica in planned.replicas] == [
        ("mirror", "exceptions alone"),
        ("none", "exceptions alone"),
    ]
    mirror, none = planned.replicas
    if sizes is not None:
        assert (mirror.memory, mirror.sent) == (16e6 / 4, 4e6 / 4)
        assert (mirror.local_copy, mirror.host_copy) == (12e6 * (1.25 + 0.25), 24e6 * 1.25)
        assert (none.local_copy, none.host_copy) == (12e6 * 1.25, 24e6 * 1.25)


def test_matrices_that_each_rank_has_alone() -> None:
    """Only copies in host memory are offered; the verdict has the reason."""
    layout = ParallelLayout(4, 4, experts=1, sharded=True, instances=1, lone="each matrix is on one rank")
    (alone,) = plan(layout, None, "none", 2).replicas
    assert (alone.kind, alone.survives) == ("none", "exceptions alone")
    assert Findings(layout=layout, replica="none").words().endswith(": each matrix is on one rank")


def test_an_optimizer_that_every_rank_has() -> None:
    layout = ParallelLayout(4, 4, experts=0, sharded=False, instances=1)
    (unsharded,) = plan(layout, model(1e6), "whole", 2).replicas
    assert (unsharded.memory, unsharded.sent, unsharded.local_copy) == (0, 0, 12e6)
    assert unsharded.survives == "any 3 ranks, any 1 node"


def test_a_model_of_unknown_size() -> None:
    planned = plan(ParallelLayout(4, 4, experts=0, sharded=True, instances=1), None, "split")
    assert (planned.parameters, planned.save, row(planned, "split").memory) == (None, None, None)
    assert row(planned, "split").survives == "any 1 rank"
