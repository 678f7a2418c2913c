"""The transcript: its hash chain, the lines of steps, and the comparison by `ttp replay`."""

from __future__ import annotations

import dataclasses
import stat
import sys
from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest

from adaptor.errors import CheckpointError
from adaptor.launchers.cli import ttp
from adaptor.protocol.messages import Recovered, Verified
from adaptor.verification import transcript
from adaptor.verification.transcript import OpenSteps, TranscriptReader, VerifiedStep
from tests.unit.test_operations import WatchedStatus

VERSIONS = {"torch": "2.13", "layout": "2 ranks", "device": "cpu"}


def _report(rank: int, step: int, *, param: str = "p", agreed: bool = True, states: str = "r") -> Verified:
    """Return the report of a rank; both ranks hold shard g/0, and rank 0 reports its sums while both
    agree.
    """
    shard = {"param": param, "grad": "g"} if rank == 0 or not agreed else {}
    return Verified(rank, step, 2, agreed, {"g/0": shard}, {"random states": states}, 8 * step, VERSIONS)


def _verified(step: int, *reports: Verified) -> VerifiedStep:
    steps = OpenSteps()
    messages = reports or (_report(0, step), _report(1, step))
    *_, line = [steps.add(message, "2026-11-29T12:00:00Z") for message in messages]
    assert line is not None
    return line


def _write(path: Path, *steps: VerifiedStep) -> Path:
    for step in steps:
        transcript.append(path, step)
    return path


def test_lines_follow_each_other(tmp_path: Path) -> None:
    path = _write(tmp_path / "job" / transcript.NAME, *map(_verified, (2, 4, 6)))
    reader = TranscriptReader(path)
    assert [(step.step, step.newest, step.is_repeated) for step in reader.read()] == [
        (2, -1, False),
        (4, 2, False),
        (6, 4, False),
    ]
    # A line cut by a crash is removed; the job goes back, and the chain continues.
    with path.open("ab") as file:
        file.write(b'{"time":"2026-')
    assert reader.read() == []
    _write(path, _verified(4), _verified(6), _verified(8))
    assert [(step.step, step.is_repeated) for step in reader.read()] == [(4, True), (6, True), (8, False)]
    assert [step.step for step in TranscriptReader(path).read()] == [2, 4, 6, 4, 6, 8]
    assert transcript.trained(TranscriptReader(path).read()).keys() == {2, 4, 6, 8}


def test_a_line_longer_than_a_block_is_continued(tmp_path: Path) -> None:
    shards = {f"g/{number}": {"param": "0" * 16} for number in range(5000)}
    long_report = msgspec.structs.replace(_report(0, 2), shards=shards)
    path = _write(tmp_path / transcript.NAME, _verified(2, long_report, _report(1, 2)), _verified(4))
    assert [step.newest for step in TranscriptReader(path).read()] == [-1, 2]


CHANGES: dict[str, Callable[[list[bytes]], list[bytes]]] = {
    "changed": lambda lines: [lines[0], lines[1].replace(b'"samples":32', b'"samples":33'), *lines[2:]],
    "removed": lambda lines: [lines[0], *lines[2:]],
    "repeated": lambda lines: [lines[0], *lines],
    "no JSON": lambda lines: [lines[0], b"\n", *lines[1:]],
}


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
def test_a_changed_line_is_named(change: Callable[[list[bytes]], list[bytes]], tmp_path: Path) -> None:
    path = _write(tmp_path / transcript.NAME, *map(_verified, (2, 4, 6, 8)))
    path.write_bytes(b"".join(change(path.read_bytes().splitlines(keepends=True))))
    with pytest.raises(CheckpointError, match="line 2 does not follow from the line before"):
        TranscriptReader(path).read()
    _write(path, _verified(10))  # a job continues anyway


def test_a_line_is_written_when_all_ranks_have_reported(tmp_path: Path) -> None:
    report = WatchedStatus(tmp_path).report
    path = report._files.folder / transcript.NAME
    for message in (_report(1, 2), _report(0, 2), _report(0, 4)):
        report.record_message(0, message)
    # Rank 1 is lost before its report: the sums of step 4 come again.
    report.record_order(0, None, Recovered(1, 2, "rank 1 was replaced", replaced=(1,), seconds=0.9))
    for message in (_report(1, 4, states="later"), _report(0, 4)):
        report.record_message(0, message)
    report._files.close()
    steps = TranscriptReader(path).read()
    assert [(step.step, step.samples, step.versions) for step in steps] == [
        (2, 16, VERSIONS),
        (4, 32, VERSIONS),
    ]
    assert steps[1].ranks[1].own == {"random states": "later"}


def test_differences_name_the_step_the_rank_and_the_tensor() -> None:
    recorded = _verified(4)
    assert transcript.differences(recorded, _verified(4)) == []
    assert transcript.differences(recorded, _verified(4, _report(0, 4, param="x"), _report(1, 4))) == [
        "param of shard g/0 on ranks 0 and 1, after step 4"
    ]
    reports = (_report(0, 4, agreed=False), _report(1, 4, param="x", agreed=False, states="x"))
    assert transcript.differences(recorded, _verified(4, *reports)) == [
        "param of shard g/0 on rank 1, after step 4",
        "random states on rank 1, in step 5",
    ]


START = """#!{python}
import shutil, sys, time
from pathlib import Path
given = dict(text.partition("=")[::2] for text in sys.argv if text.startswith("--ttp"))
values = dict(zip(sys.argv, sys.argv[1:]))
assert given["--ttp-verify-every"] == "2" and "--ttp-store" not in sys.argv, sys.argv
assert Path(values["--load"], "latest_checkpointed_iteration.txt").read_text() == "2"
assert Path(values["--load"], "iter_0000002", "of").read_text() == "step 2"
job = Path(given["--ttp-log-path"], "job")
job.mkdir(parents=True)
Path("saved-to").write_text(values["--save"])
shutil.copy("{replayed}", job / "transcript.jsonl")
{then}
"""


@dataclasses.dataclass(frozen=True)
class Replay:
    """A recorded job with a checkpoint of step 2, and a program that replaces ttprun."""

    folder: Path
    program: Path
    replayed: Path
    recorded: Path

    def run(self, *command: str, to: str = "6", ending: str = "time.sleep(600)") -> int:
        text = START.format(python=sys.executable, replayed=self.replayed, then=ending)
        self.program.write_text(text)
        self.program.chmod(self.program.stat().st_mode | stat.S_IXUSR)
        save = str(self.folder / "save")
        command = command or (str(self.program), "train.py", "--load", save, "--save", save)
        arguments = ("--from", f"{save}/iter_0000002", "--to", to, "--compare", str(self.recorded))
        return ttp.main(["replay", *arguments, "--", *command])


@pytest.fixture
def replay(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Replay:
    monkeypatch.chdir(tmp_path)
    checkpoint = tmp_path / "save" / "iter_0000002"
    checkpoint.mkdir(parents=True)
    (checkpoint / "of").write_text("step 2")
    recorded = _write(tmp_path / "recorded.jsonl", *map(_verified, (2, 4, 6, 8)))
    return Replay(tmp_path, tmp_path / "ttprun", tmp_path / "replayed.jsonl", recorded)


def test_a_replay_ends_behind_the_last_step(replay: Replay, capfd: pytest.CaptureFixture[str]) -> None:
    _write(replay.replayed, *map(_verified, (4, 6, 8)))
    store = ("--ttp-store", "s3://bucket/run", "train.py", "--load", "save", "--save", "save")
    assert replay.run(str(replay.program), *store) == 0
    assert capfd.readouterr().out == "all 2 verified steps are equal: 4 to 6\n"
    saved_to = Path((replay.folder / "saved-to").read_text())
    assert saved_to != replay.folder / "save"
    assert not saved_to.parent.exists(), "the scratch folder is removed"
    assert [path.name for path in (replay.folder / "save").iterdir()] == ["iter_0000002"]


def test_a_replay_ends_at_the_first_difference(replay: Replay, capfd: pytest.CaptureFixture[str]) -> None:
    report = msgspec.structs.replace(_report(0, 6, states="x"), versions={**VERSIONS, "torch": "2.12"})
    _write(replay.replayed, _verified(4), _verified(6, report, _report(1, 6)), _verified(8))
    assert replay.run(to="8") == 1
    assert capfd.readouterr().out.splitlines() == [
        "verified step 6 differs; step 4 is equal (other versions: torch 2.13 when recorded, 2.12 now)",
        "random states on rank 0, in step 7",
    ]


def test_a_replay_that_cannot_be_compared_says_so(replay: Replay, capfd: pytest.CaptureFixture[str]) -> None:
    report = msgspec.structs.replace(_report(0, 4), versions={**VERSIONS, "layout": "4 ranks"})
    _write(replay.replayed, _verified(4, report, _report(1, 4)))
    assert replay.run() == 2
    line = (
        "ttp: error: step 4 cannot be compared: another layout: recorded with 2 ranks, replayed with 4 ranks"
    )
    assert capfd.readouterr().err.splitlines()[-1] == line
    replay.replayed.unlink()
    _write(replay.replayed, _verified(4))
    assert replay.run(ending="sys.exit(3)") == 2
    line = "the replay has ended after step 4, with exit code 3: step 6 was not reached"
    assert capfd.readouterr().out == f"{line}\n"


REFUSED = {
    "plain torchrun": (["torchrun", "train.py"], "6", "the command begins with torchrun"),
    "no command": ([""], "6", "the command begins with nothing"),
    "several nodes": (
        ["ttprun", "--nnodes", "2", "t.py", "--load", "l", "--save", "s"],
        "6",
        "--nnodes is 2",
    ),
    "another script": (["ttprun", "train.py"], "6", "the script has no --load and --save"),
    "loaders": (["ttprun", "t.py", "--dataloader-save", "d"], "6", "--dataloader-save is among"),
    "no step": ([], "3", "no step from 3 to 3 is verified: its verified steps are 2 to 8"),
    "back": ([], "2", "--to is 2: it must be a step after the checkpoint, 3 or later"),
}


@pytest.mark.parametrize(("command", "to", "line"), REFUSED.values(), ids=REFUSED)
def test_an_impossible_replay_is_refused_in_one_line(
    command: list[str], to: str, line: str, replay: Replay, capfd: pytest.CaptureFixture[str]
) -> None:
    assert replay.run(*command, to=to) == 2
    (error_line,) = capfd.readouterr().err.splitlines()
    assert line in error_line


def test_a_missing_file_is_named_in_one_line(replay: Replay, capfd: pytest.CaptureFixture[str]) -> None:
    replay.recorded.unlink()
    assert replay.run() == 2
    (replay.folder / "save" / "iter_0000002").rename(replay.folder / "save" / "iter_0000003")
    assert replay.run() == 2
    errors = capfd.readouterr().err.splitlines()
    assert "recorded.jsonl: cannot be read (No such file or directory)" in errors[0]
    assert "iter_0000002: it must be the folder of a checkpoint, iter_N" in errors[1]
