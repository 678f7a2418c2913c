"""`--ttp-pull s3://bucket/data=DIR`: objects come to a folder before a job begins, and each of them once."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

import obstore
import pytest

from adaptor import config
from adaptor.errors import ConfigError, StoreError
from adaptor.launchers.agent.processes import STORE
from adaptor.launchers.store import store_load as before_start
from adaptor.store import data_pull
from adaptor.store.client import PIECE, Part, Store, open_store
from adaptor.store.settings import StoreSettings
from adaptor.store.store_requests import Retrying
from tests import waiting
from tests.unit import object_store
from tests.unit.fault_proxy import FaultProxy, faults, server, url
from tests.unit.launching import HEARS_CTRL_C, ONE, Launcher, launcher, zygote

__all__ = ["faults", "launcher", "server", "url", "zygote"]
OBJECTS = {
    "corpus.bin": os.urandom(2 * PIECE + 5),
    "corpus.idx": b"index",
    "a folder/with %41 and =.txt": b"text",
    "empty": b"",
}


class Source:
    """Objects below a prefix, and a pull of them through a proxy that counts requests."""

    def __init__(self, url: str, faults: FaultProxy, direct: str) -> None:
        self.url, self.faults, self.direct = url, faults, direct
        self.lines: list[str] = []

    def put(self, name: str, content: bytes) -> None:
        obstore.put(open_store(self.url, self.direct)._client, name, content, use_multipart=False)

    def pull(self, folder: Path, clock: Callable[[], float] = lambda: 0.0) -> list[str]:
        """Return the names of the objects that were read, in the order of their first requests."""
        self.lines.clear()
        self.faults.requests.clear()
        data_pull.bring([(open_store(self.url, self.faults.url), folder)], self.lines.append, clock)
        return self.read()

    def read(self) -> list[str]:
        return [path for method, path in self.faults.requests if method == "GET" and "list-type" not in path]


@pytest.fixture
def source(faults: FaultProxy, url: str, server: str) -> Source:
    source = Source(url, faults, server)
    for name, content in OBJECTS.items():
        source.put(name, content)
    return source


def _files(folder: Path) -> dict[str, bytes]:
    """Return the files of a folder, without those of the pull."""
    return {
        path.relative_to(folder).as_posix(): path.read_bytes()
        for path in folder.rglob("*")
        if path.is_file() and not data_pull.is_own(path.name)
    }


def test_all_objects_come_and_none_of_them_twice(source: Source, tmp_path: Path) -> None:
    assert len(source.pull(tmp_path / "a/b")) == 5  # three parts, and nothing of the empty one
    assert _files(tmp_path / "a/b") == OBJECTS
    assert source.pull(tmp_path / "a/b") == []
    assert re.fullmatch(
        rf"\[ttp\] {tmp_path}/a/b has what is in {source.url} already \(4 objects, 33.6 MB\)", source.lines[0]
    )


def test_a_file_changed_on_either_side_is_pulled_again(source: Source, tmp_path: Path) -> None:
    source.pull(tmp_path)
    source.put("corpus.idx", b"INDEX")  # of the same size
    (tmp_path / "a folder/with %41 and =.txt").write_bytes(b"TEXT")
    (tmp_path / "empty").unlink()
    (tmp_path / "of another").write_bytes(b"stays")
    assert len(source.pull(tmp_path)) == 2
    assert _files(tmp_path) == {**OBJECTS, "corpus.idx": b"INDEX", "of another": b"stays"}
    assert source.pull(tmp_path) == []


def test_files_of_another_prefix_are_not_taken_for_these(source: Source, tmp_path: Path) -> None:
    source.pull(tmp_path)
    other_source = Source(f"{source.url}-other", source.faults, source.direct)
    other_source.put("corpus.idx", b"INDEX")
    assert len(other_source.pull(tmp_path)) == 1
    assert (tmp_path / "corpus.idx").read_bytes() == b"INDEX"


def test_a_folder_is_a_store_of_data(tmp_path: Path) -> None:
    """The journal of an earlier pull in the source folder is not copied."""
    (tmp_path / "there/deep").mkdir(parents=True)
    (tmp_path / "there/deep/one").write_bytes(b"1")
    (tmp_path / "there" / data_pull.JOURNAL).write_bytes(b"{}")
    lines: list[str] = []
    pulls = [(open_store(f"file://{tmp_path}/there"), tmp_path / "here")]
    data_pull.bring(pulls, lines.append)
    data_pull.bring(pulls, lines.append)
    assert _files(tmp_path / "here") == {"deep/one": b"1"}
    assert "already" not in lines[0]
    assert "already" in lines[1]


def test_an_empty_object_for_a_folder_is_no_file(source: Source, tmp_path: Path) -> None:
    for name in ("", "a%20folder/"):  # of the prefix itself, too
        object_store.request(source.direct, "PUT", f"/{source.url.removeprefix('s3://')}/{name}")
    source.pull(tmp_path)
    assert _files(tmp_path) == OBJECTS


def test_a_byte_that_changes_on_its_way_is_asked_for_again(source: Source, tmp_path: Path) -> None:
    source.faults.fault = _corrupting("corpus.idx", times=1)
    assert sum("corpus.idx" in path for path in source.pull(tmp_path)) == 2
    assert _files(tmp_path) == OBJECTS


def test_a_store_that_is_down_for_a_while(source: Source, tmp_path: Path) -> None:
    """The store is down for longer than its client retries; one line reports the outage."""
    lines: list[str] = []

    def tell(line: str) -> None:
        lines.append(line)
        source.faults.fault = lambda number, method, path: ""

    source.faults.fault = lambda number, method, path: "503"  # the list of objects, too
    store = open_store(source.url, source.faults.url, patience_s=0.1, retrying=Retrying(tell))
    data_pull.bring([(store, tmp_path)], tell, lambda: 0.0)  # no line says how far it is
    assert _files(tmp_path) == OBJECTS
    assert len(lines) == 2
    assert "503 Service Unavailable" in lines[0]
    assert lines[0].endswith("; it is asked again for 60 s (Ctrl-C ends that)")


def test_a_journal_of_an_earlier_version_counts(source: Source, tmp_path: Path) -> None:
    """Its etags have the quotes of the answers."""
    source.pull(tmp_path)
    journal = tmp_path / data_pull.JOURNAL
    lines = [json.loads(line) for line in journal.read_text().splitlines()]
    quoted = [json.dumps({**line, "version": f'"{line["version"]}"'}) for line in lines]
    journal.write_text("\n".join([*quoted, ""]))
    assert source.pull(tmp_path) == []


def test_an_object_that_is_not_its_etag_is_refused(source: Source, tmp_path: Path) -> None:
    """In a store whose other etags are MD5s of the content; a file of an earlier pull stays."""
    source.faults.fault = _corrupting("corpus.idx", times=9)
    with pytest.raises(
        StoreError, match=r"/corpus\.idx: the content that came has another MD5 than its etag$"
    ):
        source.pull(tmp_path)
    assert "corpus.idx" not in _files(tmp_path)
    assert "corpus.bin" in _files(tmp_path)


def test_an_etag_may_be_no_md5(faults: FaultProxy, url: str, server: str, tmp_path: Path) -> None:
    """An encrypting store: the same content comes twice, and its MD5 is not the etag."""
    source = Source(url, faults, server)
    source.put("one", b"a text")
    faults.fault = _corrupting("one", times=9)
    source.pull(tmp_path)
    assert (tmp_path / "one").read_bytes() == b"` text"
    assert source.lines[0].startswith(
        f"[ttp] {url}/one: the store sends the same content again, and the etag of the object is not its"
    )


def _corrupting(name: str, times: int) -> Callable[[int, str, str], str]:  # type: ignore[type-arg]
    remaining = [times]

    def fault(number: int, method: str, path: str) -> str:
        if name not in path or method != "GET" or not remaining[0]:
            return ""
        remaining[0] -= 1
        return "corrupt"

    return fault


class _Changing(Store):
    """A store in which an object is replaced between its first part and the others."""

    def __init__(self, url: str, new: bytes) -> None:
        opened = open_store(url)
        super().__init__(opened.address, opened._client, "")
        self._new = new
        self._changed = threading.Event()

    def get_part(self, name: str, start: int, length: int) -> Part:
        if start:
            self._changed.wait()
        part = super().get_part(name, start, length)
        if not self._changed.is_set():
            obstore.put(self._client, name, self._new, use_multipart=False)
            self._changed.set()
        return part


def test_an_object_that_is_written_anew_while_it_comes(tmp_path: Path) -> None:
    """The parts of a file are all of one version."""
    (tmp_path / "there").mkdir()
    (tmp_path / "there/corpus.bin").write_bytes(OBJECTS["corpus.bin"])
    new = os.urandom(2 * PIECE + 5)
    store = _Changing(f"file://{tmp_path}/there", new)
    data_pull.bring([(store, tmp_path / "here")], print)
    assert _files(tmp_path / "here") == {"corpus.bin": new}
    lines: list[str] = []
    data_pull.bring([(store, tmp_path / "here")], lines.append)
    assert "already" in lines[0]


def test_how_far_it_is(source: Source, tmp_path: Path) -> None:
    """A line after each five seconds, at most one for each part."""
    clock = iter(range(0, 1000, 3))
    source.pull(tmp_path, lambda: float(next(clock)))
    assert source.lines[0] == (
        f"[ttp] {tmp_path}: 16.8 MB of 33.6 MB have come from {source.url} (2.8 MB/s, 6.0 s left)"
    )
    assert [line.partition(f" from {source.url}")[0] for line in source.lines[1:-1]] == [
        f"[ttp] {tmp_path}: 33.6 MB of 33.6 MB have come"
    ]


def test_a_disk_that_is_too_small_gets_nothing(tmp_path: Path) -> None:
    (tmp_path / "there").mkdir()
    (tmp_path / "there/small").write_bytes(b"1")
    with (tmp_path / "there/large").open("wb") as file:
        file.truncate(shutil.disk_usage(tmp_path).free + (1 << 40))  # no byte of it is on the disk
    with pytest.raises(StoreError, match=rf"{tmp_path}/here: .* are free, and .* GB have to come from file:"):
        data_pull.bring([(open_store(f"file://{tmp_path}/there"), tmp_path / "here")], print)
    assert _files(tmp_path / "here") == {}


@pytest.mark.parametrize(
    ("objects", "reason"),
    [
        ([], r": there is no object below it$"),
        ([""], r": has an object '', which cannot be a file of a folder$"),
        (["a", "a/b"], r": has an object a and others below a/, which cannot both be in a folder$"),
        (["../a"], r"invalid path"),
    ],
)
def test_object_names_that_cannot_be_files_are_refused(
    objects: list[str], reason: str, faults: FaultProxy, url: str, server: str, tmp_path: Path
) -> None:
    """The pull ends with one line and makes no folder."""
    url = f"{url}-{len(objects)}{len(''.join(objects))}"
    for name in objects:
        object_store.request(server, "PUT", f"/{url.removeprefix('s3://')}/{name}", b"1")
    with pytest.raises(StoreError, match=reason):
        data_pull.bring([(open_store(url, server), tmp_path / "here")], print)
    assert not (tmp_path / "here").exists()


@pytest.mark.parametrize(
    ("name", "file_in_the_way", "reason"),
    [
        ("a", "a/of another", r"/here/a: is a folder, and file:///.*/there has an object of that name$"),
        (
            "a/b",
            "a",
            r"/here/a: cannot be a folder, because a file is there, and file:///.* has objects",
        ),
        ("a/b/c", "a", r"/here/a/b: cannot be a folder, because a file is there, and"),
    ],
)
def test_a_file_in_the_way_of_an_object_is_refused(
    name: str, file_in_the_way: str, reason: str, tmp_path: Path
) -> None:
    """The line names the file and comes before the first byte."""
    for file in ("there/first", f"there/{name}", f"here/{file_in_the_way}"):
        (tmp_path / file).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / file).write_bytes(b"1")
    with pytest.raises(StoreError, match=reason):
        data_pull.bring([(open_store(f"file://{tmp_path}/there"), tmp_path / "here")], print)
    assert _files(tmp_path / "here") == {file_in_the_way: b"1"}


def test_a_name_that_is_too_long_for_a_file(source: Source, tmp_path: Path) -> None:
    source.put("folder/" + 256 * "x", b"1")
    with pytest.raises(StoreError, match=rf" has an object folder/x+, and {tmp_path} takes names of 255 "):
        source.pull(tmp_path)
    assert _files(tmp_path) == {}


@pytest.fixture
def processes() -> Iterator[list[subprocess.Popen[str]]]:
    started: list[subprocess.Popen[str]] = []
    yield started
    for process in started:
        with process:
            process.kill()


def _start(source: Source, folder: Path, processes: list[subprocess.Popen[str]]) -> subprocess.Popen[str]:
    process = subprocess.Popen(
        [sys.executable, str(STORE), "data", source.faults.url, source.url, str(folder)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    processes.append(process)
    return process


@pytest.mark.parametrize("end", ["SIGKILL", "ttprun"])
def test_a_file_that_is_cut_short_keeps_a_temporary_name(
    end: str, source: Source, processes: list[subprocess.Popen[str]], tmp_path: Path
) -> None:
    """The pull ends by itself or with ttprun, which reads its pipe.

    The next pull removes the temporary file.
    """
    source.faults.fault = lambda number, method, path: (
        "hold before"
        if "corpus.bin" in path and sum("corpus.bin" in request for request in source.read()) == 2
        else ""
    )
    process = _start(source, tmp_path, processes)
    assert source.faults.held.wait(60)
    waiting.until(lambda: any(tmp_path.glob(".ttp_part*")), "the file is begun")
    if end == "SIGKILL":
        process.kill()
    else:
        assert process.stdin is not None
        process.stdin.close()
    assert process.wait(60) == (-signal.SIGKILL if end == "SIGKILL" else 1)
    assert "corpus.bin" not in _files(tmp_path)
    assert end == "SIGKILL" or not any(tmp_path.rglob(".ttp_part*"))
    source.faults.begin()
    source.pull(tmp_path)
    assert _files(tmp_path) == OBJECTS
    assert not list(tmp_path.rglob(".ttp_part*"))


def test_a_file_that_another_machine_writes_is_left(source: Source, tmp_path: Path) -> None:
    """On some file systems a lock is visible on one machine only."""
    for name, age_s in (("written", 0), ("left over", 2 * 3600)):
        part = tmp_path / f".ttp_part.another.{name}"
        part.touch()
        os.utime(part, (part.stat().st_mtime - age_s,) * 2)
    source.pull(tmp_path)
    assert [path.name for path in tmp_path.glob(".ttp_part*")] == [".ttp_part.another.written"]


@pytest.mark.parametrize("kind", ["a link", "a pipe"])
def test_a_journal_that_is_none(kind: str, source: Source, tmp_path: Path) -> None:
    """Nobody diverts what is written to another file, or lets the start wait for ever."""
    journal, linked = tmp_path / "here" / data_pull.JOURNAL, tmp_path / "other"
    journal.parent.mkdir()
    if kind == "a pipe":
        os.mkfifo(journal)
    else:
        linked.touch()
        journal.symlink_to(linked)
    with pytest.raises(StoreError, match=str(journal)):
        source.pull(journal.parent)
    assert kind == "a pipe" or linked.read_bytes() == b""


def test_nodes_that_share_a_folder_pull_once(
    source: Source, processes: list[subprocess.Popen[str]], tmp_path: Path
) -> None:
    source.faults.fault = lambda number, method, path: "hold after" if number == 1 else ""
    first = _start(source, tmp_path, processes)
    assert source.faults.held.wait(60)
    second = _start(source, tmp_path, processes)
    assert second.stderr is not None
    assert second.stderr.readline() == f"[ttp] waiting for another ttprun, which pulls to {tmp_path}\n"
    source.faults.release.set()
    for process, count in ((first, f"{source.url} (4 objects"), (second, f"{source.url} already (4 objects")):
        assert process.wait(60) == 0
        assert process.stderr is not None
        assert f"[ttp] {tmp_path} has what is in {count}" in process.stderr.read()
    assert _files(tmp_path) == OBJECTS
    assert len(source.read()) == 5 + 1  # the one that was held is asked for again


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("gcs://bucket/data=here", r"TTP_PULL: gcs://bucket/data: gcs:// is no store that is known"),
        ("s3://B/data=here", r"TTP_PULL: s3://B/data: 'B' is no name of a bucket"),
        ("s3://b1/data=here s3://b1/more=./here", r"TTP_PULL names the folder \./here twice"),
        ("file:///data=/data/", r"TTP_PULL: /data/ is inside file:///data, so what has come would come"),
        ("file:///data=/data/here", r"TTP_PULL: /data/here is inside file:///data, so"),
    ],
)
def test_settings_that_are_refused_before_a_store_is_contacted(text: str, reason: str) -> None:
    with pytest.raises(ConfigError, match=reason):
        before_start.require_pulls(config.load({"TTP_PULL": text}).of(StoreSettings))


def _job(launcher: Launcher, *options: str, **environment: str) -> int:
    script = launcher.script("print(open('here/data').read(), open('more/data').read(), flush=True)")
    return launcher.start(*ONE, *options, script, prelude=HEARS_CTRL_C, **environment)


@pytest.mark.parametrize("enabled", ["True", "False"])
def test_a_script_reads_what_was_pulled(enabled: str, launcher: Launcher, tmp_path: Path) -> None:
    for name in ("one", "two"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "data").write_text(f"this is {name}")
    options = [f"--ttp-pull=file://{tmp_path}/one=here", "--ttp-pull", f"file://{tmp_path}/two=more"]
    result = launcher.wait(_job(launcher, *options, "--ttp-enable", enabled), code=0)
    assert "this is one this is two" in result.log
    assert "here has what is in" in result.log


REFUSED: Mapping[str, tuple[str, str, str]] = {
    "no folder named": ("s3://bucket/data", "", "TTP_PULL is 's3://bucket/data': it must be URL=DIR"),
    "no bucket": ("s3://nowhere/data=here", "", "TTP_PULL: s3://nowhere/data: there is no bucket nowhere in"),
    "no object": (
        "s3://bucket/nothing=here",
        "",
        "TTP_PULL: s3://bucket/nothing: there is no object below it",
    ),
    "no credentials": (
        "s3://bucket/data=here",
        "AWS_SECRET_ACCESS_KEY",
        "TTP_PULL: AWS_ACCESS_KEY_ID is set, but",
    ),
    "a file in the way": ("s3://bucket/data=script.py", "", "TTP_PULL: script.py: is not a folder"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_a_failed_pull_starts_no_worker(
    case: str, faults: FaultProxy, server: str, launcher: Launcher
) -> None:
    text, without, reason = REFUSED[case]
    Source("s3://bucket/data", faults, server).put("one", b"1")
    environment = {**object_store.CREDENTIALS, without: ""} if without else object_store.CREDENTIALS
    result = launcher.wait(
        _job(launcher, "--ttp-pull", text, "--ttp-store-endpoint", server, **environment), code=2
    )
    assert len(result.log.splitlines()) == 1
    assert result.log.startswith(f"ttprun: error: {reason}")
    assert not (launcher.folder / "here").exists()


def test_credentials_that_are_refused_start_nothing(faults: FaultProxy, url: str, launcher: Launcher) -> None:
    faults.fault = lambda number, method, path: "403"
    options = ["--ttp-pull", f"{url}=here", "--ttp-store-endpoint", faults.url]
    result = launcher.wait(_job(launcher, *options, **object_store.CREDENTIALS), code=2)
    assert result.log == (
        f"ttprun: error: TTP_PULL: {url}: {faults.url} does not allow these credentials to list it"
        " (403 Forbidden, AccessDenied)\n"
    )


@pytest.mark.parametrize("by", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_ends_a_pull(by: signal.Signals, source: Source, launcher: Launcher) -> None:
    source.faults.fault = lambda number, method, path: "hold before" if "corpus.bin" in path else ""
    options = ["--ttp-pull", f"{source.url}=here", "--ttp-store-endpoint", source.faults.url]
    pid = _job(launcher, *options, **object_store.CREDENTIALS)
    assert source.faults.held.wait(60)
    os.kill(pid, by)
    result = launcher.wait(pid, code=128 + by)
    assert result.log == (
        f"[ttp] ended by {by.name} while it waited for the data of {source.url}, which comes to here;"
        " nothing was started\n"
    )
    assert _files(launcher.folder / "here").keys() <= {"a folder/with %41 and =.txt"}
    assert not any((launcher.folder / "here").rglob(".ttp_part*"))
