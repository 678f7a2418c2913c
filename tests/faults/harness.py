"""Runs jobs with faults, and checks that no process, port or file is left behind."""

from __future__ import annotations

import atexit
import dataclasses
import functools
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import pytest

from adaptor.protocol import naming
from tests import operator_files, waiting
from tests.faults import leftovers, log_lines, warm
from tests.faults.fault import SPARES, Fault
from tests.faults.flips import INJECTIONS, LYING
from tests.faults.namespaces import Namespaces
from tests.faults.publishing import VARIABLE as PUBLISHING
from tests.frameworks import args, prepare, record
from tests.ports import free_ports

ROOT = Path(__file__).resolve().parents[2]
RECORD = ROOT / "tests/frameworks/record.py"
INJECT = ROOT / "tests/faults/inject.py"
# If this variable is set, every launcher and every worker is a new interpreter, as users start them.
COLD = "TTP_TEST_COLD"
SHARED = ROOT / "tests/device/gpu/shared.py"
# A job takes 15 s on a quiet machine; a machine with twenty times the load must pass as well.
JOB_TIMEOUT_S = 400.0
ITERATIONS = 8
# Timeouts of the c10d rendezvous: for nodes beyond the minimum, and for a lost node's keep-alive. torch's own
# 30 s and 15 s are for real networks.
QUICK = "last_call_timeout=4,keep_alive_interval=1,keep_alive_max_attempt=5"


@functools.cache
def _index() -> tempfile.TemporaryDirectory[str]:
    """Return the folder in which the framework keeps the index of the mock data.

    Building the index takes half a second in each process. The framework writes the index without locks, so
    parallel jobs must not share a folder.
    """
    index = tempfile.TemporaryDirectory(prefix="ttp-index-")
    atexit.register(index.cleanup)
    return index


@dataclass(frozen=True)
class Layout:
    """Parallelism and batch of a job; the unmodified framework computes the same bits with `reference`.

    Attributes:
        name: used in the names of tests and kept baselines.
        processes: the world size.
        replica: value of `--ttp-replica`.
        saves: steps at which the framework saves by itself.
        instances: whether the framework's optimizer instances work, so that `auto` may choose `split`.
        batch: samples of a step, in micro-batches of one sample.
    """

    name: str
    processes: int
    precision: str = "bf16"
    tp: int = 1
    distributed_optimizer: bool = True
    extra: tuple[str, ...] = ()
    replica: str = "auto"
    pp: int = 1
    saves: tuple[int, ...] = ()
    instances: bool = True
    batch: int = 8

    @property
    def data_parallel_size(self) -> int:
        return self.processes // (self.tp * self.pp)

    @property
    def state(self) -> tuple[object, ...]:
        """The properties, besides names and sizes, that change how the framework loads a checkpoint."""
        options = "--optimizer", "--num-layers-per-virtual-pipeline-stage", "--num-experts", "--ckpt-format"
        return (
            self.distributed_optimizer,
            self.precision,
            [option for option in options if option in self.extra],
        )

    @property
    def arguments(self) -> tuple[str, ...]:
        """Return the arguments of the script for the layout, besides those of `args.tiny_gpt`."""
        stages = ("--pipeline-model-parallel-size", str(self.pp)) if self.pp > 1 else ()
        return ("--global-batch-size", str(self.batch), *stages, *self.extra)

    @property
    def reference(self) -> tuple[str, ...]:
        """Arguments that make a run without the adaptor sum the gradient norm in the same order."""
        split = self.replica == "auto" and self.data_parallel_size % 2 == 0 and self.instances
        return ("--num-distributed-optimizer-instances", "2") if self.distributed_optimizer and split else ()


DP4 = Layout("dp4", 4)
# Two micro-batches on each rank, as in DP4. A pipeline has two for each stage, which makes eight samples.
DP2 = Layout("dp2", 2, batch=4)
DP2_WHOLE = Layout("dp2-whole-optimizer", 2, distributed_optimizer=False, batch=4)
TP2_DP2 = Layout("tp2-dp2", 4, tp=2, batch=4)
DP2_MIRROR = Layout("dp2-mirror", 2, replica="mirror", batch=4)
DP3 = Layout("dp3", 3, extra=("--global-batch-size", "9"))
TP2_DP3 = Layout("tp2-dp3", 6, tp=2, extra=("--global-batch-size", "9"))
DP3_FP32 = Layout("dp3-fp32", 3, precision="fp32", extra=("--global-batch-size", "9"))
TP2_DP1 = Layout("tp2-dp1", 2, tp=2, batch=2)
TP2_DP2_SP = Layout("tp2-dp2-sequence", 4, tp=2, extra=("--sequence-parallel",), batch=4)
PP2_DP2 = Layout("pp2-dp2", 4, pp=2)
PP2_TP2_DP2 = Layout("pp2-tp2-dp2", 8, tp=2, pp=2)
VPP2_DP2 = Layout(
    "vpp2-dp2", 4, pp=2, extra=("--num-layers", "4", "--num-layers-per-virtual-pipeline-stage", "1")
)
OVERLAP = ("--overlap-grad-reduce", "--overlap-param-gather", "--ddp-num-buckets", "3")
DP2_OVERLAP = Layout("dp2-overlap", 2, extra=OVERLAP, batch=4)
DP3_OVERLAP = Layout("dp3-overlap", 3, extra=(*OVERLAP, "--global-batch-size", "9"))
# The first of two optimizers gathers its parameters while the second one updates.
VPP2_DP2_OVERLAP = Layout(
    "vpp2-dp2-overlap-step",
    4,
    pp=2,
    extra=(*VPP2_DP2.extra, *OVERLAP, "--overlap-param-gather-with-optimizer-step"),
)
EXPERTS = ("--num-experts", "4", "--disable-bias-linear", "--moe-router-topk", "2")
MOE_DP2 = Layout("moe-dp2", 2, extra=EXPERTS, batch=4)
MOE_EP2 = Layout("moe-dp4-ep2", 4, extra=(*EXPERTS, "--expert-model-parallel-size", "2"))
MOE_EP2_MIRROR = Layout("moe-dp4-ep2-mirror", 4, extra=MOE_EP2.extra, replica="mirror")
# No two ranks have the same experts.
MOE_EP2_DP2 = Layout("moe-dp2-ep2", 2, extra=MOE_EP2.extra, replica="mirror", batch=4)
# The router's bias changes outside of the optimizer; experts have another tensor-parallel size than the rest.
MOE_TP2_EP2 = Layout(
    "moe-tp2-dp2-ep2-mirror",
    4,
    tp=2,
    replica="mirror",
    batch=4,
    extra=(
        *MOE_EP2.extra,
        *("--expert-tensor-parallel-size", "1", "--sequence-parallel"),
        *("--moe-router-enable-expert-bias", "--moe-router-score-function", "sigmoid"),
        *("--moe-router-bias-update-rate", "0.1"),
    ),
)
# Two ranks have each expert together; the format `torch` has one folder for both parts.
MOE_ETP2 = Layout(
    "moe-dp4-etp2",
    4,
    extra=(*EXPERTS, "--expert-tensor-parallel-size", "2", "--ckpt-format", "torch_dist"),
)
DP2_SGD = Layout("dp2-sgd", 2, distributed_optimizer=False, extra=("--optimizer", "sgd"), batch=4)
# Batches of 4, 4, 6, 6, then 8 samples; the framework saves when the batch size changes.
DP2_RAMPUP = Layout(
    "dp2-rampup",
    2,
    extra=(
        *("--rampup-batch-size", "4", "2", "16", "--train-samples", "52", "--lr-warmup-iters", "0"),
        *("--data-parallel-random-init", "--eval-interval", "5", "--eval-iters", "2", "--split", "90,10,0"),
        *("--recompute-granularity", "full", "--recompute-method", "uniform", "--recompute-num-layers", "1"),
    ),
    saves=(2, 4),
)
DP2_LOADERS = Layout("dp2-loaders", 2, extra=("--num-workers", "2"), batch=4)
DP2_FP32 = Layout("dp2-fp32", 2, precision="fp32", batch=4)
# With gradients of this size, step 5 is skipped.
DP2_FP16 = Layout("dp2-fp16", 2, precision="fp16")
FP16_SKIPS = 5


class Program(Protocol):
    """A training script of another framework, and its environment."""

    environment: dict[str, str]

    def __call__(self, job: Job) -> list[str]:
        """Return the script and its arguments."""
        ...


@dataclass
class Job:
    """A job to run, in a folder of its own.

    Attributes:
        out: the folder of logs, records and stamps.
        launcher: ttprun, or torchrun for the unmodified framework.
        faults: specifications as `Fault.parse` reads them.
        restarts: value of `--max-restarts`.
        own_disks: each node saves to and loads from its own folder (`save`/node0 and so on). All nodes call
            the folder `.`, where the agent starts, as on separate machines.
        options: arguments of the launcher.
        arguments: arguments of the training script, besides those of the layout.
        nodes: the number of agents, all on this machine; the processes are divided among them.
        min_nodes: MIN of `--nnodes MIN:MAX` with c10d, where `nodes` is MAX; 0: nodes have fixed numbers.
        late_nodes: how many of the last nodes start only after a fault has struck.
        addresses: value of `--local-addr` for each node; c10d numbers the nodes in the order of addresses.
        spares: the number of spare nodes, all in the last namespace.
        killed_at_first_place: what is killed when the first spare node takes a place (`first_place.py`).
        dying_node: the node that is killed when it is about to restart its workers (`dying_node.py`).
        returning_nodes: nodes whose command is started again, each after the job went on without the node.
        network: the namespaces of the nodes; None: all nodes share the machine's.
        script: a script to run in place of Megatron-LM's pretrain_gpt.py; it writes its own records.
        framework: the source tree of Megatron-LM.
        publishing: `NODE POINT KIND`: a fault while a checkpoint is published (`publishing.py`).
        cold: start new interpreters as users do; otherwise processes are forks with torch imported
            (`warm.py`).
        of_a_user: use the environment of a user's job (`args.environment`); implies `cold`.
        program: a script of another framework.
        device: cpu; cuda: a GPU for each process; shared: one GPU for all over gloo; nccl: one GPU for all
            over NCCL.
        prefix: a command that runs the launcher's command.
        device_fault: rank, step and kind of a device fault (`tests/device/gpu/shared.py`).
    """

    out: Path
    layout: Layout
    launcher: str = "ttprun"
    faults: Sequence[str] = ()
    restarts: int = 0
    save: Path | None = None
    own_disks: bool = False
    save_interval: int = 1000
    load: Path | None = None
    options: Sequence[str] = ()
    arguments: Sequence[str] = ()
    environment: dict[str, str] = field(default_factory=dict)
    nodes: int = 1
    min_nodes: int = 0
    late_nodes: int = 0
    addresses: Sequence[str] = ()
    spares: int = 0
    killed_at_first_place: str = ""
    dying_node: int | None = None
    returning_nodes: Sequence[int] = ()
    network: Namespaces | None = None
    script: Path | None = None
    framework: Path | None = None
    publishing: str = ""
    cold: bool = field(default_factory=lambda: COLD in os.environ)
    of_a_user: bool = False
    program: Program | None = None
    device: str = "cpu"
    prefix: tuple[str, ...] = ()
    device_fault: tuple[str, ...] = ()
    timeout_s: float = JOB_TIMEOUT_S


def job_in(folder: Path, layout: Layout, **settings: Any) -> Job:
    """Return a job that runs in `folder`/job and saves to `folder`/save, with further fields of `Job`."""
    return Job(folder / "job", layout, save=folder / "save", **settings)


@dataclass(frozen=True)
class Ended:
    """A job that has ended.

    Attributes:
        codes: the exit code of each agent.
        logs: the log of each agent.
        records: the training records of each rank.
        stamps: an entry for each fault that struck.
        at: the time of the end, as `time.time()`.
    """

    job: Job
    codes: tuple[int, ...]
    logs: tuple[str, ...]
    records: dict[int, list[dict[str, Any]]]
    stamps: list[dict[str, Any]]
    at: float

    @property
    def seconds_after_the_fault(self) -> float:
        """Seconds from the last fault to the end of the job."""
        return float(self.at - self.stamps[-1]["time"])

    @property
    def code(self) -> int:
        (code,) = self.codes
        return code

    @property
    def log(self) -> str:
        return "\n".join(self.logs)

    @property
    def last_line(self) -> str:
        """The last line of the first agent."""
        return log_lines.last_line(self.logs[0])

    @property
    def said(self) -> list[str]:
        """The lines of the adaptor in all logs."""
        return log_lines.lines(self.log)

    def assert_says(self, fragment: str) -> None:
        """Assert that a line of the adaptor contains `fragment`."""
        assert any(fragment in line for line in self.said), self.said


def run(job: Job, *, code: int | None = None) -> Ended:
    """Run a job to its end, and assert that nothing is left behind.

    Args:
        job: the job to run.
        code: the expected exit code of all agents; None: any.
    """
    job.out.mkdir(parents=True)
    # Not in the job's folder: data loaders put their sockets here, and the paths of sockets must be short.
    scratch = Path(tempfile.mkdtemp(prefix="ttp-test-"))
    mark = uuid.uuid4().hex
    ports = free_ports(2)
    environment = args.environment(
        of_a_user=job.of_a_user,
        TTP_LOG_PATH=str(job.out / "logs"),
        TTP_PORT=str(ports[1]),
        TMPDIR=str(scratch),
        PYTHONWARNINGS="ignore",
        PYTHONUNBUFFERED="1",
        **{leftovers.MARK: mark},
    )
    # Without cached bytecode every process would compile the framework for seconds.
    environment.pop("PYTHONDONTWRITEBYTECODE", None)
    if job.launcher == "torchrun":  # the script may call adaptor.enable()
        environment["ENABLE_TTP"] = "False"
    if job.program is not None:
        environment.update(job.program.environment)
    if "torch_dist" in job.layout.extra:
        # The framework saves uninitialised memory between params: make it zeros, so that files can be
        # compared.
        environment["MALLOC_PERTURB_"] = "255"
    if not _cold(job):
        # Otherwise torch sets this in the middle of an import. A spare that has torch imported takes that for
        # a change by the script, and starts again as a new interpreter.
        environment["TORCHINDUCTOR_CACHE_DIR"] = str(scratch / "torchinductor")
    environment.update(job.environment)
    if job.publishing:
        environment[PUBLISHING] = job.publishing
    if job.spares:
        environment[SPARES] = str(job.spares)
    if job.network is not None:
        environment.update(job.network.environment)
    shared_before = leftovers.shared_memory()
    logs = [job.out / f"agent{node}.log" for node in range(job.nodes + job.spares)]
    agents = []
    try:
        for node, log in [*enumerate(logs), *_second_starts(job)]:
            if log not in logs:
                _wait_until_it_goes_on_without(node, job)
                logs.append(log)
            if job.late_nodes and node == job.nodes - job.late_nodes:
                # The other nodes start first, and reach the step of the fault.
                has_struck = (job.out / "stamps").exists
                waiting.written(job.out, has_struck, "a fault has struck", within_s=job.timeout_s)
            if job.min_nodes and node == job.nodes:  # the first nodes that come have places
                waiting.written(job.out, lambda: _trains(job), "all nodes train", within_s=job.timeout_s)
            with log.open("wb") as sink:
                command = _command(job, node, ports[0])
                start = subprocess.Popen if _cold(job) else warm.Warm
                place = _start_in(job, node)
                streams = {"stdin": subprocess.DEVNULL, "stdout": sink, "stderr": sink}
                agents.append(start(command, env=environment, cwd=place, **streams))
        codes = _wait(agents, job.timeout_s)
    except subprocess.TimeoutExpired:
        leftovers.end(mark)
        tail = "".join(log.read_text(errors="replace")[-3000:] for log in logs)
        pytest.fail(f"the job had not ended after {job.timeout_s:g} s:\n{tail}")
    except BaseException:
        leftovers.end(mark)  # for example Ctrl-C in the test run
        raise
    at = time.time()
    leftovers.assert_nothing_left(mark, ports, scratch, shared_before)
    shutil.rmtree(scratch, ignore_errors=True)
    operator_files.assert_valid(job.out / "logs")
    stamps = job.out / "stamps"
    result = Ended(
        job,
        codes,
        tuple(log.read_text(errors="replace") for log in logs),
        record.read(job.out / "record"),
        [json.loads(line) for line in stamps.read_text().splitlines()] if stamps.exists() else [],
        at,
    )
    assert code is None or set(codes) == {code}, (
        f"exit codes {codes} in place of {code}:\n{result.log[-5000:]}"
    )
    assert len(result.stamps) == len(job.faults), f"a fault did not strike:\n{result.log[-3000:]}"
    return result


def _trains(job: Job) -> bool:
    return "protected from step" in (job.out / "agent0.log").read_text(errors="replace")


def _second_starts(job: Job) -> list[tuple[int, Path]]:
    """Return the nodes that are started a second time, with their second logs."""
    return [(node, job.out / f"agent{node}-again.log") for node in job.returning_nodes]


def _wait_until_it_goes_on_without(node: int, job: Job) -> None:
    assert job.save is not None
    lease = job.save / naming.LEASE
    place = f" has the place of node {node}, "

    def goes_on() -> bool:  # a returning node finds the job by the lease, or at the store of its flags
        if node == 0:
            return lease.exists() and bool(json.loads(lease.read_text()).get("store"))
        return any(place in log.read_text(errors="replace") for log in job.out.glob("agent*.log"))

    waiting.written(job.out, goes_on, f"the job goes on without node {node}", within_s=job.timeout_s)


def _cold(job: Job) -> bool:
    """Return whether processes must be new interpreters; a process that used a device cannot be forked."""
    return job.cold or job.of_a_user or job.device != "cpu"


def _start_in(job: Job, node: int) -> Path:
    if not job.own_disks or job.save is None:
        return ROOT
    folder = job.save / f"node{node}"
    folder.mkdir(parents=True, exist_ok=True)
    return folder


def _command(job: Job, node: int, port: int) -> list[str]:
    layout = job.layout
    if job.publishing:
        launcher = [sys.executable, str(Path(__file__).with_name("publishing.py"))]
    elif job.killed_at_first_place and node >= job.nodes:
        script = str(Path(__file__).with_name("first_place.py"))
        launcher = [sys.executable, script, job.killed_at_first_place]
    elif node == job.dying_node:
        launcher = [sys.executable, str(Path(__file__).with_name("dying_node.py"))]
    else:
        launcher = [str(Path(sys.executable).with_name(job.launcher))]
    command = [
        *job.prefix,
        *launcher,
        *("--nproc-per-node", str(layout.processes // job.nodes)),
        *("--max-restarts", str(job.restarts)),
        *("--master-addr", job.network.address if job.network else "127.0.0.1", "--master-port", str(port)),
    ]
    if job.network is not None:
        command = [*job.network.command(min(node, len(job.network.names) - 1)), *command]
    if job.min_nodes:
        command += ["--nnodes", f"{job.min_nodes}:{job.nodes}", "--rdzv-backend", "c10d"]
        # All nodes are on one machine, so any of them could host the store: let it be node 0.
        command += ["--rdzv-conf", f"{QUICK},is_host={int(node == 0)}"]
        host = job.network.address if job.network else "localhost"
        addresses = job.addresses or (job.network.addresses if job.network else ())
        command += ["--rdzv-endpoint", f"{host}:{port}", "--rdzv-id", "job"]
        command += ["--local-addr", addresses[min(node, len(addresses) - 1)]] if addresses else []
    elif job.nodes > 1:
        command += ["--nnodes", str(job.nodes)]
        command += ["--node-rank", str(node)] if node < job.nodes else ["--ttp-spare"]
    if job.device == "cpu" and job.launcher == "ttprun":
        command += ["--ttp-device", "cpu"]
    if job.launcher == "ttprun" and layout.replica != "auto":
        command += ["--ttp-replica", layout.replica]
    command += job.options
    if job.device == "cpu" and job.launcher == "torchrun":
        command += ["-m", "adaptor.devices", "cpu"]
    if job.device in ("shared", "nccl"):
        command += [str(SHARED), *(("--nccl",) if job.device == "nccl" else ())]
        command += ["--at", *job.device_fault] if job.device_fault else []
    if job.script is None:
        command += [str(RECORD), str(job.out / "record")]
    if job.faults or {INJECTIONS, LYING} & job.environment.keys():
        command += [str(INJECT), "--stamp", str(job.out / "stamps")]
        command += [f"--fault={Fault.parse(fault)}" for fault in job.faults] + ["--"]
    if job.script is not None:
        return [*command, str(job.script), "--record", str(job.out / "record"), *job.arguments]
    if job.program is not None:
        return [*command, *job.program(job)]
    framework = job.framework or prepare.megatron_lm()
    if job.own_disks and job.save is not None:
        folder = Path()  # the folder in which the agent starts
        job = dataclasses.replace(job, save=folder, load=folder if job.load == job.save else job.load)
    return [*command, str(framework / "pretrain_gpt.py"), *training(job)]


def training(job: Job) -> list[str]:
    """Return the arguments of Megatron-LM's script in a job."""
    layout = job.layout
    framework = job.framework or prepare.megatron_lm()
    has_formats = "--ckpt-format" in (framework / "megatron/training/arguments.py").read_text()
    return args.tiny_gpt(
        train_iters=ITERATIONS,
        save=job.save,
        load=job.load,
        save_interval=job.save_interval,
        precision=layout.precision,
        tp=layout.tp,
        distributed_optimizer=layout.distributed_optimizer,
        checkpoint_format="torch" if has_formats else None,
        extra=(
            *("--data-cache-path", _index().name),
            *layout.arguments,
            *(layout.reference if job.launcher == "torchrun" else ()),
            *job.arguments,
        ),
    )


def _wait(agents: list[subprocess.Popen[bytes]], timeout_s: float) -> tuple[int, ...]:
    deadline = time.monotonic() + timeout_s
    codes = tuple(agent.wait(max(0.0, deadline - time.monotonic())) for agent in agents)
    return tuple(code if code >= 0 else 128 - code for code in codes)
