"""`ttp doctor` as a Kubernetes Job: the manifest, and the command in two pods with a network between them."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.certificates import Authority
from tests.faults import namespaces
from tests.faults.namespaces import Namespaces

MANIFESTS = Path(__file__).parents[2] / "examples/megatron_lm"
PODS = 2
# Of Kubernetes: the first that has `backoffLimitPerIndex` by default, and a newer one.
VERSIONS = ("1.29.0", "1.35.0")
# What DNS has with the headless Service, and the addresses of the two network namespaces.
NAMES = """127.0.0.1 localhost
10.231.77.1 doctor-0.doctor doctor-0
10.231.77.2 doctor-1.doctor doctor-1
"""


@pytest.fixture
def manifests() -> tuple[dict[str, Any], dict[str, Any]]:
    """The Service and the Job."""
    service, job = yaml.safe_load_all((MANIFESTS / "doctor.yaml").read_text())
    return service, job


@pytest.fixture
def network() -> Iterator[Namespaces]:
    if not namespaces.permitted():
        pytest.skip("this user may not make network namespaces")
    with namespaces.two() as network:
        yield network


@pytest.mark.parametrize("version", VERSIONS)
def test_kubernetes_takes_it(manifests: tuple[dict[str, Any], dict[str, Any]], version: str) -> None:
    validator = pytest.importorskip("kubernetes_validate")
    for manifest in manifests:
        validator.validate(manifest, version, strict=True)


@pytest.mark.parametrize("version", VERSIONS)
def test_kubernetes_takes_the_pods_of_a_job(version: str) -> None:
    """Validate the Job of the JobSet; Trainer's own kinds have no schema in the package."""
    validator = pytest.importorskip("kubernetes_validate")
    runtime, _ = yaml.safe_load_all((MANIFESTS / "several_nodes.yaml").read_text())
    (node,) = runtime["spec"]["template"]["spec"]["replicatedJobs"]
    job = {"apiVersion": "batch/v1", "kind": "Job", **node["template"]}
    validator.validate(job, version, strict=True)


def test_the_service_has_the_pods(manifests: tuple[dict[str, Any], dict[str, Any]]) -> None:
    service, job = manifests
    pod = job["spec"]["template"]["spec"]
    assert pod["subdomain"] == service["metadata"]["name"]
    assert service["spec"]["selector"] == {"job-name": job["metadata"]["name"]}
    (container,) = pod["containers"]
    assert f"--nodes={job['spec']['completions']}" in container["args"]
    assert job["spec"]["parallelism"] == job["spec"]["completions"]
    (named,) = [variable["value"] for variable in container["env"] if variable["name"] == "PET_MASTER_ADDR"]
    assert named == f"{job['metadata']['name']}-0.{pod['subdomain']}"


def test_the_doctor_has_the_settings_of_the_job(manifests: tuple[dict[str, Any], dict[str, Any]]) -> None:
    """The same user, volumes, devices and settings."""
    runtime, train = yaml.safe_load_all((MANIFESTS / "several_nodes.yaml").read_text())
    (node,) = runtime["spec"]["template"]["spec"]["replicatedJobs"]
    job, pod = (spec["template"]["spec"] for spec in (node["template"]["spec"], manifests[1]["spec"]))
    trainer = train["spec"]["trainer"]
    (container,) = pod["containers"]
    assert pod["securityContext"] == job["securityContext"]
    assert [volume for volume in job["volumes"] if volume["name"] != "data"] == pod["volumes"]
    assert container["image"] == job["containers"][0]["image"]
    assert container["resources"] == trainer["resourcesPerNode"]
    assert manifests[1]["spec"]["completions"] == trainer["numNodes"]
    settings = {variable["name"]: variable["value"] for variable in container["env"]}
    trained_with = {variable["name"]: variable["value"] for variable in trainer["env"]}
    common = {"TTP_TLS_CERT", "TTP_TLS_KEY", "TTP_TLS_CA", "TTP_PORT", "TTP_GRACE", "GLOO_SOCKET_IFNAME"}
    assert {name: settings[name] for name in common} == {name: trained_with[name] for name in common}
    (logs,) = [word.partition("=")[2] for word in trainer["args"] if word.startswith("--ttp-log-path=")]
    assert settings["TTP_LOG_PATH"] == logs


class Pods:
    """Two pods of the Job: each has a network and a host name of its own, and names as DNS has them."""

    def __init__(self, job: dict[str, Any], network: Namespaces, folder: Path) -> None:
        self._network = network
        self._hosts = folder / "hosts"
        self._hosts.write_text(NAMES)
        certificates = Authority(folder / "ca").settings()
        (folder / "tls").mkdir()
        for name, variable in (("tls.crt", "CERT"), ("tls.key", "KEY"), ("ca.crt", "CA")):
            (folder / "tls" / name).symlink_to(certificates[f"TTP_TLS_{variable}"])
        mounted = {"/checkpoints": str(folder / "save"), "/etc/ttp": str(folder / "tls")}

        def here(word: str) -> str:
            return re.sub("|".join(mounted), lambda match: mounted[match[0]], word)

        (container,) = job["spec"]["template"]["spec"]["containers"]
        program, *command = container["command"]
        arguments = [here(word) for word in container["args"]]
        arguments[arguments.index(f"--nodes={job['spec']['completions']}")] = f"--nodes={PODS}"
        self._command = [str(Path(sys.executable).with_name(program)), *command, *arguments, "--write-mib=1"]
        variables = {variable["name"]: here(variable["value"]) for variable in container["env"]}
        variables["GLOO_SOCKET_IFNAME"] = namespaces.LINK
        self._environment = {**os.environ, **variables}

    def run(self) -> list[tuple[int, str]]:
        """Return the exit code and the output of each pod."""
        running = [self._start(index) for index in range(PODS)]
        printed = [pod.communicate()[0] for pod in running]
        return [(pod.returncode, output) for pod, output in zip(running, printed, strict=True)]

    def _start(self, index: int) -> subprocess.Popen[str]:
        inside = f'hostname doctor-{index} && mount --bind {self._hosts} /etc/hosts && exec "$@"'
        return subprocess.Popen(
            [
                *self._network.command(index),
                *("unshare", "--uts", "--mount", "sh", "-c", inside, "sh", *self._command),
            ],
            env=self._environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )


def levels(output: str) -> dict[str, str]:
    """Return the level of each check of a pod."""
    findings = re.findall(r"^(OK|WARN|FAIL) +(\S+) +\S", output, re.MULTILINE)
    return {name: level for level, name in findings}


def test_its_command_in_two_pods(
    manifests: tuple[dict[str, Any], dict[str, Any]], network: Namespaces, tmp_path: Path
) -> None:
    for index, (code, output) in enumerate(Pods(manifests[1], network, tmp_path).run()):
        assert code == 0, output
        assert "FAIL" not in levels(output).values(), output
        together = {name: levels(output)[name] for name in ("nodes", "ports", "locks", "clocks", "routes")}
        assert set(together.values()) == {"OK"}, output
        # TTP_PORT, the port of the rendezvous and one of the system's.
        assert "this node has reached 1 others over TLS, 3 ports in all" in output
        assert "PET_MASTER_ADDR: doctor-0.doctor is doctor-0" in output
        assert output.endswith("0 failed\n")
        assert f"\ndoctor-{index}: " in output


def test_bad_usage_ends_all(
    manifests: tuple[dict[str, Any], dict[str, Any]], network: Namespaces, tmp_path: Path
) -> None:
    manifests[1]["spec"]["template"]["spec"]["containers"][0]["args"].append("--nods=4")
    rules = {
        tuple(rule["onExitCodes"]["values"]): rule["action"]
        for rule in manifests[1]["spec"]["podFailurePolicy"]["rules"]
    }
    codes = {code for code, _ in Pods(manifests[1], network, tmp_path).run()}
    assert codes == {2}
    assert rules == {(2,): "FailJob", (1,): "FailIndex"}
