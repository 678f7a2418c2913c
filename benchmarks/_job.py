"""Training jobs for the benchmarks: Megatron-LM's own `pretrain_gpt.py`, with the adaptor or without."""

from __future__ import annotations

import argparse
import ctypes
import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import FrameType, TracebackType
from typing import Any

import _bench  # puts the root on the path
import psutil

from adaptor.protocol.records import unix
from demo.runs import end_tree
from tests.faults import inject, warm
from tests.faults.fault import Fault
from tests.faults.namespaces import Namespaces
from tests.frameworks import args, prepare, record

RANKS = 4
HERE = Path(__file__).resolve().parent
TRAIN_CORE = _bench.ROOT / "tests/frameworks/train_core.py"
# Variables of the user's shell that jobs do not inherit.
_SETTINGS = ("ENABLE_TTP", "TTP_", "TORCHELASTIC_")
_PR_SET_PDEATHSIG = 1


class JobError(Exception):
    """A job failed to do what the benchmark needs; the message names its log."""


def model(layers: int, hidden: int, sequence: int) -> list[str]:
    """Return arguments of a model's size, which override those of the tiny model."""
    heads = max(4, hidden // 64)
    sizes = {"num-layers": layers, "hidden-size": hidden, "num-attention-heads": heads}
    sizes |= {"seq-length": sequence, "max-position-embeddings": sequence}
    return [word for name, value in sizes.items() for word in (f"--{name}", str(value))]


def add_size_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of a job's size: those of `model`, and the global batch."""
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--hidden", type=int, default=128)
    parser.add_argument("--sequence", type=int, default=64)
    parser.add_argument("--global-batch", type=int, default=8, help="sequences per step, of all ranks")


class _Warm(warm.Warm):
    """A launcher in a fork of the benchmark's starter; it gets a SIGTERM if the benchmark is killed."""

    ends_with_asker = True


class Job:
    """One start of a launcher, in a folder of its own: `ckpt`, `records`, `logs` and `log`.

    A job is a context manager, which ends all processes of the job.
    """

    def __init__(
        self,
        folder: Path,
        *,
        adaptor: bool,
        train_iters: int,
        ranks: int = RANKS,
        save_interval: int = 1_000_000,
        instances: int = 2,
        distributed: bool = True,
        extra: Sequence[str] = (),
        launcher: Sequence[str] = (),
        watch: bool = False,
        native: bool = False,
        save: Path | None = None,
        gate: str = "",
        cost: bool = False,
        holds: str = "",
        parts: str = "",
        arming: str = "",
        uploading: str = "",
        faults: Sequence[Fault] = (),
        environment: Mapping[str, str] | None = None,
        nodes: int = 1,
        network: Namespaces | None = None,
        tp: int = 1,
        precision: str = "bf16",
        warm: bool = False,
        library: Sequence[str] | None = None,
    ) -> None:
        """Prepare a job; entering the context starts it.

        Args:
            save: the folder of the checkpoints; None: in the job's folder.
            instances: optimizer instances of a job without the adaptor; the adaptor always uses two.
            distributed: whether the optimizer is distributed.
            watch, native, gate, cost, holds, parts, arming, uploading: options of `_worker.py`.
            nodes: the ranks are divided among so many nodes, all on this machine.
            network: a namespace for each node.
            warm: workers are forks with torch imported (`tests/faults/warm.py`), for jobs with
                untimed starts.
            library: arguments of `train_core.py`, which trains in place of `pretrain_gpt.py` and saves
                nothing by itself.
        """
        self.folder = folder
        self.save = save or folder / "ckpt"
        self.logs = folder / "logs"
        self.stamps = folder / "stamps.jsonl"
        self.log = folder / "log"
        self._nodes = nodes
        self._network = network
        name, module = "ttprun", "adaptor.launchers.cli.ttprun"
        if not adaptor:
            name, module = "torchrun", "torch.distributed.run"
            if instances > 1 and library is None:
                extra = [*extra, "--num-distributed-optimizer-instances", str(instances)]
        self._start = _Warm if warm else subprocess.Popen
        launch = [sys.executable, "-m", module]
        self._launch = [str(Path(sys.executable).with_name(name))] if warm else launch
        self._command = ["--ttp-device", "cpu"] if adaptor else []
        self._command += ["--nproc-per-node", str(ranks // nodes), *launcher]
        self._command += ["--standalone"] if nodes == 1 else ["--nnodes", str(nodes)]
        if not adaptor:
            self._command += ["-m", "adaptor.devices", "cpu"]
        if library is None:
            self._command += [str(Path(record.__file__)), str(folder / "records")]
        if watch or native or gate or holds or parts or arming or uploading:
            self._command += [str(HERE / "_worker.py"), "--out", str(folder / "watched")]
            self._command += ["--watch"] if watch else []
            self._command += ["--native", str(folder / "native")] if native else []
            self._command += ["--gate", gate] if gate else []
            self._command += ["--cost"] if cost else []
            self._command += ["--holds", holds] if holds else []
            self._command += ["--parts", parts] if parts else []
            self._command += ["--arming", arming] if arming else []
            self._command += ["--uploading", uploading] if uploading else []
        if faults:
            self._command += [str(Path(inject.__file__)), "--stamp", str(self.stamps)]
            self._command += [word for fault in faults for word in ("--fault", str(fault))]
        path = [str(_bench.ROOT)]
        if library is not None:
            self._command += [
                str(TRAIN_CORE),
                "--iters",
                str(train_iters),
                "--record",
                str(folder / "records"),
            ]
            self._command += ["--save", str(self.save), "--tensor", str(tp), *library]
            self._command += [] if distributed else ["--whole"]
            self._command += ["--loop", "run-steps"] if adaptor else ["--instances", str(instances)]
            path.append(str(prepare.megatron_core()))
        else:
            self._command += [str(prepare.megatron_lm() / "pretrain_gpt.py")]
            self._command += args.tiny_gpt(
                train_iters=train_iters,
                save=self.save,
                load=self.save,
                save_interval=save_interval,
                tp=tp,
                precision=precision,
                distributed_optimizer=distributed,
                extra=extra,
            )
        inherited = {k: v for k, v in args.environment().items() if not k.startswith(_SETTINGS)}
        self._environment = inherited | {
            "TTP_LOG_PATH": str(self.logs),
            "PYTHONPATH": os.pathsep.join(path),
            "PYTHONWARNINGS": "ignore",
            # A job restarts as a whole by default; measurements of online recovery override this.
            "TTP_ONLINE": "0",
            **({} if adaptor else {"ENABLE_TTP": "False"}),
            **(environment or {}),
        }
        # Without cached bytecode each process would compile its imports.
        self._environment.pop("PYTHONDONTWRITEBYTECODE", None)
        if network is not None:
            self._environment |= network.environment | {"TTP_TLS": "plain"}
        self._agents: list[subprocess.Popen[bytes]] = []

    def __enter__(self) -> Job:
        self.folder.mkdir(parents=True, exist_ok=True)
        port = free_port()
        for node in range(self._nodes):
            command = list(self._launch)
            if self._nodes > 1:
                address = self._network.address if self._network is not None else "127.0.0.1"
                command += ["--node-rank", str(node), "--master-addr", address, "--master-port", str(port)]
            command += self._command
            if self._network is not None:
                command = [*self._network.command(node), *command]
            with (self.log if node == 0 else self.log.with_name(f"log{node}")).open("ab") as log:
                self._agents.append(
                    self._start(
                        command,
                        env=self._environment,
                        stdin=subprocess.DEVNULL,
                        stdout=log,
                        stderr=subprocess.STDOUT,
                        preexec_fn=_end_with_the_benchmark,
                    )
                )
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for agent in self._agents:
            if agent.poll() is None:
                end_tree(psutil.Process(agent.pid))
            agent.wait()

    @property
    def returncode(self) -> int | None:
        """The exit code of the first node; None while any node runs."""
        codes = [agent.poll() for agent in self._agents]
        return None if None in codes else codes[0]

    @property
    def launcher(self) -> psutil.Process:
        """The process of the first node's launcher."""
        return psutil.Process(self._agents[0].pid)

    def wait(self, limit_s: float, tick: Callable[[], None] = lambda: None) -> int:
        """Wait for the end, and return the exit code; `tick` is called twenty times a second.

        Raises:
            JobError: the job runs after `limit_s` seconds.
        """
        deadline = time.monotonic() + limit_s
        while (code := self.returncode) is None:
            if time.monotonic() > deadline:
                raise JobError(f"not done after {limit_s:g} s: see {self.log}")
            tick()
            time.sleep(0.05)
        tick()
        return code

    def records(self) -> dict[int, list[dict[str, Any]]]:
        """Return the record of every iteration of each rank."""
        return record.read(self.folder / "records")

    def watched(self) -> list[dict[str, Any]]:
        """Return the lines of `_worker.py`, in the order of time."""
        entries = [line for path in self.folder.glob("watched/rank*.jsonl") for line in lines(path)]
        return sorted(entries, key=lambda line: float(line["time"]))

    def struck(self) -> list[dict[str, Any]]:
        """Return the stamps of the faults that struck, in the order of time."""
        return lines(self.stamps)

    def incidents(self) -> list[dict[str, Any]]:
        """Return the incident reports, in the order of their numbers."""
        reports = [json.loads(path.read_text()) for path in self.logs.glob("*/incidents/*.json")]
        return sorted(reports, key=lambda report: int(report["incident"]))


def free_port() -> int:
    """Return a port that is free now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def _end_with_the_benchmark() -> None:
    """Let the launcher get a SIGTERM if the benchmark is killed; called between fork and exec."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)


def lines(path: Path) -> list[dict[str, Any]]:
    """Return the complete lines of a file of JSON lines; none if there is no file."""
    if not path.exists():
        return []
    text = path.read_text()
    return [json.loads(line) for line in text[: text.rfind("\n") + 1].splitlines()]


def first(incident: Mapping[str, Any], event_type: str) -> float:
    """Return the Unix seconds of an incident's first event of a type. Raises ValueError if there is none."""
    return float(min(unix(event["time"]) for event in incident["events"] if event["type"] == event_type))


def last(incident: Mapping[str, Any], event_type: str) -> float:
    """Return the Unix seconds of an incident's last event of a type."""
    return float(max(unix(event["time"]) for event in incident["events"] if event["type"] == event_type))


def run(main: Callable[[], None]) -> None:
    """Run a benchmark: a SIGTERM also ends its jobs, and a failed job is reported in one line."""

    def leave(number: int, frame: FrameType | None) -> None:
        sys.exit(128 + number)

    signal.signal(signal.SIGTERM, leave)
    try:
        main()
    except JobError as error:
        sys.exit(f"{Path(sys.argv[0]).stem}: {error}")


def new_folder(name: str) -> Path:
    """Make an empty folder for the jobs of one run of a benchmark."""
    folder = _bench.OUT / f"{name}-{time.strftime('%Y%m%d-%H%M%S')}-{os.getpid()}"
    folder.mkdir(parents=True)
    return folder
