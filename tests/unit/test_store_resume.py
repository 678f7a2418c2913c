"""`--load s3://...`: what is pulled to which node before workers start."""

from __future__ import annotations

import argparse
import threading
from pathlib import Path

import pytest
from torch.distributed import HashStore

from adaptor.checkpoint import tracker
from adaptor.errors import ConfigError, ResumeError
from adaptor.launchers.store_load import Load, take
from adaptor.launchers.store_resume import StoreResume
from adaptor.protocol import naming
from adaptor.store import push
from adaptor.store.opening import open_store
from tests.unit.object_store import contents, save

BUCKET, GOOGLE = Load("s3://bk/x", Path("s"), None), Load("gs://bk/x", Path("s"), None)
FOLDER = naming.final_name(12)


@pytest.fixture
def url(tmp_path: Path) -> str:
    """A store with step 12."""
    save(tmp_path / "one", 12)
    url = f"file://{tmp_path}/store"
    push.push(open_store(url, make=True), tmp_path / "one", 12)
    return url


@pytest.mark.parametrize(
    ("given", "load", "left"),
    [
        (
            ["--save", "s", "--load", "s3://bk/x"],
            BUCKET,
            ["--save", "s", "--load", "s"],
        ),
        (
            ["--load=gs://bk/x", "--save=s", "a"],
            GOOGLE,
            ["--load=s", "--save=s", "a"],
        ),
        (
            ["--load", "az://bk", "--save", "s", "--ckpt-step", "7"],
            Load("az://bk", Path("s"), 7),
            ["--load", "s", "--save", "s", "--ckpt-step", "7"],
        ),
        (["--load", "folder", "--save", "s"], None, ["--load", "folder", "--save", "s"]),
        (["--load", "msc://profile/x"], None, ["--load", "msc://profile/x"]),
        (["--load"], None, ["--load"]),
        ([], None, []),
    ],
)
def test_what_the_script_loads_from_a_store(given: list[str], load: Load | None, left: list[str]) -> None:
    parsed = argparse.Namespace(training_script_args=given)
    assert take(parsed) == load
    assert parsed.training_script_args == left


@pytest.mark.parametrize(
    ("given", "why"),
    [
        (
            ["--load", "s3://bk/x"],
            "--load is s3://bk/x: it is pulled to the folder of --save",
        ),
        (["--load", "s3://u:word@bk/x", "--save", "s"], "--load: s3://...@bk/x: holds credentials"),
        (["--load", "s3://bk", "--save", "s", "--ckpt-step", "new"], "--ckpt-step is 'new'"),
        (["--load", "s3://bk/x", "--save", "s", "--finetune"], "--load is s3://bk/x with --finetune: "),
        (["--load=s3://bk/x", "--save=s", "--lora-load=a"], "--load is s3://bk/x with --lora-load: "),
    ],
)
def test_what_cannot_be_pulled_is_one_line(given: list[str], why: str) -> None:
    with pytest.raises(ConfigError) as caught:
        take(argparse.Namespace(training_script_args=given))
    assert str(caught.value).startswith(why)
    assert "word" not in str(caught.value)


@pytest.mark.parametrize("shared", [True, False])
def test_each_node_has_what_node_0_chose(shared: bool, url: str, tmp_path: Path) -> None:
    """A node with a folder of its own pulls the same step, although a later one has come meanwhile."""
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
    """The interpreter is not there, so no process can be started."""
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


def test_a_restart_pulls_nothing(url: str, tmp_path: Path) -> None:
    """What the job has saved since is newer, or it would have ended."""
    resume = StoreResume(Load(url, tmp_path / "node0", None), "")
    resume.prepare(0, 1, HashStore())
    save(tmp_path / "one", 24)
    push.push(open_store(url), tmp_path / "one", 24)
    resume.prepare(0, 1, HashStore())
    assert tracker.tracked_step(tmp_path / "node0") == 12
