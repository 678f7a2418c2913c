"""A hanging job as its agent sees it: exceptions to the rule, and the stacks before a rank is ended."""

from __future__ import annotations

import asyncio
import ctypes
import os
import re
from pathlib import Path

import pytest
import torch

from adaptor.controller import freeze
from adaptor.launchers.agent import processes, worker_watch
from adaptor.launchers.agent import worker_processes as workers_module
from adaptor.launchers.agent.processes import StackCollector
from adaptor.launchers.agent.worker_processes import Workers
from adaptor.protocol.messages import BusyReport, Freeze, NodeStalled
from adaptor.worker import stacks
from tests import waiting
from tests.unit.nodes import Job, job, stop
from tests.unit.threads import LONG_S

__all__ = ["job"]

FIRST = 11
_PTRACE_SEIZE, _PTRACE_DETACH = 0x4206, 17


def _hang(job: Job, monkeypatch: pytest.MonkeyPatch) -> tuple[dict[str, str], list[int]]:
    """Rank 0 is in a collective, rank 1 holds the interpreter lock, rank 2 is stopped: return the stacks
    written when the first rank is ended, and the ranks alive then."""
    # py-spy takes a second, ten on a very busy machine. The other two limits are used up: two
    # ranks neither answer nor exit; the third does, slowly: 6 s after py-spy, and 6 s to exit.
    monkeypatch.setattr(processes, "LOOK_S", 10.0)
    monkeypatch.setattr(freeze, "HANG_ANSWER_S", 16.0)
    monkeypatch.setattr(worker_watch, "EXIT_GRACE_S", 6.0)
    stacks_then: dict[str, str] = {}
    alive_then: list[int] = []
    end_the_living = Workers.end_the_living

    def ends(workers: Workers) -> None:
        stacks_then.update({path.name: path.read_text() for path in job.logs.glob("stacks-*/*")})
        alive_then.extend(workers.alive)
        end_the_living(workers)

    monkeypatch.setattr(Workers, "end_the_living", ends)
    job.begin(3)
    job.train("step")
    job.workers[0].wait_at_the_door()
    job.workers[1].send("hold")
    assert job.workers[1].read_line() == "holding"
    stop(job.workers[2].process.pid)
    node = job.nodes[0]
    node.control.thread.wait_for(node.control.say(NodeStalled(0, 60.0, FIRST, -1)))
    verdict = job.verdict()
    assert (verdict.outcome, verdict.step, verdict.cause_rank) == ("saved", FIRST + 1, 1)
    assert verdict.line.startswith("nothing has moved for 60 s: ranks 1 and 2 do not answer; ")
    return stacks_then, alive_then


def test_everyone_s_stacks_are_written_before_anyone_is_ended(
    job: Job, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A rank writes its stacks itself or on a signal, or the reason is reported."""
    monkeypatch.setattr(processes, "find_py_spy", lambda: None)
    texts, alive = _hang(job, monkeypatch)
    assert alive == [1, 2], "who has answered has left by itself"
    assert sorted(texts) == ["rank0.txt", "rank1.txt", "rank2.txt"]
    assert re.search(r'worker_script.py", line \d+ in collective', texts["rank0.txt"])
    assert re.search(r'worker_script.py", line \d+ in main', texts["rank1.txt"])
    assert re.search(r'fault.py", line \d+ in hold_the_interpreter_lock', texts["rank1.txt"])
    assert texts["rank2.txt"] == "Nothing was written. State: T (stopped)\n"


@pytest.mark.skipif(processes.find_py_spy() is None, reason="py-spy is not installed")
def test_native_frames_where_py_spy_is_installed(job: Job, monkeypatch: pytest.MonkeyPatch) -> None:
    """Taken at the moment of the hang: the incident wakes a rank that hangs in a collective."""
    written_before: list[Path] = []
    look = StackCollector.look

    async def looks(watching: StackCollector, processes: dict[int, int]) -> None:
        await look(watching, processes)
        written_before.extend(job.logs.glob("stacks-*/rank?.txt"))

    monkeypatch.setattr(StackCollector, "look", looks)
    texts, _ = _hang(job, monkeypatch)
    assert written_before == [], "a worker writes as soon as it is asked"
    native = {rank: texts[f"rank{rank}.native.txt"] for rank in range(3)}
    if any("ermission" in text for text in native.values()):
        pytest.skip("this user may not trace processes")
    assert "collective (" in native[0]
    assert "main (" in native[1]
    for rank in (0, 1):
        assert re.search(r"(0x[0-9a-f]+|\w+) \(\S*\.so", native[rank]), native[rank]
    assert "main (" in native[2], "of one that is stopped there are those of Python"


def test_a_debugger_in_a_worker_takes_its_time(job: Job, monkeypatch: pytest.MonkeyPatch) -> None:
    """pdb in the middle of a step; after pdb is left, no progress counts as a hang."""
    answers: list[bool] = []
    asks = Workers.are_busy

    async def asks_and_tells(workers: Workers) -> bool:
        answers.append(await asks(workers))
        return answers[-1]

    monkeypatch.setattr(Workers, "are_busy", asks_and_tells)
    monkeypatch.setattr(workers_module, "LOOKED_S", LONG_S)
    job.begin(1, [job.node(TTP_HANG="1")])
    job.train("step")
    job.workers[0].send("debug")
    for line in ("> ", "-> "):  # pdb prints its position
        assert job.workers[0].read_line().startswith(line)
    job.workers[0].send("board.enter(step + 1)")
    waiting.until(lambda: len(answers) >= 2, "it has been asked twice")
    assert all(answers)
    assert job.nodes[0].control.verdict is None
    job.workers[0].send("continue")
    verdict = job.verdict()
    assert answers[-1] is False
    assert verdict.line.startswith("nothing has moved for ")
    assert verdict.step == FIRST


def test_a_debugger_outside_of_a_worker_is_seen(job: Job) -> None:
    job.begin(2)
    workers, pid = job.nodes[0].control.workers, job.workers[1].process.pid
    libc = ctypes.CDLL(None, use_errno=True)
    assert not workers.traced
    if libc.ptrace(_PTRACE_SEIZE, pid, None, None):
        pytest.skip(f"this user may not trace processes: {os.strerror(ctypes.get_errno())}")
    assert workers.traced
    job.workers[1].process.kill()  # a running process cannot be detached from
    waiting.until(lambda: job.nodes[0].control.verdict is not None, "its death is known")
    assert not workers.traced


def test_a_compiler_takes_its_time() -> None:
    busy: list[bool] = []

    def look(*_: object) -> None:
        busy.append(stacks.busy())

    def backend(graph: torch.fx.GraphModule, inputs: object) -> object:
        look()

        def compiled(*tensors: torch.Tensor) -> object:
            look()
            return graph.forward(*tensors)

        return compiled

    look()
    compiled = torch.compile(lambda x: x + 1, backend=backend)
    for _ in range(2):
        assert compiled(torch.ones(2)).tolist() == [2.0, 2.0]
    assert busy == [False, True, False, False], "not before, in the compiler, and what it has made"


def test_a_rank_that_dies_while_asked_does_not_block_the_answers() -> None:
    async def ask() -> bool:
        workers = Workers(asyncio.get_running_loop(), lambda message: None)
        workers.alive = {0, 1, 2}
        answer = asyncio.ensure_future(workers.are_busy())
        await asyncio.sleep(0)
        workers.alive.discard(2)
        for rank in (0, 1):
            workers._looked.put_nowait(BusyReport(rank, rank == 1))
        return await answer

    assert asyncio.run(ask())


def test_no_process_is_inspected_after_the_end_of_its_generation(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The generation may end during the inspection; the next generation has its own messages."""
    looked: list[dict[int, int]] = []

    async def end() -> Workers:
        over = asyncio.Event()

        async def look(_: StackCollector, processes: dict[int, int]) -> None:
            looked.append(processes)
            await over.wait()

        monkeypatch.setattr(StackCollector, "look", look)
        workers = Workers(asyncio.get_running_loop(), lambda message: None)
        workers.watch({}, tmp_path, tmp_path)
        for rank in range(2):
            workers.order(rank, Freeze(1, stacks=True))
        await asyncio.sleep(0)
        ending = asyncio.ensure_future(workers.end())
        await asyncio.sleep(0)
        over.set()
        await ending
        await asyncio.sleep(0)
        return workers

    workers = asyncio.run(end())
    assert len(looked) == 1
    assert workers._look is None
    assert workers._held_back is None
