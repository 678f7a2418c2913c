"""TTP_RESHAPE with pipeline chunks and with experts: bitwise equal to the framework from that checkpoint.

`test_other_sizes` covers tensor parallel sizes.
"""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from adaptor.checkpoint import manifest
from adaptor.protocol import naming
from tests.faults import harness, log_lines
from tests.faults.harness import EXPERTS, ITERATIONS, VPP2_DP2, Ended, Job, Layout, job_in
from tests.faults.same import differences
from tests.integration.test_other_sizes import BATCH, assert_same

_EP2 = (*EXPERTS, "--expert-model-parallel-size", "2", *BATCH)


def _assert_trained_from(result: Ended, tmp_path: Path, layout: Layout) -> None:
    """Assert that training from the transformed checkpoint of step 3 equals that of the unmodified
    framework.
    """
    save, begin, folder = tmp_path / "save", tmp_path / "begin", naming.final_name(3)
    assert manifest.defects(save / naming.before_reshape_name(3, 1)) == []
    shutil.copytree(save / folder, begin / folder)
    (begin / naming.TRACKER).write_text("3")
    reference_save = tmp_path / "other"
    reference = harness.run(
        Job(tmp_path / "undisturbed", layout, launcher="torchrun", load=begin, save=reference_save), code=0
    )
    assert_same(result, reference, range(4, ITERATIONS + 1))
    unequal = differences(*(root / naming.final_name(ITERATIONS) for root in (save, reference_save)))
    assert [line for line in unequal if "args./load: " not in line] == []


def _loses_a_node_of_four(tmp_path: Path, layout: Layout) -> Ended:
    """The last of four nodes is killed in step 4, and the others may take other parallel sizes."""
    job = job_in(
        tmp_path,
        layout,
        nodes=4,
        min_nodes=3,
        restarts=1,
        options=["--ttp-reshape", "auto"],
        faults=["rank=3,step=4,phase=backward,kind=agent-sigkill"],
    )
    return harness.run(job)


def test_chunks_of_a_pipeline(tmp_path: Path) -> None:
    """Two stages of two chunks each lose a node of four; the three that are left hold the model whole."""
    result = _loses_a_node_of_four(tmp_path, Layout("vpp2", 4, pp=2, extra=(*VPP2_DP2.extra, *BATCH)))
    assert sorted(result.codes) == [0, 0, 0, 137], result.log[-3000:]
    assert "TP1 PP1 in place of TP1 PP2 (TTP_RESHAPE), data-parallel size 3" in result.log
    assert (
        f"[ttp] step 3 in {tmp_path / 'save'} has TP1 PP2 VPP2, and the job has TP1 PP1: it is" in result.log
    )
    _assert_trained_from(result, tmp_path, Layout("dp3", 3, extra=("--num-layers", "4", *BATCH)))


@pytest.mark.parametrize(
    ("first_layout", "parallel", "refusal"),
    [
        (Layout("ep2", 2, replica="mirror", extra=_EP2), (), "TP1 PP1 EP2, and the job has TP1 PP1:"),
        (
            Layout("ep2-pp2", 4, pp=2, replica="mirror", extra=_EP2),
            _EP2,
            "TP1 PP2 EP2, and the job has TP1 PP1 EP2:",
        ),
    ],
    ids=["ep2-to-ep1", "ep2-pp2-to-ep2"],
)
def test_experts(first_layout: Layout, parallel: tuple[str, ...], refusal: str, tmp_path: Path) -> None:
    """A start in other expert, or pipeline, parallel sizes than those of the checkpoint."""
    save = tmp_path / "save"
    fault = "rank=1,step=4,phase=backward,kind=sigkill"
    harness.run(Job(tmp_path / "first", first_layout, save=save, save_interval=3, faults=[fault]), code=137)
    extra = parallel or (*EXPERTS, *BATCH)
    replica = "mirror" if parallel else "auto"
    layout = Layout("dp2", 2, replica=replica, extra=extra)
    job = Job(tmp_path / "job", layout, save=save, load=save, options=["--ttp-reshape", "auto"])
    result = harness.run(job, code=0)
    assert f"[ttp] step 3 in {save} has {refusal} it is transformed" in result.log
    _assert_trained_from(result, tmp_path, layout)


def test_experts_that_do_not_fit_the_nodes_that_are_left(tmp_path: Path) -> None:
    """Four ranks hold two sets of experts; three ranks cannot hold whole sets in the given size.

    The last line names a size that fits, and a start with that size continues.
    """
    result = _loses_a_node_of_four(tmp_path, Layout("ep2", 4, extra=_EP2))
    assert set(result.codes) == {137}, result.log[-3000:]
    save = tmp_path / "save"
    (line,) = {log_lines.last_line(log) for log in result.logs if "not started again" in log}
    assert line == (
        "[ttp] node 3 is lost; step 3 is saved, no finished step is lost; not started again: TTP_RESHAPE is"
        " auto, and in no tensor and pipeline parallel sizes 3 ranks can train this model with this batch:"
        " 4 experts with TP1 EP2 PP1 take 2 ranks, and 3 is not divisible by 2; start another number of"
        " nodes, or with --expert-model-parallel-size 1 (it has to divide 4 experts, and 3 = 3 ranks / TP1 /"
        f" PP1); the newest checkpoint in {save} is step 3"
    )
    assert manifest.defects(save / naming.final_name(3)) == []
    layout = Layout("moe-dp3", 3, extra=(*EXPERTS, *BATCH))
    second_job = Job(tmp_path / "again", layout, save=save, load=save, options=["--ttp-reshape", "auto"])
    resumed = harness.run(second_job, code=0)
    assert f"[ttp] step 3 in {save} has TP1 PP1 EP2, and the job has TP1 PP1: it is" in resumed.log
    _assert_trained_from(resumed, tmp_path, layout)
