"""The uploaders of several nodes send one checkpoint together, with a real store and without a job."""

from __future__ import annotations

import contextlib
import gzip
import os
import random
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from torch.distributed import checkpoint

from adaptor.checkpoint import layout_file, regular_folder, tracker
from adaptor.errors import CheckpointError
from adaptor.protocol import naming
from adaptor.protocol.naming import FileEntry
from adaptor.store import catalog, local_checkpoints, pull, push
from adaptor.store.client import Store, open_store
from adaptor.store.joint import JointPush, Others, Patience, announced, divide
from adaptor.store.settings import UploadSettings
from adaptor.store.uploader import Uploader
from tests import waiting
from tests.unit.fault_proxy import Fault, FaultProxy, faults, server, url
from tests.unit.object_store import contents, save
from tests.unit.test_uploader import Sender, start

__all__ = ["faults", "server", "start", "url"]

# PATIENT never gives a node up; HASTY waits for no node.
PATIENT, HASTY = Patience(3600, 3600, 3600, 0.1, 3600), Patience(0, 0, 0, 0.1, 0)
FOLDERS = ("mp_rank_00", "mp_rank_01")


@pytest.fixture
def store(tmp_path: Path) -> Store:
    return open_store(f"file://{tmp_path}/store", make=True)


class Uploading:
    """An uploader in a thread of this process, with its output."""

    def __init__(self, url: str, endpoint: str, root: Path, node: int, patience: Patience) -> None:
        self.lines: list[str] = []
        order = UploadSettings(url, endpoint, str(root), every=1, keep=0, rate=0, node=node, nodes=2)
        self._uploader = Uploader(order, self.lines.append, patience)
        self._thread = threading.Thread(target=self._uploader.run)
        self._thread.start()

    def leave(self) -> None:
        self._uploader.end()

    def end(self) -> list[str]:
        """Let the uploader send the rest; return its output."""
        self.leave()
        self._thread.join()
        return self.lines


@pytest.fixture
def upload(store: Store) -> Iterator[Callable[..., Uploading]]:
    """Yield a function that starts uploaders; end them after the test."""
    with contextlib.ExitStack() as stack:

        def started(
            root: Path, node: int, patience: Patience = PATIENT, url: str = f"{store}", endpoint: str = ""
        ) -> Uploading:
            uploading = Uploading(url, endpoint, root, node, patience)
            stack.callback(uploading.end)
            return uploading

        yield started


def joint(store: Store, root: Path, step: int, node: int, patience: Patience) -> JointPush:
    def wait(seconds: float) -> None:
        threading.Event().wait(0.01)

    return JointPush(store, root, step, node, 2, lambda count: None, wait, patience)


def save_part(root: Path, step: int, node: int, *, described: bool = True) -> Path:
    """Save the files of a node's ranks to a disk of the node; return the folder."""
    saving = root / naming.regular_name(step, "0f3a5c21")
    file = saving / FOLDERS[node] / naming.MODEL_FILE
    file.parent.mkdir(parents=True)
    file.write_bytes(os.urandom(1000 + node))
    if described:
        ranks = [gzip.compress(f'{{"folder":"{name}"}}'.encode(), mtime=0) for name in FOLDERS]
        (saving / naming.LAYOUT).write_bytes(layout_file.join(ranks))
    taken = regular_folder.take_on_own_disk(root, step, "0f3a5c21") if node else None
    regular_folder.publish_regular(root, step, "0f3a5c21", taken)
    tracker.advance(root, step)
    return root / naming.final_name(step)


def committed(store: Store, step: int) -> bool:
    return bool(catalog.places(store, step)[0])


def test_files_are_divided_by_size_and_each_goes_to_one_node() -> None:
    files = [FileEntry(f"f{number}", size, None) for number, size in enumerate((900, 500, 500, 10, 10, 0))]
    shares = divide(files, 3)
    assert sorted(file.path for share in shares for file in share) == [file.path for file in files]
    assert [sum(file.bytes for file in share) for share in shares] == [900, 510, 510]
    random.Random(1).shuffle(files)
    assert divide(files, 3) == shares, "on each node alike"
    assert divide(files[:1], 2)[1] == []


def test_nodes_that_share_a_folder_share_the_work(
    url: str, server: str, faults: FaultProxy, tmp_path: Path, start: Callable[..., Sender]
) -> None:
    """Two processes as agents start them; the second follows the choice of the first.

    No file of the first process reaches the store before the second has joined: until then its requests are
    held and repeated.
    """

    def fault(number: int, method: str, path: str) -> Fault:
        if path.endswith("/ttp_parts/1.json"):
            faults.release.set()
        is_held = "mp_rank" in path and method == "PUT" and not faults.release.is_set()
        return "hold before" if is_held else ""

    faults.begin(fault)
    root = tmp_path / "save"
    second = start(url, faults.url, root, node=1, nodes=2)
    waiting.until(lambda: bool(faults.requests), "the second is at work")
    folder = save(root, 10)
    senders = [start(url, faults.url, root, node=0, nodes=2), second]
    assert "step 10 is in" in senders[0].line()
    for sender in senders:
        sender.tell({"within_s": None})
        assert sender.ends() == ""
    store = open_store(url, server)
    (checkpoint,) = catalog.newest_first(store, None, [])
    lists = catalog.read_lists(store, checkpoint.prefix, store.objects(checkpoint.prefix))
    saved = push.read_folder(root, 10)
    assert [{part.path for part in lists[node].files} for node in (0, 1)] == [
        {file.path for file in share} for share in divide(saved.files, 2)
    ]
    assert pull.pull(store, tmp_path / "pulled").step == 10
    assert contents(tmp_path / "pulled" / folder.name) == contents(folder)
    assert list(catalog.wrong_files(store, checkpoint)) == []


def test_a_node_that_does_not_join_is_not_waited_for_again(store: Store, tmp_path: Path) -> None:
    other_nodes = Others()
    for step, patience in ((10, HASTY), (20, PATIENT)):
        save(tmp_path, step)
        joint(store, tmp_path, step, 0, patience).lead(other_nodes, lambda: False)
        assert committed(store, step)
        assert other_nodes.absent == {1}
    # Once it comes back, it takes part again.
    save(tmp_path, 30)
    place = catalog.place(push.read_folder(tmp_path, 30))
    joint(store, tmp_path, 30, 1, PATIENT).follow(place)
    joint(store, tmp_path, 30, 0, PATIENT).lead(other_nodes, lambda: False)
    assert other_nodes.absent == set()


@pytest.mark.parametrize("shared", [True, False])
def test_nothing_is_committed_before_all_have_sent(
    shared: bool, store: Store, tmp_path: Path, upload: Callable[..., Uploading]
) -> None:
    roots = [tmp_path / "node0", tmp_path / ("node0" if shared else "node1")]
    if shared:
        folder = save(roots[0], 10)
        files = contents(folder)
    else:
        files = contents(save_part(roots[0], 10, 0)) | contents(save_part(roots[1], 10, 1))
    place = catalog.place(push.read_folder(roots[0], 10))
    first = upload(roots[0], 0)
    waiting.until(
        lambda: (
            bool(store.objects(place).get(catalog.parts_name(place, 0)))
            and catalog.read_lists(store, place, store.objects(place))[0].done
        ),
        "node 0 has sent its part",
    )
    assert not committed(store, 10)
    second = upload(roots[1], 1)
    waiting.until(lambda: committed(store, 10), "the second node has sent its part")
    assert second.end() == []
    (line,) = first.end()
    assert line.startswith("[ttp] step 10 is in")
    assert pull.pull(store, tmp_path / "pulled").step == 10
    assert contents(tmp_path / "pulled" / naming.final_name(10)) == files


def test_half_a_checkpoint_is_never_committed(
    store: Store, tmp_path: Path, upload: Callable[..., Uploading]
) -> None:
    """The other half is on the disk of a lost node; both nodes send the next checkpoint."""
    roots = [tmp_path / "node0", tmp_path / "node1"]
    save_part(roots[0], 10, 0)
    first = upload(roots[0], 0, HASTY)
    waiting.until(lambda: bool(first.lines), "it has given up")
    assert "mp_rank_01 is missing, so the store does not get this checkpoint" in first.lines[0]
    assert not committed(store, 10)
    with pytest.raises(CheckpointError, match="mp_rank_01 is missing"):
        push.push(store, roots[0], 10)
    first.end()
    for node, root in enumerate(roots):
        save_part(root, 20, node)
    upload(roots[0], 0)
    upload(roots[1], 1)
    waiting.until(lambda: committed(store, 20), "both have sent theirs")
    assert [checkpoint.saved_manifest.step for checkpoint in catalog.newest_first(store, None, [])] == [20]


def test_a_part_alone_is_not_led_by_another_node(
    store: Store, tmp_path: Path, upload: Callable[..., Uploading]
) -> None:
    """Node 0 is lost with the other half."""
    folder = save_part(tmp_path, 10, 1)
    first, last = upload(tmp_path, 1, HASTY).end()
    reason = f"{folder} has only a part of the checkpoint, and node 0 does not send its own"
    assert first == f"[ttp] node 1 sends nothing to {store} so far: {reason}"
    assert last == f"[ttp] node 1 has not sent its part of step 10 to {store}: {reason}"
    assert catalog.steps(store) == []


@pytest.mark.parametrize("described", [True, False])
def test_a_node_that_stops_in_the_middle_of_its_disk(described: bool, store: Store, tmp_path: Path) -> None:
    """The folder of the node exists without one of its files."""
    roots = [tmp_path / "node0", tmp_path / "node1"]
    for node, root in enumerate(roots):
        save_part(root, 10, node, described=described)
    saved, place = push.read_folder(roots[1], 10), catalog.place(push.read_folder(roots[0], 10))
    sending = push.Sending(store, roots[1], saved, place, lambda count: None, 1)
    sending.send(saved.files)
    sending.tell(is_complete=False)
    with pytest.raises(CheckpointError, match="not all files on the disk of node 1 have been sent"):
        joint(store, roots[0], 10, 0, HASTY).lead(Others(), lambda: False)
    assert not committed(store, 10)
    joint(store, roots[1], 10, 1, HASTY).follow(place)
    joint(store, roots[0], 10, 0, HASTY).lead(Others(), lambda: False)
    assert committed(store, 10)


def test_a_node_that_had_a_part_before_and_does_not_join(store: Store, tmp_path: Path) -> None:
    """Without a layout file only the disk of the node shows that the node has a part."""
    save_part(tmp_path, 10, 0, described=False)
    with pytest.raises(CheckpointError, match="not all files on the disk of node 1 have been sent"):
        joint(store, tmp_path, 10, 0, HASTY).lead(Others(apart={1}), lambda: False)
    assert not committed(store, 10)


def test_an_unlisted_part_alone_is_not_sent(
    store: Store, tmp_path: Path, upload: Callable[..., Uploading]
) -> None:
    folder = save_part(tmp_path, 10, 1, described=False)
    assert f"{folder} has only a part of the checkpoint" in upload(tmp_path, 1, HASTY).end()[0]
    with pytest.raises(CheckpointError, match="so it is not sent alone"):
        push.push(store, tmp_path, 10)
    assert catalog.steps(store) == []
    assert pull.is_part(tmp_path, 10)


def test_a_part_saved_again_is_sent_again(store: Store, tmp_path: Path) -> None:
    """After a rollback a job saves a step again; on a separate disk only the content shows it."""
    roots = [tmp_path / "node0", tmp_path / "node1"]
    files = contents(save_part(roots[0], 10, 0))
    place = catalog.place(push.read_folder(roots[0], 10))
    for _ in range(2):
        resaved = contents(save_part(roots[1], 10, 1))
        joint(store, roots[1], 10, 1, PATIENT).follow(place)
    joint(store, roots[0], 10, 0, PATIENT).lead(Others(), lambda: False)
    (checkpoint,) = catalog.newest_first(store, None, [])
    assert list(catalog.wrong_files(store, checkpoint)) == []
    pull.pull(store, tmp_path / "pulled")
    assert contents(tmp_path / "pulled" / naming.final_name(10)) == files | resaved


def test_a_step_that_is_saved_again_is_sent_again_by_all(store: Store, tmp_path: Path) -> None:
    """The nodes share the folder; the store has the older version."""
    save(tmp_path, 10)
    push.push(store, tmp_path, 10)
    save(tmp_path, 10)
    place = catalog.place(push.read_folder(tmp_path, 10))
    store.put(catalog.parts_name(place, 0), catalog.encode_parts(0, (), place, is_complete=False))
    assert announced(store, 10, place, 1) == (place, False)
    store.put(catalog.manifest_name(place), b"")
    assert announced(store, 10, place, 1) == (place, True)


def test_a_part_waits_while_the_one_before_is_sent(
    url: str, server: str, faults: FaultProxy, tmp_path: Path, upload: Callable[..., Uploading]
) -> None:
    """At the end of the job, for longer than the wait for node 0 to begin."""
    roots, store = [tmp_path / "node0", tmp_path / "node1"], open_store(url, server)
    for node, root in enumerate(roots):
        save_part(root, 10, node)
    places = [catalog.place(push.read_folder(roots[0], 10))]
    store.put(catalog.parts_name(places[0], 0), catalog.encode_parts(0, (), places[0], is_complete=False))
    second = upload(roots[1], 1, Patience(0, 0, 3600, 0.1, 0), url=url, endpoint=faults.url)
    waiting.until(lambda: _is_done(store, places[0], 1), "it has sent its part")
    for node, root in enumerate(roots):
        save_part(root, 20, node)
    faults.begin()
    second.leave()
    waiting.until(
        lambda: second.lines or sum(method == "HEAD" for method, _ in faults.requests) > 1,
        "it has seen that the one before is still being sent",
    )
    places.append(catalog.place(push.read_folder(roots[0], 20)))
    store.put(catalog.parts_name(places[1], 0), catalog.encode_parts(0, (), places[1], is_complete=False))
    waiting.until(lambda: second.lines or _is_done(store, places[1], 1), "it has sent its part of the newest")
    assert second.end() == []


def _is_done(store: Store, place: str, node: int) -> bool:
    lists = catalog.read_lists(store, place, store.objects(place))
    return node in lists and lists[node].done


def test_an_unlisted_part_is_awaited_once_its_node_has_joined(store: Store, tmp_path: Path) -> None:
    """Without a layout file the missing half is unknown."""
    roots = [tmp_path / "node0", tmp_path / "node1"]
    for node, root in enumerate(roots):
        save_part(root, 10, node, described=False)
    place = catalog.place(push.read_folder(roots[0], 10))
    place_on_node_1 = catalog.place(push.read_folder(roots[1], 10))
    store.put(catalog.parts_name(place, 1), catalog.encode_parts(1, (), place_on_node_1, is_complete=False))

    def wait(seconds: float) -> None:
        joint(store, roots[1], 10, 1, PATIENT).follow(place)

    JointPush(store, roots[0], 10, 0, 2, lambda count: None, wait, PATIENT).lead(Others(), lambda: False)
    (checkpoint,) = catalog.newest_first(store, None, [])
    assert {file.path.partition("/")[0] for file in checkpoint.saved_manifest.files} == set(FOLDERS)


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_the_metadata_of_torch_dist_names_all_files(tmp_path: Path) -> None:
    checkpoint.save({"weight": torch.ones(3)}, checkpoint_id=tmp_path, no_dist=True)
    names = {path.name for path in tmp_path.iterdir()}
    (shard,) = names - {".metadata"}
    assert local_checkpoints.missing(tmp_path, names) == ""
    assert local_checkpoints.missing(tmp_path, {".metadata"}) == shard
    assert local_checkpoints.missing(tmp_path, {shard}) == ".metadata"


def test_two_files_of_one_name_are_not_one_checkpoint(store: Store, tmp_path: Path) -> None:
    """The ranks of two disks wrote files of the same name."""
    roots = [tmp_path / "node0", tmp_path / "node1"]
    for root in roots:
        save_part(root, 10, 0, described=False)
    place = catalog.place(push.read_folder(roots[0], 10))
    joint(store, roots[1], 10, 1, PATIENT).follow(place)
    with pytest.raises(CheckpointError, match="two nodes have different files of this name"):
        joint(store, roots[0], 10, 0, PATIENT).lead(Others(apart={1}), lambda: False)
    assert not committed(store, 10)


def test_last_words_on_the_disk_of_another_node_are_sent_by_it(
    store: Store, tmp_path: Path, upload: Callable[..., Uploading]
) -> None:
    """Node 0 does not see them, or is lost."""
    (tmp_path / "node0").mkdir()
    folder = save(tmp_path / "node1", 12, last_words=True)
    first = upload(tmp_path / "node0", 0)
    second = upload(tmp_path / "node1", 1, HASTY)
    waiting.until(lambda: committed(store, 12), "node 1 has sent them")
    assert first.end() == []
    assert second.end()[0].startswith("[ttp] step 12 is in")
    assert pull.pull(store, tmp_path / "pulled").step == 12
    assert contents(tmp_path / "pulled" / folder.name) == contents(folder)


def test_the_newest_checkpoint_is_sent_at_the_end_without_node_0(
    store: Store, tmp_path: Path, upload: Callable[..., Uploading]
) -> None:
    save(tmp_path / "save", 10)
    second = upload(tmp_path / "save", 1, HASTY)
    assert second.end()[0].startswith("[ttp] step 10 is in")
    assert committed(store, 10)


@pytest.mark.parametrize("comes_back", [True, False])
def test_a_node_that_is_killed_while_it_sends(
    comes_back: bool, url: str, server: str, faults: FaultProxy, tmp_path: Path, start: Callable[..., Sender]
) -> None:
    """The checkpoint appears once the rest is sent, by that node again or by the other node."""
    root, step = tmp_path / "save", 10 if comes_back else 20
    folder = save(root, step)
    store = open_store(url, server)
    second = {file.path for file in divide(push.read_folder(root, step).files, 2)[1]}
    faults.begin(
        lambda number, method, path: "hold before" if any(path.endswith(name) for name in second) else ""
    )
    place = catalog.place(push.read_folder(root, step))
    leader = joint(store, root, step, 0, PATIENT if comes_back else Patience(3600, 3600, 0, 3600, 3600))
    results: list[object] = []

    def lead() -> None:
        results.append(leader.lead(Others(), lambda: False))

    follower = start(url, faults.url, root, node=1, nodes=2)
    store.put(catalog.parts_name(place, 0), catalog.encode_parts(0, (), place, is_complete=False))
    assert faults.held.wait(60)
    follower.process.kill()
    follower.process.wait()
    assert catalog.places(store, step) == ([], [place])
    faults.fault = lambda number, method, path: ""
    faults.release.set()
    thread = threading.Thread(target=lead)
    thread.start()
    if comes_back:
        restarted = start(url, faults.url, root, node=1, nodes=2)
        restarted.tell({"within_s": None})
        assert restarted.ends() == ""
    thread.join()
    (checkpoint,) = catalog.newest_first(store, step, [])
    assert list(catalog.wrong_files(store, checkpoint)) == []
    assert pull.pull(store, tmp_path / "pulled", step).step == step
    assert contents(tmp_path / "pulled" / folder.name) == contents(folder)
