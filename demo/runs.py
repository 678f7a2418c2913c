"""Starts a training run, follows its records, kills a process as planned, and ends all processes."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from dataclasses import dataclass, field
from pathlib import Path

import psutil

from demo.progress import DemoError, Progress
from demo.records import Follower, Kill, Step

RANKS = 4
POLL_SECONDS = 0.005
SHOW_SECONDS = 0.2
LIMIT_SECONDS = 900  # far longer than any healthy run: a hang becomes an error that names the log
SETTINGS = (
    "ENABLE_TTP",
    "TTP_",
    "TORCHELASTIC_",
)  # variables of the user's shell that the demo's runs do not inherit


@dataclass(frozen=True)
class Plan:
    """When to kill: in the middle of the step after `after_step`, once `rank` has finished that step.

    A run that recovers online is killed when a spare process waits, but not after `last_step`.
    """

    rank: int
    after_step: int
    last_step: int = 0


@dataclass
class Run:
    """One of the demo's trainings."""

    title: str
    command: list[str]
    folder: Path
    iterations: int
    environment: dict[str, str] = field(default_factory=dict)
    plan: Plan | None = None
    steps: list[Step] = field(default_factory=list)
    kill: Kill | None = None
    seconds: float = 0.0

    @property
    def log(self) -> Path:
        return self.folder / "train.log"

    @property
    def records(self) -> Path:
        return self.folder / "records"

    def execute(self, progress: Progress) -> None:
        """Train to the end. Raises DemoError if the run fails, after ending all of its processes."""
        self.records.mkdir(parents=True)
        inherited = {name: value for name, value in os.environ.items() if not name.startswith(SETTINGS)}
        began = time.monotonic()
        with self.log.open("wb") as log:
            process = subprocess.Popen(
                self.command,
                env=inherited | self.environment,
                stdout=log,
                stderr=subprocess.STDOUT,
                stdin=subprocess.DEVNULL,
            )
            launcher = psutil.Process(process.pid)
            try:
                self._follow(process, launcher, progress)
            finally:
                if process.poll() is None:
                    end_tree(launcher)
                    process.wait()
        self.seconds = time.monotonic() - began
        if process.returncode != 0:
            raise DemoError(f"{self.title} ended with exit code {process.returncode}: see {self.log}")
        if max((step.iteration for step in self.steps), default=0) < self.iterations:
            raise DemoError(f"{self.title} ended before iteration {self.iterations}: see {self.log}")

    def _follow(self, process: subprocess.Popen[bytes], launcher: psutil.Process, progress: Progress) -> None:
        followers = [Follower(self.records / f"rank{rank}.jsonl", rank) for rank in range(RANKS)]
        deadline = time.monotonic() + LIMIT_SECONDS
        running = True
        detail, shown = "starting", 0.0
        while running:
            running = process.poll() is None  # before the last read, so that no record is missed
            added = [step for follower in followers for step in follower.poll()]
            self.steps += added
            if added:
                newest = max(added, key=lambda step: (step.restart, step.iteration))
                detail = f"iteration {newest.iteration}/{self.iterations}, loss {newest.loss:.3f}"
            if time.monotonic() - shown > SHOW_SECONDS:
                shown = time.monotonic()
                progress.update(detail)
            if self.plan is not None and self.kill is None and running:
                self._kill_when_due(self.plan, launcher, progress)
            if time.monotonic() > deadline:
                raise DemoError(f"{self.title} is not done after {LIMIT_SECONDS} s: see {self.log}")
            time.sleep(POLL_SECONDS)

    def _kill_when_due(self, plan: Plan, launcher: psutil.Process, progress: Progress) -> None:
        finished = [step for step in self.steps if step.rank == plan.rank]
        if not finished or finished[-1].iteration < plan.after_step:
            return
        spare = find_spare(launcher)
        if spare is None and finished[-1].iteration < plan.last_step:
            return
        victim = find_worker(launcher, plan.rank)
        if victim is None:
            raise DemoError(f"the process of rank {plan.rank} is not to be found: see {self.log}")
        middle = (finished[-1].time - finished[0].time) / max(1, len(finished) - 1) / 2
        time.sleep(max(0.0, finished[-1].time + middle - time.time()))
        self.kill = Kill(rank=plan.rank, pid=victim.pid, time=time.time(), spare=spare)
        victim.send_signal(signal.SIGKILL)
        progress.note(f"SIGKILL to rank {plan.rank} (pid {victim.pid})")


def find_worker(launcher: psutil.Process, rank: int) -> psutil.Process | None:
    """Return a rank's process below the launcher: the topmost with the rank in its environment."""
    level = [launcher]
    while level:
        level = [child for parent in level for child in parent.children()]
        for process in level:
            try:
                if process.environ().get("RANK") == str(rank):
                    return process
            except psutil.Error:
                continue  # ended meanwhile
    return None


def find_spare(launcher: psutil.Process) -> int | None:
    """Return the pid of a spare process of the launcher."""
    for process in launcher.children(recursive=True):
        try:
            if process.name() == "ttp-spare":
                return process.pid
        except psutil.Error:
            continue  # ended meanwhile
    return None


def end_tree(launcher: psutil.Process) -> None:
    """End the launcher and its descendants, with SIGTERM first."""
    try:
        tree = [launcher, *launcher.children(recursive=True)]
        launcher.terminate()
    except psutil.NoSuchProcess:
        return
    _, alive = psutil.wait_procs(tree, timeout=15)
    for process in alive:
        try:
            process.kill()
        except psutil.NoSuchProcess:
            pass
    psutil.wait_procs(alive, timeout=15)


def run_tool(command: list[str], log: Path, name: str, environment: dict[str, str]) -> None:
    """Run a short command with its output in `log`. Raises DemoError for a failed command."""
    with log.open("wb") as out:
        code = subprocess.run(
            command,
            env=os.environ | environment,
            stdout=out,
            stderr=subprocess.STDOUT,
            stdin=subprocess.DEVNULL,
            check=False,
        ).returncode
    if code != 0:
        raise DemoError(f"{name} ended with exit code {code}: see {log}")
