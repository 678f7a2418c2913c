"""`ttprun`: torchrun, with an agent that saves the newest finished step when a worker dies.

It takes every flag of the installed torch's torchrun, and `--ttp-*`. With ENABLE_TTP=False it hands over to
torch's own main and nothing of the adaptor is active in a worker.
"""

from __future__ import annotations

import argparse
import atexit
import ipaddress
import os
import signal
import socket
import sys
import tempfile
from pathlib import Path

from adaptor import _script, config
from adaptor.control.runtime import AGENT, SCRATCH
from adaptor.errors import AdaptorError, ConfigError
from adaptor.launchers import flags, tls

USAGE_EXIT_CODE = 2
# torch's own variable: the network interfaces over which survivors bring their shards together.
_INTERFACES = "GLOO_SOCKET_IFNAME"
# What mindio_ttp takes for its actions, and waits for workers at their end.
_SDK_LIMIT = "TTP_NORMAL_ACTION_TIME_LIMIT"
_SDK_LIMITS_S = (30, 1800)
WORKER_MODULE = "adaptor.launchers.worker"
CPU_MODULE = "adaptor.devices.cpu"


def main(argv: list[str] | None = None) -> int:
    """Run a job; the exit code is that of the worker that failed first, or 0."""
    try:
        return _main(sys.argv[1:] if argv is None else argv)
    except KeyboardInterrupt:  # torch hears the signal only from the rendezvous on
        print("[ttp] ended by SIGINT, before anything was started", file=sys.stderr)
        return 128 + signal.SIGINT


def _main(arguments: list[str]) -> int:
    try:
        parsed = flags.parse(arguments)
        settings = config.load()
        if settings.enabled or settings.device:
            _require_script(parsed, settings)
        if settings.enabled:
            config.refuse_misspelt(os.environ)
            flags.require_sense(parsed)
            _require_folder(settings.log_path)
            _require_safe_connections(parsed, settings)
            _require_interfaces(os.environ.get(_INTERFACES, ""))
            if settings.engine == "mindio":
                _prepare_the_sdk(settings)
    except ConfigError as error:
        print(f"ttprun: error: {error}", file=sys.stderr)
        return USAGE_EXIT_CODE
    if settings.enabled:
        return _run_with_survivors(parsed, settings)
    return _run_plain(parsed, settings.device)


def _require_script(parsed: argparse.Namespace, settings: config.Config) -> None:
    """We start it in Python ourselves: it has to be there, and Python."""
    if parsed.no_python:
        raise ConfigError(
            "--no-python: only a Python script that ttprun starts itself can be protected:"
            " give ttprun the script without --no-python, or set ENABLE_TTP=False"
            if settings.enabled
            else f"--no-python: TTP_DEVICE={settings.device} only reaches a Python script that ttprun starts"
            " itself: give ttprun the script without --no-python, or leave TTP_DEVICE empty"
        )
    if parsed.module:
        return  # where it is only the worker's path tells
    try:
        Path(parsed.training_script).stat()
    except OSError as error:
        raise ConfigError(f"the script {parsed.training_script} cannot be run ({error.strerror})") from None


def _require_safe_connections(parsed: argparse.Namespace, settings: config.Config) -> None:
    """Between machines TLS, unless the user wants it otherwise; bad certificates are known here already."""
    if tls.load(settings) is not None or settings.tls == "plain" or _on_one_machine(parsed):
        return
    raise ConfigError(
        f"--nnodes {parsed.nnodes} and no certificates: agents of several machines speak TLS, so give"
        " --ttp-tls-cert, --ttp-tls-key and --ttp-tls-ca; or, inside a trusted network, --ttp-tls plain"
    )


def _on_one_machine(parsed: argparse.Namespace) -> bool:
    """Whether all agents are on this machine: there is one, or they meet where nobody else can come."""
    if parsed.standalone or parsed.nnodes.rpartition(":")[2].strip() == "1":
        return True
    host = parsed.rdzv_endpoint.rpartition(":")[0] or parsed.rdzv_endpoint
    if not host:  # torch's own defaults
        host = parsed.master_addr if parsed.rdzv_backend == "static" else "localhost"
    try:
        return host == "localhost" or ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return False


def _require_interfaces(named: str) -> None:
    """Every worker would raise in the middle of its start, with none of these words."""
    own = [name for _, name in socket.if_nameindex()]
    for name in named.split(",") if named else []:
        if name.partition(":")[0] not in own:  # behind the colon is the label of an address (eth0:1)
            raise ConfigError(
                f"{_INTERFACES} is {named!r}: this node has no network interface {name!r}, it has"
                f" {', '.join(own)}; name the one with the address at which other nodes reach it"
            )


def _run_plain(parsed: argparse.Namespace, device: str) -> int:
    """torch's own run; a device that the user chose needs its stand-ins in every worker all the same."""
    from torch.distributed import run
    from torch.distributed.elastic.multiprocessing.errors import record

    if device == "cpu":
        _insert_module(parsed, CPU_MODULE)
    record(run.run)(parsed)  # what torch's main does with what it has parsed
    return 0


def _require_folder(path: str) -> None:
    what = "the folder cannot be made"
    try:
        Path(path).mkdir(parents=True, exist_ok=True)
        what = "the folder cannot be written"
        tempfile.TemporaryFile(dir=path).close()  # permissions do not tell of file systems and quotas
    except OSError as error:
        raise ConfigError(f"TTP_LOG_PATH is {path!r}: {what} ({error.strerror})") from None


def _insert_module(parsed: argparse.Namespace, module: str) -> None:
    """Let each worker run `module`, which then runs the script."""
    marker = [_script.MODULE_FLAG] if parsed.module else []
    parsed.training_script_args = [*marker, parsed.training_script, *parsed.training_script_args]
    parsed.training_script = module
    parsed.module = True
    parsed.run_path = False


def _prepare_the_sdk(settings: config.Config) -> None:
    """Where mindio_ttp drives, this process has torch's agent, which it makes wait for those that save.

    Raises ConfigError where it is missing or too old.
    """
    from adaptor.mindio.client import sdk

    low, high = _SDK_LIMITS_S
    os.environ.setdefault(_SDK_LIMIT, str(int(min(max(settings.timeout_s, low), high))))
    sdk.load()
    os.environ[AGENT] = ""  # there is none of ours
    scratch = tempfile.TemporaryDirectory(prefix="ttp-")
    atexit.register(scratch.cleanup)
    os.environ[SCRATCH] = scratch.name


def _run_with_survivors(parsed: argparse.Namespace, settings: config.Config) -> int:
    from torch.distributed import run
    from torch.distributed.elastic.multiprocessing.api import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.launcher import api

    from adaptor.launchers import meeting
    from adaptor.launchers.agent import SurvivorsAgent, keep_survivors

    _insert_module(parsed, WORKER_MODULE)
    if settings.engine == "builtin":
        # torch makes its agent by this name; in this process it is ours.
        api.LocalElasticAgent = SurvivorsAgent  # type: ignore[misc]
    else:
        keep_survivors(os.environ)
    try:
        run.run(parsed)
    except AdaptorError as error:
        print(f"ttprun: error: {error}", file=sys.stderr)
        return USAGE_EXIT_CODE
    except (*meeting.UNMET, AssertionError, OSError, RuntimeError, ValueError) as error:
        verdict = SurvivorsAgent.last_verdict
        if settings.engine == "builtin" and not SurvivorsAgent.has_started:
            print(f"ttprun: error: {meeting.why_not(error, parsed)}", file=sys.stderr)
            return USAGE_EXIT_CODE
        if verdict is None or not isinstance(error, meeting.UNMET):
            raise
        line = f"{verdict.line}; nodes cannot meet again, {meeting.why_not_again(error)}"
        print(f"[ttp] {line}{_newest(verdict.save)}", file=sys.stderr)
        return int(verdict.exit_code)
    except SignalException as error:
        verdict = SurvivorsAgent.last_verdict
        said = (
            f"ended by {error.sigval.name}, and the workers with it{_newest(SurvivorsAgent.last_save)}"
            if verdict is None
            else f"{verdict.line}{_newest(verdict.save)}"
        )
        print(f"[ttp] {said}", file=sys.stderr)
        return 128 + error.sigval
    except ChildFailedError as error:
        verdict = SurvivorsAgent.last_verdict
        if verdict is None:
            code = error.get_first_failure()[1].exitcode
            if settings.engine == "mindio":
                return _code_beside_the_sdk(error, code)
            print(error, file=sys.stderr)
            return _of_a_process(code)
        if verdict.outcome == "refused":
            print(f"ttprun: error: {verdict.line}", file=sys.stderr)
        else:
            print(f"[ttp] {verdict.line}{_newest(verdict.save)}", file=sys.stderr)
        return int(verdict.exit_code)
    return 0


def _of_a_process(code: int) -> int:
    """As a shell has it."""
    return code if code > 0 else 128 - code


def _code_beside_the_sdk(error: Exception, code: int) -> int:
    """That of the first worker that has failed on this node; 1 where mindio_ttp has ended them all."""
    from adaptor.mindio.client import sdk

    if code == sdk.REFUSED:  # who has refused the job has said why
        return USAGE_EXIT_CODE
    print(error, file=sys.stderr)
    return 1 if code == sdk.ENDED else _of_a_process(code)


def _newest(save: str) -> str:
    """Where the save folder stands, for the last line of a job."""
    if not save:
        return ""
    from adaptor.checkpoint.publish import tracked_step

    step = tracked_step(Path(save))
    return (
        f"; no checkpoint is in {save}"
        if step is None
        else f"; the newest checkpoint in {save} is step {step}"
    )


if __name__ == "__main__":
    sys.exit(main())
