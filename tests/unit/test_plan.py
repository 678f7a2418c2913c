"""plan: the largest complete step is chosen, and only shards with live holders are promised.

The oracle ignores phases: each board is drawn with its set of provided steps, as in the table of the design,
and the best step is searched among all steps.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

import msgspec
from hypothesis import given
from hypothesis import strategies as st

from adaptor.controller.plan import NoPlan, Plan, groups_of, plan
from adaptor.protocol.messages import BoardRecord, Phase, Share

LAST_STEP = 8


@dataclass(frozen=True)
class DrawnJob:
    shares: dict[int, tuple[Share, ...]]
    alive: dict[int, BoardRecord]
    gives: dict[int, frozenset[int]]
    read_only: dict[int, frozenset[str]]  # groups whose shards a rank can provide but not write

    @property
    def layouts(self) -> dict[int, tuple[Share, ...]]:
        return {
            rank: tuple(Share(s.group, s.index, s.count, s.group not in self.read_only[rank]) for s in shares)
            for rank, shares in self.shares.items()
        }

    def writers(self, group: str, step: int) -> set[int]:
        """The ranks that can write the group's files."""
        return {
            rank
            for rank, shares in self.shares.items()
            if any(share.group == group for share in shares)
            and group not in self.read_only[rank]
            and step in self.gives.get(rank, ())
        }

    def possible(self, step: int) -> bool:
        return all(self.holders(shard, step) and self.writers(shard.group, step) for shard in self.shards)

    def holders(self, shard: Share, step: int) -> set[int]:
        return {r for r in self.alive if shard in self.shares[r] and step in self.gives[r]}

    @property
    def shards(self) -> set[Share]:
        named = {share for shares in self.shares.values() for share in shares}
        return {Share(share.group, index, share.count) for share in named for index in range(share.count)}

    def begun(self, step: int) -> bool:
        """Return False if no rank is past the door of `step` and some rank has not reached the door."""
        boards = self.alive.values()
        past = any(b.finished >= step or (b.phase is Phase.UPDATING and b.ahead == step) for b in boards)
        not_at_door = (Phase.RUNNING, Phase.UNREADABLE)
        return past or not any(b.phase in not_at_door and b.ahead < step for b in boards)

    def best_step(self) -> int | None:
        steps = [step for step in range(LAST_STEP + 2) if self.shards and self.possible(step)]
        return max([step for step in steps if self.begun(step)] or steps, default=None)


@st.composite
def boards(draw: st.DrawFn, rank: int) -> tuple[BoardRecord, frozenset[int]]:
    """Draw a board and the steps that the rank provides."""
    phase = draw(st.sampled_from([Phase.RUNNING] * 3 + list(Phase)))
    if phase is Phase.STARTING:
        return BoardRecord(rank), frozenset()
    finished = draw(st.integers(0, LAST_STEP))
    older = draw(st.integers(0, min(2, finished)))  # of skipped steps, or in a local copy
    changed = phase in (Phase.UPDATING, Phase.BROKEN) and not draw(st.booleans())  # without a copy
    oldest = finished + 1 if changed else finished - older
    still_here = frozenset(range(oldest, finished + 1))
    record = BoardRecord(rank, 1, phase, oldest, finished, finished + 1)
    if phase in (Phase.ENDED, Phase.UNREADABLE):
        return record, frozenset()
    if phase in (Phase.READY, Phase.UPDATING):
        return record, still_here | {finished + 1}
    return record, still_here


@st.composite
def jobs(draw: st.DrawFn) -> DrawnJob:
    ranks = range(draw(st.integers(1, 6)))
    counts = draw(st.dictionaries(st.sampled_from(["dense", "expert", "tp1-pp0"]), st.integers(1, 3)))
    every_shard = [Share(group, index, count) for group, count in counts.items() for index in range(count)]
    some = st.sets(st.sampled_from(every_shard)) if every_shard else st.just(set())
    shares = {rank: tuple(draw(some)) for rank in ranks}
    drawn = {rank: draw(boards(rank)) for rank in ranks if draw(st.integers(0, 3))}
    return DrawnJob(
        shares,
        {rank: board for rank, (board, _) in drawn.items()},
        {r: steps for r, (_, steps) in drawn.items()},
        {
            rank: draw(st.frozensets(st.sampled_from(["dense", "expert", "tp1-pp0"]), max_size=1))
            for rank in ranks
        },
    )


def check_orders(job: DrawnJob, decision: Plan) -> None:
    assert [order.group for order in decision.groups] == sorted({shard.group for shard in job.shards})
    for order in decision.groups:
        count = len(order.holders)
        assert {s.count for s in job.shards if s.group == order.group} == {count}
        for index, holder in enumerate(order.holders):
            assert holder in job.holders(Share(order.group, index, count), decision.step)
        able = job.writers(order.group, decision.step)
        assert order.writer in able
        assert order.writer in order.holders or not able & set(order.holders)
        assert set(order.ranks) == {*order.holders, order.writer}


@given(jobs())
def test_the_largest_consistent_step_is_found(job: DrawnJob) -> None:
    decision = plan(groups_of(job.layouts), job.alive)
    best = job.best_step()
    if isinstance(decision, NoPlan):
        assert best is None, decision.reason
    else:
        assert decision.step == best
        check_orders(job, decision)


def test_a_step_that_nobody_has_begun_is_not_begun_for_the_save() -> None:
    """A rank let through would leave the step that all ranks have."""
    shares = {rank: (Share("g", 0, 1),) for rank in (0, 1)}
    ready, running = BoardRecord(0, 1, Phase.READY, 4, 4, 5), BoardRecord(1, 1, Phase.RUNNING, 4, 4, 4)
    assert plan(groups_of(shares), {0: ready, 1: running}).step == 4
    assert (
        plan(groups_of(shares), {0: ready, 1: msgspec.structs.replace(running, phase=Phase.UNREADABLE)}).step
        == 4
    )
    assert plan(groups_of(shares), {0: ready}).step == 5
    past = BoardRecord(1, 1, Phase.RUNNING, 5, 5, 5)
    assert plan(groups_of(shares), {0: ready, 1: past}).step == 5
    turned_back = BoardRecord(1, 1, Phase.RUNNING, 4, 4, 5)  # it was READY, so other ranks may have passed
    assert plan(groups_of(shares), {0: ready, 1: turned_back}).step == 5
    other_shares = {0: (Share("g", 0, 1),), 1: (Share("h", 0, 1),), 2: (Share("h", 0, 1),)}
    assert (
        plan(
            groups_of(other_shares),
            {
                0: BoardRecord(0, 1, Phase.UPDATING, 4, 4, 5),
                1: BoardRecord(1, 1, Phase.READY, 4, 4, 5),
                2: running,
            },
        ).step
        == 5
    )


@given(jobs(), st.integers(0, LAST_STEP + 1))
def test_one_step_alone(job: DrawnJob, step: int) -> None:
    decision = plan(groups_of(job.layouts), job.alive, only=step)
    if isinstance(decision, NoPlan):
        assert not job.shards or not job.possible(step)
    else:
        assert decision.step == step
        check_orders(job, decision)


@given(jobs())
def test_the_reason_is_true(job: DrawnJob) -> None:
    decision = plan(groups_of(job.layouts), job.alive)
    if isinstance(decision, Plan):
        return
    abandoned = {
        shard
        for shard in job.shards
        if not any(shard in job.shares[rank] and steps for rank, steps in job.gives.items())
    }
    named = re.fullmatch(
        r"shard (\d+) of (\d+) of group (\S+) has no live holder, it was on rank (.+)", decision.reason
    )
    if not job.shards:
        assert decision.reason == "no rank has told what it holds"
    elif abandoned:
        assert named, decision.reason
        shard = Share(named[3], int(named[1]), int(named[2]))
        assert shard in abandoned
        owners = [str(rank) for rank in job.shares if shard in job.shares[rank]]
        assert named[4] == (" and ".join(owners) or "nobody")
    elif decision.reason.startswith("nobody is left"):
        group = decision.reason.partition("group ")[2].partition(",")[0]
        assert not any(job.writers(group, step) for step in range(LAST_STEP + 2))
    else:
        assert decision.reason == "every shard has a live holder, but there is no step that all of them hold"


def test_a_rank_at_the_door_gives_both_steps() -> None:
    """The other rank waits at the door to step 5, then has not reached the door."""
    shares = {0: (Share("dense", 0, 2),), 1: (Share("dense", 1, 2),)}
    ahead = BoardRecord(0, phase=Phase.RUNNING, oldest=5, finished=5, ahead=5)
    at_the_door = BoardRecord(1, phase=Phase.READY, oldest=4, finished=4, ahead=5)
    board_record = BoardRecord(1, phase=Phase.RUNNING, oldest=4, finished=4, ahead=4)
    decision = plan(groups_of(shares), {0: ahead, 1: at_the_door})
    assert isinstance(decision, Plan)
    assert decision.step == 5
    assert isinstance(plan(groups_of(shares), {0: ahead, 1: board_record}), NoPlan)


@given(st.data())
def test_ranks_with_local_copies_have_a_step_in_common(data: st.DataObject) -> None:
    """Some rank has begun the update of step 6, so all have finished step 5; every shard has a holder."""
    boards = []
    for rank in range(data.draw(st.integers(1, 4))):
        phase, oldest, finished = data.draw(
            st.sampled_from(
                [
                    (Phase.RUNNING, 4, 5),
                    (Phase.READY, 4, 5),
                    (Phase.BROKEN, 5, 5),
                    (Phase.RUNNING, 5, 6),
                    (Phase.READY, 5, 6),
                ]
            )
        )
        boards.append(BoardRecord(rank, 1, phase, oldest, finished, finished + (phase is not Phase.RUNNING)))
    count = len(boards)
    shares = {rank: (Share("dense", rank, count),) for rank in range(count)}
    decision = plan(groups_of(shares), dict(enumerate(boards)))
    assert isinstance(decision, Plan)
    assert decision.step >= 5
    assert (decision.step >= 6) == all(board.provides(6) for board in boards)


def test_shards_of_different_groups_may_come_from_one_rank() -> None:
    shares = {0: (Share("a", 0, 1), Share("b", 0, 2)), 1: (Share("b", 1, 2),)}
    running = {rank: BoardRecord(rank, phase=Phase.RUNNING, oldest=3, finished=3, ahead=3) for rank in shares}
    decision = plan(groups_of(shares), running)
    assert isinstance(decision, Plan)
    assert [(order.group, order.holders, order.writer) for order in decision.groups] == [
        ("a", (0,), 0),
        ("b", (0, 1), 0),
    ]
