"""A script under ttprun that trains without the adaptor."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests import waiting
from tests.faults import warm
from tests.faults.warm import Warm
from tests.unit.launching import ONE, ROOT, TWO, Launcher, launcher, zygote
from tests.waiting import captured

__all__ = ["launcher", "zygote"]

# Most scripts here find torch imported (`warm_launcher`); it is a script's own import that is watched in
# `test_it_is_said_once` and where the adaptor is disabled before it.

# Makes as many updates as its argument says, then does what stands in {end}.
TRAIN = """
import os, signal, sys
from pathlib import Path
{start}
import torch
weight = torch.nn.Parameter(torch.zeros(1))
optimizer = torch.optim.SGD([weight], lr=0.1)
for _ in range(int(sys.argv[1])):
    weight.grad = torch.ones(1)
    optimizer.step()
os.write(1, b"trained %f\\n" % weight.item())  # in one piece: our line may come between two
{end}
"""
WAITS = "Path('pid' + os.environ['RANK']).write_text(str(os.getpid()))\nsignal.pause()"
ENABLES = "import adaptor\nadaptor.enable()"
LINE = (
    "[ttp] NOT PROTECTED: SGD makes updates, and adaptor.protect was not called; call adaptor.protect before"
)


def _lines(log: str) -> list[str]:
    return [line for line in log.splitlines() if "NOT PROTECTED" in line]


class WarmLauncher(Launcher):
    """Starts ttprun and its workers as forks that have torch imported (`tests/faults/warm.py`)."""

    def __init__(self, folder: Path) -> None:
        super().__init__(None, folder)
        self.processes: dict[int, Warm] = {}

    def _ask(self, **line: Any) -> int:
        if "wait" in line:
            return self.processes[line["wait"]].wait()
        ttprun = str(Path(sys.executable).with_name("ttprun"))
        with Path(line["log"]).open("wb") as log:
            process = Warm([ttprun, *line["argv"]], cwd=line["cwd"], env=line["env"], stdout=log, stderr=log)
        self.processes[process.pid] = process
        return process.pid


@pytest.fixture
def warm_launcher(tmp_path: Path) -> Iterator[WarmLauncher]:
    launcher = WarmLauncher(tmp_path)
    yield launcher
    for process in launcher.processes.values():
        process.kill()  # nothing, where it has been waited for
        process.wait()


@pytest.mark.robustness(
    "A1", "enable() and no protect(), then training", "one line NOT PROTECTED with what to do"
)
@pytest.mark.parametrize("start", [ENABLES, ""], ids=["enabled by the script", "by ttprun alone"])
@pytest.mark.parametrize(
    ("ranks", "updates", "by"),
    [(TWO, "1", "warm_launcher"), (ONE, "9", "launcher")],
    ids=["it ends after its first update", "it goes on"],
)
@pytest.mark.integration
def test_it_is_said_once(
    start: str, ranks: list[str], updates: str, by: str, request: pytest.FixtureRequest
) -> None:
    launcher: Launcher = request.getfixturevalue(by)
    result = launcher.run(*ranks, launcher.script(TRAIN.format(start=start, end="")), updates, code=0)
    (line,) = _lines(result.log)
    assert line.startswith(LINE)
    assert line.endswith("or set ENABLE_TTP=False")


# A child has the environment of the rank, a fork its memory, too.
CHILD = """
import adaptor, os
adaptor.enable()  # multiprocessing runs the script's first line again in what it spawns
from adaptor.errors import StartError
from adaptor.worker import runtime
try:
    runtime.get()
except StartError as error:
    os.write(1, f"{error}\\n".encode())
"""
SPAWNS = """
import os, subprocess, sys
subprocess.run([sys.executable, "child.py"], check=True)
"""
FORKS = """
import os, runpy
child = os.fork()
if not child:
    runpy.run_path("child.py")
    os._exit(0)
assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
"""


@pytest.mark.parametrize("script", [SPAWNS, FORKS], ids=["spawned", "forked"])
def test_a_child_of_a_worker_does_not_take_its_place(script: str, launcher: Launcher) -> None:
    """The child would write on the rank's board, and wait for ever for the lock of the living rank."""
    launcher.script(CHILD, "child.py")
    result = launcher.run(*ONE, launcher.script(script), code=0)
    assert result.log.count("this process was not started by ttprun itself, but by the script of a rank") == 1


@pytest.mark.robustness(
    "A1", "enable() and no protect(), then a kill -9", "the last line says that it was not protected"
)
def test_the_last_line_does_not_say_that_no_step_has_finished(warm_launcher: Launcher) -> None:
    ttprun = warm_launcher.start(*TWO, warm_launcher.script(TRAIN.format(start=ENABLES, end=WAITS)), "9")
    pid, logs = warm_launcher.folder / "pid1", warm_launcher.folder / "logs"

    def is_known() -> bool:
        texts = [path.read_text() for path in logs.glob("*.log")]
        return pid.exists() and pid.read_text() != "" and any("not protected" in text for text in texts)

    waiting.written(warm_launcher.folder, is_known, "the agent knows that nothing is protected")
    os.kill(int(pid.read_text()), signal.SIGKILL)
    result = warm_launcher.wait(ttprun, code=137)
    assert "nothing to save: the job was not protected: SGD makes updates" in result.last_line
    assert "no step has finished" not in result.log


DIES_ONCE = "os.environ['TORCHELASTIC_RESTART_COUNT'] == '0' and os.kill(os.getpid(), signal.SIGKILL)"


@pytest.mark.robustness(
    "A1", "a job that is not protected is killed, and restarted", "how many steps are lost is not known"
)
def test_nobody_knows_how_many_steps_are_lost(warm_launcher: Launcher) -> None:
    script = warm_launcher.script(TRAIN.format(start="", end=DIES_ONCE))
    result = warm_launcher.run(*ONE, "--max-restarts", "1", script, "9", code=0)
    assert " the job has come to its end, 1 incident, steps lost: not known; " in result.last_line
    assert "0 steps lost" not in result.log


# Rank 0 finishes step 11. Rank 1 was ready for it, but an error of the adaptor leaves its first update.
REFUSES = """
import os, sys, threading
from pathlib import Path
from adaptor.errors import UnsupportedError
from adaptor.protocol.messages import Share
from adaptor.worker import runtime
from tests import waiting
from tests.unit.trainee import CountingTrainee, Loop
rank = os.environ["RANK"]
Path("save").mkdir(exist_ok=True)
loop = Loop(runtime.get().session, CountingTrainee(os.path.abspath("save"), (Share("g", 0, 1),)))
loop.begin(10)
if rank == "0":
    waiting.exist(Path("ready"))
    loop.step(11)
    Path("finished").touch()
    threading.Event().wait(600)
loop.session.begin_step(11)
loop.session.before_update(loop.inner[0])
Path("ready").touch()
waiting.exist(Path("finished"))
raise UnsupportedError("this optimizer keeps what cannot be copied")
"""


@pytest.mark.robustness(
    "A1", "a rank refuses to go on in its first step, which others have finished", "the step is saved"
)
def test_a_rank_that_refuses_while_others_train(launcher: Launcher) -> None:
    result = launcher.run(*TWO, launcher.script(REFUSES), code=1)
    assert "[ttp] rank 1 raised UnsupportedError: this optimizer keeps" in result.last_line
    assert "step 11 is saved, no finished step is lost" in result.last_line
    assert (launcher.folder / "save/latest_checkpointed_iteration.txt").read_text() == "11"


@pytest.mark.robustness(
    "A1", "TTP_REQUIRE_PROTECTION=True and no protect()", "refused in one line, exit code 2"
)
def test_it_can_be_an_error(warm_launcher: Launcher) -> None:
    script = warm_launcher.script(TRAIN.format(start="", end=""))
    result = warm_launcher.run(*ONE, "--ttp-require-protection", "True", script, "9", code=2)
    assert result.last_line.startswith("ttprun: error: NOT PROTECTED: SGD makes updates")
    assert "Traceback" not in result.log
    assert "trained" not in result.log


FRAMEWORK = (
    "from adaptor import context\nfrom adaptor.worker.unprotected import UnprotectedTraining\n"
    "context.part(UnprotectedTraining).expect('Megatron-LM')"
)


@pytest.mark.robustness(
    "A1",
    "a script with the framework's parser and a loop of its own, TTP_REQUIRE_PROTECTION=True or not",
    "refused before its first update, in one line, or one line and it goes on",
)
def test_a_loop_of_its_own_with_the_parser_of_a_framework(warm_launcher: Launcher) -> None:
    script = warm_launcher.script(TRAIN.format(start=FRAMEWORK, end=""))
    message = (
        "NOT PROTECTED: SGD makes updates outside of the training loop of Megatron-LM; install a plug-in"
    )
    result = warm_launcher.run(*ONE, "--ttp-require-protection", "True", script, "1", code=2)
    assert result.last_line.startswith(f"ttprun: error: {message}")
    assert "TTP_REQUIRE_PROTECTION=False" in result.last_line
    result = warm_launcher.run(*ONE, script, "9", code=0)
    (line,) = _lines(result.log)
    assert line.startswith(f"[ttp] {message}")


@pytest.mark.robustness(
    "A1", "a framework's script makes warm-up updates of an own optimizer", "one line, and it goes on"
)
@pytest.mark.parametrize(("updates", "lines"), [("9", 1), ("2", 0)], ids=["training", "of nothing"])
def test_an_extra_optimizer_in_a_framework_s_script_is_reported(
    warm_launcher: Launcher, updates: str, lines: int
) -> None:
    result = warm_launcher.run(
        *ONE, warm_launcher.script(TRAIN.format(start=FRAMEWORK, end="")), updates, code=0
    )
    assert len(_lines(result.log)) == lines


def test_disabled_before_torch_is_imported_nothing_is_watched(launcher: Launcher) -> None:
    """And the watchdogs are torch's own again."""
    start = f"{ENABLES}\nadaptor.disable()"
    script = TRAIN.format(start=start, end=f"print(*map(os.environ.get, {NAMES}), flush=True)")
    result = launcher.run(*ONE, launcher.script(script), "9", TORCH_HCCL_ASYNC_ERROR_HANDLING="2", code=0)
    assert _lines(result.log) == []
    assert result.log.splitlines()[-1] == "1 None 2"


@pytest.mark.robustness("A1", "a script under ttprun that trains nothing", "it hears nothing of protection")
def test_data_preparation_is_not_bothered(warm_launcher: Launcher) -> None:
    prepare = "import torch, adaptor\nprint('prepared', torch.ones(3).sum().item(), flush=True)\n"
    result = warm_launcher.run(
        *ONE, "--ttp-require-protection", "True", warm_launcher.script(prepare), code=0
    )
    assert "prepared 3.0" in result.log
    assert "[ttp]" not in result.log


def test_switched_off_nothing_is_seen(warm_launcher: Launcher) -> None:
    script = warm_launcher.script(TRAIN.format(start=ENABLES, end=""))
    result = warm_launcher.run(*ONE, script, "9", ENABLE_TTP="False", TTP_REQUIRE_PROTECTION="True", code=0)
    assert "NOT PROTECTED" not in result.log


NAMES = ("TORCH_NCCL_ASYNC_ERROR_HANDLING", "TORCH_NCCL_ENABLE_MONITORING", "TORCH_HCCL_ASYNC_ERROR_HANDLING")
DETAIL = {"TORCH_DISTRIBUTED_DEBUG": "DETAIL"}
ON = """
import os
import torch.distributed as dist
from adaptor import context
from adaptor.frameworks import megatron_online_support
from adaptor.online.groups import Groups
from adaptor.worker.framework_watchdogs import Watchdogs

made = context.part(Groups)
made.remember(lone=True)
helper = dist.distributed_c10d._new_process_group_helper
dist.distributed_c10d._new_process_group_helper = lambda *args, **kwargs: made.make(helper, args, kwargs)
watchdogs = context.part(Watchdogs)
{before}
dist.set_debug_level(dist.DebugLevel.OFF)  # else torch would wait for the other rank
dist.init_process_group("nccl", store=dist.HashStore(), rank=0, world_size=2)
dist.set_debug_level_from_env()
print(os.environ.get("TORCH_NCCL_DESYNC_DEBUG"), watchdogs.are_off)
print(megatron_online_support.of_process_groups())
watchdogs.warn_if_on()
"""
# In one write: print makes several, and a line of ours may come between them.
SHOW = (
    f"import os\n{{start}}\n"
    f"os.write(1, (' '.join(map(str, map(os.environ.get, {NAMES}))) + '\\n').encode())\n"
)


@pytest.mark.robustness(
    "A2", "a script under ttprun that is not protected hangs in NCCL", "torch's own watchdog stays on"
)
def test_where_nothing_is_protected_the_watchdogs_are_torch_s(launcher: Launcher) -> None:
    result = launcher.run(
        *ONE, launcher.script(SHOW.format(start="")), TORCH_HCCL_ASYNC_ERROR_HANDLING="2", code=0
    )
    assert result.log.splitlines()[-1] == "1 None 2"


# A plug-in: it patches a framework of its own, and what other scripts import, too.
PLUG_IN = """
from adaptor import patching
for name, target in {"lab": "lab:train", "more": "megatron.ours:train"}.items():
    unit = patching.Unit(name, framework=name, tested=">=1")
    unit.patch(target, why="steps are counted", accepts="()")(lambda wrapped, *_: wrapped())
"""


@pytest.mark.robustness(
    "A2", "a script, not edited, of a framework that a plug-in protects", "no watchdog ends its survivors"
)
@pytest.mark.parametrize(
    ("start", "values"),
    [
        ("import lab", "0 0 0"),
        ("import megatron.ours", "1 None None"),
        ("", "1 None None"),
        ("import adaptor; adaptor.disable(); import lab", "1 None None"),
    ],
)
def test_the_framework_of_a_plug_in_is_imported(launcher: Launcher, start: str, values: str) -> None:
    site = launcher.folder / "site"
    files = {
        "plug_in.py": PLUG_IN,
        "lab.py": "def train(): ...",
        "megatron/ours.py": "def train(): ...",
        "plug_in-1.dist-info/METADATA": "Metadata-Version: 2.1\nName: plug-in\nVersion: 1\n",
        "plug_in-1.dist-info/entry_points.txt": "[ttp_adaptor.patches]\nlab = plug_in\n",
    }
    for name, text in files.items():
        (site / name).parent.mkdir(parents=True, exist_ok=True)
        (site / name).write_text(text)
    script = launcher.script(SHOW.format(start=start))
    result = launcher.run(*ONE, script, PYTHONPATH=os.pathsep.join([str(ROOT), str(site)]), code=0)
    assert result.log.splitlines()[-1] == values


# A backend of torch's by the name that torch_npu gives to its own; what carries it is gloo.
HCCL = """
import torch.distributed as dist
from adaptor import context
from adaptor.worker.framework_watchdogs import Watchdogs
def gloo(store, rank, size, timeout):
    return dist.ProcessGroupGloo(store, rank, size, timeout)
dist.Backend.register_backend("hccl", gloo, devices=["cpu"])
dist.init_process_group("hccl", rank=0, world_size=1, store=dist.HashStore())
context.part(Watchdogs).warn_if_on()  # as adaptor.protect does, and the frameworks' loops
"""
STAYS_ON = "[ttp] TTP_HANG is 0, so the watchdog of NCCL or HCCL stays what it was: it ends a job that hangs"


@pytest.mark.robustness(
    "A2",
    "hang detection is switched off (TTP_HANG=0)",
    "the watchdog of NCCL or HCCL stays on, and one line says so",
)
@pytest.mark.parametrize("hang", ["0", "60"])
def test_where_nothing_watches_the_watchdogs_are_torch_s(warm_launcher: Launcher, hang: str) -> None:
    script = warm_launcher.script(SHOW.format(start=ENABLES + HCCL))
    result = warm_launcher.run(*ONE, "--ttp-hang", hang, script, **{NAMES[2]: "2"}, code=0)
    off = hang != "0"
    assert ("0 0 0" if off else "1 None 2") in result.log.splitlines()
    assert result.log.count(STAYS_ON) == (not off)
    assert result.log.count("call adaptor.enable() in the script") == 0


def test_a_late_enable_is_reported_with_a_remedy(warm_launcher: Launcher) -> None:
    script = warm_launcher.script(SHOW.format(start=HCCL))
    result = warm_launcher.run(*ONE, script, code=0)
    assert result.log.count("[ttp] the watchdog of NCCL or HCCL is on, and would end survivors") == 1
    assert STAYS_ON not in result.log


MEETS = """
import torch.distributed as dist
dist.init_process_group("gloo", rank=0, world_size=1, store=dist.HashStore())
"""


def test_running_watchdogs_stay_unchanged(warm_launcher: Launcher) -> None:
    """torch reads the variables when groups are made; the variables must not change afterwards."""
    script = SHOW.format(start=MEETS + ENABLES)
    result = warm_launcher.run(*ONE, warm_launcher.script(script), **{NAMES[2]: "2"}, code=0)
    assert result.log.splitlines()[-1] == "1 None 2"
    assert "watchdog" not in result.log


@pytest.mark.parametrize("value", ["3", "1"])
def test_no_watchdog_of_torch_ends_a_survivor(launcher: Launcher, value: str) -> None:
    result = launcher.run(*TWO, launcher.script(SHOW.format(start=ENABLES)), **{NAMES[0]: value}, code=0)
    assert result.log.splitlines().count("0 0 0") == 2
    message = f"[ttp] {NAMES[0]} is {value}: set to 0: the watchdog would end"
    assert result.log.count(message) == (value != "1"), "1 is what torch elastic itself sets"
    assert NAMES[2] not in result.log


@pytest.mark.parametrize(
    ("prelude", "environment", "message"),
    [
        ("watchdogs.switch_off()", {"TORCH_NCCL_DESYNC_DEBUG": "1"}, "0 True\n\n"),
        ("", {}, "None False\nthe watchdog of NCCL or HCCL is on, and would end the survivors\n"),
        (
            "watchdogs.switch_off()",
            DETAIL,
            "0 False\nTORCH_DISTRIBUTED_DEBUG=DETAIL puts a group around each process group\n",
        ),
    ],
)
def test_over_nccl_only_without_its_watchdog_a_job_recovers_online(
    prelude: str, environment: dict[str, str], message: str
) -> None:
    completed = warm.run(
        [sys.executable, "-c", ON.format(before=prelude)],
        env={**os.environ, "RANK": "0", "TTP_HANG": "600", **environment},
    )
    assert message in completed.stdout, completed.stderr
    assert ("[ttp] TORCH_DISTRIBUTED_DEBUG=DETAIL keeps the watchdog" in completed.stderr) == (
        environment == DETAIL
    )


NEWCOMER = """
import os
from adaptor import context
from adaptor.worker.framework_watchdogs import Watchdogs
context.part(Watchdogs).switch_off()
print(os.environ.get("TORCH_NCCL_DUMP_ON_TIMEOUT"))
"""


@pytest.mark.parametrize(("environment", "value"), [({}, "None"), ({"TTP_NEWCOMER": "3"}, "0")])
def test_a_process_in_the_place_of_another_does_not_look_for_dump_signals(
    environment: dict[str, str], value: str
) -> None:
    """torch would ask a store once a second that was for the meeting of the survivors."""
    completed = captured([sys.executable, "-c", NEWCOMER], env={**os.environ, "RANK": "1", **environment})
    assert completed.stdout.splitlines() == [value], completed.stderr
