"""Machines on which logs, terminals or temporary files cannot be had: the job is saved as ever."""

from __future__ import annotations

import contextlib
import itertools
import os
import re
import shutil
import signal
from collections.abc import Sequence

import pytest

from tests import waiting
from tests.faults import cgroups
from tests.unit.launching import ONE, TWO, Ended, Launcher, launcher, zygote
from tests.unit.nodes import is_gone, state_of

__all__ = ["launcher", "zygote"]

# Steps 11 to 13, then it waits to be killed; started again, it ends well.
TRAINS = """
import os, sys, threading
from pathlib import Path
from adaptor.worker import runtime
from adaptor.protocol.messages import Share
from tests.unit.trainee import CountingTrainee, Loop
restart, rank = int(os.environ["TORCHELASTIC_RESTART_COUNT"]), os.environ["RANK"]
if restart:
    Path(f"again{rank}").touch()
    sys.exit(0)
loop = Loop(runtime.get().session, CountingTrainee(os.path.join(os.getcwd(), "save"), (Share("g", 0, 1),)))
loop.begin(10)
for step in (11, 12, 13):
    loop.step(step)
Path(f"pid{rank}").write_text(f"{os.getpid()} ")
ATTHEEND
threading.Event().wait(600)
"""

# The agent says when it knows what a rank holds: before that there is nothing to save.
KNOWS = """
from pathlib import Path
from adaptor.controller.membership import Membership
add = Membership.add
def known(self, layout):
    found = add(self, layout)
    Path(f"known{layout.rank}").touch()
    return found
Membership.add = known
"""


class Training:
    """A job of two ranks under the real ttprun, which may start again once."""

    def __init__(
        self,
        launcher: Launcher,
        ending: str = "",
        prelude: str = "",
        flags: Sequence[str] = TWO,
        **env: str,
    ) -> None:
        self.launcher = launcher
        self.folder = launcher.folder
        self.logs = self.folder / "logs"
        (self.folder / "save").mkdir()
        script = launcher.script(TRAINS.replace("ATTHEEND", ending))
        env = {"TTP_LOG_PATH": str(self.logs), **env}
        self.agent = launcher.start(*flags, "--max-restarts", "1", script, prelude=KNOWS + prelude, **env)

    def remove_logs(self, *, leave_a_file: bool = False) -> None:
        """Remove the log folder while the agent writes into it; a file in its place stops the writes."""
        removed = False
        for number in itertools.count():
            aside = self.folder / f"gone{number}"
            self.logs.rename(aside)
            shutil.rmtree(aside)
            with contextlib.suppress(FileExistsError):  # the agent has made the folder again
                if leave_a_file:
                    self.logs.touch(exist_ok=False)
                removed = True
            if removed:
                break

    def begins(self) -> None:
        """Return once every rank trains, and the agent knows of it."""
        files = [self.folder / f"pid{rank}" for rank in (0, 1)]
        waiting.written(
            self.folder,
            lambda: all(file.exists() and file.read_text().endswith(" ") for file in files),
            "all train",
        )
        waiting.exist(*(self.folder / f"known{rank}" for rank in (0, 1)))

    def pid(self, rank: int) -> int:
        return int((self.folder / f"pid{rank}").read_text())

    def kill(self, rank: int) -> None:
        os.kill(self.pid(rank), signal.SIGKILL)

    @property
    def gone(self) -> bool:
        return all(is_gone(self.pid(rank)) for rank in (0, 1))

    def restarts(self, traceback: bool = False) -> Ended:
        """Assert that the job was saved, restarted and ended well; return its result."""
        result = self.launcher.wait(self.agent)
        assert (self.folder / "save/latest_checkpointed_iteration.txt").read_text() == "13", result.log
        assert (result.code, [(self.folder / f"again{rank}").exists() for rank in (0, 1)]) == (
            0,
            [True, True],
        )
        assert traceback or "Traceback" not in result.log
        return result


@pytest.mark.robustness(
    "B5", "the log folder is removed while training, then a rank is killed", "saved, restarted"
)
def test_the_log_folder_is_removed(launcher: Launcher) -> None:
    job = Training(launcher)
    job.begins()
    job.remove_logs()
    job.kill(1)
    job.restarts()
    assert list(job.logs.glob("*/incidents/*-1.json")), "it is made again"


@pytest.mark.robustness("B5", "the log folder has become a file, then a rank is killed", "saved, restarted")
def test_the_log_folder_cannot_be_had(launcher: Launcher) -> None:
    job = Training(launcher)
    job.begins()
    job.remove_logs(leave_a_file=True)
    job.kill(1)
    assert "[ttp] the incident report cannot be written: " in job.restarts().log


A_LOG_THAT_HANGS = """
import os, socket
os.makedirs("logs")
os.mkfifo(f"logs/ttp-agent-{socket.gethostname()}-{os.getpid()}.log")
"""
NAMED = [
    "--nproc-per-node",
    "2",
    "--rdzv-backend",
    "c10d",
    "--rdzv-endpoint",
    "localhost:0",
    "--rdzv-id",
    "odd",
]
EVENTS_THAT_HANG = """
import os
os.makedirs("logs/odd/incidents")
os.mkfifo("logs/odd/events.jsonl")
"""


@pytest.mark.robustness(
    "B5",
    "the disk of the logs hangs at the first line of an incident, or at the files of the job",
    "saved, restarted",
)
@pytest.mark.parametrize("prelude", [A_LOG_THAT_HANGS, EVENTS_THAT_HANG], ids=["log", "files"])
def test_the_log_disk_hangs(prelude: str, launcher: Launcher) -> None:
    """A FIFO without a reader: opening it never returns."""
    job = Training(launcher, flags=NAMED, TTP_LOG_STDOUT="1", prelude=prelude)
    job.begins()
    job.kill(1)
    job.restarts()
    written = [*job.logs.glob("odd/incidents/*.json")]
    assert len(written) == (prelude == A_LOG_THAT_HANGS), "one thread writes all files of a job"


@pytest.mark.robustness(
    "A4", "ttprun is stopped (Ctrl-Z), a rank is killed, ttprun goes on (fg)", "saved, restarted"
)
def test_ttprun_is_stopped_for_a_time(launcher: Launcher) -> None:
    """SIGSTOP stands for SIGTSTP, which the kernel drops where no shell could continue the process."""
    job = Training(launcher)
    job.begins()
    os.kill(job.agent, signal.SIGSTOP)
    waiting.until(lambda: state_of(job.agent) == "T", "ttprun is stopped")
    job.kill(1)
    waiting.ended([job.pid(1)])
    os.kill(job.agent, signal.SIGCONT)
    job.restarts()


PUBLISH_WAITS = """
import signal
from adaptor.checkpoint import publish
from adaptor.launchers.rendezvous import waiting as end_requests
from tests import waiting
signal.signal(signal.SIGHUP, signal.SIG_DFL)  # where the tests themselves run under nohup it would be ignored
end_requests.SAME_REQUEST_S = 600.0  # for machines that stop meanwhile
publishes = publish.publish
def waits(*args, **kwargs):
    Path("publishing").touch()
    waiting.exist(Path("go-on").absolute())
    return publishes(*args, **kwargs)
publish.publish = waits
"""


@pytest.mark.robustness(
    "A4",
    "ttprun gets Ctrl-C, Ctrl-\\ (SIGQUIT), SIGTERM, or its terminal is closed (SIGHUP)",
    "a last line, exit code 128 + N, no process stays",
)
def test_a_terminal_that_is_closed_does_not_end_the_save(launcher: Launcher) -> None:
    """The shell of the terminal sends SIGHUP; the kernel sends another SIGHUP when the shell has ended."""
    job = Training(launcher, prelude=PUBLISH_WAITS, TTP_GRACE="600")
    job.begins()
    os.kill(job.agent, signal.SIGHUP)
    waiting.exist(job.folder / "publishing")
    os.kill(job.agent, signal.SIGHUP)
    (job.folder / "go-on").touch()
    result = launcher.wait(job.agent)
    assert result.code == 128 + signal.SIGHUP, result.log
    assert result.last_line.startswith("[ttp] ttprun was told to end by SIGHUP; step 13 is saved, "), (
        result.log
    )
    assert (job.folder / "save/latest_checkpointed_iteration.txt").read_text() == "13"
    assert job.gone


def test_a_signal_that_ttprun_handles_ends_no_worker(launcher: Launcher) -> None:
    """Slurm's --signal=USR1 reaches all processes, workers first: a dead worker takes its shard along."""
    job = Training(
        launcher, prelude=PUBLISH_WAITS, flags=[*TWO, "--signals-to-handle", "SIGTERM,SIGINT,SIGUSR1"]
    )
    job.begins()
    for rank in (0, 1):
        os.kill(job.pid(rank), signal.SIGUSR1)
    waiting.exist(job.folder / "publishing")
    os.kill(job.agent, signal.SIGUSR1)
    (job.folder / "go-on").touch()
    result = launcher.wait(job.agent)
    assert result.code == 128 + signal.SIGUSR1, result.log
    assert re.match(r"\[ttp\] rank [01] was told to end by SIGUSR1; step 13 is saved, ", result.last_line), (
        result.log
    )
    assert (job.folder / "save/latest_checkpointed_iteration.txt").read_text() == "13"
    assert job.gone


# What waits for the test, then ends rank 1 or both.
ON_GO = """
from tests import waiting
waiting.exist(Path("go"))
"""
RANK_1 = ON_GO + "if rank == '1':\n    "

OUTPUTS = {
    "a full disk": "there = os.open('/dev/full', os.O_WRONLY)",
    "a closed pipe": "reader, there = os.pipe()\nos.close(reader)",
    "a pipe that nobody reads": (
        "reader, there = os.pipe()\nos.set_blocking(there, False)\n"
        "try:\n    while True: os.write(there, bytes(4096))\n"
        "except BlockingIOError: os.set_blocking(there, True)"
    ),
}


@pytest.mark.robustness(
    "B6", "stdout and stderr cannot be written when every rank raises", "saved, restarted"
)
@pytest.mark.parametrize(
    ("to", "flags"),
    [*((to, ()) for to in OUTPUTS), ("a pipe that nobody reads", ("--tee", "3"))],
    ids=[*OUTPUTS, "a pipe that nobody reads, with --tee"],
)
def test_no_reader_of_the_output(to: str, flags: Sequence[str], launcher: Launcher) -> None:
    prelude = f"import os\n{OUTPUTS[to]}\nos.dup2(there, 1)\nos.dup2(there, 2)\n"
    ending = ON_GO + "raise ValueError('told to raise')"
    job = Training(launcher, ending=ending, prelude=prelude, flags=[*TWO, *flags])
    job.begins()
    (job.folder / "go").touch()
    job.restarts()


@pytest.mark.robustness(
    "B1", "an exception names a file that is no UTF-8; or has 20 MB; an absurd exit code", "saved"
)
@pytest.mark.parametrize(
    ("failing_code", "fragment"),
    [
        (
            "raise OSError('cannot open /data/caf\\udce9.bin')",
            "OSError: cannot open /data/caf\\udce9.bin; step 13",
        ),
        ("sys.exit('caf\\udce9')", "SystemExit: caf\\udce9; step 13"),
        ("sys.exit(10**30)", f"SystemExit: {10**30}; step 13"),
        ("raise ValueError('x' * 20_000_000)", " more characters); step 13"),
    ],
)
def test_an_exception_text_that_cannot_be_sent(failing_code: str, fragment: str, launcher: Launcher) -> None:
    job = Training(launcher, ending=RANK_1 + failing_code)
    job.begins()
    (job.folder / "go").touch()
    result = job.restarts(traceback=True)
    assert [
        line
        for line in result.log.splitlines()
        if line.startswith("[ttp] rank 1 raised ") and fragment in line
    ]


@pytest.mark.robustness("B1", "the save folder has a name that is no UTF-8", "refused in one line")
def test_a_save_folder_that_cannot_be_named(launcher: Launcher) -> None:
    script = launcher.script(TRAINS.replace('"save"', '"caf\\udce9"'))
    result = launcher.run(*TWO, script, code=2)
    assert "caf\\udce9: its name is not UTF-8" in result.last_line


@pytest.mark.robustness("B1", "a worker's processor fails", "its worker ends, the others save, restarted")
def test_a_processor_that_fails(launcher: Launcher) -> None:
    job = Training(launcher, ending=RANK_1 + "runtime.get().processor.say(object())")
    job.begins()
    (job.folder / "go").touch()
    result = job.restarts(traceback=True)
    assert "[ttp] rank 1 exited with code 77; step 13 is saved, " in result.log
    assert "[ttp] rank 1: the thread that answers the agent has failed: Traceback" in result.log


FAILS = """
from adaptor.controller.hang_detector import HangDetector
def look(self, *args, **kwargs):
    if Path("go").exists():
        raise {error}
HangDetector.look = look
"""


@pytest.mark.robustness(
    "B1", "a task of the agent's control thread fails", "saved and ended with exit code 1, in one line"
)
@pytest.mark.parametrize("error", ["KeyError: 7", "SystemExit: 7"])
def test_a_task_of_the_control_thread_fails(error: str, launcher: Launcher) -> None:
    """Exceptions that also stop the event loop of the thread; in asyncio only SystemExit does."""
    job = Training(launcher, prelude=FAILS.format(error=error.replace(": ", "(") + ")"))
    job.begins()
    (job.folder / "go").touch()
    result = launcher.wait(job.agent, code=1)
    assert result.last_line.startswith(f"[ttp] ttprun has failed: {error}; step 13 is saved, "), result.log
    assert result.log.count("an error in ttprun itself: Traceback") == 1
    assert job.gone


@pytest.mark.robustness(
    "B1", "the agent's control thread ends", "the job ends with exit code 1 and one line, and every worker"
)
def test_the_control_thread_ends(launcher: Launcher) -> None:
    """The control thread fails, and fails again when it has to save."""
    failing_save = (
        "from adaptor.launchers.agent.save_folder_tasks import SaveFolderTasks\n"
        "def do(*args):\n    raise SystemExit(8)\nSaveFolderTasks.do = do\n"
    )
    job = Training(launcher, prelude=FAILS.format(error="SystemExit(7)") + failing_save)
    job.begins()
    (job.folder / "go").touch()
    result = launcher.wait(job.agent, code=1)
    assert result.last_line.startswith("[ttp] the control thread of ttprun has failed: SystemExit: 8; ")
    waiting.ended(job.pid(rank) for rank in (0, 1))


def test_an_empty_file_of_torchs_for_an_error(launcher: Launcher) -> None:
    """torch's `record` leaves it where the disk of temporary files is full."""
    raises = "open(os.environ['TORCHELASTIC_ERROR_FILE'], 'w').close(); raise ValueError('told to raise')"
    job = Training(launcher, ending=RANK_1 + raises)
    job.begins()
    (job.folder / "go").touch()
    result = job.restarts(traceback=True)
    assert "[ttp] rank 1 raised ValueError: told to raise; step 13 is saved, " in result.log


def test_an_error_of_ttprun_between_the_verdict_and_the_restart(launcher: Launcher) -> None:
    prelude = (
        "from adaptor.launchers.records.log import Account\n"
        "def restart(self):\n    raise ValueError('odd')\nAccount.restart = restart\n"
    )
    job = Training(launcher, prelude=prelude)
    job.begins()
    job.kill(1)
    result = launcher.wait(job.agent, code=1)
    assert result.last_line.startswith("[ttp] rank 1 was ended by SIGKILL; step 13 is saved, "), result.log
    assert "; ttprun has failed: ValueError: odd; the newest checkpoint in " in result.last_line
    assert result.log.count("an error in ttprun itself: Traceback") == 1
    assert job.gone


# The control thread waits for ever once there is `go`; `leaves` tells that the signal to end was taken.
HANGS = """
import threading
from adaptor.controller.hang_detector import HangDetector
from adaptor.launchers.agent import control_thread
from adaptor.launchers.agent.node import Node
control_thread.HANGS_AT_END_S = 0.2
def look(self, *args, **kwargs):
    if Path("go").exists():
        Path("hangs").touch()
        threading.Event().wait()
HangDetector.look = look
leave = Node.leave
def leaves(self, *args):
    Path("leaves").touch()
    leave(self, *args)
Node.leave = leaves
"""


@pytest.mark.robustness(
    "B1",
    "the agent's control thread hangs; then ttprun is told to end, once or twice",
    "the job ends after TTP_GRACE, or at once, and every worker",
)
@pytest.mark.parametrize("second", [None, signal.SIGINT], ids=["once", "twice"])
def test_the_control_thread_hangs(second: signal.Signals | None, launcher: Launcher) -> None:
    job = Training(launcher, prelude=HANGS, TTP_GRACE="1" if second is None else "3600")
    job.begins()
    (job.folder / "go").touch()
    waiting.exist(job.folder / "hangs")
    os.kill(job.agent, signal.SIGTERM)
    waiting.exist(job.folder / "leaves")
    if second is not None:
        os.kill(job.agent, second)
    result = launcher.wait(job.agent)
    by = second or signal.SIGTERM
    assert (result.code, job.gone) == (128 + by, True), result.log
    assert f"[ttp] ended by {by.name}, and the workers with it" in result.log
    assert ("[ttp] not saved within 1 s (TTP_GRACE) of SIGTERM" in result.log) == (second is None)


# Whoever looks into the save folder from the verdict on waits until the test says that the disk answers.
DISK_HANGS = """
from pathlib import Path
from tests import waiting
from adaptor.checkpoint import left_overs
from adaptor.launchers.agent import save_folder_tasks
from adaptor.launchers.records import log as tracker_reading
tracker_reading.TRACKER_S = save_folder_tasks.CLEAN_S = 600
def hangs(act):
    def waits(*args, **kwargs):
        waiting.exist(Path("answers").absolute())
        return act(*args, **kwargs)
    return waits
tracker_reading.tracked_step = hangs(tracker_reading.tracked_step)
left_overs.clean = hangs(left_overs.clean)
"""


@pytest.mark.robustness(
    "B5", "the save folder hangs once last words are saved", "the last line is told, the rest after it"
)
def test_the_last_line_on_a_save_folder_that_hangs(launcher: Launcher) -> None:
    job = Training(launcher, prelude=DISK_HANGS, TTP_NO_PROGRESS="1")
    job.begins()
    job.kill(1)
    line_of_death = "[ttp] rank 1 was ended by SIGKILL; step 13 is saved, "
    waiting.written(job.folder, lambda: line_of_death in launcher.log, line_of_death)
    assert job.gone
    (job.folder / "answers").touch()
    result = launcher.wait(job.agent, code=79)
    assert result.last_line == f"[ttp] the newest checkpoint in {job.folder / 'save'} is step 13"


@pytest.mark.robustness(
    "B7", "a cleaner removes everything below the temporary folder, then a rank is killed", "restarted"
)
def test_a_cleaner_of_temporary_files(launcher: Launcher) -> None:
    temporary = launcher.folder / "tmp"
    temporary.mkdir()
    job = Training(launcher, TMPDIR=str(temporary))
    job.begins()
    assert list(temporary.glob("ttp-*"))
    for path in temporary.iterdir():
        shutil.rmtree(path)
    job.kill(1)
    job.restarts()


@pytest.mark.robustness("B7", "a survivor, and its agent, have no descriptor left", "saved")
def test_no_descriptors(launcher: Launcher) -> None:
    eats = (
        "import os, resource\n"
        "{pad}resource.setrlimit(resource.RLIMIT_NOFILE, (256, 4096))\n"
        "{pad}try:\n{pad}    while True: os.open('/dev/null', os.O_RDONLY)\n"
        "{pad}except OSError: os.mkdir('eaten' + {name})\n"
    )
    # In the agent once it is asked for the time, in the worker before it waits.
    prelude = (
        "from adaptor.controller.hang_detector import HangDetector\nlook = HangDetector.look\n"
        "def eat(self, *args, **kwargs):\n"
        "    if not Path('eaten-agent').exists() and Path('go').exists():\n        "
        + eats.format(pad="        ", name="'-agent'")
        + "    return look(self, *args, **kwargs)\nHangDetector.look = eat\n"
    )
    job = Training(
        launcher, ending="if rank == '0':\n    " + eats.format(pad="    ", name="'0'"), prelude=prelude
    )
    job.begins()
    (job.folder / "go").touch()
    waiting.exist(job.folder / "eaten-agent", job.folder / "eaten0")
    job.kill(1)
    result = launcher.wait(job.agent)
    assert "[ttp] rank 1 was ended by SIGKILL; step 13 is saved, no finished step is lost" in result.log


@pytest.mark.robustness("B7", "a survivor, or the agent, gets no process and no thread (pids.max)", "saved")
@pytest.mark.parametrize("process", ["worker", "agent"])
def test_no_threads(process: str, launcher: Launcher) -> None:
    job = Training(launcher)
    job.begins()
    with contextlib.ExitStack() as stack:
        try:
            stack.enter_context(cgroups.no_more_threads(job.pid(0) if process == "worker" else job.agent))
        except OSError as error:
            job.kill(1)
            launcher.wait(job.agent)
            pytest.skip(f"not on this machine, or not for this user: {error}")
        job.kill(1)
        result = launcher.wait(job.agent)
    assert "[ttp] rank 1 was ended by SIGKILL; step 13 is saved, no finished step is lost" in result.log
    assert "Traceback" not in result.log
    if process == "agent":
        assert result.code == 137
        assert "; the workers cannot be started again: " in result.last_line


# The worker alone joins the group: a busy kernel may look for a second process before it has freed the memory
# of the first one.
JOINS = """
from pathlib import Path
from adaptor.host_memory import OutOfMemoryKills
note = OutOfMemoryKills.note
def join(self, pid):
    Path("GROUP/cgroup.procs").write_text(str(pid))
    note(self, pid)
OutOfMemoryKills.note = join
"""


@pytest.mark.robustness(
    "B7", "the kernel kills a rank for want of memory (memory.max)", "named, with the limit and the peak"
)
def test_out_of_memory(launcher: Launcher) -> None:
    script = launcher.script("hoard = [b'1' * (1 << 20) for _ in range(2048)]")
    with contextlib.ExitStack() as stack:
        try:
            group = stack.enter_context(cgroups.too_little_memory(256 << 20))
        except OSError as error:
            pytest.skip(f"not on this machine, or not for this user: {error}")
        result = launcher.run(*ONE, script, prelude=JOINS.replace("GROUP", str(group)), code=137)
    reason = (
        r"killed by the kernel: out of memory, the limit of its control group is 256 MiB, the peak \d+ MiB"
    )
    assert re.search(rf"rank 0 was ended by SIGKILL \({reason}\)", result.last_line), result.log


@pytest.mark.robustness(
    "B8", "a killed worker has children in process groups of their own", "they end with it"
)
def test_children_in_groups_of_their_own(launcher: Launcher) -> None:
    starts = (
        "import subprocess\n"
        "command = ['sh', '-c', 'sleep 600 & echo $! > child; wait']\n"
        "child = subprocess.Popen(command, preexec_fn=lambda: os.setpgid(0, 0))\n"
        "other = subprocess.Popen(['sleep', '600'], start_new_session=True)\n"
        "Path('other').write_text(f'{other.pid} ')\n"
    )
    job = Training(launcher, ending="if rank == '1':\n    " + starts.replace("\n", "\n    "))
    job.begins()
    files = [job.folder / name for name in ("child", "other")]
    waiting.written(
        job.folder,
        lambda: all(file.exists() and file.read_text().endswith(("\n", " ")) for file in files),
        "they run",
    )
    child, detached = (int(file.read_text()) for file in files)
    job.kill(1)
    job.restarts()
    try:
        assert is_gone(child)
        assert not is_gone(detached), "it has left the session"
    finally:
        os.kill(detached, signal.SIGKILL)
