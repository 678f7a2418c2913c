"""The copies and handlers in MindIO TTP's interface, and their use by the engine."""

from __future__ import annotations

from typing import Any

import pytest

from adaptor.errors import ConfigError
from adaptor.mindio import replicas
from adaptor.mindio.trainee import Handler, Handlers
from adaptor.protocol.messages import GroupOrder, Share


def info(ranks: Any, count: Any, shift: Any = 0) -> dict[str, Any]:
    return {"rank_list": ranks, "replica_cnt": count, "replica_shift": shift}


@pytest.mark.parametrize(
    ("count", "indices"),
    [(1, [0, 1, 2, 3]), (2, [0, 1, 0, 1]), (4, [0, 0, 0, 0])],
    ids=["no-copies", "two", "everyone-has-all"],
)
def test_the_shards_of_a_rank(count: int, indices: list[int]) -> None:
    ranks = [4, 6, 1, 3]
    shares = [replicas.of_newer(rank, [info(ranks, count)])[0].shares(rank) for rank in ranks]
    assert shares == [(Share("attention-of-rank-1", index, 4 // count),) for index in indices]


def test_experts_are_a_group_of_their_own() -> None:
    copies = replicas.of_newer(2, [info([0, 1, 2, 3], 2), info([0, 2], 2, 1)])
    assert [copy.shares(2) for copy in copies] == [
        (Share("attention-of-rank-0", 0, 2),),
        (Share("moe-of-rank-0", 0, 1),),
    ]


def test_the_older_form_tells_how_far_apart_copies_are() -> None:
    assert replicas.of_older(5, range(8), 8, 4)[0].shares(5) == (Share("attention-of-rank-0", 1, 4),)
    assert replicas.of_older(1, [0, 1], 2, 1)[0].shares(1) == (Share("attention-of-rank-0", 0, 1),)


@pytest.mark.parametrize("apart", [1, 2])
def test_an_optimizer_that_mirrors_has_two_shards(apart: int) -> None:
    ranks = (7, 1, 4)
    (copies,) = replicas.of_older(4, ranks, 3, 2, apart)
    for place, rank in enumerate(ranks):
        indices = sorted({place, (place - apart) % 3})
        assert copies.shares(rank) == tuple(Share("attention-of-rank-1", index, 3) for index in indices)
    for lost in ranks:
        survivors = [rank for rank in ranks if rank != lost]
        givers = copies.givers(survivors)
        assert givers[ranks.index(lost)] == ranks[(ranks.index(lost) + apart) % 3]
        for index, giver in enumerate(givers):
            assert giver == ranks[index] or ranks[index] == lost
            assert index in [share.index for share in copies.shares(giver)]


def test_each_shard_is_given_by_one_chosen_rank() -> None:
    (halves,) = replicas.of_older(0, range(4), 4, 2)
    assert halves.givers([1, 2]) == [2, 1]
    assert halves.givers([0, 3, 1]) == [0, 1]


@pytest.mark.parametrize(
    ("infos", "message"),
    [
        ([], "replica_info is []: a list of one or two dicts"),
        (info([0], 1), "a list of one or two dicts"),
        ([[0, 1]], "replica_info is [[0, 1]]: a list of one or two dicts"),
        ([info((0, 1), 2)], r"rank_list is (0, 1): it must be a list of ranks"),
        ([info([0, True], 2)], "it must be a list of ranks"),
        ([info([1, 2], 2)], "it must have rank 0 in it, and each rank once"),
        ([info([0, 0], 2)], "it must have rank 0 in it, and each rank once"),
        ([info([0, 1, 2], 2)], "replica_cnt is 2: it must divide the 3 ranks 0, 1, 2, or a shard would"),
        ([info([0, 1], 0)], "replica_cnt is 0"),
        ([info([0, 1, 2, 3], 2, 1)], "replica_shift is 1: copies are 2 places apart, so it must be 0 or 2"),
    ],
)
def test_invalid_copies_are_refused(infos: Any, message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        replicas.of_newer(0, infos)
    assert str(caught.value).startswith("tft_set_optimizer_replica: ")
    assert message in str(caught.value)


@pytest.mark.parametrize(
    ("size", "replica", "message"),
    [
        (4, 2, "dp_size is 4, but dp_ranks are [0, 1, 2]"),
        (
            3,
            2,
            "replica is 2: with dp_size 3 it must divide 3, as dp_size//2 does where that is even; for odd",
        ),
    ],
)
def test_invalid_copies_of_the_older_form_are_refused(size: int, replica: int, message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        replicas.of_older(0, [0, 1, 2], size, replica)
    assert str(caught.value).startswith("ttp_init_processor: ")
    assert message in str(caught.value)


def test_a_size_in_the_place_of_the_ranks() -> None:
    with pytest.raises(ConfigError, match="ttp_init_processor: dp_ranks is 4: it must be a list of ranks"):
        replicas.of_older(0, 4, 4, 2)


@pytest.mark.parametrize("replica", [1, 3, "2", None])
def test_an_optimizer_that_mirrors_has_two_copies(replica: Any) -> None:
    with pytest.raises(
        ConfigError, match="with TTPOddReplicaOptimizer each shard has 2 copies, so it must be 2"
    ):
        replicas.of_older(0, range(3), 3, replica, 1)


class Script:
    def __init__(self, returns: Any = None) -> None:
        self.calls: list[tuple[Any, ...]] = []
        self._returns = returns

    def __call__(self, *args: Any) -> Any:
        self.calls.append(args)
        return self._returns


def test_the_newer_form_calls() -> None:
    save, name = Script(), Script()
    handlers = Handlers(save=Handler(save, "ctx"), rename=Handler(name, "other"), args="mine")
    moe, attention = GroupOrder("m", (3, 2), 2), GroupOrder("a", (1, 2, 1), 1)
    handlers.save_at(7, [(1, moe), (0, attention)])
    handlers.name(7)
    assert save.calls == [(7, [{"type": 0, "ranks": [1, 2]}, {"type": 1, "ranks": [3, 2]}], "mine", "ctx")]
    assert name.calls == [(7, "mine")]


@pytest.mark.parametrize(
    ("args", "expected"),
    [((6, "model"), (7, "model")), ([6, "model"], [7, "model"]), (("model", 6), ("model", 6)), (None, None)],
)
def test_the_older_form_calls_with_the_step_that_was_chosen(args: Any, expected: Any) -> None:
    save, name = Script(), Script(returns=0)
    handlers = Handlers(save=Handler(save), rename=Handler(name), older=True, args=args)
    handlers.save_at(7, [(0, GroupOrder("a", (2, 1), 1))])
    handlers.name(7)
    assert save.calls == [(2, 7, [2, 1], expected)]
    assert name.calls == [(expected,)]
    assert handlers.args is args


def test_a_rename_handler_of_the_older_form_returns_its_result() -> None:
    handlers = Handlers(rename=Handler(Script(returns=1)), older=True)
    with pytest.raises(RuntimeError, match="the rename handler has returned 1"):
        handlers.name(7)
    handlers.older = False
    handlers.name(7)


def test_without_a_rename_handler_no_rename_is_needed() -> None:
    Handlers().name(7)


def test_the_device_is_reset_and_left_where_the_script_says_how(capsys: pytest.CaptureFixture[str]) -> None:
    stop, clean = Script(), Script()

    def leave(ctx: Any) -> None:
        raise ValueError(ctx)

    for act in (Handlers.stop_device, Handlers.restart_device, Handlers.leave):
        act(Handlers())
    handlers = Handlers(
        stop=Handler(stop, 1), clean=Handler(clean, 2), exit=Handler(leave, "bye"), args="mine"
    )
    handlers.stop_device()
    assert clean.calls == []
    handlers.restart_device()
    handlers.leave()
    assert stop.calls == [("mine", 1)]
    assert clean.calls == [(False, "mine", 2)]
    assert capsys.readouterr().out == "[ttp] the exit handler has raised ValueError: bye\n"
