"""Unmodified Megatron-LM on the device cpu, under plain torchrun and without the adaptor."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest

from tests.faults import warm
from tests.frameworks import args, prepare, record


def train(out: Path, processes: int, **arguments: Any) -> dict[int, dict[int, dict[str, Any]]]:
    """Return the records of each rank by iteration, without the times."""
    script = prepare.megatron_lm() / "pretrain_gpt.py"
    warm.run(
        args.torchrun(processes, out, script, args.tiny_gpt(**arguments)),
        env=args.environment(),
        cwd=script.parent,
        stderr=subprocess.STDOUT,
        timeout=240,
        code=0,
    )
    return {
        rank: {line.pop("iteration"): line for line in lines if line.pop("time")}
        for rank, lines in record.read(out).items()
    }


@pytest.mark.integration
def test_a_resumed_run_is_bitwise_the_one_that_never_stopped(tmp_path: Path) -> None:
    save = tmp_path / "save"
    undisturbed = train(tmp_path / "undisturbed", 2, precision="fp16", save=save, save_interval=4)
    assert [line["skipped"] for line in undisturbed[0].values()] == [0, 0, 0, 0, 1, 0, 0, 0]
    shutil.rmtree(save / "iter_0000008")
    (save / "latest_checkpointed_iteration.txt").write_text("4")
    resumed = train(tmp_path / "resumed", 2, precision="fp16", save=save, load=save)
    assert resumed == {
        rank: {iteration: lines[iteration] for iteration in range(5, 9)}
        for rank, lines in undisturbed.items()
    }
