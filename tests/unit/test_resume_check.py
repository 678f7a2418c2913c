"""Before a resume: whatever is damaged is found, named and kept, and the newest intact checkpoint is used."""

from __future__ import annotations

import contextlib
import errno
import io
import itertools
import json
import os
import platform
import shutil
import subprocess
import sys
import zipfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from adaptor import output
from adaptor.checkpoint import (
    disk,
    hashing,
    left_overs,
    manifest,
    publish,
    regular_folder,
    resume_check,
    tracker,
)
from adaptor.checkpoint.hashing import BLOCK, BlockDigest, HashingFile
from adaptor.errors import ResumeError
from adaptor.protocol import naming
from adaptor.protocol.naming import FileEntry
from tests.faults.warm import Warm
from tests.unit.test_checkpoint_publish import Crash, crash_before
from tests.unit.threads import LONG_S

pytestmark = pytest.mark.usefixtures("group_of_one")

ROOT = Path(__file__).parents[2]
SCRIPT = Path(__file__).with_name("resume_check_script.py")
FILES = ("mp_rank_00/distrib_optim.pt", "mp_rank_00/model_optim_rng.pt", "mp_rank_01/model_optim_rng.pt")
OLDER, NEWER = 10, 20


@pytest.fixture(scope="module")
def pristine(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Last words of steps 10 and 20; the tracker names 20."""
    root = tmp_path_factory.mktemp("pristine") / "save"
    for step in (OLDER, NEWER):
        add(root, step)
    return root


@pytest.fixture
def root(pristine: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(pristine, tmp_path / "save"))


def add(root: Path, step: int) -> None:
    folder = publish.prepare(root, step)
    entries: list[FileEntry] = []
    for name in FILES:
        (folder / name).parent.mkdir(exist_ok=True)
        with HashingFile(folder / name) as file:
            file.write(f"{name} of step {step}".encode())
        entries.append(file.entry(name))
    publish.publish(root, step, entries, {"mp_rank_00": (0, 1)}, 2)


def add_of_framework(root: Path, step: int, *, cut: bool = False) -> None:
    """Add a checkpoint that the framework has written without the adaptor."""
    path = root / naming.final_name(step) / FILES[1]
    path.parent.mkdir(parents=True)
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("data.pkl", b"x" * 100)
    if cut:
        os.truncate(path, 90)


def resume(root: Path, save: Path | None = None, chosen: int | None = None) -> str:
    """Return the output of the check."""
    stream = io.StringIO()
    with contextlib.redirect_stdout(stream):
        resume_check.require_intact(root, save or root, chosen)
        assert output.drain(LONG_S)
    return stream.getvalue()


def content(root: Path) -> dict[str, bytes]:
    return {p.relative_to(root).as_posix(): p.read_bytes() for p in root.rglob("*") if p.is_file()}


def folder(step: int) -> str:
    return naming.final_name(step)


def assert_went_back(root: Path, content_before: dict[str, bytes], printed: str, *fragments: str) -> None:
    """Assert that step 20 is set aside unchanged, step 10 is used, and a single line reports both."""
    content_after = content(root)
    assert content_after.pop(naming.TRACKER) == b"10"
    assert content_after == {
        name.replace(f"{folder(NEWER)}/", f"{naming.aside_name(NEWER, 1)}/"): value
        for name, value in content_before.items()
        if name != naming.TRACKER
    }
    (line,) = printed.splitlines()
    assert line.startswith("[ttp] ")
    assert line.endswith(
        f"kept in {naming.aside_name(NEWER, 1)}; the newest intact checkpoint is step {OLDER}"
    )
    for word in fragments:
        assert word in line


def test_an_intact_checkpoint_is_left_unchanged(root: Path) -> None:
    content_before = content(root)
    assert resume(root) == ""
    assert content(root) == content_before


@given(
    place=st.tuples(st.sampled_from((*FILES, naming.MANIFEST)), st.integers(0, 2000)),
    change=st.integers(1, 255),
)
@example(place=(naming.MANIFEST, 0), change=1)
def test_any_changed_byte(pristine: Path, place: tuple[str, int], change: int) -> None:
    """Changes of the manifest count only in the fields that a resume relies on."""
    name, offset = place
    with contextlib.ExitStack() as stack:
        root = pristine.with_name("changed")
        shutil.copytree(pristine, root)
        stack.callback(shutil.rmtree, root)
        path = root / folder(NEWER) / name
        text = bytearray(path.read_bytes())
        text[offset % len(text)] ^= change
        path.write_bytes(text)
        content_before = content(root)
        printed = resume(root)
        if printed or name != naming.MANIFEST:
            assert_went_back(root, content_before, printed, f"{folder(NEWER)}/")
            return
        true, changed = (
            manifest.read(checkpoint_root / folder(NEWER)) for checkpoint_root in (pristine, root)
        )
        assert (changed.step, changed.files) == (true.step, true.files)
        assert content(root) == content_before


def _shorten(root: Path) -> str:
    os.truncate(root / folder(NEWER) / FILES[0], 5)
    return f"{FILES[0]}: 5 bytes, the manifest says"


def _lengthen(root: Path) -> str:
    with (root / folder(NEWER) / FILES[1]).open("ab") as file:
        file.write(b"x")
    return f"{FILES[1]}: "


def _remove(root: Path) -> str:
    (root / folder(NEWER) / FILES[2]).unlink()
    return f"{FILES[2]}: missing"


def _empty_manifest(root: Path) -> str:
    (root / folder(NEWER) / naming.MANIFEST).write_bytes(b"")
    return f"{naming.MANIFEST}: is not a manifest"


def _manifest_of_another_step(root: Path) -> str:
    shutil.copy(root / folder(OLDER) / naming.MANIFEST, root / folder(NEWER) / naming.MANIFEST)
    return f"{naming.MANIFEST}: is not that of step {NEWER}"


def _manifest_without_a_file(root: Path) -> str:
    """Replace the name in one of two entries by that of the other."""
    path = root / folder(NEWER) / naming.MANIFEST
    path.write_text(path.read_text().replace(FILES[1], FILES[2]))
    return f"{naming.MANIFEST}: is not a manifest"


def _folder_for_a_file(root: Path) -> str:
    path = root / folder(NEWER) / FILES[0]
    path.unlink()
    path.mkdir()
    (path / "x").touch()
    return f"{FILES[0]}: "


def _two_files(root: Path) -> str:
    _shorten(root)
    _remove(root)
    return "(and 1 more)"


@pytest.mark.parametrize(
    "damage",
    [
        _shorten,
        _lengthen,
        _remove,
        _empty_manifest,
        _manifest_of_another_step,
        _manifest_without_a_file,
        _folder_for_a_file,
        _two_files,
    ],
)
def test_every_other_damage(root: Path, damage: Callable[[Path], str]) -> None:
    fragment = damage(root)
    content_before = content(root)
    assert_went_back(root, content_before, resume(root), fragment)
    assert resume(root) == ""


def test_files_outside_the_manifest_are_no_damage(root: Path) -> None:
    (root / folder(NEWER) / "notes.txt").touch()
    assert resume(root) == ""


def test_nothing_that_was_damaged_is_lost(root: Path) -> None:
    for length in (5, 6):
        os.truncate(root / folder(NEWER) / FILES[0], length)
        resume(root)
        add(root, NEWER)
    for number, length in ((1, 5), (2, 6)):
        assert (root / naming.aside_name(NEWER, number) / FILES[0]).stat().st_size == length
    assert resume(root) == ""


def test_the_newest_intact_one_is_found_behind_others(root: Path) -> None:
    add(root, 30)
    for step in (NEWER, 30):
        (root / folder(step) / FILES[0]).write_bytes(b"")
    (line,) = resume(root).splitlines()
    for step in (NEWER, 30):
        assert f"{folder(step)}/{FILES[0]}: 0 bytes" in line
        assert (root / naming.aside_name(step, 1)).is_dir()
    assert tracker.tracked_step(root) == OLDER


def test_after_going_back_by_hand_nothing_newer_is_chosen(root: Path) -> None:
    add(root, 30)
    (root / naming.TRACKER).write_text(str(NEWER))
    _shorten(root)
    resume(root)
    assert tracker.tracked_step(root) == OLDER
    assert (root / folder(30)).is_dir()


def test_one_of_the_framework_is_taken_where_it_seems_whole(root: Path) -> None:
    for step, cut in ((18, True), (16, False), (25, False)):
        add_of_framework(root, step, cut=cut)
    (root / folder(19)).mkdir()
    _shorten(root)
    assert resume(root).endswith("the newest intact checkpoint is step 16\n")
    assert tracker.tracked_step(root) == 16
    assert (root / folder(18)).is_dir(), "it is not ours to move"


def test_a_save_of_the_framework_is_left_to_it(tmp_path: Path) -> None:
    add_of_framework(tmp_path, 5, cut=True)
    (tmp_path / naming.TRACKER).write_text("5")
    content_before = content(tmp_path)
    assert resume(tmp_path) == ""
    assert resume(tmp_path / "missing") == ""
    (tmp_path / naming.TRACKER).write_text("five")
    assert resume(tmp_path) == ""
    assert {**content(tmp_path), naming.TRACKER: b"5"} == content_before


def test_a_regular_save_is_known_by_its_sizes(root: Path) -> None:
    add_of_framework(root, 30)
    (root / folder(30)).rename(root / naming.regular_name(30))
    regular_folder.publish_regular(root, 30)
    tracker.advance(root, 30)
    assert resume(root) == ""
    os.truncate(root / folder(30) / FILES[1], 90)
    assert f"{FILES[1]}: 90 bytes" in resume(root)
    assert tracker.tracked_step(root) == NEWER


@pytest.mark.parametrize(
    ("text", "fragment"), [("", "names no step"), ("2o", "names no step"), ("7", "iter_0000007: missing")]
)
def test_a_tracker_that_names_nothing(root: Path, text: str, fragment: str) -> None:
    """Without the check the framework would end with code 0."""
    (root / naming.TRACKER).write_text(text)
    (line,) = resume(root).splitlines()
    assert fragment in line
    assert tracker.tracked_step(root) == NEWER
    assert (root / folder(NEWER)).is_dir()


@pytest.mark.robustness(
    "B9",
    "the tracker is gone, checkpoints are there",
    "training goes on from the newest intact one, in a line",
)
def test_where_the_tracker_is_gone_training_goes_on_from_the_newest(root: Path) -> None:
    (root / naming.TRACKER).unlink()
    (line,) = resume(root).splitlines()
    assert f"{naming.TRACKER}: missing beside checkpoints" in line
    assert "to begin anew, choose another --save folder" in line
    assert line.endswith(f"the newest intact checkpoint is step {NEWER}")
    assert tracker.tracked_step(root) == NEWER
    assert resume(root) == ""


def test_where_the_tracker_is_gone_and_the_newest_is_damaged(root: Path) -> None:
    (root / naming.TRACKER).unlink()
    _shorten(root)
    assert resume(root).endswith(f"the newest intact checkpoint is step {OLDER}\n")
    assert tracker.tracked_step(root) == OLDER
    assert (root / naming.aside_name(NEWER, 1)).is_dir()


def test_a_tracker_that_is_gone_where_nothing_is_saved_is_refused(root: Path, tmp_path: Path) -> None:
    (root / naming.TRACKER).unlink()
    assert "missing beside checkpoints" in refused(root, tmp_path / "elsewhere")


@pytest.mark.robustness(
    "B9", "the tracker says release beside checkpoints", "the release is loaded, a line names the newest step"
)
def test_a_converted_model_is_loaded_and_newer_checkpoints_are_named(root: Path) -> None:
    (root / naming.TRACKER).write_text("release\n")
    (line,) = resume(root).splitlines()
    assert f"not from step {NEWER}, which is saved beside it" in line
    assert (root / naming.TRACKER).read_text() == "release\n"


def test_a_tracker_that_names_an_older_step_is_obeyed_and_the_later_one_is_named(root: Path) -> None:
    (root / naming.TRACKER).write_text(str(OLDER))
    (line,) = resume(root).splitlines()
    assert f"training goes on from step {OLDER}, not from step {NEWER}, which is saved beside it" in line
    assert tracker.tracked_step(root) == OLDER


def refused(root: Path, save: Path | None = None, chosen: int | None = None) -> str:
    """Why; nothing has been changed, and the reason is one line."""
    content_before = content(root)
    with pytest.raises(ResumeError) as caught:
        resume(root, save, chosen)
    assert content(root) == content_before
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_without_any_intact_one_the_start_is_refused(root: Path) -> None:
    for step in (OLDER, NEWER):
        (root / folder(step) / FILES[0]).unlink()
    line = refused(root)
    for step in (OLDER, NEWER):
        assert f"{folder(step)}/{FILES[0]}: missing" in line
    assert f"no other checkpoint in {root} is intact" in line


def test_a_folder_that_is_not_saved_to_is_not_touched(root: Path) -> None:
    fragment = _shorten(root)
    line = refused(root, root.parent / "elsewhere")
    assert fragment in line
    assert "--load" in line


def test_the_same_folder_under_another_name_is_the_same(root: Path) -> None:
    (root.parent / "link").symlink_to(root)
    _shorten(root)
    assert "kept in" in resume(root, root.parent / "link")


def test_a_step_that_the_user_chose_is_not_replaced(root: Path) -> None:
    fragment = _shorten(root)
    assert resume(root, chosen=OLDER) == ""
    line = refused(root, chosen=NEWER)
    assert fragment in line
    assert "--ckpt-step" in line


def test_a_folder_that_cannot_be_changed_is_one_line(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    _shorten(root)

    def refuse(self: Path, target: Path) -> None:
        raise OSError(30, "Read-only file system", str(self))

    monkeypatch.setattr(Path, "rename", refuse)
    assert "Read-only file system" in refused(root)


def test_after_any_crash_the_next_start_goes_on(root: Path, tmp_path: Path) -> None:
    add(root, 30)
    for step in (NEWER, 30):
        (root / folder(step) / FILES[0]).write_bytes(b"damaged")
    content_before = content(root)

    for call in itertools.count(1):
        copied_root = Path(shutil.copytree(root, tmp_path / str(call)))
        try:
            with crash_before(call) as clock:
                resume(copied_root)
            break
        except Crash:
            pass
        left_overs.clean(copied_root)  # as every start does
        resume(copied_root)
        assert resume(copied_root) == ""
        content_after = content(copied_root)
        assert content_after.pop(naming.TRACKER) == b"10"
        for step in (NEWER, 30):
            for name in FILES:
                kept = f"{naming.aside_name(step, 1)}/{name}"
                assert content_after[kept] == content_before[f"{folder(step)}/{name}"]
            assert not (copied_root / folder(step)).exists()
        assert len(content_after) == len(content_before) - 1
    assert clock.calls.count("os.rename") == 3


def start_ranks(
    tmp_path: Path,
    size: int,
    folders: Sequence[Path],
    environments: Mapping[int, dict[str, str]] | None = None,
    places: Mapping[int, Path] | None = None,
) -> list[Warm]:
    """Start ranks, with `environments` in addition to that of the tests, each in its folder of `places`."""
    return [
        Warm(
            [sys.executable, str(SCRIPT), str(tmp_path / "store"), str(rank), str(size), *map(str, folders)],
            env={
                **os.environ,
                "PYTHONPATH": str(ROOT),
                "OMP_NUM_THREADS": "1",
                **(environments or {}).get(rank, {}),
            },
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            cwd=(places or {}).get(rank),
        )
        for rank in range(size)
    ]


def heard(text: str) -> list[dict[str, Any]]:
    return [json.loads(line[1:]) for line in text.splitlines() if line[0] == "="]


@pytest.mark.parametrize("front_to_back", [False, True], ids=["in-place", "front-to-back"])
def test_all_ranks_read_a_part_of_a_file_with_a_checksum_of_blocks(
    root: Path, tmp_path: Path, front_to_back: bool
) -> None:
    """A byte is found wherever it has changed: in the part of either rank, in the short last block."""
    folder = publish.prepare(root, NEWER + 1)
    content = os.urandom(3 * BLOCK + 10)
    digest = BlockDigest()
    digest.update(content)
    (folder / "large.pt").write_bytes(content)
    checksum = hashing.hash_file(folder / "large.pt") if front_to_back else None
    entry = FileEntry("large.pt", len(content), checksum, xxh3_128_blocks=digest.hexdigest())
    publish.publish(root, NEWER + 1, [entry], {}, 2)
    copies = [root]
    for at in (0, 2 * BLOCK, len(content) - 1):
        copies.append(copy := Path(shutil.copytree(root, tmp_path / f"at-{at}")))
        changed = bytearray(content)
        changed[at] ^= 1
        (copy / naming.final_name(NEWER + 1) / "large.pt").write_bytes(changed)
    copies.append(copy := Path(shutil.copytree(root, tmp_path / "short")))
    os.truncate(copy / naming.final_name(NEWER + 1) / "large.pt", 2 * BLOCK)
    ranks = start_ranks(tmp_path, 2, [folder for copy in copies for folder in (copy, copy)])
    outputs = [process.communicate(timeout=120)[0] for process in ranks]
    lines_of_ranks = [heard(text) for text in outputs]
    assert not any(line["refused"] for lines in lines_of_ranks for line in lines), "\n".join(outputs)
    read = [name for lines in lines_of_ranks for line in lines for name in line["read"]]
    assert not any(name.endswith("large.pt") for name in read), "no rank reads all of it"
    assert [len(lines) for lines in lines_of_ranks] == [len(copies)] * 2, "\n".join(outputs)
    assert [tracker.tracked_step(copy) for copy in copies] == [NEWER + 1, *[NEWER] * 4]
    assert outputs[0].count("large.pt: checksum differs from the manifest") == 3


def test_a_node_reads_the_files_of_its_ranks(root: Path, tmp_path: Path) -> None:
    """Two nodes of two ranks; all ranks read the unassigned files, and any reader detects the damage."""
    folder = publish.prepare(root, NEWER + 1)
    contents = {name: os.urandom(8 * BLOCK) for name in ("a.pt", "b.pt", "c.pt")}
    entries = []
    for name, content in contents.items():
        (folder / name).write_bytes(content)
        entries.append(hashing.entry_of(folder / name, name))
    (folder / "small.pt").write_bytes(b"small")
    entries.append(hashing.entry_of(folder / "small.pt", "small.pt"))
    publish.publish(root, NEWER + 1, entries, {}, 4)
    damaged = Path(shutil.copytree(root, tmp_path / "damaged"))
    changed = bytearray(contents["a.pt"])
    changed[5 * BLOCK] ^= 1
    (damaged / naming.final_name(NEWER + 1) / "a.pt").write_bytes(changed)
    environments = {rank: {"GROUP_RANK": str(rank // 2)} for rank in range(4)}
    environments[1]["LOADS"] = "b. c."
    environments[2]["LOADS"] = "a.pt c.pt"
    environments[3]["LOADS"] = "small"
    ranks = start_ranks(tmp_path, 4, (root, root, damaged, damaged), environments)
    outputs = [process.communicate(timeout=120)[0] for process in ranks]
    lines_of_ranks = [heard(text) for text in outputs]
    assert [len(lines) for lines in lines_of_ranks] == [2] * 4, "\n".join(outputs)
    name = naming.final_name(NEWER + 1)
    assert [sorted(lines[0]["read"]) for lines in lines_of_ranks[:2]] == [
        [f"{name}/b.pt:0-4", f"{name}/c.pt:0-2"],
        [f"{name}/b.pt:4-8", f"{name}/c.pt:2-4"],
    ]
    last = [sorted(lines[0]["read"]) for lines in lines_of_ranks[2:]]
    assert sum((reads.count(f"{name}/small.pt") for reads in last), 0) == 1
    assert [[read for read in reads if ":" in read] for reads in last] == [
        [f"{name}/a.pt:0-4", f"{name}/c.pt:4-6"],
        [f"{name}/a.pt:4-8", f"{name}/c.pt:6-8"],
    ]
    assert tracker.tracked_step(root) == NEWER + 1
    assert tracker.tracked_step(damaged) == NEWER
    assert "a.pt: checksum differs from the manifest" in outputs[0]


@pytest.mark.parametrize("kind", ["flipped", "cut", "gone", "intact"])
@pytest.mark.parametrize("name", ["large.pt", FILES[0]])
def test_each_node_checks_its_own_copy(root: Path, tmp_path: Path, name: str, kind: str) -> None:
    """Two nodes of two ranks have the checkpoint on their own disks, and no rank names its files."""
    folder = publish.prepare(root, NEWER + 1)
    (folder / "large.pt").write_bytes(os.urandom(5 * BLOCK))
    (folder / FILES[0]).parent.mkdir()
    (folder / FILES[0]).write_bytes(b"small")
    entries = [hashing.entry_of(folder / file, file) for file in ("large.pt", FILES[0])]
    publish.publish(root, NEWER + 1, entries, {}, 4)
    second_root = tmp_path / "other" / root.name
    shutil.copytree(root, second_root, copy_function=shutil.copyfile)
    damaged = Path(root.name) / naming.final_name(NEWER + 1) / name
    if kind == "gone":
        (second_root.parent / damaged).unlink()
    elif kind != "intact":
        changed = bytearray((second_root.parent / damaged).read_bytes())
        changed[-1] ^= 1
        (second_root.parent / damaged).write_bytes(changed if kind == "flipped" else changed[:-1])
    contents_before = content(root), content(second_root)
    environments = {rank: {"GROUP_RANK": str(rank // 2)} for rank in range(4)}
    places = {rank: (root if rank < 2 else second_root).parent for rank in range(4)}
    ranks = start_ranks(tmp_path, 4, [Path(root.name)] * 2, environments, places)
    outputs = [process.communicate(timeout=120)[0] for process in ranks]
    lines = [line for text in outputs for line in heard(text)]
    assert len(lines) == 4, "\n".join(outputs)
    parts = sorted(read for line in lines for read in line["read"] if "large.pt" in read)
    halves = [f"{naming.final_name(NEWER + 1)}/large.pt:{part}" for part in ("0-2", "2-5")]
    assert parts == sorted([*halves, *halves])
    assert {line["refused"] for line in lines} == {""}
    if kind == "intact":
        assert (content(root), content(second_root)) == contents_before
        return
    (line,) = [line for line in outputs[0].splitlines() if "[ttp]" in line]
    assert line.startswith(f"[ttp] step {NEWER + 1} is not whole on every node (node 1: {damaged}: ")
    assert line.endswith(f"the newest that is intact on every node is step {NEWER}")
    for place, was in ((root, contents_before[0]), (second_root, contents_before[1])):
        aside, named = naming.aside_name(NEWER + 1, 1), naming.final_name(NEWER + 1)
        renamed = {file.replace(aside, named): text for file, text in content(place).items()}
        assert renamed == {**was, naming.TRACKER: str(NEWER).encode()}
        assert not (place / named).exists()


@pytest.mark.parametrize(
    ("kind", "reason"),
    [
        ("intact", ""),
        ("cut", "/mp_rank_01/model_optim_rng.pt: "),
        ("flipped", "/mp_rank_01/model_optim_rng.pt: checksum differs from the manifest"),
        ("of other ranks", "/mp_rank_00/model_optim_rng.pt: missing"),
        ("of another generation", ": is of another save of this step than that of node 0"),
    ],
)
def test_a_node_has_what_its_ranks_load(tmp_path: Path, kind: str, reason: str) -> None:
    """Two nodes have saved to disks of their own, under the same name; the second node has two ranks."""
    places, names = [tmp_path / "node0", tmp_path / "node1"], ["mp_rank_00", "mp_rank_01"]
    for node, place in enumerate(places):
        generation = "2" if kind == "of another generation" and node else "1"
        file = place / "save" / naming.regular_name(NEWER, generation) / names[node] / naming.MODEL_FILE
        file.parent.mkdir(parents=True)
        file.write_bytes(os.urandom(5 * BLOCK))
        taken = regular_folder.take_on_own_disk(place / "save", NEWER, generation) if node else None
        regular_folder.sync_regular(place / "save", NEWER, generation, taken)
        regular_folder.publish_regular(place / "save", NEWER, generation, taken)
        tracker.advance(place / "save", NEWER)
    name = Path("save") / naming.final_name(NEWER)
    damaged = places[1] / name / names[1] / naming.MODEL_FILE
    if kind in ("cut", "flipped"):
        changed = bytearray(damaged.read_bytes())
        changed[-1] ^= 1
        damaged.write_bytes(changed if kind == "flipped" else changed[:-1])
    environments = {rank: {"GROUP_RANK": str(min(rank, 1))} for rank in range(3)}
    for rank in environments:
        loaded = names[0] if kind == "of other ranks" else names[min(rank, 1)]
        environments[rank]["LOADS"] = f"{loaded}/{naming.MODEL_FILE} __{rank}_"
    ranks = start_ranks(
        tmp_path, 3, [Path("save")] * 2, environments, {0: places[0], 1: places[1], 2: places[1]}
    )
    outputs = [process.communicate(timeout=120)[0] for process in ranks]
    lines = [line for text in outputs for line in heard(text)]
    assert len(lines) == 3, "\n".join(outputs)
    (refused,) = {line["refused"] for line in lines}
    assert f"step {NEWER} is not whole on every node (node 1: {name}{reason}" in refused or not reason
    assert bool(refused) == bool(reason)
    if kind == "intact":
        blocks = [block for line in lines for block in line["read"]]
        assert sorted(blocks) == [f"{names[0]}/{naming.MODEL_FILE}:0-5", *_parts(names[1])]


def _parts(name: str) -> list[str]:
    return [f"{name}/{naming.MODEL_FILE}:{part}" for part in ("0-2", "2-5")]


def test_all_ranks_decide_alike_and_divide_the_reads(root: Path, pristine: Path, tmp_path: Path) -> None:
    """An intact checkpoint, a damaged checkpoint, and a damaged checkpoint in a folder that is only loaded
    from.
    """
    foreign = Path(shutil.copytree(root, tmp_path / "foreign"))
    _shorten(root)
    _remove(foreign)
    ranks = start_ranks(tmp_path, 3, (pristine, pristine, root, root, foreign, root))
    outputs = [process.communicate(timeout=120)[0] for process in ranks]
    lines_of_ranks = [heard(text) for text in outputs]
    assert [len(lines) for lines in lines_of_ranks] == [3, 3, 3], "\n".join(outputs)
    intact, damaged, refusal = zip(*lines_of_ranks, strict=True)
    assert sorted(name for rank in intact for name in rank["read"]) == sorted(FILES)
    assert all(len(rank["read"]) == 1 for rank in intact)
    assert sorted(name for rank in damaged for name in rank["read"]) == sorted((*FILES, *FILES[1:]))
    assert not any(rank["refused"] for rank in (*intact, *damaged))
    (reason,) = {rank["refused"] for rank in refusal}
    assert f"{FILES[2]}: missing" in reason
    assert [text.count("[ttp]") for text in outputs] == [1, 0, 0]
    assert tracker.tracked_step(root) == OLDER


@pytest.mark.robustness(
    "B8",
    "a rank cannot read a checkpoint: stale handle, I/O error, no descriptor, no right, no memory",
    "the start is refused in a line: rank, host, file; nothing is moved",
)
@pytest.mark.parametrize("error", [errno.ESTALE, errno.EIO, errno.EMFILE, errno.EACCES, MemoryError()])
@pytest.mark.parametrize("name", [naming.MANIFEST, "shard"])
def test_a_checkpoint_that_cannot_be_read_is_not_set_aside(
    root: Path, error: int | MemoryError, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    content_before = content(root)
    name = FILES[0] if name == "shard" else name
    open_regular = disk.open_regular

    def troubled(path: Path) -> int:
        if path == root / folder(NEWER) / name:
            raise OSError(error, os.strerror(error)) if isinstance(error, int) else error
        return open_regular(path)

    monkeypatch.setattr(disk, "open_regular", troubled)
    with pytest.raises(ResumeError) as caught:
        resume(root)
    line = str(caught.value)
    assert "\n" not in line
    if isinstance(error, int):
        assert f"rank 0 on {platform.node()}: {root / folder(NEWER) / name}: cannot be read" in line
        assert "nothing was changed" in line
    assert content(root) == content_before


def test_damage_counts_beside_unreadable_files(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    content_before = content(root)
    (root / folder(NEWER) / FILES[1]).unlink()
    content_before.pop(f"{folder(NEWER)}/{FILES[1]}")
    open_regular = disk.open_regular

    def stale(path: Path) -> int:
        if path == root / folder(NEWER) / FILES[0]:
            raise OSError(errno.ESTALE, os.strerror(errno.ESTALE))
        return open_regular(path)

    monkeypatch.setattr(disk, "open_regular", stale)
    printed = resume(root)
    monkeypatch.undo()
    assert_went_back(root, content_before, printed, "missing")
