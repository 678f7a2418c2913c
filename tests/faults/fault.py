"""Faults of the tests: their kinds, their phases of a step, and the code that strikes."""

from __future__ import annotations

import contextlib
import ctypes
import gc
import json
import math
import mmap
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta, tzinfo
from pathlib import Path
from typing import Any

from adaptor.protocol.board import SLOT, BoardMemory
from adaptor.protocol.copy_file import FILES, CopyFile
from adaptor.protocol.environment import BOARD, BOARD_RANKS, NEWCOMER, HeldCopies
from tests import waiting
from tests.faults import cgroups, disks, flips, namespaces

# The phases of a step at which a fault can strike.
PHASES = {
    "start": "before the model is built",
    "data": "when the batch is fetched",
    "read": "when the data set is read for a batch",
    "rollout": "when an engine samples from the weights, which are on the host",
    "forward": "before the transformer layers",
    "backward": "when gradients reach the transformer layers",
    "activation": "behind the forward pass of the transformer layers",
    "reduction": "before the gradients are reduced",
    "overflow": "when it is known whether the gradients overflow",
    "norm": "before the gradient norm is computed",
    "door-before": "at the door, before the barrier",
    "door-after": "past the barrier, if there is one, before the update",
    "copy": "with TTP_LOCAL_COPY, when half of the local copy is taken",
    "update": "when the first parameter has been updated",
    "exchanged": "at the door, when mirrors have their gradients, before the holders are compared",
    "updated": "when all optimizers have made their update, before its window closes",
    "gather": "after the update, before the parameters are gathered",
    "between": "after the step, before the next",
    "evaluation": "in an evaluation between two steps",
    "evaluation-forward": "in the forward pass of an evaluation, before the transformer layers",
    "logging": "between two steps, when their figures are written down",
    "line": "between two steps, when the line of the first is written and ranks tell each other their times",
    "save": "in a regular save, before anything is written",
    "save-write": "in a regular save, in the middle of a file (on a rank that writes)",
    "save-barrier": "in a regular save, when this rank has written",
    "save-tracker": "in a regular save, when every rank has written (rank 0)",
    "save-named": "in a regular save, when its folder has its name and the tracker is old (rank 0)",
    "save-background": "in the process that writes for an asynchronous save, before it writes",
    "save-apart": "in a regular save, when rank 0 has named it and this disk has not (rank 1)",
    "save-apart-named": "in a regular save, when it has its name here and the tracker is old (rank 1)",
    "logger": "behind the last save and the last evaluation, when the framework ends the runs of its loggers",
    "finished": "behind the framework's training, when the script has nothing left to do",
    "freeze": "when this rank is asked where it stands",
    "dump": "when this rank is ordered to save last words",
    "let-through": "when this rank has been let through the door, before its update",
    "dump-gather": "when this rank begins to send or gather shards for last words",
    "dump-write": "while this rank writes last words",
    "dump-written": "when this rank has written last words (on a rank that writes)",
}
# The phases of an online recovery.
ONLINE = {
    "imports": "before the script imports anything",
    "build": "when the model is built, before its buffers are made",
    "regroup": "when this rank is told to leave its loop for an online recovery",
    "give": "when this rank gives a shard to a new process",
    "get": "in a new process, when it is given a shard",
    "exchange": "when this rank makes its process groups anew",
    "joined": "when this rank has come back to the step",
    "proceed": "when this rank is told that all go on",
}
PHASES |= ONLINE
KINDS = ("sigkill", "sigsegv", "sigterm", "os._exit", "sys.exit", "exception")
# The kernel kills the process for want of memory; without a group that has a limit, SIGKILL stands in.
KINDS += ("oom",)
# SIGKILL once a spare process waits on the rank's node.
KINDS += ("sigkill-beside-a-spare",)
# `ttp drill` by an operator, once a spare process waits on the rank's node.
KINDS += ("drilled",)
# SIGKILL once all other ranks have begun the next step.
KINDS += ("sigkill-behind-all",)
# Signals to the rank's agent.
KINDS += ("agent-sigkill", "agent-sigterm", "agent-sigint", "agent-sigint-twice")
# Signals to the spare process that waits on the rank's node; the rank itself goes on.
KINDS += ("spare-sigkill", "spare-sigstop")
# SIGKILL to the agent once the processes of a spare node could replace the workers of this node.
KINDS += ("agent-sigkill-beside-a-spare-node",)
# SIGKILL to the agent once a lost node has come back and waits as a spare node.
KINDS += ("agent-sigkill-beside-a-node-that-is-back",)
# SIGKILL to the agent once the agent of another node has a host copy of this rank.
KINDS += ("agent-sigkill-behind-a-kept-copy",)
# SIGKILL to the agent right after another fault: the controller of a lost node 0 sees no other loss before.
KINDS += ("agent-sigkill-behind-another-fault",)
# SIGTERM to the agent and to all its descendants, children of workers included.
KINDS += ("tree-sigterm",)
# Hangs: a deadlock, a stopped process, an interpreter lock that is never released.
KINDS += ("deadlock", "sigstop", "holds-the-gil")
# Data loaders that never return, and a collective whose peer never sends.
KINDS += ("loaders-stopped", "unanswered")
# A collective that gloo has forgotten, as after a half-written send, and one whose wait nobody can end.
KINDS += ("forgotten", "unending")
# The network between the nodes is cut, silently (`cut`) or with the link down; `heals` says when it is
# mended.
KINDS += ("cut", "unplugged")
# The disk fails or becomes slow, and the process is killed at the same moment.
KINDS += ("disk", "slow-disk")
# No fault: the disk of `disk` becomes writable again.
KINDS += ("disk-mended",)
# A device computes nonsense: this rank's optimizer state is no longer finite, then the rank raises.
KINDS += ("nan",)
# A bit of this rank's memory flips, drawn by the seed `code` (`tests/faults/flips.py`).
KINDS += flips.KINDS
# No faults: wait for an incident; a long pause; a cut that is mended before a node counts as lost; slow
# links; an agent that is stopped for a while; a wall clock that jumps by a day.
KINDS += ("until-told", "pause", "short-cut", "slow-link", "agent-pause", "clock-back", "clock-ahead")
# The file with the output of `ttp drill`, in the folder of the stamps.
DRILLED = "drilled.txt"
PAUSE_S = 8.0
# Shorter than the silence that counts as the loss of a node: the kernel sends again after 0.2 s and 0.6 s,
# and the mending process takes time as well.
SHORT_CUT_S = 0.3
# Longer than that silence; but the kernel of a node whose agent is stopped goes on answering.
AGENT_PAUSE_S = 7.0
# The number of spare nodes of the job: no fault strikes before all of them wait at node 0.
SPARES = "TTP_TEST_SPARE_NODES"
# How long a fault waits for its precondition; processes may still have to start.
_LONG_S = 3 * waiting.LONG_S

# Special values of `Fault.restart`, for faults that strike once in the job: in a process that replaces a rank
# in an online recovery, or in any process of the rank.
NEWCOMERS, ONCE = -1, -2
# Special value of `Fault.heals`: when each side of a cut has written the report of its verdict.
AFTER_THE_VERDICTS = -1


class InjectedError(Exception):
    """The exception of the fault kind `exception`."""


@dataclass(frozen=True)
class Fault:
    """A fault to inject; without `step` the fault strikes when its phase is first reached.

    Attributes:
        code: exit code of `os._exit` and `sys.exit`, or seed of a bit flip.
        also: another rank of the machine to kill at the same moment.
        restart: the generation of the workers, NEWCOMERS or ONCE.
        heals: milliseconds until a cut network is mended, or AFTER_THE_VERDICTS; None: never.
        since: the first step of a strike; a newcomer counts as in the step of the newest fault.
        until: the last step of a strike.
        after: a rank of the machine; the fault strikes only when the rank is stopped (SIGSTOP).
    """

    rank: int
    phase: str
    kind: str
    step: int | None = None
    code: int = 1
    also: int | None = None
    restart: int = 0
    heals: int | None = None
    since: int | None = None
    until: int | None = None
    after: int | None = None

    def __post_init__(self) -> None:
        if self.phase not in PHASES or self.kind not in KINDS:
            raise ValueError(f"phases: {', '.join(PHASES)}; kinds: {', '.join(KINDS)}")

    @classmethod
    def parse(cls, text: str) -> Fault:
        fields = dict(part.split("=", 1) for part in text.split(","))
        numbers = {name: int(value) for name, value in fields.items() if name not in ("phase", "kind")}
        return cls(phase=fields["phase"], kind=fields["kind"], **numbers)  # type: ignore[arg-type]

    def __str__(self) -> str:
        fields = (
            "rank",
            "step",
            "phase",
            "kind",
            "code",
            "also",
            "restart",
            "heals",
            "since",
            "until",
            "after",
        )
        return ",".join(f"{name}={getattr(self, name)}" for name in fields if getattr(self, name) is not None)


class Injector:
    """The faults of a job; `begin` selects those of the process, once the process has its rank."""

    def __init__(self, faults: Sequence[Fault], stamp: Path | None) -> None:
        self._planned = tuple(faults)
        self._faults: list[Fault] = []
        self._stamp = stamp
        self._rank = -1
        self.step = 0
        self.saving = False
        self.evaluating = False

    def begin(self) -> None:
        """Select the faults of the process; a spare process has no rank before the call."""
        self._rank = int(os.environ["RANK"])
        restart = int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0"))
        struck: list[dict[str, Any]] = [json.loads(line) for line in self._struck()]
        if NEWCOMER in os.environ:  # a fault has struck the process that this one replaces
            restart = NEWCOMERS
            self.step = max((line["step"] for line in struck), default=0)
        of_this_rank = [fault for fault in self._planned if fault.rank == self._rank]
        self._faults = [fault for fault in of_this_rank if fault.restart in (restart, ONCE)]
        for line in struck:  # faults that have struck another process of this rank
            finished = next((fault for fault in self._faults if str(fault) == line["fault"]), None)
            if finished is not None and finished.restart in (NEWCOMERS, ONCE):
                self._faults.remove(finished)

    def expects(self, phase: str) -> bool:
        """Return whether a fault of any rank strikes in this phase: all processes are hooked alike."""
        return any(fault.phase == phase for fault in self._planned)

    @property
    def flips(self) -> bool:
        """Return whether a bit flips on some rank."""
        return any(fault.kind in flips.KINDS for fault in self._planned)

    def reach(self, phase: str) -> None:
        """Strike if a fault is due in this phase of the current step."""
        for fault in self._faults:
            if (
                fault.phase == phase
                and fault.step in (None, self.step)
                and (fault.since or 0) <= self.step <= (math.inf if fault.until is None else fault.until)
            ):
                self._faults.remove(fault)
                self._strike(fault)

    def _struck(self) -> list[str]:
        """Return the stamps of the job's faults so far."""
        if self._stamp is None or not self._stamp.exists():
            return []
        return self._stamp.read_text().splitlines()

    def _strike(self, fault: Fault) -> None:
        # All waits come before the time of the stamp.
        _until_all_spare_nodes_wait()
        if fault.after is not None:
            _until_it_is_stopped(fault.after)
        if fault.kind == "agent-sigkill-beside-a-spare-node":
            _until_a_spare_node_is_ready()
        if fault.kind == "agent-sigkill-beside-a-node-that-is-back":
            _until_a_node_is_back(struck=sum(f"kind={fault.kind}" in line for line in self._struck()))
        if fault.kind == "agent-sigkill-behind-a-kept-copy":
            _until_a_copy_is_kept(self._rank)
        if fault.kind == "agent-sigkill-behind-another-fault":
            waiting.until(self._struck, "another fault has struck", within_s=_LONG_S)
        spare = 0
        if fault.kind.startswith("spare-"):
            spares = _waiting_spares()  # without waiting: the rank must go on answering
            if not spares:
                return
            spare = spares[0]
        if self._stamp is not None:
            if fault.kind in ("sigkill-beside-a-spare", "drilled"):
                spare = _waiting_spare()
            line = {
                "time": time.time(),
                "rank": self._rank,
                "step": self.step,
                "phase": fault.phase,
                "kind": fault.kind,
                "restart": fault.restart,
                "fault": str(fault),
                "spare": spare,
            }
            descriptor = os.open(self._stamp, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
            os.write(descriptor, (json.dumps(line) + "\n").encode())
            os.close(descriptor)
        if fault.also is not None:
            os.kill(_sibling(fault.also), signal.SIGKILL)
        if fault.kind == "sigkill-behind-all":
            _until_all_others_are_in(self.step + 1)
        sys.stdout.flush()
        match fault.kind:
            case "sigkill" | "sigkill-beside-a-spare" | "sigkill-behind-all":
                os.kill(os.getpid(), signal.SIGKILL)
            case "drilled":
                assert self._stamp is not None
                command = [
                    sys.executable,
                    "-m",
                    "adaptor.launchers.cli.ttp",
                    "drill",
                    "--rank",
                    str(self._rank),
                ]
                with (self._stamp.parent / DRILLED).open("wb") as file:
                    subprocess.Popen(command, stdout=file, stderr=file, start_new_session=True)
                threading.Event().wait()
            case "spare-sigkill" | "spare-sigstop":
                os.kill(spare, signal.SIGKILL if fault.kind == "spare-sigkill" else signal.SIGSTOP)
            case "sigterm":
                os.kill(os.getpid(), signal.SIGTERM)
                _until_it_is_known()
            case "sigsegv":
                ctypes.string_at(0)
            case kind if kind.startswith("agent-sigkill"):
                os.kill(os.getppid(), signal.SIGKILL)
                # Workers notice this when the kernel has freed the agent's memory; no step may finish first.
                threading.Event().wait()
            case "agent-sigterm":
                os.kill(os.getppid(), signal.SIGTERM)
                _until_it_is_known()
            case "agent-sigint":
                os.kill(os.getppid(), signal.SIGINT)
                _until_it_is_known()
            case "tree-sigterm":
                agent, workers, *levels_below = _levels(os.getppid())
                _terminate((*agent, *workers))
                _until_it_is_known()
                # Data loaders end only now: a loader that ends before the shutdown is known counts as a
                # failure of its rank. This rank's own end last, for their end raises an error here.
                own_processes = _tree(os.getpid())
                _terminate(
                    sorted(
                        (process for level in levels_below for process in level),
                        key=own_processes.__contains__,
                    )
                )
            case "agent-sigint-twice":
                os.kill(os.getppid(), signal.SIGINT)
                _until_it_is_known()  # the kernel would merge two pending signals
                os.kill(os.getppid(), signal.SIGINT)
            case "agent-pause":
                os.kill(os.getppid(), signal.SIGSTOP)
                threading.Timer(AGENT_PAUSE_S, os.kill, (os.getppid(), signal.SIGCONT)).start()
            case "loaders-stopped":
                for process in _tree(os.getpid())[:-1]:
                    os.kill(process, signal.SIGSTOP)
            case "unanswered":
                _wait_for_nobody()
            case "forgotten":
                _wait_for_forgotten_work()
            case "unending":
                _wait_for_forgotten_work(timedelta(hours=1))
            case "cut" | "unplugged":
                namespaces.cut() if fault.kind == "cut" else namespaces.unplug()
                if fault.heals == AFTER_THE_VERDICTS:
                    namespaces.heal_when_written(Path(os.environ["TTP_LOG_PATH"]), "*/incidents/*.json", 2)
                elif fault.heals is not None:
                    namespaces.heal_after(fault.heals / 1000)
            case "short-cut":
                namespaces.cut_for(SHORT_CUT_S)
            case "slow-link":
                namespaces.slow_down()
            case "clock-back":
                _move_the_clock(timedelta(days=-1))
            case "clock-ahead":
                _move_the_clock(timedelta(days=1))
            case "disk":
                disks.worsen()
                os.kill(os.getpid(), signal.SIGKILL)
            case "disk-mended":
                disks.mend()
            case "slow-disk":
                for process in _tree(os.getppid()):
                    with contextlib.suppress(ProcessLookupError):
                        cgroups.join(Path(os.environ[cgroups.SLOW]), process)
                os.kill(os.getpid(), signal.SIGKILL)
            case "oom":
                if cgroups.MEMORY in os.environ:
                    cgroups.eat(Path(os.environ[cgroups.MEMORY]))
                os.kill(os.getpid(), signal.SIGKILL)
            case kind if kind in flips.KINDS:
                flips.flip(kind, fault.code)
            case "nan":
                _spoil()
                raise InjectedError(str(fault))
            case "until-told":
                _until_it_is_known()
            case "pause":
                threading.Event().wait(PAUSE_S)
            case "deadlock":
                threading.Event().wait()
            case "sigstop":
                os.kill(os.getpid(), signal.SIGSTOP)
            case "holds-the-gil":
                hold_the_interpreter_lock()
            case "os._exit":
                os._exit(fault.code)
            case "sys.exit":
                sys.exit(fault.code)
            case "exception":
                raise InjectedError(str(fault))
            case _:
                raise ValueError(f"nothing is done for {fault.kind}")


def _until_it_is_known() -> None:
    """Wait until this process knows the end of the job: with a slow agent, training could finish first."""
    from adaptor.worker import runtime

    session = runtime.get().session
    waiting.until(lambda: session.door.closed, "the job is to end", within_s=_LONG_S)


def _until_it_is_stopped(rank: int) -> None:
    stat = Path(f"/proc/{_sibling(rank)}/stat")
    waiting.until(
        lambda: stat.read_text().rpartition(")")[2].split()[0] == "T",
        f"rank {rank} is stopped",
        within_s=_LONG_S,
    )


class _Boards(BoardMemory):
    """The boards of the node's ranks, read by one rank."""

    def __init__(self, path: str, slots: str) -> None:
        ranks = [int(rank) for rank in slots.split(",")]
        self._slots = {rank: slot * SLOT for slot, rank in enumerate(ranks)}
        with Path(path).open("rb") as file:
            self._memory = mmap.mmap(file.fileno(), SLOT * len(ranks), prot=mmap.PROT_READ)
        self._sequences = memoryview(self._memory).cast("Q")


def _until_all_others_are_in(step: int) -> None:
    from adaptor.worker import runtime

    boards = _Boards(os.environ[BOARD], os.environ[BOARD_RANKS])
    other_ranks = {int(rank) for rank in os.environ[BOARD_RANKS].split(",")} - {runtime.get().rank}
    waiting.until(
        lambda: all(boards.read(rank).inside == step for rank in other_ranks),
        "all others go on",
        within_s=_LONG_S,
    )


def _waiting_spare() -> int:
    """Return the pid of a spare, once one has imported everything."""
    spares: list[int] = []

    def waits() -> bool:
        spares[:] = _waiting_spares()
        return bool(spares)

    # A look reads /proc of every process.
    waiting.until(waits, "a spare waits", pause_s=0.05, within_s=_LONG_S)
    return spares[0]


def _waiting_spares() -> list[int]:
    """Return the pids of the spares that have imported all modules; their process names show it."""
    pids = []
    for process in _tree(os.getppid()):
        with contextlib.suppress(OSError):
            if Path(f"/proc/{process}/comm").read_text() == "ttp-spare\n":
                pids.append(process)
    return pids


def _until_all_spare_nodes_wait() -> None:
    """Wait until node 0's log says that all spare nodes wait: all agents start at the same time."""
    count = int(os.environ.get(SPARES, "0"))
    if count:
        out = Path(os.environ["TTP_LOG_PATH"]).parent
        notice = re.compile(r"\[ttp\] the spare node .* waits; ")
        waiting.written(
            out,
            lambda: len(notice.findall((out / "agent0.log").read_text(errors="replace"))) >= count,
            f"{count} spare nodes wait",
            within_s=_LONG_S,
        )


def _until_a_node_is_back(struck: int) -> None:
    """Wait until a returned node waits as a spare: one more than the faults in `struck`."""
    out = Path(os.environ["TTP_LOG_PATH"]).parent

    def waits() -> bool:
        logs = [log.read_text() for log in out.glob("agent*again.log")]
        return sum("this node is a spare: it waits" in log for log in logs) > struck

    waiting.written(out, waits, "a node that is back waits", within_s=_LONG_S)


def _until_a_spare_node_is_ready() -> None:
    """Wait until another agent of this job has started as many spare processes as this node has workers."""
    from tests.faults.warm import MARK

    required = int(os.environ["LOCAL_WORLD_SIZE"])
    of_this_job = f"{MARK}={os.environ[MARK]}".encode()

    def are_ready() -> bool:
        ready = 0
        for folder in Path("/proc").glob("[0-9]*"):
            with contextlib.suppress(OSError):
                is_spare = (folder / "comm").read_text() == "ttp-spare\n"
                parent = int((folder / "stat").read_text().rpartition(")")[2].split()[1])
                variables = (folder / "environ").read_bytes().split(b"\0")
                if is_spare and parent != os.getppid() and of_this_job in variables:
                    ready += 1
        return ready >= required

    # Each look reads /proc of every process.
    waiting.until(are_ready, "a spare node is ready", pause_s=0.1, within_s=_LONG_S)


def _until_a_copy_is_kept(rank: int) -> None:
    """Wait until another node has a whole copy of `rank`; training does not wait for that by itself."""
    from adaptor import context

    paths = context.part(HeldCopies).paths[rank][:FILES]

    def is_kept() -> bool:
        files = [CopyFile(path) for path in paths]
        try:
            return any(file.header is not None and file.header.step == file.kept for file in files)
        finally:
            for file in files:
                file.close()

    waiting.until(is_kept, f"another node has a copy of rank {rank}", within_s=_LONG_S)


def hold_the_interpreter_lock() -> None:
    """Hold the interpreter lock and wait in C for a mutex of this thread; no signal ends the wait."""
    mutex = ctypes.create_string_buffer(256)  # of zeros: PTHREAD_MUTEX_INITIALIZER
    lock = ctypes.PyDLL(None).pthread_mutex_lock  # a call by PyDLL keeps the interpreter's lock
    lock(mutex)
    lock(mutex)


def _spoil() -> None:
    import torch

    for optimizer in gc.get_objects():
        if isinstance(optimizer, torch.optim.Optimizer):
            next(iter(optimizer.state.values()))["exp_avg"].view(-1)[0] = math.nan


def _wait_for_nobody() -> None:
    import torch

    source = (int(os.environ["RANK"]) + 1) % int(os.environ["WORLD_SIZE"])
    torch.distributed.recv(torch.zeros(1), src=source, tag=1)


def _wait_for_forgotten_work(*limit: timedelta) -> None:
    """Wait in gloo on connections outside of the framework's groups, which are not shut down at the fault.

    Args:
        limit: a timeout of the wait itself, which makes the wait uninterruptible.
    """
    import torch
    from torch.distributed import HashStore, ProcessGroupGloo

    store, groups = HashStore(), {}

    def make(rank: int) -> None:
        groups[rank] = ProcessGroupGloo(store, rank, 2, timedelta(hours=1))

    second = threading.Thread(target=make, args=(1,))
    second.start()
    make(0)
    second.join()
    handle = groups[0].recv([torch.zeros(1)], 1, 0)
    handle.wait(*limit)


def _move_the_clock(by: timedelta) -> None:
    """Shift the time of day for all code of this process."""
    now, real = time.time, datetime

    class Moved(datetime):
        @classmethod
        def now(cls, tz: tzinfo | None = None) -> datetime:  # type: ignore[override]
            return real.now(tz) + by

    time.time = lambda: now() + by.total_seconds()
    for module in list(sys.modules.values()):
        if getattr(module, "datetime", None) is real:
            module.datetime = Moved  # type: ignore[attr-defined]


def _levels(root: int) -> list[list[int]]:
    """Return the process ids of a process, its children, their children and so on, a list for each level."""
    children: dict[int, list[int]] = {}
    for process in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError, IndexError, ValueError):
            parent = int((process / "stat").read_text().rpartition(")")[2].split()[1])
            children.setdefault(parent, []).append(int(process.name))
    levels = [[root]]
    while next_level := [child for process in levels[-1] for child in children.get(process, [])]:
        levels.append(next_level)
    return levels


def _tree(root: int) -> list[int]:
    """Return the process ids of a process and of all its descendants, leaves first."""
    return [process for level in _levels(root)[::-1] for process in level]


def _terminate(processes: Iterable[int]) -> None:
    """Send SIGTERM to the processes; ignore ended processes."""
    for process in processes:
        with contextlib.suppress(ProcessLookupError):
            os.kill(process, signal.SIGTERM)


def tell_siblings() -> None:
    """Put the rank into this process's name, by which other workers of the agent find the process."""
    Path("/proc/self/comm").write_text(f"rank {os.environ['RANK']}")


def _sibling(rank: int) -> int:
    """Return the process id of another worker of this agent."""
    for process in Path("/proc").glob("[0-9]*"):
        try:
            name, _, fields = (process / "stat").read_text().partition("(")[2].rpartition(")")
            if int(fields.split()[1]) == os.getppid() and name == f"rank {rank}":
                return int(process.name)
        except (OSError, ValueError, IndexError):
            continue
    raise LookupError(f"rank {rank} is no worker of this agent")
