"""`ttprun`: torchrun, with an agent that saves the newest finished step when a worker dies.

`ttprun` takes every flag of the installed torch's torchrun, and `--ttp-*`. With ENABLE_TTP=False torch's own
main runs, and nothing of the adaptor is active in a worker.
"""

from __future__ import annotations

import argparse
import os
import signal
import sys
from collections.abc import Callable, Sequence
from functools import partial
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING

from adaptor import _script, config, devices, engines, hooks, misspelt, output, plug_ins, text
from adaptor.errors import AdaptorError, ConfigError, StartError
from adaptor.hooks import AgentHooks
from adaptor.launchers.agent.processes import WORKER
from adaptor.launchers.cli import flags, plan, start_checks
from adaptor.launchers.platforms import ascend_cards, detect
from adaptor.launchers.platforms.reading import this_machine
from adaptor.launchers.records.log import RunRecord, conclude, tell_error
from adaptor.launchers.rendezvous import agreement
from adaptor.launchers.spares import spare_node
from adaptor.protocol.messages import Endpoint
from adaptor.protocol.spare_messages import Gate
from adaptor.terminal import exit_code_of

if TYPE_CHECKING:
    from adaptor.launchers.rendezvous.rendezvous_store import MovedJob

# torch's own default of --rdzv-id.
_NO_ID = "none"
# The warning for TTP_TLS=plain.
TRUSTED = (
    "[ttp] TTP_TLS is plain: the network of this job is trusted; whoever reaches it can read what agents say,"
    " and act as one of them"
)
USAGE_EXIT_CODE = 2
# The kernel ends all connections of a dead process within milliseconds, in any order.
_ENDS_TOGETHER_S = 1.0
DEVICE_WORKER = Path(devices.__file__).with_name("__main__.py")


def main(argv: list[str] | None = None) -> int:
    """Run a job; return its exit code (docs/exit_codes.md)."""
    try:
        start_checks.require_working_directory()
        return _main(sys.argv[1:] if argv is None else argv)
    except (ConfigError, StartError) as error:
        output.tell(f"ttprun: error: {error}")
        return USAGE_EXIT_CODE
    finally:
        output.finish()


def _main(arguments: list[str]) -> int:
    # Accepted only alone: in the parser the flag would make an abbreviation of a torchrun flag ambiguous.
    if arguments == [flags.VERSION]:
        print(f"ttprun of ttp-adaptor {metadata.version('ttp-adaptor')}, torch {metadata.version('torch')}")
        return 0
    machine = this_machine()
    arguments, hosts = flags.take_hosts(arguments)
    arguments, is_spare = flags.without(flags.SPARE, arguments)
    arguments, dry_run = flags.without(flags.DRY_RUN, arguments)
    parsed = flags.parse(arguments)
    settings = config.load()
    for flag in flags.after_script(parsed) if settings.enabled else ():
        output.tell(f"[ttp] {flag} is an argument of the script: the flags of ttprun come before the script")
    parsed.ttp_spare = is_spare
    if is_spare:
        spare_node.require(parsed, flags.given_names(arguments), settings)
        parsed.node_rank = 0  # a platform may have set PET_NODE_RANK
    read = detect.fill(parsed, flags.given_names(arguments), os.environ, settings.platform, machine)
    if dry_run:
        return _plan(parsed, settings, hosts)
    if hosts is not None:
        raise ConfigError(f"{flags.HOSTS} {hosts} belongs to {flags.DRY_RUN}: a start reads no racks")
    if read is None:
        return _run(parsed, settings)
    if read.card is None:
        output.tell(read.line)
        return _run(parsed, settings)
    if read.card.index:
        return ascend_cards.wait_for_first(read.card, machine)
    with ascend_cards.First(read.card) as first:
        output.tell(read.line)
        for name in ascend_cards.OF_A_CARD:
            os.environ.pop(name, None)
        code = _run(parsed, settings, first.tell)
        first.tell(code)
        return code


def _plan(parsed: argparse.Namespace, settings: config.Config, hosts: str | None) -> int:
    """Print the costs and gains of protection, after the checks before a start except two.

    The two checks write: into the log folder, and into the store. `hosts` is the file with the racks of
    nodes.
    """
    from torch.distributed import run

    if not settings.enabled:
        raise ConfigError("ENABLE_TTP is False: without the adaptor there is nothing to plan")
    if parsed.module or parsed.no_python:
        raise ConfigError(f"{flags.DRY_RUN}: give ttprun the path of a Python script")
    start_checks.require_script(parsed, settings)
    devices.require(settings.device)
    parts = hooks.of_agent(settings)
    for part in parts:
        part.require()
    _check(parsed, settings, parts)
    _, nodes = run.parse_min_max_nnodes(parsed.nnodes)
    ranks = run.determine_local_world_size(parsed.nproc_per_node)
    racks = plan.racks_of(Path(hosts), nodes) if hosts is not None else {}
    job = [parsed.training_script, *parsed.training_script_args]
    return exit_code_of(lambda: plan.show(job, nodes, ranks, racks=racks), "ttprun")


def _check(
    parsed: argparse.Namespace, settings: config.Config, parts: Sequence[AgentHooks]
) -> engines.Engine:
    """Check everything that needs no writing; return the engine."""
    engine = engines.find(settings.engine)
    engine.require(settings)
    misspelt.refuse(os.environ)
    flags.require_sense(parsed)
    start_checks.require_safe_connections(parsed, settings)
    for part in parts:
        part.check(parsed, "" if engine.has_own_agent else settings.engine)
    if not engine.has_own_agent and (name := start_checks.needs_own_agent(settings)):
        raise ConfigError(
            f"{name} is set: with TTP_ENGINE={settings.engine} the adaptor's controller does not run;"
            f" leave out {name}"
        )
    start_checks.require_interfaces(os.environ.get(start_checks.INTERFACES, ""))
    return engine


def _run(
    parsed: argparse.Namespace, settings: config.Config, ends: Callable[[int], None] = lambda code: None
) -> int:
    """Make the checks before the start, and run the job.

    Args:
        ends: is called with the exit code if the process ends without returning it.
    """
    try:
        parts = hooks.of_agent(settings)
        for part in parts:
            if arguments := part.ttp_command(parsed):
                from adaptor.launchers.cli import ttp

                return ttp.main(arguments)
        if settings.enabled or settings.device:
            start_checks.require_script(parsed, settings)
            devices.require(settings.device)
        if settings.enabled:
            start_checks.require_accelerator(parsed, settings)
        if settings.layout_only and not settings.enabled:
            raise ConfigError(
                "TTP_LAYOUT_ONLY is set and ENABLE_TTP is False: without the adaptor the job would train;"
                " leave out one of them"
            )
        for part in parts:
            part.require()
        engine = _check(parsed, settings, parts) if settings.enabled else None
        if engine is not None:
            if conflict := plug_ins.conflict():
                output.tell(f"[ttp] {conflict}")
            if line := start_checks.takes_fixed_nodes(parsed):
                output.tell(line)
            if engine.has_own_agent and (line := start_checks.shortens_online(settings)):
                output.tell(line)
            start_checks.require_folder(settings.log_path)
            if engine.has_own_agent and start_checks.trusts_the_network(parsed, settings):
                output.tell(TRUSTED)
            for setting in config.settings():  # so that restarted workers need no file
                if setting.inline is not None and setting.variable in os.environ:
                    os.environ[setting.variable] = setting.inline(os.environ[setting.variable])
            if not engine.has_own_agent:
                os.environ.update(engine.prepare(settings))
        for part in parts:
            if code := part.prepare():
                return code
    except (ConfigError, StartError) as error:
        output.tell(f"ttprun: error: {error}")
        return USAGE_EXIT_CODE
    if engine is not None:
        return _run_with_survivors(parsed, engine, settings, parts, ends)
    return _run_plain(parsed, settings.device)


def _run_plain(parsed: argparse.Namespace, device: str) -> int:
    """Run plain torchrun; with TTP_DEVICE each worker still gets the stand-ins for the device."""
    from torch.distributed import run
    from torch.distributed.elastic.multiprocessing.errors import record

    if device:
        _insert_program(parsed, DEVICE_WORKER, device)
    record(run.run)(parsed)  # as torch's main
    return 0


def _keep_ignoring_hangups(parsed: argparse.Namespace) -> None:
    """Keep SIGHUP ignored under nohup: torch would handle SIGHUP, and the job would end with the
    terminal.
    """
    handled = getattr(parsed, "signals_to_handle", None)
    if handled and signal.getsignal(signal.SIGHUP) is signal.SIG_IGN:
        parsed.signals_to_handle = ",".join(n for n in handled.split(",") if n.strip() != "SIGHUP")


def _insert_program(parsed: argparse.Namespace, program: Path, *arguments: str) -> None:
    """Let each worker run `program` with `arguments`, which then runs the script."""
    marker = [_script.MODULE_FLAG] if parsed.module else []
    parsed.training_script_args = [*arguments, *marker, parsed.training_script, *parsed.training_script_args]
    parsed.training_script = str(program.absolute())
    parsed.module = False
    parsed.run_path = False


def _run_with_survivors(
    parsed: argparse.Namespace,
    engine: engines.Engine,
    settings: config.Config,
    parts: Sequence[AgentHooks],
    ends: Callable[[int], None],
) -> int:
    from torch.distributed.elastic.multiprocessing import api as processes
    from torch.distributed.elastic.multiprocessing.api import SignalException
    from torch.distributed.launcher import api

    from adaptor.launchers.agent.elastic_agent import SurvivorsAgent
    from adaptor.launchers.agent.elastic_outputs import Tee
    from adaptor.launchers.rendezvous import rendezvous_store, waiting
    from adaptor.launchers.rendezvous.rendezvous_handler import Registry

    # A pipe without a reader must not block a restart: divert torch's log, and its copies of worker output.
    output.divert_logging()
    processes.TailLog = Tee  # type: ignore[misc]
    facts = agreement.facts_of_this_node(parsed, settings)
    record = RunRecord(script=parsed.training_script, facts=facts)
    if flags.may_have_spares(parsed):
        record.common = spare_node.about_this_node(parsed, record.facts)
    _insert_program(parsed, WORKER)
    _keep_ignoring_hangups(parsed)
    job = rendezvous_store.MovedJob(parsed)

    def look() -> float | None:
        job.look()
        return record.taken.require_gate() if record.taken is not None else None

    if engine.has_own_agent:
        # torch makes its agent by this name.
        api.LocalElasticAgent = partial(SurvivorsAgent, settings, _job(parsed), parts, record)  # type: ignore[misc, assignment]
        # torch makes its rendezvous by this name.
        api.rdzv_registry = Registry(api.rdzv_registry, look)  # type: ignore[assignment]
    code, at_once = 1, False
    gate: Gate | None = None
    lost: spare_node.Taken | None = None
    lost_agents = []  # each keeps torch's rendezvous, which a thread may still use
    try:
        while True:
            try:
                code = _take_part(parsed, settings, engine, record, job, gate, lost)
                break
            except (waiting.MovedError, waiting.StoreLostError) as error:  # nothing was started here
                output.tell(f"[ttp] {error}")
                parsed.ttp_spare |= isinstance(error, waiting.PlaceLostError)
                lost = record.taken if isinstance(error, waiting.GateLostError) else None
                if lost is None:
                    gate = error.gate if isinstance(error, waiting.FullJobError) else None
                lost_agents.append(record.end_agent)
                at_once, record.end_agent = record.end_agent() or at_once, lambda: False
                if isinstance(error, waiting.StoreLostError) and not job.moves():
                    break
    except ConfigError as error:
        output.tell(f"ttprun: error: {error}")
        code = USAGE_EXIT_CODE
    except StartError as error:
        output.tell(f"[ttp] {error}")
    except waiting.Interrupted as error:
        verdict = record.verdict
        end_text = f"ended by {error.sigval.name} while it waited for {error.what}"
        if verdict is None:
            conclude(f"{end_text}; nothing was started")
        else:
            conclude(f"{verdict.line}; {end_text}", verdict.save_folder)
        code, at_once = 128 + error.sigval, True  # the waiting thread would abort the interpreter
    except SignalException as error:  # the signal came during the last line
        code, at_once = end_by(error.sigval, record), True
    finally:
        try:
            waiting.hear_signals()
            # After an error of the control thread its tasks would print warnings at the interpreter's end.
            at_once = record.end_agent() or at_once or waiting.is_abandoned()
            waiting.ignore_signals()
        except SignalException:  # another signal: end at once
            at_once = True
        if at_once:
            ends(code)
            output.leave(code)
    return code


def _take_part(
    parsed: argparse.Namespace,
    settings: config.Config,
    engine: engines.Engine,
    record: RunRecord,
    job: MovedJob,
    gate: Gate | None,
    lost: spare_node.Taken | None,
) -> int:
    """Find the job and take part in it, as a node or as a spare node; return the exit code.

    Args:
        gate: where this node waits as a spare node; None: `parsed` says whether this node is a spare node.
        lost: as in `spare_node.wait`.

    Raises:
        MovedError: the job is elsewhere, or takes this node as a spare node: the next call goes there.
        StoreLostError: the job may be elsewhere soon.
    """
    from adaptor.launchers.rendezvous import rendezvous_store

    record.taken = None  # a place that could not be taken
    if engine.has_own_agent and gate is None and lost is None:
        job.find()
    if parsed.ttp_spare or gate is not None:
        assert record.common is not None
        taken = spare_node.wait(parsed, settings, record.common, job.look, gate, lost)
        if not isinstance(taken, spare_node.Taken):
            output.tell("[ttp] the job is over; this spare node was not needed")
            return int(taken.failed and job.comes_back)
        record.taken = taken
        parsed.node_rank = taken.place.node
        if taken.place.node == 0 and gate is not None:  # the store of the job is lost with node 0
            rendezvous_store.go_to_store(parsed, Endpoint(taken.address, 0), is_host=True)
        elif taken.place.store is not None:
            rendezvous_store.go_to_store(parsed, taken.place.store)
    return run_to_the_last_line(parsed, engine, record)


def _job(parsed: argparse.Namespace) -> str:
    """Return the job id given by the user; '' without one."""
    return "" if parsed.standalone or parsed.rdzv_id == _NO_ID else str(parsed.rdzv_id)


def run_to_the_last_line(parsed: argparse.Namespace, engine: engines.Engine, record: RunRecord) -> int:
    """Run the job and print its last line; return the exit code. Work on disks may follow.

    Args:
        engine: knows its own exit codes.
        record: the notes of the agent.
    """
    from torch.distributed.elastic.multiprocessing.api import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError

    from adaptor.launchers.rendezvous import waiting

    try:
        _run_torch(parsed, record)
    except AdaptorError as error:
        verdict = record.verdict
        if verdict is None:
            output.tell(f"ttprun: error: {error}")
            return USAGE_EXIT_CODE
        conclude(f"{verdict.line}; the workers cannot be started again: {error}", verdict.save_folder)
        return int(verdict.exit_code)
    except (waiting.MovedError, waiting.StoreLostError):
        raise
    except waiting.NotTakenInError as error:
        output.tell(f"[ttp] {error}")
        return 1
    except (*waiting.UNMET, AssertionError, OSError, RuntimeError, ValueError) as error:
        verdict = record.verdict
        if engine.has_own_agent and not record.has_started:
            output.tell(f"ttprun: error: {waiting.no_start_reason(error, parsed)}")
            return USAGE_EXIT_CODE
        if verdict is not None and waiting.lacks_means(error):
            reason = text.describe(error)
            conclude(f"{verdict.line}; the workers cannot be started again: {reason}", verdict.save_folder)
            return int(verdict.exit_code)
        if verdict is None:
            raise
        if not isinstance(error, waiting.UNMET):
            tell_error("an error in ttprun itself", error)
            conclude(f"{verdict.line}; ttprun has failed: {text.describe(error)}", verdict.save_folder)
            return 1
        reason = waiting.no_restart_reason(error, parsed)
        conclude(f"{verdict.line}; nodes cannot meet again, {reason}", verdict.save_folder)
        return int(verdict.exit_code)
    except SignalException as error:
        return end_by(error.sigval, record)
    except ChildFailedError as error:
        verdict = record.verdict
        if verdict is None:
            code = error.get_first_failure()[1].exitcode
            meant = engine.exit_code(code)
            if meant is None:
                return USAGE_EXIT_CODE
            output.tell(text.say(error))
            return _of_a_process(meant)
        if record.refused_after is not None:
            last = record.refused_after
            record.account.failed(f"{last.line}; not started again: {verdict.line}")
            return int(last.exit_code)
        if verdict.outcome == "refused":
            output.tell(f"ttprun: error: {verdict.line}")
        else:
            record.account.failed(f"{verdict.line}{record.stopped}")
        return int(verdict.exit_code)
    record.account.ended()
    return 0


def _run_torch(parsed: argparse.Namespace, record: RunRecord) -> None:
    """Run torch's agent.

    Raises:
        GateLostError: an error has come from the loss of the gate that has given this spare node its place.
    """
    from torch.distributed import run

    try:
        run.run(parsed)  # type: ignore[no-untyped-call]
    except Exception:
        if record.taken is not None and not record.has_started:
            record.taken.require_gate(within_s=_ENDS_TOGETHER_S)
        raise


def end_by(sigval: signal.Signals, record: RunRecord) -> int:
    """Print the last line of a job ended by a signal; return the exit code.

    Further signals are ignored: the remaining work takes some seconds at most, also if the disk hangs.
    """
    from adaptor.launchers.rendezvous import waiting

    waiting.ignore_signals()
    verdict = record.verdict
    if verdict is None:
        conclude(f"ended by {sigval.name}, and the workers with it", record.save_folder)
    else:
        record.account.failed(verdict.line)
    return 128 + sigval


def _of_a_process(code: int) -> int:
    """Return the exit code of a process as in a shell: 128 + N after signal N."""
    return code if code > 0 else 128 - code


if __name__ == "__main__":
    sys.exit(main())
