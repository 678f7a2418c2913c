"""Frameworks with loops of their own, by their adapters: small ones of the same shape as the real ones."""

from __future__ import annotations

import re
import shutil
from dataclasses import replace
from functools import partial
from pathlib import Path

from torch.distributed.checkpoint import FileSystemReader

from tests.faults import harness, library, outcome
from tests.faults.harness import DP2, ITERATIONS, Job, job_in
from tests.frameworks import prepare

TRACKER = "latest_train_state.pt"
FRAMEWORKS = harness.ROOT / "tests/frameworks"
bridge = partial(
    library.train,
    layout=DP2,
    script=FRAMEWORKS / "train_bridge.py",
    paths=[str(FRAMEWORKS / "small_bridge")],
)

swift = partial(
    library.train, layout=DP2, script=FRAMEWORKS / "train_swift.py", paths=[str(FRAMEWORKS / "small_swift")]
)

mca = partial(
    library.train,
    layout=replace(DP2, replica="mirror"),
    instances=1,
    script=FRAMEWORKS / "train_mca.py",
    paths=[str(FRAMEWORKS / "small_mca")],
)


def test_megatron_bridge_goes_on_from_last_words_and_is_recovered_online(tmp_path: Path) -> None:
    """The framework's own save of step 2 is older than the last words, which both trackers then name."""
    save, steps = tmp_path / "save", range(4, ITERATIONS + 1)
    undisturbed = bridge(
        tmp_path / "undisturbed", "--save", str(tmp_path / "own"), launcher="torchrun", code=0
    )
    fault = "rank=1,step=4,phase=backward,kind=sigkill"
    result = bridge(tmp_path / "job", "--save", str(save), faults=[fault], code=137)
    assert outcome.tracked(save) == "3"
    assert (save / TRACKER).read_bytes() == (save / "iter_0000003/train_state.pt").read_bytes()
    copy = shutil.copytree(save, tmp_path / "copy")
    by_itself = bridge(tmp_path / "by-itself", "--save", str(copy), launcher="torchrun", code=0)
    outcome.assert_same_training(by_itself, undisturbed.records, steps)
    fault = "rank=1,step=7,phase=backward,kind=sigkill"
    options = ("--ttp-online", "60")
    result = bridge(
        tmp_path / "online", "--save", str(save), restarts=1, faults=[fault], options=options, code=0
    )
    assert "1 incident (1 without a restart), 0 steps lost" in result.log
    outcome.assert_same_training(result, undisturbed.records, steps)
    # Rank 1 dies, the only holder of its shard; then both die, and all start again from their copies.
    options = ("--ttp-replica", "none", "--ttp-host-copy", "1", "--ttp-online", "60", "--ttp-spares", "0")
    faults = [
        "rank=1,step=4,phase=update,kind=sigkill",
        "rank=1,step=6,phase=update,kind=sigkill,restart=-1,also=0",
    ]
    job = ("--save-interval", "100", "--save")
    alone = bridge(tmp_path / "alone", *job, str(tmp_path / "own-alone"), launcher="torchrun", instances=1)
    copied = str(tmp_path / "copied")
    result = bridge(tmp_path / "copies", *job, copied, restarts=1, faults=faults, options=options, code=0)
    result.assert_says("goes on after step 3, from copies in host memory")
    result.assert_says("step 5 is written from the copies in host memory")
    outcome.assert_same_training(result, alone.records)


def test_layer_wise_muon(tmp_path: Path) -> None:
    """Each matrix and its state are on one rank alone. Rank 0 raises, and the framework goes on from last
    words; then rank 1 dies, and all go back to their copies in host memory; then both die.
    """
    muon = partial(
        library.train,
        layout=DP2,
        script=FRAMEWORKS / "train_bridge.py",
        paths=[str(FRAMEWORKS / "small_bridge"), str(harness.ROOT / "tests/standins/muon")],
        instances=1,
    )
    job, save = ("--optimizer", "dist_muon", "--save-interval", "100", "--save"), str(tmp_path / "save")
    alone = muon(tmp_path / "alone", *job, str(tmp_path / "own"), launcher="torchrun", code=0)
    faults = ["rank=0,step=4,phase=forward,kind=exception"]
    result = muon(tmp_path / "job", *job, save, faults=faults, code=1)
    assert outcome.tracked(Path(save)) == "3"
    result.assert_says("no second copies of optimizer shards (the layer-wise optimizer keeps each matrix")
    options = ("--ttp-host-copy", "1", "--ttp-online", "60", "--ttp-spares", "0")
    faults = [
        "rank=1,step=5,phase=backward,kind=sigkill",
        "rank=1,step=7,phase=update,kind=sigkill,restart=-1,also=0",
    ]
    copy = shutil.copytree(save, tmp_path / "copy")
    result = muon(tmp_path / "copies", *job, str(copy), restarts=1, faults=faults, options=options, code=0)
    result.assert_says("goes on after step 4, from copies in host memory")
    result.assert_says("step 6 is written from the copies in host memory")
    outcome.assert_same_training(result, alone.records, range(4, ITERATIONS + 1))
    by_itself = muon(tmp_path / "by-itself", *job, save, launcher="torchrun", code=0)
    outcome.assert_same_training(by_itself, alone.records, range(4, ITERATIONS + 1))


def test_ms_swift_goes_on_from_last_words_and_is_recovered_online(tmp_path: Path) -> None:
    """The framework's own save of step 2 is older than the last words and lacks the optimizer, as in all
    published recipes; a restart loads the last words.
    """
    output, steps = tmp_path / "output", range(4, ITERATIONS + 1)
    undisturbed = swift(
        tmp_path / "undisturbed", "--output-dir", str(tmp_path / "own"), launcher="torchrun", code=0
    )
    faults = ["rank=1,step=4,phase=backward,kind=sigkill"]
    job = ("--no-save-optim", "--no-save-rng", "--output-dir", str(output))
    result = swift(tmp_path / "job", *job, restarts=1, faults=faults, code=0)
    assert "restart 1 of 1: from step 3, 0 steps lost" in result.log
    outcome.assert_same_training(result, undisturbed.records)
    last_words = ("--mcore-model", str(output / "last_words"))
    job = ("--output-dir", str(tmp_path / "resumed"), *last_words)
    by_itself = swift(tmp_path / "by-itself", *job, launcher="torchrun", code=0)
    outcome.assert_same_training(by_itself, undisturbed.records, steps)
    options = ("--ttp-online", "60")
    faults = ["rank=1,step=6,phase=backward,kind=sigkill"]
    job = ("--output-dir", str(tmp_path / "online"))
    result = swift(tmp_path / "online-job", *job, restarts=1, faults=faults, options=options, code=0)
    assert "1 incident (1 without a restart), 0 steps lost" in result.log
    outcome.assert_same_training(result, undisturbed.records)


def test_lora_of_ms_swift_is_recovered_online_and_from_copies_in_host_memory(tmp_path: Path) -> None:
    """Rank 1, the only holder of its shard, is replaced, and both ranks go back to their copies; then both
    die and restart from copies of the adapters. With `add_version` all starts share one output folder.
    """
    job = ("--tuner-type", "lora", "--add-version", "--save-interval", "100", "--output-dir")
    own_folder = str(tmp_path / "own")
    undisturbed = swift(tmp_path / "undisturbed", *job, own_folder, launcher="torchrun", instances=1, code=0)
    faults = [
        "rank=1,step=4,phase=backward,kind=sigkill",
        "rank=1,step=8,phase=backward,kind=sigkill,restart=-1,also=0",
    ]
    options = ("--ttp-replica", "none", "--ttp-host-copy", "2", "--ttp-online", "60", "--ttp-spares", "0")
    output = tmp_path / "output"
    result = swift(tmp_path / "job", *job, str(output), restarts=1, faults=faults, options=options, code=0)
    (line,) = [line for line in result.said if " training goes on after step 2, " in line]
    assert "from copies in host memory; " in line
    result.assert_says("step 6 is written from the copies in host memory")
    outcome.assert_same_training(result, undisturbed.records)
    (version,) = output.iterdir()
    saved = FileSystemReader(version / "last_words/iter_0000006").read_metadata().state_dict_metadata
    weights = [name for name in saved if name.startswith("decoder.")]
    assert weights
    assert all(".lora_" in name for name in weights)


def test_rollouts_of_ms_swift_go_on_from_last_words(tmp_path: Path) -> None:
    """Rank 1 dies while rank 0 samples from weights of step 4, whose buffers are empty, for steps 5 and 6."""
    job = ("--rlhf-type", "grpo", "--steps-per-generation", "2", "--save-interval", "100", "--output-dir")
    undisturbed = swift(tmp_path / "undisturbed", *job, str(tmp_path / "own"), launcher="torchrun", code=0)
    output = tmp_path / "output"
    faults = ["rank=1,step=5,phase=rollout,kind=sigkill"]
    options = ("--ttp-online", "60")
    result = swift(tmp_path / "job", *job, str(output), restarts=1, faults=faults, options=options, code=0)
    assert "restart 1 of 1: from step 4, 0 steps lost" in result.log
    result.assert_says("online recovery: no (the engine of rollouts")
    outcome.assert_same_training(result, undisturbed.records)


def test_mcore_adapter_goes_on_from_last_words_and_is_recovered_online(tmp_path: Path) -> None:
    """An epoch has six steps, and its last step takes a batch of the next pass, which the framework's own
    resume repeats. A restart and an online recovery continue within a pass, at its end, and after the end.
    """
    job, output = ("--save-steps", "2", "--output-dir"), tmp_path / "output"
    undisturbed = mca(tmp_path / "undisturbed", *job, str(tmp_path / "own"), launcher="torchrun", code=0)
    faults = ["rank=1,step=4,phase=backward,kind=sigkill"]
    result = mca(tmp_path / "job", *job, str(output), faults=faults, code=137)
    resumed = ("--resume-from-checkpoint", str(output / "last_words/iter_0000003"))
    options_alone = ("--last", "5", *job, str(tmp_path / "own-alone"))
    alone = mca(tmp_path / "alone", *resumed, *options_alone, launcher="torchrun", code=0)
    outcome.assert_same_training(alone, undisturbed.records, (4, 5))
    (output / "checkpoint-99").mkdir()  # a save of the model alone, from which no job can resume
    (output / "checkpoint-99/trainer_state.json").write_text('{"global_step": 99}')
    faults = [
        "rank=1,step=6,phase=backward,kind=sigkill",
        "rank=0,step=8,phase=backward,kind=sigkill,restart=1",
    ]
    result = mca(tmp_path / "again", *resumed, *job, str(output), restarts=2, faults=faults, code=0)
    assert "restart 2 of 2: from step 7, 0 steps lost" in result.log
    outcome.assert_same_training(result, undisturbed.records, range(4, ITERATIONS + 1))
    options = ("--ttp-replica", "none", "--ttp-host-copy", "1", "--ttp-online", "60", "--ttp-spares", "0")
    faults = [
        "rank=1,step=4,phase=update,kind=sigkill",
        "rank=0,step=6,phase=update,kind=sigkill",
        "rank=1,step=7,phase=update,kind=sigkill,restart=-1,also=0",
    ]
    job = ("--save-steps", "2", "--output-dir", str(tmp_path / "copied"))
    result = mca(tmp_path / "copies", *job, layout=DP2, restarts=3, faults=faults, options=options, code=0)
    result.assert_says("goes on after step 3, from copies in host memory")
    result.assert_says("step 6 is written from the copies in host memory")
    outcome.assert_same_training(result, undisturbed.records)


def copied_loop(megatron: Path, root: Path, loop: Path, further_text: str = "") -> Path:
    """Make a tree with a copy of Megatron-LM's loop, and a script which calls the copy.

    Args:
        loop: the file of the copy, below `root`.
        further_text: at the end of the copy.
    """
    root.mkdir()
    for path in megatron.iterdir():
        (root / path.name).symlink_to(path)
    text = (megatron / "megatron/training/training.py").read_text()
    text = re.sub(r"^from \. import", "from megatron.training import", text, flags=re.MULTILINE)
    text = re.sub(r"^from \.", "from megatron.training.", text, flags=re.MULTILINE)
    (root / loop).parent.mkdir(parents=True)
    for folder in loop.parents[:-1]:
        (root / folder / "__init__.py").write_text("")
    (root / loop).write_text(text + further_text)
    script = (root / "pretrain_gpt.py").read_text()
    (root / "pretrain_gpt.py").unlink()
    names = "get_args, get_timers, get_tokenizer, "
    module = ".".join(loop.with_suffix("").parts)
    changed = script.replace(
        f"from megatron.training import {names}pretrain, print_rank_0",
        f"from megatron.training import {names}print_rank_0\nfrom {module} import pretrain",
    )
    assert changed != script
    (root / "pretrain_gpt.py").write_text(changed)
    return root


def test_flagscale_is_recovered_online(tmp_path: Path) -> None:
    """Its copy of Megatron-LM's loop is called again, and writes the log line of an interrupted step."""
    tree = copied_loop(prepare.megatron_lm(), tmp_path / "tree", Path("flagscale/train/train.py"))
    undisturbed = harness.run(Job(tmp_path / "undisturbed", DP2, launcher="torchrun", framework=tree), code=0)
    faults = ["rank=1,step=4,phase=backward,kind=sigkill", "rank=0,step=6,phase=update,kind=sigkill"]
    job = job_in(tmp_path, DP2, faults=faults, restarts=2, framework=tree, options=("--ttp-online", "60"))
    result = harness.run(job, code=0)
    assert "2 incidents (2 without a restart), 0 steps lost" in result.log
    # The rank that was killed in the update of step 6 has recorded nothing of that step.
    outcome.assert_same_training(result, undisturbed.records, {*range(1, ITERATIONS + 1)} - {6})
    losses = [re.findall(r"lm loss: (\S+)", job.log) for job in (result, undisturbed)]
    assert losses[0] == losses[1]
    assert len(losses[1]) == ITERATIONS


# The names that MindSpeed-MM's loop has from Megatron-LM's, and its configuration of the model.
OF_MINDSPEED_MM = """
from argparse import Namespace

from megatron.training.training import (
    build_train_valid_test_data_iterators,
    evaluate_and_print_results,
    save_checkpoint_and_time,
    setup_model_and_optimizer,
)

_set_jit_fusion_options = set_jit_fusion_options


def set_jit_fusion_options():
    get_args().mm = Namespace(model=Namespace())
    _set_jit_fusion_options()
"""


def test_mindspeed_mm_goes_on_from_last_words(tmp_path: Path) -> None:
    """All ranks start again, and go on; then the unmodified framework does."""
    loop, save = Path("mindspeed_mm/training.py"), tmp_path / "save"
    tree = copied_loop(prepare.megatron_lm(), tmp_path / "tree", loop, OF_MINDSPEED_MM)
    job = partial(Job, layout=DP2, framework=tree)
    undisturbed = harness.run(job(tmp_path / "undisturbed", launcher="torchrun"), code=0)
    fault = "rank=1,step=4,phase=backward,kind=sigkill"
    faults = [fault, "rank=0,step=6,phase=backward,kind=sigkill,restart=1"]
    options = ("--ttp-online", "60")
    result = harness.run(
        job(tmp_path / "job", faults=faults, restarts=1, save=save, options=options), code=137
    )
    assert "restart 1 of 1: from step 3, 0 steps lost" in result.log
    result.assert_says("online recovery: no (it has not been tested with mind")
    outcome.assert_same_training(result, undisturbed.records, range(1, 6))
    outcome.assert_saved(save, 5)
    alone = harness.run(job(tmp_path / "alone", launcher="torchrun", load=save), code=0)
    outcome.assert_same_training(alone, undisturbed.records, range(6, ITERATIONS + 1))
