"""The environment of a job's script under ttprun, and the origin of its modules."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from tests.unit.launching import LOOK, ONE, TWO, Launcher, launcher, run_here, zygote
from tests.unit.nodes import ROOT

__all__ = ["launcher", "zygote"]


def test_a_script_has_the_same_environment_as_under_python(launcher: Launcher) -> None:
    (launcher.folder / "deep").mkdir()
    arguments = ["--step=1", "-x", "--", "--nproc", "a b", ""]
    launcher.run(
        *TWO, "--ttp-ot", "33", launcher.script(LOOK, "deep/look.py"), *arguments, TTP_OT="44", code=0
    )
    for rank in (0, 1):
        observed = launcher.seen(rank)
        assert observed["argv"] == ["deep/look.py", *arguments]
        assert observed["name"] == "__main__"
        assert observed["main"]
        assert observed["file"] == str(launcher.folder / "deep/look.py")
        assert observed["path"] == str(launcher.folder / "deep")
        assert observed["env"]["TTP_OT"] == "33"
        assert observed["env"]["WORLD_SIZE"] == "2"
        assert "adaptor.worker.runtime" in observed["modules"]
        assert "torch" not in observed["modules"], "that is for the script to import"
    assert list((launcher.folder / "logs").glob("*.log")) == [], "there was nothing to say"


@pytest.mark.robustness("A7", "a script asks where it is, and what it was called", "as under torchrun")
@pytest.mark.parametrize("kind", ["relative", "absolute", "a link", "a module", "a package"])
def test_a_script_has_the_same_identity_as_under_torchrun(kind: str, launcher: Launcher) -> None:
    (launcher.folder / "pack").mkdir()
    launcher.script("", "pack/__init__.py")
    launcher.script(LOOK, "pack/__main__.py")
    launcher.script(LOOK, "pack/look.py")
    (launcher.folder / "link.py").symlink_to("pack/look.py")
    command = {
        "relative": ["pack/../pack/look.py"],
        "absolute": [str(launcher.folder / "pack/look.py")],
        "a link": ["link.py"],
        "a module": ["-m", "pack.look"],
        "a package": ["-m", "pack"],
    }[kind]
    observed = []
    for enabled in ("True", "False"):
        launcher.run(*ONE, "--ttp-enable", enabled, *command, "-x", code=0)
        observed.append({name: value for name, value in launcher.seen().items() if name in LIKE_TORCHRUN})
    assert observed[0] == observed[1]


LIKE_TORCHRUN = ("argv", "name", "file", "spec", "package", "loader", "code", "path", "main")


@pytest.mark.parametrize(
    "env", [{}, {"ENABLE_TTP": "False", "TTP_DEVICE": "cpu"}], ids=["on", "the device alone"]
)
def test_a_module_as_the_script(launcher: Launcher, env: dict[str, str]) -> None:
    (launcher.folder / "package").mkdir()
    launcher.script("", "package/__init__.py")
    launcher.script(LOOK, "package/look.py")
    launcher.run(*ONE, "-m", "package.look", "--module", "-m", **env, code=0)
    observed = launcher.seen()
    assert observed["argv"] == [str(launcher.folder / "package" / "look.py"), "--module", "-m"]
    assert observed["name"] == "__main__"
    assert observed["path"] == str(launcher.folder)


# Files of the working directory with the names of modules: of Python, of what the adaptor uses, and its own.
# None that `python script.py` itself takes from there when it spawns a process (multiprocessing, runpy).
FOREIGN = (
    "adaptor/__init__.py",
    "ctypes.py",
    "msgspec.py",
    "packaging.py",
    "queue.py",
    "wrapt/__init__.py",
    "xxhash.py",
)
# What a script and a process that it spawns see. The framework's own data loaders and managers are spawned.
HELPER = """
import sys

def look():
    names = ("adaptor", "msgspec", "multiprocessing", "queue", "wrapt", "xxhash")
    return [sys.path, {name: sys.modules[name].__file__ for name in names if name in sys.modules}]

def put(seen):
    seen.put(look())
"""
SPAWN = """
if __name__ == "__main__":
    import json, multiprocessing, os, queue
    TORCH
    from pathlib import Path
    from HELPER import look, put
    context = multiprocessing.get_context("spawn")
    seen = context.Queue()
    child = context.Process(target=put, args=(seen,))
    child.start()
    both = {"here": look(), "child": seen.get(timeout=60)}
    child.join()
    with context.Manager() as manager:
        assert list(manager.list([1])) == [1]
    Path(os.environ["SEEN"]).write_text(json.dumps(both))
"""


def _foreign(folder: Path, names: tuple[str, ...] = FOREIGN) -> None:
    """Write modules that note their import and end the importing process."""
    for name in names:
        (folder / name).parent.mkdir(exist_ok=True)
        note = f"open({str(folder / 'imported')!r}, 'a').write('{name} ')"
        (folder / name).write_text(f"{note}\nraise SystemExit('imported {name}')\n")


@pytest.mark.robustness(
    "A7",
    "modules of the working directory have the names of ours, of Python's and of what we use",
    "none is imported by ttprun, its workers and what these spawn; the script's path is that of python",
)
@pytest.mark.parametrize(
    "env",
    [
        {"TTP_DEVICE": "cpu"},
        {"ENABLE_TTP": "False", "TTP_DEVICE": "cpu"},
        pytest.param(
            {"PYTHONSAFEPATH": "1"},
            marks=pytest.mark.skipif(sys.version_info < (3, 11), reason="PYTHONSAFEPATH is of 3.11"),
        ),
    ],
    ids=lambda env: " ".join(map("=".join, env.items())),
)
@pytest.mark.integration
def test_no_file_of_the_working_directory_is_imported(tmp_path: Path, env: dict[str, str]) -> None:
    _foreign(tmp_path)
    (tmp_path / "deep").mkdir()
    (tmp_path / "deep" / "helper.py").write_text(HELPER)
    script = tmp_path / "deep" / "script.py"
    script.write_text(SPAWN.replace("HELPER", "helper").replace("TORCH", ""))
    safe = {}
    if "PYTHONSAFEPATH" in env:
        safe = {**env, "PYTHONPATH": str(tmp_path / "deep")}  # else nothing finds the helper
    run_here(tmp_path, sys.executable, "deep/script.py", **safe, code=0)
    expected = json.loads((tmp_path / "seen").read_text())
    (tmp_path / "seen").unlink()
    script.write_text(SPAWN.replace("HELPER", "helper").replace("TORCH", "import torch"))
    ttprun_script = str(Path(sys.executable).with_name("ttprun"))
    run_here(tmp_path, ttprun_script, *ONE, "deep/script.py", **{**env, **safe}, code=0)
    assert not (tmp_path / "imported").exists(), (tmp_path / "imported").read_text()
    observed = json.loads((tmp_path / "seen").read_text())
    assert [observed[process][0] for process in expected] == [expected[process][0] for process in expected]
    files = {**observed["here"][1], **observed["child"][1]}.values()
    assert not [file for file in files if Path(file).is_relative_to(tmp_path)]


@pytest.mark.robustness(
    "A7",
    "--module, and modules of the working directory have the names of ours",
    "the adaptor imports none of them; the script's path is that of python -m",
)
@pytest.mark.integration
def test_a_module_finds_the_working_directory_and_the_adaptor_does_not(tmp_path: Path) -> None:
    _foreign(tmp_path, ("adaptor/__init__.py", "msgspec.py", "wrapt.py", "xxhash.py"))
    (tmp_path / "package").mkdir()
    (tmp_path / "package" / "__init__.py").touch()
    (tmp_path / "package" / "helper.py").write_text(HELPER)
    script = tmp_path / "package" / "script.py"
    script.write_text(SPAWN.replace("HELPER", "package.helper").replace("TORCH", ""))
    run_here(tmp_path, sys.executable, "-m", "package.script", code=0)
    expected = json.loads((tmp_path / "seen").read_text())
    (tmp_path / "seen").unlink()
    script.write_text(SPAWN.replace("HELPER", "package.helper").replace("TORCH", "import torch"))
    ttprun_script = str(Path(sys.executable).with_name("ttprun"))
    run_here(tmp_path, ttprun_script, *ONE, "-m", "package.script", code=0)
    assert not (tmp_path / "imported").exists(), (tmp_path / "imported").read_text()
    observed = json.loads((tmp_path / "seen").read_text())
    assert (observed["here"][0], observed["child"]) == (expected["here"][0], expected["child"])


@pytest.mark.robustness(
    "A7",
    "beside the script lies a module with the name of one that the adaptor uses",
    "the script imports its own, the adaptor goes on with the installed one",
)
def test_a_script_imports_its_own_modules(launcher: Launcher) -> None:
    launcher.script("mine = 'of the script'\n", "xxhash.py")
    launcher.script("mine = 'of the script'\n", "secrets.py")
    text = (
        "import adaptor, secrets, sys, xxhash\n"
        "from adaptor.checkpoint import hashing\n"
        "print(secrets.mine, xxhash.mine, hasattr(hashing.xxhash, 'xxh3_128'))\n"
    )
    result = launcher.run(*ONE, launcher.script(text), code=0)
    assert "of the script of the script True" in result.log


@pytest.mark.robustness(
    "A9", "the distribution adaptor of the package index is installed, too", "one line, and what to do"
)
def test_another_distribution_of_the_same_import_name(launcher: Launcher) -> None:
    script = launcher.script("import sys\nprint('trained')\n")
    prelude = "import sys; sys.path.append('others')"
    assert "distribution" not in launcher.run(*TWO, script, prelude=prelude).log
    info = launcher.folder / "others" / "adaptor-0.2.5.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: adaptor\nVersion: 0.2.5\n")
    result = launcher.run(*TWO, script, prelude=prelude, code=0)
    (line,) = (line for line in result.log.splitlines() if "distribution" in line)
    assert line == (
        "[ttp] the distribution adaptor 0.2.5 is installed, which has the import name of ttp-adaptor: each"
        " overwrites files of the other; uninstall both, then install the adaptor again: pip install . in the"
        " folder of its sources"
    )
    replaced = launcher.run(*TWO, script, prelude=f"{prelude}; import adaptor; del adaptor.enable")
    assert (replaced.code, len(replaced.log.splitlines())) == (2, 1)
    assert replaced.last_line.startswith(
        "ttprun: error: adaptor/__init__.py is not that of ttp-adaptor, the distribution adaptor 0.2.5 has"
        " replaced it: uninstall both"
    )


def test_a_folder_as_the_script(launcher: Launcher) -> None:
    (launcher.folder / "job").mkdir()
    launcher.script(LOOK, "job/__main__.py")
    launcher.run(*ONE, "job", "-x", code=0)
    observed = launcher.seen()
    assert (observed["argv"], observed["path"]) == (["job", "-x"], "job")
    assert str(launcher.folder) not in observed["paths"], "as under python itself"


@pytest.mark.skipif(sys.version_info < (3, 11), reason="PYTHONSAFEPATH is of 3.11")
def test_a_safe_path_loses_no_entry(launcher: Launcher) -> None:
    """The first entry of the path comes from PYTHONPATH, and is not the folder added by `python -m`."""
    launcher.run(*ONE, launcher.script(LOOK, "look.py"), PYTHONSAFEPATH="1", code=0)
    observed = launcher.seen()
    assert str(launcher.folder) not in observed["paths"], "as under python itself"
    assert str(ROOT) in observed["paths"]


def test_switched_off_it_is_torchrun(launcher: Launcher) -> None:
    script = launcher.script(LOOK)
    launcher.run(*ONE, "--ttp-enable", "False", script, "-x", code=0)
    observed = launcher.seen()
    assert observed["modules"] == [], "nothing of the adaptor is imported"
    assert observed["argv"] == [script, "-x"]
    assert set(observed["env"]) == {"ENABLE_TTP", "WORLD_SIZE"}


def test_switched_off_a_failure_ends_as_under_torchrun(launcher: Launcher) -> None:
    script = launcher.script("import sys\nsys.exit(3)\n")
    result = launcher.run(*ONE, script, ENABLE_TTP="0")
    as_torch = "import adaptor.launchers.cli.ttprun as t, torch.distributed.run as r\nt.main = r.main"
    torchrun = launcher.run(*ONE, script, prelude=as_torch)
    assert result.code == torchrun.code == 1
    assert result.last_line == torchrun.last_line
    assert "ChildFailedError" in result.log


def test_switched_off_a_program_need_not_be_python(launcher: Launcher) -> None:
    program = launcher.folder / "run.sh"
    program.write_text('#!/bin/sh\necho "arguments: $*, rank $RANK"\n')
    program.chmod(0o700)
    result = launcher.run(*ONE, "--no-python", "./run.sh", "--flag", ENABLE_TTP="False", code=0)
    assert "arguments: --flag, rank 0" in result.log


def test_switched_off_a_device_is_the_stand_ins_alone(launcher: Launcher) -> None:
    launcher.run(*ONE, launcher.script(LOOK), "-x", ENABLE_TTP="False", TTP_DEVICE="cpu", code=0)
    observed = launcher.seen()
    assert "adaptor.devices.cpu" in observed["modules"]
    packages = (
        "adaptor.protocol",
        "adaptor.controller",
        "adaptor.worker",
        "adaptor.checkpoint",
        "adaptor.launchers",
        "adaptor.patches.megatron",
    )
    assert [name for name in observed["modules"] if name.startswith(packages)] == []
    assert observed["argv"] == ["script.py", "-x"]


DOCTOR = ("-m", "adaptor.launchers.cli.ttp", "doctor", "--write-mib", "1")


def test_a_job_that_is_ttp_doctor(launcher: Launcher) -> None:
    """Every node of a job is checked once by the program that starts ttprun; no files are left."""
    result = launcher.run(*TWO, *DOCTOR, "--save", "save", TTP_DEVICE="cpu", code=0)
    assert result.log.count(" checks, 0 failed") == 1
    assert [path.name for path in launcher.folder.iterdir()] == ["log"], "no log folder, no save folder"


def test_the_findings_of_the_doctor_decide_the_exit_code(launcher: Launcher) -> None:
    result = launcher.run(*TWO, *DOCTOR, TTP_DEVICE="cpu", GLOO_SOCKET_IFNAME="eth77", code=1)
    assert result.last_line.endswith(" checks, 1 failed")


@pytest.mark.robustness(
    "A2", "a script of Megatron-LM on a machine without an accelerator", "one line with --ttp-device cpu"
)
@pytest.mark.parametrize("source", ["import megatron.training\n", "from megatron.training import pretrain\n"])
def test_megatron_lm_without_an_accelerator(source: str, launcher: Launcher) -> None:
    hidden = {"CUDA_VISIBLE_DEVICES": ""}
    result = launcher.run(*ONE, launcher.script(f"print('started')\n{source}"), **hidden, code=2)
    (line,) = result.log.splitlines()
    assert line.startswith(
        "ttprun: error: torch finds no accelerator on this machine, and script.py is a scr"
    )
    assert " give --ttp-device cpu to train on the CPU " in line


@pytest.mark.parametrize(
    ("source", "arguments"),
    [
        ("megatron.training", ["--ttp-device", "cpu"]),
        ("megatron.training", ["--ttp-enable", "False"]),
        ("megatron.core", []),
    ],
    ids=["on the CPU", "plain", "Megatron-core"],
)
def test_a_script_that_needs_no_accelerator(source: str, arguments: list[str], launcher: Launcher) -> None:
    text = f"print('started', flush=True)\nif False:\n    import {source}\n"
    result = launcher.run(*ONE, *arguments, launcher.script(text), CUDA_VISIBLE_DEVICES="")
    assert (result.code, result.log.count("started\n")) == (0, 1), result.log
