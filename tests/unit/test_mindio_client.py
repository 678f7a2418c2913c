"""The calls to an installed mindio_ttp; the SDK itself is tested in tests/integration."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import NoReturn

import pytest

from adaptor import config
from adaptor.errors import ConfigError, UnsupportedError
from adaptor.mindio import NAME, client, replicas
from adaptor.mindio.client import MindioEngine, runtime
from adaptor.mindio.client.runtime import MindioRuntime, MindioSession
from adaptor.protocol.board import Board, BoardMemory
from adaptor.protocol.messages import GroupOrder, Share
from adaptor.protocol.state_provider import Trainee
from tests.unit.trainee import BATCH, CountingTrainee, Loop

# the settings


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"TTP_PROVIDE_MINDIO": "1"}, "but TTP_PROVIDE_MINDIO is True: one of them is for an installed"),
        (
            {"TTP_TLS_CERT": "c.pem", "TTP_TLS_KEY": "k.pem", "TTP_TLS_CA": "ca.pem"},
            "but TTP_TLS_CERT is 'c.pem': connections of mindio_ttp are not encrypted",
        ),
    ],
)
def test_settings_that_the_engine_refuses(settings: dict[str, str], message: str) -> None:
    with pytest.raises(ConfigError, match=f"TTP_ENGINE is 'mindio', {message}"):
        MindioEngine().require(config.load({"TTP_ENGINE": "mindio", **settings}))


# the installed SDK


@pytest.fixture
def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A folder on the path for a package `mindio_ttp`, still empty."""
    monkeypatch.setattr(sys, "path", [str(tmp_path)])
    for name in [name for name in sys.modules if name.partition(".")[0] == NAME]:
        monkeypatch.delitem(sys.modules, name)
    yield tmp_path
    for name in [name for name in sys.modules if name.partition(".")[0] == NAME]:
        del sys.modules[name]


def install(site: Path, code: str) -> None:
    package = site / NAME / "framework_ttp"
    package.mkdir(parents=True)
    package.with_name("__init__.py").touch()
    (package / "__init__.py").write_text(code)


@pytest.mark.usefixtures("site")
def test_none_is_installed() -> None:
    with pytest.raises(ConfigError, match="mindio_ttp is not installed: install it, or leave"):
        client.load()


def test_it_is_too_old(site: Path) -> None:
    names = [name for name in client.NEEDED if name not in ("tft_start_copy_os", "ReportState")]
    install(site, "\n".join(f"def {name}(): pass" for name in names))
    with pytest.raises(ConfigError) as caught:
        client.load()
    assert str(caught.value) == (
        f"TTP_ENGINE is 'mindio', but mindio_ttp.framework_ttp ({site}/mindio_ttp/framework_ttp/__init__.py) "
        "has no tft_start_copy_os, ReportState: it is too old; install a newer one, or leave TTP_ENGINE out"
    )


def test_it_cannot_be_imported(site: Path) -> None:
    install(site, "import no_such_torch_npu")
    with pytest.raises(ConfigError, match="cannot be imported: No module named 'no_such_torch_npu'"):
        client.load()


# who holds what


def shares(*shards: tuple[str, int, int]) -> list[tuple[Share, ...]]:
    return [(Share(*shard),) for shard in shards]


@pytest.mark.parametrize(
    "layouts",
    [
        shares(("a", 0, 2), ("a", 1, 2), ("a", 0, 2), ("a", 1, 2)),
        shares(("a", 1, 2), ("a", 1, 2), ("a", 0, 2), ("a", 0, 2)),
        shares(("a", 0, 1), ("b", 0, 1), ("a", 0, 1), ("b", 0, 1)),
        shares(("a", 2, 3), ("a", 1, 3), ("a", 0, 3)),
    ],
    ids=["split", "in-any-order", "everyone-has-all", "no-copies"],
)
def test_the_copies_in_the_sdk_s_terms_match_the_holders(layouts: list[tuple[Share, ...]]) -> None:
    """The copies are read by the adaptor's implementation of the interface, which has its own tests."""
    for rank, (share,) in enumerate(layouts):
        (read,) = replicas.of_newer(rank, runtime.replica_info(rank, layouts))
        assert [(share.index, share.count) for share in read.shares(rank)] == [(share.index, share.count)]
        for place, holder in enumerate(read.ranks):
            assert layouts[holder] == (Share(share.group, place % share.count, share.count),)


def test_layouts_without_words() -> None:
    mirrored = [(Share("a", 0, 2), Share("a", 1, 2))] * 2
    with pytest.raises(
        UnsupportedError, match="but rank 0 holds 2 shards: mindio_ttp knows of one per rank; use"
    ):
        runtime.replica_info(1, mirrored)
    uneven = shares(("a", 0, 2), ("a", 1, 2), ("a", 0, 2))
    with pytest.raises(UnsupportedError, match="the shards of a have 2, 1 holders: mindio_ttp needs"):
        runtime.replica_info(0, uneven)


def test_an_order() -> None:
    assert runtime._order_of("a", [{"type": 0, "ranks": [2, 1]}]) == GroupOrder("a", (2, 1), 2)


# steps


class BlockedError(Exception):
    """Raised where the main thread would wait for the SDK to end the process."""


class RecordingSdk:
    """Replaces the SDK: records the calls, and the state that could be saved at each call.

    At each call a thread of the SDK may request the state that the SDK assumes at that moment.
    """

    def __init__(self, session: MindioSession, trainee: CountingTrainee) -> None:
        self.session, self.trainee, self.loop = session, trainee, Loop(session, trainee)
        self.calls: list[tuple[str, int, int]] = []  # with the update of the live state

    def tft_start_copy_os(self) -> None:
        self.calls.append(("copy", -1, self.trainee.weights))

    def tft_start_updating_os(self, backup_step: int) -> None:
        if backup_step >= 0:
            assert self.session.is_in_the_copy(backup_step) or self.session.board.live == backup_step
        self.calls.append(("start", backup_step, self.trainee.weights))

    def tft_end_updating_os(self, step: int) -> None:
        assert self.session.board.finished == step
        assert not self.session.is_in_the_copy(step)
        self.calls.append(("end", step, self.trainee.weights))


def begun(origin: int, *, has_local_copy: bool) -> Iterator[RecordingSdk]:
    memory = BoardMemory([0])
    trainee = CountingTrainee(has_local_copy=has_local_copy)

    def connect(trainee: Trainee, origin: int) -> None:
        session.window.sdk = sdk

    def broke(error: str) -> NoReturn:
        raise BlockedError(error)

    session = MindioSession(Board(0, memory.path, memory.slots), connect, broke)
    sdk = RecordingSdk(session, trainee)
    sdk.loop.begin(origin)
    yield sdk
    memory.close()


@pytest.fixture
def sdk() -> Iterator[RecordingSdk]:
    yield from begun(0, has_local_copy=False)


@pytest.fixture
def with_a_copy() -> Iterator[RecordingSdk]:
    yield from begun(4, has_local_copy=True)


def test_an_update_lies_between_two_calls_of_the_sdk(sdk: RecordingSdk) -> None:
    sdk.loop.step(1)
    assert sdk.calls == [("start", -1, 0), ("end", 1, 1)]
    assert not sdk.session.is_in_the_copy(0)
    assert sdk.session.record_of(1).samples == BATCH


def test_a_loaded_step_is_reported(with_a_copy: RecordingSdk) -> None:
    assert with_a_copy.calls == [("start", 4, 4), ("end", 4, 4)]


def test_the_steps_in_the_copy(with_a_copy: RecordingSdk) -> None:
    with_a_copy.loop.step(5)
    assert with_a_copy.calls[2:] == [("copy", -1, 4), ("start", 4, 4), ("end", 5, 5)]
    assert (with_a_copy.session.is_in_the_copy(4), with_a_copy.trainee.copied) == (True, 4)
    assert not with_a_copy.session.is_in_the_copy(5)


def test_a_skipped_step_is_reported_as_a_step(sdk: RecordingSdk, with_a_copy: RecordingSdk) -> None:
    sdk.loop.step(1)
    sdk.loop.skip(2)
    assert sdk.calls[2:] == [("start", -1, 1), ("end", 2, 1)]
    with_a_copy.loop.step(5)
    with_a_copy.loop.skip(6)
    assert with_a_copy.calls[5:] == [("start", 5, 5), ("end", 6, 5)]
    assert not with_a_copy.session.is_in_the_copy(5)  # both steps have the same live state


def test_a_broken_barrier_leaves_the_step_before(sdk: RecordingSdk) -> None:
    def broken() -> None:
        raise RuntimeError("Connection closed by peer")

    sdk.loop.step(1)
    sdk.trainee.barrier = broken
    with pytest.raises(BlockedError, match="Connection closed by peer"):
        sdk.loop.step(2)
    assert sdk.calls[2:] == []
    assert (sdk.trainee.weights, sdk.session.record_of(1).samples) == (1, BATCH)


def test_an_exception_in_the_update_does_not_end_it(sdk: RecordingSdk) -> None:
    sdk.session.begin_step(1)
    sdk.session.before_update(sdk.loop.inner[0])
    sdk.session.window.give_up()
    assert sdk.calls == [("start", -1, 0)]


def test_an_sdk_without_its_controller(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def leave(code: int) -> NoReturn:
        raise SystemExit(code)

    def gone(state: int) -> NoReturn:
        raise Exception("report status: 8 failed")

    monkeypatch.setattr("adaptor.mindio.client.runtime.os._exit", leave)
    worker = MindioRuntime(config.load({}), {"RANK": "2", "WORLD_SIZE": "4"})
    worker._known = True
    state = SimpleNamespace(RS_UNKNOWN=SimpleNamespace(value=8))
    worker.session.window.sdk = SimpleNamespace(tft_report_error=gone, ReportState=state)
    with pytest.raises(SystemExit, match="3"):
        worker.raised("ValueError: no", 3)
    assert capsys.readouterr().err == (
        "[ttp] rank 2: its failure cannot be reported to mindio_ttp: report status: 8 failed\n"
    )
    worker._memory.close()
