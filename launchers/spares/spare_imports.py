"""Imports the modules of the workers in a spare, before the spare becomes a worker.

On a machine with training workers a spare has a low priority from its start to the last import.

In a spare the script runs after the imports, and a spare has no rank yet. So a module may get other
functions or variables in a spare than in a worker. After each import the spare compares. After a difference
the spare starts again and imports only the modules before that import; the script imports the others once
the spare is a worker.
"""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
import inspect
import io
import os
import socket
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path

import msgspec

from adaptor import _script, context, plug_ins, text
from adaptor.launchers.agent import worker_main
from adaptor.launchers.spares.worker_forks import Forks, come_forward, take_streams
from adaptor.protocol import environment, wire
from adaptor.protocol.spare_messages import Become, Forked, Import, Ready, to_spare
from adaptor.worker import framework_watchdogs, script_imports
from adaptor.worker.garbage import GarbageCollection
from adaptor.worker.script_imports import ScriptImports, code_of_variable

_NAME = Path("/proc/self/comm")
# Python's own modules through which other modules read the environment.
_BY = frozenset({"os", "collections.abc", "_collections_abc"})
# Libraries read these variables at load time, in native code.
_BY_LIBRARIES = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS")
_LIBRARIES = ("numpy", "torch")
_SET_BEFORE = "and the script sets it before; to avoid this, set it in the environment of ttprun"
_NOT_TO_IMPORT = frozenset({"__main__", "__mp_main__"})
# Some versions of torch (2.7) make this module at their import, in a new temporary folder of each process.
_MADE_BY_TORCH = "_remote_module_non_scriptable"


def wait_to_be_a_worker(arguments: list[str]) -> None:
    """Return as a process that is to be a worker, maybe as a fork; end the process if the agent has ended.

    Args:
        arguments: `[--module] script [its arguments]`
    """
    environment_at_start = dict(os.environ)
    with socket.socket(fileno=os.dup(0)) as agent:
        try:
            order = wire.receive(agent, to_spare)
            assert isinstance(order, Import)
            if order.is_alone:
                _come_forward()
            forks = Forks()
            imports = _ImportsAsAWorker(order)
            ready = _import_as_a_worker(order, imports, arguments)
            if not ready.unfit:
                ready = msgspec.structs.replace(ready, no_forks=forks.why_not())
                _come_forward()
            agent.sendall(wire.frame(ready))
            if ready.stop_before:  # a new program image; stdin, pid and parent stay
                os.execve(sys.executable, sys.orig_argv, environment_at_start)
            name = _NAME.read_bytes().strip()
            _NAME.write_bytes(b"ttp-spare")  # for people, in ps and top
            started_with = {**environment_at_start, **order.environment}
            new_environment, streams = _next_worker(agent, forks, imports, started_with)
            _NAME.write_bytes(name)
        except (EOFError, OSError):
            os._exit(0)
    for target, stream in enumerate(streams):
        os.dup2(stream, target)
        os.close(stream)
    if isinstance(sys.__stdout__, io.TextIOWrapper) and not sys.__stdout__.write_through:
        sys.__stdout__.reconfigure(line_buffering=os.isatty(1))  # as Python does at its start
    os.environ.clear()
    os.environ.update(new_environment)
    for variable, value in imports.changed_variables.items():
        if value is None:
            os.environ.pop(variable, None)
        else:
            os.environ[variable] = value
    for kind in (environment.WorkerPlace, environment.Generation):
        context.get().discard(kind)


def _come_forward() -> None:
    """Take the priority of a worker, which is that of the agent."""
    come_forward(os.getpid(), os.getpriority(os.PRIO_PROCESS, os.getppid()))


def _next_worker(
    agent: socket.socket, forks: Forks, imports: _ImportsAsAWorker, started_with: Mapping[str, str]
) -> tuple[dict[str, str], list[int]]:
    """Wait for the order to be a worker, and fork workers meanwhile.

    Args:
        started_with: the environment at the beginning of the imports.

    Returns:
        The environment and the streams of the worker that this process is: itself, or a fork.

    Raises:
        EOFError, OSError: the agent has ended.
    """
    while True:
        become = wire.receive(agent, to_spare)
        assert isinstance(become, Become)
        if not become.fork:
            return become.environment, take_streams(agent)
        pid, reason = 0, imports.changed_read(started_with, become.environment)
        if not reason:
            pid, streams = forks.fork(agent)
            if streams:
                worker_main.die_with_the_agent()
                context.part(GarbageCollection).resume()
                return become.environment, streams
        agent.sendall(wire.frame(Forked(pid, reason)))
        if pid:
            forks.wait(agent)


def _import_as_a_worker(order: Import, imports: _ImportsAsAWorker, arguments: list[str]) -> Ready:
    """Import the modules of the workers, up to the first module that would differ."""
    path = list(sys.path)
    # Otherwise torch's compiler starts a process per core at its import, instead of when it compiles.
    os.environ.update({**order.environment, "TORCH_WARM_POOL": "0"})
    context.part(GarbageCollection).put_off()
    with (
        _reads_of(imports.note_read),
        _changes_of_variables() as imports.changed_variables,
    ):
        try:
            worker_main.arm(None)
        except Exception as error:  # a worker would be refused with this error
            return Ready(text.describe(error))
        difference = imports.difference_at_start()
        if difference:
            return Ready(difference)
        sys.argv = arguments[1:] if arguments[0] == _script.MODULE_FLAG else list(arguments)
        sys.path[:] = order.path
        ready = imports.run()
        _let_inspect_know_the_modules(sys.argv[0])
        plug_ins.declared(plug_ins.FORMATS)  # kept for this `sys.path`: the search reads every package
        sys.path[:] = path
    return ready


class _ImportsAsAWorker:
    """The imports of a spare, compared with the imports of a worker.

    Attributes:
        reads: variables that were read while a worker may have had another value, with the first module to
            read each
        changed_variables: environment variables that the imports have changed, with their values; None:
            removed
    """

    def __init__(self, order: Import) -> None:
        self.reads: dict[str, str] = {}
        self.changed_variables: dict[str, str | None] = {}
        self._read_by: dict[str, set[str]] = {}  # by module, the variables that its import has read
        self._order = order
        self._of_a_rank = frozenset(order.of_a_rank)
        places = {name: place for place, name in enumerate(order.origins)}
        # The number of imports a worker had begun when it changed a variable.
        self._changed_at = {
            name: places.get(variable.after, -1) for name, variable in order.variables.items()
        }
        self._place = -1  # the index of the current import
        self._recorder = context.part(ScriptImports)

    def note_read(self, name: str, module: str) -> None:
        """Note that `module` reads a variable."""
        if self.is_unlike(name):
            self.reads.setdefault(name, module)
        self._read_by.setdefault(module, set()).add(name)

    def changed_read(self, before: Mapping[str, str], now: Mapping[str, str]) -> str:
        """Name a variable that an import has read, and whose value `now` differs from `before`; '': none.

        Modules that read all variables to find their own, such as `tqdm`, are not counted. Nor is the
        adaptor, which reads its variables again in each worker.
        """
        changed = {name for name in before.keys() | now.keys() if before.get(name) != now.get(name)}
        for module, names in self._read_by.items():
            if module.partition(".")[0] == "adaptor" or names >= before.keys():
                continue
            for name in sorted(names & changed):
                return f"{module} reads {name} while it is imported, and it has another value now"
        return ""

    def is_unlike(self, name: str) -> bool:
        """Return whether a variable may have another value in a worker during the current import."""
        if name in self._of_a_rank:
            return True
        # A variable with the value of a worker was set by an import, in both processes.
        return (
            self._place > self._changed_at.get(name, len(self._order.origins))
            and code_of_variable(name) != self._order.variables[name].code
        )

    def difference_at_start(self) -> str:
        """Return why the process cannot be a worker before any import; empty: it can."""
        return self._difference(name for name in self._order.origins if name in sys.modules)

    def run(self) -> Ready:
        """Import one module after the other, and stop after the first difference."""
        self._recorder.begin()
        imported_by: dict[str, str] = {}  # modules: the module whose import has imported each
        for place, (name, origin) in enumerate(self._order.origins.items()):
            self._place = place
            self._switch_watchdogs_off()
            if name == self._order.stop_before:
                break
            if name in sys.modules or name in _NOT_TO_IMPORT:
                continue
            # A module may raise anything: modules made by other modules, or with unmet needs. A worker
            # imports such a module on demand.
            with contextlib.suppress(Exception, SystemExit):
                _import(name, origin)
            imported = list(self._recorder.names)[len(imported_by) :]
            imported_by.update(dict.fromkeys(imported, name))
            difference = self._difference(imported)
            if difference:
                return Ready(difference, name)
        # A later import may have changed a module, here as in a worker.
        for module in self._recorder.end():
            difference = self._changed_name(module, script_imports.codes_of(module))
            if difference:
                return Ready(difference, imported_by.get(module, ""))  # another thread may have imported it
        return Ready()

    def _switch_watchdogs_off(self) -> None:
        """Set the variables that the adaptor itself had set in a worker at the current import.

        A module that reads all variables, such as networkx.utils.backends, then reads the values of a
        worker.
        """
        for name in framework_watchdogs.VARIABLES:
            if self._place > self._changed_at.get(name, self._place):
                os.environ[name] = framework_watchdogs.OFF

    def _difference(self, modules_to_compare: Iterable[str]) -> str:
        """Return the first difference from a worker, with the user's remedy; empty without a difference."""
        for variable, module in self.reads.items():
            if variable in self._of_a_rank:
                return f"{module} reads {variable} while it is imported; to avoid this, read it in a function"
            return f"{module} reads {variable} while it is imported, {_SET_BEFORE}"
        for name in modules_to_compare:
            if name not in sys.modules or name == _MADE_BY_TORCH:  # absent: the import has failed
                continue
            origin = self._order.origins.get(name)
            own_origin = script_imports.origin(name)
            if name not in _NOT_TO_IMPORT and origin not in (None, own_origin):
                return (
                    f"{name} is {own_origin or 'not a file'} here, {origin or 'not a file'} in a worker;"
                    " to avoid this, let one folder of sys.path have it"
                )
            if name in _LIBRARIES:
                for variable in filter(self.is_unlike, _BY_LIBRARIES):
                    return f"{name} reads {variable} when it is loaded, {_SET_BEFORE}"
            difference = self._changed_name(name, self._recorder.names.get(name, b""))
            if difference:
                return difference
        return ""

    def _changed_name(self, module: str, codes: bytes) -> str:
        """Return the difference of a function or class of a module with `codes`, as `_difference` does."""
        worker_codes = self._order.names.get(module)
        if worker_codes is None:
            return ""
        name = script_imports.first_difference(module, codes, worker_codes)
        if not name:
            return ""
        return (
            f"{module}.{name} is another one in a worker, where the script changes it before the import of"
            f" {module}; to avoid this, make the change in a module that it imports"
        )


def _import(name: str, origin: str) -> None:
    """Import a module, unless another module has the name here: a worker may have had another path."""
    parent = name.rpartition(".")[0]
    if parent and parent not in sys.modules:
        return
    spec = importlib.util.find_spec(name)
    if spec is not None and str(spec.origin or "") == origin:
        importlib.import_module(name)


def _let_inspect_know_the_modules(script: str) -> None:
    """Fill the module cache of Python's `inspect`, with the `script` that will be run.

    `inspect` looks at every module when it is asked for code of an unknown file, and keeps the result.
    Megatron-LM asks in each step (its rerun state machine), so a new process would spend 30 to 50 ms in the
    step that all others wait for.
    """
    with contextlib.suppress(Exception):  # modules that load their parts late may raise anything
        inspect.getmodule(compile("", "<of no module>", "exec"))
        inspect.modulesbyfile[os.path.abspath(script)] = "__main__"  # noqa: PTH100  # as `inspect` does


@contextlib.contextmanager
def _reads_of(note: Callable[[str, str], None]) -> Iterator[None]:
    """Call `note` (`_ImportsAsAWorker.note_read`) for each read of an environment variable."""
    kind = type(os.environ)

    class Watched(kind):  # type: ignore[valid-type, misc]
        def __getitem__(self, key: str) -> str:
            note(key, _asking_module())
            return str(super().__getitem__(key))

    os.environ.__class__ = Watched
    try:
        yield
    finally:
        os.environ.__class__ = kind


def _asking_module() -> str:
    """Return the module whose code reads the environment, past Python's own modules."""
    frame = sys._getframe(2)
    while frame.f_back is not None and frame.f_globals.get("__name__") in _BY:
        frame = frame.f_back
    return str(frame.f_globals.get("__name__"))


@contextlib.contextmanager
def _changes_of_variables() -> Iterator[dict[str, str | None]]:
    """Record the variables that are changed meanwhile, with their values at the end; None: removed."""
    before = dict(os.environb)
    changed: dict[str, str | None] = {}
    try:
        yield changed
    finally:
        for key in before.keys() | os.environb.keys():
            value = os.environb.get(key)
            if value != before.get(key):
                changed[os.fsdecode(key)] = None if value is None else os.fsdecode(value)
