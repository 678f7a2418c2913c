"""Jobs with `--nnodes MIN:MAX`: after the loss of a node the others continue in another size.

Each node has one rank.
"""

from __future__ import annotations

import json
import re
import shlex
import shutil
import sys
from pathlib import Path

import pytest

from adaptor.__main__ import main
from adaptor.checkpoint import manifest, tracker
from adaptor.protocol import naming
from tests.faults import harness, log_lines, namespaces, outcome, warm
from tests.faults.harness import ITERATIONS, Ended, Job, Layout, job_in
from tests.faults.same import differences

BATCH = ("--global-batch-size", "12")
SAMPLES = ("--train-samples", "64", "--lr-warmup-iters", "0")


def run(tmp_path: Path, nodes: int, *extra: str, tp: int = 1, **job_options: object) -> Ended:
    """Run a job of one rank on each of `nodes`; it saves in the folder `save`."""
    layout = Layout(f"dp{nodes // tp}", nodes, tp=tp, extra=extra)
    return harness.run(job_in(tmp_path, layout, nodes=nodes, **job_options))


def lose_a_node(
    tmp_path: Path, nodes: int, *extra: str, tp: int = 1, lost: int | None = None, **job_options: object
) -> Ended:
    """Run a job of one rank on each of `nodes`, and kill node `lost` in step 4, by default the last node."""
    faults = [f"rank={nodes - 1 if lost is None else lost},step=4,phase=backward,kind=agent-sigkill"]
    return run(tmp_path, nodes, *extra, tp=tp, min_nodes=nodes - 1, restarts=1, faults=faults, **job_options)


def undisturbed(
    tmp_path: Path, nodes: int, step: int, *extra: str, tp: int = 1, saves: bool = False
) -> Ended:
    """Run the unmodified framework with so many ranks, from the job's checkpoint of `step`.

    `saves`: save the last step, in the folder `other`. A torch_dist save starts one more process for each
    rank, of two seconds of CPU time.
    """
    begin = tmp_path / "begin"
    folder = naming.final_name(step)
    shutil.copytree(tmp_path / "save" / folder, begin / folder)
    (begin / naming.TRACKER).write_text(str(step))
    job = Job(
        tmp_path / "undisturbed",
        Layout(f"dp{nodes}", nodes, tp=tp, extra=extra),
        launcher="torchrun",
        load=begin,
        save=tmp_path / "other" if saves else None,
    )
    return harness.run(job, code=0)


def assert_same(result: Ended, reference: Ended, steps: range) -> None:
    """Assert that these steps in the new size equal the reference run in that size, bit for bit."""
    for rank, lines in reference.records.items():
        trained = [line for line in result.records[rank] if line["iteration"] in steps]
        assert [line["iteration"] for line in trained] == list(steps)
        for actual, expected in zip(trained, lines, strict=True):
            fields = ("iteration", "losses", "grad_norm", "skipped")
            assert {name: actual[name] for name in fields} == {name: expected[name] for name in fields}


@pytest.mark.parametrize(
    ("nodes", "kind"), [(4, "torch"), (2, "torch_dist")], ids=["even-to-odd", "even-to-one"]
)
def test_one_node_less(nodes: int, kind: str, tmp_path: Path) -> None:
    """Replicas change, too: split with an even data-parallel size, mirror with an odd one, none with 1."""
    extra = (*BATCH, "--ckpt-format", kind)
    result = lose_a_node(tmp_path, nodes, *extra)
    assert sorted(result.codes) == [0] * (nodes - 1) + [137], result.log[-3000:]
    size = nodes - 1
    assert (
        f"[ttp] {size} node{'s' * (size > 1)} of {size} to {nodes}, {nodes} before: data-parallel size"
        f" {size}, global batch 12: {12 // size} micro-batches of 1 on each data-parallel rank" in result.log
    )
    assert "restart 1 of 1: from step 3, 0 steps lost" in result.log
    reference = undisturbed(tmp_path, size, 3, *extra, saves=True)
    assert_same(result, reference, range(4, ITERATIONS + 1))
    last = naming.final_name(ITERATIONS)
    unequal = differences(tmp_path / "save" / last, tmp_path / "other" / last)
    assert [line for line in unequal if "args./load: " not in line] == []


def test_node_0_less(tmp_path: Path) -> None:
    """Node 1 opens a rendezvous store in the place of the store that is lost with node 0."""
    result = lose_a_node(tmp_path, 3, *BATCH, lost=0)
    assert sorted(result.codes) == [0, 0, 137], result.log[-3000:]
    assert "[ttp] this node was node 1, and is node 0 from now on" in result.log
    assert "[ttp] 2 nodes of 2 to 3, 3 before: data-parallel size 2, global batch 12" in result.log
    assert "restart 1 of 1: from step 3, 0 steps lost" in result.log
    assert_same(result, undisturbed(tmp_path, 2, 3, *BATCH), range(4, ITERATIONS + 1))


def test_node_0_comes_back(tmp_path: Path) -> None:
    """The other node waits at its own store, and node 0 gets the store's address from the lease."""
    faults = ["rank=0,step=4,phase=backward,kind=agent-sigkill"]
    result = run(tmp_path, 2, *BATCH, min_nodes=2, returning_nodes=(0,), restarts=1, faults=faults)
    assert result.codes == (137, 0, 0), result.log[-3000:]
    assert ": this node asks to be taken in there" in result.logs[2]
    assert "restart 1 of 1: from step 3, 0 steps lost" in result.logs[1]
    assert_same(result, undisturbed(tmp_path, 2, 3, *BATCH), range(4, ITERATIONS + 1))


@pytest.mark.skipif(not namespaces.permitted(), reason="this user may make no network namespace")
def test_one_side_of_a_cut_network_goes_on(tmp_path: Path) -> None:
    """Either could go on alone, and both have saved: the lease of the save folder decides.

    The side that goes on trains for longer than the other side needs to begin.
    """
    with namespaces.two() as network:
        result = run(
            tmp_path,
            2,
            *BATCH,
            min_nodes=1,
            restarts=1,
            network=network,
            environment={"TTP_TLS": "plain"},
            faults=[
                "rank=0,step=4,phase=backward,kind=cut",
                *(f"rank=0,step={step},phase=forward,kind=pause,restart=1" for step in (4, 5, 6)),
            ],
        )
    assert sorted(bool(code) for code in result.codes) == [False, True], result.log[-5000:]
    assert result.log.count("restart 1 of 1: from step 3, 0 steps lost") == 1
    # Its new workers are refused, or it sees the lease while it waits for other nodes.
    refused = r"not started again: --save is .*: the job of process \d+ on .*, saves there"
    excluded = r"nodes cannot meet again, for the job of process \d+ on .*, saves in --save now, and goes on "
    assert re.search(f"{refused}|{excluded}", result.log)
    assert_same(result, undisturbed(tmp_path, 1, 3, *BATCH), range(4, ITERATIONS + 1))


@pytest.mark.skipif(not namespaces.permitted(), reason="this user may make no network namespace")
def test_node_0_ends_when_the_others_go_on_behind_a_cut_network(tmp_path: Path) -> None:
    """Node 0 would wait for other nodes for up to `join_timeout`, 600 s."""
    with namespaces.star(3, cut=0) as network:
        result = run(
            tmp_path,
            3,
            *BATCH,
            min_nodes=2,
            restarts=1,
            network=network,
            environment={"TTP_TLS": "plain"},
            faults=["rank=0,step=4,phase=backward,kind=cut"],
        )
    assert result.codes[1:] == (0, 0), result.log[-5000:]
    assert result.codes[0], result.log[-5000:]
    assert re.search(
        r"; nodes cannot meet again, for the job of process \d+ on .*, saves in --save now,"
        r" and goes on without this node; ",
        result.logs[0],
    )
    assert_same(result, undisturbed(tmp_path, 2, 3, *BATCH), range(4, ITERATIONS + 1))


@pytest.mark.skipif(not namespaces.permitted(), reason="this user may make no network namespace")
def test_a_spare_node_in_the_place_of_node_0_ends_when_the_others_go_on(tmp_path: Path) -> None:
    """It has no lease, but looks at that of the others, every 10 s, while it waits for nodes."""
    with namespaces.star(4, cut=3) as network:
        result = run(
            tmp_path,
            3,
            *BATCH,
            min_nodes=2,
            spares=1,
            restarts=1,
            network=network,
            environment={"TTP_TLS": "plain"},
            options=("--ttp-online", "60", "--ttp-spares", "0"),
            faults=[
                "rank=0,step=2,phase=backward,kind=agent-sigkill",
                "rank=0,step=6,phase=backward,kind=cut,restart=-1",
                *(f"rank=0,step={step},phase=forward,kind=pause,restart=1" for step in (6, 7)),
            ],
        )
    assert result.codes[:3] == (137, 0, 0), result.log[-5000:]
    assert result.codes[3], result.log[-5000:]
    line = log_lines.last_line(result.logs[3])
    assert " saves in --save now, and goes on without this node; " in line
    assert "restart 1 of 1: from step 5, 0 steps lost" in result.logs[1]


def test_a_batch_that_the_nodes_cannot_divide_ends_the_job(tmp_path: Path) -> None:
    """The job is saved, and the last line names a batch size that fits."""
    result = lose_a_node(tmp_path, 3, "--global-batch-size", "9")
    assert set(result.codes) == {137}, result.log[-3000:]
    outcome.assert_saved(tmp_path / "save", 3)
    (line,) = {log_lines.last_line(log) for log in result.logs if "cannot be divided" in log}
    assert line == (
        "[ttp] node 2 is lost; step 3 is saved, no finished step is lost; not started again: 2 nodes: the"
        " data-parallel size is 2, and --global-batch-size 9 cannot be divided by 2 times --micro-batch-size"
        " 1; start another number of nodes, give another batch, or --ttp-batch nearest with --train-samples;"
        f" the newest checkpoint in {tmp_path / 'save'} is step 3"
    )


def test_the_nearest_batch(tmp_path: Path) -> None:
    """3 steps of 9 samples, then of 8: the 64 samples are over after 4 more steps, and a rest of 5.

    From an odd data-parallel size to an even one.
    """
    batch = ("--global-batch-size", "9")
    result = lose_a_node(tmp_path, 3, *batch, *SAMPLES, options=["--ttp-batch", "nearest"])
    assert sorted(result.codes) == [0, 0, 137], result.log[-3000:]
    assert (
        "data-parallel size 2, global batch 8 in place of 9 (TTP_BATCH): 4 micro-batches of 1" in result.log
    )
    consumed = map(int, re.findall(r"consumed samples: +(\d+)", result.log))
    assert sorted(consumed) == [9, 18, 27, 35, 43, 51, 59]
    reference = undisturbed(tmp_path, 2, 3, "--global-batch-size", "8", *SAMPLES, "--exit-interval", "7")
    assert_same(result, reference, range(4, 8))


def test_a_node_that_comes_later(tmp_path: Path) -> None:
    """The job saves the newest step and restarts with the new node, without using up a restart.

    The new address sorts before that of the other node, which still stays node 0, with the job's history.
    """
    result = run(
        tmp_path,
        2,
        *BATCH,
        min_nodes=1,
        late_nodes=1,
        addresses=("127.0.0.2", "127.0.0.1"),
        options=("--ttp-online", "60", "--ttp-spares", "0"),
        faults=["rank=0,step=4,phase=forward,kind=until-told,restart=-2"],
    )
    assert result.codes == (0, 0), result.log[-3000:]
    assert "[ttp] 1 more node is there; step 3 is saved, no finished step is lost" in result.logs[0]
    assert "[ttp] 2 nodes of 1 to 2, 1 before: data-parallel size 2, global batch 12: 6" in result.logs[0]
    assert "start on more nodes: from step 3, 0 steps lost" in result.logs[0]
    assert_same(result, undisturbed(tmp_path, 2, 3, *BATCH), range(4, ITERATIONS + 1))
    status = json.loads((tmp_path / "job/logs/job/status.json").read_text())
    assert (status["generation"], status["incidents"]) == (2, 1)


def test_a_node_that_comes_in_the_place_of_another(tmp_path: Path) -> None:
    """The new node learns that no restart is left: after the next fault all nodes end alike."""
    result = run(
        tmp_path,
        3,
        *BATCH,
        min_nodes=2,
        late_nodes=1,
        restarts=1,
        addresses=("127.0.0.2", "127.0.0.3", "127.0.0.1"),
        options=["--ttp-online", "0"],
        faults=[
            "rank=1,step=4,phase=backward,kind=agent-sigkill",
            "rank=1,step=7,phase=backward,kind=exception,restart=-2",
        ],
    )
    assert result.codes == (1, 137, 1), result.log[-3000:]
    first, _, last = result.logs
    assert "restart 1 of 1: from step 3, 0 steps lost" in first
    assert "restart 1 of 1: " not in last
    assert [
        log.rstrip().endswith(f"the newest checkpoint in {tmp_path / 'save'} is step 6")
        for log in (first, last)
    ] == [True, True]


def test_a_model_that_does_not_fit_the_nodes_that_are_left(tmp_path: Path) -> None:
    """The last line has the command for a checkpoint that fits, and the framework resumes from its output."""
    result = lose_a_node(tmp_path, 4, *BATCH, tp=2)
    assert set(result.codes) == {137}, result.log[-3000:]
    (line,) = {log_lines.last_line(log) for log in result.logs if "adaptor transform" in log}
    assert "; not started again: 3 nodes with 3 ranks: the model (tensor times pipeline times context" in line
    assert " takes 2, of which 3 is no multiple; start 4 nodes, or run `python -m adaptor transform" in line
    sizes = "--tensor-model-parallel-size 1 --pipeline-model-parallel-size 1"
    transformed = tmp_path / "save-tp1-pp1"
    assert (
        f" and start with {sizes} --load {transformed} --save {transformed}; the newest checkpoint in "
        in line
    )
    (command,) = re.findall("`python (.*)`", line)
    warm.run([sys.executable, *shlex.split(command)], code=0)
    job = Job(
        tmp_path / "smaller",
        Layout("dp3", 3, extra=BATCH),
        launcher="torchrun",
        load=transformed,
        save=transformed,
    )
    resumed = harness.run(job, code=0)
    assert [line["iteration"] for line in resumed.records[0]] == list(range(4, ITERATIONS + 1))


def test_a_model_that_is_transformed_to_fit(tmp_path: Path) -> None:
    """The job continues in other sizes from the saved step, and no checkpoint is lost."""
    result = lose_a_node(tmp_path, 4, *BATCH, tp=2, options=["--ttp-reshape", "auto"])
    assert sorted(result.codes) == [0, 0, 0, 137], result.log[-3000:]
    save, folder = tmp_path / "save", naming.final_name(3)
    assert (
        "3 nodes of 3 to 4, 4 before: TP1 PP1 in place of TP2 PP1 (TTP_RESHAPE), data-parallel size 3"
        in result.log
    )
    assert f"[ttp] step 3 in {save} has TP2 PP1, and the job has TP1 PP1: it is transformed" in result.log
    assert "restart 1 of 1: from step 3, 0 steps lost" in result.log
    assert_same(result, undisturbed(tmp_path, 3, 3, *BATCH, saves=True), range(4, ITERATIONS + 1))
    last = naming.final_name(ITERATIONS)
    unequal = differences(save / last, tmp_path / "other" / last)
    assert [line for line in unequal if "args./load: " not in line] == []
    # What was saved is there, intact; made from it by the command, the checkpoint is the same.
    kept = save / naming.before_reshape_name(3, 1)
    assert manifest.defects(kept) == manifest.defects(save / folder) == []
    assert [name for name in tracker.entry_names(save) if naming.is_reshape(name)] == []
    (tmp_path / "kept").mkdir()
    shutil.copytree(kept, tmp_path / "kept" / folder)
    sizes = ("--tp", "1", "--pp", "1", "--dp", "3", "--step", "3")
    assert main(["transform", str(tmp_path / "kept"), str(tmp_path / "made"), *sizes]) == 0
    assert differences(tmp_path / "made" / folder, save / folder) == []
    # Without the flag the sizes that the job had are refused now, and nothing begins anew.
    second = harness.run(Job(tmp_path / "again", Layout("tp2", 2, tp=2), save=save, load=save), code=2)
    assert f"ttprun: error: step 8 in {save} has TP1 PP1, and the job has TP2 PP1: give --ttp-r" in second.log


def test_a_model_takes_its_own_sizes_again(tmp_path: Path) -> None:
    """3 nodes begin in other sizes than the arguments say; with a fourth node the job takes the original
    sizes.

    In the sharded format the optimizer's state is `dp_reshardable`, which the framework itself cannot load in
    other sizes. `test_a_model_that_is_transformed_to_fit` uses the format `torch`.
    """
    extra = (*BATCH, "--ckpt-format", "torch_dist")
    result = run(
        tmp_path,
        4,
        *extra,
        tp=2,
        min_nodes=3,
        late_nodes=1,
        options=["--ttp-reshape", "tp=1,pp=1"],
        faults=["rank=0,step=4,phase=forward,kind=until-told,restart=-2"],
    )
    assert result.codes == (0,) * 4, result.log[-3000:]
    assert (
        "[ttp] 3 nodes of 3 to 4: TP1 PP1 in place of TP2 PP1 (TTP_RESHAPE), data-parallel size 3"
        in result.log
    )
    assert "[ttp] 4 nodes of 3 to 4, 3 before: data-parallel size 2, global batch 12: 6" in result.log
    assert "has TP1 PP1, and the job has TP2 PP1: it is transformed" in result.log
    assert "start on more nodes: from step 3, 0 steps lost" in result.log
    assert manifest.defects(tmp_path / "save" / naming.before_reshape_name(3, 1)) == []
    assert_same(result, undisturbed(tmp_path, 4, 3, *extra, tp=2), range(4, ITERATIONS + 1))
