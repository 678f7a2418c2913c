"""Starts processes with torch already imported, as forks of a *starter*, in place of new interpreters.

Most of the CPU time of a tiny job goes into imports of torch. A starter makes the common imports of all
frameworks once, and forks itself for each requested process. The starter imports neither the framework nor
the adaptor, but keeps their compiled code in memory (`kept_code.py`). The launchers, workers and scripts are
the real ones. Each process is the child of the requesting process, in a session of its own, with the
requested environment.

- `Warm` is a `subprocess.Popen` whose child is a fork of the process's starter. Tests start launchers
  (`ttprun`, `torchrun`) and scripts with `Warm`. The starter lives as long as the process.
- A launcher's fork gets its own starter, forked before anything else; its workers and their spares are forks
  of the launcher's starter.
- `WithStarter` is a fork with its own starter for a process that uses `Warm`: the workers of pytest-xdist.

Only a process with a single thread can be forked safely, so the requesting process does not fork itself. The
kernel hands the starter's orphaned grandchild to the nearest ancestor that is a subreaper: the requesting
process.

The fork repeats the start of an interpreter with respect to the environment: PYTHONPATH, with a
`sitecustomize` in it, the random state of Python, MALLOC_PERTURB_ and, for torch, PYTORCH_JIT. Hash seeds,
and all other variables that torch reads at its import, are those of the starter.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import gc
import importlib
import inspect
import json
import multiprocessing
import multiprocessing.util
import os
import pkgutil
import random
import runpy
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import traceback
import warnings
import weakref
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any, NoReturn

# Modules that Megatron-LM imports in its first second, and the modules of torch that launchers import.
PRELOADED = (
    "annotated_types",
    "asyncio",
    "einops",
    "einops._torch_specific",
    "logging.handlers",
    "msgspec",
    "numpy",
    "psutil",
    "pydantic.fields",
    "pydantic.main",
    "pydantic.types",
    "regex",
    "sentencepiece",
    "six",
    "ssl",
    "torch",
    "torch._dynamo",
    "torch.distributed._tensor",
    "torch.distributed.checkpoint",
    "torch.distributed.launcher.api",
    "torch.distributed.optim",
    "torch.distributed.run",
    "torch.utils.cpp_extension",
    "torch.utils.data",
    "torch.utils.serialization",
    "torch.utils.tensorboard",
    "wrapt",
    "xxhash",
    "yaml",
    "zoneinfo",
)
ROOT = Path(__file__).resolve().parents[2]
MEGATRON_LM = ROOT / ".cache/frameworks/megatron-lm"
MEGATRON_CORE = ROOT / f".cache/frameworks/megatron-core-{sys.implementation.cache_tag}"
LAUNCHERS = {"ttprun": "adaptor.launchers.cli.ttprun", "torchrun": "torch.distributed.run"}
# The scripts that workers run.
SCRIPTS = (
    ROOT / "adaptor/launchers/agent/worker_main.py",
    ROOT / "adaptor/launchers/spares/spare_main.py",
    ROOT / "tests/faults/inject.py",
    ROOT / "tests/frameworks/record.py",
    ROOT / "tests/frameworks/train_core.py",
    MEGATRON_LM / "pretrain_gpt.py",
)
# The variable that marks the processes of a job. The starter reserves room for a mark in the environment that
# the kernel shows (/proc/PID/environ); a fork writes its own mark there.
MARK = "TTP_TEST_JOB"
_NO_MARK = "0" * 32
_PR_SET_PDEATHSIG, _PR_SET_CHILD_SUBREAPER = 1, 36
_CLONE_NEWNET = 0x40000000
_M_PERTURB = -6
_MADV_COLLAPSE = 25  # Linux 6.1
_libc = ctypes.CDLL(None, use_errno=True)
_prctl = _libc.prctl
_spawn = multiprocessing.util.spawnv_passfds


class _Fork(subprocess.Popen):  # type: ignore[type-arg]
    """A replacement for `subprocess.Popen` in torch: a child of the starter, then handed to this process."""

    starter: socket.socket
    gets_starter = False
    ends_with_asker = False
    _one_at_a_time = threading.Lock()

    def _execute_child(self, args: Any, *further: Any) -> None:
        cwd, environment = further[4:6]  # executable, preexec_fn, close_fds, pass_fds, cwd, env
        # ..., startupinfo, creationflags, shell, p2cread, p2cwrite, c2pread, c2pwrite, errread, errwrite
        pipes = further[9:15]
        request = {
            "command": list(map(str, args)),
            "environment": dict(os.environ if environment is None else environment),
            "folder": str(cwd or Path.cwd()),
            "gets_starter": self.gets_starter,
            "ends_with_asker": self.ends_with_asker,
        }
        descriptors = [
            default if descriptor == -1 else descriptor
            for default, descriptor in enumerate((pipes[0], pipes[3], pipes[5]))
        ]
        with self._one_at_a_time:
            _prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
            try:
                socket.send_fds(self.starter, [b"\0"], descriptors)
                _send(self.starter, request)
                self.pid = _receive(self.starter)
            finally:
                _prctl(_PR_SET_CHILD_SUBREAPER, 0, 0, 0, 0)
        self._child_created = True
        self._close_pipe_fds(*pipes)  # type: ignore[attr-defined]


class Warm(_Fork):
    """Runs a command as `Popen` would, in a fork of this process's starter.

    The command begins with the interpreter (then a script, `-m` and a module, or `-c` and code) or with the
    path of a launcher. `nsenter --net=PATH` may precede it.
    """

    # The starter's exit status as `waitpid` reports it, and the connection to the starter.
    _mother: tuple[Callable[[], int | None], socket.socket] | None = None

    def __init__(self, command: list[str], **options: Any) -> None:
        self.starter = self._started()
        super().__init__(command, **options)

    @classmethod
    def _started(cls) -> socket.socket:
        if Warm._mother is None or Warm._mother[0]() is not None:
            own_end, other_end = socket.socketpair()
            environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
            environment.update(
                {
                    "OMP_NUM_THREADS": "1",
                    "TORCHDYNAMO_DISABLE": "1",
                    "PYTHONWARNINGS": "ignore",
                    MARK: _NO_MARK,
                }
            )
            process = subprocess.Popen(
                [sys.executable, "-u", __file__, "--serve", str(other_end.fileno())],
                env=environment,
                pass_fds=[other_end.fileno()],
                stdin=subprocess.DEVNULL,
            )
            other_end.close()
            Warm._mother = process.poll, own_end
        return Warm._mother[1]


class WithStarter(Warm):
    """A `Warm` whose fork gets its own starter for its `Warm` processes."""

    gets_starter = True


def inherit(starter: int, connection: socket.socket) -> None:
    """Let `Warm` in the process use a starter forked for the process.

    Args:
        starter: the process id of the starter.
        connection: the connection to the starter.
    """

    def ended() -> int | None:
        return os.waitpid(starter, os.WNOHANG)[0] or None

    Warm._mother = ended, connection


def run(
    command: list[str], *, timeout: float = 120, code: int | None = None, **options: Any
) -> subprocess.CompletedProcess[str]:
    """Run a command in a fork of the starter, as `waiting.captured` does."""
    pipes = {"stdin": subprocess.DEVNULL, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    with Warm(command, text=True, **{**pipes, **options}) as process:
        try:
            out, error = process.communicate(timeout=timeout)
        except BaseException:
            process.kill()
            raise
    assert code in (None, process.returncode), f"{process.returncode}: {error}"
    return subprocess.CompletedProcess(command, process.returncode, out, error)


def _send(connection: socket.socket, message: Any) -> None:
    data = json.dumps(message).encode()
    connection.sendall(len(data).to_bytes(4, "big") + data)


def _receive(connection: socket.socket) -> Any:
    """Return the next message. Raises EOFError when the peer has closed the connection."""
    with connection.makefile("rb", buffering=0) as stream:
        length = int.from_bytes(_exactly(stream, 4), "big")
        return json.loads(_exactly(stream, length))


def _exactly(stream: Any, count: int) -> bytes:
    parts = b""
    while len(parts) < count:
        part = stream.read(count - len(parts))
        if not part:
            raise EOFError
        parts += part
    return parts


def _serve(connection: socket.socket) -> Callable[[], None]:
    """Serve requests as a starter. Returns only in a fork: the function that the fork must call."""
    parent = os.getppid()
    _prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != parent:
        os._exit(0)
    os.setsid()  # Ctrl-C must not end the starter
    while True:
        try:
            _, descriptors, _, _ = socket.recv_fds(connection, 1, 3)
            request = _receive(connection)
        except (EOFError, ConnectionError):
            os._exit(0)
        pid_reader, pid_writer = os.pipe()
        go_reader, go_writer = os.pipe()
        middle = os.fork()
        if middle == 0:
            if os.fork() == 0:
                connection.close()
                os.close(go_writer)
                os.write(pid_writer, str(os.getpid()).encode())
                os.read(
                    go_reader, 1
                )  # returns when the starter closes its end: this process has been handed over by then
                for end in (pid_reader, pid_writer, go_reader):
                    os.close(end)
                return _born(request, descriptors)
            os._exit(0)
        os.waitpid(middle, 0)
        _send(connection, int(os.read(pid_reader, 32)))
        for end in (pid_reader, pid_writer, go_reader, go_writer, *descriptors):
            os.close(end)


def _born(request: Mapping[str, Any], descriptors: list[int]) -> Callable[[], None]:
    """Become the requested process. Returns the function to call."""
    os.setsid()
    if request["ends_with_asker"]:
        _prctl(_PR_SET_PDEATHSIG, signal.SIGTERM, 0, 0, 0)
    for target, descriptor in enumerate(descriptors):
        os.dup2(descriptor, target)
        os.close(descriptor)
    os.chdir(request["folder"])
    environment = request["environment"]
    os.environ.clear()
    os.environ.update(environment)
    mark = environment.get(MARK, _NO_MARK)
    _show(mark)
    # The names of semaphores (/dev/shm/sem.*) then contain the job's mark.
    multiprocessing.current_process()._config["semprefix"] = f"/mp-{mark}"  # type: ignore[attr-defined]
    sys.path[1:1] = [path for path in environment.get("PYTHONPATH", "").split(os.pathsep) if path]
    with contextlib.suppress(ModuleNotFoundError):
        importlib.import_module("sitecustomize")
    random.seed()
    tempfile.tempdir = None
    if "MALLOC_PERTURB_" in environment:
        _libc.mallopt(_M_PERTURB, int(environment["MALLOC_PERTURB_"]))
    jit = sys.modules["torch"].jit._state  # the starter's torch read PYTORCH_JIT in the starter's environment
    jit._enabled.enabled = jit.EnabledProxy().enabled
    command = request["command"]
    if command[0] == "nsenter":
        with open(command[1].removeprefix("--net="), "rb") as namespace:  # noqa: PTH123
            if _libc.setns(namespace.fileno(), _CLONE_NEWNET):
                raise OSError(ctypes.get_errno(), f"setns to {namespace.name}")
        command = command[2:]
    name = Path(command[0]).name
    if name in LAUNCHERS:
        return _launcher(name, command)
    arguments = command[2:] if command[1] == "-u" else command[1:]
    if request["gets_starter"]:
        return _heir(lambda: _run(arguments))
    if "--nproc-per-node" in arguments:  # a launcher with another file name, or run as a module
        return _with_a_starter(
            lambda: _run(arguments), plans=arguments[1].endswith(".ttp") or "--dry-run" in arguments
        )
    return lambda: _run(arguments)


def _show(mark: str) -> None:
    """Write the mark where the kernel shows the environment of this process."""
    fields = Path("/proc/self/stat").read_text().rpartition(")")[2].split()
    start, end = int(fields[47]), int(fields[48])  # env_start and env_end
    at = ctypes.string_at(start, end - start).find(f"{MARK}=".encode())
    if at >= 0 and len(mark) == len(_NO_MARK):
        ctypes.memmove(start + at + len(MARK) + 1, mark.encode(), len(mark))


def _run(arguments: list[str]) -> None:
    """Run a script, module or code as `python` does with these arguments."""
    sys.orig_argv = [sys.executable, "-u", *arguments]
    if arguments[0] == "-m":
        sys.argv = arguments[1:]
        sys.path[0] = str(Path.cwd())
        runpy.run_module(arguments[1], run_name="__main__", alter_sys=True)
    elif arguments[0] == "-c":
        sys.argv = ["-c", *arguments[2:]]
        sys.path[0] = ""
        main = sys.modules["__main__"] = ModuleType("__main__")
        exec(compile(arguments[1], "<string>", "exec"), vars(main))
    else:
        sys.argv = arguments
        sys.path[0] = str(Path(arguments[0]).resolve().parent)
        runpy.run_path(arguments[0], run_name="__main__")


def _launcher(name: str, command: list[str]) -> Callable[[], None]:
    def launch() -> None:
        sys.path[0] = str(Path(sys.executable).parent)
        sys.argv = [str(Path(sys.executable).with_name(name)), *command[1:]]
        sys.exit(importlib.import_module(LAUNCHERS[name]).main())

    return _with_a_starter(launch)


def _modules_of_frames_are_found_quickly() -> None:
    """Make `inspect.getmodule` of a frame a look-up by name.

    The framework calls it several times in each step, and Python's own searches all modules.
    """
    original = inspect.getmodule

    def getmodule(of: Any, _filename: str | None = None) -> ModuleType | None:
        if inspect.isframe(of):
            module = sys.modules.get(of.f_globals.get("__name__", ""))
            if module is not None and vars(module) is of.f_globals:
                return module
        return original(of, _filename)

    inspect.getmodule = getmodule


def _with_a_starter(act: Callable[[], None], *, plans: bool = False) -> Callable[[], None]:
    """Fork a starter for a launcher's workers. Returns in the launcher, and in each worker.

    Args:
        act: runs the launcher.
        plans: the launcher starts no workers, only a process that inspects a job with the framework.
    """
    multiprocessing.util.spawnv_passfds = _spawned  # type: ignore[assignment]
    starter, connection = _forked_starter()
    if starter == 0:
        return _serve(connection)

    def launch() -> None:
        from torch.distributed.elastic.multiprocessing.subprocess_handler import subprocess_handler

        _Fork.starter = connection
        subprocess_handler.Popen = _Fork  # type: ignore[misc]
        hook = sys.modules["wrapt"].register_post_import_hook
        hook(_let_spares_be_forks, "adaptor.launchers.spares.spare_pool")
        if plans:
            subprocess.Popen = _Fork  # type: ignore[misc]
        act()

    return launch


def _let_spares_be_forks(spare_pool: ModuleType) -> None:
    """Make spare processes forks of the starter, like the replaced workers."""
    vars(spare_pool)["subprocess"] = SimpleNamespace(Popen=_Fork, DEVNULL=subprocess.DEVNULL)


def _spawned(path: bytes, args: list[str], passfds: Sequence[int]) -> int:
    """Start a process of multiprocessing's start method `spawn`, as `spawnv_passfds` does.

    The process is a fork of the worker, with the properties of a new interpreter: only the given descriptors,
    and no signal handlers. Each rank starts such a process for its torch_dist saves; a new interpreter would
    need two CPU seconds for the import of torch.
    """
    if args[-1] != "--multiprocessing-fork":  # the semaphore tracker, which imports nothing
        return _spawn(path, args, passfds)
    child = os.fork()
    if child:
        return child
    try:
        gc.freeze()  # the worker's objects are no garbage here
        signal.set_wakeup_fd(-1)
        for number in signal.valid_signals():
            if callable(signal.getsignal(number)):
                signal.signal(number, signal.SIG_DFL)
        signal.signal(signal.SIGINT, signal.default_int_handler)
        devnull = os.open(os.devnull, os.O_RDWR)
        # Replaced, not closed: an object that still holds the number might close a new file with it later.
        for descriptor in map(int, os.listdir("/proc/self/fd")):  # noqa: PTH208
            if descriptor > 2 and descriptor not in passfds:
                with contextlib.suppress(OSError):  # the descriptor of the listing itself
                    os.dup2(devnull, descriptor, inheritable=False)
        sys.argv = ["-c", args[-1]]
        exec(args[-2], {})
    except SystemExit as end:
        status = end.code
    except BaseException:
        traceback.print_exc()
        status = 1
    else:
        status = 0
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
    os._exit(status)


def _heir(act: Callable[[], None]) -> Callable[[], None]:
    """Fork a starter for `Warm` in the process. Returns in the process, and in each started process."""
    starter, connection = _forked_starter()
    if starter == 0:
        return _serve(connection)

    def begin() -> None:
        _warns_as_an_interpreter()
        sys.path.insert(1, str(ROOT))
        importlib.import_module("tests.faults.warm").inherit(starter, connection)
        act()

    return begin


def _warns_as_an_interpreter() -> None:
    """Restore the warning filters of a new interpreter, which the starter's PYTHONWARNINGS has changed."""
    sys.warnoptions.clear()
    warnings.resetwarnings()
    for category in (DeprecationWarning, PendingDeprecationWarning, ImportWarning, ResourceWarning):
        warnings.simplefilter("ignore", category, append=True)


def _forked_starter() -> tuple[int, socket.socket]:
    """Fork a starter.

    Returns:
        The starter's process id (0 in the starter), and the connection between both.
    """
    parent_end, starter_end = socket.socketpair()
    starter = os.fork()
    own_end, unused_end = (starter_end, parent_end) if starter == 0 else (parent_end, starter_end)
    unused_end.close()
    return starter, own_end


def _imports_of_megatron_lm() -> None:
    """Import the modules of launchers and workers beyond `PRELOADED`; called in a process that ends
    afterwards.
    """
    sys.path.insert(0, str(ROOT))
    importlib.import_module("tests.faults.hooks")  # Megatron-LM has a package `tests`, too
    sys.path.insert(0, str(MEGATRON_LM.resolve()))  # as for the script that `record.py` runs
    for module in ("cli.ttprun", "agent.node", "agent.worker_main", "spares.spare_imports"):
        importlib.import_module(f"adaptor.launchers.{module}")
    importlib.import_module("adaptor.worker.runtime")
    importlib.import_module("adaptor.devices").activate("cpu")
    importlib.import_module("adaptor.patches").load("ttp")
    importlib.import_module("adaptor.patching").arm("ttp")
    importlib.import_module("pretrain_gpt")
    for package in ("checkpoint", "host_copy", "online", "worker"):  # modules that a worker imports late
        folder = importlib.import_module(f"adaptor.{package}")
        for submodule in pkgutil.iter_modules(folder.__path__, f"adaptor.{package}."):
            importlib.import_module(submodule.name)


def _imports_of_megatron_core() -> None:
    """Import the modules of the script that uses megatron-core as a library; see the function above."""
    sys.path[:0] = [str(ROOT), str(ROOT / "tests/frameworks"), str(MEGATRON_CORE)]
    importlib.import_module("adaptor.devices").activate("cpu")
    importlib.import_module("train_core")


def main() -> Callable[[], None]:
    for module in PRELOADED:
        importlib.import_module(module)
    with contextlib.suppress(ModuleNotFoundError):  # torch 2.4 has none
        importlib.import_module("torch._inductor.compiler_bisector")
    for module in [name for name in sys.modules if name.partition(".")[0] == "adaptor"]:
        del sys.modules[module]  # torch has imported them with its launcher (`as_torchrun.py`)
    threads = len(list(Path("/proc/self/task").iterdir()))
    assert threads == 1, f"{threads} threads after the imports: a fork is not safe"
    _modules_of_frames_are_found_quickly()
    importlib.import_module("kept_code").keep((_imports_of_megatron_lm, _imports_of_megatron_core), SCRIPTS)
    _keep_the_operators()
    gc.freeze()  # a collection would write to, and so copy, every page that is shared
    _take_huge_pages()
    return _serve(socket.socket(fileno=int(sys.argv[2])))


def _keep_the_operators() -> None:
    """Do not unregister torch's operators at the end of a fork.

    Unregistering takes most of the time of a process that does nothing else.
    """
    for finalizer in list(weakref.finalize._registry):  # type: ignore[attr-defined]
        finalizer.atexit = False


def _take_huge_pages() -> None:
    """Ask the kernel to put the memory shared by all forks into huge pages.

    A fork copies an entry for each page, and its end counts each page down: a quarter of a gigabyte in small
    pages costs 30 ms of CPU time for each process.
    """
    for line in Path("/proc/self/maps").read_text().splitlines():
        place, access, _, _, inode, *name = line.split(maxsplit=5)
        if (access, inode) == ("rw-p", "0") and name in ([], ["[heap]"]):
            begin, end = (int(number, 16) for number in place.split("-"))
            _libc.madvise(ctypes.c_void_p(begin), ctypes.c_size_t(end - begin), _MADV_COLLAPSE)


def leave(status: object) -> NoReturn:
    """End the process as the interpreter does after `sys.exit(status)`, without destroying its objects.

    Threads are joined, exit functions are called, and the streams are flushed. Modules and objects are not
    destroyed: a fork would copy every shared page, a third of a CPU second for each process. Tests marked
    `cold` start new interpreters, which do destroy objects.
    """
    code = 0 if status is None else status
    if not isinstance(code, int):
        print(status, file=sys.stderr)
        code = 1
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError):  # closed by the script, or its reader has gone
            stream.flush()
    os._exit(code & 0xFF)


if __name__ == "__main__":
    # Only this line of the module is on the stack of the process.
    act = main()
    try:
        act()
    except SystemExit as end:
        leave(end.code)
    leave(None)
