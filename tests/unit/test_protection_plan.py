"""What a plan says protection takes and gives: by the formulas of docs/costs.md, and of where ranks are."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from adaptor.protection_plan import ModelSize, ProtectionPlan, Replicas, Sharing, plan

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


def row(made: ProtectionPlan, kind: str) -> Replicas:
    return next(replica for replica in made.replicas if replica.kind == kind)


@pytest.mark.parametrize(
    ("column", "billions", "d", "tensor", "pipeline"), [(2, 7, 64, 1, 1), (3, 7, 4, 2, 1), (4, 70, 16, 8, 4)]
)
def test_the_figures_are_those_of_the_page(
    column: int, billions: int, d: int, tensor: int, pipeline: int
) -> None:
    shards = tensor * pipeline
    sharing = Sharing(dense=d, experts=0, sharded=True, instances=1)
    made = plan(sharing, model(billions * 1e9 / shards, tensor, pipeline), "split", d * shards, 8)
    for name, memory in (
        ("`split`", row(made, "split").memory),
        ("`mirror`", row(made, "mirror").memory),
        ("`TTP_LOCAL_COPY`, in addition", row(made, "mirror").local_copy),
    ):
        (line,) = (line for line in MEMORY.splitlines() if line.startswith(f"| {name} |"))
        assert memory is not None
        assert f"{memory / 1e9:.1f} GB" == line.split("|")[column + 1].strip()
    assert made.save == billions * 1e9 * 14


def test_what_is_sent_is_what_the_page_says() -> None:
    sharing = Sharing(dense=16, experts=0, sharded=True, instances=1)
    made = plan(sharing, model(70e9 / 32, 8, 4), "split", 512, 8)
    match = re.search(r"Calculated for the 70B model above: ([\d.]+) GB and ([\d.]+) GB", COSTS)
    assert match is not None
    sent = [row(made, kind).sent or 0.0 for kind in ("split", "mirror")]
    assert [f"{each / 1e9:.1f}" for each in sent] == list(match.groups())


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
def test_what_may_be_lost(d: int, tensor: int, per_node: int, split: str | None, mirror: str) -> None:
    sharing = Sharing(dense=d, experts=0, sharded=True, instances=1, tensor=tensor)
    made = plan(sharing, model(1e6, tensor), "mirror", d * tensor, per_node)
    said = {replica.kind: replica.survives for replica in made.replicas}
    assert said.get("split") == split
    assert said["mirror"] == mirror
    assert said["none"] == "exceptions alone"


@pytest.mark.parametrize("sizes", [model(1e6, experts=1e6), None], ids=["sizes", "no sizes"])
def test_experts_that_no_two_ranks_share(sizes: ModelSize | None) -> None:
    """Their size takes no memory for a copy that is never made; of what may be lost it says nothing."""
    sharing = Sharing(dense=4, experts=1, sharded=True, instances=1, expert=4)
    made = plan(sharing, sizes, "mirror", 4, 1)
    assert [(replica.kind, replica.survives) for replica in made.replicas] == [
        ("mirror", "exceptions alone"),
        ("none", "exceptions alone"),
    ]
    mirror, none = made.replicas
    if sizes is not None:
        assert (mirror.memory, mirror.sent) == (16e6 / 4, 4e6 / 4)
        assert (mirror.local_copy, mirror.host_copy) == (12e6 * (1.25 + 0.25), 24e6 * 1.25)
        assert (none.local_copy, none.host_copy) == (12e6 * 1.25, 24e6 * 1.25)


def test_an_optimizer_that_every_rank_has() -> None:
    sharing = Sharing(dense=4, experts=0, sharded=False, instances=1)
    (whole,) = plan(sharing, model(1e6), "whole", 4, 2).replicas
    assert (whole.memory, whole.sent, whole.local_copy) == (0, 0, 12e6)
    assert whole.survives == "any 3 ranks, any 1 node"


def test_a_model_whose_size_is_not_known() -> None:
    made = plan(Sharing(dense=4, experts=0, sharded=True, instances=1), None, "split", 4, 4)
    assert (made.parameters, made.save, row(made, "split").memory) == (None, None, None)
    assert row(made, "split").survives == "any 1 rank"
