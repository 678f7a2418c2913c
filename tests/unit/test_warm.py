"""Processes that are forks of a starter are what `Popen` would have started."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests import waiting
from tests.faults import leftovers, warm
from tests.faults.warm import MARK, Warm


def test_a_script_has_its_arguments_folder_environment_and_output(tmp_path: Path) -> None:
    (tmp_path / "beside.py").touch()
    (tmp_path / "path").mkdir()
    (tmp_path / "path" / "further.py").touch()
    script = tmp_path / "script.py"
    script.write_text(
        "import beside, further, os, sys\n"
        "print(os.getppid(), sys.argv[1:], os.getcwd(), os.environ['ONLY'], __name__)\n"
        # torch's launcher has looked up its entry points before.
        "ours = [name for name in sys.modules if name.partition('.')[0] in ('adaptor', 'megatron')]\n"
        "print([name for name in ours if name != 'adaptor' and not name.startswith('adaptor.launchers')])\n"
    )
    process = Warm(
        [sys.executable, str(script), "a", "b"],
        env={"ONLY": "this", "PYTHONPATH": str(tmp_path / "path")},
        cwd=tmp_path,
        stdout=subprocess.PIPE,
        text=True,
    )
    said, _ = process.communicate()
    assert said == f"{os.getpid()} ['a', 'b'] {tmp_path} this __main__\n[]\n"
    assert process.returncode == 0


def test_torch_compiles_nothing_where_the_environment_says_so(tmp_path: Path) -> None:
    """torch reads PYTORCH_JIT when it is imported, and the fork has it imported already."""
    code = "import torch; print(torch.jit.script(len) is len)"
    with (tmp_path / "out").open("w+") as out:
        environment = {**os.environ, "PYTORCH_JIT": "0"}
        assert Warm([sys.executable, "-c", code], stdout=out, env=environment).wait() == 0
        out.seek(0)
        assert out.read() == "True\n"


@pytest.mark.parametrize(
    ("code", "expected"),
    [
        ("import sys; sys.exit(3)", 3),
        ("import sys; sys.exit('why')", 1),
        ("import sys; sys.exit()", 0),
        ("import os; os.kill(os.getpid(), 9)", -signal.SIGKILL),
        ("1 / 0", 1),
    ],
    ids=["exit", "exit with a reason", "exit with nothing", "killed", "exception"],
)
def test_the_end_of_a_process_is_told(code: str, expected: int, tmp_path: Path) -> None:
    with (tmp_path / "log").open("wb") as log:
        assert Warm([sys.executable, "-c", code], stderr=log).wait() == expected


def test_a_process_ends_as_an_interpreter_does() -> None:
    """Its threads have ended, what was registered has run, and all that was written has come out."""
    code = (
        "import atexit, sys, threading\n"
        "threading.Thread(target=lambda: (threading.main_thread().join(), print('thread'))).start()\n"
        "atexit.register(print, 'registered')\n"
        "print('script')\n"
        "sys.exit('why')\n"
    )
    done = warm.run([sys.executable, "-c", code])
    assert (done.stdout, done.stderr) == ("script\nthread\nregistered\n", "why\n")


def test_what_is_left_of_a_job_is_found_and_ended() -> None:
    """By its mark, in a fork as in an interpreter that it starts."""
    mark = f"{os.getpid():032x}"
    code = "import subprocess; p = subprocess.Popen(['sleep', '600']); print(p.pid, flush=True); p.wait()"
    with Warm(
        [sys.executable, "-c", code], env={**os.environ, MARK: mark}, stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        below = int(process.stdout.readline())
        both = sorted([process.pid, below])
        try:
            # The kernel sets what /proc shows of the environment a moment after exec.
            waiting.until(lambda: sorted(leftovers.processes(mark)) == both, f"{both} are found")
        finally:
            leftovers.end(mark)
        assert process.wait() == -signal.SIGKILL


def test_a_semaphore_tells_whose_it_is() -> None:
    mark = f"{os.getpid():032x}"
    code = (
        "import multiprocessing, os; from pathlib import Path\n"
        "lock = multiprocessing.get_context('spawn').Lock()\n"
        f"found = [path.name for path in Path({str(leftovers.SHARED)!r}).glob('sem.*{mark}*')]\n"
        "assert len(found) == 1, found\n"
    )
    assert Warm([sys.executable, "-c", code], env={**os.environ, MARK: mark}).wait() == 0
    assert not list(leftovers.SHARED.glob(f"sem.*{mark}*"))


def test_a_fork_with_a_starter_starts_no_other_one() -> None:
    """A worker of pytest-xdist is such a fork, and so imports nothing for the processes of its tests."""
    code = (
        "import sys\n"
        "begun = []\n"
        "sys.addaudithook(lambda event, of: begun.append(of) if event == 'subprocess.Popen' else None)\n"
        "from tests.faults import warm\n"
        "child = 'import os, sys; print(os.getppid(), \"torch\" in sys.modules)'\n"
        "said = warm.run([sys.executable, '-c', child]).stdout\n"
        "import os\n"
        "print(said == f'{os.getpid()} True\\n', begun, sys.warnoptions)\n"
    )
    with warm.WithStarter([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True) as process:
        said, _ = process.communicate()
    assert (said, process.returncode) == ("True [] []\n", 0)


SPAWNED = """
import os, signal, sys

def name(descriptor):
    try:
        return os.readlink(f"/proc/self/fd/{descriptor}")
    except FileNotFoundError:  # that of the list
        return ""

def look(queue):
    handled = [number for number in signal.valid_signals() if callable(signal.getsignal(number))]
    held = [each for each in map(name, os.listdir("/proc/self/fd")) if "held" in each]
    queue.put((os.getppid(), "torch" in sys.modules, handled, sys.argv, held))
"""


def test_a_worker_spawns_a_process_that_has_torch_and_nothing_else_of_it(tmp_path: Path) -> None:
    """The framework has a `Manager` of that kind on each rank that saves in the format torch_dist."""
    (tmp_path / "beside.py").write_text(SPAWNED)
    script = tmp_path / "script.py"
    script.write_text(
        "import multiprocessing, os, signal, sys, threading\n"
        "import beside\n"
        "assert __name__ == '__main__', 'imported again'\n"
        "signal.signal(signal.SIGTERM, lambda *_: None)\n"
        "threading.Thread(target=threading.Event().wait, daemon=True).start()\n"
        "held = open('held', 'w')\n"
        "context = multiprocessing.get_context('spawn')\n"
        "with context.Manager() as manager:\n"
        "    queue = manager.Queue()\n"
        "    process = context.Process(target=beside.look, args=(queue,))\n"
        "    process.start()\n"
        "    process.join()\n"
        "    assert process.exitcode == 0\n"
        "    parent, *found = queue.get()\n"
        "    print(parent == os.getpid(), *found)\n"
        "ended = context.Process(target=sys.exit, args=(3,))\n"
        "ended.start()\n"
        "ended.join()\n"
        "print(ended.exitcode)\n"
    )
    torchrun = str(Path(sys.executable).with_name("torchrun"))
    command = [torchrun, "--nproc-per-node", "1", "--standalone", "-m", "adaptor.devices", "cpu", "script.py"]
    ran = warm.run(command, cwd=tmp_path, env={**os.environ, "PYTHONPATH": str(tmp_path)})
    assert ran.returncode == 0, ran.stderr
    assert ran.stdout == "True True [<Signals.SIGINT: 2>] ['script.py'] []\n3\n"
