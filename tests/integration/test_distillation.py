"""A student that learns from a teacher: Megatron-LM's own code, and a stand-in for ModelOpt."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path

import pytest

from tests.faults import harness, keeping, scenario
from tests.faults.harness import DP2, ITERATIONS, Job, Layout

STANDINS = os.pathsep.join(str(harness.ROOT / "tests/standins" / part) for part in ("te", "modelopt"))
ENVIRONMENT = {"PYTHONPATH": STANDINS}
TEACHER = replace(DP2, name="dp2-teacher", extra=("--hidden-size", "128"))
# What differs from the student, in NeMo's words.
OF_TEACHER = "{num_layers: 2, hidden_size: 128, ffn_hidden_size: 512, num_attention_heads: 4}"
LOSSES = """
logit_layers: [output_layer, output_layer]
intermediate_layer_pairs: [[decoder.final_layernorm, decoder.final_layernorm]]
skip_lm_loss: false
kd_loss_scale: 0.5
"""


@pytest.fixture(scope="module")
def student(tmp_path_factory: pytest.TempPathFactory) -> Layout:
    """A student of a smaller hidden size, with a projection to the teacher's that is trained, too."""
    folder = tmp_path_factory.mktemp("distillation")
    teacher = folder / "teacher"
    saved = scenario.baselines(keeping.KEPT)(TEACHER).checkpoints / f"iter_{ITERATIONS:07d}"
    teacher.mkdir()
    (teacher / saved.name).symlink_to(saved)
    (teacher / "latest_checkpointed_iteration.txt").write_text(str(ITERATIONS))
    (teacher / "model_config.yaml").write_text(OF_TEACHER)
    (folder / "losses.yaml").write_text(LOSSES)
    extra = (
        *("--ckpt-format", "torch_dist", "--export-force-local-attention", "--attention-dropout", "0"),
        *("--export-kd-teacher-load", str(teacher), "--export-kd-teacher-ckpt-format", "torch"),
        *("--export-kd-cfg", str(folder / "losses.yaml")),
    )
    return replace(DP2, name="dp2-student", extra=extra)


@pytest.fixture(scope="module")
def baseline(student: Layout, tmp_path_factory: pytest.TempPathFactory) -> scenario.Baseline:
    root = tmp_path_factory.mktemp("baselines")
    return scenario.baselines(root, environment=ENVIRONMENT)(student)


def test_the_framework_goes_on_by_itself(
    student: Layout, baseline: scenario.Baseline, tmp_path: Path
) -> None:
    job = Job(
        tmp_path / "job",
        student,
        save=tmp_path / "save",
        save_interval=4,
        faults=["rank=1,step=6,phase=backward,kind=sigkill"],
        environment=ENVIRONMENT,
    )
    scenario.survives(job, baseline, code=137, saved={5}, resumed=True)
    assert (tmp_path / "save/iter_0000005/modelopt_state/common.pt").is_file()


def test_a_restart(student: Layout, baseline: scenario.Baseline, tmp_path: Path) -> None:
    """Also where online recovery is asked for: only a start of all ranks loads a teacher."""
    job = Job(
        tmp_path / "job",
        student,
        save=tmp_path / "save",
        restarts=1,
        faults=["rank=0,step=6,phase=backward,kind=sigkill"],
        environment=ENVIRONMENT,
        options=("--ttp-online", "60"),
    )
    scenario.restarts(job, baseline, saved={5})
