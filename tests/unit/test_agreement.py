"""Nodes with different versions or settings are refused before workers start, on every node."""

from __future__ import annotations

import subprocess
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from torch.distributed import HashStore

from adaptor import config
from adaptor.launchers.cli import flags
from adaptor.launchers.rendezvous import agreement
from adaptor.launchers.rendezvous.agreement import NodeFacts
from tests import waiting
from tests.ports import free_ports
from tests.unit.launching import Launcher, clean, says_all, zygote

__all__ = ["clean", "zygote"]


def _compare(*nodes: dict[str, str]) -> list[str]:
    store = HashStore()
    with ThreadPoolExecutor(len(nodes)) as threads:
        answers = [
            threads.submit(agreement.compare, store, node, len(nodes), facts)
            for node, facts in enumerate(nodes)
        ]
        return [answer.result() for answer in answers]


def test_all_nodes_are_told_the_difference(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(agreement.socket, "gethostname", lambda: "a")
    split, mirror = ({"TTP_REPLICA": replica, "TTP_OT": "5"} for replica in ("split", "mirror"))
    line = (
        "the nodes of this job differ: TTP_REPLICA is 'split' on nodes 0 (a), 1 (a) and 'mirror' on node 2"
        " (a); give all nodes the same"
    )
    assert _compare(split, split, mirror) == [line] * 3
    assert _compare({"TTP_OT": "5"}, {"TTP_OT": "5"}) == ["", ""]


def test_a_fact_that_a_node_does_not_know_is_not_compared() -> None:
    assert _compare({"the version of Megatron-core": "0.15.0", "TTP_OT": "5"}, {"TTP_OT": "5"}) == ["", ""]


def test_a_large_job_is_told_in_one_short_line() -> None:
    nodes = [NodeFacts(f"h{n}", {f"S{k}": str(min(n, 1)) for k in range(6)}) for n in range(1000)]
    line = agreement.difference(nodes)
    assert "S0 is '0' on node 0 (h0) and '1' on nodes 1 (h1), 2 (h2), 3 (h3), 4 (h4) and 995 more; S1" in line
    assert line.endswith("; and 2 more; give all nodes the same")
    assert len(line) < 500


@pytest.mark.parametrize("facts", [None, "", '{"host": 1}'], ids=["nothing", "empty", "something else"])
def test_a_node_without_facts(facts: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    """A node that runs plain torchrun, or another program that writes to the store."""
    monkeypatch.setattr(agreement, "ANSWER_S", 0.05)
    store = HashStore()
    if facts is not None:
        store.set("ttp/facts/1", facts)
    difference = agreement.compare(store, 0, 2, {})
    assert difference.startswith("node 1 has not said its version and settings: ")
    assert agreement.compare(store, 2, 3, {}) == difference, "it has the answer of node 0"
    assert agreement.compare(HashStore(), 1, 2, {}).startswith("node 0 has not said its version")


def test_a_node_that_has_agreed_waits_for_no_lost_node(monkeypatch: pytest.MonkeyPatch) -> None:
    """At a restart: one of three nodes is lost before it sends its facts; a new node waits for node 0."""
    monkeypatch.setattr(agreement, "ANSWER_S", 600.0)
    store = HashStore()
    assert agreement.compare(store, 1, 4, {"S": "1"}, has_agreed=True) == ""
    assert agreement.compare(store, 0, 4, {"S": "1"}, has_agreed=True) == ""
    assert agreement.compare(store, 3, 4, {"S": "1"}) == ""


@pytest.mark.usefixtures("clean")
def test_the_facts_of_a_node(tmp_path: Path) -> None:
    core = tmp_path / "megatron" / "core"
    core.mkdir(parents=True)
    (core / "package_info.py").write_text("MAJOR = 0\nMINOR = 15\nPATCH = 0\nPRE_RELEASE = 'rc5'\n")
    arguments = ["--ttp-replica", "split", "--ttp-local-copy", "1", str(tmp_path / "pretrain_gpt.py")]
    facts = agreement.facts_of_this_node(flags.parse(arguments), config.load())
    assert facts["TTP_REPLICA (--ttp-replica)"] == "split"
    assert facts["TTP_LOCAL_COPY (--ttp-local-copy)"] == "True"
    assert facts["TTP_OT (--ttp-ot)"] == "120"
    assert facts["the version of Megatron-core"] == "0.15.0rc5"
    assert {"the version of torch", "the version of ttp-adaptor", "--max-restarts"} <= facts.keys()
    # Paths, ports and names of a node are its own.
    assert not any(name.startswith(("TTP_PORT", "TTP_LOG", "TTP_TLS_KEY", "TTP_NOTIFY")) for name in facts)


@pytest.mark.robustness(
    "A3",
    "two nodes with different values of a setting that must be the same (--ttp-replica split and mirror)",
    "both end at once, before workers start; one line names the setting, the values and the nodes",
)
@pytest.mark.parametrize("backend", ["static", "c10d"])
def test_two_nodes_with_different_settings(
    backend: str, zygote: subprocess.Popen[str], tmp_path: Path
) -> None:
    port, store = free_ports(2)
    nodes, started = [], []
    for number, replica in enumerate(["split", "mirror"]):
        (tmp_path / f"node{number}").mkdir()
        nodes.append(node := Launcher(zygote, tmp_path / f"node{number}"))
        rendezvous = {
            "static": ("--node-rank", str(number), "--master-port", str(store)),
            "c10d": ("--rdzv-backend", "c10d", "--rdzv-endpoint", f"localhost:{store}"),
        }[backend]
        options = ("--ttp-replica", replica, "--ttp-port", str(port))
        started.append(node.start("--nnodes", "2", *rendezvous, *options, node.script("print('started')")))
    results = [node.wait(pid) for node, pid in zip(nodes, started, strict=True)]
    for result in results:
        assert result.code == 2, result.log
        assert result.last_line.startswith(
            "ttprun: error: the nodes of this job differ: TTP_REPLICA (--ttp-replica) is "
        )
        assert "started" not in result.log
        assert "Traceback" not in result.log
        assert [line for line in result.log.splitlines() if not line.startswith("[ttp] waiting for ")] == [
            result.last_line
        ]
    assert len({each.last_line for each in results}) == 1


def _is_listening(port: int) -> bool:
    """Return whether a process of this machine listens at a TCP port."""
    lines = [line for name in ("tcp", "tcp6") for line in Path(f"/proc/net/{name}").read_text().splitlines()]
    sockets = map(str.split, lines)
    return any(fields[1].endswith(f":{port:04X}") and fields[3] == "0A" for fields in sockets)


@pytest.mark.parametrize("backend", ["static", "c10d"])
def test_one_of_two_nodes_runs_plain_torchrun(
    backend: str, zygote: subprocess.Popen[str], tmp_path: Path
) -> None:
    port, store = free_ports(2)
    nodes, started = [], []
    for number, enabled in enumerate(["True", "False"]):
        (tmp_path / f"node{number}").mkdir()
        nodes.append(node := Launcher(zygote, tmp_path / f"node{number}"))
        rendezvous = {
            "static": ("--node-rank", str(number), "--master-port", str(store)),
            "c10d": ("--rdzv-backend", "c10d", "--rdzv-endpoint", f"localhost:{store}"),
        }[backend]
        options = ("--ttp-enable", enabled, "--ttp-port", str(port))
        started.append(node.start("--nnodes", "2", *rendezvous, *options, node.script("print('started')")))
        if number == 0:  # it has the store, so it cannot find that the store has gone
            waiting.until(lambda: _is_listening(store), "the first node has the rendezvous store")
    results = [node.wait(pid) for node, pid in zip(nodes, started, strict=True)]
    message = "the nodes of this job differ: ENABLE_TTP is True on "
    last_lines = [result.last_line for result in results if message in result.log]
    assert last_lines, [each.log for each in results]
    assert all(line.startswith(f"ttprun: error: {message}") for line in last_lines)
    if last_lines[0] != results[0].last_line:  # the last one to come sees that, and c10d chooses who
        assert " was closed before the job began: another node has ended, " in results[0].last_line
    assert results[0].code == 2
    assert not any("started" in each.log for each in results)


def test_a_node_with_other_settings_ends_no_job_that_trains(
    zygote: subprocess.Popen[str], tmp_path: Path
) -> None:
    port, store = free_ports(2)
    rendezvous = ("--nnodes", "1:2", "--rdzv-backend", "c10d", "--rdzv-endpoint", f"localhost:{store}")
    options = ("--rdzv-conf", "last_call_timeout=1", "--ttp-port", str(port), "--monitor-interval", "0.05")
    nodes = []
    for number in (0, 1):
        (tmp_path / f"node{number}").mkdir()
        nodes.append(Launcher(zygote, tmp_path / f"node{number}"))
    script = (
        "from pathlib import Path\nfrom tests import waiting\n"
        "Path('here').write_text(' ')\nwaiting.exist(Path('../go'))\n"
    )
    job = nodes[0].start(*rendezvous, *options, nodes[0].script(script))
    waiting.written(tmp_path, lambda: says_all(nodes[0].folder / "here"), "the job trains")
    result = nodes[1].run(*rendezvous, *options, "--ttp-local-copy", "1", nodes[1].script(script), code=2)
    assert (
        "the job that trains and this node differ: TTP_LOCAL_COPY (--ttp-local-copy) is 'False' there ("
        in (result.last_line)
    )
    (tmp_path / "go").touch()
    assert nodes[0].wait(job).code == 0, nodes[0].log
