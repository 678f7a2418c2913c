"""`ttp plan` and `ttprun --dry-run`, with the real framework's parser and groups.

Those that start the framework are integration tests.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from adaptor.launchers.cli import flags, plan, ttp, ttprun
from adaptor.protection_plan import _groups
from adaptor.protocol.records import Replicas
from tests.frameworks import prepare
from tests.frameworks.args import environment, tiny_gpt
from tests.patches.conftest import Run

RANKS = """
import json, sys
from megatron.core.parallel_state import RankGenerator
made = []
for tp, cp, dp, pp in json.loads(sys.argv[1]):
    made.append(RankGenerator(tp=tp, ep=1, dp=dp, pp=pp, cp=cp, order="tp-cp-ep-dp-pp").get_ranks("dp-cp"))
print(json.dumps(made))
"""
SIZES = [(1, 1, 4, 1), (2, 1, 4, 1), (2, 2, 2, 1), (2, 1, 2, 2), (1, 2, 3, 4)]


def test_the_groups_are_the_frameworks(python: Run) -> None:
    tree = str(prepare.megatron_lm())
    completed = python("-c", RANKS, json.dumps(SIZES), env={**environment(), "PYTHONPATH": tree}, code=0)
    for (tp, cp, dp, pp), groups in zip(SIZES, json.loads(completed.stdout), strict=True):
        assert sorted(_groups(tp * cp * dp * pp, cp * dp, tp)) == sorted(groups)


def planned(python: Run, *arguments: str, **options: Any) -> tuple[int, dict[str, Any]]:
    script = str(prepare.megatron_lm() / "pretrain_gpt.py")
    command = ("plan", "--json", *arguments, "--", script, *tiny_gpt(**options))
    completed = python("-m", "adaptor.launchers.cli.ttp", *command, env=environment())
    assert len(completed.stdout.splitlines()) == 1, completed.stdout + completed.stderr
    return completed.returncode, json.loads(completed.stdout)


@pytest.mark.integration
def test_nodes_and_racks(python: Run, tmp_path: Path) -> None:
    """Of four nodes with a rank each, nodes 0 and 2 hold the same state, and so do nodes 1 and 3."""
    hosts = tmp_path / "hosts"
    hosts.write_text("n0 r0\nn1 r1 # near the door\n\nn2 r0\nn3 r1\n")
    size = ("--nnodes", "4", "--nproc-per-node", "1", "--hosts", str(hosts), "--bandwidth", "0.5")
    code, report = planned(python, *size, save=tmp_path / "save")
    plan = report["plan"]
    assert (code, report["refusals"], plan["ranks"], plan["nodes"]) == (0, [], 4, 4)
    assert plan["save_seconds"] == plan["save"] / 5e8
    (chosen,) = (row for row in plan["replicas"] if row["chosen"])
    assert (chosen["kind"], chosen["survives"]) == ("split", "any 1 rank, any 1 node")
    assert not (tmp_path / "save").exists()
    rows = {row["kind"]: (row["any_rack"], row["better"]) for row in plan["replicas"]}
    assert rows == {"split": (False, [0, 2, 1, 3]), "mirror": (True, None), "none": (False, None)}


def test_words_about_racks() -> None:
    row = Replicas("split", True, None, None, None, None, "", any_rack=False, better=(0, 2, 1, 3))
    _, line = plan._of_racks(row, ["a", "b", "c", "d"])
    assert line.endswith("any 1 rack may be lost with this order: a, c, b, d")


@pytest.mark.parametrize(
    ("content", "line"),
    [
        ("n0\n", "line 1: 'n0': it must be HOST RACK"),
        ("n0 r0\nn0 r1\n", "line 2: n0 is there twice"),
        ("# nothing\n", "names no host: it must have a line 'HOST RACK' for each node"),
        ("n0 r0\nn1 r1\n", "has 2 hosts, and --nnodes is 1"),
        (None, "cannot be read (No such file or directory)"),
    ],
)
def test_bad_hosts(
    content: str | None, line: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    hosts = tmp_path / "hosts"
    if content is not None:
        hosts.write_text(content)
    assert ttp.main(["plan", "--hosts", str(hosts), "--", "a.py", "x"]) == 2
    (last_line,) = capsys.readouterr().err.splitlines()
    assert line in last_line


@pytest.mark.integration
def test_experts_are_counted_once(python: Run, tmp_path: Path) -> None:
    """Two ranks share four experts: the plan counts the experts of one rank."""
    experts = ("--num-experts", "4", "--disable-bias-linear", "--moe-router-topk", "2")
    _, unshared = planned(python, "--nproc-per-node", "4", save=tmp_path, extra=experts)
    half_of_them = (*experts, "--expert-model-parallel-size", "2")
    _, half = planned(python, "--nproc-per-node", "4", save=tmp_path, extra=half_of_them)
    expert = 2 * 64 * 4 * 64 * 2  # of one expert, in both layers
    assert unshared["plan"]["parameters"] - half["plan"]["parameters"] == pytest.approx(2 * expert)
    # In the format torch each set of experts has a file of its own, with the weights of all else.
    dense = unshared["plan"]["parameters"] - 4 * expert
    assert half["plan"]["save"] - unshared["plan"]["save"] == pytest.approx(2 * dense)


@pytest.mark.integration
def test_the_recovery_of_a_fault(python: Run, tmp_path: Path) -> None:
    """Also each option that prevents online recovery.

    Unshared experts are reported without the model's size.
    """
    script = str(prepare.megatron_lm() / "pretrain_gpt.py")
    experts = ("--num-experts", "2", "--expert-model-parallel-size", "2", "--disable-bias-linear")
    options = tiny_gpt(
        save=tmp_path, extra=(*experts, "--dataloader-type", "external", "--iterations-to-skip", "4")
    )
    place = options.index("--vocab-size")
    del options[place : place + 2]
    options[options.index("NullTokenizer")] = "GPT2BPETokenizer"  # whose files are not given
    command = ("plan", "--nproc-per-node", "2", "--", script, *options)
    environ = environment(TTP_ONLINE="60")
    completed = python("-m", "adaptor.launchers.cli.ttp", *command, env=environ, code=0)
    (line,) = (line for line in completed.stdout.splitlines() if line.startswith("recovery"))
    assert line.startswith("recovery     not online: a fault restarts all ranks (--iterations-to-skip ")
    assert "; a data loader of the script's own (--dataloader-type external) " in line
    (chosen,) = (line for line in completed.stdout.splitlines() if line.startswith(("* mirror", "* none")))
    assert chosen.startswith("* none ")
    assert chosen.endswith("  exceptions; ranks that die cost up to 50 steps, from copies in host memory")
    assert "remedy" not in completed.stdout
    without = python("-m", "adaptor.launchers.cli.ttp", *command, env={**environ, "TTP_HOST_COPY": "0"})
    assert "  exceptions alone\n" in without.stdout
    assert (
        "\nremedy       TTP_HOST_COPY=auto keeps copies in host memory, from which at most 50 "
        in without.stdout
    )
    command = ("plan", "--nproc-per-node", "2", "--", script, *tiny_gpt(save=tmp_path))
    completed = python("-m", "adaptor.launchers.cli.ttp", *command, env=environ)
    assert (
        "\nrecovery     online: a fault costs new processes in place of the failed ranks alone\n"
        in completed.stdout
    )


@pytest.mark.integration
def test_the_doctor_checks_the_needs_of_a_job(python: Run, tmp_path: Path) -> None:
    """The arguments and figures of the plan, compared with this machine."""
    script = str(prepare.megatron_lm() / "pretrain_gpt.py")
    command = (
        "doctor",
        "--json",
        "--nproc-per-node",
        "2",
        "--save",
        str(tmp_path / "save"),
        "--write-mib",
        "1",
    )
    arguments = tiny_gpt(save=tmp_path / "save")
    env = {**environment(), "TTP_DEVICE": "cpu", "TTP_LOG_PATH": str(tmp_path / "logs")}
    completed = python("-m", "adaptor.launchers.cli.ttp", *command, "--", script, *arguments, env=env, code=0)
    findings = {finding["name"]: finding for finding in json.loads(completed.stdout)["findings"]}
    assert findings["job"]["words"].startswith(
        "protected with 2 ranks: second copies of optimizer shards by split"
    )
    _, report = planned(python, "--nproc-per-node", "2", save=tmp_path / "save")
    (row,) = (row for row in report["plan"]["replicas"] if row["chosen"])
    need = report["plan"]["training"] + row["memory"]
    assert f"{need / 1e6:.1f} MB with weights" in findings["replica"]["words"]
    assert f"{report['plan']['save'] / 1e6:.1f} MB of a save" in findings["TTP_GRACE"]["words"]
    assert not (tmp_path / "save").exists()
    assert not (tmp_path / "logs").exists()


@pytest.mark.integration
def test_refusals_are_reported(python: Run) -> None:
    code, report = planned(python, "--nproc-per-node", "2")
    assert (code, report["fits"]) == (1, False)
    assert report["refusals"][0].startswith("--save is missing")


@pytest.mark.parametrize(
    ("arguments", "line"),
    [
        (["--"], "ttp: error: name the script and its arguments: ttp plan -- pretrain_gpt.py ARGUMENTS"),
        (["--", "absent.py"], "ttp: error: there is no script absent.py"),
        (["--nnodes", "2", "--", "a.py", "x"], "ttp: error: --nnodes is 2: say --nproc-per-node, too"),
        (
            ["--bandwidth", "0", "--", "a.py"],
            "argument --bandwidth: '0': it must be a number of GB/s above 0",
        ),
        (["--nnodes", "0", "--", "a.py"], "argument --nnodes: '0': it must be a number from 1 on"),
    ],
)
def test_bad_usage(arguments: list[str], line: str, python: Run) -> None:
    completed = python("-m", "adaptor.launchers.cli.ttp", "plan", *arguments, env=environment())
    assert (completed.returncode, completed.stdout) == (2, "")
    assert line in completed.stderr.splitlines()[-1]


@pytest.mark.integration
def test_a_dry_run_checks_and_starts_nothing(python: Run, folder: Path) -> None:
    script = str(prepare.megatron_lm() / "pretrain_gpt.py")
    options = ("--dry-run", "--nnodes", "2", "--master-addr", "10.0.0.1", "--nproc-per-node", "2")
    arguments = (script, *tiny_gpt(save=folder / "save"))
    completed = python("-m", "adaptor.launchers.cli.ttprun", *options, *arguments, env=environment())
    assert (completed.returncode, "agents of several machines speak TLS" in completed.stderr) == (2, True)
    trusted = environment(TTP_TLS="plain")
    (racks := folder / "racks").write_text("n0 a\nn1 b\n")
    hosts = ("--hosts", str(racks))
    completed = python(
        "-m", "adaptor.launchers.cli.ttprun", *hosts, *options, *arguments, env=trusted, code=0
    )
    assert completed.stdout.startswith("ranks        4 on 2 nodes, data-parallel size 4\n")
    (chosen,) = (line for line in completed.stdout.splitlines() if line.startswith("* split"))
    assert chosen.endswith("  any 1 rank, any 1 node")
    assert (
        "racks        any 1 rack may be lost, with the nodes in the order of the file\n" in completed.stdout
    )
    assert not (folder / "logs").exists()


@pytest.mark.parametrize(
    ("settings", "line"),
    [
        (
            {"TTP_NOTIFY": "exec:true", "TTP_NOTIFY_SECRET": "absent"},
            "TTP_NOTIFY_SECRET: it must be the path",
        ),
        ({"GLOO_SOCKET_IFNAME": "absent0"}, "this node has no network interface 'absent0'"),
        ({"TTP_ENGINE": "absent"}, "TTP_ENGINE is 'absent'"),
        ({"TTP_LOG_PAHT": "logs"}, "TTP_LOG_PAHT"),
    ],
)
def test_a_dry_run_and_a_start_refuse_the_same_settings(
    settings: dict[str, str], line: str, python: Run, folder: Path
) -> None:
    (script := folder / "script.py").touch()
    completed = python(
        "-m", "adaptor.launchers.cli.ttprun", "--dry-run", str(script), env=environment(**settings)
    )
    assert (completed.returncode, line in completed.stderr) == (2, True), completed.stderr


@pytest.mark.parametrize(
    ("arguments", "dry"),
    [
        (["--dry-run", "a.py"], True),
        (["--nnodes", "2", "--dry-run", "--ttp-ot", "20", "a.py", "-x"], True),
        (["--ttp-ot", "20", "--dry-run", "a.py"], True),
        (["a.py", "--dry-run"], False),
        (["--", "a.py", "--dry-run"], False),
        (["a.py"], False),
    ],
)
def test_a_dry_run_is_asked_for_before_the_script(arguments: list[str], dry: bool) -> None:
    remaining = [argument for argument in arguments if argument != "--dry-run"] if dry else arguments
    assert flags.without(flags.DRY_RUN, arguments) == (remaining, dry)


@pytest.mark.parametrize(
    ("arguments", "remaining", "file"),
    [
        (["--hosts", "f", "--dry-run", "a.py"], ["--dry-run", "a.py"], "f"),
        (["--dry-run", "--hosts=f", "a.py", "-x"], ["--dry-run", "a.py", "-x"], "f"),
        (
            ["--nnodes", "2", "--ttp-ot", "20", "--hosts", "f", "a.py"],
            ["--nnodes", "2", "--ttp-ot", "20", "a.py"],
            "f",
        ),
        (["a.py", "--hosts", "f"], ["a.py", "--hosts", "f"], None),
        (["--", "a.py", "--hosts", "f"], ["--", "a.py", "--hosts", "f"], None),
    ],
)
def test_hosts_are_ttpruns_only_before_the_script(
    arguments: list[str], remaining: list[str], file: str | None
) -> None:
    assert flags.take_hosts(arguments) == (remaining, file)


@pytest.mark.parametrize(
    ("arguments", "line"),
    [
        (["--dry-run", "--hosts"], "--hosts: name a file with a line 'HOST RACK' for each node"),
        (["--hosts=", "a.py"], "--hosts: name a file with a line 'HOST RACK' for each node"),
        (
            ["--hosts", "absent", "--nproc-per-node", "1", "a.py"],
            "--hosts absent belongs to --dry-run: a start reads no racks",
        ),
    ],
)
def test_hosts_that_are_refused(arguments: list[str], line: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert ttprun.main(arguments) == 2
    assert line in capsys.readouterr().err
