"""Imports in a spare what the workers have imported, before it becomes a worker.

Where workers train on its machine, it does so with the lowest priority.

A spare has no rank yet, so a module that reads the rank from the environment while it is imported would get
a wrong value. If one does, the spare is unfit to become a worker, and the agent starts cold processes
instead. The same holds for a variable that the script sets before an import: in a spare the script runs after
all imports.
"""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
import inspect
import os
import socket
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

from adaptor import _script, context, text
from adaptor.launchers import worker_main
from adaptor.protocol import environment, wire
from adaptor.protocol.spare_messages import Become, Import, Ready, to_spare
from adaptor.worker import imported_names, modules
from adaptor.worker.garbage import GarbageCollection
from adaptor.worker.script_imports import code_of_variable

# By how much a spare is nicer than the workers while it imports, where that can be taken back.
NICER = 10
_NAME = Path("/proc/self/comm")
# Modules of Python by which others ask the environment.
_BY = frozenset({"os", "collections.abc", "_collections_abc"})
# Libraries read them when they are loaded, where nobody sees it.
_BY_LIBRARIES = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS")
_LIBRARIES = ("numpy", "torch")
_CHANGED = ", and a worker changes it"
_NOT_TO_IMPORT = frozenset({"__main__", "__mp_main__"})


def wait_to_be_a_worker(arguments: list[str]) -> None:
    """Return as a process that is to be a worker; end this one where the agent has gone.

    Args:
        arguments: `[--module] script [its arguments]`
    """
    with socket.socket(fileno=os.dup(0)) as agent:
        try:
            order = wire.receive(agent, to_spare)
            assert isinstance(order, Import)
            agent.sendall(wire.frame(Ready(_import_as_a_worker(order, arguments))))
            name = _NAME.read_bytes()
            _NAME.write_bytes(b"ttp-spare")  # for people, in ps and top
            become = wire.receive(agent, to_spare)
            _NAME.write_bytes(name)
            assert isinstance(become, Become)
            _, streams, _, _ = socket.recv_fds(agent, 1, 3)
        except (EOFError, OSError):
            os._exit(0)
    for target, stream in enumerate(streams):
        os.dup2(stream, target)
        os.close(stream)
    os.environ.clear()
    os.environ.update(become.environment)
    for kind in (environment.Place, environment.Generation):
        context.get().discard(kind)


def _import_as_a_worker(order: Import, arguments: list[str]) -> str:
    """Return why this process cannot become a worker; empty: it can."""
    path = list(sys.path)
    os.environ.update(order.environment)
    of_a_rank = frozenset(order.of_a_rank)
    places = {name: place for place, name in enumerate(order.origins)}
    # Where a worker had come with its imports when it changed a variable.
    changed_at = {name: places.get(one.after, -1) for name, one in order.variables.items()}
    place = -1  # of the module that is imported now

    def is_unlike(name: str) -> bool:
        """Return whether a worker may have had another value when it imported what is imported now."""
        return name in of_a_rank or (name in changed_at and place > changed_at[name])

    context.part(GarbageCollection).put_off()
    with (
        contextlib.nullcontext() if order.is_alone else _standing_back(),
        _reads_of(is_unlike) as reads,
    ):
        try:
            worker_main.arm(None)
        except Exception as error:  # a worker would say it, and be refused
            return text.describe(error)
        sys.argv = arguments[1:] if arguments[0] == _script.MODULE_FLAG else list(arguments)
        sys.path[:] = order.path
        before = frozenset(sys.modules)
        for name, origin in order.origins.items():
            place = places[name]
            if name not in sys.modules and name not in _NOT_TO_IMPORT:
                # Whatever somebody else's module raises: one that another module has made, or that needs what
                # is not there yet. A worker imports it where it needs it.
                with contextlib.suppress(Exception, SystemExit):
                    _import(name, origin)
        _let_inspect_know_the_modules()
        sys.path[:] = path
    other = [
        f"{name} is {modules.origin(name)} here, {origin} in a worker"
        for name, origin in order.origins.items()
        if name in sys.modules and name not in _NOT_TO_IMPORT and modules.origin(name) != origin
    ]
    # What has the value of a worker was changed by an import, here as there.
    differ = {name for name, one in order.variables.items() if code_of_variable(name) != one.code}
    unfit = [
        f"{module} reads {name} when it is imported" + ("" if name in of_a_rank else _CHANGED)
        for name, module in reads.items()
        if name in of_a_rank or name in differ
    ]
    loaded = max(places.get(name, -1) for name in _LIBRARIES)
    unfit += [
        f"libraries read {name} when they are loaded{_CHANGED}"
        for name in _BY_LIBRARIES
        if name in differ and loaded > changed_at[name]
    ]
    unfit += other
    if not unfit:
        imported = [name for name in order.origins if name in sys.modules and name not in before]
        changed = imported_names.first_that_differs(order.names, imported)
        if changed:
            unfit.append(f"{changed} is another one in a worker, where the script changes what is imported")
    return "; ".join(unfit)


def _import(name: str, origin: str) -> None:
    """Import a module, unless another one has its name here: a worker may have had another path then."""
    parent = name.rpartition(".")[0]
    if parent and parent not in sys.modules:
        return
    spec = importlib.util.find_spec(name)
    if spec is not None and str(spec.origin or "") == origin:
        importlib.import_module(name)


def _let_inspect_know_the_modules() -> None:
    """Let Python's `inspect` look at every module: it does so when it is asked for code of a file that it
    does not know, and keeps what it finds. Megatron-LM asks in each step (its rerun state machine), so a new
    process would take the time for it, 30 to 50 ms, in the step that all others wait for."""
    with contextlib.suppress(Exception):  # whatever a module answers that loads its parts late
        inspect.getmodule(compile("", "<of no module>", "exec"))


@contextlib.contextmanager
def _reads_of(counts: Callable[[str], bool]) -> Iterator[dict[str, str]]:
    """Note which variables that count are read meanwhile: by name, the first module that does."""
    reads: dict[str, str] = {}
    kind = type(os.environ)

    class Watched(kind):  # type: ignore[valid-type, misc]
        def __getitem__(self, key: str) -> str:
            if counts(key):
                reads.setdefault(key, _asking_module())
            return str(super().__getitem__(key))

    os.environ.__class__ = Watched
    try:
        yield reads
    finally:
        os.environ.__class__ = kind


def _asking_module() -> str:
    """Return the module whose code asks; Python's own are those that it asks by."""
    frame = sys._getframe(2)
    while frame.f_back is not None and frame.f_globals.get("__name__") in _BY:
        frame = frame.f_back
    return str(frame.f_globals.get("__name__"))


@contextlib.contextmanager
def _standing_back() -> Iterator[None]:
    """Let training have the processors first. Threads that are made meanwhile come back with this one."""
    nice = os.nice(0)
    back = _may_come_back()
    with contextlib.suppress(OSError):
        os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))  # wakes up behind others
        if back:
            os.setpriority(os.PRIO_PROCESS, 0, nice + NICER)
    try:
        yield
    finally:
        for thread in (int(path.name) for path in Path("/proc/self/task").iterdir()):
            with contextlib.suppress(OSError):
                if back:
                    os.setpriority(os.PRIO_PROCESS, thread, nice)
                os.sched_setscheduler(thread, os.SCHED_OTHER, os.sched_param(0))


def _may_come_back() -> bool:
    """Return whether a thread that was nice may stop being so: most users may not."""
    allowed = []

    def attempt() -> None:  # the priority is one of threads: this one takes its to its end
        with contextlib.suppress(OSError):
            nice = os.getpriority(os.PRIO_PROCESS, 0)
            os.setpriority(os.PRIO_PROCESS, 0, nice + 1)
            os.setpriority(os.PRIO_PROCESS, 0, nice)
            allowed.append(True)

    thread = threading.Thread(target=attempt)
    thread.start()
    thread.join()
    return bool(allowed)
