"""What `ttp plan` predicts, and what a job then does: what it says it survives, and the bytes of its save."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from adaptor.launchers import ttp
from tests.faults import harness
from tests.faults.harness import DP2, DP2_WHOLE, DP3, MOE_EP2, PP2_DP2, TP2_DP2, Job, Layout
from tests.frameworks import prepare
from tests.frameworks.args import environment, tiny_gpt

# The framework's formula leaves biases out, which are a larger part of so small a model.
TOLERANCE = 0.03


@pytest.mark.parametrize("layout", [DP2, DP2_WHOLE, DP3, TP2_DP2, PP2_DP2, MOE_EP2], ids=lambda one: one.name)
def test_a_plan_and_its_job(
    layout: Layout, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    save = tmp_path / "save"
    for name, value in environment(TTP_DEVICE="cpu", TTP_REPLICA=layout.replica).items():
        monkeypatch.setenv(name, value)
    arguments = tiny_gpt(
        save=save,
        tp=layout.tp,
        precision=layout.precision,
        distributed_optimizer=layout.distributed_optimizer,
        extra=layout.arguments,
    )
    script = str(prepare.megatron_lm() / "pretrain_gpt.py")
    ranks = ("--nproc-per-node", str(layout.processes))
    assert ttp.main(["plan", "--json", *ranks, "--", script, *arguments]) == 0
    plan = json.loads(capfd.readouterr().out)["plan"]

    fault = "rank=1,step=4,phase=backward,kind=sigkill"
    ended = harness.run(Job(tmp_path / "job", layout, save=save, faults=[fault]))
    said = re.search(r"protected from step 1 \((?:[\w ]+); (.*)\)", ended.log)
    assert said is not None, ended.log[-3000:]
    (chosen,) = (row for row in plan["replicas"] if row["chosen"])
    assert chosen["survives"] == said[1]
    (incident,) = (tmp_path / "job" / "logs").glob("*/incidents/*.json")
    written = json.loads(incident.read_text())["bytes"]
    assert plan["save"] == pytest.approx(written, rel=TOLERANCE)
