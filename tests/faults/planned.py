"""Compares the prediction of `ttp plan` with a job: the survived faults, and the bytes of the save."""

from __future__ import annotations

import json
import re
import sys

import pytest

from tests.faults import harness, warm
from tests.faults.harness import Ended
from tests.frameworks import args, prepare

# The framework's formula omits biases, and parts written in place begin on a page of the disk: for a model as
# small as these, both matter.
TOLERANCE = 0.05


def assert_as_planned(result: Ended) -> None:
    """Assert that a job with last words in a single incident matches the prediction of `ttp plan` for its
    layout.
    """
    job = result.job
    script = str((job.framework or prepare.megatron_lm()) / "pretrain_gpt.py")
    command = [sys.executable, "-m", "adaptor.launchers.cli.ttp", "plan", "--json"]
    command += ["--nproc-per-node", str(job.layout.processes), "--", script, *harness.training(job)]
    environment = args.environment(TTP_DEVICE="cpu", TTP_REPLICA=job.layout.replica)
    planned = warm.run(command, env=environment, code=0)
    plan = json.loads(planned.stdout)["plan"]

    protection = re.search(r"protected from step 1 \((?:[\w ]+); (.*)\)", result.log)
    assert protection is not None, result.log[-3000:]
    (chosen,) = (row for row in plan["replicas"] if row["chosen"])
    assert chosen["survives"] == protection[1]
    (incident,) = (job.out / "logs").glob("*/incidents/*.json")
    saved = json.loads(incident.read_text())["bytes"]
    assert plan["save"] == pytest.approx(saved, rel=TOLERANCE), saved
