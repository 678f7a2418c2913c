"""`python -m adaptor report`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.frameworks import prepare
from tests.frameworks.args import environment, tiny_gpt
from tests.patches.conftest import Run

# The command, with the patches on the fake framework in place of the adaptor's own.
REPORT = """
import sys
import adaptor.patches, units
from adaptor.__main__ import main
adaptor.patches.FILES["ttp"] = ()
sys.exit(main(["report", *sys.argv[1:]]))
"""


def test_whole_units(python: Run) -> None:
    completed = python("-c", REPORT)
    assert (completed.returncode, completed.stderr) == (0, "")
    assert completed.stdout == (
        "patch         unit  status   why, or what is wrong\n"
        "fake.core:f   pair  applied  f is doubled\n"
        "fake.extra:g  pair  applied  g is negated\n"
        "\n"
        "unit pair: fake 1.2.0rc1 is tested (>=1,<2)\n"
        "verdict: the patches fit; add the script's arguments to see what of the job would be protected:"
        " python -m adaptor report -- script.py ARGUMENTS\n"
    )


def test_ctrl_c_while_the_script_runs(folder: Path, cold_python: Run) -> None:
    (folder / "train.py").write_text("import signal\nsignal.raise_signal(signal.SIGINT)\n")
    hears = "import signal; signal.signal(signal.SIGINT, signal.default_int_handler)"
    completed = cold_python("-c", f"{hears}\n{REPORT}", "--", "train.py", "--lr", "1")
    assert (completed.returncode, completed.stdout, completed.stderr) == (130, "", "")


def test_drift(folder: Path, python: Run) -> None:
    (folder / "fake/extra.py").write_text("def g(b, a): ...\n")
    completed = python("-c", REPORT, code=1)
    assert "fake.core:f   pair  silenced  f is doubled\n" in completed.stdout
    assert "fake.extra:g  pair  drifted   expected (a, b), found (b, a)\n" in completed.stdout
    assert completed.stderr == (
        "python -m adaptor: fake.extra:g (unit pair): expected (a, b), found (b, a)"
        f" in {folder}/fake/extra.py, fake 1.2.0rc1 (tested: >=1,<2)\n"
    )


def test_a_module_that_cannot_be_imported(folder: Path, python: Run) -> None:
    (folder / "fake/extra.py").write_text("import engine_that_is_not_here\n")
    completed = python("-c", REPORT, code=1)
    assert completed.stderr.splitlines() == [
        "python -m adaptor: fake.extra cannot be imported: No module named 'engine_that_is_not_here'",
        (
            "python -m adaptor: unit pair is half applied: fake.core:f is patched, fake.extra:g is not,"
            " because fake.extra was not imported"
        ),
    ]


def test_a_module_that_is_gone(folder: Path, python: Run) -> None:
    (folder / "fake/extra.py").unlink()
    completed = python("-c", REPORT, code=1)
    assert "found no module fake.extra" in completed.stderr


def test_no_framework(folder: Path, python: Run) -> None:
    (folder / "fake").rename(folder / "elsewhere")
    completed = python("-c", REPORT, code=1)
    line = "none of the patched modules is on the path: is the framework installed?"
    assert completed.stderr == f"python -m adaptor: {line}\n"
    assert completed.stdout == f"verdict: not protected: {line}\n", "without a table of what is not there"


def test_the_framework_beside_a_script(folder: Path, python: Run) -> None:
    scripts = folder / "scripts"
    scripts.mkdir()
    (folder / "fake").rename(scripts / "fake")
    (scripts / "train.py").write_text("raise AssertionError('trained')\n")
    completed = python("-c", REPORT, "--", "scripts/train.py")
    assert (completed.returncode, completed.stderr) == (0, "")
    assert "fake.core:f   pair  applied" in completed.stdout


def test_no_such_script(python: Run) -> None:
    completed = python("-m", "adaptor", "report", "--", "absent.py")
    assert (completed.returncode, completed.stderr) == (
        2,
        "python -m adaptor: there is no script absent.py\n",
    )


@pytest.mark.robustness(
    "A9", "the distribution adaptor of the package index is installed, too", "one line, and what to do"
)
def test_another_distribution_of_the_same_import_name(folder: Path, python: Run) -> None:
    info = folder / "adaptor-0.2.5.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: adaptor\nVersion: 0.2.5\n")
    line = "the distribution adaptor 0.2.5 is installed, which has the import name of ttp-adaptor: "
    completed = python("-c", REPORT, code=0)
    assert completed.stderr.startswith(f"python -m adaptor: {line}")
    enabled = python("-c", "import adaptor; adaptor.enable()", code=1)
    assert f"; {line}" in enabled.stderr


def test_a_setting_that_makes_no_sense(python: Run) -> None:
    completed = python("-c", REPORT, env={"TTP_DEVICE": "gpu"})
    assert (completed.returncode, completed.stdout) == (2, "")
    (line,) = completed.stderr.splitlines()
    assert line.startswith(
        "python -m adaptor: TTP_DEVICE is 'gpu': it must be one of cpu, cuda, npu, or nothing"
    )


# the arguments of a script; frameworks import torch

SMALL = Path(__file__).parents[1] / "frameworks" / "small" / "pretrain.py"


def _asked(python: Run, *arguments: str) -> tuple[int, dict[str, Any]]:
    """The exit code and the JSON of a report with the adaptor's own patches, without an accelerator."""
    completed = python("-m", "adaptor", "report", "--json", *arguments, env={**environment(), "RANK": "7"})
    assert len(completed.stdout.splitlines()) == 1, completed.stdout + completed.stderr
    return completed.returncode, json.loads(completed.stdout)


def _megatron(*arguments: str) -> list[str]:
    return ["--", str(prepare.megatron_lm() / "pretrain_gpt.py"), *arguments]


@pytest.mark.robustness(
    "A5", "a report on a job that fits", "the replicas, what they take, and nothing written"
)
def test_the_report_of_a_protected_job(python: Run, tmp_path: Path) -> None:
    save = tmp_path / "save"
    code, report = _asked(python, "--world-size", "4", *_megatron(*tiny_gpt(save=save, tp=2)))
    assert (code, report["fits"], report["refusals"]) == (0, True, [])
    assert report["replica"] == "split"
    assert report["layout"]["data_parallel"] == 2
    assert report["bytes_per_rank_and_parameter"] == 3
    assert report["verdict"] == (
        "protected with 4 ranks: second copies of optimizer shards by split, data-parallel size 2;"
        " 2.79 GiB more on each rank for each billion parameters of the model"
    )
    assert {patch["framework"] for patch in report["patches"]} == {"megatron-core", "megatron-lm"}
    assert not save.exists()


@pytest.mark.robustness(
    "A5", "a report on arguments that are refused", "every refusal, ours and the framework's"
)
def test_every_refusal_is_named(python: Run, tmp_path: Path) -> None:
    refused = (
        "--use-megatron-fsdp",
        "--fp8-format",
        "hybrid",
        "--fp8-param-gather",
        "--non-persistent-save-interval",
        "5",
    )
    code, report = _asked(python, *_megatron(*tiny_gpt(), *refused))
    assert (code, report["fits"]) == (1, False)
    names = ["--use-megatron-fsdp is True", "--non-persistent-save-interval is 5", "--fp8-recipe is delayed"]
    names += ["--save is missing", "the script ended with AssertionError"]
    assert [line.partition(":")[0] for line in report["refusals"]] == names
    assert report["verdict"].startswith("not protected: --use-megatron-fsdp is True: ")
    assert report["verdict"].endswith(" (and 4 more)")


@pytest.mark.robustness(
    "A5", "a report on a number that is none", "the parser's error in one line, exit code 1"
)
def test_an_error_of_the_framework_parser(python: Run, tmp_path: Path) -> None:
    wrong = (*tiny_gpt(save=tmp_path / "save"), "--tensor-model-parallel-size", "banana")
    completed = python("-m", "adaptor", "report", *_megatron(*wrong), env=environment())
    message = "argument --tensor-model-parallel-size: invalid int value: 'banana'"
    line = f"the parser of the script's arguments: {message}"
    assert completed.returncode == 1
    assert completed.stderr == f"python -m adaptor: {line}\n"
    assert completed.stdout.splitlines()[-1] == f"verdict: not known: {line}"
    assert "ascendspeed" not in completed.stdout, "a framework that is not there"


@pytest.mark.parametrize(
    ("arguments", "replica", "refusals"),
    [
        (["--world-size", "3"], "mirror", []),
        (["--world-size", "1"], "none", []),
        ([], "split", []),
        (["--deepspeed", "--foldx-mode", "fifo"], "split", ["--deepspeed is True", "--foldx-mode is fifo"]),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else value,
)
def test_modellinks_arguments(
    arguments: list[str], replica: str, refusals: list[str], python: Run, tmp_path: Path
) -> None:
    size, script_options = (arguments, []) if "--world-size" in arguments else ([], arguments)
    options = ["--use-distributed-optimizer", "--save", str(tmp_path / "save"), *script_options]
    code, report = _asked(python, *size, "--", str(SMALL), *options)
    assert [line.partition(":")[0] for line in report["refusals"]] == refusals
    assert (code, report["replica"]) == (1 if refusals else 0, replica)
    if replica == "none":
        assert report["verdict"] == (
            "with 1 ranks exceptions are survived, the death of a process is not: the data-parallel size is 1"
        )


OWN_LOOP = (
    "not known: a training loop of its own is checked when it calls adaptor.protect; the job then prints how"
    " many ranks may be lost, or NOT PROTECTED (TTP_REQUIRE_PROTECTION=True ends it)"
)


@pytest.mark.robustness(
    "A5", "a report on a script with a training loop of its own", "it does not train; not known, exit code 0"
)
@pytest.mark.parametrize(
    ("begins", "runs"),
    [
        ("torch.distributed.init_process_group('gloo')", "cold_python"),
        ("torch.distributed.init_process_group('gloo')", "python"),
        ("torch.optim.SGD([torch.nn.Parameter(torch.ones(1))], lr=1)", "python"),
    ],
)
def test_a_script_that_would_train_is_stopped(
    begins: str, runs: str, folder: Path, request: pytest.FixtureRequest
) -> None:
    """The script imports torch, or torch was imported before."""
    text = f"import adaptor\nadaptor.enable()\nimport torch\n{begins}\nopen('trained', 'w')\n"
    (folder / "own.py").write_text(text)
    run: Run = request.getfixturevalue(runs)
    completed = run("-c", REPORT, "--", "own.py", "--lr", "1")
    assert (completed.returncode, completed.stderr) == (0, "")
    assert completed.stdout.splitlines()[-1] == f"verdict: {OWN_LOOP}"
    assert not (folder / "trained").exists()


def test_the_example_with_a_training_loop_of_its_own(python: Run, tmp_path: Path) -> None:
    script = Path(__file__).parents[2] / "examples/megatron_core/pretrain.py"
    options = ["--world-size", "4", "--", str(script), "--save", str(tmp_path / "save")]
    path = str(prepare.megatron_core())
    completed = python(
        "-m", "adaptor", "report", "--json", *options, env={**environment(), "PYTHONPATH": path}
    )
    report = json.loads(completed.stdout)
    assert (completed.returncode, report["fits"], report["refusals"]) == (0, True, []), completed.stderr
    assert report["verdict"] == OWN_LOOP
    assert (report["layout"], report["replica"]) == (None, "")
    unclaimed = tmp_path / "unclaimed.py"
    unclaimed.write_text(script.read_text().replace("adaptor.enable()", ""))
    options[3] = str(unclaimed)
    completed = python(
        "-m", "adaptor", "report", "--json", *options, env={**environment(), "PYTHONPATH": path}
    )
    report = json.loads(completed.stdout)
    assert (completed.returncode, report["fits"], report["refusals"]) == (1, False, []), completed.stderr
    assert report["verdict"].startswith(
        "this script is not protected: it makes process groups or an optimizer before it has called adaptor."
    )


@pytest.mark.robustness(
    "A5",
    "ttp plan on a script with Megatron-LM's parser and a training loop of its own",
    "this script is not protected, and why; exit code 1",
)
def test_a_loop_of_its_own_with_megatrons_parser(python: Run, tmp_path: Path) -> None:
    script = Path(__file__).parents[1] / "frameworks/own_loop.py"
    command = [*_megatron(*tiny_gpt(save=tmp_path / "save"))]
    code, report = _asked(python, "--world-size", "4", "--", str(script), *command[1:])
    assert (code, report["fits"], report["refusals"]) == (1, False, [])
    assert report["verdict"].startswith(
        "this script is not protected: it uses the parser of Megatron-LM, but the code that calls the parser"
        " does not import the training loop of Megatron-LM"
    )
    assert "install a plug-in" in report["verdict"]


@pytest.mark.parametrize("drift", ["def g(b, a): ...\n", None])
def test_a_training_loop_of_its_own_beside_patches_that_do_not_fit(
    drift: str | None, folder: Path, python: Run
) -> None:
    (folder / "own.py").write_text("import torch\ntorch.distributed.init_process_group('gloo')\n")
    if drift is None:
        (folder / "fake").rename(folder / "elsewhere")
    else:
        (folder / "fake/extra.py").write_text(drift)
    completed = python("-c", REPORT, "--", "own.py", "--lr", "1", code=1)
    assert completed.stdout.splitlines()[-1].startswith("verdict: not protected: ")


@pytest.mark.robustness(
    "A5", "a report on a script that ends by an error of its own", "not known, the error in one line"
)
@pytest.mark.parametrize(
    ("begins", "cause"),
    [
        ("raise ValueError('two\\nlines')", "ValueError: two lines"),
        (
            "raise AssertionError('CUDA_DEVICE_MAX_CONNECTIONS')",
            "AssertionError: CUDA_DEVICE_MAX_CONNECTIONS",
        ),
        ("assert sys.argv == 7", "AssertionError: assert sys.argv == 7"),
        (
            "class args: save_interval = None\nassert args.save_interval is not None",
            "AssertionError: assert args.save_interval is not None: --save-interval is missing",
        ),
        (
            "class args: lr, min_lr = 1, 2\nassert args.min_lr <= args.lr",
            "AssertionError: assert args.min_lr <= args.lr: correct --min-lr or --lr",
        ),
        ("import engine_of_nobody", "ModuleNotFoundError: No module named 'engine_of_nobody'"),
        ("sys.exit(3)", "exit code 3"),
        ("sys.exit('no data')", "SystemExit: no data"),
        ("", "exit code 0"),
    ],
)
@pytest.mark.parametrize("framework", [True, False], ids=["with the framework", "without"])
def test_a_script_that_ends_by_an_error_of_its_own(
    begins: str, cause: str, framework: bool, folder: Path, python: Run
) -> None:
    if not framework:
        (folder / "fake").rename(folder / "elsewhere")
    (folder / "own.py").write_text(f"import sys\n{begins or 'sys.exit()'}\n")
    completed = python("-c", REPORT, "--", "own.py", "--lr", "1", code=1)
    assert completed.stdout.splitlines()[-1].startswith(f"verdict: not known: the script ended with {cause}")
    assert completed.stderr.startswith(f"python -m adaptor: the script ended with {cause}")


def test_a_script_that_trains_nothing(folder: Path, python: Run) -> None:
    (folder / "own.py").write_text("")
    completed = python("-c", REPORT, "--", "own.py", "--lr", "1", code=1)
    assert completed.stdout.splitlines()[-1] == "verdict: not known: the script ended without training"


@pytest.mark.parametrize("value", ["0", "-2", "abc"])
@pytest.mark.parametrize("name", ["--world-size", "WORLD_SIZE"])
def test_a_world_size_that_makes_no_sense(name: str, value: str, python: Run) -> None:
    flag, env = ([f"{name}={value}"], {}) if name.startswith("--") else ([], {name: value})
    completed = python("-c", REPORT, *flag, env=env)
    assert (completed.returncode, completed.stdout) == (2, "")
    line = f"{name} is {value}: it must be a number of ranks from 1 on"
    assert completed.stderr == f"python -m adaptor: {line}\n"


# Writes to stdout by every way there is, also at the end of the process.
NOISE = """
import atexit, ctypes, os, subprocess, sys
def everywhere():
    print("print")
    sys.__stdout__.write("stream")
    os.write(1, b"descriptor")
    ctypes.CDLL(None).puts(b"C")
    subprocess.run(["echo", "child"], check=True)
everywhere()
atexit.register(everywhere)
"""


@pytest.mark.robustness(
    "A5", "a framework, C code and child processes write to stdout during a report", "one JSON object alone"
)
def test_nothing_but_the_report_is_on_stdout(folder: Path, python: Run) -> None:
    (folder / "own.py").write_text(f"{NOISE}import torch\ntorch.distributed.init_process_group('gloo')\n")
    with (folder / "fake/core.py").open("a") as core:
        core.write(NOISE)
    completed = python("-c", REPORT, "--json", "--", "own.py", "--lr", "1", code=0)
    assert json.loads(completed.stdout)["verdict"] == OWN_LOOP
    completed = python("-c", REPORT, code=0)
    assert completed.stdout.startswith("patch  ")
    assert completed.stdout.splitlines()[-1].startswith("verdict: the patches fit")
