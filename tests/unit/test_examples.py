"""The examples use valid options of ttprun, and the Kubernetes manifest is consistent."""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from adaptor import config
from adaptor.launchers.cli import flags
from tests.faults import warm

EXAMPLES = Path(__file__).parents[2] / "examples" / "megatron_lm"
GIVEN = {"MEGATRON": "here", "DATA": "/data/corpus", "TOKENIZER": "/data/tokenizer.json", "SAVE": "/save"}
# The variables that Kubeflow Trainer sets in a pod of the example.
PODS = {
    "PET_NNODES": "4",
    "PET_NPROC_PER_NODE": "8",
    "PET_NODE_RANK": "2",
    "PET_MASTER_ADDR": "gpt-node-0-0.gpt",
    "PET_MASTER_PORT": "29400",
}


def _program(folder: Path, name: str, source: str) -> None:
    path = folder / name
    path.write_text(source)
    path.chmod(0o755)


@pytest.fixture
def shell(tmp_path: Path) -> Any:
    """Run an example with a ttprun that records its arguments, and two commands that act as Slurm."""
    (tmp_path / "here").mkdir()
    recorder = (
        "import json, os, sys; json.dump([sys.argv[1:], dict(os.environ)], open(os.environ['SEEN'], 'w'))"
    )
    _program(tmp_path, "ttprun", f"#!{sys.executable}\n{recorder}\n")
    # More than a pipe holds.
    _program(tmp_path, "scontrol", "#!/bin/sh\nexec seq --format=node%06.0f 1 20000\n")
    _program(tmp_path, "srun", '#!/bin/sh\nshift\nexec "$@"\n')

    def run(example: str, **variables: str) -> tuple[list[str], dict[str, str]]:
        environ = {**GIVEN, "SEEN": str(tmp_path / "seen"), **variables}
        environ["PATH"] = f"{tmp_path}{os.pathsep}{os.environ['PATH']}"
        subprocess.run(["bash", EXAMPLES / example], env=environ, cwd=tmp_path, check=True)
        arguments, environment = json.loads((tmp_path / "seen").read_text())
        return arguments, environment

    return run


def _parsed(
    arguments: list[str], environ: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> tuple[argparse.Namespace, config.Config]:
    """Return ttprun's parsed arguments and settings; `monkeypatch` restores the environment."""
    for name in [*(setting.variable for setting in config.settings()), *PODS]:
        monkeypatch.setenv(name, "")
        monkeypatch.delenv(name)
    for name, value in environ.items():
        if name.startswith(("PET_", "TTP_")):
            monkeypatch.setenv(name, value)
    return flags.parse(arguments), config.load()


def test_a_boot_file_becomes_ttprun(tmp_path: Path) -> None:
    """The boot file's arguments reach the training script in each process."""
    shutil.copy(EXAMPLES / "boot.py", tmp_path)
    recorder = "import os, sys; print(os.environ['RANK'], os.environ['WORLD_SIZE'], *sys.argv[1:])"
    (tmp_path / "pretrain_gpt.py").write_text(recorder)
    environ = {name: text for name, text in os.environ.items() if not name.startswith(("TTP", "ENABLE_TTP"))}
    environ |= {"PET_NPROC_PER_NODE": "2", "TTP_DEVICE": "cpu", "TTP_LOG_PATH": str(tmp_path / "logs")}
    command = [sys.executable, str(tmp_path / "boot.py"), "--lr=1e-3"]
    completed = warm.run(command, env=environ, cwd=tmp_path.parent, code=0)
    assert sorted(completed.stdout.splitlines()) == ["0 2 --lr=1e-3", "1 2 --lr=1e-3"]


def test_one_node(shell: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    parsed, settings = _parsed(*shell("one_node.sh"), monkeypatch)
    assert (parsed.nproc_per_node, parsed.max_restarts) == ("8", 100)
    assert parsed.training_script == "pretrain_gpt.py"
    assert settings.log_path == "/save/ttp-logs"


SEVERAL = {"NNODES": "2", "NODE_RANK": "1", "MASTER_ADDR": "10.0.0.1", "GLOO_SOCKET_IFNAME": "ib0"}


def test_several_nodes(shell: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    arguments, environ = shell("several_nodes.sh", **SEVERAL)
    parsed, settings = _parsed(arguments, environ, monkeypatch)
    assert (parsed.nnodes, parsed.node_rank, parsed.rdzv_backend) == ("2", 1, "static")
    assert (parsed.master_addr, parsed.master_port) == ("10.0.0.1", 29400)
    assert (environ["GLOO_SOCKET_IFNAME"], settings.timeout_s) == ("ib0", 120)


@pytest.mark.parametrize(("chosen", "tls"), [({}, "mutual"), ({"TTP_TLS": "plain"}, "plain")])
def test_only_the_user_trusts_the_network(
    chosen: dict[str, str], tls: str, shell: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without certificates and TTP_TLS ttprun refuses to start; no example overrides that."""
    _, settings = _parsed(*shell("several_nodes.sh", **SEVERAL, **chosen), monkeypatch)
    assert (settings.tls, settings.tls_cert) == (tls, "")


def test_certificates_are_used_where_there_are_some(shell: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    files = {f"TTP_TLS_{name}": f"{name}.pem" for name in ("CERT", "KEY", "CA")}
    _, settings = _parsed(*shell("several_nodes.sh", **SEVERAL, **files), monkeypatch)
    assert (settings.tls, settings.tls_cert) == ("mutual", "CERT.pem")


@pytest.mark.parametrize("missing", SEVERAL)
def test_a_missing_setting_is_named(missing: str, shell: Any, capfd: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(subprocess.CalledProcessError):
        shell("several_nodes.sh", **{**SEVERAL, missing: ""})
    assert f" {missing}: " in capfd.readouterr().err


def test_several_nodes_under_slurm(shell: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    job = {"SLURM_JOB_NODELIST": "many", "SLURM_NNODES": "20000", "SLURM_NODEID": "7"}
    arguments, environ = shell(
        "several_nodes.slurm", SLURM_SUBMIT_DIR=str(EXAMPLES), GLOO_SOCKET_IFNAME="ib0", **job
    )
    parsed, _ = _parsed(arguments, environ, monkeypatch)
    assert (parsed.nnodes, parsed.node_rank) == ("20000", 7)
    assert (parsed.master_addr, parsed.training_script) == ("node000001", "pretrain_gpt.py")


@pytest.fixture(scope="module")
def manifest() -> tuple[dict[str, Any], dict[str, Any]]:
    """The specs of the runtime and of the job."""
    runtime, job = yaml.safe_load_all((EXAMPLES / "several_nodes.yaml").read_text())
    assert {runtime["apiVersion"], job["apiVersion"]} == {"trainer.kubeflow.org/v1alpha1"}
    assert (runtime["kind"], job["kind"]) == ("TrainingRuntime", "TrainJob")
    assert job["spec"]["runtimeRef"]["kind"] == runtime["kind"]
    assert job["spec"]["runtimeRef"]["name"] == runtime["metadata"]["name"]
    assert job["metadata"]["name"] == "gpt"  # in PODS
    return runtime["spec"], job["spec"]


def _pod(runtime: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Any], dict[str, Any]]:
    """Return the Job of the nodes, its pod and its container."""
    (node,) = runtime["template"]["spec"]["replicatedJobs"]
    labels = node["template"]["metadata"]["labels"]
    assert labels["trainer.kubeflow.org/trainjob-ancestor-step"] == "trainer"
    spec = node["template"]["spec"]
    (container,) = spec["template"]["spec"]["containers"]
    assert node["name"] == container["name"] == "node"  # Trainer finds both by this name
    return spec, spec["template"]["spec"], container


def test_ttprun_accepts_the_arguments_of_the_manifest(
    manifest: tuple[dict[str, Any], dict[str, Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    trainer = manifest[1]["trainer"]
    environ = PODS | {entry["name"]: entry["value"] for entry in trainer["env"]}
    assert trainer["command"] == ["ttprun"]
    assert (trainer["numNodes"], trainer["numProcPerNode"]) == (4, 8)
    pod_arguments = [
        re.sub(r"\$\((\w+)\)", lambda match: environ[match[1]], word) for word in trainer["args"]
    ]
    parsed, settings = _parsed(pod_arguments, environ, monkeypatch)
    assert (parsed.nnodes, parsed.nproc_per_node, parsed.rdzv_backend) == ("4", "8", "c10d")
    assert parsed.rdzv_endpoint == "gpt-node-0-0.gpt:29400"
    assert parsed.training_script == "pretrain_gpt.py"
    assert "--save=/checkpoints" in parsed.training_script_args
    assert (settings.tls, settings.port) == ("mutual", 8000)


def test_kubernetes_sets_nothing_that_trainer_sets(manifest: tuple[dict[str, Any], dict[str, Any]]) -> None:
    assert not set(PODS) & {entry["name"] for entry in manifest[1]["trainer"]["env"]}


def test_kubernetes_lets_a_save_end(manifest: tuple[dict[str, Any], dict[str, Any]]) -> None:
    environ = {entry["name"]: entry["value"] for entry in manifest[1]["trainer"]["env"]}
    _, pod, _ = _pod(manifest[0])
    assert pod["terminationGracePeriodSeconds"] > config.load(environ).grace_s


def test_kubernetes_starts_all_pods_again_or_none(manifest: tuple[dict[str, Any], dict[str, Any]]) -> None:
    job, pod, _ = _pod(manifest[0])
    failure = manifest[0]["template"]["spec"]["failurePolicy"]
    assert (pod["restartPolicy"], job["backoffLimit"]) == ("Never", 0)
    assert failure["maxRestarts"] > 0
    # Exit code 2 is a refusal, which no new start would change.
    (rule,) = job["podFailurePolicy"]["rules"]
    assert (rule["action"], rule["onExitCodes"]["values"]) == ("FailJob", [2, 79])
    assert failure["rules"][0]["action"] == "FailJobSet"


def test_the_manifest_mounts_all_its_volumes(manifest: tuple[dict[str, Any], dict[str, Any]]) -> None:
    _, pod, container = _pod(manifest[0])
    mounted = {mount["name"]: mount["mountPath"] for mount in container["volumeMounts"]}
    assert sorted(mounted) == sorted(volume["name"] for volume in pod["volumes"])
    trainer = manifest[1]["trainer"]
    named = [word.partition("=")[2] for word in trainer["args"]]
    paths = [word for word in [*named, *(entry["value"] for entry in trainer["env"])] if word[:1] == "/"]
    assert len(paths) == 8
    assert all(any(Path(path).is_relative_to(root) for root in mounted.values()) for path in paths)
