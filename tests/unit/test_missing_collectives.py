"""The ranks that miss a collective, by dumps of torch's flight recorder."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
import torch.distributed as dist

from adaptor.controller.failures import missing_collectives
from adaptor.protocol import collectives
from adaptor.protocol.messages import Freeze, TimelineEvent
from adaptor.worker import stacks
from tests.unit.test_operations import RecordedJob

WORLD, PAIR = ("0", "default_pg"), ("1", "undefined")
GROUP = "group 0 (default_pg) of gloo"
# Group, number in the group, name.
Call = tuple[tuple[str, str], int, str]


def dump(calls: Sequence[Call]) -> dict[str, Any]:
    entries = [
        {
            "collective_seq_id": number,
            "process_group": group,
            "profiling_name": f"gloo:{name}",
            "is_p2p": name == "send",
            "record_id": record,
            "state": "scheduled",
        }
        for record, (group, number, name) in enumerate(calls)
    ]
    return {"version": "2.10", "entries": entries}


BEGUN: list[Call] = [(WORLD, 1, "all_reduce"), (WORLD, 2, "all_reduce")]
BARRIER: list[Call] = [*BEGUN, (WORLD, 3, "barrier")]


@pytest.mark.parametrize(
    ("ranks", "lines"),
    [
        ([BEGUN, BEGUN, BEGUN], []),
        (
            [BARRIER, BEGUN, BARRIER],
            ["rank 1 misses barrier 3 of group 0 (default_pg) of gloo, which ranks 0 and 2 have begun"],
        ),
        (
            [BARRIER, [*BEGUN, (WORLD, 3, "all_reduce")], BARRIER],
            [f"rank 1 has begun all_reduce as collective 3 of {GROUP}, ranks 0 and 2 barrier"],
        ),
        # Rank 2 waits for rank 1: it misses rank 0's collective, and is not the cause.
        (
            [
                BARRIER,
                [*BEGUN, (PAIR, 1, "broadcast")],
                [*BEGUN, (PAIR, 1, "broadcast"), (PAIR, 2, "broadcast")],
            ],
            [
                "ranks 1 and 2 miss barrier 3 of group 0 (default_pg) of gloo, which rank 0 has begun",
                "rank 1 misses broadcast 2 of group 1 of gloo, which rank 2 has begun",
            ],
        ),
        # A rank without records of a group may be no member; sends have their own numbers.
        ([[*BEGUN, (PAIR, 9, "broadcast")], [*BEGUN, (WORLD, 7, "send")]], []),
    ],
    ids=["none", "behind", "another one", "a chain", "no member"],
)
def test_ranks_that_miss_a_collective_are_named(ranks: list[list[Call]], lines: list[str]) -> None:
    collectives_by_rank = {}
    for rank, calls in enumerate(ranks):
        encoded = collectives.encode(f"/logs/rank{rank}", collectives.newest(dump(calls)))
        path, collectives_by_rank[rank] = collectives.decode(encoded)
        assert path == f"/logs/rank{rank}"
    assert missing_collectives(collectives_by_rank) == lines


def test_a_rank_that_does_not_answer_comes_first() -> None:
    collectives_by_rank = {
        rank: collectives.newest(dump(calls)) for rank, calls in ((0, BARRIER), (2, BEGUN))
    }
    first, second = missing_collectives(collectives_by_rank, silent=[1])
    assert first.startswith("rank 1 does not answer: what it has begun is not known")
    assert second.startswith("rank 2 misses barrier 3 ")
    assert missing_collectives({}, silent=[1]) == []


def test_at_most_eight_ranks_are_named() -> None:
    collectives_by_rank = {10: collectives.newest(dump(BEGUN))}
    (line,) = missing_collectives(collectives_by_rank, silent=range(10))
    assert line.startswith("ranks 0, 1, 2, 3, 4, 5, 6, 7 and 2 more do not answer: what they have begun ")
    (line,) = missing_collectives(collectives_by_rank, silent=range(8))
    assert line.startswith("ranks 0, 1, 2, 3, 4, 5, 6 and 7 do not answer: ")


def test_a_group_that_was_made_anew_counts_from_the_beginning() -> None:
    (last,) = collectives.newest(dump([*BARRIER, (WORLD, 1, "broadcast")])).values()
    assert (last.number, last.name) == (1, "broadcast")


def test_a_malformed_dump_is_ignored() -> None:
    with pytest.raises(msgspec.ValidationError):
        collectives.newest({"entries": [{"op": 1}]})


def test_the_recorder_of_torch(tmp_path: Path) -> None:
    store = dist.HashStore()
    dist.init_process_group("gloo", store=store, rank=0, world_size=1)
    try:
        dist.all_reduce(torch.ones(2))
        dist.all_reduce(torch.ones(2))
        encoded = stacks.write_collectives(tmp_path / "new" / "rank0.collectives.json")
    finally:
        dist.destroy_process_group()
    path, newest_collectives = collectives.decode(encoded)
    ((group, last),) = [
        (group, collective) for group, collective in newest_collectives.items() if "default_pg" in group
    ]
    assert group.endswith("of gloo")
    assert (last.name, last.number >= 2) == ("all_reduce", True)
    (dumped,) = json.loads(Path(path).read_text())
    assert dumped["version"].startswith("2.")


def test_the_report_of_a_hang(tmp_path: Path) -> None:
    job = RecordedJob(tmp_path / "logs")
    folder = tmp_path / "logs" / "stacks-1"
    job.report.record_order(0, 0, Freeze(1, True), 99.0)
    for rank, calls in enumerate([[*BEGUN, (WORLD, 3, "barrier")], BEGUN]):
        encoded = collectives.encode(str(folder / f"rank{rank}.json"), collectives.newest(dump(calls)))
        job.report.record_message(rank, TimelineEvent(rank, 1, 99.5, "collectives", encoded), 99.5)
    job.report.record_message(1, TimelineEvent(1, 1, 99.6, "collectives", "no JSON"), 99.6)
    job.rank_1_is_killed(100.0)
    written = job.incident()
    line = "rank 1 misses barrier 3 of group 0 (default_pg) of gloo, which rank 0 has begun"
    assert written["collectives"] == [line]
    assert "collectives" not in {event["type"] for event in written["events"]}
    assert (folder / "collectives.txt").read_text() == f"{line}\n"
