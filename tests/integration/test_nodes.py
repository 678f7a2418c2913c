"""Two agents, on one machine, each with half of the workers."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from adaptor.checkpoint import left_overs
from adaptor.protocol.records import unix
from tests.certificates import Authority
from tests.faults import harness, namespaces, outcome
from tests.faults.fault import AFTER_THE_VERDICTS
from tests.faults.harness import DP2, DP4, Job, job_in
from tests.faults.scenario import BaselineOf, assert_as_saved, assert_last_words, ends, restarts

# A node that falls silent is noticed after 3 s (`wire`), where the machine has nothing else to do. By what
# is waited for otherwise it would take two minutes (TTP_HANG, TTP_OT).
NOTICED_S = 60.0


def test_both_agents_restart_together(tmp_path: Path, baseline_of: BaselineOf) -> None:
    """A worker of either node dies, one after the other, with TLS between the two nodes."""
    job = job_in(
        tmp_path,
        DP4,
        nodes=2,
        restarts=2,
        faults=[
            "rank=1,step=3,phase=backward,kind=sigkill",
            "rank=2,step=6,phase=backward,kind=sigkill,restart=1",
        ],
        environment=Authority(tmp_path / "signer").settings(),
    )
    result = harness.run(job, code=0)
    assert outcome.steps_in(tmp_path / "save") == [2, 5, harness.ITERATIONS]
    assert_as_saved(tmp_path / "save", (2,), baseline_of(DP4))
    outcome.assert_same_training(result, baseline_of(DP4).records)


def test_the_only_worker_of_a_node_ends_in_the_middle(tmp_path: Path, baseline_of: BaselineOf) -> None:
    """As at the end of a script; the agent stays, because the other node's worker still runs."""
    job = job_in(
        tmp_path, DP2, nodes=2, restarts=1, faults=["rank=0,step=6,phase=backward,kind=sys.exit,code=0"]
    )
    restarts(job, baseline_of(DP2), saved={5})


@pytest.mark.parametrize(
    ("rank", "kind"),
    [(0, "agent-sigterm"), (1, "tree-sigterm")],
    ids=["node0", "node1-and-its-workers"],
)
def test_one_node_gets_sigterm(rank: int, kind: str, tmp_path: Path, baseline_of: BaselineOf) -> None:
    """The job needs the node, so the whole job saves and ends, even with restarts left."""
    job = job_in(tmp_path, DP2, nodes=2, restarts=1, faults=[f"rank={rank},step=5,phase=forward,kind={kind}"])
    result, _ = ends(job, baseline_of(DP2), code=143, saved={4, 5})
    for log in result.logs:
        assert f"ttprun on node {rank}" in log or kind == "tree-sigterm"
        assert "was told to end by SIGTERM; step " in log
    assert all(line["restart"] == 0 for lines in result.records.values() for line in lines)


def test_the_agent_with_the_controller_is_killed(tmp_path: Path, baseline_of: BaselineOf) -> None:
    """Rank 0 is killed with the agent: the other node takes over, and saves its shards."""
    job = job_in(
        tmp_path, DP4, nodes=2, restarts=1, faults=["rank=0,step=6,phase=backward,kind=agent-sigkill"]
    )
    result = harness.run(job, code=137)
    assert (
        result.logs[1]
        .rstrip()
        .endswith(
            "[ttp] node 0 is lost; step 5 is saved, no finished step is lost; "
            "not started again: no spare node takes the place of node 0; "
            f"the newest checkpoint in {job.save} is step 5"
        )
    )
    assert_last_words(tmp_path / "save", 5, baseline_of(DP4))


def test_the_node_that_takes_over_is_killed_while_it_saves(tmp_path: Path, baseline_of: BaselineOf) -> None:
    """With TLS between the agents, and certificates at every listener."""
    save = tmp_path / "save"
    job = Job(
        tmp_path / "job",
        DP4,
        save=save,
        nodes=4,
        faults=[
            "rank=0,step=6,phase=backward,kind=agent-sigkill",
            "rank=1,phase=dump,kind=agent-sigkill",
        ],
        environment=Authority(tmp_path / "signer").settings(),
    )
    result = harness.run(job, code=137)
    for log in result.logs[2:]:
        assert "[ttp] node 0 is lost, node 1 is lost; step 5 is saved, no finished step is lost" in log
    (left_over,) = left_overs.clean(save)  # what the next start does
    assert left_over.startswith("iter_0000005_tmp1_")
    assert_last_words(save, 5, baseline_of(DP4))


def test_the_agent_that_publishes_is_killed(tmp_path: Path, baseline_of: BaselineOf) -> None:
    """The folder has its name, the tracker is old: the next node takes over, and the tracker follows."""
    save = tmp_path / "save"
    job = Job(
        tmp_path / "job",
        DP2,
        save=save,
        nodes=2,
        faults=["rank=1,step=6,phase=backward,kind=sigterm"],
        publishing="0 announce sigkill",
    )
    result = harness.run(job)
    assert result.codes == (137, 143), result.log[-3000:]
    assert "[test] sigkill at announce" in result.logs[0]
    # With one rank less the one that is left may be at the door of the next step.
    steps = outcome.steps_in(save)
    assert steps in ([5], [5, 6], [6])
    step = steps[-1]
    outcome_text = (
        f"rank 1 was told to end by SIGTERM; step {step} is saved, no finished step is lost; the newest"
    )
    assert outcome_text in result.logs[1]
    assert_last_words(save, step, baseline_of(DP2))


def test_the_disk_fails_the_agent_that_publishes(tmp_path: Path, baseline_of: BaselineOf) -> None:
    """The disk fails on one node only: the agent of the other node publishes."""
    job = job_in(
        tmp_path,
        DP2,
        nodes=2,
        faults=["rank=1,step=6,phase=backward,kind=sigkill"],
        publishing="0 move-in error",
    )
    result = harness.run(job, code=137)
    for log in result.logs:
        assert (
            "step 5 is saved, no finished step is lost; node 0 could not make or publish its folder: " in log
        )
        assert "Read-only file system" in log
    assert_last_words(tmp_path / "save", 5, baseline_of(DP2))


def test_the_agent_that_publishes_is_stopped(tmp_path: Path, baseline_of: BaselineOf) -> None:
    """The other agent takes over the folder; the stopped agent later finds nothing to do."""
    save = tmp_path / "save"
    job = Job(
        tmp_path / "job",
        DP2,
        save=save,
        nodes=2,
        options=["--ttp-ot", "24"],
        faults=["rank=0,step=6,phase=backward,kind=sigkill"],
        publishing="1 name sigstop",
    )
    result = harness.run(job, code=137)
    for log in result.logs:
        assert (
            "[ttp] rank 0 was ended by SIGKILL; step 5 is saved, no finished step is lost; "
            "the save folder does not answer on node 1" in log
        )
    assert_last_words(save, 5, baseline_of(DP2))


@pytest.mark.skipif(not namespaces.permitted(), reason="this user may not make network namespaces")
@pytest.mark.parametrize("kind", ["cut", "unplugged"])
def test_a_network_that_falls_silent(kind: str, tmp_path: Path, baseline_of: BaselineOf) -> None:
    """No connection is closed, and no packet arrives. Both sides save the same step into the same folder.

    The network's return after the verdicts changes nothing: each side counts the other as lost, and a job
    with fixed node numbers does not restart with a node missing.
    """
    save = tmp_path / "save"
    with namespaces.two() as network:
        job = Job(
            tmp_path / "job",
            DP2,
            save=save,
            nodes=2,
            network=network,
            restarts=1,
            environment={"TTP_TLS": "plain"},
            faults=[f"rank=1,step=6,phase=forward,kind={kind},heals={AFTER_THE_VERDICTS}"],
        )
        result = harness.run(job, code=137)
    for node, log in enumerate(result.logs):
        assert f"node {1 - node} is lost; step 5 is saved, no finished step is lost" in log
    reports = [json.loads(path.read_text()) for path in (job.out / "logs").glob("*/incidents/*.json")]
    assert len(reports) == 2, "of one controller on each side"
    for report in reports:
        assert 0 < unix(report["began"]) - result.stamps[0]["time"] < NOTICED_S
    assert outcome.steps_in(save) == [5]
    assert_last_words(save, 5, baseline_of(DP2))


@pytest.mark.skipif(not namespaces.permitted(), reason="this user may not make network namespaces")
def test_slow_nodes_and_links_are_not_lost(tmp_path: Path, baseline_of: BaselineOf) -> None:
    """A cut that is mended, links that are slow afterwards, an agent that stands still for a while."""
    with namespaces.two() as network:
        job = job_in(
            tmp_path,
            DP2,
            nodes=2,
            network=network,
            options=["--ttp-hang", "8"],
            environment={"TTP_TLS": "plain"},
            faults=[
                "rank=1,step=3,phase=forward,kind=short-cut",
                "rank=1,step=5,phase=forward,kind=agent-pause",
            ],
        )
        result = harness.run(job, code=0)
    assert not list((job.out / "logs").glob("*/incidents/*"))
    outcome.assert_same_training(result, baseline_of(DP2).records)
