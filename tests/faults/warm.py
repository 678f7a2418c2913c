"""Starts processes that are born with torch imported, as forks of a *starter*, in place of new interpreters.

Most of the CPU time of a tiny job goes into imports of torch. A starter imports, once, what every framework
imports (not the framework, not the adaptor: of these it has the compiled code in memory, `kept_code.py`),
and forks itself for each process that is asked for. What runs
is the real launcher, its real workers and the real scripts; a process is the child of the one that asked for
it, in a session of its own, with the environment that it was given.

- `Warm` is a `subprocess.Popen` whose child is a fork of the starter of this process. Tests start launchers
  (`ttprun`, `torchrun`) and scripts with it. The starter lives as long as the process that uses it.
- A launcher's fork has a starter of its own, forked before anything else, and its workers and their spares
  come from there.
- `WithStarter` is a fork with such a starter for a process that uses `Warm`: the workers of pytest-xdist.

A fork is only safe of a process with one thread, so it is not the asking process that forks. What a starter
forks is handed over by the kernel, as an orphan to the nearest ancestor that takes orphans.

What an interpreter reads from its environment when it starts is done again in the fork: PYTHONPATH, with a
`sitecustomize` there, the random state of Python, MALLOC_PERTURB_ and, for torch, PYTORCH_JIT. Hash seeds
and what else torch reads when it is imported are the starter's.
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

# What Megatron-LM imports of torch and of others in its first second, and what launchers import of torch.
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
# What workers run.
SCRIPTS = (
    ROOT / "adaptor/launchers/agent/worker_main.py",
    ROOT / "adaptor/launchers/spares/spare_main.py",
    ROOT / "tests/faults/inject.py",
    ROOT / "tests/frameworks/record.py",
    ROOT / "tests/frameworks/train_core.py",
    MEGATRON_LM / "pretrain_gpt.py",
)
# In the environment of a process that must not outlive its job. The starter has room for it in what the
# kernel shows of its environment (/proc/PID/environ); a fork writes its own there.
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
    """What torch takes for a new interpreter: the child of a starter, and then of this process."""

    starter: socket.socket
    gets_starter = False
    ends_with_asker = False
    _one_at_a_time = threading.Lock()

    def _execute_child(self, args: Any, *rest: Any) -> None:
        cwd, environment = rest[4:6]  # executable, preexec_fn, close_fds, pass_fds, cwd, env
        # ..., startupinfo, creationflags, shell, p2cread, p2cwrite, c2pread, c2pwrite, errread, errwrite
        pipes = rest[9:15]
        request = {
            "command": list(map(str, args)),
            "environment": dict(os.environ if environment is None else environment),
            "folder": str(cwd or Path.cwd()),
            "gets_starter": self.gets_starter,
            "ends_with_asker": self.ends_with_asker,
        }
        descriptors = [
            own if given == -1 else given for own, given in enumerate((pipes[0], pipes[3], pipes[5]))
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
    """Runs a command as `Popen` would, in a fork of the starter of this process.

    The command begins with the interpreter (then a script, `-m` and a module, or `-c` and code) or with the
    path of a launcher; before that may stand `nsenter --net=PATH`.
    """

    # The end of a starter, as `waitpid` has it, and the connection to it.
    _mother: tuple[Callable[[], int | None], socket.socket] | None = None

    def __init__(self, command: list[str], **given: Any) -> None:
        self.starter = self._started()
        super().__init__(command, **given)

    @classmethod
    def _started(cls) -> socket.socket:
        if Warm._mother is None or Warm._mother[0]() is not None:
            ours, theirs = socket.socketpair()
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
                [sys.executable, "-u", __file__, "--serve", str(theirs.fileno())],
                env=environment,
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
            )
            theirs.close()
            Warm._mother = process.poll, ours
        return Warm._mother[1]


class WithStarter(Warm):
    """As `Warm`; the fork has a starter of its own, so that it need not start one for its own `Warm`."""

    gets_starter = True


def inherit(starter: int, connection: socket.socket) -> None:
    """Let `Warm` in this process use a starter that was forked for it: its pid, and the connection to it."""

    def ended() -> int | None:
        return os.waitpid(starter, os.WNOHANG)[0] or None

    Warm._mother = ended, connection


def run(command: list[str], *, timeout: float = 120, **given: Any) -> subprocess.CompletedProcess[str]:
    """As `subprocess.run` that captures the output and does not check; in a fork of the starter."""
    pipes = {"stdin": subprocess.DEVNULL, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    with Warm(command, text=True, **{**pipes, **given}) as process:
        try:
            out, error = process.communicate(timeout=timeout)
        except BaseException:
            process.kill()
            raise
    return subprocess.CompletedProcess(command, process.returncode, out, error)


def _send(connection: socket.socket, what: Any) -> None:
    words = json.dumps(what).encode()
    connection.sendall(len(words).to_bytes(4, "big") + words)


def _receive(connection: socket.socket) -> Any:
    """What comes next. Raises EOFError when the other side has gone."""
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
    """The starter's life. Returns in a fork: what it is to do."""
    parent = os.getppid()
    _prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != parent:
        os._exit(0)
    os.setsid()  # Ctrl-C is not for it
    while True:
        try:
            _, descriptors, _, _ = socket.recv_fds(connection, 1, 3)
            request = _receive(connection)
        except (EOFError, ConnectionError):
            os._exit(0)
        told, tell = os.pipe()
        wait, go = os.pipe()
        middle = os.fork()
        if middle == 0:
            if os.fork() == 0:
                connection.close()
                os.close(go)
                os.write(tell, str(os.getpid()).encode())
                os.read(wait, 1)  # its end: now the one that asked is the parent
                for end in (told, tell, wait):
                    os.close(end)
                return _born(request, descriptors)
            os._exit(0)
        os.waitpid(middle, 0)
        _send(connection, int(os.read(told, 32)))
        for end in (told, tell, wait, go, *descriptors):
            os.close(end)


def _born(request: Mapping[str, Any], descriptors: list[int]) -> Callable[[], None]:
    """Become the process that was asked for. Returns what it is to do."""
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
    # Named semaphores (/dev/shm/sem.*) then tell whose they are.
    multiprocessing.current_process()._config["semprefix"] = f"/mp-{mark}"  # type: ignore[attr-defined]
    sys.path[1:1] = [path for path in environment.get("PYTHONPATH", "").split(os.pathsep) if path]
    with contextlib.suppress(ModuleNotFoundError):
        importlib.import_module("sitecustomize")
    random.seed()
    tempfile.tempdir = None
    if "MALLOC_PERTURB_" in environment:
        _libc.mallopt(_M_PERTURB, int(environment["MALLOC_PERTURB_"]))
    jit = sys.modules["torch"].jit._state  # the starter's torch has read PYTORCH_JIT in another environment
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
    words = command[2:] if command[1] == "-u" else command[1:]
    if request["gets_starter"]:
        return _heir(lambda: _run(words))
    if "--nproc-per-node" in words:  # a launcher by another name, or its module
        return _with_a_starter(lambda: _run(words), plans=words[1].endswith(".ttp") or "--dry-run" in words)
    return lambda: _run(words)


def _show(mark: str) -> None:
    """Write the mark where the kernel shows the environment of this process."""
    fields = Path("/proc/self/stat").read_text().rpartition(")")[2].split()
    start, end = int(fields[47]), int(fields[48])  # env_start and env_end
    at = ctypes.string_at(start, end - start).find(f"{MARK}=".encode())
    if at >= 0 and len(mark) == len(_NO_MARK):
        ctypes.memmove(start + at + len(MARK) + 1, mark.encode(), len(mark))


def _run(words: list[str]) -> None:
    """As `python` with these words would."""
    sys.orig_argv = [sys.executable, "-u", *words]
    if words[0] == "-m":
        sys.argv = words[1:]
        sys.path[0] = str(Path.cwd())
        runpy.run_module(words[1], run_name="__main__", alter_sys=True)
    elif words[0] == "-c":
        sys.argv = ["-c", *words[2:]]
        sys.path[0] = ""
        main = sys.modules["__main__"] = ModuleType("__main__")
        exec(compile(words[1], "<string>", "exec"), vars(main))
    else:
        sys.argv = words
        sys.path[0] = str(Path(words[0]).resolve().parent)
        runpy.run_path(words[0], run_name="__main__")


def _launcher(name: str, command: list[str]) -> Callable[[], None]:
    def launch() -> None:
        sys.path[0] = str(Path(sys.executable).parent)
        sys.argv = [str(Path(sys.executable).with_name(name)), *command[1:]]
        sys.exit(importlib.import_module(LAUNCHERS[name]).main())

    return _with_a_starter(launch)


def _modules_of_frames_are_found_quickly() -> None:
    """Let `inspect.getmodule` find the module of a frame by its name.

    The framework asks for it several times in each step, and Python looks through all modules for it.
    """
    found = inspect.getmodule

    def getmodule(of: Any, _filename: str | None = None) -> ModuleType | None:
        if inspect.isframe(of):
            module = sys.modules.get(of.f_globals.get("__name__", ""))
            if module is not None and vars(module) is of.f_globals:
                return module
        return found(of, _filename)

    inspect.getmodule = getmodule


def _with_a_starter(act: Callable[[], None], *, plans: bool = False) -> Callable[[], None]:
    """Fork a starter for the workers of a launcher. Returns in the launcher, and in each worker.

    Args:
        act: the launcher's life.
        plans: it starts no worker, but one process that asks the framework what a job would be.
    """
    multiprocessing.util.spawnv_passfds = _spawned  # type: ignore[assignment]
    starter, ours = _forked_starter()
    if starter == 0:
        return _serve(ours)

    def launch() -> None:
        from torch.distributed.elastic.multiprocessing.subprocess_handler import subprocess_handler

        _Fork.starter = ours
        subprocess_handler.Popen = _Fork  # type: ignore[misc]
        hook = sys.modules["wrapt"].register_post_import_hook
        hook(_let_spares_be_forks, "adaptor.launchers.spares.spare_pool")
        if plans:
            subprocess.Popen = _Fork  # type: ignore[misc]
        act()

    return launch


def _let_spares_be_forks(spare_pool: ModuleType) -> None:
    """As the workers whose places they take."""
    vars(spare_pool)["subprocess"] = SimpleNamespace(Popen=_Fork, DEVNULL=subprocess.DEVNULL)


def _spawned(path: bytes, words: list[str], kept: Sequence[int]) -> int:
    """Start a process of multiprocessing's kind `spawn`, in a worker; as `spawnv_passfds` does.

    It is a fork of the worker with what a new interpreter would have: only these descriptors, no handlers of
    signals. The framework starts a process in this way on each rank that saves in the format torch_dist, and
    sends it what torch has written: two CPU seconds to import torch.
    """
    if words[-1] != "--multiprocessing-fork":  # what tracks semaphores, and imports nothing
        return _spawn(path, words, kept)
    child = os.fork()
    if child:
        return child
    try:
        gc.freeze()  # what the worker has is no garbage here
        signal.set_wakeup_fd(-1)
        for number in signal.valid_signals():
            if callable(signal.getsignal(number)):
                signal.signal(number, signal.SIG_DFL)
        signal.signal(signal.SIGINT, signal.default_int_handler)
        nowhere = os.open(os.devnull, os.O_RDWR)
        # Not closed: whoever has a descriptor that is not its own any more may close it later.
        for descriptor in map(int, os.listdir("/proc/self/fd")):  # noqa: PTH208
            if descriptor > 2 and descriptor not in kept:
                with contextlib.suppress(OSError):  # that of the list itself
                    os.dup2(nowhere, descriptor, inheritable=False)
        sys.argv = ["-c", words[-1]]
        exec(words[-2], {})
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
    """Fork a starter for `Warm` in this process. Returns in this process, and in each that it starts."""
    starter, ours = _forked_starter()
    if starter == 0:
        return _serve(ours)

    def begin() -> None:
        _warns_as_an_interpreter()
        sys.path.insert(1, str(ROOT))
        importlib.import_module("tests.faults.warm").inherit(starter, ours)
        act()

    return begin


def _warns_as_an_interpreter() -> None:
    """Undo what the starter's PYTHONWARNINGS has set."""
    sys.warnoptions.clear()
    warnings.resetwarnings()
    for category in (DeprecationWarning, PendingDeprecationWarning, ImportWarning, ResourceWarning):
        warnings.simplefilter("ignore", category, append=True)


def _forked_starter() -> tuple[int, socket.socket]:
    """Fork; return the pid of the starter, or 0 in it, and the connection between both."""
    ours, theirs = socket.socketpair()
    starter = os.fork()
    mine, other = (theirs, ours) if starter == 0 else (ours, theirs)
    other.close()
    return starter, mine


def _imports_of_megatron_lm() -> None:
    """Import what launchers and workers do, besides `PRELOADED`; in a process that ends then."""
    sys.path.insert(0, str(ROOT))
    importlib.import_module("tests.faults.hooks")  # Megatron-LM has a package `tests`, too
    sys.path.insert(0, str(MEGATRON_LM.resolve()))  # as the script has it, which `record.py` runs
    for module in ("cli.ttprun", "agent.node", "agent.worker_main", "spares.spare_imports"):
        importlib.import_module(f"adaptor.launchers.{module}")
    importlib.import_module("adaptor.worker.runtime")
    importlib.import_module("adaptor.devices").activate("cpu")
    importlib.import_module("adaptor.patches").load("ttp")
    importlib.import_module("adaptor.patching").arm("ttp")
    importlib.import_module("pretrain_gpt")
    for package in ("checkpoint", "host_copy", "online", "worker"):  # what a worker imports when it needs it
        folder = importlib.import_module(f"adaptor.{package}")
        for found in pkgutil.iter_modules(folder.__path__, f"adaptor.{package}."):
            importlib.import_module(found.name)


def _imports_of_megatron_core() -> None:
    """As `_imports_of_megatron_lm`, for the script that uses megatron-core as a library."""
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
    """Let no fork take out of torch's tables, when it ends, what torch's modules have registered there.

    It is most of what a process does that does nothing else.
    """
    for each in list(weakref.finalize._registry):  # type: ignore[attr-defined]
        each.atexit = False


def _take_huge_pages() -> None:
    """Have the kernel put the memory that all forks share into huge pages, where it can.

    A fork copies an entry for each page, and its end counts each of them down: a quarter of a gigabyte in
    small pages is 30 ms of CPU time for each process.
    """
    for line in Path("/proc/self/maps").read_text().splitlines():
        place, access, _, _, inode, *name = line.split(maxsplit=5)
        if (access, inode) == ("rw-p", "0") and name in ([], ["[heap]"]):
            begin, end = (int(number, 16) for number in place.split("-"))
            _libc.madvise(ctypes.c_void_p(begin), ctypes.c_size_t(end - begin), _MADV_COLLAPSE)


def leave(status: object) -> NoReturn:
    """End this process as the interpreter does after `sys.exit(status)`, without taking itself apart.

    Threads are joined, what was registered for the end is run, and the streams are flushed. What is left
    out is the removal of every module and object: in a fork it copies every page that is shared, a third of
    a CPU second for each process. An interpreter of its own does it, which is what tests marked `cold` start.
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
    # Nothing of this module is on the stack of what runs, besides this line.
    act = main()
    try:
        act()
    except SystemExit as end:
        leave(end.code)
    leave(None)
