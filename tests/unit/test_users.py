"""Nodes whose workers write as different users, or of which one cannot write the save folder."""

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

from adaptor.checkpoint.lease import Lease, Owner
from tests.unit.launching import launcher, start_two, zygote
from tests.unit.other_user import NOBODY

__all__ = ["launcher", "zygote"]

# Each node has one rank; that of node 1 becomes another user, then both begin to train as a framework does.
# AGREE stands for a collective, after which rank 0 has the lease.
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
    """A folder that every user reaches; those of pytest are their owner's alone."""
    if os.getuid() != 0:
        pytest.skip("only root can play another user")
    folder = Path(tempfile.mkdtemp(prefix="ttp-test-users-", dir="/tmp"))
    folder.chmod(0o777)
    yield folder
    shutil.rmtree(folder)


def ends(
    zygote: subprocess.Popen[str], folder: Path, shared: Path, save: str, other: int = NOBODY
) -> list[tuple[int, str]]:
    """The exit code and the last line of both nodes."""
    text = TRAINS.replace("SHARED", str(shared)).replace("SAVE", save).replace("OTHER", str(other))
    nodes, started = start_two(zygote, folder, text)
    ended = [node.wait(pid) for node, pid in zip(nodes, started, strict=True)]
    assert not any("Traceback" in one.log for one in ended), ended
    return [(one.code, one.log) for one in ended]


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
    save.chmod(0o777)  # so each of them can write there
    host = socket.gethostname()
    line = (
        f"ttprun: error: --save is {save}: node 1 ({host}) writes there as user {NOBODY} (nobody), node 0"
        f" ({host}) as user 0 ({getpass.getuser()}), and neither can write into the other's checkpoints: "
        "start ttprun as the same user on every node"
    )
    for code, log in ends(zygote, tmp_path, shared, str(save)):
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
    for code, log in ends(zygote, tmp_path, shared, str(save)):
        assert code == 2, log
        assert log.strip().splitlines()[-1] == line
    assert trained(shared) == []


@pytest.mark.parametrize(
    ("save", "other"), [("save", 0), ("saveRANK", NOBODY)], ids=["same user", "own disks"]
)
def test_what_is_not_refused(
    save: str, other: int, zygote: subprocess.Popen[str], tmp_path: Path, shared: Path
) -> None:
    """Users are compared where both nodes save to the same folder, not where each has its own."""
    for rank in "01":
        folder = shared / save.replace("RANK", rank)
        folder.mkdir(exist_ok=True)
        folder.chmod(0o777)
        gone = msgspec.structs.replace(Owner.of(os.getpid()), ticks=0)
        Lease(folder, gone, "the generation of an earlier job of root").take()
    for code, log in ends(zygote, tmp_path, shared, str(shared / save), other):
        assert code == 0, log
    assert trained(shared) == ["trains0", "trains1"]
