"""`ttp plan` and `ttprun --dry-run`: the costs and gains of protection for a job, without training.

Another process runs the script until its arguments are known (`python -m adaptor report`): the framework's
own parser and every refusal.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import msgspec

from adaptor import terminal, text
from adaptor.errors import ConfigError
from adaptor.protocol.records import ProtectionPlan, Replicas
from adaptor.terminal import FINDING, OK, USAGE, Add
from adaptor.text import duration

# The default bandwidth of all writers together into a save folder, in bytes per second.
BANDWIDTH = 1e9


class _Layout(msgspec.Struct):
    data_parallel: int


class PlanReport(msgspec.Struct):
    """The used part of the report."""

    verdict: str
    fits: bool
    refusals: list[str]
    not_online: list[str] | None
    layout: _Layout | None
    plan: ProtectionPlan | None


def add(add_command: Add) -> None:
    """Add the command to `ttp`."""
    parser = add_command("plan", _answer, "what protection of a job would take and give; nothing is trained")
    parser.add_argument("--nnodes", type=COUNT, default=1, help="nodes of the job (default 1)")
    parser.add_argument(
        "--nproc-per-node",
        type=COUNT,
        help="ranks on each node (default: twice the fewest that the arguments allow, on one node)",
    )
    parser.add_argument(
        "--hosts",
        type=Path,
        metavar="FILE",
        help="a line 'HOST RACK' for each node, in their order: say whether any 1 rack may be lost",
    )
    parser.add_argument(
        "--bandwidth",
        type=_bandwidth,
        default=BANDWIDTH,
        metavar="GB/S",
        help="what all ranks together write into the save folder in a second (default 1)",
    )
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.add_argument("script", nargs=argparse.REMAINDER, metavar="-- script.py [args]")


def number(least: int, maximum: int, noun: str) -> Callable[[str], int]:
    """Return the argparse type of a number from `least` to `most`."""

    def parse(text: str) -> int:
        value = int(text) if text.isascii() and text.isdigit() else least - 1
        if not least <= value <= maximum:
            raise argparse.ArgumentTypeError(f"{text!r}: it must be {noun}")
        return value

    return parse


COUNT = number(1, 1_000_000, "a number from 1 on")


def _bandwidth(text: str) -> float:
    try:
        bandwidth = float(text)
    except ValueError:
        bandwidth = 0.0
    if not 1e-6 <= bandwidth <= 1e6:
        raise argparse.ArgumentTypeError(f"{text!r}: it must be a number of GB/s above 0")
    return bandwidth * 1e9


def _answer(parsed: argparse.Namespace) -> int:
    script = script_of(parsed.script)
    if not script:
        raise ConfigError("name the script and its arguments: ttp plan -- pretrain_gpt.py ARGUMENTS")
    require_ranks(parsed.nnodes, parsed.nproc_per_node)
    hosts = racks_of(parsed.hosts, parsed.nnodes) if parsed.hosts is not None else {}
    require_file(script)
    return show(
        script,
        parsed.nnodes,
        parsed.nproc_per_node,
        bandwidth=parsed.bandwidth,
        racks=hosts,
        as_json=parsed.json,
    )


def script_of(arguments: Sequence[str]) -> list[str]:
    """Return the script and its arguments without the `--` before."""
    return list(arguments[1:] if arguments[:1] == ["--"] else arguments)


def require_ranks(nodes: int, ranks_per_node: int | None) -> None:
    """Refuse several nodes without the number of ranks per node. Raises ConfigError."""
    if ranks_per_node is None and nodes > 1:
        raise ConfigError(f"--nnodes is {nodes}: say --nproc-per-node, too")


def require_file(script: Sequence[str]) -> None:
    """Refuse a script that does not exist. Raises ConfigError."""
    if not Path(script[0]).is_file():
        raise ConfigError(f"there is no script {script[0]}")


def racks_of(path: Path, nodes: int) -> dict[str, str]:
    """Return the rack of each host of a file, in the order of its lines.

    Raises:
        ConfigError: the file cannot be read, a line is not 'HOST RACK', or the number of hosts differs from
            `nodes`.
    """
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except OSError as error:
        raise ConfigError(f"--hosts {path} cannot be read ({error.strerror})") from None
    except UnicodeDecodeError:
        raise ConfigError(f"--hosts {path} cannot be read (it is no text in UTF-8)") from None
    rack_by_node: dict[str, str] = {}
    for number, line in enumerate(lines, 1):
        fields = line.partition("#")[0].split()
        if not fields:
            continue
        if len(fields) != 2:
            raise ConfigError(f"--hosts {path}, line {number}: {line!r}: it must be HOST RACK")
        if fields[0] in rack_by_node:
            raise ConfigError(f"--hosts {path}, line {number}: {fields[0]} is there twice")
        rack_by_node[fields[0]] = fields[1]
    if not rack_by_node:
        raise ConfigError(f"--hosts {path} names no host: it must have a line 'HOST RACK' for each node")
    if len(rack_by_node) != nodes:
        raise ConfigError(f"--hosts {path} has {len(rack_by_node)} hosts, and --nnodes is {nodes}")
    return rack_by_node


def show(
    script: Sequence[str],
    nodes: int,
    ranks_per_node: int | None,
    *,
    bandwidth: float = BANDWIDTH,
    racks: Mapping[str, str] | None = None,
    as_json: bool = False,
) -> int:
    """Print the plan of a job; return the exit code: 1 for a refused job, 2 for bad usage.

    Args:
        ranks_per_node: None: as many as a second copy needs, on one node.
        bandwidth: of the save folder, in bytes per second.
        racks: the rack of each host, in the order of the nodes; None or empty: unknown.
        as_json: print one JSON object.
    """
    code, answer = _ask(script, nodes, ranks_per_node, list((racks or {}).values()))
    if code not in (OK, FINDING):
        return USAGE
    report = msgspec.json.decode(answer, type=PlanReport)
    plan = report.plan
    save_seconds = plan.save / bandwidth if plan is not None and plan.save is not None else None
    if as_json:
        report_fields = msgspec.json.decode(answer)
        if plan is not None:
            used_bandwidth = None if save_seconds is None else bandwidth
            report_fields["plan"].update(bandwidth=used_bandwidth, save_seconds=save_seconds)
        print(msgspec.json.encode(report_fields).decode())
    else:
        terminal.show(map(text.encodable, _lines(report, list(racks or {}), bandwidth, save_seconds)))
    return code


def report(script: Sequence[str], nodes: int, ranks_per_node: int | None) -> PlanReport | None:
    """Return the report about a job; None on failure, after a message on stderr.

    Args:
        ranks_per_node: None: as many as a second copy needs, on one node.
    """
    code, answer = _ask(script, nodes, ranks_per_node, [])
    return msgspec.json.decode(answer, type=PlanReport) if code in (OK, FINDING) else None


def _ask(
    script: Sequence[str], nodes: int, ranks_per_node: int | None, racks: Sequence[str]
) -> tuple[int, bytes]:
    """Return the exit code and the JSON of the reporting process."""
    sizes: list[str] = []
    if ranks_per_node is not None:
        sizes = ["--world-size", str(nodes * ranks_per_node), "--ranks-per-node", str(ranks_per_node)]
    sizes += [f"--rack={rack}" for rack in racks]
    command = [sys.executable, "-m", "adaptor", "report", "--json", *sizes, "--", *script]
    completed = subprocess.run(command, stdout=subprocess.PIPE, check=False)
    return completed.returncode, completed.stdout


def _lines(
    report: PlanReport, hosts: Sequence[str], bandwidth: float, save_seconds: float | None
) -> list[str]:
    plan = report.plan
    lines = [f"REFUSED {line}" for line in report.refusals]
    if plan is None or report.layout is None:
        return [*lines, f"verdict      {report.verdict}"]
    lines.append(
        f"ranks        {plan.ranks} on {plan.nodes} node{'' if plan.nodes == 1 else 's'},"
        f" data-parallel size {report.layout.data_parallel}"
    )
    if plan.parameters is not None:
        parameter_text, taken = _billions(plan.parameters), _bytes(plan.training)
        lines += [
            f"model        {parameter_text} parameters on the rank that has most (calculated)",
            f"memory       {taken} there of weights, gradients and optimizer, without the adaptor",
        ]
    columns = f"{'more memory':>12} {'local copy':>12} {'host copies':>12} {'sent in a step':>15}"
    lines += ["", f"{'replicas':<12} {columns}  survives"]
    for row in plan.replicas:
        kind = f"{'*' if row.chosen else ' '} {row.kind}"
        memory, local, sent = _bytes(row.memory), f"+ {_bytes(row.local_copy)}", _bytes(row.sent)
        host = _bytes(row.host_copy)
        lines.append(f"{kind:<12} {memory:>12} {local:>12} {host:>12} {sent:>15}  {row.survives}")
    lines += ["", "* what this job would have; each column for each rank; local copy: with TTP_LOCAL_COPY;"]
    lines.append("  host copies: with TTP_HOST_COPY, memory of the host")
    for row in plan.replicas:
        if row.chosen:
            lines += _of_racks(row, hosts)
            host = f"{_bytes(row.host_copy)} of host memory for each rank" if row.host_copy else ""
            if plan.remedy:
                lines.append("; ".join(filter(None, (f"remedy       {plan.remedy}", host))))
            if plan.makes_copies and host:
                twice = ", and as much again for the node before" if plan.nodes > 1 else ""
                lines.append(f"host copies  {host}{twice}")
    if save_seconds is not None:
        save, speed, writer = map(_bytes, (plan.save, bandwidth, plan.writer))
        seconds = duration(save_seconds)
        lines.append(
            f"a save       {save}, {seconds} at {speed}/s; one writer gathers {writer} in host memory"
        )
    if report.not_online is not None:
        online = "online: a fault costs new processes in place of the failed ranks alone"
        reasons = "; ".join(report.not_online)
        lines.append(
            f"recovery     {f'not online: a fault restarts all ranks ({reasons})' if reasons else online}"
        )
    return [*lines, f"verdict      {report.verdict}"]


def _of_racks(row: Replicas, hosts: Sequence[str]) -> list[str]:
    if row.any_rack is None:
        return []
    if row.any_rack:
        return ["racks        any 1 rack may be lost, with the nodes in the order of the file"]
    line = "racks        the loss of one rack can lose all holders of a shard, with this order of the nodes"
    if row.better is None:
        return [
            line,
            "             nor may any 1 rack be lost with the nodes sorted by rack, or of each rack in turn",
        ]
    order = ", ".join(hosts[node] for node in row.better)
    return [line, f"             any 1 rack may be lost with this order: {order}"]


def _billions(count: float) -> str:
    return f"{count / 1e9:.3g} billion" if count >= 1e8 else f"{count / 1e6:.3g} million"


def _bytes(count: float | None) -> str:
    if count is None:
        return "not known"
    for unit, of_unit in (("TB", 1e12), ("GB", 1e9), ("MB", 1e6)):
        if count >= of_unit:
            return f"{count / of_unit:.3g} {unit}"
    return f"{count / 1e3:.3g} kB"
