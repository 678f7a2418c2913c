"""Nodes with disks of their own continue from one step, wherever the job ended between their saves."""

from __future__ import annotations

import contextlib
import errno
import itertools
import os
import shutil
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from adaptor.checkpoint import left_overs, manifest, publish, regular_folder, resume_selection, tracker
from adaptor.checkpoint.hashing import HashingFile
from adaptor.checkpoint.resume_selection import Agreed, CheckpointProblems, judge
from adaptor.errors import ResumeError
from adaptor.protocol import environment, naming
from tests.unit.test_checkpoint_publish import Crash, _watch_calls_without_events, crash_before  # noqa: F401
from tests.unit.test_resume_check import heard, start_ranks

OLDER, NEWER = 10, 20
FIRST, SECOND, THIRD = "0f3a5c21", "a1b2c3d4", "77777777"  # generations of workers
FOLDERS = ("mp_rank_00", "mp_rank_01", "mp_rank_02")
FILES = (naming.MODEL_FILE, naming.OPTIMIZER_FILE)


def write(root: Path, node: int, step: int, generation: str) -> Path:
    """Write the files of a node's rank in a regular save."""
    saving = root / naming.regular_name(step, generation)
    for name in FILES:
        path = saving / FOLDERS[node] / name
        path.parent.mkdir(parents=True, exist_ok=True)
        with HashingFile(path, base_folder=saving) as file:
            file.write(f"{name} of node {node}, step {step}, generation {generation}".encode())
        regular_folder.leave_note(saving, file.entry(path.relative_to(saving).as_posix()))
    return saving


def name(root: Path, node: int, step: int, generation: str) -> None:
    """Give the save its final name on the node's disk, as the node's first rank does."""
    taken = regular_folder.take_on_own_disk(root, step, generation) if node else None
    regular_folder.sync_regular(root, step, generation, taken)
    regular_folder.publish_regular(root, step, generation, taken)
    tracker.advance(root, step)


def save(roots: Sequence[Path], step: int, generation: str) -> None:
    """Save a step on the disks of all nodes."""
    for node, root in enumerate(roots):
        write(root, node, step, generation)
    for node, root in enumerate(roots):
        name(root, node, step, generation)


def disks(tmp_path: Path, nodes: int) -> list[Path]:
    """Return the nodes' disks, each with the older step in `save`."""
    places = [tmp_path / f"node{node}" for node in range(nodes)]
    save([place / "save" for place in places], OLDER, FIRST)
    return places


def resume(
    tmp_path: Path, places: Sequence[Path], names: Sequence[str] = ("save",), load: str = ""
) -> tuple[list[list[str]], str]:
    """Resume a job with a rank on each node, once with each of these save folders.

    Returns:
        For each folder the refusal of each rank, and the output.
    """
    folders = [Path(folder) for name in names for folder in (load or name, name)]
    variables = {
        rank: {
            "GROUP_RANK": str(rank),
            "LOADS": " ".join(f"{FOLDERS[rank]}/{file}" for file in FILES) + f" __{rank}_",
        }
        for rank in range(len(places))
    }
    ranks = start_ranks(tmp_path, len(places), folders, variables, dict(enumerate(places)))
    outputs = [process.communicate(timeout=300)[0] for process in ranks]
    lines_by_rank = [heard(text) for text in outputs]
    assert [len(lines) for lines in lines_by_rank] == [len(names)] * len(places), "\n".join(outputs)
    refused = [[lines[at]["refused"] for lines in lines_by_rank] for at in range(len(names))]
    (tmp_path / "store").unlink(missing_ok=True)
    return refused, "\n".join(line for text in outputs for line in text.splitlines() if "[ttp]" in line)


def is_whole(root: Path, node: int, step: int, generation: str) -> bool:
    folder = root / naming.final_name(step)
    contents = manifest.read(folder)
    has_files = {file.path for file in contents.files} >= {f"{FOLDERS[node]}/{file}" for file in FILES}
    return manifest.defects(folder, step=step) == [] and contents.generation == generation and has_files


def content(place: Path) -> dict[str, bytes]:
    return {
        path.relative_to(place).as_posix(): path.read_bytes() for path in place.rglob("*") if path.is_file()
    }


@pytest.mark.integration
def test_wherever_a_job_ends_between_the_saves_of_its_nodes(tmp_path: Path) -> None:
    """The job ends before each disk operation by which three nodes rename a save, in node order.

    Once node 0 has renamed and reported the save, nothing is lost; until then all continue from the step
    before, and the other nodes keep no file of the newer step.
    """
    places = disks(tmp_path, 3)
    for node, place in enumerate(places):
        write(place / "save", node, NEWER, SECOND)
    reached: dict[str, bool] = {}
    for call in itertools.count(1):
        case_name = f"{call:03d}"
        for place in places:
            shutil.copytree(place / "save", place / case_name)
        try:
            with crash_before(call):
                for node, place in enumerate(places):
                    name(place / case_name, node, NEWER, SECOND)
            break
        except Crash:
            pass
        left_overs.clean(places[0] / case_name)  # as rank 0 does at each start
        reached[case_name] = tracker.tracked_step(places[0] / case_name) == NEWER
    assert sum(reached.values()) > 20
    assert len(reached) - sum(reached.values()) > 10
    refused, _ = resume(tmp_path, places, list(reached))
    assert refused == [["", "", ""]] * len(reached)
    for case_name, saved in reached.items():
        step, generation = (NEWER, SECOND) if saved else (OLDER, FIRST)
        assert [tracker.tracked_step(place / case_name) for place in places] == [step] * 3, case_name
        assert all(
            is_whole(place / case_name, node, step, generation) for node, place in enumerate(places)
        ), case_name
        for place in places:
            names = [path.name for path in (place / case_name).iterdir()]
            assert not any(map(naming.is_temporary, names)), (case_name, names)


def _cut(place: Path) -> None:
    os.truncate(_written(place), 5)


def _flip(place: Path) -> None:
    path = _written(place)
    text = bytearray(path.read_bytes())
    text[0] ^= 1
    state = path.stat()
    path.write_bytes(text)
    os.utime(path, ns=(state.st_atime_ns, state.st_mtime_ns))  # changed on the disk, not by a write


def _lose_a_file(place: Path) -> None:
    _written(place).unlink()


def _lose_a_file_and_its_note(place: Path) -> None:
    for path in _written(place).parent.glob(f"{naming.OPTIMIZER_FILE}*"):
        path.unlink()


def _lose_notes(place: Path) -> None:
    for path in _written(place).parent.glob("*.ttp-*"):
        path.unlink()


def _lose_all(place: Path) -> None:
    shutil.rmtree(_written(place).parents[1])


def _leave_an_older_version(place: Path) -> None:
    """Exchange the names and keep the replaced version, which is not part of this save."""
    saving = _written(place).parents[1]
    shutil.rmtree(saving)
    shutil.copytree(place / "save" / naming.final_name(OLDER), saving)


def _written(place: Path) -> Path:
    return place / "save" / naming.regular_name(NEWER, SECOND) / FOLDERS[1] / naming.OPTIMIZER_FILE


@pytest.mark.robustness(
    "B8",
    "a power cut between the saves of two nodes with disks of their own",
    "all go on from the newest step that is intact on every node; a line names both steps",
)
@pytest.mark.parametrize(
    "loss",
    [_cut, _flip, _lose_a_file, _lose_a_file_and_its_note, _lose_notes, _lose_all, _leave_an_older_version],
)
def test_files_of_one_node_lost_by_a_power_cut(tmp_path: Path, loss: Callable[[Path], None]) -> None:
    places = disks(tmp_path, 2)
    for node, place in enumerate(places):
        write(place / "save", node, NEWER, SECOND)
    name(places[0] / "save", 0, NEWER, SECOND)
    kept = content(places[0] / "save" / naming.final_name(NEWER))
    loss(places[1])
    refused, output = resume(tmp_path, places)
    assert refused == [["", ""]]
    (line,) = [line for line in output.splitlines() if "step 20" in line]
    assert f"[ttp] step {NEWER} is not whole on every node (node 1: save/{naming.final_name(NEWER)}" in line
    assert f"kept in {naming.aside_name(NEWER, 1)}" in line
    assert line.endswith(f"the newest that is intact on every node is step {OLDER}")
    assert [tracker.tracked_step(place / "save") for place in places] == [OLDER, OLDER]
    assert content(places[0] / "save" / naming.aside_name(NEWER, 1)) == kept
    for place in places:
        names = [path.name for path in (place / "save").iterdir()]
        assert naming.final_name(NEWER) not in names
        assert not any(map(naming.is_temporary, names))
    assert resume(tmp_path, places) == ([["", ""]], "")


def test_a_save_is_not_completed_for_last_words(tmp_path: Path) -> None:
    """Node 0 has last words of the step, so node 1's save may be incomplete."""
    places = disks(tmp_path, 2)
    folder = publish.prepare(places[0] / "save", NEWER, generation=SECOND)
    entries = []
    for file in FILES:
        path = folder / FOLDERS[0] / file
        path.parent.mkdir(exist_ok=True)
        with HashingFile(path, base_folder=folder) as opened:
            opened.write(b"last words")
        entries.append(opened.entry(f"{FOLDERS[0]}/{file}"))
    publish.publish(places[0] / "save", NEWER, entries, {FOLDERS[0]: (0,)}, 2, SECOND)
    write(places[1] / "save", 1, NEWER, SECOND)
    refused, output = resume(tmp_path, places)
    assert refused == [["", ""]]
    assert (
        f"step {NEWER} is not whole on every node (node 1: save/{naming.final_name(NEWER)}: missing)"
        in output
    )
    assert [tracker.tracked_step(place / "save") for place in places] == [OLDER, OLDER]


def test_after_a_crash_while_all_go_back(tmp_path: Path) -> None:
    """Node 2 lacks the newer step. Node 1 goes back, then node 0; the machine fails before each operation."""
    places = disks(tmp_path, 3)
    for node, place in enumerate(places[:2]):
        write(place / "save", node, NEWER, SECOND)
        name(place / "save", node, NEWER, SECOND)
    cases = []
    for call in itertools.count(1):
        case_name = f"{call:03d}"
        roots = []
        for place in places:
            roots.append(Path(shutil.copytree(place / "save", place / case_name)))
        try:
            with crash_before(call):
                assert resume_selection.follow(roots[1], Agreed(OLDER, (NEWER,))) == ""
                resume_selection.go_back(roots[0], OLDER, resume_selection.names_aside(roots[0], [NEWER]))
            break
        except Crash:
            cases.append(case_name)
        left_overs.clean(roots[0])
    assert len(cases) > 8
    refused, _ = resume(tmp_path, places, cases)
    assert refused == [["", "", ""]] * len(cases)
    for case_name in cases:
        for node, place in enumerate(places):
            assert tracker.tracked_step(place / case_name) == OLDER, case_name
            assert is_whole(place / case_name, node, OLDER, FIRST), case_name
            aside = place / case_name / naming.aside_name(NEWER, 1)
            assert aside.exists() or (node == 2 or (place / case_name / naming.final_name(NEWER)).exists()), (
                case_name
            )


@pytest.mark.robustness(
    "B8",
    "nodes with disks of their own have the same step of two saves",
    "they are not mixed: all go on from a step of one save, in a line",
)
def test_two_saves_of_a_step_are_not_mixed(tmp_path: Path) -> None:
    """All saved step 20; the job restarted at step 10, and ended after node 0 saved step 20 anew."""
    places = disks(tmp_path, 2)
    roots = [place / "save" for place in places]
    save(roots, NEWER, SECOND)
    for root in roots:
        tracker.set_under_lock(root, OLDER)  # a user set the job back by hand
    write(roots[0], 0, NEWER, THIRD)
    name(roots[0], 0, NEWER, THIRD)
    (roots[1] / naming.TRACKER).write_text(str(NEWER))
    refused, output = resume(tmp_path, places)
    assert refused == [["", ""]]
    (line,) = output.splitlines()
    assert (
        f"node 1: save/{naming.final_name(NEWER)}: is of another save of this step than that of node 0"
        in line
    )
    assert line.endswith(f"the newest that is intact on every node is step {OLDER}")
    assert [tracker.tracked_step(root) for root in roots] == [OLDER, OLDER]
    assert is_whole(roots[1].with_name("save"), 1, OLDER, FIRST)
    assert manifest.read(roots[1] / naming.aside_name(NEWER, 1)).generation == SECOND


def test_a_node_that_has_more_than_node_0_checks_all_of_it(tmp_path: Path) -> None:
    """Node 1 has pulled the whole checkpoint, and a file loaded by its ranks is damaged."""
    places = disks(tmp_path, 2)
    for node, place in enumerate(places):
        write(place / "save", node, NEWER, SECOND)
    write(places[1] / "save", 0, NEWER, SECOND)
    for node, place in enumerate(places):
        name(place / "save", node, NEWER, SECOND)
    assert resume(tmp_path, places)[0] == [["", ""]]
    assert tracker.tracked_step(places[1] / "save") == NEWER
    damaged = Path("save") / naming.final_name(NEWER) / FOLDERS[1] / naming.MODEL_FILE
    (places[1] / damaged).write_bytes(b"x")
    refused, output = resume(tmp_path, places)
    assert refused == [["", ""]]
    assert f"step {NEWER} is not whole on every node (node 1: {damaged}: 1 bytes, the manifest says" in output


def test_some_of_many_nodes_lack_a_step(tmp_path: Path) -> None:
    places = disks(tmp_path, 3)
    write(places[0] / "save", 0, NEWER, SECOND)
    name(places[0] / "save", 0, NEWER, SECOND)
    refused, output = resume(tmp_path, places)
    assert refused == [["", "", ""]]
    assert (
        f"step {NEWER} is not whole on every node (nodes 1, 2: save/{naming.final_name(NEWER)}: missing)"
        in output
    )


def test_a_shared_folder_never_has_files_of_two_saves_of_a_step(tmp_path: Path) -> None:
    """Two generations save the same step; the second ends before each operation on the disk."""
    save([tmp_path / "save"], NEWER, FIRST)
    write(tmp_path / "save", 0, NEWER, SECOND)
    for call in itertools.count(1):
        root = Path(shutil.copytree(tmp_path / "save", tmp_path / str(call)))
        with contextlib.suppress(Crash):
            with crash_before(call):
                name(root, 0, NEWER, SECOND)
            break
        left_overs.clean(root)
        folder = root / naming.final_name(NEWER)
        contents = manifest.read(folder)
        assert manifest.defects(folder, step=NEWER) == []
        for file in contents.files:
            assert (folder / file.path).read_bytes().endswith(f"generation {contents.generation}".encode())
    assert call > 10


@pytest.mark.parametrize("tracker_text", [None, "25", "ten"])
def test_trackers_of_other_disks_say_the_same(tmp_path: Path, tracker_text: str | None) -> None:
    """The framework takes the largest step that any rank reads; otherwise some ranks would load nothing."""
    places = disks(tmp_path, 2)
    path = places[1] / "save" / naming.TRACKER
    path.unlink()
    if tracker_text is not None:
        path.write_text(tracker_text)
    refused, output = resume(tmp_path, places)
    assert refused == [["", ""]]
    assert tracker.tracked_step(places[1] / "save") == OLDER
    assert output == (
        f"[ttp] node 1: save/{naming.TRACKER} named step 25, and names step {OLDER} now, as on node 0"
        if tracker_text == "25"
        else ""
    )


BEGUN = OLDER + 5


def _lose_the_newest_of_node_1(places: Sequence[Path]) -> None:
    """Leave an earlier run's step as the newest intact step of every node."""
    (places[1] / "save" / naming.final_name(NEWER) / FOLDERS[1] / naming.MODEL_FILE).unlink()


@pytest.mark.parametrize(
    ("change", "restarts", "loads"),
    [
        (_lose_the_newest_of_node_1, "11", "begun"),
        (lambda places: shutil.rmtree(places[0] / "save"), "11", "begun"),
        (lambda places: (places[1] / "save" / naming.TRACKER).unlink(), "11", "save"),
        (lambda places: None, "01", "save"),
        (lambda places: None, "00", "begun"),
    ],
    ids=["damaged", "an empty disk of node 0", "a tracker of node 1 is lost", "node 0 is new", "a start"],
)
def test_all_ranks_load_from_one_of_two_folders(
    change: Callable[[Sequence[Path]], object], restarts: str, loads: str, tmp_path: Path
) -> None:
    """--save differs from --load, and has a step of an earlier run and a later step of this job."""
    places = disks(tmp_path, 2)
    save([place / "begun" for place in places], BEGUN, SECOND)
    save([place / "save" for place in places], NEWER, THIRD)
    change(places)
    variables = {
        rank: {
            "GROUP_RANK": str(rank),
            "LOADS": f"{FOLDERS[rank]}/",
            "OF_FRAMEWORK": "1",
            environment.IS_RESTART: restarts[rank],
        }
        for rank in range(2)
    }
    ranks = start_ranks(tmp_path, 2, [Path("begun"), Path("save")], variables, dict(enumerate(places)))
    outputs = [process.communicate(timeout=300)[0] for process in ranks]
    (first,), (second,) = (heard(text) for text in outputs)
    assert [first["refused"], second["refused"]] == ["", ""], outputs
    assert [first["load"], second["load"]] == [loads, loads], outputs
    notice = "--save save has no intact step that is later than that of --load begun: the restarted job loads"
    assert (notice in outputs[0]) == (restarts == "11" and tracker.tracked_step(places[0] / "save") == OLDER)


@pytest.fixture
def unchanged(tmp_path: Path) -> Iterator[Callable[[Sequence[Path]], None]]:
    """Record the content of disks; at the end of the test it must be the same."""
    noted: dict[Path, dict[str, bytes]] = {}

    def note(places: Sequence[Path]) -> None:
        noted.update({place: content(place) for place in places})

    yield note
    assert noted
    for place, contents in noted.items():
        assert content(place) == contents


Note = Callable[[Sequence[Path]], None]


def test_a_node_without_any_checkpoint(tmp_path: Path, unchanged: Note) -> None:
    """An empty disk replaces the lost disk of node 0 or of another node: the job does not start over."""
    places = disks(tmp_path, 2)
    for node, message in (
        (0, f"save: node 0 has no checkpoint, node 1 has step {OLDER}; the nodes do not see the same folder"),
        (1, f"step {OLDER} is not whole on every node (node 1: save/{naming.final_name(OLDER)}: missing)"),
    ):
        empty = tmp_path / f"empty{node}"
        empty.mkdir()
        nodes = [empty if at == node else place for at, place in enumerate(places)]
        unchanged(nodes)
        refused, _ = resume(tmp_path, nodes)
        ((reason, other_reason),) = refused
        assert reason == other_reason
        assert message in reason
        assert "so nothing was changed: copy" in reason


def test_a_node_that_may_see_a_shared_folder_late(tmp_path: Path, unchanged: Note) -> None:
    """The node does not see the newer step; its older step is identical, so the folder may be shared."""
    places = [tmp_path / "node0", tmp_path / "node1"]
    for step in (OLDER, NEWER):
        write(places[0] / "save", 0, step, FIRST)
        write(places[0] / "save", 1, step, FIRST)
        name(places[0] / "save", 0, step, FIRST)
        if step == OLDER:
            shutil.copytree(places[0], places[1])  # including the times
    unchanged(places)
    ((reason, other_reason),) = resume(tmp_path, places)[0]
    assert reason == other_reason
    assert f"node 1: save/{naming.final_name(NEWER)}: missing; the nodes do not see the same folder" in reason


def test_a_folder_that_is_only_loaded_from_is_not_changed(tmp_path: Path, unchanged: Note) -> None:
    places = disks(tmp_path, 2)
    write(places[0] / "save", 0, NEWER, SECOND)
    name(places[0] / "save", 0, NEWER, SECOND)
    unchanged(places)
    ((reason, _),) = resume(tmp_path, places, ["elsewhere"], load="save")[0]
    assert "node 1: save/iter_0000020: missing; the nodes do not see the same folder" in reason
    (places[0] / "save" / naming.TRACKER).write_text(str(OLDER))
    (places[1] / "save" / naming.TRACKER).write_text("25")
    unchanged(places)
    ((reason, _),) = resume(tmp_path, places, ["elsewhere"], load="save")[0]
    assert f"node 1: save/{naming.TRACKER}: names step 25, that of node 0 step {OLDER}" in reason
    # The framework takes the largest number that any rank reads.
    (places[1] / "save" / naming.TRACKER).write_text("7")
    unchanged(places)
    assert resume(tmp_path, places, ["elsewhere"], load="save") == ([["", ""]], "")


def test_a_disk_that_refuses_to_go_back_is_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Node 1 cannot move the newer step aside; node 0 goes back last, so nothing changes there."""
    places = disks(tmp_path, 2)
    roots = [place / "save" for place in places]
    for node, root in enumerate(roots):
        write(root, node, NEWER, SECOND)
        name(root, node, NEWER, SECOND)
    contents_before = [content(root) for root in roots]

    def refuse(path: Path, target: Path) -> None:
        raise OSError(errno.EROFS, os.strerror(errno.EROFS), str(path))

    with monkeypatch.context() as patch:
        patch.setattr(Path, "rename", refuse)
        reason = resume_selection.follow(roots[1], Agreed(OLDER, (NEWER,)))
    assert reason == f"{roots[1] / naming.final_name(NEWER)}: Read-only file system (go_back)"
    asks = judge(roots[0], roots[0], None)
    assert next(asks)[0] == roots[0] / naming.final_name(NEWER)  # type: ignore[index]
    request = asks.send(CheckpointProblems(["node 1: damaged"], frozenset([1]), frozenset([1])))
    assert request[0] == roots[0] / naming.final_name(OLDER)  # type: ignore[index]
    assert asks.send(CheckpointProblems([], frozenset([1]), frozenset([1]))) == Agreed(OLDER, (NEWER,))
    with pytest.raises(ResumeError) as caught:
        asks.send(CheckpointProblems([f"node 1: {reason}"]))
    assert str(caught.value) == f"node 1: {reason}"
    assert [content(root) for root in roots] == contents_before


def test_machines_that_see_other_times_of_the_same_files_go_back_once(tmp_path: Path) -> None:
    """A folder that looks like two disks: both ranks execute the agreement, rank 0 last."""
    (place,) = disks(tmp_path, 1)
    root = place / "save"
    write(root, 0, NEWER, SECOND)
    name(root, 0, NEWER, SECOND)
    aside = resume_selection.names_aside(root, [NEWER])
    assert resume_selection.follow(root, Agreed(OLDER, (NEWER,))) == ""
    resume_selection.go_back(root, OLDER, aside)
    assert tracker.tracked_step(root) == OLDER
    names = sorted(path.name for path in root.iterdir())
    assert names == [naming.aside_name(NEWER, 1), naming.final_name(OLDER), naming.TRACKER]


def test_a_repeated_save_replaces_the_save_of_a_dead_process(tmp_path: Path) -> None:
    root = tmp_path / "save"
    write(root, 1, NEWER, FIRST)
    taken = regular_folder.take_on_own_disk(root, NEWER, FIRST)
    assert taken is not None
    (taken / FOLDERS[1] / naming.MODEL_FILE).write_bytes(b"half")
    write(root, 1, NEWER, FIRST)
    name(root, 1, NEWER, FIRST)
    assert is_whole(root, 1, NEWER, FIRST)
    assert sorted(path.name for path in root.iterdir()) == [naming.final_name(NEWER), naming.TRACKER]


def test_a_save_is_completed_by_one_rank_at_a_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Another rank of the node comes during the completion and changes nothing."""
    root = tmp_path / "save"
    write(root, 1, NEWER, FIRST)
    taken = regular_folder.take_on_own_disk(root, NEWER, FIRST)
    assert taken is not None
    concurrent_calls: list[bool] = []
    fsync: Callable[[Any], None] = os.fsync

    def meanwhile(descriptor: int) -> None:
        if not concurrent_calls:
            concurrent_calls.append(True)
            concurrent_calls[0] = regular_folder.complete_on_own_disk(root, NEWER, FIRST)
        fsync(descriptor)

    monkeypatch.setattr(os, "fsync", meanwhile)
    assert regular_folder.complete_on_own_disk(root, NEWER, FIRST)
    assert concurrent_calls == [False]
    assert is_whole(root, 1, NEWER, FIRST)
    assert not regular_folder.complete_on_own_disk(root, NEWER, FIRST)


def test_a_file_system_without_locks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import fcntl

    def refuse(descriptor: int, operation: int) -> None:
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

    root = tmp_path / "save"
    write(root, 1, NEWER, FIRST)
    monkeypatch.setattr(fcntl, "flock", refuse)
    assert regular_folder.complete_on_own_disk(root, NEWER, FIRST)
    assert is_whole(root, 1, NEWER, FIRST)
