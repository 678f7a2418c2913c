"""Only one job at a time saves in a folder; the lease of a dead process is no obstacle."""

from __future__ import annotations

import itertools
import os
import re
import shutil
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import msgspec
import pytest

from adaptor import output
from adaptor.checkpoint import lease, left_overs, save_folder_claim
from adaptor.checkpoint.lease import Lease
from adaptor.checkpoint.lease_content import Owner
from adaptor.errors import CheckpointError, ConfigError
from adaptor.protocol import naming
from tests import waiting
from tests.unit.launching import said
from tests.unit.threads import LONG_S, Thread


def watch_for(monkeypatch: pytest.MonkeyPatch, stale_s: float) -> None:
    """A lease of another machine that nobody touches is watched for so long, with looks in between."""
    monkeypatch.setattr(lease, "STALE_S", stale_s)
    monkeypatch.setattr(lease, "LOOK_S", stale_s / 4)


@pytest.fixture
def stack() -> Iterator[ExitStack]:
    with ExitStack() as stack:
        yield stack


@contextmanager
def process() -> Iterator[subprocess.Popen[bytes]]:
    """Yield a process that lives until its input ends."""
    child = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    try:
        yield child
    finally:
        child.kill()
        child.communicate()


def mine() -> Owner:
    return Owner.of(os.getpid())


def elsewhere(owner: Owner, pid: int = 77) -> Owner:
    """A process of another machine."""
    return msgspec.structs.replace(owner, boot="another", host="node-b", pid=pid)


def held_by(root: Path) -> Owner:
    return msgspec.json.decode((root / naming.LEASE).read_bytes(), type=Owner)


@pytest.mark.robustness(
    "B10", "a job is started twice on one machine", "the second is refused in a line: machine, process, start"
)
def test_a_second_job_is_refused(tmp_path: Path, stack: ExitStack) -> None:
    first = Owner.of(stack.enter_context(process()).pid)
    Lease(tmp_path, first).take()
    with pytest.raises(ConfigError) as caught:
        Lease(tmp_path, mine()).take()
    line = str(caught.value)
    assert "\n" not in line
    assert f"--save is {tmp_path}: the job of process {first.pid} on {first.host}, started 20" in line
    assert held_by(tmp_path) == first


@pytest.mark.robustness(
    "B10", "a job starts again after a SIGKILL of ttprun", "it takes over at once, in one line"
)
def test_a_job_whose_process_is_gone_is_no_hindrance(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    watch_for(monkeypatch, 1e9)
    with process() as child:
        Lease(tmp_path, Owner.of(child.pid)).take()
    Lease(tmp_path, mine()).take()
    (line,) = said(capsys).splitlines()
    assert line.endswith("which is gone: this job saves there now")
    assert held_by(tmp_path) == mine()


def test_a_process_number_that_is_used_again_is_another_process(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    watch_for(monkeypatch, 1e9)
    Lease(tmp_path, msgspec.structs.replace(mine(), ticks=1)).take()
    Lease(tmp_path, mine()).take()


def test_a_restart_shares_the_lease_of_its_job(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for _ in range(2):
        Lease(tmp_path, mine()).take()
    assert said(capsys) == ""


@pytest.mark.robustness(
    "B10", "a second job on another machine, over a shared disk", "it is refused once the lease changes"
)
def test_a_job_of_another_machine_is_seen_to_live(tmp_path: Path) -> None:
    other_lease = Lease(tmp_path, elsewhere(mine()))
    other_lease.take()
    event = threading.Event()

    def touch() -> None:  # what its thread does, more often
        while not event.wait(0.01):
            os.utime(tmp_path / naming.LEASE)

    with Thread(touch):
        with pytest.raises(ConfigError, match="process 77 on node-b"):
            Lease(tmp_path, mine()).take()
        event.set()


@pytest.mark.robustness("B10", "a job goes on on another machine after a crash", "it takes over, in one line")
def test_a_job_of_another_machine_that_is_gone_is_no_hindrance(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    watch_for(monkeypatch, 0.2)
    Lease(tmp_path, elsewhere(mine())).take()
    Lease(tmp_path, mine()).take()
    waiting, taken = said(capsys).splitlines()
    assert "names the job of process 77 on node-b" in waiting
    assert re.search(r"waiting for a sign of life until \d\d:\d\d:\d\d UTC \(0\.2 s\)", waiting)
    assert "which is gone" in taken


def test_of_two_that_take_over_one_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    watch_for(monkeypatch, 0.2)
    Lease(tmp_path, elsewhere(mine())).take()
    rivals = [elsewhere(mine(), pid) for pid in (78, 79)]
    refused = []
    barrier = threading.Barrier(2)

    def tell(line: str, **_: object) -> None:
        if "waiting for a sign of life" in line:  # both have found the first one's lease, not one the other's
            barrier.wait(LONG_S)

    monkeypatch.setattr(output, "tell", tell)

    def take(owner: Owner) -> None:
        try:
            Lease(tmp_path, owner).take()
        except ConfigError:
            refused.append(owner)

    with Thread(take, rivals[0]), Thread(take, rivals[1]):
        pass
    (loser,) = refused
    assert held_by(tmp_path) in rivals
    assert held_by(tmp_path) != loser


def test_it_is_touched_while_it_is_held_and_removed_at_the_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lease, "REFRESH_S", 0.01)
    monkeypatch.setattr(lease, "RELEASE_S", LONG_S)
    job_lease = Lease(tmp_path, mine())
    job_lease.take()
    os.utime(tmp_path / naming.LEASE, (1, 1))
    job_lease.keep()
    waiting.until(lambda: (tmp_path / naming.LEASE).stat().st_mtime != 1, "it is touched")
    job_lease.release()
    assert list(tmp_path.iterdir()) == []


def test_only_its_own_is_removed(tmp_path: Path) -> None:
    Lease(tmp_path, elsewhere(mine())).take()
    Lease(tmp_path, mine()).release()
    assert held_by(tmp_path).pid == 77


@pytest.mark.robustness(
    "B10", "garbage, a FIFO, a link or a folder in place of the lease", "it is replaced, and the job starts"
)
@pytest.mark.parametrize("kind", ["garbage", "long", "fifo", "link", "folder"])
def test_a_file_that_is_no_lease_is_replaced(tmp_path: Path, kind: str) -> None:
    root, path = tmp_path / "save", tmp_path / "save" / naming.LEASE
    root.mkdir()
    victim = tmp_path / "victim"
    victim.write_text("precious")
    match kind:
        case "garbage":
            path.write_bytes(b"\xff{[")
        case "long":
            path.write_bytes(b"x" * 100_000)
        case "fifo":
            os.mkfifo(path)
        case "link":
            path.symlink_to(victim)
        case "folder":
            path.mkdir()
    Lease(root, mine()).take()
    assert held_by(root) == mine()
    assert victim.read_text() == "precious"


@pytest.mark.robustness("B10", "the lease cannot be written", "a line says so, and the job starts")
def test_a_lease_that_cannot_be_written_stops_nothing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    save_folder_claim.claim(tmp_path / "gone")
    (line,) = said(capsys).splitlines()
    lease = tmp_path / "gone" / naming.LEASE
    assert f"the lease {lease} cannot be taken (No such file or directory)" in line
    assert "if a second job saves in this folder, neither of the two is refused" in line


def test_cleaning_up_leaves_the_lease(tmp_path: Path) -> None:
    Lease(tmp_path, mine()).take()
    (tmp_path / f"{naming.LEASE}.0badf00d.tmp").touch()
    left_overs.clean(tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == [naming.LEASE]


def test_a_copy_of_a_folder_is_free(
    tmp_path: Path, stack: ExitStack, capsys: pytest.CaptureFixture[str]
) -> None:
    """`cp -a` copies the lease, whose owner lives and saves elsewhere."""
    first = Owner.of(stack.enter_context(process()).pid)
    (tmp_path / "save").mkdir()
    Lease(tmp_path / "save", first).take()
    branch = Path(shutil.copytree(tmp_path / "save", tmp_path / "branch"))
    Lease(branch, mine()).take()
    assert "is a copy from another folder" in said(capsys)
    assert held_by(branch) == mine()
    with pytest.raises(ConfigError):
        Lease(tmp_path / "save", mine()).take()


def test_a_job_that_loses_its_lease_reports_the_new_owner(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    event = threading.Event()
    lines: list[str] = []

    def tell(line: str, **_: object) -> None:
        lines.append(line)
        event.set()

    monkeypatch.setattr(lease, "REFRESH_S", 0.01)
    job_lease = Lease(tmp_path, mine())
    job_lease.take()
    (tmp_path / naming.LEASE).write_bytes(msgspec.json.encode(elsewhere(mine())))
    monkeypatch.setattr(output, "tell", tell)
    job_lease.keep()
    event.wait()
    job_lease.release()
    (line,) = lines
    assert "now names the job of process 77 on node-b" in line


@pytest.mark.robustness(
    "B10",
    "a job is started again while the one before still saves",
    "it waits, says for whom, and takes over",
)
def test_a_job_that_is_leaving_is_waited_for(
    tmp_path: Path, stack: ExitStack, monkeypatch: pytest.MonkeyPatch
) -> None:
    event = threading.Event()
    lines: list[str] = []

    def tell(line: str, **_: object) -> None:
        lines.append(line)
        event.set()

    monkeypatch.setattr(lease, "LOOK_S", 0.01)
    monkeypatch.setattr(lease, "STALE_S", 1e9)
    monkeypatch.setattr(output, "tell", tell)
    leaving_owner = Owner.of(stack.enter_context(process()).pid)
    job_lease = Lease(tmp_path, leaving_owner)
    job_lease.take()
    job_lease.leave()
    job_lease._marker.join()
    with Thread(Lease(tmp_path, mine()).take, 1e9):
        assert event.wait(LONG_S)
        assert held_by(tmp_path) == leaving_owner
        job_lease.release()
    job = f"({leaving_owner.host}, pid {leaving_owner.pid})"
    assert lines[0] == f"[ttp] waiting for a job that ends and still saves in {tmp_path} {job}"
    assert held_by(tmp_path) == mine()


@pytest.mark.robustness(
    "B10", "a job that is leaving does not end within TTP_OT", "the next is refused in a line"
)
def test_a_job_that_does_not_leave(tmp_path: Path, stack: ExitStack, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lease, "LOOK_S", 0.01)
    job_lease = Lease(tmp_path, Owner.of(stack.enter_context(process()).pid))
    job_lease.take()
    job_lease.leave()
    job_lease._marker.join()
    with pytest.raises(ConfigError, match="saves there"):
        Lease(tmp_path, mine()).take(patience_s=0.05)


def test_a_restart_of_a_job_takes_the_mark_away(tmp_path: Path, stack: ExitStack) -> None:
    owner = Owner.of(stack.enter_context(process()).pid)
    Lease(tmp_path, owner, "0f3a5c21").take()
    job_lease = Lease(tmp_path, owner)
    job_lease.leave()
    job_lease._marker.join()
    # By the generation the other nodes see in the last save, too, that they share the folder.
    assert b'"leaving":true,"generation":"0f3a5c21"' in (tmp_path / naming.LEASE).read_bytes()
    Lease(tmp_path, owner).take()
    assert b'"leaving":false' in (tmp_path / naming.LEASE).read_bytes()


GENERATION = "0f3a5c21"


def _goes_on(root: Path, side: set[int], owner: Owner, *, has_lease: bool) -> bool:
    """Return whether one side of a job of four nodes may continue without the others."""
    try:
        lost = {0, 1, 2, 3} - side
        lease.go_on_without(
            root,
            owner,
            GENERATION,
            [f"node {n}" for n in side],
            [f"node {n}" for n in lost],
            has_lease=has_lease,
        )
    except CheckpointError:
        return False
    return True


@pytest.mark.parametrize(
    "sides",
    [({0}, {1, 2, 3}), ({0, 1}, {2, 3}), ({0, 2, 3}, {1}), ({0}, {1}, {2, 3}), ({1, 2}, {3}, {0})],
)
def test_one_side_of_a_cut_network_goes_on(sides: tuple[set[int], ...], tmp_path: Path) -> None:
    """The first side to claim the folder continues; a second loss on that side changes nothing."""
    for number, order in enumerate(itertools.permutations(sides)):
        root = tmp_path / str(number)
        root.mkdir()
        Lease(root, mine(), GENERATION).take()
        owners = {min(side): mine() if 0 in side else elsewhere(mine(), min(side)) for side in order}
        goes_on = [_goes_on(root, side, owners[min(side)], has_lease=0 in side) for side in order]
        assert goes_on == [True] + [False] * (len(sides) - 1)
        assert held_by(root) == owners[min(order[0])]
        assert _goes_on(root, order[0], owners[min(order[0])], has_lease=0 in order[0])
        assert not _goes_on(root, order[1], owners[min(order[1])], has_lease=0 in order[1])


def test_a_side_that_has_started_again_is_not_followed(tmp_path: Path) -> None:
    Lease(tmp_path, mine(), GENERATION).take()
    assert _goes_on(tmp_path, {1, 2, 3}, elsewhere(mine()), has_lease=False)
    Lease(tmp_path, elsewhere(mine()), "the next one").take()
    assert not _goes_on(tmp_path, {0}, mine(), has_lease=True)


def test_a_lease_that_stays_after_the_end_of_its_owner(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The other side of a cut network may still go on, and a later job takes the lease at once."""
    own_lease, other_owner = Lease(tmp_path, elsewhere(mine()), GENERATION), elsewhere(mine(), 78)
    own_lease.take()
    own_lease.leave()
    own_lease.release(stays=True)
    assert _goes_on(tmp_path, {1, 2, 3}, other_owner, has_lease=False)
    own_lease.release(stays=True)  # no longer its own
    assert held_by(tmp_path) == other_owner
    Lease(tmp_path, other_owner).release(stays=True)
    Lease(tmp_path, mine(), "another start").take()
    assert "waiting" not in said(capsys)
    assert not _goes_on(tmp_path, {0}, elsewhere(mine()), has_lease=True)


def test_a_node_that_does_not_share_the_folder_does_not_go_on(tmp_path: Path) -> None:
    """Node 0 continues: no other node can take over a lease in a folder that it does not share."""
    assert not _goes_on(tmp_path, {1, 2, 3}, mine(), has_lease=False)
    assert _goes_on(tmp_path, {0, 2, 3}, mine(), has_lease=True)
    Lease(tmp_path, mine(), "an earlier start of the workers").take()
    assert _goes_on(tmp_path, {0, 2, 3}, mine(), has_lease=True)


def test_the_store_of_a_job_that_has_moved(tmp_path: Path, stack: ExitStack) -> None:
    """Only a living job has a store address; a restart of the workers keeps the address."""
    owner, at = Owner.of(stack.enter_context(process()).pid), "10.0.0.2:4711"
    assert lease.StoreOfJob(tmp_path).find() == ""
    Lease(tmp_path, mine(), GENERATION).take()
    assert lease.StoreOfJob(tmp_path).find() == ""
    lease.go_on_without(tmp_path, owner, GENERATION, ["node 1"], ["node 0"], has_lease=False, store=at)
    Lease(tmp_path, owner, "the next one").take()
    watched = lease.StoreOfJob(tmp_path)
    assert watched.find() == at
    assert watched.look() == ""
    os.utime(tmp_path / naming.LEASE, (1, 1))
    assert watched.look() == at
    stack.close()
    assert watched.find() == ""
