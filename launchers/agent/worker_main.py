"""The program that each worker runs first: `python .../worker_main.py [--module] script [arguments]`.

It is started by its path, not with `-m`: that would let files of the working directory take the place of
modules. It connects to the agent, enables the adaptor and runs the script as `python script` would. An
exception that leaves the script is reported to the agent, and the process stays: its state is intact, and may
be saved.
"""

from __future__ import annotations

import os
import sys
from typing import TYPE_CHECKING

from adaptor import _script
from adaptor.protocol import environment

if TYPE_CHECKING:
    from collections.abc import Callable

    from adaptor.worker.engine import WorkerRuntime
    from adaptor.worker.runtime import Runtime

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
    """Patch what is imported from now on; a second call changes nothing.

    Args:
        worker: this process's; None in a spare, which is none yet.

    Returns:
        What ends the process on its device, after a script that has ended well.
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
    except ConnectionError:  # ttprun is gone already, and says why
        output.leave(EXIT_ORPHAN)
    except (OSError, RuntimeError) as error:  # no thread, no descriptor
        output.tell(f"[ttp] rank {os.environ.get('RANK')} cannot start: {text.describe(error)}")
        output.leave(1)
    worker.hear_signals()
    # The sockets of managers and the like go with the job, however this process ends. Children inherit it;
    # there is no public way, but the name is as old as the module.
    if Path(os.environ[environment.SCRATCH]).is_dir():  # else something has cleaned up there
        multiprocessing.current_process()._config["tempdir"] = os.environ[environment.SCRATCH]  # type: ignore
    try:
        leave = arm(worker)
        settings = context.get().settings
        if settings.online_s and settings.spares:
            context.part(ScriptImports).begin()
        _script.run(arguments)
    except (ConfigError, DriftError, UnsupportedError, ResumeError, StartError) as error:
        if worker.session.may_have_finished_a_step:  # what the job has trained so far is saved
            worker.hold_after(error)
        worker.refuse(text.encodable(text.say(error)))
    except CheckpointError as error:
        if worker.session.trainee is None:  # the save folder is examined; nothing is lost, nor begun
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


def _speaks_for_all() -> bool:
    """Return whether this process says what is the same on all ranks and at each start: it says it once."""
    from adaptor import context

    return os.environ.get("RANK") == "0" and not context.part(environment.Generation).is_restart


def _prepare_online(worker: Runtime) -> None:
    """Remember from now on how process groups are made; the rest of an online recovery is imported by the
    patches of a framework, because it needs packages of which the script may have some of its own."""
    from adaptor import context
    from adaptor.online.groups import Groups

    groups = context.part(Groups)
    groups.remember(lone=environment.NEWCOMER in os.environ)
    worker.groups = groups


def die_with_the_agent() -> None:
    """Let the kernel end this worker by SIGKILL when its agent dies: nobody else would.

    Where the agent lives and only its connection has ended, the processor ends the worker, with exit code 76.
    """
    import ctypes
    import signal

    agent = os.getppid()
    prctl = ctypes.CDLL(None, use_errno=True).prctl
    prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    # Where the kernel lets parents alone look into a process (Yama), what the agent starts may: py-spy.
    prctl(_PR_SET_PTRACER, ctypes.c_ulong(agent))
    if os.getppid() != agent:
        os._exit(1)


if __name__ == "__main__":
    main()
