"""`TTP_LOCAL_COPY`: no barrier before the update; a rank that is ahead of the others goes back."""

from __future__ import annotations

import json
from collections.abc import Collection, Sequence
from pathlib import Path

import pytest

from tests.faults.harness import DP2, DP2_FP16, DP2_WHOLE, DP3, DP4, FP16_SKIPS, Ended, Layout, job_in
from tests.faults.scenario import BaselineOf, ends

FROM_THE_COPY = "from-the-local-copy"


def _ends(
    tmp_path: Path,
    layout: Layout,
    faults: Sequence[str],
    baseline_of: BaselineOf,
    *,
    code: int = 137,
    saved: Collection[int],
    by_argument: bool = False,
) -> Ended:
    job = job_in(
        tmp_path,
        layout,
        options=[] if by_argument else ["--ttp-local-copy", "True"],
        arguments=["--local-copy-os"] if by_argument else [],
        faults=faults,
    )
    result, _ = ends(job, baseline_of(layout), code=code, saved=saved)
    (copy_line,) = [line for line in result.said if "local copy" in line]
    assert copy_line.startswith(
        "[ttp] a local copy of the optimizer state is made before each update, in place of the barrier"
        " (TTP_LOCAL_COPY): "
    )
    return result


def _noted(result: Ended, event_type: str) -> list[tuple[int, str]]:
    """Rank and detail of what is on the timeline of the incident."""
    (report,) = (result.job.out / "logs").glob("*/incidents/*.json")
    return [
        (event["rank"], event["data"].get("detail", ""))
        for event in json.loads(report.read_text())["events"]
        if event["type"] == event_type
    ]


# On both sides of each boundary of the window. The other rank may have come to the door or not.
@pytest.mark.parametrize(
    ("rank", "phase", "kind", "saved"),
    [
        (0, "door-before", "sigkill", {5, 6}),
        (1, "door-after", "sigkill", {5, 6}),
        (0, "copy", "sigkill", {5, 6}),
        (1, "update", "sigkill", {5, 6}),
        (0, "gather", "sigkill", {5, 6}),
        (1, "between", "sigkill", {6}),
        (0, "copy", "exception", {5, 6}),
        (1, "update", "exception", {5, 6}),
        (0, "gather", "exception", {5, 6}),
    ],
)
def test_at_every_boundary_of_the_update_window(
    rank: int, phase: str, kind: str, saved: set[int], tmp_path: Path, baseline_of: BaselineOf
) -> None:
    faults = [f"rank={rank},step=6,phase={phase},kind={kind}"]
    _ends(tmp_path, DP2, faults, baseline_of, code=137 if kind == "sigkill" else 1, saved=saved)


@pytest.mark.parametrize("layout", [DP2, DP2_WHOLE, DP3, DP2_FP16], ids=lambda layout: layout.name)
def test_an_update_that_breaks_off_is_undone(layout: Layout, tmp_path: Path, baseline_of: BaselineOf) -> None:
    """The other holder of what was half updated dies at the same moment: only the copy is left."""
    step = FP16_SKIPS + 1
    faults = [f"rank=0,step={step},phase=update,kind=exception,also=1"]
    result = _ends(tmp_path, layout, faults, baseline_of, saved={step - 1})
    assert (0, f"step {step - 1}") in _noted(result, FROM_THE_COPY)
    assert f"step {step - 1} is saved, step {step} was not finished on every rank" in result.last_line


def test_a_rank_that_is_ahead_goes_back(tmp_path: Path, baseline_of: BaselineOf) -> None:
    """Rank 0 has finished step 6, rank 1 dies, and its second half on rank 3 has not come to the norm."""
    faults = [
        "rank=3,step=6,phase=norm,kind=deadlock",
        "rank=0,step=6,phase=gather,kind=pause,also=1",
    ]
    result = _ends(tmp_path, DP4, faults, baseline_of, saved={5}, by_argument=True)
    assert _noted(result, FROM_THE_COPY) == [(0, "step 5")]
    assert "step 5 is saved, step 6 was not finished on every rank" in result.last_line
