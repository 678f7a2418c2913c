"""What `ttp plan` predicts of a job against what it did: what it survives, and the bytes of its save."""

from __future__ import annotations

import json
import re
import sys

import pytest

from tests.faults import harness, warm
from tests.faults.harness import Ended
from tests.frameworks import args, prepare

# The framework's formula leaves biases out, and what holders write in place begins on a page of the disk:
# both are a larger part of so small a model.
TOLERANCE = 0.05


def assert_as_planned(ended: Ended) -> None:
    """A job that saved its last words in one incident did as the plan of its layout says."""
    job = ended.job
    script = str((job.framework or prepare.megatron_lm()) / "pretrain_gpt.py")
    command = [sys.executable, "-m", "adaptor.launchers.cli.ttp", "plan", "--json"]
    command += ["--nproc-per-node", str(job.layout.processes), "--", script, *harness.training(job)]
    environment = args.environment(TTP_DEVICE="cpu", TTP_REPLICA=job.layout.replica)
    done = warm.run(command, env=environment)
    assert done.returncode == 0, done.stdout + done.stderr
    plan = json.loads(done.stdout)["plan"]

    said = re.search(r"protected from step 1 \((?:[\w ]+); (.*)\)", ended.log)
    assert said is not None, ended.log[-3000:]
    (chosen,) = (row for row in plan["replicas"] if row["chosen"])
    assert chosen["survives"] == said[1]
    (incident,) = (job.out / "logs").glob("*/incidents/*.json")
    saved = json.loads(incident.read_text())["bytes"]
    assert plan["save"] == pytest.approx(saved, rel=TOLERANCE), saved
