"""`ttp doctor --nodes`: nodes that meet in a folder; each is a thread, or a file written by a test."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest

from adaptor import config
from adaptor.launchers.cli import ttp
from adaptor.launchers.doctor import doctor_nodes
from adaptor.launchers.doctor.doctor_job import CheckResult
from adaptor.launchers.doctor.doctor_nodes import Peer
from tests import waiting
from tests.certificates import Authority
from tests.ports import free_ports
from tests.unit.threads import LONG_S


@pytest.fixture(autouse=True)
def _patience(monkeypatch: pytest.MonkeyPatch) -> None:
    """Allow slow answers: the machine may be busy."""
    monkeypatch.setattr(doctor_nodes, "CONNECT_S", LONG_S)


class DoctorNode(threading.Thread):
    def __init__(self, folder: Path, nodes: int, **settings: str) -> None:
        super().__init__(daemon=True)
        port, self._rendezvous = free_ports(2)
        self._settings = config.load({"TTP_PORT": str(port), **settings})
        self._folder, self._nodes = folder, nodes
        self._found: list[CheckResult] = []
        self.start()

    def run(self) -> None:
        findings = doctor_nodes.between(self._folder, self._nodes, self._settings, self._rendezvous)
        self._found.extend(findings)

    def levels(self) -> dict[str, tuple[str, str]]:
        self.join(LONG_S)
        assert not self.is_alive()
        return {finding.name: (finding.level, finding.words) for finding in self._found}


def test_nodes_that_share_all(tmp_path: Path) -> None:
    levels_by_node = [node.levels() for node in [DoctorNode(tmp_path, 3) for _ in range(3)]]
    assert [
        {name: level for name, (level, _) in levels.items() if name != "routes"} for levels in levels_by_node
    ] == [{"nodes": "OK", "ports": "OK", "locks": "OK", "clocks": "OK"}] * 3
    assert {levels["ports"][1] for levels in levels_by_node} == {
        "this node has reached 2 others, 6 ports in all"
    }
    lock_lines = sorted(levels["locks"][1] for levels in levels_by_node)
    assert [line.startswith("a lock of ") for line in lock_lines] == [True, True, False]
    assert not list(tmp_path.iterdir())


def test_a_node_leaves_while_another_one_removes_the_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    unlink, scandir = Path.unlink, os.scandir
    barrier, leaving = threading.Barrier(2), threading.local()

    def leave(path: Path, missing_ok: bool = False) -> None:
        unlink(path, missing_ok)
        if path.suffix == ".node":
            leaving.second = barrier.wait(LONG_S)

    def look(path: Any) -> Any:
        """Let the second call look into the folder just after its removal."""
        if getattr(leaving, "second", False) and isinstance(path, Path):
            waiting.until(lambda: not path.exists(), "the folder removed")
        return scandir(path)

    monkeypatch.setattr(Path, "unlink", leave)
    monkeypatch.setattr(os, "scandir", look)
    for levels in [node.levels() for node in [DoctorNode(tmp_path, 2) for _ in range(2)]]:
        assert levels["locks"][0] == "OK"
    assert not list(tmp_path.iterdir())


def test_certificates_of_the_same_signer(tmp_path: Path) -> None:
    signer = Authority(tmp_path / "ca")
    nodes = [DoctorNode(tmp_path / "save", 2, **signer.settings(name)) for name in ("n0", "n1")]
    ports_lines = {node.levels()["ports"] for node in nodes}
    assert ports_lines == {("OK", "this node has reached 1 others over TLS, 3 ports in all")}


def test_certificates_of_two_signers(tmp_path: Path) -> None:
    nodes = []
    for name in ("n0", "n1"):
        nodes.append(DoctorNode(tmp_path / "save", 2, **Authority(tmp_path / name).settings(name)))
    for level, ports_lines in [node.levels()["ports"] for node in nodes]:
        assert level == "FAIL"
        assert "cannot be reached from here: TLS is refused (" in ports_lines


def test_one_node_has_certificates_and_the_other_has_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(doctor_nodes, "CONNECT_S", 0.5)
    secured, plain = (
        DoctorNode(tmp_path / "save", 2, **Authority(tmp_path / "ca").settings()),
        DoctorNode(tmp_path / "save", 2),
    )
    assert [node.levels()["ports"][0] for node in (secured, plain)] == ["FAIL", "FAIL"]


def test_a_port_without_a_listener() -> None:
    (port,) = free_ports(1)
    (finding,) = doctor_nodes.reach([Peer("n1", "127.0.0.1", (port,))], None)
    assert (finding.level, finding.words) == (
        "FAIL",
        f"port {port} of n1 (127.0.0.1) cannot be reached from here: Connection refused",
    )


def test_a_lock_that_reaches_one_node_and_a_clock_that_is_wrong(tmp_path: Path) -> None:
    """The other node reports the lock, which this node does not see."""
    node = DoctorNode(tmp_path, 2)
    place = tmp_path / ".ttp-doctor_nodes"
    other_node_file = doctor_nodes._NodeFile("other", 0.0, 0, "127.0.0.1", "locked")

    def is_done() -> bool:
        return any(b'"done"' in path.read_bytes() for path in place.glob("*-*.node"))

    _write_until(is_done, place / "!.node", other_node_file)
    (place / "!.node").unlink()
    levels = node.levels()
    assert levels["locks"] == ("FAIL", "this node got a lock that other holds")
    level, message = levels["clocks"]
    assert level == "WARN"
    assert message.startswith("the clock of other is ahead of this one by at least ")


def _write_until(is_finished: Callable[[], bool], path: Path, node: doctor_nodes._NodeFile) -> None:
    """Answer each file of another node as a node whose clock is 30 s ahead."""
    answered: dict[str, bytes] = {}

    def is_done() -> bool:
        files = {
            path_of_node.name: path_of_node.read_bytes() for path_of_node in path.parent.glob("*-*.node")
        }
        if files != answered:
            answered.clear()
            answered.update(files)
            node.count, node.clock = node.count + 1, time.time() + 30
            path.with_suffix(".new").write_bytes(msgspec.json.encode(node))
            path.with_suffix(".new").replace(path)
        return is_finished()

    waiting.written(path.parents[1], is_done, "the node has met the other")


def test_a_node_that_is_killed_counts_for_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    place = tmp_path / ".ttp-doctor_nodes"
    place.mkdir()
    node_file = doctor_nodes._NodeFile("gone", 1.0, 7, "127.0.0.1", "present")
    (place / "gone.node").write_bytes(msgspec.json.encode(node_file))
    monkeypatch.setattr(doctor_nodes, "MEET_S", 0.5)
    levels = DoctorNode(tmp_path, 2).levels()
    assert list(levels) == ["nodes"]
    assert levels["nodes"][1].startswith("no other node of 1 others met this one")


def test_the_route_that_others_do_not_know(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")
    assert doctor_nodes._own_address() == "127.0.0.1"
    meeting = doctor_nodes._Meeting(tmp_path, 2)
    meeting.others["a"] = doctor_nodes._NodeFile("a", 0.0, 1, "127.0.0.1", "done")
    assert [route.level for route in doctor_nodes._routes(meeting)] == ["OK"]
    meeting.own.address = "192.0.2.1"
    (finding,) = doctor_nodes._routes(meeting)
    assert finding.words == "the route to a leaves from 127.0.0.1, and others reach this node at 192.0.2.1"


@pytest.mark.parametrize(
    ("variable", "value", "expected"),
    [
        ("PET_RDZV_ENDPOINT", "127.0.0.1:29400", ("OK", "PET_RDZV_ENDPOINT: 127.0.0.1 is 127.0.0.1")),
        ("PET_MASTER_ADDR", "n0.invalid", ("FAIL", "PET_MASTER_ADDR: n0.invalid has no address here")),
    ],
)
def test_the_name_at_which_nodes_meet(
    variable: str, value: str, expected: tuple[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`.invalid` is in no DNS (RFC 6761). The addresses of these nodes are not local."""
    monkeypatch.setattr(doctor_nodes, "NAME_S", 0.1)
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "none")
    monkeypatch.setenv(variable, value)
    nodes = [DoctorNode(tmp_path, 2) for _ in range(2)]
    assert [node.levels()["rendezvous"] for node in nodes] == [expected] * 2


def test_nodes_need_a_folder(capsys: pytest.CaptureFixture[str]) -> None:
    assert ttp.main(["doctor", "--nodes", "2"]) == 2
    assert "--nodes is 2: name the folder in which they meet" in capsys.readouterr().err
