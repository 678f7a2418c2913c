"""A script that uses the MindIO TTP interface, with its session and an agent as the peer."""

from __future__ import annotations

import os
import secrets
import socket
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from adaptor import config
from adaptor.errors import ConfigError, StartError
from adaptor.mindio import interface
from adaptor.mindio import job as job_module
from adaptor.mindio.interface import ReportState
from adaptor.mindio.job import Job, ReplicaOptimizer
from adaptor.protocol import environment, wire
from adaptor.protocol.board import BoardMemory
from adaptor.protocol.messages import (
    BoardRecord,
    Dump,
    Exit,
    Freeze,
    FromWorker,
    Frozen,
    GroupOrder,
    Layout,
    Raised,
    Rename,
    Renamed,
    Share,
    ToWorker,
    WriteFailed,
    Written,
)
from adaptor.worker import processor as processor_module
from adaptor.worker import runtime
from tests import waiting
from tests.unit.threads import LONG_S

GROUP = "attention-of-rank-0"


class BlockedError(Exception):
    """Raised where the main thread would block forever."""


@dataclass
class AgentSide:
    """The agent's end of the connection, and the worker's job."""

    memory: BoardMemory
    worker: runtime.Runtime
    job: Job
    connection: socket.socket
    exited: threading.Event

    @property
    def board(self) -> BoardRecord:
        return self.memory.read(0)

    @property
    def gives(self) -> list[int]:
        return [step for step in range(20) if self.board.provides(step)]

    def order(self, message: ToWorker) -> None:
        self.connection.sendall(wire.frame(message))

    def hears(self, kind: type) -> Any:
        message: FromWorker | None = None
        while not isinstance(message, kind):
            message = wire.receive(self.connection, wire.from_worker)
        return message

    def join(self, *, has_local_copy: bool = False, save: Callable[..., Any] = lambda *args: None) -> None:
        interface.tft_init_processor(0, 1, has_local_copy)
        interface.tft_set_optimizer_replica(0, [{"rank_list": [0], "replica_cnt": 1, "replica_shift": 0}])
        interface.tft_register_save_ckpt_handler(save, "ctx")

    def step(self, step: int) -> None:
        interface.tft_start_updating_os()
        interface.tft_end_updating_os(step)

    def dump(self, step: int, attempt: int = 1) -> Dump:
        return Dump(1, attempt, step, "", (GroupOrder(GROUP, (0,), 0),), "", 0, 10.0)


@pytest.fixture
def agent(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[AgentSide]:
    event = threading.Event()
    monkeypatch.setattr(processor_module, "_leave", lambda code: event.set())
    monkeypatch.setattr(processor_module.abort_collectives, "shut_collectives", lambda keep, inodes: 0)
    monkeypatch.setattr(
        runtime.Board, "hold_lifeline", lambda board: None
    )  # the lifeline lasts as long as the thread
    monkeypatch.setenv("WORLD_SIZE", "1")
    monkeypatch.setenv("TTP_STOP_CLEAN_BEFORE_DUMP", "0")  # restored after the test
    monkeypatch.setattr(job_module, "REST_S", 0.0)  # the test is the main thread, and orders the dump
    memory = BoardMemory([0])
    address = f"ttp-test-{secrets.token_hex(8)}"
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind("\0" + address)
        listener.listen()
        worker = runtime.Runtime(
            config.load({"TTP_LOG_PATH": str(tmp_path)}),
            {
                environment.AGENT: address,
                environment.BOARD: memory.path,
                environment.BOARD_RANKS: memory.slots,
                "RANK": "0",
            },
        )
        connection, _ = listener.accept()
    connection.settimeout(LONG_S)
    monkeypatch.setattr(runtime, "_runtime", worker)

    def hold() -> None:
        raise BlockedError

    monkeypatch.setattr(worker.session, "hold", hold)
    with connection:
        yield AgentSide(memory, worker, job_module.get(), connection, event)
    for thread in threading.enumerate():
        if thread.name == "ttp-processor":
            thread.join(LONG_S)
    worker.processor._connection.close()
    worker.processor._descriptors.release()
    os.close(worker.processor._wake_reader)
    os.close(worker.processor._wake_writer)
    memory.close()


# steps


def test_training_begins_when_the_first_update_has_ended(agent: AgentSide) -> None:
    agent.join()
    interface.tft_start_updating_os()
    assert agent.board.phase_name == "STARTING"
    interface.tft_end_updating_os(7)
    layout = agent.hears(Layout)
    assert (layout.save_folder, layout.origin, layout.has_local_copy) == ("", 6, False)
    assert layout.shares == (Share(GROUP, 0, 1),)
    assert agent.gives == [7]
    interface.tft_start_updating_os()
    assert (agent.board.phase_name, agent.gives) == ("UPDATING", [8])
    interface.tft_end_updating_os(8)
    assert agent.gives == [8]


def test_a_rank_that_reports_its_loaded_step_is_protected_from_the_first_update(agent: AgentSide) -> None:
    agent.join()
    interface.tft_report_load_ckpt_step(5)
    interface.tft_start_updating_os()
    assert agent.hears(Layout).origin == 5
    assert (agent.board.phase_name, agent.board.ahead) == ("UPDATING", 6)
    interface.tft_end_updating_os(6)
    assert agent.gives == [6]


@pytest.mark.parametrize("call", ["pause", "args", "backup", "end"])
def test_a_step_without_an_update(agent: AgentSide, call: str) -> None:
    agent.join(has_local_copy=call == "backup")
    agent.step(4)
    match call:
        case "pause":
            interface.tft_pause_train(5)
        case "args":
            interface.ttp_set_ckpt_args((5, "model"))
        case "backup":
            interface.tft_start_updating_os(5)
            interface.tft_end_updating_os(6)
            assert agent.gives == [4, 5, 6]
            return
        case "end":
            agent.step(6)
            assert agent.gives == [5, 6]
            return
    assert agent.gives == [4, 5]
    interface.tft_start_updating_os()
    assert agent.gives == [6]


def test_a_local_copy(agent: AgentSide) -> None:
    agent.join(has_local_copy=True)
    agent.step(4)
    interface.tft_start_copy_os()
    assert agent.gives == [4, 5]
    assert (
        agent.worker.session.freezer.freeze(0.0) is None
    )  # the copy is in progress and ends with the update
    interface.tft_start_updating_os(4)
    assert (agent.board.phase_name, agent.gives) == ("UPDATING", [4, 5])
    with pytest.raises(BlockedError):
        interface.tft_end_updating_os(5)
    assert agent.gives == [4, 5]


@pytest.mark.parametrize("backup", [-1, 3], ids=["none", "an-older-one"])
def test_an_update_without_a_copy(agent: AgentSide, backup: int) -> None:
    agent.join(has_local_copy=True)
    agent.step(4)
    interface.tft_start_updating_os(backup)
    assert agent.gives == [5]


def test_an_exception_while_copying_leaves_the_state_intact(agent: AgentSide) -> None:
    agent.join(has_local_copy=True)
    agent.step(4)
    interface.tft_start_copy_os()
    agent.worker.raised("no memory", 1)
    assert (agent.board.phase_name, agent.gives) == ("RUNNING", [4])
    assert agent.worker.session.freezer.freeze(0.0) is not None


def test_the_optimizer_of_the_older_form(agent: AgentSide) -> None:
    calls: list[tuple[str, str]] = []

    class Optimizer(ReplicaOptimizer):
        copies = 0

        def exchange(self) -> None:
            calls.append(("exchange", agent.board.phase_name))

        def update_copies(self) -> None:
            calls.append(("update", agent.board.phase_name))

        def copy_state(self) -> None:
            self.copies += 1
            assert agent.gives[-2:] == [self.current_step, self.current_step + 1]

    optimizer = Optimizer()
    agent.join(has_local_copy=True)
    for iteration in (4, 5):
        optimizer.begin_to_update(iteration)
        optimizer.end_to_update()
    assert (optimizer.current_step, optimizer.copies) == (6, 2)
    # Other ranks are needed only before the door, and a copy is always of the shard's step.
    assert calls == [
        ("exchange", "STARTING"),
        ("update", "UPDATING"),
        ("exchange", "RUNNING"),
        ("update", "UPDATING"),
    ]
    assert agent.gives == [5, 6]
    optimizer.begin_to_update(7)  # one step was skipped
    assert agent.gives == [6, 7, 8]
    # Whatever the outcome of this update: step 7 is no longer live, but in the copy.
    assert optimizer.current_step == 8
    assert not optimizer.error_dump
    optimizer.set_dump_args(2, 6, [2, 1])
    assert (optimizer.error_dump, optimizer.save_args) == (True, {"step": 6, "rank": 2, "rank_list": [2, 1]})


def test_the_main_thread_is_kept_where_the_job_saves(agent: AgentSide) -> None:
    agent.join()
    agent.step(4)
    interface.tft_start_updating_os()
    agent.order(Freeze(1))
    waiting.until(lambda: agent.worker.session.door.closed, "it is told that the job saves")
    with pytest.raises(BlockedError):
        interface.tft_end_updating_os(5)
    assert agent.hears(Frozen).board.finished == 5


# what a script may do wrong


def test_calls_in_the_wrong_order(agent: AgentSide) -> None:
    with pytest.raises(ConfigError, match="tft_start_updating_os was called before ttp_init_processor or"):
        interface.tft_start_updating_os()
    with pytest.raises(
        ConfigError, match="tft_set_optimizer_replica was called before ttp_init_processor or"
    ):
        interface.tft_set_optimizer_replica(0, [])
    interface.tft_init_processor(0, 1, False)
    with pytest.raises(
        ConfigError, match="who has copies is not known: call tft_set_optimizer_replica before"
    ):
        interface.tft_end_updating_os(1)
    interface.tft_set_optimizer_replica(0, [{"rank_list": [0], "replica_cnt": 1, "replica_shift": 0}])
    with pytest.raises(
        ConfigError, match="no save handler: call tft_register_save_ckpt_handler before training"
    ):
        interface.tft_end_updating_os(1)
    interface.tft_register_save_ckpt_handler(print)
    agent.step(4)
    with pytest.raises(
        ConfigError, match=r"tft_end_updating_os\(5\) without tft_start_updating_os before it"
    ):
        interface.tft_end_updating_os(5)
    interface.tft_start_updating_os()
    with pytest.raises(
        ConfigError,
        match=r"tft_end_updating_os\(4\): step 4 has ended before, each window has to end a later one",
    ):
        interface.tft_end_updating_os(4)


@pytest.mark.usefixtures("agent")
def test_invalid_values_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigError, match="tft_init_processor: rank 1 of 2, but this process is rank 0 of 1"):
        interface.tft_init_processor(1, 2, False)
    with pytest.raises(ConfigError, match="ttp_init_controller: rank 0 of 4"):
        interface.ttp_init_controller(0, 4)
    interface.tft_init_processor(0, 1, False)
    with pytest.raises(ConfigError, match="rank is 3, but this process is rank 0"):
        interface.tft_set_optimizer_replica(3, [])
    for step in (0, True, "1", None):
        with pytest.raises(ConfigError, match="it must be an integer from 1"):
            interface.tft_end_updating_os(step)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="tft_register_rename_handler: func is None, it must be callable"):
        interface.tft_register_rename_handler(None)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="ttp_register_save_ckpt_handler: func is 1"):
        interface.ttp_register_save_ckpt_handler(1)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="'DeepSpeed' is not known: use MindSpeed or MindSpeed-LLM"):
        interface.set_mindio_export_version("DeepSpeed")
    monkeypatch.setattr(runtime, "_runtime", None)
    with pytest.raises(StartError, match="not started by ttprun"):
        interface.tft_init_processor(0, 1, False)


@pytest.mark.usefixtures("agent")
@pytest.mark.parametrize(
    ("call", "message"),
    [
        (
            lambda: interface.tft_init_processor(0, 1, False, enable_arf=True),
            r"tft_init_processor(enable_arf=True)",
        ),
        (
            lambda: interface.tft_init_controller(0, 1, False, enable_zit=True),
            r"tft_init_controller(enable_zit=True)",
        ),
        (lambda: interface.tft_get_repair_step(), "tft_get_repair_step"),
        (
            lambda: interface.tft_notify_controller_stop_train({0: 1}, "stop", timeout=1),
            "tft_notify_controller_stop",
        ),
        (lambda: interface.tft_report_error(ReportState.RS_STEP_FINISH), "tft_report_error(RS_STEP_FINISH)"),
    ],
)
def test_unsupported_calls_are_refused(call: Callable[[], Any], message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        call()
    assert str(caught.value).startswith(message)
    assert "repairs nothing in place and follows no MindX; leave out what calls this" in str(caught.value)


def test_unused_handlers_are_reported_once(agent: AgentSide, capsys: pytest.CaptureFixture[str]) -> None:
    interface.tft_register_repair_handler(print)
    interface.tft_register_exception_handler("PRECISION ERROR", "RS_RETRY", print)
    agent.join()
    agent.step(1)
    agent.step(2)
    assert capsys.readouterr().out == (
        "[ttp] these handlers are never called, because nothing is repaired in place:"
        " tft_register_repair_handler, tft_register_exception_handler\n"
    )


def test_questions_about_repair_have_true_answers() -> None:
    assert interface.tft_is_reboot_node() is False
    assert interface.tft_can_do_uce_repair(12) is False
    assert interface.tft_get_repair_type() == "dump"


# exceptions


def test_an_exception_of_the_training_is_reported_and_the_process_stays(agent: AgentSide) -> None:
    agent.join()
    agent.step(4)

    def train(*args: Any) -> None:
        assert agent.job.handlers.args == ["model", "optimizer"] == list(args)
        raise ValueError("no such token")

    with pytest.raises(BlockedError):
        interface.tft_exception_handler(train)("model", "optimizer")
    raised = agent.hears(Raised)
    assert (raised.rank, raised.error, raised.exit_code) == (0, "ValueError: no such token", 1)
    assert (raised.origin.kind, raised.origin.finished) == ("ValueError", 4)
    assert agent.gives == [4]


def test_an_exception_before_the_script_has_given_its_rank(agent: AgentSide) -> None:
    def train() -> None:
        raise ValueError("no such file")

    with pytest.raises(ValueError, match="no such file"):
        interface.ttp_to_persist(train)()


def test_refusals_and_clean_exits_are_raised_unchanged(agent: AgentSide) -> None:
    agent.join()
    for error in (ConfigError("wrong"), SystemExit(0)):

        def train(error: BaseException = error) -> None:
            raise error

        with pytest.raises(type(error)):
            interface.ttp_to_persist(train)()
    assert interface.ttp_to_persist(lambda: 3)() == 3


def test_frameworks_with_handlers_that_take_the_training_arguments(agent: AgentSide) -> None:
    agent.join()
    interface.set_mindio_export_version("MindSpeed-LLM")
    interface.tft_set_step_args("ignored")
    interface.tft_exception_handler(lambda *args: None)("model", 1)
    assert agent.job.handlers.args == ("model", 1)
    assert interface.get_mindio_export_version() == "MindSpeed-LLM"


def test_a_fault_that_the_script_reports(agent: AgentSide) -> None:
    agent.join()
    agent.step(4)
    interface.tft_report_error(ReportState.RS_NORMAL)
    with pytest.raises(BlockedError):
        interface.tft_report_error(ReportState.RS_UNKNOWN.value, "507")
    assert agent.hears(Raised).error == "RS_UNKNOWN 507"
    with pytest.raises(BlockedError):
        interface.tft_wait_next_action()


@pytest.mark.parametrize("reported", [True, False])
def test_damaged_memory_is_not_saved(
    agent: AgentSide, reported: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    def leave(code: int) -> None:
        raise SystemExit(code)

    monkeypatch.setattr("adaptor.output.os._exit", leave)
    agent.join()

    def train() -> None:
        raise RuntimeError("EZ9999: UCE ERROR occurred")

    with pytest.raises(SystemExit, match="1"):
        interface.tft_report_error(ReportState.RS_UCE) if reported else interface.tft_exception_handler(
            train
        )()


# a dump


def test_a_dump(agent: AgentSide, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TTP_STOP_CLEAN_BEFORE_DUMP", "1")
    calls: list[Any] = []
    agent.join(save=lambda *args: calls.append(("save", *args)))
    interface.tft_register_rename_handler(lambda *args: calls.append(("rename", *args)))
    interface.tft_register_stop_handler(lambda *args: calls.append(("stop", *args)), 1)
    interface.tft_register_clean_handler(lambda *args: calls.append(("clean", *args)), 2)
    interface.tft_register_exit_handler(lambda *args: calls.append(("exit", *args)), 3)
    agent.step(4)
    interface.tft_set_step_args("args")
    agent.order(Freeze(1))
    assert agent.hears(Frozen).board.finished == 4
    agent.order(agent.dump(4))
    assert agent.hears(Written) == Written(0, 1, 1, GROUP, ())
    agent.order(Rename(1, 4))
    assert agent.hears(Renamed) == Renamed(0, 1, "")
    assert calls == [
        ("stop", "args", 1),
        ("clean", False, "args", 2),
        ("save", 4, [{"type": 0, "ranks": [0]}], "args", "ctx"),
        ("rename", 4, "args"),
    ]
    agent.order(Exit(1))
    assert agent.exited.wait(LONG_S)
    assert calls[4:] == [("exit", 3)]


def test_handlers_are_called_when_the_main_thread_stands_still(
    agent: AgentSide, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After its update and before a collective the main thread changes counters that the handlers read."""
    monkeypatch.setattr(job_module, "REST_S", LONG_S)
    woken = threading.Event()
    monkeypatch.setattr(
        processor_module.abort_collectives, "shut_collectives", lambda keep, inodes: woken.set()
    )
    order: list[str] = []
    agent.join(save=lambda *args: order.append("save"))
    agent.step(4)

    def train() -> None:
        agent.order(Freeze(1))
        agent.order(agent.dump(4))
        assert woken.wait(LONG_S)
        order.append("count")
        raise RuntimeError("Connection closed by peer")

    with pytest.raises(BlockedError):
        interface.tft_exception_handler(train)()
    assert agent.hears(Written).attempt == 1
    assert order == ["count", "save"]


def test_a_handler_that_raises(agent: AgentSide) -> None:
    def save(*args: Any) -> None:
        raise OSError("no space left")

    def rename(*args: Any) -> None:
        raise FileExistsError("iter_4")

    agent.join(save=save)
    interface.tft_register_rename_handler(rename)
    agent.step(4)
    agent.order(Freeze(1))
    agent.order(agent.dump(4))
    assert agent.hears(WriteFailed).reason == "OSError: no space left"
    agent.order(Rename(1, 4))
    assert agent.hears(Renamed) == Renamed(0, 1, "FileExistsError: iter_4")


def test_calls_of_the_handler_do_not_overlap(agent: AgentSide, monkeypatch: pytest.MonkeyPatch) -> None:
    """The first call hangs in a collective with a lost rank until it is woken."""
    woken, entered = threading.Event(), threading.Event()
    steps: list[str] = []

    def save(*args: Any) -> None:
        steps.append("in")
        if len(steps) == 1:
            entered.set()
            assert woken.wait(LONG_S)
            steps.append("out")
            raise RuntimeError("Connection closed by peer")

    agent.join(save=save)
    agent.step(4)
    monkeypatch.setattr(
        processor_module.abort_collectives,
        "shut_collectives",
        lambda keep, inodes: entered.is_set() and woken.set(),
    )
    agent.order(Freeze(1))
    agent.order(agent.dump(4))
    assert entered.wait(LONG_S)
    agent.order(agent.dump(4, attempt=2))
    assert agent.hears(Written).attempt == 2
    assert steps == ["in", "out", "in"]
