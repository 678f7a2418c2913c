"""The first thing a worker runs: `python -m adaptor.launchers.worker [--module] script [arguments]`.

It connects to the agent, enables the adaptor and runs the script as `python script` would. An exception that
leaves the script is told to the agent, and the process stays: its state is intact, and may be what is saved.
"""

from __future__ import annotations

import ctypes
import multiprocessing
import os
import signal
import sys

_PR_SET_PDEATHSIG = 1
_PR_SET_PTRACER = 0x59616D61


def main() -> None:
    _die_with_the_agent()
    _run(sys.argv[1:])


def _run(arguments: list[str]) -> None:
    import adaptor
    from adaptor import _script, config, devices, patches, patching
    from adaptor.control import runtime
    from adaptor.errors import ConfigError, DriftError, LayoutError, ResumeError, StartError

    worker = runtime.get()
    worker.hear_signals()
    # The sockets of managers and the like go with the job, however this process ends. Children inherit it;
    # there is no public way, but the name is as old as the module.
    multiprocessing.current_process()._config["tempdir"] = os.environ[runtime.SCRATCH]  # type: ignore
    try:
        patches.load("worker")
        patching.arm("worker")
        devices.activate(config.load().device)
        adaptor.enable()
        _script.run(arguments)
    except (ConfigError, DriftError, LayoutError, ResumeError, StartError) as error:
        worker.refuse(str(error))
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else 0 if end.code is None else 1
        if code == 0:
            worker.finish()
            devices.leave(config.load().device)
            return
        if not isinstance(end.code, int):
            print(end.code, file=sys.stderr)  # as Python does
        worker.raised(runtime.summarize(end), code)
        worker.session.hold()
    except BaseException as error:
        worker.stand_by(error)
    else:
        worker.finish()
        devices.leave(config.load().device)


def _die_with_the_agent() -> None:
    """A worker without its agent is an orphan that nobody would ever end; the kernel sees to it."""
    agent = os.getppid()
    prctl = ctypes.CDLL(None, use_errno=True).prctl
    prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    # Where the kernel lets parents alone look into a process (Yama), what the agent starts may: py-spy.
    prctl(_PR_SET_PTRACER, ctypes.c_ulong(agent))
    if os.getppid() != agent:
        os._exit(1)


if __name__ == "__main__":
    main()
