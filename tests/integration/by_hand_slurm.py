"""Runs jobs under a Slurm of its own, as root: `python -m tests.integration.by_hand_slurm --out OUT`.

Needs Debian's slurmctld, slurmd, slurm-client and munge, and Megatron-core (tests/frameworks/prepare.py).
Starts munged, slurmctld and two slurmd in their own namespaces (network, mounts, processes), and submits
examples/megatron_core/pretrain.py on both nodes by `srun ttprun`, without flags of torchrun:

end      a job that runs to its end doctor   `srun ttp doctor --nodes 2`: the nodes meet in the save folder,
and no check fails limit    at the time limit: SIGTERM, and the newest step is saved within KillWait requeue
`scontrol requeue`: saved, and the requeued job continues from the checkpoint preempt  preempted by a job of a
higher partition: saved, and continued after that job grace    as preempt with a GraceTime: the job ends in
time and requeues itself

Each case prints a line; the exit code is 1 if a case has failed.
"""

from __future__ import annotations

import argparse
import functools
import os
import re
import shutil
import subprocess
import sys
import time
from pathlib import Path

from tests import waiting
from tests.frameworks import prepare
from tests.waiting import captured

ROOT = Path(__file__).resolve().parents[2]
INSIDE = "TTP_BY_HAND_SLURM"
# A start of the job on a loaded machine, and the two minutes for which Slurm keeps a requeued job.
LONG_S = 480.0
NODES = ("n1", "n2")

CONF = """\
ClusterName=test
SlurmctldHost=controller
SlurmctldPort=17000
AuthType=auth/munge
AuthInfo=socket={out}/munge/socket
CryptoType=crypto/munge
SlurmUser=root
SlurmdUser=root
StateSaveLocation={out}/state
SlurmdSpoolDir={out}/spool/%n
SlurmdPidFile={out}/%n.pid
SlurmctldPidFile={out}/controller.pid
SlurmdLogFile={out}/%n.log
SlurmctldLogFile={out}/controller.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SelectType=select/linear
SchedulerType=sched/builtin
MpiDefault=none
ReturnToService=2
KillWait=60
JobRequeue=1
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
NodeName=n[1-2] NodeHostname={host} NodeAddr=10.77.0.[2-3] Port=[17001-17002] CPUs=1 State=UNKNOWN
PartitionName=low Nodes=n[1-2] Default=YES PriorityTier=1 PreemptMode=REQUEUE
PartitionName=grace Nodes=n[1-2] PriorityTier=1 GraceTime=60 PreemptMode=REQUEUE
PartitionName=high Nodes=n[1-2] PriorityTier=2 PreemptMode=OFF
"""

BATCH = """\
#!/usr/bin/env bash
srun --kill-on-bad-exit=0 {python} -m adaptor.launchers.cli.ttprun --ttp-tls plain --ttp-device cpu \
    --ttp-grace 50 --ttp-log-path {out}/logs {root}/examples/megatron_core/pretrain.py \
    --iters {iters} --save {out}/save
code=$?
{last}
exit $code
"""


def run(*command: str | Path) -> str:
    completed = captured([*map(str, command)])
    if completed.returncode:
        sys.exit(f"{' '.join(map(str, command))}: {completed.stderr}")
    return completed.stdout


# What Slurm says of its nodes and jobs is only to be asked for.
wait = functools.partial(waiting.until, pause_s=0.2, within_s=LONG_S)


def start_slurm(out: Path) -> None:
    run("ip", "link", "set", "lo", "up")
    hosts = ["127.0.0.1 localhost"]
    for number, name in enumerate(("controller", *NODES), start=1):
        run("ip", "addr", "add", f"10.77.0.{number}/24", "dev", "lo")
        hosts.append(f"10.77.0.{number} {name}")
    host = os.uname().nodename
    hosts.append(f"10.77.0.1 {host}")
    (out / "hosts").write_text("\n".join(hosts) + "\n")
    run("mount", "--bind", out / "hosts", "/etc/hosts")
    for folder in ("munge", "state", *(f"spool/{name}" for name in NODES)):
        (out / folder).mkdir(parents=True, mode=0o700)
    munge = out / "munge"
    (munge / "key").write_bytes(os.urandom(128))
    (munge / "key").chmod(0o400)
    places = [f"--{name}-file={munge / name}" for name in ("key", "pid", "log", "seed")]
    run("munged", "--force", *places, f"--socket={munge / 'socket'}")
    (out / "slurm.conf").write_text(CONF.format(out=out, host=host).replace("=controller", f"={host}"))
    os.environ["SLURM_CONF"] = str(out / "slurm.conf")
    run("slurmctld", "-c")
    for name in NODES:
        run("slurmd", "-N", name)
    wait(lambda: run("sinfo", "-h", "-t", "idle", "-o", "%D").strip() == "2", "both nodes are idle")


class Job:
    """A job that trains; `log` is the output of all its starts."""

    def __init__(self, out: Path, name: str, iters: int, *options: str, last: str = "") -> None:
        self._out = out / name
        self._out.mkdir()
        script = self._out / "job.sh"
        script.write_text(
            BATCH.format(python=sys.executable, out=self._out, root=ROOT, iters=iters, last=last)
        )
        kept = [
            "--nodes=2",
            "--ntasks-per-node=1",
            "--requeue",
            "--open-mode=append",
            f"--output={self._out}/log",
        ]
        self.number = run("sbatch", "--parsable", *kept, *options, script).strip()

    @property
    def log(self) -> str:
        path = self._out / "log"
        return path.read_text() if path.exists() else ""

    @property
    def last_lines(self) -> str:
        lines = [line for line in self.log.splitlines() if not line.startswith("step ")]
        return "\n".join(lines[-15:])

    @property
    def state(self) -> str:
        return run("scontrol", "show", "job", self.number).partition("JobState=")[2].split()[0]

    def steps(self) -> list[int]:
        return [int(number) for number in re.findall(r"^step (\d+) loss", self.log, re.MULTILINE)]

    def saved(self) -> list[int]:
        return [int(number) for number in re.findall(r"step (\d+) is saved", self.log)]

    def wait_for_step(self, step: int) -> None:
        wait(lambda: step in self.steps(), f"step {step} of job {self.number}:\n{self.last_lines}")

    def wait_for(self, *states: str) -> None:
        wait(lambda: self.state in states, f"job {self.number} is {' or '.join(states)}: {self.last_lines}")

    def goes_on(self) -> None:
        """Assert that the job continues after its newest saved step, and end the job."""
        (saved,) = set(self.saved())
        count_before = self.steps().count(saved + 1)
        wait(
            lambda: self.steps().count(saved + 1) > count_before,
            f"it goes on after step {saved}: {self.last_lines}",
        )
        assert self.steps()[-1] > saved
        run("scancel", self.number)
        self.wait_for("CANCELLED", "COMPLETED", "FAILED")


def end(out: Path) -> None:
    job = Job(out, "end", 5)
    job.wait_for("COMPLETED", "FAILED")
    assert job.state == "COMPLETED", job.last_lines
    assert job.steps() == [1, 2, 3, 4, 5], job.last_lines
    for number in (0, 1):
        assert (
            f"read from Slurm: 2 nodes (SLURM_STEP_NUM_NODES), this is node {number} (SLURM_NODEID)"
            in job.log
        )


def limit(out: Path) -> None:
    job = Job(out, "limit", 10**6, "--time=2")
    job.wait_for_step(1)
    job.wait_for("TIMEOUT", "COMPLETED", "FAILED")
    assert job.state == "TIMEOUT", job.last_lines
    assert job.saved(), job.last_lines


def requeue(out: Path) -> None:
    job = Job(out, "requeue", 10**6)
    job.wait_for_step(2)
    run("scontrol", "requeue", job.number)
    wait(job.saved, f"it saves: {job.last_lines}")
    job.goes_on()


def preempt(out: Path) -> None:
    _preempt(out, Job(out, "preempt", 10**6))


def grace(out: Path) -> None:
    requeues_itself = '[ $code -ne 143 ] || scontrol requeue "$SLURM_JOB_ID"'
    _preempt(out, Job(out, "grace", 10**6, "--partition=grace", last=requeues_itself))


def _preempt(out: Path, job: Job) -> None:
    job.wait_for_step(2)
    run("sbatch", "--nodes=2", "--partition=high", f"--output={out}/first", "--wrap", "srun hostname")
    wait(job.saved, f"it saves: {job.last_lines}")
    job.goes_on()


def doctor(out: Path) -> None:
    tried = "ttp doctor --nodes 2 --write-mib 1 --save"
    ttp = f"{sys.executable} -m adaptor.launchers.{tried} {out}/doctor"
    output = out / "said"
    run(
        *("sbatch", "--wait", "--nodes=2", "--ntasks-per-node=1", f"--output={output}"),
        *("--export=ALL,TTP_DEVICE=cpu", "--wrap", f"srun {ttp}"),
    )
    lines = output.read_text().splitlines()
    assert len([line for line in lines if line.endswith("0 failed")]) == 2, output.read_text()
    for name in ("nodes", "ports", "locks"):
        assert len([line for line in lines if line.split()[:2] == ["OK", name]]) == 2, output.read_text()


CASES = {case.__name__: case for case in (end, doctor, limit, requeue, preempt, grace)}


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, required=True, help="a folder, which is made anew")
    parser.add_argument("cases", nargs="*", choices=[*CASES, []], help="all, by default")
    args = parser.parse_args()
    core = prepare.megatron_core()
    if INSIDE not in os.environ:
        namespaces = ["unshare", "--mount", "--net", "--pid", "--fork", "--mount-proc", "--kill-child"]
        command = [sys.executable, "-m", "tests.integration.by_hand_slurm", *sys.argv[1:]]
        path = os.pathsep.join([str(core), str(ROOT)])
        return subprocess.run(
            [*namespaces, *command],
            env={**os.environ, INSIDE: "1", "PYTHONPATH": path, "OMP_NUM_THREADS": "1"},
            check=False,
        ).returncode
    out = args.out.resolve()
    shutil.rmtree(out, ignore_errors=True)
    out.mkdir(parents=True)
    start_slurm(out)
    failed = 0
    for name in args.cases or CASES:
        start = time.monotonic()
        try:
            CASES[name](out)
        except AssertionError as error:
            print(f"{name}: failed: {error}", flush=True)
            failed += 1
        else:
            print(f"{name}: passed ({time.monotonic() - start:.0f} s)", flush=True)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
