"""Nodes with workers of different users, or with a node that cannot write the save folder."""

from __future__ import annotations

import getpass
import os
import shutil
import socket
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest

from adaptor.checkpoint.lease import Lease
from adaptor.checkpoint.lease_content import Owner
from tests.unit.launching import launcher, start_two, zygote
from tests.unit.other_user import NOBODY

__all__ = ["launcher", "zygote"]

# One rank per node; the rank of node 1 switches to another user, then both begin to train.
# AGREE replaces a collective; after the collective rank 0 has the lease.
TRAINS = """
import os, sys
from pathlib import Path
from adaptor.checkpoint import save_folder_claim
from adaptor.protocol.messages import Share
from adaptor.worker import runtime
from tests import waiting
from tests.unit.trainee import CountingTrainee, Loop
rank, shared, save = int(os.environ["RANK"]), Path("SHARED"), "SAVE".replace("RANK", os.environ["RANK"])
session = runtime.get().session
if rank == 1 and OTHER:
    os.setgroups([]); os.setgid(OTHER); os.setuid(OTHER)
save_folder_claim.require_writable(save)
if rank == 0:
    save_folder_claim.claim(save)
(shared / f"ready{rank}").touch()
waiting.exist(*(shared / f"ready{other}" for other in (0, 1)))
loop = Loop(session, CountingTrainee(save, (Share("g", 0, 1),)))
loop.begin(10)
(shared / f"trains{rank}").touch()
"""


@pytest.fixture
def shared() -> Iterator[Path]:
    """Make a folder that every user can reach; pytest's folders belong to one user."""
    if os.getuid() != 0:
        pytest.skip("only root can play another user")
    folder = Path(tempfile.mkdtemp(prefix="ttp-test-users-", dir="/tmp"))
    folder.chmod(0o777)
    yield folder
    shutil.rmtree(folder)


def run_both_nodes(
    zygote: subprocess.Popen[str], folder: Path, shared: Path, save: str, other_uid: int = NOBODY
) -> list[tuple[int, str]]:
    """Run both nodes; return the exit code and the log of each."""
    text = TRAINS.replace("SHARED", str(shared)).replace("SAVE", save).replace("OTHER", str(other_uid))
    nodes, started = start_two(zygote, folder, text)
    results = [node.wait(pid) for node, pid in zip(nodes, started, strict=True)]
    assert not any("Traceback" in result.log for result in results), results
    return [(result.code, result.log) for result in results]


def trained(shared: Path) -> list[str]:
    return sorted(path.name for path in shared.glob("trains*"))


@pytest.mark.robustness(
    "B10",
    "the nodes of a job write to the save folder as different users",
    "refused before the first step; the line names node, host, folder and user",
)
def test_different_users_in_one_folder(zygote: subprocess.Popen[str], tmp_path: Path, shared: Path) -> None:
    save = shared / "save"
    save.mkdir()
    save.chmod(0o777)  # writable for both users
    host = socket.gethostname()
    line = (
        f"ttprun: error: --save is {save}: node 1 ({host}) writes there as user {NOBODY} (nobody), node 0"
        f" ({host}) as user 0 ({getpass.getuser()}), and neither can write into the other's checkpoints: "
        "start ttprun as the same user on every node"
    )
    for code, log in run_both_nodes(zygote, tmp_path, shared, str(save)):
        assert code == 2, log
        assert log.strip().splitlines()[-1] == line
    assert "trains1" not in trained(shared)


@pytest.mark.robustness(
    "B10",
    "one node of a job may not write to the save folder",
    "refused before the first step; the line names node, host, folder and user",
)
def test_a_folder_that_one_node_cannot_write(
    zygote: subprocess.Popen[str], tmp_path: Path, shared: Path
) -> None:
    save = shared / "save"
    save.mkdir(mode=0o755)
    line = (
        f"ttprun: error: --save is {save}: it cannot be written (Permission denied) by user {NOBODY} (nobody)"
        f" on node 1 ({socket.gethostname()})"
    )
    for code, log in run_both_nodes(zygote, tmp_path, shared, str(save)):
        assert code == 2, log
        assert log.strip().splitlines()[-1] == line
    assert trained(shared) == []


@pytest.mark.parametrize(
    ("save", "other_uid"), [("save", 0), ("saveRANK", NOBODY)], ids=["same user", "own disks"]
)
def test_different_users_may_save_to_different_folders(
    save: str, other_uid: int, zygote: subprocess.Popen[str], tmp_path: Path, shared: Path
) -> None:
    for rank in "01":
        folder = shared / save.replace("RANK", rank)
        folder.mkdir(exist_ok=True)
        folder.chmod(0o777)
        gone = msgspec.structs.replace(Owner.of(os.getpid()), ticks=0)
        Lease(folder, gone, "the generation of an earlier job of root").take()
    for code, log in run_both_nodes(zygote, tmp_path, shared, str(shared / save), other_uid):
        assert code == 0, log
    assert trained(shared) == ["trains0", "trains1"]
