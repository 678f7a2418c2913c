"""`--load s3://...`: the checkpoint pulled to each node before the workers start."""

from __future__ import annotations

import argparse
import dataclasses
import gzip
import json
import shutil
import threading
from collections.abc import Sequence
from pathlib import Path

import pytest
from torch.distributed import HashStore

from adaptor.checkpoint import layout_file, manifest, regular_folder, tracker
from adaptor.errors import ConfigError, ResumeError
from adaptor.launchers.store.store_load import Load, StoreResume, take
from adaptor.protocol import naming
from adaptor.store import catalog, push
from adaptor.store.client import open_store
from tests.unit.object_store import contents, save

BUCKET, GOOGLE = Load("s3://bk/x", Path("s"), None, (1, 1)), Load("gs://bk/x", Path("s"), None, (1, 1))
FOLDER = naming.final_name(12)
FOLDERS = ("mp_rank_00_000", "mp_rank_01_000", "mp_rank_00_001", "mp_rank_01_001")


@pytest.fixture
def url(tmp_path: Path) -> str:
    """A store with step 12."""
    save(tmp_path / "one", 12)
    url = f"file://{tmp_path}/store"
    push.push(open_store(url, make=True), tmp_path / "one", 12)
    return url


@pytest.mark.parametrize(
    ("arguments", "load", "script_arguments"),
    [
        (["--save", "s", "--load", "s3://bk/x"], BUCKET, ["--save", "s", "--load", "s"]),
        (["--load=gs://bk/x", "--save=s", "a"], GOOGLE, ["--load=s", "--save=s", "a"]),
        (
            ["--load", "az://bk", "--save", "s", "--ckpt-step", "7"],
            Load("az://bk", Path("s"), 7, (1, 1)),
            ["--load", "s", "--save", "s", "--ckpt-step", "7"],
        ),
        (
            ["--load=gs://bk/x", "--save=s", "--tensor-model-parallel-size", "4", "--yaml-cfg=a"],
            Load("gs://bk/x", Path("s"), None),
            ["--load=s", "--save=s", "--tensor-model-parallel-size", "4", "--yaml-cfg=a"],
        ),
        (
            ["--load=gs://bk/x", "--save=s", "--tensor-model-parallel-size=4"],
            Load("gs://bk/x", Path("s"), None, (4, 1)),
            ["--load=s", "--save=s", "--tensor-model-parallel-size=4"],
        ),
        (["--load", "folder", "--save", "s"], None, ["--load", "folder", "--save", "s"]),
        (["--load", "msc://profile/x"], None, ["--load", "msc://profile/x"]),
        (["--load"], None, ["--load"]),
        ([], None, []),
    ],
)
def test_the_load_url_is_taken_from_the_script_s_arguments(
    arguments: list[str], load: Load | None, script_arguments: list[str]
) -> None:
    parsed = argparse.Namespace(training_script_args=arguments)
    assert take(parsed) == load
    assert parsed.training_script_args == script_arguments


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        (["--load", "s3://bk/x"], "--load is s3://bk/x: it is pulled to the folder of --save"),
        (["--load", "s3://u:word@bk/x", "--save", "s"], "--load: s3://...@bk/x: holds credentials"),
        (["--load", "s3://bk", "--save", "s", "--ckpt-step", "new"], "--ckpt-step is 'new'"),
        (["--load", "s3://bk/x", "--save", "s", "--finetune"], "--load is s3://bk/x with --finetune: "),
        (["--load=s3://bk/x", "--save=s", "--lora-load=a"], "--load is s3://bk/x with --lora-load: "),
    ],
)
def test_invalid_load_urls_are_one_line(arguments: list[str], reason: str) -> None:
    with pytest.raises(ConfigError) as caught:
        take(argparse.Namespace(training_script_args=arguments))
    assert str(caught.value).startswith(reason)
    assert "word" not in str(caught.value)


@pytest.mark.parametrize("shared", [True, False])
def test_each_node_has_the_step_of_node_0(shared: bool, url: str, tmp_path: Path) -> None:
    """A node with its own folder pulls the step of node 0, although a later step has arrived."""
    roots = [tmp_path / "node0", tmp_path / ("node0" if shared else "node1")]
    store = HashStore()
    StoreResume(Load(url, roots[0], None), "").prepare(0, 2, store)
    save(tmp_path / "one", 24)
    push.push(open_store(url), tmp_path / "one", 24)
    StoreResume(Load(url, roots[1], None), "").prepare(1, 2, store)
    for root in roots:
        assert contents(root / FOLDER) == contents(tmp_path / "one" / FOLDER)
        assert tracker.tracked_step(root) == 12


def test_a_node_waits_for_node_0_and_hears_why_nothing_comes(url: str, tmp_path: Path) -> None:
    store = HashStore()
    raised: list[Exception] = []

    def node_1() -> None:
        try:
            StoreResume(Load(url, tmp_path / "node1", 99), "").prepare(1, 2, store)
        except ResumeError as error:
            raised.append(error)

    thread = threading.Thread(target=node_1)
    thread.start()
    with pytest.raises(ResumeError, match="there is no complete checkpoint of step 99 in it") as caught:
        StoreResume(Load(url, tmp_path / "node0", 99), "").prepare(0, 2, store)
    thread.join()
    assert str(raised[0]) == str(caught.value)


def test_the_other_nodes_hear_of_an_error_of_any_kind(
    url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Here the interpreter is missing, so no process can be started."""
    monkeypatch.setattr("sys.executable", str(tmp_path / "python"))
    store = HashStore()
    with pytest.raises(FileNotFoundError):
        StoreResume(Load(url, tmp_path / "node0", None), "").prepare(0, 2, store)
    with pytest.raises(ResumeError, match="No such file or directory"):
        StoreResume(Load(url, tmp_path / "node1", None), "").prepare(1, 2, store)


def test_a_folder_with_a_later_step_stays(
    url: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    save(tmp_path / "node0", 20)
    StoreResume(Load(url, tmp_path / "node0", None), "").prepare(0, 1, HashStore())
    assert tracker.tracked_step(tmp_path / "node0") == 20
    assert not (tmp_path / "node0" / FOLDER).exists()
    assert f"step 20 is in {tmp_path}/node0, nothing is pulled from {url}" in capfd.readouterr().err


def test_a_job_set_back_by_hand_keeps_its_step(
    url: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """The later folder stays; the other nodes are told the loaded step."""
    root, agents = tmp_path / "node0", HashStore()
    for step in (16, 24):
        save(tmp_path / "one", step)
        push.push(open_store(url), tmp_path / "one", step)
        StoreResume(Load(url, root, None), "").prepare(0, 1, HashStore())
    (root / naming.TRACKER).write_text("16")
    capfd.readouterr()
    StoreResume(Load(url, root, None), "").prepare(0, 2, agents)
    assert tracker.tracked_step(root) == 16
    assert agents.get("ttp/resume") == b"16"
    report = f"step 16 is in {root}, nothing is pulled from {url}; step 24 is in both, but the tracker there"
    assert report in capfd.readouterr().err


@pytest.mark.parametrize("has_later_step", [False, True])
def test_a_tracker_that_names_a_folder_that_is_gone_is_one_more_damage(
    has_later_step: bool, url: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    root, agents = tmp_path / "node0", HashStore()
    shutil.rmtree(save(root, 20))
    if has_later_step:
        save(root, 16)
    StoreResume(Load(url, root, None), "").prepare(0, 2, agents)
    if has_later_step:  # the check before the load finds the same damage, and sets the tracker back
        assert agents.get("ttp/resume") == b"16"
        assert not (root / FOLDER).exists()
    else:
        assert agents.get("ttp/resume") == b"12"
        assert contents(root / FOLDER) == contents(tmp_path / "one" / FOLDER)
        assert tracker.tracked_step(root) == 12
        assert f"{root}/iter_0000020: missing, though the tracker names it" in capfd.readouterr().err


def test_a_restart_pulls_nothing(url: str, tmp_path: Path) -> None:
    """The checkpoints saved since the start are newer."""
    resume = StoreResume(Load(url, tmp_path / "node0", None), "")
    resume.prepare(0, 1, HashStore())
    save(tmp_path / "one", 24)
    push.push(open_store(url), tmp_path / "one", 24)
    resume.prepare(0, 1, HashStore())
    assert tracker.tracked_step(tmp_path / "node0") == 12


def _save_described(root: Path, generation: str, folders: Sequence[str] = FOLDERS) -> None:
    """Save step 12 of a job of two stages with two ranks each, or the folders of some ranks."""
    saving = root / naming.regular_name(12, generation)
    for name in folders:
        (saving / name).mkdir(parents=True)
        (saving / name / naming.MODEL_FILE).write_bytes(name.encode() * 100)
    ranks = [
        {"folder": name, "tp": number % 2, "pp": number // 2, "sizes": {"tp": 2, "pp": 2, "ep": 1}}
        for number, name in enumerate(FOLDERS)
    ]
    (saving / naming.LAYOUT).write_bytes(
        layout_file.join(gzip.compress(json.dumps(rank).encode(), mtime=0) for rank in ranks)
    )
    regular_folder.publish_regular(root, 12, generation)
    tracker.advance(root, 12)


@pytest.fixture
def described(tmp_path: Path) -> str:
    _save_described(tmp_path / "one", "0f3a5c21")
    url = f"file://{tmp_path}/store"
    push.push(open_store(url, make=True), tmp_path / "one", 12)
    return url


def _resumed(
    url: str, root: Path, ranks: Sequence[int], *, sizes: tuple[int, int] | None = (2, 2)
) -> set[str]:
    """Resume on a node with its own disk; return the folders of its model-parallel ranks."""
    store = HashStore()
    store.set("ttp/resume", b"12")
    resume = StoreResume(Load(url, root, None, sizes), "", keeps_ranks=True)
    resume.prepare(1, 2, store, ranks, 4)
    assert tracker.tracked_step(root) == 12
    assert manifest.defects(root / FOLDER) == []
    return {path.parent.name for path in (root / FOLDER).rglob("*.pt")}


def test_a_node_with_a_disk_of_its_own_pulls_the_files_of_its_ranks(
    described: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    root = tmp_path / "node1"
    assert _resumed(described, root, (2, 3)) == {"mp_rank_00_001", "mp_rank_01_001"}
    assert "what the ranks of this node load" in capfd.readouterr().err
    assert _resumed(described, root, (2, 3)) == {"mp_rank_00_001", "mp_rank_01_001"}
    assert f"step 12 is in {root}, nothing is pulled" in capfd.readouterr().err
    assert _resumed(described, root, (1, 2)) == {"mp_rank_01_000", "mp_rank_00_001"}, "it has other ranks now"


@pytest.mark.parametrize("case", ["other sizes", "unknown sizes", "no layout", "ranks move"])
def test_a_node_that_does_not_know_its_ranks_pulls_the_whole_checkpoint(
    case: str, described: str, tmp_path: Path
) -> None:
    root, sizes = tmp_path / "node1", {"other sizes": (1, 2), "unknown sizes": None}.get(case, (2, 2))
    if case == "no layout":
        store = open_store(described)
        (checkpoint,) = catalog.newest_first(store, None, [])
        files = tuple(file for file in checkpoint.saved_manifest.files if file.path != naming.LAYOUT)
        manifest_bytes = dataclasses.replace(checkpoint.saved_manifest, files=files).encode()
        store.put(catalog.manifest_name(checkpoint.prefix), manifest_bytes)
    if case == "ranks move":
        agents = HashStore()
        agents.set("ttp/resume", b"12")
        assert len(_resumed(described, root, (2, 3))) == 2
        StoreResume(Load(described, root, None, sizes), "").prepare(1, 2, agents, (2, 3), 4)
        assert {path.parent.name for path in (root / FOLDER).rglob("*.pt")} == set(FOLDERS)
    else:
        assert _resumed(described, root, (2, 3), sizes=sizes) == set(FOLDERS)


def test_a_partial_checkpoint_on_node_0_is_completed(described: str, tmp_path: Path) -> None:
    """Node 0 has the newest step of the store without the folders that other nodes saved."""
    root = tmp_path / "node0"
    _save_described(root, "0f3a5c21", FOLDERS[:2])
    for _ in range(2):
        StoreResume(Load(described, root, None), "").prepare(0, 1, HashStore())
        assert {path.parent.name for path in (root / FOLDER).rglob("*.pt")} == set(FOLDERS)
        assert len([path for path in root.iterdir() if path.name.startswith("aside")]) == 1
    _save_described(other_root := tmp_path / "other", "another", FOLDERS[:2])
    StoreResume(Load(described, other_root, None), "").prepare(0, 1, HashStore())
    assert {path.parent.name for path in (other_root / FOLDER).rglob("*.pt")} == set(FOLDERS[:2]), (
        "of another run"
    )


def test_a_partial_checkpoint_stays_when_the_store_cannot_complete_it(
    described: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    store, root = open_store(described), tmp_path / "node0"
    _save_described(root, "0f3a5c21", FOLDERS[:2])
    contents_before = {path: path.read_bytes() for path in root.rglob("*.pt")}
    (checkpoint,) = catalog.newest_first(store, None, [])
    name = f"{checkpoint.prefix}/{FOLDERS[3]}/{naming.MODEL_FILE}"
    store.put(name, bytes(len(store.get(name, 1 << 20))))
    StoreResume(Load(described, root, None), "").prepare(0, 1, HashStore())
    assert f"{name}: checksum differs from the manifest" in capfd.readouterr().err
    assert {path: path.read_bytes() for path in root.rglob("*.pt")} == contents_before


def test_a_partial_checkpoint_missing_in_the_store_stays(tmp_path: Path) -> None:
    """Each node has its part on its own disk; nothing was uploaded."""
    url = f"file://{tmp_path}/store"
    open_store(url, make=True)
    _save_described(tmp_path / "node1", "another1", FOLDERS[2:])
    assert _resumed(url, tmp_path / "node1", (2, 3)) == set(FOLDERS[2:])
