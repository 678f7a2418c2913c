"""The progress of a rank's new process as the agent measures it: CPU time of the main thread."""

from __future__ import annotations

import asyncio
import subprocess
import sys
from collections.abc import Callable
from typing import Any
from unittest.mock import Mock

from adaptor.launchers.agent import processes
from adaptor.launchers.spares.replacements import Replacements
from adaptor.protocol.messages import Replace, Starting


class _Clock:
    """Workers of which only the CPU time of their main threads is known, and when an old process ends."""

    def __init__(self) -> None:
        self.ticks = {1: 0, 2: 0}
        self.old_ends = asyncio.Event()

    def ticks_of(self, rank: int) -> int:
        return self.ticks[rank]

    async def replace(self, rank: int, start: Callable[[], object]) -> None:
        await self.old_ends.wait()
        self.ticks[rank] = 0
        start()


def test_a_new_process_that_uses_cpu_time_is_reported() -> None:
    """A main thread that waits, and looks again and again whether the wait is over, uses less."""
    clock: Any = _Clock()
    replacements = Replacements(clock, 0)
    starter: Any = None
    replacements.begin(starter, newcomers=[1, 2])
    clock.ticks = {1: 7, 2: 1}
    assert replacements.starting() == [Starting(1, 7)]
    clock.ticks = {1: 8, 2: 2}
    assert replacements.starting() == []
    replacements.end_incident()
    clock.ticks = {1: 100, 2: 100}
    assert replacements.starting() == []


async def test_the_cpu_time_of_a_process_that_is_replaced_is_not_that_of_the_new_one() -> None:
    """The agent looks while it still ends the old process, which has trained for long."""
    clock: Any = _Clock()
    replacements, starter = Replacements(clock, 0), Mock()
    replacements.begin(starter)
    clock.ticks = {1: 5000}
    replaced = asyncio.create_task(replacements.replace(Replace(1, 1, 1), lambda: True))
    await asyncio.sleep(0)
    assert replacements.starting() == []
    clock.old_ends.set()
    assert await replaced is None
    clock.ticks = {1: 7}
    assert replacements.starting() == [Starting(1, 7)]


def test_the_cpu_time_of_other_threads_is_not_that_of_the_main_thread() -> None:
    code = (
        "import sys, threading, time\n"
        "def work():\n"
        "    while time.thread_time() < 0.3: pass\n"
        "work() if sys.argv[1] == 'main' else None\n"
        "thread = threading.Thread(target=work); thread.start(); thread.join()\n"
        "print(flush=True); sys.stdin.read()\n"
    )
    ticks = {}
    for thread_name in ("main", "other"):
        command = [sys.executable, "-S", "-c", code, thread_name]
        with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
            assert process.stdout is not None
            process.stdout.readline()
            ticks[thread_name] = processes.main_thread_ticks(process.pid)
            process.communicate()
    assert ticks["main"] >= ticks["other"] + 20
