"""The verdict on a verified step: the contributions of all ranks add up to 0, or a finding says why."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import msgspec
import pytest

from adaptor.protocol.messages import Share
from adaptor.verification import verdict
from adaptor.verification.verdict import Kind, Report, ShardRecord

STEP = 6
# Two shards, each on two ranks: as with `split` on four.
SPLIT = {"g/0": [0, 2], "g/1": [1, 3]}
# One shard on three ranks: as without the distributed optimizer.
WHOLE = {"g/0": [0, 1, 2]}


def reports_of(shards: Mapping[str, list[int]], agreed: int = 5) -> list[Report]:
    ranks = 1 + max(rank for holders in shards.values() for rank in holders)
    state = {"param": "a1", "exp_avg": "b1", "state.step": "c1", "group.step": "d1"}
    records = {
        label: ShardRecord(
            {**state, "group.lr": "old"}, {**state, "group.lr": "new"}, {"grad": f"of {label}"}
        )
        for label in shards
    }
    return [
        Report(
            {label: records[label] for label, holders in shards.items() if rank in holders},
            {"g": ("w1", "w1")},
            agreed,
        )
        for rank in range(ranks)
    ]


def change(
    reports: list[Report], rank: int, sums: str, key: str, shards: Mapping[str, list[int]] = SPLIT
) -> None:
    """Change the `sums` of a rank's shard under `key`; for `weights` the `key` is the place."""
    report = reports[rank]
    if sums == "weights":
        pair = list(report.weights["g"])
        pair[int(key)] = "w2"
        reports[rank] = msgspec.structs.replace(report, weights={"g": (pair[0], pair[1])})
        return
    label = next(label for label, holders in shards.items() if rank in holders)
    record = report.shards[label]
    changed = msgspec.structs.replace(record, **{sums: {**getattr(record, sums), key: "bad"}})
    reports[rank] = msgspec.structs.replace(report, shards={**report.shards, label: changed})


def total(reports: list[Report], shards: Mapping[str, list[int]]) -> int:
    models = {"g": list(range(len(reports)))}
    numbers = [verdict.contribution(report, rank, shards, models) for rank, report in enumerate(reports)]
    assert all(0 <= number < 1 << 64 for number in numbers)
    return sum(numbers) % (1 << 64)


def decide(reports: list[Report], shards: Mapping[str, list[int]]) -> verdict.Finding:
    return verdict.decide(reports, STEP, STEP + 1, shards, {"g": list(range(len(reports)))})


@pytest.mark.parametrize("shards", [SPLIT, WHOLE, {"g/0": [0], "g/1": [1]}], ids=["split", "whole", "alone"])
def test_where_all_agree_the_sum_is_zero(shards: dict[str, list[int]]) -> None:
    assert total(reports_of(shards), shards) == 0


# By case: the kind, the named rank, the suspected ranks, and the newest agreed step.
CASES: dict[str, tuple[Any, ...]] = {
    "at rest": ([(1, "at_door", "exp_avg")], SPLIT, Kind.AT_REST, (1,), (), 6),
    "at rest, alike on all holders": (
        [(1, "at_door", "param"), (3, "at_door", "param")],
        SPLIT,
        Kind.UNKNOWN,
        (),
        (),
        6,
    ),
    "at rest on two": (
        [(1, "at_door", "param"), (2, "at_door", "param")],
        SPLIT,
        Kind.AT_REST,
        (1, 2),
        (),
        6,
    ),
    "update": ([(1, "updated", "param"), (1, "at_door", "param")], SPLIT, Kind.UPDATE, (), (1, 3), 5),
    "count": (
        [(3, "updated", "state.step"), (3, "at_door", "state.step")],
        SPLIT,
        Kind.UPDATE,
        (),
        (1, 3),
        5,
    ),
    "update of one in three": (
        [(1, "updated", "param"), (1, "at_door", "param")],
        WHOLE,
        Kind.UPDATE,
        (1,),
        (),
        6,
    ),
    "gradient": ([(2, "gradient", "grad")], SPLIT, Kind.INPUTS, (), (0, 2), 6),
    "gradient of one in three": ([(2, "gradient", "grad")], WHOLE, Kind.INPUTS, (2,), (), 6),
    "count of updates": ([(0, "at_door", "group.step")], SPLIT, Kind.AT_REST, (0,), (), 6),
    "learning rate": ([(0, "at_door", "group.lr")], SPLIT, Kind.INPUTS, (), (0, 2), 6),
    "weights as used": ([(3, "weights", "1")], SPLIT, Kind.WEIGHTS, (3,), (), 6),
    "weights of one in four": ([(3, "weights", "0"), (3, "weights", "1")], SPLIT, Kind.WEIGHTS, (3,), (), 6),
    "weights of two in four": (
        [(rank, "weights", place) for rank in (0, 1) for place in "01"],
        SPLIT,
        Kind.WEIGHTS,
        (),
        (0, 1, 2, 3),
        6,
    ),
    # Damage at rest explains the differences that follow from it.
    "at rest, and weights": (
        [(1, "at_door", "param"), (1, "weights", "1")],
        SPLIT,
        Kind.AT_REST,
        (1,),
        (),
        6,
    ),
}


@pytest.mark.parametrize("case", CASES)
def test_a_difference_is_seen_and_named(case: str) -> None:
    changes, shards, kind, named, suspects, agreed = CASES[case]
    reports = reports_of(shards)
    for rank, sums, key in changes:
        change(reports, rank, sums, key, shards)
    assert total(reports, shards) != 0
    finding = decide(reports, shards)
    assert (finding.kind, finding.named, finding.suspects, finding.agreed) == (kind, named, suspects, agreed)
    assert finding.text


@pytest.mark.parametrize(("sums", "key"), [("gradient", "grad"), ("weights", "1")])
def test_a_difference_after_a_skipped_step_is_in_the_step_that_is_made(sums: str, key: str) -> None:
    reports = reports_of(SPLIT)
    change(reports, 1, sums, key)
    finding = verdict.decide(reports, STEP, STEP + 3, SPLIT, {"g": list(range(len(reports)))})
    assert finding.text.endswith(f"in step {STEP + 3}")


def test_a_schedule_that_changes_the_learning_rate_is_no_damage_at_rest() -> None:
    reports = reports_of(SPLIT)
    assert all(not record.changed_at_rest for report in reports for record in report.shards.values())


def test_weights_on_a_single_rank_are_compared_with_themselves() -> None:
    """If the weights have changed on all holders, the script changed them."""
    models = {"a": [0], "b": [1], "c": [2, 3]}
    reports = [
        msgspec.structs.replace(report, weights={"abcc"[rank]: ("w1", "w1")})
        for rank, report in enumerate(reports_of(SPLIT))
    ]

    def judged(*changed: int) -> tuple[int, verdict.Finding]:
        changed_reports = list(reports)
        for rank in changed:
            (label,) = reports[rank].weights
            changed_reports[rank] = msgspec.structs.replace(reports[rank], weights={label: ("w1", "w2")})
        numbers = [
            verdict.contribution(report, rank, SPLIT, models) for rank, report in enumerate(changed_reports)
        ]
        return sum(numbers) % (1 << 64), verdict.decide(changed_reports, STEP, STEP + 1, SPLIT, models)

    assert judged()[0] == 0
    total, finding = judged(1)
    assert (total != 0, finding.kind, finding.label, finding.named) == (True, Kind.WEIGHTS, "b", (1,))
    total, finding = judged(0, 1)
    assert (total != 0, finding.kind, finding.named, finding.suspects) == (True, Kind.UNKNOWN, (), ())


def test_a_sum_that_is_added_up_wrongly_blames_nobody() -> None:
    finding = decide(reports_of(SPLIT), SPLIT)
    assert (finding.kind, finding.named, finding.suspects) == (Kind.UNKNOWN, (), ())


def _dense_and_experts() -> list[tuple[Share, ...]]:
    """Four ranks, two folders: dense parameters belong to both, in two shards with two holders each."""
    shares = []
    for rank in range(4):
        own_group, other_group = ("a", "b") if rank % 2 == 0 else ("b", "a")
        shard = 0 if rank < 2 else 1
        dense = [Share(own_group, shard, 3), Share(other_group, shard, 3, can_write=False)]
        shares.append((*dense, Share(own_group, 2, 3)))
    return shares


def _mirror() -> list[tuple[Share, ...]]:
    return [(Share("g", rank, 3), Share("g", (rank - 1) % 3, 3)) for rank in range(3)]


@pytest.mark.parametrize(
    ("shares", "expected"),
    [
        (_dense_and_experts, [[0, 1], [0, 2], [1, 3], [2, 3]]),
        (_mirror, [[0, 1], [0, 2], [1, 2]]),
        (lambda: [(Share("g", 0, 1),)] * 3, [[0, 1, 2]]),
    ],
    ids=["experts", "mirror", "whole"],
)
def test_the_holders_of_each_shard(
    shares: Callable[[], list[tuple[Share, ...]]], expected: list[list[int]]
) -> None:
    labels, holders = verdict.holders_of(shares())
    assert sorted(holders.values()) == expected
    assert all(
        rank in holders[label] for rank, own_labels in enumerate(labels) for label in own_labels.values()
    )
