"""The commands of `python -m adaptor`.

`python -m adaptor report [-- script.py ARGUMENTS]`: the protection of a job, without training.

`python -m adaptor transform SRC DST`: a checkpoint in other parallel sizes (`adaptor/transform/command.py`).

`python -m adaptor layout merge DIR OUT`: joins layout files of stages (the same file).

`ttp` has the commands about jobs and checkpoints: `ttp verify`, `ttp store`.
"""

from __future__ import annotations

import argparse
import dataclasses
import importlib
import importlib.util
import json
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any, TextIO, cast

from adaptor import _script, context, devices, engines, misspelt, plug_ins
from adaptor.errors import AdaptorError, DriftError, StartError

if TYPE_CHECKING:
    from collections.abc import Callable

    from adaptor.preflight import Findings

_MORE = (
    "add the script's arguments to see what of the job would be protected: "
    "python -m adaptor report -- script.py ARGUMENTS"
)


def run(arguments: list[str] | None) -> int:
    """Print the report, or run another command.

    Args:
        arguments: of the command line; None for the arguments of this process.

    Returns:
        The exit code: 0 where every patch fits and nothing is refused, 1 where not, where the script is not
        protected, or where an error prevents an answer, 2 for bad usage.
    """
    try:
        parsed = _parser().parse_args(arguments)
    except AdaptorError as error:  # of a plug-in
        return _bad_usage(str(error))
    if parsed.command != "report":
        code: int = parsed.answer(parsed)
        return code
    script = parsed.script[1:] if parsed.script[:1] == ["--"] else parsed.script
    if script:
        if not Path(script[0]).is_file():
            return _bad_usage(f"there is no script {script[0]}")
        _script.leave_own_path()
        _script.take_over(script)
    try:
        settings = context.begin().settings
        engines.find(settings.engine).require(settings)
        devices.require(settings.device)
        misspelt.refuse(os.environ)
        warning = plug_ins.conflict()
    except AdaptorError as error:
        return _bad_usage(str(error))
    world_size_source = ("WORLD_SIZE", os.environ.get("WORLD_SIZE", ""))
    if parsed.world_size is not None:
        world_size_source = ("--world-size", parsed.world_size)
    try:
        world_size = _ranks(*world_size_source)
        ranks_per_node = _ranks("--ranks-per-node", parsed.ranks_per_node or "")
    except ValueError as error:
        return _bad_usage(str(error))
    if warning:
        print(f"python -m adaptor: {warning}", file=sys.stderr)
    stdout = _own_stdout()
    device = settings.device
    if len(script) > 1 and not device and not devices.has_accelerator():
        device = "cpu"  # a framework refuses a machine without an accelerator before it reads its arguments
    if device:
        devices.activate(device)
    text, code = _report(script, world_size, ranks_per_node, parsed.racks, parsed.json)
    if stdout is not None:
        with stdout:
            print(text, file=stdout)
    return code


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m adaptor", allow_abbrev=False)
    commands = parser.add_subparsers(dest="command", required=True)
    report = commands.add_parser(
        "report",
        allow_abbrev=False,
        help="say whether the patches fit the framework that a script imports and, with its arguments, what"
        " of the job would be protected; nothing is trained",
    )
    report.add_argument("--json", action="store_true", help="print one JSON object")
    report.add_argument(
        "--world-size",
        metavar="N",
        help="ranks of the job (default WORLD_SIZE, else twice the fewest that the script's arguments allow)",
    )
    report.add_argument(
        "--ranks-per-node", metavar="N", help="how many of them are on one node (default: all), for --json"
    )
    report.add_argument(
        "--rack", dest="racks", action="append", default=[], help="of each node, in their order, for --json"
    )
    report.add_argument("script", nargs=argparse.REMAINDER, metavar="-- script.py [args]")
    for add in plug_ins.load_all(plug_ins.MODULE_COMMANDS):
        cast("Callable[[Any], None]", add)(commands)
    return parser


def _bad_usage(line: str) -> int:
    print(f"python -m adaptor: {line}", file=sys.stderr)
    return 2


def _ranks(name: str, text: str) -> int | None:
    """Return a number of ranks, None where `text` is empty. Raises ValueError for any other text."""
    if not text:
        return None
    try:
        ranks = int(text)
    except ValueError:
        ranks = 0
    if ranks < 1:
        raise ValueError(f"{name} is {text}: it must be a number of ranks from 1 on")
    return ranks


def _own_stdout() -> TextIO | None:
    """Keep stdout for the report: other output of this process and its children to stdout is dropped until
    the end of the process.

    Modules of a framework, C code and child processes write to the descriptor 1, past `sys.stdout`.

    Returns:
        The stream for the report, None without a stdout.
    """
    if sys.stdout is None:  # closed before Python started
        return None
    sys.stdout.flush()
    try:
        kept = os.fdopen(os.dup(1), "w", encoding=sys.stdout.encoding, errors=sys.stdout.errors)
    except OSError:
        return None
    nothing = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nothing, 1)
    os.close(nothing)
    return kept


def _report(
    script: list[str], world_size: int | None, ranks_per_node: int | None, racks: list[str], as_json: bool
) -> tuple[str, int]:
    """Return the text to print, and the exit code."""
    import adaptor.patches as patches
    from adaptor import patching
    from adaptor.preflight import Findings

    findings = Findings()
    shown: tuple[patching.Outcome, ...] = ()
    broken: list[str] = []  # of the framework, where it may be for the reason for which the script has ended
    try:
        patches.load("ttp")
    except StartError as error:
        findings.refusals.append(str(error))
    else:
        patching.arm("ttp", raises=False, wait_for_claim=patches.own())
        if len(script) > 1:
            findings = _examined(script, world_size)
        absent = patches.of_absent_frameworks()
        broken = _import_targets(tuple(name for name in patching.target_modules("ttp") if name not in absent))
        for misfit in patching.misfits("ttp"):
            (findings.refusals if isinstance(misfit, DriftError) else broken).append(str(misfit))
        outcomes = patching.outcomes("ttp")
        units_there = {outcome.unit for outcome in outcomes if outcome.found is not None}
        shown = tuple(outcome for outcome in outcomes if outcome.unit in units_there)
        if not (shown or broken or findings.refusals):
            broken.append("none of the patched modules is on the path: is the framework installed?")
    if not findings.error:
        findings.refusals += broken
    lines = [*findings.refusals, *([findings.error, *broken] if findings.error else [])]
    verdict = _verdict(findings, len(lines), examined=len(script) > 1)
    code = 1 if lines or findings.unprotected else 0
    if as_json:
        plan = findings.plan(ranks_per_node, racks)
        report = {
            "fits": not code,
            "verdict": verdict,
            "refusals": lines,
            "replica": findings.replica,
            "bytes_per_rank_and_parameter": findings.cost(),
            "not_online": findings.not_online,
            "layout": dataclasses.asdict(findings.layout) if findings.layout is not None else None,
            "plan": dataclasses.asdict(plan) if plan is not None else None,
            "patches": [dataclasses.asdict(outcome) for outcome in shown],
        }
        return json.dumps(report), code
    for line in lines:
        print(f"python -m adaptor: {line}", file=sys.stderr)
    table = f"{patching.format_outcomes(shown)}\n" if shown else ""
    return f"{table}verdict: {verdict}", code


def _examined(script: list[str], world_size: int | None) -> Findings:
    import adaptor
    from adaptor import _start, patches, patching, preflight

    adaptor._count_as_enabled()  # a script that calls enable() itself has no agent here
    patches.load("report")
    patching.arm("report", raises=False)
    _start.expect_plug_ins()
    return preflight.run(script, world_size)


def _verdict(findings: Findings, lines: int, *, examined: bool) -> str:
    """Return the last line of the report."""
    further_lines = f" (and {lines - 1} more)" if lines > 1 else ""
    if findings.refusals:
        return f"not protected: {findings.refusals[0]}{further_lines}"
    if findings.error:
        return f"not known: {findings.error}{further_lines}"
    return findings.words() if examined else f"the patches fit; {_MORE}"


def _import_targets(names: tuple[str, ...]) -> list[str]:
    """Import all modules of `names`.

    Returns:
        A line for each present module that cannot be imported.
    """
    failures: list[str] = []
    for name in names:
        try:
            importlib.import_module(name)
        except ModuleNotFoundError as error:
            if error.name is None or not f"{name}.".startswith(f"{error.name}."):
                failures.append(f"{name} cannot be imported: {error}")
        except Exception as error:  # whatever a framework raises when it is imported
            failures.append(f"{name} cannot be imported: {type(error).__name__}: {error}")
    return failures
