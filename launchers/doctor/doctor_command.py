"""`ttp doctor`: checks whether a job could be protected on this node, before a job starts.

Each check prints one line: the result and, for a problem, the remedy. FAIL: `ttprun` would refuse to start,
or a fault would lose steps. WARN: the setup could be better. Every ttprun imports this module for its hook,
so the checks are imported by the command alone.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import socket
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from adaptor import config, engines, hooks, misspelt, text
from adaptor.errors import AdaptorError, ConfigError
from adaptor.hooks import AgentHooks
from adaptor.launchers.cli import plan
from adaptor.terminal import FINDING, OK, Add, show

if TYPE_CHECKING:
    from adaptor.launchers.doctor.doctor_job import CheckResult, PlannedJob

# Of torchrun's rendezvous c10d.
RENDEZVOUS_PORT = 29400


def add(add_command: Add) -> None:
    """Add the command to `ttp`."""
    parser = add_command(
        "doctor", _answer, "whether a job could be protected on this node; nothing is trained"
    )
    parser.epilog = (
        "Run it on each node, with the settings of the job: with srun, or with the flags of the job by"
        " `ttprun FLAGS -m adaptor.launchers.cli.ttp doctor`, which starts no worker. With the script and its"
        " arguments it compares what the job needs with what is there. Exit codes: 0, nothing fails; 1,"
        " something does; 2, bad usage."
    )
    parser.add_argument("--save", type=Path, help="also try the folder of checkpoints (--save) of the job")
    parser.add_argument(
        "--nodes",
        type=plan.number(1, 1_000_000, "a number of nodes from 1 on"),
        default=1,
        help="it runs on so many nodes now (srun): also try ports, locks, clocks and routes between them",
    )
    parser.add_argument(
        "--rdzv-port",
        type=plan.number(1, 65535, "a port from 1 to 65535"),
        default=RENDEZVOUS_PORT,
        help="the port of the job's --rdzv-endpoint or --master-port, which --nodes tries, too"
        f" (default {RENDEZVOUS_PORT})",
    )
    parser.add_argument(
        "--write-mib",
        type=plan.number(1, 1 << 20, f"a number of MiB from 1 to {1 << 20}"),
        default=256,
        help="how much to write there for its speed (default 256)",
    )
    parser.add_argument(
        "--nnodes",
        type=plan.COUNT,
        help="nodes of the job (default: --nodes), of which each writes a part of a save",
    )
    parser.add_argument(
        "--nproc-per-node",
        type=plan.COUNT,
        help="ranks on each node (default: twice the fewest that the arguments allow, on one node)",
    )
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.add_argument("script", nargs=argparse.REMAINDER, metavar="-- script.py [args]")


def _answer(parsed: argparse.Namespace) -> int:
    from adaptor.launchers.doctor.doctor_job import PlannedJob

    if parsed.nodes > 1 and parsed.save is None:
        raise ConfigError(f"--nodes is {parsed.nodes}: name the folder in which they meet: --save DIR")
    nodes, script = parsed.nnodes or parsed.nodes, plan.script_of(parsed.script)
    if script:
        plan.require_ranks(nodes, parsed.nproc_per_node)
        plan.require_file(script)
    job = PlannedJob(script, nodes, parsed.nproc_per_node)
    all_findings: list[CheckResult] = []
    for finding in findings(parsed.save, parsed.write_mib << 20, parsed.nodes, parsed.rdzv_port, job):
        all_findings.append(finding)
        if not parsed.json:
            show([_line(finding)])
    bad = sum(finding.level == "FAIL" for finding in all_findings)
    if parsed.json:
        print(msgspec.json.encode({"host": socket.gethostname(), "findings": all_findings}).decode())
    else:
        show([f"{socket.gethostname()}: {len(all_findings)} checks, {bad} failed"])
    return FINDING if bad else OK


def _line(finding: CheckResult) -> str:
    remedy_text = f": {finding.remedy}" if finding.remedy else ""
    return text.encodable(f"{finding.level:<4} {finding.name:<12} {finding.words}{remedy_text}")


def findings(
    save: Path | None, size: int, nodes: int, rendezvous_port: int, job: PlannedJob
) -> Iterator[CheckResult]:
    """Make every check; an error in a check becomes a finding.

    Args:
        save: the folder of checkpoints; None: skip the folder.
        size: the bytes to write in the speed test of the folder.
        nodes: the number of nodes that run the doctor at the same time.
        job: the job to run on this node.
    """
    from adaptor.launchers.doctor import doctor_machine, doctor_nodes
    from adaptor.launchers.doctor.doctor_job import CheckResult

    try:
        settings = config.load()
        misspelt.refuse(os.environ)
        engines.find(settings.engine).require(settings)
        for hook in hooks.of_agent(settings):
            hook.require()
    except AdaptorError as error:
        yield CheckResult("settings", "FAIL", str(error))
        return
    yield CheckResult("settings", "OK", "every setting makes sense")
    checks: list[tuple[str, Callable[[], Iterator[CheckResult]]]] = [
        (check.__name__, lambda check=check: check(settings))  # type: ignore[misc]
        for check in doctor_machine.CHECKS
    ]
    if job.script:
        checks.append(("job", lambda: job.fits(settings)))
    if save is not None:
        folder = save
        if nodes > 1:  # first: the nodes would wait for a node that still measures its speed
            checks.append(("nodes", lambda: doctor_nodes.between(folder, nodes, settings, rendezvous_port)))
        checks.append(("save", lambda: doctor_machine.save_folder(folder, size, job, settings)))
    for name, check in checks:
        try:
            yield from check()
        except AdaptorError as error:
            yield CheckResult(name, "FAIL", str(error))
        except Exception as error:  # a failed check hides no other check
            yield CheckResult(name, "WARN", f"this could not be checked: {text.describe(error)}")


class DoctorHooks(AgentHooks):
    """`ttprun FLAGS -m adaptor.launchers.cli.ttp doctor` starts no worker: workers may be unable to start."""

    def ttp_command(self, parsed: argparse.Namespace) -> list[str]:
        script = parsed.training_script
        is_ttp = script == "adaptor.launchers.cli.ttp" if parsed.module else Path(script).name == "ttp"
        is_doctor = is_ttp and list(parsed.training_script_args[:1]) == ["doctor"]
        return arguments_of_job(parsed) if is_doctor else []


def arguments_of_job(parsed: argparse.Namespace) -> list[str]:
    """Return the arguments of `ttp` for a ttprun whose job is the doctor.

    Nodes, ranks and rendezvous port are taken from the flags of ttprun; the doctor's own arguments win.
    """
    from torch.distributed import run

    script_arguments, taken = list(parsed.training_script_args), list[str]()
    fewest, most_nodes = run.parse_min_max_nnodes(parsed.nnodes)
    if fewest == most_nodes and not parsed.standalone:
        taken += ["--nnodes", str(most_nodes)]
        options = (
            script_arguments[: script_arguments.index("--")] if "--" in script_arguments else script_arguments
        )
        if any(option.partition("=")[0] == "--save" for option in options):
            taken += ["--nodes", str(most_nodes)]
    with contextlib.suppress(ValueError):  # auto, on a machine that has no such device
        taken += ["--nproc-per-node", str(run.determine_local_world_size(parsed.nproc_per_node))]
    port = parsed.rdzv_endpoint.rpartition(":")[2] if parsed.rdzv_backend != "static" else parsed.master_port
    if str(port).isdigit():
        taken += ["--rdzv-port", str(port)]
    return ["doctor", *taken, *script_arguments[1:]]
