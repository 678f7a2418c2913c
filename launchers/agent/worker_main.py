"""The first program of each worker: `python .../worker_main.py [--module] script [arguments]`.

Started by its path, not with `-m`, so that files of the working directory cannot replace modules. The
program connects to the agent, enables the adaptor and runs the script as `python script` would. An exception
that leaves the script is reported to the agent, and the process stays: its state is intact, and may be
saved.
"""

from __future__ import annotations

import os
import sys
from typing import TYPE_CHECKING

from adaptor import _script
from adaptor.protocol import environment

if TYPE_CHECKING:
    from collections.abc import Callable

    from adaptor.worker.runtime import Runtime
    from adaptor.worker.unprotected import WorkerRuntime

_PR_SET_PDEATHSIG = 1
_PR_SET_PTRACER = 0x59616D61


def main() -> None:
    """Be a worker: run the script in the arguments."""
    _script.leave_own_path()
    die_with_the_agent()
    if environment.NEWCOMER in os.environ:
        from adaptor import context
        from adaptor.worker.garbage import GarbageCollection

        context.part(GarbageCollection).put_off()
    run(sys.argv[1:])


def arm(worker: WorkerRuntime | None) -> Callable[[], None]:
    """Patch later imports; a second call changes nothing.

    Args:
        worker: of the process; None in a spare, which is no worker yet.

    Returns:
        The function that ends the process on its device, after a successful script.
    """
    import adaptor
    from adaptor import context, devices, output, patches, patching
    from adaptor.worker import runtime

    settings = context.get().settings
    patches.load("worker")
    patching.arm("worker")
    if settings.online_s and settings.engine == "builtin":
        if isinstance(worker, runtime.Runtime):
            _prepare_online(worker)
        patches.load("online")
        patching.arm("online")
    elif settings.online_s and worker is not None and _speaks_for_all():
        output.tell(runtime.not_online(f"TTP_ENGINE is {settings.engine}"))
    leave = devices.activate(settings.device)
    adaptor.arm()
    return leave


def run(arguments: list[str]) -> None:
    """Connect to the agent and run `[--module] script [its arguments]`."""
    import multiprocessing
    from pathlib import Path

    import packaging.specifiers  # noqa: F401  # the patches use it when the script's folder is on the path

    from adaptor import context, output, text
    from adaptor.errors import (
        CheckpointError,
        ConfigError,
        DriftError,
        ResumeError,
        StartError,
        UnsupportedError,
    )
    from adaptor.worker import runtime
    from adaptor.worker.processor import EXIT_ORPHAN
    from adaptor.worker.script_imports import ScriptImports

    output.start()
    try:
        worker = runtime.begin()
    except ConnectionError:  # ttprun has ended and says why
        output.leave(EXIT_ORPHAN)
    except (OSError, RuntimeError, StartError) as error:  # no thread, no descriptor; of a plug-in
        output.tell(f"[ttp] rank {os.environ.get('RANK')} cannot start: {text.describe(error)}")
        output.leave(1)
    worker.hear_signals()
    # Sockets of multiprocessing managers are removed with the job, however the process ends. Children
    # inherit the folder. There is no public interface, but the name is as old as the module.
    if Path(os.environ[environment.SCRATCH]).is_dir():  # a cleaner may have removed the folder
        multiprocessing.current_process()._config["tempdir"] = os.environ[environment.SCRATCH]  # type: ignore
    try:
        leave = arm(worker)
        if _may_have_spares():
            context.part(ScriptImports).begin()
        _script.run(arguments)
    except (ConfigError, DriftError, UnsupportedError, ResumeError, StartError) as error:
        if worker.session.may_have_finished_a_step:  # the finished steps are saved
            worker.hold_after(error)
        worker.refuse(text.encodable(text.say(error)))
    except CheckpointError as error:
        if worker.session.trainee is None:  # the save folder is examined before training
            worker.refuse(text.encodable(text.say(error)))
        worker.hold_after(error)
    except SystemExit as end:
        code = text.exit_code(end.code) if isinstance(end.code, int) else 0 if end.code is None else 1
        if code == 0:
            worker.finish()
            leave()
            return
        worker.raised(runtime.summarize(end), code, end)
        if not isinstance(end.code, int):
            output.tell(text.say(end.code))  # as Python does
        worker.session.hold()
    except BaseException as error:
        worker.hold_after(error)
    else:
        worker.finish()
        leave()


def _may_have_spares() -> bool:
    """Return whether spares may import the modules of this worker (`Replacements.look`)."""
    from adaptor import context

    settings, environ = context.get().settings, os.environ
    restarts = int(environ.get("TORCHELASTIC_MAX_RESTARTS", "1"))
    restarts_left = restarts - int(environ.get("TORCHELASTIC_RESTART_COUNT", "0"))
    return settings.spares > 0 and (settings.online_s > 0 or restarts_left > 0)


def _speaks_for_all() -> bool:
    """Return whether the process prints lines that hold for all ranks and all starts."""
    from adaptor import context

    return os.environ.get("RANK") == "0" and not context.part(environment.Generation).is_restart


def _prepare_online(worker: Runtime) -> None:
    """Record the creation of process groups from now on.

    The patches of a framework import the rest of online recovery later, because it needs packages of which
    the script may have its own versions.
    """
    from adaptor import context
    from adaptor.online.groups import Groups

    groups = context.part(Groups)
    groups.remember(lone=environment.NEWCOMER in os.environ)
    worker.groups = groups


def die_with_the_agent() -> None:
    """Let the kernel end the worker by SIGKILL when its agent dies: no other process would.

    If the agent lives and only the connection has ended, the processor ends the worker, with exit code 76.
    """
    import ctypes
    import signal

    agent = os.getppid()
    prctl = ctypes.CDLL(None, use_errno=True).prctl
    prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    # Where the kernel allows only parents to trace a process (Yama), allow the agent's children: py-spy.
    prctl(_PR_SET_PTRACER, ctypes.c_ulong(agent))
    if os.getppid() != agent:
        os._exit(1)


if __name__ == "__main__":
    main()
