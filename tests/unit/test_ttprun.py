"""ttprun from the outside: how a job ends, its exit code, restarts and signals."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import socket
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from tests import waiting
from tests.ports import free_port
from tests.unit.launching import (
    ONE,
    TWO,
    WAIT,
    Launcher,
    interrupted_in_import,
    launcher,
    run_here,
    says_all,
    starts,
    zygote,
)
from tests.unit.nodes import is_gone, open_descriptors, stop
from tests.unit.threads import LONG_S

__all__ = ["launcher", "zygote"]


def test_ctrl_c_before_anything_was_started(launcher: Launcher) -> None:
    while_torch_is_imported = (
        "import signal\n"
        "from adaptor.launchers.cli import flags\n"
        # A shell may have had it ignored.
        "signal.signal(signal.SIGINT, signal.default_int_handler)\n"
        "flags.parse = lambda arguments: signal.raise_signal(signal.SIGINT)\n"
    )
    result = launcher.run(*ONE, launcher.script("print('started')"), prelude=while_torch_is_imported)
    line = "[ttp] ended by SIGINT, before anything was started\n"
    assert (result.code, result.log) == (128 + signal.SIGINT, line)


@pytest.mark.parametrize("module", ["adaptor.launchers.cli.ttprun", "asyncio", "torch"])
def test_ctrl_c_while_the_launcher_is_imported(module: str, tmp_path: Path) -> None:
    program = interrupted_in_import("adaptor.launchers.cli.entry", module)
    completed = run_here(tmp_path, sys.executable, "-c", program)
    line = "[ttp] ended by SIGINT, before anything was started\n"
    assert (completed.returncode, completed.stdout, completed.stderr) == (128 + signal.SIGINT, "", line)


BY_RANK = "import os, signal, sys\nif os.environ['RANK'] == '{rank}':\n    {what}\n{rest}\n"


@pytest.mark.parametrize(
    ("failing_code", "code", "cause"),
    [
        ("sys.exit(3)", 3, "rank 1 raised SystemExit: 3"),
        ("sys.exit(16)", 16, "rank 1 raised SystemExit: 16"),  # of Megatron-LM's --rerun-mode, as 17
        ("os._exit(4)", 4, "rank 1 exited with code 4"),
        ("os.kill(os.getpid(), signal.SIGKILL)", 137, "rank 1 was ended by SIGKILL"),
        ("os.kill(os.getpid(), signal.SIGSEGV)", 139, "rank 1 was ended by SIGSEGV"),
        ("sys.exit('two\\nlines')", 1, "rank 1 raised SystemExit: two"),
        ("raise ValueError('two\\nlines')", 1, "rank 1 raised ValueError: two"),
        ("raise ValueError", 1, "rank 1 raised ValueError ({script}, line 3)"),
    ],
)
def test_a_job_ends_with_the_code_of_the_worker_that_failed(
    launcher: Launcher, failing_code: str, code: int, cause: str
) -> None:
    script = launcher.script(BY_RANK.format(rank=1, what=failing_code, rest=WAIT))
    result = launcher.run(*TWO, script, code=code)
    outcome = "nothing to save: no step has finished since this start: training had not begun on every rank"
    assert result.last_line == f"[ttp] {cause.format(script=launcher.folder / script)}; {outcome}"
    if "two" in failing_code:
        assert "lines" in result.log, "all of it is said before"


def test_a_note_on_an_exception_is_not_the_exception(launcher: Launcher) -> None:
    failing_code = "e = ValueError('boom'); e.__notes__ = ['a note']; raise e"
    result = launcher.run(*ONE, launcher.script(BY_RANK.format(rank=0, what=failing_code, rest="")))
    assert result.last_line.startswith("[ttp] rank 0 raised ValueError: boom; ")


def test_a_restart(launcher: Launcher) -> None:
    script = launcher.script(
        "import os, sys\n"
        "count = os.environ['TORCHELASTIC_RESTART_COUNT']\n"
        "print(f'start {count} of {os.environ[\"TTP_GENERATION\"]}', flush=True)\n"
        "sys.exit(0 if count == '2' else 5)\n"
    )
    result = launcher.run(*ONE, "--max-restarts", "3", script, code=0)
    starts = [line for line in result.log.splitlines() if line.startswith("start ")]
    assert [line.split()[1] for line in starts] == ["0", "1", "2"]
    assert len({line.split()[3] for line in starts}) == 3, "each generation has keys of its own"
    assert result.log.count("[ttp] rank 0 raised SystemExit: 5") == 2


TRAINS = """
import os
from adaptor.worker import runtime
from adaptor.protocol.messages import Share
from tests.unit.trainee import CountingTrainee, Loop
from adaptor.checkpoint import tracker
from pathlib import Path
print("start", flush=True)
here = Path.cwd()
step = tracker.tracked_step(here) or 0
loop = Loop(runtime.get().session, CountingTrainee(str(here), (Share("g", 0, 1),)))
loop.begin(step)
while step < 9:
    step += 1
    {what}
    loop.step(step)
"""


@pytest.mark.robustness(
    "A3",
    "the same ValueError in the same step at each start, ten restarts",
    "the third time ends the job, with exit code 79, and the last line says so",
)
def test_a_fault_that_comes_again_and_again(launcher: Launcher) -> None:
    script = launcher.script(TRAINS.format(what="if step == 8: raise ValueError('bad sample')"))
    result = launcher.run(*ONE, "--max-restarts", "10", script)
    assert (result.code, starts(result)) == (79, 3), result.log
    stop = "ValueError at script.py:15 came 3 times after step 7 without a newer checkpoint (TTP_NO_PROGRESS)"
    assert f"; not started again: {stop}; the newest checkpoint in " in result.last_line
    assert result.last_line.startswith("[ttp] rank 0 raised ValueError: bad sample; nothing to save: ")


@pytest.mark.robustness("A3", "the same signal in the same step at each start", "the third time ends the job")
def test_a_signal_that_comes_again_and_again(launcher: Launcher) -> None:
    script = launcher.script(TRAINS.format(what="if step == 8: os.kill(os.getpid(), 11)"))
    result = launcher.run(*ONE, "--max-restarts", "10", script)
    assert (result.code, starts(result)) == (79, 3), result.log
    assert "; not started again: SIGSEGV came 3 times after step 7 without a newer " in result.last_line


@pytest.mark.robustness("A3", "a fault in a later step at each start", "all restarts are used")
def test_a_job_that_makes_progress_uses_its_restarts(launcher: Launcher) -> None:
    failing_code = "if step == 2 * (1 + int(os.environ['TORCHELASTIC_RESTART_COUNT'])): raise ValueError"
    result = launcher.run(*ONE, "--max-restarts", "5", launcher.script(TRAINS.format(what=failing_code)))
    assert (result.code, starts(result)) == (0, 5), result.log


def test_as_often_as_one_likes(launcher: Launcher) -> None:
    script = launcher.script("print('start', flush=True)\nraise ValueError\n")
    result = launcher.run(*ONE, "--max-restarts", "4", "--ttp-no-progress", "0", script)
    assert (result.code, starts(result)) == (1, 5), result.log


# The first that fails ends the other, which may not have come so far.
BOTH_START = """
import os
from pathlib import Path
from tests import waiting
print("start", flush=True)
Path("here" + os.environ["RANK"]).touch()
waiting.exist(Path("here0"), Path("here1"))
"""


@pytest.mark.robustness(
    "A3",
    "arguments that argparse refuses, a module that is missing, a syntax error, no NVIDIA driver",
    "no second start; one last line",
)
@pytest.mark.parametrize(
    ("mistake", "code"),
    [
        ("import argparse; argparse.ArgumentParser().parse_args(['--wings'])", 2),
        ("import no_such_module", 1),
        ("from os import no_such_name", 1),
        ("exec('x =')", 1),
        ("raise RuntimeError('Found no NVIDIA driver on your system. Please check')", 1),
    ],
    ids=["arguments", "import", "name", "syntax", "driver"],
)
def test_a_mistake_is_not_tried_again(mistake: str, code: int, launcher: Launcher) -> None:
    result = launcher.run(*TWO, "--max-restarts", "3", launcher.script(f"{BOTH_START}{mistake}\n"), code=code)
    assert starts(result) == 2, "once on each rank"
    assert result.last_line.endswith("; not started again: another start would fail in the same way"), (
        result.log
    )


def test_a_failed_import_after_a_good_start_is_no_mistake(launcher: Launcher) -> None:
    """An unavailable file system looks like a missing module."""
    script = launcher.script(
        "import os, sys\n"
        "print('start', flush=True)\n"
        "count = os.environ['TORCHELASTIC_RESTART_COUNT']\n"
        "if count == '0': os._exit(3)\n"
        "if count == '1': import no_such_module\n"
    )
    result = launcher.run(*ONE, "--max-restarts", "3", script)
    assert (result.code, starts(result)) == (0, 3), result.log


# A script may end before its agent has heard that it trains; the last restart has no line then.
IS_SEEN = """
from tests import waiting
waiting.written(here, lambda: "restart 2 of 3: from step" in Path("log").read_text(), "it is told")
"""


@pytest.mark.robustness(
    "A6",
    "an operator reads the log of a job that has failed twice",
    "time with its zone, host, rank, pid and report of each fault; what each restart and all of it cost",
)
def test_what_an_operator_reads_at_night(launcher: Launcher) -> None:
    count = "int(os.environ['TORCHELASTIC_RESTART_COUNT'])"
    fails = f"if step == 3 * (1 + {count}) < 9: raise ValueError(os.getpid())"
    result = launcher.run(
        *ONE, "--max-restarts", "3", launcher.script(TRAINS.format(what=fails) + IS_SEEN), code=0
    )
    lines = [line for line in result.log.splitlines() if line.startswith("[ttp] ")]
    # The line of the first finished step comes from a worker, before or after that of the restart.
    protected = [line for line in lines if line.startswith("[ttp] protected from step ")]
    protected_lines = [f"[ttp] protected from step {step} (split; any 1 rank)" for step in (1, 3, 6)]
    assert protected == protected_lines, result.log
    # Once, not at each start.
    restarts = (
        "[ttp] online recovery: no (its training loop cannot be called again); a fault restarts all ranks"
    )
    assert lines.count(restarts) == 1, result.log
    lines = [line for line in lines if line not in (*protected, restarts)]
    utc = r"\[ttp\] \d{4}-\d\d-\d\dT\d\d:\d\d:\d\dZ "
    expected = []
    for number, step in ((1, 2), (2, 5)):
        pid = re.findall(r"raised ValueError: (\d+);", result.log)[number - 1]
        report = re.escape(f"{launcher.folder}/logs/") + rf"[\dTZ]+-\d+/incidents/[\dTZ]+-{number}\.json"
        origin = rf"rank 0 \(pid {pid}, host {socket.gethostname()}\)"
        expected += [
            rf"{utc}incident {number}, {origin}, after step {step}, report {report}",
            (
                rf"\[ttp\] rank 0 raised ValueError: {pid}; step {step} is saved, no finished step is lost; "
                "all workers start again"
            ),
            rf"{utc}restart {number} of 3: from step {step}, 0 steps lost, \d+\.\d s after the fault",
        ]
        (path,) = launcher.folder.glob(f"logs/*/incidents/*-{number}.json")
        assert json.loads(path.read_text())["blamed"] == 0
    sums = f"2 incidents, 0 steps lost; reports in {path.parent}"
    expected.append(rf"{utc}the job has come to its end, {re.escape(sums)}")
    assert len(lines) == len(expected), result.log
    assert all(map(re.fullmatch, expected, lines)), result.log
    assert result.last_line == lines[-1]


# A survivor whose collective breaks, in the words of gloo, and another rank that is killed.
ECHO = """
import os, signal
from pathlib import Path
from tests import waiting
if os.environ["RANK"] == "1":
    os.kill(os.getpid(), signal.SIGKILL)
waiting.written(Path(), lambda: list(Path("logs").glob("*.log")), "the agent logs the first fault")
raise RuntimeError("[gloo/transport/tcp/pair.cc:537] Read error: Connection reset by peer. GLHF!")
"""
SHOWS_TORCHS_SUMMARY = """
from torch.distributed import run
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
original = run.run
def shown(parsed):
    try:
        original(parsed)
    except ChildFailedError as error:
        print(error, flush=True)
        raise
run.run = shown
"""


@pytest.mark.robustness(
    "A6",
    "rank 1 is killed, rank 0 survives and raises because of it",
    "torch's summary names rank 1 alone; nothing of rank 0 stands before the verdict",
)
def test_a_survivor_is_no_failure(launcher: Launcher) -> None:
    result = launcher.run(*TWO, launcher.script(ECHO), prelude=SHOWS_TORCHS_SUMMARY, code=137)
    summary = result.log[result.log.index("Failures:") :]
    assert "<NO_OTHER_FAILURES>" in summary
    root = summary[summary.index("Root Cause (first observed failure):") :]
    assert "rank      : 1 (local_rank: 1)" in root
    assert "exitcode  : -9 (pid: " in root
    assert "GLHF" not in result.log, "the report has it"
    assert "failed (exitcode" not in result.log
    assert result.last_line.startswith("[ttp] rank 1 was ended by SIGKILL; ")
    (report,) = launcher.folder.glob("logs/*/incidents/*.json")
    assert json.loads(report.read_text())["blamed"] == 1


def test_a_broken_collective_that_nothing_else_explains_is_shown(launcher: Launcher) -> None:
    failing_code = "raise RuntimeError('[gloo/transport/tcp/pair.cc:537] no route')"
    result = launcher.run(*ONE, launcher.script(failing_code), code=1)
    assert "Traceback (most recent call last):" in result.log
    assert result.last_line.startswith("[ttp] rank 0 raised RuntimeError: [gloo/")


def test_a_death_while_torch_looks_at_its_workers(launcher: Launcher) -> None:
    """A worker dies between the adaptor's look and torch's, which would end the survivors at once."""
    prelude = """
import os, signal
from torch.distributed.elastic.multiprocessing.api import SubprocessContext
original = SubprocessContext._poll
def poll(self):
    if not all(handler.proc.poll() == 0 for handler in self.subprocess_handlers.values()):
        os.kill(self.subprocess_handlers[1].proc.pid, signal.SIGKILL)
        self.subprocess_handlers[1].proc.wait()
    return original(self)
SubprocessContext._poll = poll
"""
    script = launcher.script("import threading\nthreading.Event().wait(1)\n")
    launcher.run(*TWO, script, prelude=prelude, code=0)


def start_and_find_workers(launcher: Launcher, prelude: str = "") -> tuple[int, list[int]]:
    script = launcher.script(
        "import os, time\n"
        "from pathlib import Path\n"
        "Path(f'pid{os.environ[\"RANK\"]}').write_text(f'{os.getpid()} ')\n" + WAIT
    )
    pid = launcher.start(*TWO, script, prelude=prelude)
    files = [launcher.folder / f"pid{rank}" for rank in (0, 1)]
    waiting.written(launcher.folder, lambda: all(map(says_all, files)), "the workers run")
    waiting.until(lambda: _watches(pid) == len(files), "the agent knows that they have been started")
    return pid, [int(file.read_text()) for file in files]


def _watches(pid: int) -> int:
    """Return the number of processes whose end this process would notice."""
    return list(open_descriptors(pid).values()).count("anon_inode:[pidfd]")


@pytest.mark.robustness(
    "A4",
    "ttprun gets Ctrl-C, Ctrl-\\ (SIGQUIT), SIGTERM, or its terminal is closed (SIGHUP)",
    "a last line, exit code 128 + N, no process stays",
)
@pytest.mark.parametrize("by", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT])
def test_a_terminated_ttprun_takes_its_workers_along(by: signal.Signals, launcher: Launcher) -> None:
    # Where the tests themselves run under nohup it would be ignored.
    prelude = "import signal; signal.signal(signal.SIGHUP, signal.SIG_DFL)"
    pid, workers = start_and_find_workers(launcher, prelude)
    os.kill(pid, by)
    result = launcher.wait(pid, code=128 + by)
    assert result.last_line.startswith(f"[ttp] ttprun was told to end by {by.name}; nothing to save: ")
    host, logs = re.escape(socket.gethostname()), re.escape(f"{launcher.folder}/logs/")
    line = rf"^\[ttp\] \S+Z incident 1, ttprun \(pid {pid}, host {host}\), report {logs}\S+\.json$"
    assert re.search(line, result.log, re.MULTILINE), result.log
    assert all(is_gone(worker) for worker in workers)


def test_signals_that_come_again_and_again_are_one(launcher: Launcher) -> None:
    """Further signals while the last line is printed change neither the line nor the exit code."""
    prelude = "import signal; signal.signal(signal.SIGHUP, signal.SIG_DFL)"
    pid, workers = start_and_find_workers(launcher, prelude)
    ttprun = os.pidfd_open(pid)

    def repeat() -> None:
        pause = threading.Event()
        with contextlib.suppress(ProcessLookupError):  # it has ended
            while not pause.wait(0.001):
                signal.pidfd_send_signal(ttprun, signal.SIGINT)
                signal.pidfd_send_signal(ttprun, signal.SIGHUP)

    signals = threading.Thread(target=repeat)
    signals.start()
    result = launcher.wait(pid)
    signals.join()
    os.close(ttprun)
    assert result.code in {128 + signal.SIGINT, 128 + signal.SIGHUP}, result.log
    assert result.last_line.startswith("[ttp] ")
    assert "Traceback" not in result.log
    waiting.ended(workers)


def test_a_group_with_a_process_outside_of_the_job_has_torch_s_keys(launcher: Launcher) -> None:
    """The keys of the job's own groups have a prefix, which nobody else knows."""
    script = launcher.script(
        "import os\n"
        "from torch.distributed import TCPStore, rendezvous\n"
        "def has_prefix(url, host, port):\n"
        "    store, _, _ = next(rendezvous(url, 0, 1))\n"
        "    store.set('key', '')\n"
        "    return not TCPStore(host, port, is_master=False).check(['key'])\n"
        "own = has_prefix('env://', os.environ['MASTER_ADDR'], int(os.environ['MASTER_PORT']))\n"
        "os.environ['TORCHELASTIC_USE_AGENT_STORE'] = 'False'\n"
        "port = int(os.environ['ANOTHER_PORT'])\n"
        "other = has_prefix(f'tcp://127.0.0.1:{port}', '127.0.0.1', port)\n"
        "os.write(1, f'{own} {other}\\n'.encode())\n"
    )
    result = launcher.run(*ONE, script, ANOTHER_PORT=str(free_port()), code=0)
    assert "True False" in result.log.splitlines()


def test_a_ttprun_without_time_left_does_not_save(launcher: Launcher) -> None:
    """The agent stops waiting for a stopped worker, which would not receive SIGTERM either."""
    script = launcher.script(
        "import os\n"
        "from pathlib import Path\n"
        "from adaptor.worker import runtime\n"
        "from adaptor.protocol.messages import Share\n"
        "from tests.unit.trainee import CountingTrainee, Loop\n"
        "loop = Loop(runtime.get().session, CountingTrainee(os.getcwd(), (Share('g', 0, 1),)))\n"
        "loop.begin(10)\n"
        "loop.step(11)\n"
        "Path('pid').write_text(f'{os.getpid()} ')\n" + WAIT
    )
    log_settings = {"TTP_LOG_LEVEL": "DEBUG", "TTP_LOG_STDOUT": "1"}
    pid = launcher.start(*ONE, "--ttp-grace", "1", script, **log_settings)
    file = launcher.folder / "pid"
    waiting.written(launcher.folder, lambda: says_all(file), "the worker runs")
    knows = "rank 0: begins to train after step 10\n"
    waiting.written(launcher.folder, lambda: knows in launcher.log, "the agent knows of it")
    worker = int(file.read_text())
    stop(worker)
    os.kill(pid, signal.SIGTERM)
    result = launcher.wait(pid)
    assert "Unable to shutdown process" not in result.log, (
        "as torch says when it has waited for half a minute"
    )
    assert result.code == 128 + signal.SIGTERM, result.log
    assert "[ttp] not saved within 1 s (TTP_GRACE) of SIGTERM\n" in result.log
    none = f"no checkpoint is in {launcher.folder}"
    assert result.last_line == f"[ttp] ended by SIGTERM, and the workers with it; {none}"
    assert is_gone(worker)


def test_a_killed_ttprun_takes_its_workers_along(launcher: Launcher) -> None:
    pid, workers = start_and_find_workers(launcher)
    os.kill(pid, signal.SIGKILL)
    assert launcher.wait(pid).code == -signal.SIGKILL
    waiting.ended(workers)


def test_an_orphan_of_the_test_would_be_seen() -> None:
    """`is_gone` is what the two tests above stand on."""
    with subprocess.Popen(["sleep", "600"]) as process:
        assert not is_gone(process.pid)
        process.kill()
        process.wait(LONG_S)
        assert is_gone(process.pid)
