"""Nodes with disks of their own go on from one step, wherever the job has ended between their saves."""

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
    """Write what the rank of a node writes of a regular save."""
    saving = root / naming.regular_name(step, generation)
    for name in FILES:
        path = saving / FOLDERS[node] / name
        path.parent.mkdir(parents=True, exist_ok=True)
        with HashingFile(path, base_folder=saving) as file:
            file.write(f"{name} of node {node}, step {step}, generation {generation}".encode())
        regular_folder.leave_note(saving, file.entry(path.relative_to(saving).as_posix()))
    return saving


def name(root: Path, node: int, step: int, generation: str) -> None:
    """Give the save its name on the disk of this node, as the first rank there does."""
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
    """Return the disks of the nodes, each with the older step in `save`."""
    places = [tmp_path / f"node{node}" for node in range(nodes)]
    save([place / "save" for place in places], OLDER, FIRST)
    return places


def resume(
    tmp_path: Path, places: Sequence[Path], names: Sequence[str] = ("save",), load: str = ""
) -> tuple[list[list[str]], str]:
    """Resume a job with a rank on each node, once with each of these save folders.

    Returns:
        For each folder, why each rank was refused, and all that was said.
    """
    folders = [Path(one) for name in names for one in (load or name, name)]
    own = {
        rank: {
            "GROUP_RANK": str(rank),
            "LOADS": " ".join(f"{FOLDERS[rank]}/{file}" for file in FILES) + f" __{rank}_",
        }
        for rank in range(len(places))
    }
    ranks = start_ranks(tmp_path, len(places), folders, own, dict(enumerate(places)))
    outputs = [process.communicate(timeout=300)[0] for process in ranks]
    said = [heard(text) for text in outputs]
    assert [len(lines) for lines in said] == [len(names)] * len(places), "\n".join(outputs)
    refused = [[lines[at]["refused"] for lines in said] for at in range(len(names))]
    (tmp_path / "store").unlink(missing_ok=True)
    return refused, "\n".join(line for text in outputs for line in text.splitlines() if "[ttp]" in line)


def is_whole(root: Path, node: int, step: int, generation: str) -> bool:
    folder = root / naming.final_name(step)
    known = manifest.read(folder)
    there = {file.path for file in known.files} >= {f"{FOLDERS[node]}/{file}" for file in FILES}
    return manifest.defects(folder, step=step) == [] and known.generation == generation and there


def content(place: Path) -> dict[str, bytes]:
    return {
        path.relative_to(place).as_posix(): path.read_bytes() for path in place.rglob("*") if path.is_file()
    }


@pytest.mark.integration
def test_wherever_a_job_ends_between_the_saves_of_its_nodes(tmp_path: Path) -> None:
    """It ends before each operation on a disk by which three nodes name a save, one after the other.

    From the moment in which node 0 has it and says so, nothing is lost; before that, all go on from the step
    before, and nothing of the newer one is left on the other nodes.
    """
    places = disks(tmp_path, 3)
    for node, place in enumerate(places):
        write(place / "save", node, NEWER, SECOND)
    reached: dict[str, bool] = {}
    for call in itertools.count(1):
        here = f"{call:03d}"
        for place in places:
            shutil.copytree(place / "save", place / here)
        try:
            with crash_before(call):
                for node, place in enumerate(places):
                    name(place / here, node, NEWER, SECOND)
            break
        except Crash:
            pass
        left_overs.clean(places[0] / here)  # as rank 0 does at each start
        reached[here] = tracker.tracked_step(places[0] / here) == NEWER
    assert sum(reached.values()) > 20
    assert len(reached) - sum(reached.values()) > 10
    refused, _ = resume(tmp_path, places, list(reached))
    assert refused == [["", "", ""]] * len(reached)
    for here, saved in reached.items():
        step, generation = (NEWER, SECOND) if saved else (OLDER, FIRST)
        assert [tracker.tracked_step(place / here) for place in places] == [step] * 3, here
        assert all(is_whole(place / here, node, step, generation) for node, place in enumerate(places)), here
        for place in places:
            names = [path.name for path in (place / here).iterdir()]
            assert not any(map(naming.is_temporary, names)), (here, names)


def _cut(place: Path) -> None:
    os.truncate(_written(place), 5)


def _flip(place: Path) -> None:
    path = _written(place)
    text = bytearray(path.read_bytes())
    text[0] ^= 1
    state = path.stat()
    path.write_bytes(text)
    os.utime(path, ns=(state.st_atime_ns, state.st_mtime_ns))  # as the disk has it, nobody has written to it


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
    """The names were exchanged, and what was replaced had not been removed: not of this save."""
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
    [
        _cut,
        _flip,
        _lose_a_file,
        _lose_a_file_and_its_note,
        _lose_notes,
        _lose_all,
        _leave_an_older_version,
    ],
)
def test_what_a_power_cut_has_taken_from_one_node(tmp_path: Path, loss: Callable[[Path], None]) -> None:
    places = disks(tmp_path, 2)
    for node, place in enumerate(places):
        write(place / "save", node, NEWER, SECOND)
    name(places[0] / "save", 0, NEWER, SECOND)
    kept = content(places[0] / "save" / naming.final_name(NEWER))
    loss(places[1])
    refused, said = resume(tmp_path, places)
    assert refused == [["", ""]]
    (line,) = [line for line in said.splitlines() if "step 20" in line]
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
    """Node 0 has last words of the step, so nobody knows whether node 1 had written all of a save."""
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
    refused, said = resume(tmp_path, places)
    assert refused == [["", ""]]
    assert (
        f"step {NEWER} is not whole on every node (node 1: save/{naming.final_name(NEWER)}: missing)" in said
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
        here = f"{call:03d}"
        roots = []
        for place in places:
            roots.append(Path(shutil.copytree(place / "save", place / here)))
        try:
            with crash_before(call):
                assert resume_selection.follow(roots[1], Agreed(OLDER, (NEWER,))) == ""
                resume_selection.go_back(roots[0], OLDER, resume_selection.names_aside(roots[0], [NEWER]))
            break
        except Crash:
            cases.append(here)
        left_overs.clean(roots[0])
    assert len(cases) > 8
    refused, _ = resume(tmp_path, places, cases)
    assert refused == [["", "", ""]] * len(cases)
    for here in cases:
        for node, place in enumerate(places):
            assert tracker.tracked_step(place / here) == OLDER, here
            assert is_whole(place / here, node, OLDER, FIRST), here
            aside = place / here / naming.aside_name(NEWER, 1)
            assert aside.exists() or (node == 2 or (place / here / naming.final_name(NEWER)).exists()), here


@pytest.mark.robustness(
    "B8",
    "nodes with disks of their own have the same step of two saves",
    "they are not mixed: all go on from a step of one save, in a line",
)
def test_two_saves_of_a_step_are_not_mixed(tmp_path: Path) -> None:
    """Step 20 was saved by all; the job began again at step 10, and ended when node 0 had saved 20 anew."""
    places = disks(tmp_path, 2)
    roots = [place / "save" for place in places]
    save(roots, NEWER, SECOND)
    for root in roots:
        tracker.set_under_lock(root, OLDER)  # a user has gone back by hand
    write(roots[0], 0, NEWER, THIRD)
    name(roots[0], 0, NEWER, THIRD)
    (roots[1] / naming.TRACKER).write_text(str(NEWER))
    refused, said = resume(tmp_path, places)
    assert refused == [["", ""]]
    (line,) = said.splitlines()
    assert (
        f"node 1: save/{naming.final_name(NEWER)}: is of another save of this step than that of node 0"
        in line
    )
    assert line.endswith(f"the newest that is intact on every node is step {OLDER}")
    assert [tracker.tracked_step(root) for root in roots] == [OLDER, OLDER]
    assert is_whole(roots[1].with_name("save"), 1, OLDER, FIRST)
    assert manifest.read(roots[1] / naming.aside_name(NEWER, 1)).generation == SECOND


def test_a_node_that_has_more_than_node_0_checks_all_of_it(tmp_path: Path) -> None:
    """Node 1 has pulled the whole checkpoint, and what its ranks load of it is damaged."""
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
    refused, said = resume(tmp_path, places)
    assert refused == [["", ""]]
    assert f"step {NEWER} is not whole on every node (node 1: {damaged}: 1 bytes, the manifest says" in said


def test_some_of_many_nodes_lack_a_step(tmp_path: Path) -> None:
    places = disks(tmp_path, 3)
    write(places[0] / "save", 0, NEWER, SECOND)
    name(places[0] / "save", 0, NEWER, SECOND)
    refused, said = resume(tmp_path, places)
    assert refused == [["", "", ""]]
    assert (
        f"step {NEWER} is not whole on every node (nodes 1, 2: save/{naming.final_name(NEWER)}: missing)"
        in said
    )


def test_a_shared_folder_never_has_files_of_two_saves_of_a_step(tmp_path: Path) -> None:
    """Two generations save the same step; the second one ends before each operation on the disk."""
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
        known = manifest.read(folder)
        assert manifest.defects(folder, step=NEWER) == []
        for file in known.files:
            assert (folder / file.path).read_bytes().endswith(f"generation {known.generation}".encode())
    assert call > 10


@pytest.mark.parametrize("known", [None, "25", "ten"])
def test_trackers_of_other_disks_say_the_same(tmp_path: Path, known: str | None) -> None:
    """The framework takes the largest number that any rank reads, and some ranks would not load at all."""
    places = disks(tmp_path, 2)
    path = places[1] / "save" / naming.TRACKER
    path.unlink()
    if known is not None:
        path.write_text(known)
    refused, said = resume(tmp_path, places)
    assert refused == [["", ""]]
    assert tracker.tracked_step(places[1] / "save") == OLDER
    assert said == (
        f"[ttp] node 1: save/{naming.TRACKER} named step 25, and names step {OLDER} now, as on node 0"
        if known == "25"
        else ""
    )


BEGUN = OLDER + 5


def _lose_the_newest_of_node_1(places: Sequence[Path]) -> None:
    """The newest step that is intact on every node is that of the earlier run then."""
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
    """--save is another one than --load, and has a step of an earlier run and a later one of this job."""
    places = disks(tmp_path, 2)
    save([place / "begun" for place in places], BEGUN, SECOND)
    save([place / "save" for place in places], NEWER, THIRD)
    change(places)
    own = {
        rank: {
            "GROUP_RANK": str(rank),
            "LOADS": f"{FOLDERS[rank]}/",
            "OF_FRAMEWORK": "1",
            environment.IS_RESTART: restarts[rank],
        }
        for rank in range(2)
    }
    ranks = start_ranks(tmp_path, 2, [Path("begun"), Path("save")], own, dict(enumerate(places)))
    outputs = [process.communicate(timeout=300)[0] for process in ranks]
    (first,), (second,) = (heard(text) for text in outputs)
    assert [first["refused"], second["refused"]] == ["", ""], outputs
    assert [first["load"], second["load"]] == [loads, loads], outputs
    again = "--save save has no intact step that is later than that of --load begun: the restarted job loads"
    assert (again in outputs[0]) == (restarts == "11" and tracker.tracked_step(places[0] / "save") == OLDER)


@pytest.fixture
def unchanged(tmp_path: Path) -> Iterator[Callable[[Sequence[Path]], None]]:
    """Note the content of disks; at the end of the test they have the same."""
    noted: dict[Path, dict[str, bytes]] = {}

    def note(places: Sequence[Path]) -> None:
        noted.update({place: content(place) for place in places})

    yield note
    assert noted
    for place, before in noted.items():
        assert content(place) == before


Note = Callable[[Sequence[Path]], None]


def test_a_node_without_any_checkpoint(tmp_path: Path, unchanged: Note) -> None:
    """An empty disk in the place of a lost one: of node 0, of another node. Nothing begins anew by itself."""
    places = disks(tmp_path, 2)
    for node, words in (
        (0, f"save: node 0 has no checkpoint, node 1 has step {OLDER}; the nodes do not see the same folder"),
        (1, f"step {OLDER} is not whole on every node (node 1: save/{naming.final_name(OLDER)}: missing)"),
    ):
        empty = tmp_path / f"empty{node}"
        empty.mkdir()
        nodes = [empty if at == node else place for at, place in enumerate(places)]
        unchanged(nodes)
        refused, _ = resume(tmp_path, nodes)
        ((why, other),) = refused
        assert why == other
        assert words in why
        assert "so nothing was changed: copy" in why


def test_a_node_that_may_see_a_shared_folder_late(tmp_path: Path, unchanged: Note) -> None:
    """It does not see the newer step; its older one is the very same, so the folder may be shared."""
    places = [tmp_path / "node0", tmp_path / "node1"]
    for step in (OLDER, NEWER):
        write(places[0] / "save", 0, step, FIRST)
        write(places[0] / "save", 1, step, FIRST)
        name(places[0] / "save", 0, step, FIRST)
        if step == OLDER:
            shutil.copytree(places[0], places[1])  # with the times
    unchanged(places)
    ((why, other),) = resume(tmp_path, places)[0]
    assert why == other
    assert f"node 1: save/{naming.final_name(NEWER)}: missing; the nodes do not see the same folder" in why


def test_a_folder_that_is_only_loaded_from_is_not_changed(tmp_path: Path, unchanged: Note) -> None:
    places = disks(tmp_path, 2)
    write(places[0] / "save", 0, NEWER, SECOND)
    name(places[0] / "save", 0, NEWER, SECOND)
    unchanged(places)
    ((why, _),) = resume(tmp_path, places, ["elsewhere"], load="save")[0]
    assert "node 1: save/iter_0000020: missing; the nodes do not see the same folder" in why
    (places[0] / "save" / naming.TRACKER).write_text(str(OLDER))
    (places[1] / "save" / naming.TRACKER).write_text("25")
    unchanged(places)
    ((why, _),) = resume(tmp_path, places, ["elsewhere"], load="save")[0]
    assert f"node 1: save/{naming.TRACKER}: names step 25, that of node 0 step {OLDER}" in why
    # The framework takes the largest number that any rank reads.
    (places[1] / "save" / naming.TRACKER).write_text("7")
    unchanged(places)
    assert resume(tmp_path, places, ["elsewhere"], load="save") == ([["", ""]], "")


def test_a_disk_that_refuses_to_go_back_is_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Node 1 cannot move the newer step aside; node 0 comes last, so nothing is changed there."""
    places = disks(tmp_path, 2)
    roots = [place / "save" for place in places]
    for node, root in enumerate(roots):
        write(root, node, NEWER, SECOND)
        name(root, node, NEWER, SECOND)
    before = [content(root) for root in roots]

    def refuse(path: Path, target: Path) -> None:
        raise OSError(errno.EROFS, os.strerror(errno.EROFS), str(path))

    with monkeypatch.context() as patch:
        patch.setattr(Path, "rename", refuse)
        why = resume_selection.follow(roots[1], Agreed(OLDER, (NEWER,)))
    assert why == f"{roots[1] / naming.final_name(NEWER)}: Read-only file system (go_back)"
    asks = judge(roots[0], roots[0], None)
    assert next(asks)[0] == roots[0] / naming.final_name(NEWER)  # type: ignore[index]
    asked = asks.send(CheckpointProblems(["node 1: damaged"], frozenset([1]), frozenset([1])))
    assert asked[0] == roots[0] / naming.final_name(OLDER)  # type: ignore[index]
    assert asks.send(CheckpointProblems([], frozenset([1]), frozenset([1]))) == Agreed(OLDER, (NEWER,))
    with pytest.raises(ResumeError) as caught:
        asks.send(CheckpointProblems([f"node 1: {why}"]))
    assert str(caught.value) == f"node 1: {why}"
    assert [content(root) for root in roots] == before


def test_machines_that_see_other_times_of_the_same_files_go_back_once(tmp_path: Path) -> None:
    """One folder that only looks like two disks: both ranks do what is agreed on, rank 0 last."""
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


def test_a_save_that_is_made_again_takes_the_place_of_one_that_a_dead_process_had_taken(
    tmp_path: Path,
) -> None:
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
    """Another rank of the node comes while it is brought to disk; it changes nothing."""
    root = tmp_path / "save"
    write(root, 1, NEWER, FIRST)
    taken = regular_folder.take_on_own_disk(root, NEWER, FIRST)
    assert taken is not None
    others: list[bool] = []
    fsync: Callable[[Any], None] = os.fsync

    def meanwhile(descriptor: int) -> None:
        if not others:
            others.append(True)
            others[0] = regular_folder.complete_on_own_disk(root, NEWER, FIRST)
        fsync(descriptor)

    monkeypatch.setattr(os, "fsync", meanwhile)
    assert regular_folder.complete_on_own_disk(root, NEWER, FIRST)
    assert others == [False]
    assert is_whole(root, 1, NEWER, FIRST)
    assert not regular_folder.complete_on_own_disk(root, NEWER, FIRST)


def test_a_file_system_without_locks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import fcntl

    def refuse(descriptor: int, how: int) -> None:
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

    root = tmp_path / "save"
    write(root, 1, NEWER, FIRST)
    monkeypatch.setattr(fcntl, "flock", refuse)
    assert regular_folder.complete_on_own_disk(root, NEWER, FIRST)
    assert is_whole(root, 1, NEWER, FIRST)
