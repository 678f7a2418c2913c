"""Jobs that are not started again: their training is over, or their script cannot begin to train."""

from __future__ import annotations

import re
import textwrap
from pathlib import Path

import pytest

from tests.unit.launching import TWO, Launcher, launcher, starts, zygote

__all__ = ["launcher", "zygote"]

# Two ranks that hold the same shard; what a script does behind its training comes last.
TRAINS = """
import atexit, json, os, signal, sys, threading
from pathlib import Path
from adaptor.protocol.messages import Share, ScriptStage
from adaptor.worker import runtime
from tests import waiting
from tests.unit.trainee import CountingTrainee, Loop

print("start", flush=True)
here, rank = Path.cwd(), os.environ["RANK"]
session = runtime.get().session
loop = Loop(session, CountingTrainee(str(here), (Share("g", 0, 1),)))
loop.begin(0)
for step in range(1, 4):
    loop.step(step)
"""
# The agent may read the layouts of all ranks later than they finish these short steps.
AGENT_HAS_LAYOUTS = """
states = lambda: [json.loads(file.read_bytes())["state"] for file in here.glob("logs/*/status.json")]
waiting.until(lambda: "training" in states(), "the agent has the layouts of all ranks")
"""
# As behind `pretrain`: the last save is done on every rank.
FINISHED = f"""
session.end_training()
session.board.reach(ScriptStage.FINISHED)
(here / f"finished{{rank}}").touch()
waiting.exist(here / "finished0", here / "finished1")
{AGENT_HAS_LAYOUTS}
"""


@pytest.mark.parametrize(
    ("ending", "cause"),
    [
        ("if rank == '1': atexit.register(os.kill, os.getpid(), signal.SIGSEGV)", "SIGSEGV after its script"),
        ("if rank == '1': os.abort()", "SIGABRT"),
        ("if rank == '1': os._exit(0)", "exited with code 0 before its script had ended"),
    ],
    ids=["teardown", "last-call", "left-by-itself"],
)
def test_a_death_behind_a_finished_training(ending: str, cause: str, launcher: Launcher) -> None:
    result = launcher.run(*TWO, "--max-restarts", "3", launcher.script(TRAINS + FINISHED + ending))
    assert (result.code, starts(result)) == (0, 2), result.log
    (line,) = [line for line in result.log.splitlines() if line.startswith("[ttp] rank 1 ")]
    assert cause in line
    assert line.endswith("; nothing to save: the training was over")
    assert "the job has come to its end, 1 incident, 0 steps lost" in result.last_line


# Rank 0 is still at work when it is asked where it stands, and in an exit function.
EXPORTS = """
waiting.until(lambda: session.door.closed, "the incident")
threading.Event().wait(1.0)
(here / "export").touch()
def upload():
    threading.Event().wait(1.0)
    (here / "upload").touch()
atexit.register(upload)
"""


def test_others_come_to_their_ends_after_a_death(launcher: Launcher, tmp_path: Path) -> None:
    ending = f"if rank == '1': os.abort()\n{EXPORTS}"
    result = launcher.run(*TWO, "--max-restarts", "3", launcher.script(TRAINS + FINISHED + ending))
    assert (result.code, starts(result)) == (0, 2), result.log
    assert (tmp_path / "export").exists()
    assert (tmp_path / "upload").exists()
    assert "rank 1 was ended by SIGABRT; the training was over; rank 0 has up to " in result.log


@pytest.mark.parametrize(
    ("last", "code", "cause"),
    [("sys.exit(7)", 7, "raised SystemExit: 7"), ("os.abort()", 134, "was ended by SIGABRT")],
    ids=["exception", "death"],
)
def test_a_rank_that_does_not_end_behind_a_finished_training(
    last: str, code: int, cause: str, launcher: Launcher
) -> None:
    ending = f"if rank == '1': {last}\nthreading.Event().wait(600)"
    script = launcher.script(TRAINS + FINISHED + ending)
    result = launcher.run(*TWO, "--max-restarts", "3", "--ttp-ot", "10", script)
    assert (result.code, starts(result)) == (code, 2), result.log
    assert re.search(
        rf"^\[ttp\] rank 1 {cause}; nothing to save: the training was over; rank 0 was cut off"
        r" \d+ s later \(TTP_OT\); not started again: nothing is left to train",
        result.last_line,
    ), result.log


def test_a_death_while_another_rank_still_saves(launcher: Launcher) -> None:
    """The last save of the framework may not be whole: all ranks start again, and find what was saved."""
    ending = f"""
if os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":
    (here / f"trained{{rank}}").touch()
    waiting.exist(here / "trained0", here / "trained1")
{textwrap.indent(AGENT_HAS_LAYOUTS, "    ")}
    if rank == "1":
        session.board.reach(ScriptStage.FINISHED)
        os.abort()
    threading.Event().wait(600)
"""
    result = launcher.run(*TWO, "--max-restarts", "1", launcher.script(TRAINS + ending))
    assert (result.code, starts(result)) == (0, 4), result.log
    assert "rank 1 was ended by SIGABRT; step 3 is saved, no finished step is lost" in result.log


@pytest.mark.parametrize(
    ("error", "code", "expected_starts"),
    [("OSError('Stale file handle')", 0, 4), ("ValueError('unknown metric')", 1, 2)],
    ids=["may-pass", "lasting"],
)
def test_an_exception_in_the_last_evaluation(
    error: str, code: int, expected_starts: int, launcher: Launcher
) -> None:
    ending = f"""
session.end_training()
session.board.reach(ScriptStage.TRAINED)
start = os.environ["TORCHELASTIC_RESTART_COUNT"]
(here / f"trained{{start}}.{{rank}}").touch()
waiting.exist(here / f"trained{{start}}.0", here / f"trained{{start}}.1")
if start == "0":
{textwrap.indent(AGENT_HAS_LAYOUTS, "    ")}
    if rank == "1":
        raise {error}
    threading.Event().wait(600)
"""
    result = launcher.run(*TWO, "--max-restarts", "1", launcher.script(TRAINS + ending))
    assert (result.code, starts(result)) == (code, expected_starts), result.log
    assert "step 3 is saved, no finished step is lost" in result.log
    assert ("not started again: nothing is left to train" in result.log) is (expected_starts == 2)


# A thread on one rank, a child process on the other.
KEPT = """
import multiprocessing, time
if rank == "1":
    threading.Thread(target=threading.Event().wait, name="uploader").start()
else:
    multiprocessing.get_context("fork").Process(target=time.sleep, args=(600,), name="exporter").start()
"""


def test_threads_and_children_that_keep_an_ended_script_alive(launcher: Launcher) -> None:
    script = launcher.script(TRAINS + FINISHED + KEPT)
    result = launcher.run(*TWO, "--max-restarts", "1", "--ttp-ot", "10", script)
    assert (result.code, starts(result)) == (0, 2), result.log
    for rank, keeps in ((0, r"the process exporter \(pid \d+\)"), (1, "the thread uploader")):
        line = rf"^\[ttp\] rank {rank}: its script ended 10 s ago \(TTP_OT\), and {keeps} keeps the process"
        assert re.search(line, result.log, re.MULTILINE), result.log


# The first exception ends the job 2 s later: by then every rank has come so far.
BOTH_START = """
import os
from pathlib import Path
from tests import waiting
print("start", flush=True)
Path("here" + os.environ["RANK"]).touch()
waiting.exist(Path("here0"), Path("here1"))
"""
MISMATCH = "assert 320 == 240, 'class input value 320 and checkpoint value 240 do not match'"


def test_an_exception_of_all_ranks_before_training(launcher: Launcher) -> None:
    result = launcher.run(*TWO, "--max-restarts", "3", launcher.script(BOTH_START + MISMATCH))
    assert (result.code, starts(result)) == (1, 2), result.log
    assert "raised AssertionError: class input value 320 and checkpoint value 240 do not" in result.last_line
    assert result.last_line.endswith(
        "; not started again: every rank has raised AssertionError at script.py:8 before training"
    ), result.log


@pytest.mark.parametrize(
    ("failing_code", "expected_starts"),
    [
        (f"if os.environ['RANK'] == '1': {MISMATCH}\nthreading.Event().wait(600)", 4),
        ("raise OSError('Stale file handle')", 6),
    ],
    ids=["of-one-rank", "of-the-system"],
)
def test_an_exception_before_training_that_comes_again(
    failing_code: str, expected_starts: int, launcher: Launcher
) -> None:
    script = launcher.script(f"import threading\n{BOTH_START}{failing_code}\n")
    result = launcher.run(*TWO, "--max-restarts", "5", script)
    assert (result.code, starts(result)) == (79, expected_starts), result.log
    assert f"came {expected_starts // 2} times before training without a newer checkpoint" in result.last_line
