"""Megatron-core as a library, with a training loop under `adaptor.protect`."""

from __future__ import annotations

import re
from functools import partial
from pathlib import Path

import pytest

from adaptor.checkpoint import manifest
from adaptor.operations import job_reader
from adaptor.protocol import naming
from tests.faults import harness, outcome
from tests.faults.harness import DP2, ITERATIONS, Ended
from tests.faults.library import train, undisturbed


@pytest.mark.parametrize(
    ("engine", "fault", "code", "step"),
    [
        ("builtin", "rank=3,step=6,phase=update,kind=sigkill", 137, 6),
        ("builtin", "rank=1,step=6,phase=reduction,kind=exception", 1, 5),
        ("mindio", "rank=1,step=6,phase=reduction,kind=exception", 1, 5),
    ],
    ids=["rank3-update", "rank1-exception", "mindio-rank1-exception"],
)
def test_a_fault(engine: str, fault: str, code: int, step: int, tmp_path: Path) -> None:
    save = tmp_path / "save"
    result = train(tmp_path / "job", "--save", str(save), faults=[fault], engine=engine, code=code)
    if engine == "builtin":
        assert "[ttp] protected from step 1 (split; any 1 rank)" in result.said
    outcome.assert_saved(save, step)
    outcome.assert_same_training(result, undisturbed(), steps=range(1, step))
    if code != 1:
        _goes_on_by_itself(tmp_path, "--save", str(save), step=step)


def _goes_on_by_itself(tmp_path: Path, *job: str, step: int) -> None:
    """Without the adaptor the script trains on from `step`, which is the newest, as if nothing had been."""
    layout = job[: job.index("--save")]
    resumed = train(tmp_path / "resumed", *job, launcher="torchrun", code=0)
    outcome.assert_same_training(resumed, undisturbed(*layout), steps=range(step + 1, ITERATIONS + 1))


@pytest.mark.parametrize("engine", ["builtin", "mindio"])
def test_a_killed_rank_and_the_job_goes_on_by_itself(engine: str, tmp_path: Path) -> None:
    save = tmp_path / "save"
    fault = "rank=1,step=6,phase=backward,kind=sigkill"
    # A step before the fault is recorded, and one after the restart.
    recorded = ["--ttp-profile", "steps=2", "--ttp-dump", '{"steps": "7", "modules": ["decoder*"]}']
    result = train(
        tmp_path / "job",
        *("--save", str(save)),
        layout=DP2,
        restarts=1,
        faults=[fault],
        options=recorded,
        engine=engine,
        code=0,
    )
    outcome.assert_saved(save, 5)
    outcome.assert_same_training(result, undisturbed(layout=DP2))
    names = {path.name for path in (tmp_path / "job/logs").glob("record-*/*")}
    assert names == {"profile-rank0-steps2-2", "dump-rank0.jsonl"}


def test_a_function_that_makes_the_steps_is_called_again(tmp_path: Path) -> None:
    """A spare replaces a killed rank, an exception redoes its step; nobody else is started again. Behind each
    step a drill finds the job recoverable."""
    save = tmp_path / "save"
    kill = "rank=2,step=4,phase=backward,kind=sigkill-beside-a-spare"
    faults = [kill, "rank=0,step=6,phase=reduction,kind=exception"]
    job = ("--save", str(save), "--loop", "run-steps")
    options = ("--ttp-online", "60", "--ttp-drill-every", "1")
    result = train(tmp_path / "job", *job, restarts=1, faults=faults, options=options, code=0)
    assert "2 incidents (2 without a restart), 0 steps lost" in result.log
    (spare,) = [stamp["spare"] for stamp in result.stamps if stamp["rank"] == 2]
    assert f"replaced by pid {spare}, " in result.log
    status = job_reader.status(job_reader.find(tmp_path / "job/logs"))
    assert (status.state, status.step) == ("ended", ITERATIONS)
    assert (status.drill_step, status.drill_problem) == (ITERATIONS - 1, "")
    assert Path(status.script).suffix == ".py"
    assert [result.log.count(f"back behind step {step}\n") for step in (3, 5)] == [4, 4]
    assert {line["restart"] for lines in result.records.values() for line in lines} == {0}
    outcome.assert_same_training(result, undisturbed())
    outcome.assert_saved(save, 5)


STREAM = ("--loop", "run-steps", "--stream")


def test_an_iterator_over_the_data_goes_back_with_the_loop(tmp_path: Path) -> None:
    """The iterator reads ahead and draws a random number at its start; the loop counts the items."""
    faults = [
        "rank=2,step=4,phase=backward,kind=sigkill",
        "rank=0,step=6,phase=reduction,kind=exception",
        "rank=3,step=7,phase=update,kind=sigkill",
    ]
    job = ("--save", str(tmp_path / "save"), *STREAM)
    result = train(tmp_path / "job", *job, restarts=1, faults=faults, options=("--ttp-online", "60"), code=0)
    assert "3 incidents (3 without a restart), 0 steps lost" in result.log
    assert [result.log.count(f"back behind step {step}\n") for step in (3, 5, 7)] == [4, 4, 4]
    assert [result.log.count(f"rank {rank} loads nothing\n") for rank in range(4)] == [0, 0, 1, 1]
    # The line of a step that all had finished when the rank was killed may be written nowhere.
    outcome.assert_same_training(result, undisturbed("--stream"), {*range(1, ITERATIONS + 1)} - {7})


def test_a_stopped_rank_is_replaced_and_a_second_fault_restarts_all(tmp_path: Path) -> None:
    """The second fault strikes the only other holder of the shard while it sends the shard to the new
    process.
    """
    faults = [
        "rank=2,step=4,phase=forward,kind=sigstop",
        "rank=1,step=7,phase=backward,kind=sigkill",
        "rank=3,phase=give,kind=sigkill,since=7",
    ]
    save = tmp_path / "save"
    options = ("--ttp-online", "60", "--ttp-hang", "8")
    job = ("--save", str(save), *STREAM)
    result = train(tmp_path / "job", *job, restarts=1, faults=faults, options=options, code=0)
    result.assert_says("rank 2 does not answer; replaced by pid ")
    assert "restart 1 of 1: from step 6, 0 steps lost" in result.log
    assert "2 incidents (1 without a restart), 0 steps lost" in result.log
    outcome.assert_saved(save, 6)
    outcome.assert_same_training(result, undisturbed("--stream"))


def test_a_loop_that_was_resumed_is_recovered_online(tmp_path: Path) -> None:
    """The loop counts its last step from the checkpoint, which the new process has not loaded."""
    save = ("--save", str(tmp_path / "save"), *STREAM)
    fault = "rank=1,step=6,phase=reduction,kind=exception"
    compared = ("--ttp-verify-saves", "True")
    train(tmp_path / "first", *save, layout=DP2, faults=[fault], options=compared, code=1)
    outcome.assert_saved(tmp_path / "save", 5)
    assert manifest.read(tmp_path / "save" / naming.final_name(5)).state is not None
    fault = "rank=1,step=7,phase=backward,kind=sigkill"
    options = ("--ttp-online", "60")
    job = (*save, "--further", "3")
    resumed = train(
        tmp_path / "resumed", *job, layout=DP2, restarts=1, faults=[fault], options=options, code=0
    )
    assert "1 incident (1 without a restart), 0 steps lost" in resumed.log
    assert not re.search("another state|is not compared", resumed.log), resumed.said
    outcome.assert_same_training(resumed, undisturbed("--stream", layout=DP2), range(6, ITERATIONS + 1))


def test_the_function_asks_for_the_end(tmp_path: Path) -> None:
    """In a step that is made once more."""
    job = ("--save", str(tmp_path / "save"), *STREAM, "--end-at", "6")
    fault = "rank=1,step=6,phase=backward,kind=sigkill"
    options = ("--ttp-online", "60")
    result = train(tmp_path / "job", *job, layout=DP2, restarts=1, faults=[fault], options=options, code=0)
    assert "1 incident (1 without a restart), 0 steps lost" in result.log
    outcome.assert_same_training(result, undisturbed("--stream", layout=DP2), range(1, 7))
    assert {max(line["iteration"] for line in lines) for lines in result.records.values()} == {6}


@pytest.mark.parametrize(
    ("layout", "fault", "saved_step"),
    [
        # What was added to gradients since the last update is in no state: it is made again.
        (("--accumulate", "2"), "rank=1,step=6,phase=backward,kind=sigkill", 4),
        (("--tensor", "2"), "rank=3,step=6,phase=update,kind=sigkill", 6),
        # Ranks that share a sequence share the optimizer state, like data-parallel ones.
        (("--context", "2", "--freeze"), "rank=0,step=6,phase=norm,kind=sigkill", 5),
        (("--whole",), "rank=1,step=6,phase=forward,kind=sigkill", 5),
        (("--stages", "2"), "rank=3,step=6,phase=backward,kind=sigkill", 5),
        (("--experts", "2"), "rank=2,step=6,phase=update,kind=sigkill", 6),
    ],
    ids=["accumulates", "tensor-parallel", "frozen", "whole-optimizer", "stages", "experts"],
)
def test_layouts_are_recovered_online(
    layout: tuple[str, ...], fault: str, saved_step: int, tmp_path: Path
) -> None:
    instances = 1 if "--whole" in layout else 2
    expected = undisturbed(*layout, instances=instances)
    job = (*layout, "--save", str(tmp_path / "save"))
    options = ("--ttp-online", "60")
    result = train(
        tmp_path / "job", *job, "--loop", "run-steps", restarts=1, faults=[fault], options=options, code=0
    )
    assert "1 incident (1 without a restart), 0 steps lost" in result.log
    assert result.log.count(f"back behind step {saved_step}\n") == 4
    outcome.assert_saved(tmp_path / "save", saved_step)
    outcome.assert_same_training(result, expected, {*range(1, ITERATIONS + 1)} - {saved_step})
    if "--freeze" in layout:
        _goes_on_by_itself(tmp_path, *job, step=saved_step)


def test_muon(tmp_path: Path) -> None:
    """Each rank has all of its state: a chain of Muon for the matrices and Adam for the rest."""
    muon = partial(train, layout=DP2, paths=[str(harness.ROOT / "tests/standins/muon")])
    layout = ("--whole", "--muon")
    reference = muon(tmp_path / "reference", *layout, launcher="torchrun", instances=1, code=0)
    save = ("--save", str(tmp_path / "online"), "--loop", "run-steps")
    faults = ["rank=1,step=4,phase=backward,kind=sigkill", "rank=0,step=6,phase=update,kind=exception"]
    result = muon(
        tmp_path / "job", *layout, *save, restarts=1, faults=faults, options=("--ttp-online", "60"), code=0
    )
    assert "2 incidents (2 without a restart), 0 steps lost" in result.log
    # The line of a step that all had finished when the rank raised may be written nowhere.
    outcome.assert_same_training(result, reference.records, {*range(1, ITERATIONS + 1)} - {6})
    outcome.assert_saved(tmp_path / "online", 6)
    resumed = muon(tmp_path / "resumed", *layout, *save[:2], launcher="torchrun", instances=1, code=0)
    outcome.assert_same_training(resumed, reference.records, steps=range(7, ITERATIONS + 1))


@pytest.mark.robustness(
    "A1",
    "a loop on Megatron-core that nobody has claimed, of an even data-parallel size",
    "it trains bitwise as under torchrun, and one line says that it is not protected",
)
def test_a_loop_that_is_not_protected_trains_as_under_torchrun(tmp_path: Path) -> None:
    expected = undisturbed("--loop", "unprotected", instances=1)
    result = train(tmp_path / "job", "--loop", "unprotected", code=0)
    outcome.assert_same_training(result, expected)
    # The losses of two optimizer instances are others.
    with pytest.raises(AssertionError):
        outcome.assert_same_training(result, undisturbed())
    (line,) = [line for line in result.said if "[ttp]" in line]
    assert line.startswith("[ttp] NOT PROTECTED: FusedAdam makes updates, and adaptor.protect was not called")


COLLECTION = """
{start}
import torch
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.transformer import TransformerConfig
torch.distributed.init_process_group("gloo")
groups = ProcessGroupCollection()
for name in ("dp", "dp_cp", "expt_dp", "intra_dp_cp", "intra_expt_dp"):
    setattr(groups, name, torch.distributed.group.WORLD)
alone = [torch.distributed.get_rank()]
for name in ("tp", "pp", "ep"):
    setattr(groups, name, torch.distributed.new_group(alone, use_local_synchronization=True))
config = TransformerConfig(num_layers=1, hidden_size=4, num_attention_heads=1)
sharded = DistributedDataParallelConfig(use_distributed_optimizer=True)
DistributedDataParallel(config, sharded, torch.nn.Linear(4, 4), pg_collection=groups)
# Gloo connects rank 0 before rank 1: rank 0 must not end while rank 1 still connects.
torch.distributed.barrier()
print("built", flush=True)
"""


@pytest.mark.robustness(
    "A1",
    "process groups of Megatron-core that are not those of parallel_state (use_decentralized_pg=True)",
    "as under torchrun where nobody has claimed the job, else refused in one line",
)
@pytest.mark.parametrize("start", ["", "import adaptor; adaptor.enable()"], ids=["unclaimed", "claimed"])
def test_process_groups_of_a_collection(start: str, tmp_path: Path) -> None:
    script = tmp_path / "collection.py"
    script.write_text(COLLECTION.format(start=start))
    result = train(tmp_path / "job", script=script, layout=DP2)
    if start:
        assert result.code == 2, result.log[-3000:]
        assert result.last_line.startswith(
            "ttprun: error: the process groups of Megatron-core's parallel_state are"
        )
        assert "Traceback" not in result.log
    else:
        assert result.code == 0, result.log[-3000:]
        assert result.log.count("built") == 2


def test_a_loop_that_is_claimed_when_its_groups_are_made(tmp_path: Path) -> None:
    """The groups stay unchanged, so second copies are made by mirror."""
    save = tmp_path / "save"
    fault = "rank=1,step=6,phase=update,kind=sigkill"
    result = train(tmp_path / "job", "--save", str(save), "--late", layout=DP2, faults=[fault], code=137)
    assert "[ttp] protected from step 1 (mirror; any 1 rank)" in result.said
    outcome.assert_saved(save, 6)
    outcome.assert_same_training(result, undisturbed(layout=DP2, instances=1), steps=range(1, 6))


@pytest.mark.robustness("A1", "protect() and no step, then a kill -9", "NOT PROTECTED, in the last line, too")
def test_a_loop_that_tells_of_no_step(tmp_path: Path) -> None:
    save = tmp_path / "save"
    fault = "rank=1,step=6,phase=logging,kind=sigkill"
    result = train(
        tmp_path / "job", "--save", str(save), "--loop", "no-step", layout=DP2, faults=[fault], code=137
    )
    reason = (
        "an optimizer that adaptor.protect was given makes an update, and no step was begun; put each step"
    )
    assert sum(line.startswith(f"[ttp] NOT PROTECTED: {reason}") for line in result.said) == 1
    assert f"nothing to save: the job was not protected: {reason}" in result.last_line
    assert not any("protected from step" in line for line in result.said)


@pytest.mark.robustness("A1", "begin_step(step - 1)", "one line that names the step that was expected")
def test_a_loop_that_is_one_step_behind(tmp_path: Path) -> None:
    save = tmp_path / "save"
    result = train(tmp_path / "job", "--save", str(save), "--loop", "one-behind", layout=DP2, code=2)
    expected = "ttprun: error: step 0 was begun, expected step 1: adaptor.protect was told step=0"
    assert result.last_line.startswith(expected)
    assert "Traceback" not in result.log
    assert not outcome.steps_in(save)


@pytest.mark.robustness(
    "A1", "steps that go backwards or skip", "what was finished before is saved under its own number"
)
def test_a_loop_that_skips_a_number(tmp_path: Path) -> None:
    save = tmp_path / "save"
    result = train(tmp_path / "job", "--save", str(save), "--loop", "skips", layout=DP2, restarts=1, code=1)
    assert "StepError: step 6 was begun, expected step 5" in result.last_line
    assert "; not started again: another start would fail in the same way" in result.last_line
    assert "Traceback" not in result.log
    outcome.assert_saved(save, 4)


@pytest.mark.robustness(
    "A1",
    "protect() is given a bare model, torch's optimizer, or a function to save",
    "one line that says what it needs, no traceback",
)
@pytest.mark.parametrize(
    ("give", "message"),
    [
        ("bare-model", "model is GPTModel: adaptor.protect needs a list of Megatron-core's"),
        (
            "bare-optimizer",
            "optimizer is Adam: adaptor.protect needs what Megatron-core's get_megatron_optimizer",
        ),
        ("extra-function", "extra['read'] is function, which cannot be saved"),
        ("torch-scheduler", "scheduler is ConstantLR: adaptor.protect needs Megatron-core's"),
        ("other-increment", "after step 1 the scheduler is at 1 samples, and not at 2: samples_per_step"),
    ],
)
def test_an_unprotected_part_is_named(give: str, message: str, tmp_path: Path) -> None:
    result = train(tmp_path / "job", "--save", str(tmp_path / "save"), "--give", give, layout=DP2)
    assert result.code != 0, result.log[-3000:]
    assert message in result.last_line
    assert "Traceback" not in result.log


@pytest.mark.robustness(
    "A1",
    "the optimizer that updates weights is replaced by another before protect()",
    "refused at its first update, which no hook has told of",
)
def test_an_optimizer_without_hooks(tmp_path: Path) -> None:
    save = tmp_path / "save"
    result = train(tmp_path / "job", "--save", str(save), "--give", "other-adam", layout=DP2, code=2)
    assert result.last_line.startswith(
        "ttprun: error: step 1 has an update of AdamW that no hook has told of, so it could not be saved"
    )
    assert not any("protected from step" in line for line in result.said)
    assert not outcome.steps_in(save)


@pytest.mark.robustness(
    "A1", "adaptor.protect is called twice before the first step", "the job is protected as if it was once"
)
def test_protected_twice(tmp_path: Path) -> None:
    save = tmp_path / "save"
    fault = "rank=1,step=6,phase=update,kind=sigkill"
    result = train(
        tmp_path / "job", "--save", str(save), "--give", "twice", layout=DP2, faults=[fault], code=137
    )
    assert sum("[ttp] protected from step 1 (split; any 1 rank)" in line for line in result.said) == 1
    outcome.assert_saved(save, 6)
    outcome.assert_same_training(result, undisturbed(layout=DP2), steps=range(1, 6))


@pytest.mark.robustness("A2", "a rank hangs in a loop of one's own", "noticed, named, saved")
@pytest.mark.parametrize(
    ("loop", "phase", "kind", "step", "cause"),
    [
        ("step", "forward", "sigstop", 5, "rank 1 does not answer"),
        ("begin-step", "forward", "deadlock", 5, "rank 1 stands still, others wait; wait (threading.py:"),
        # Rank 0 waits for it in the next step.
        ("step", "logging", "deadlock", 6, "rank 1 stands still, others wait; wait (threading.py:"),
    ],
    ids=["stopped in a step", "a step without an end", "between two steps"],
)
def test_a_rank_hangs(loop: str, phase: str, kind: str, step: int, cause: str, tmp_path: Path) -> None:
    save = tmp_path / "save"
    fault = f"rank=1,step=6,phase={phase},kind={kind}"
    job = ("--save", str(save), "--loop", loop)
    result = train(tmp_path / "job", *job, layout=DP2, faults=[fault], options=["--ttp-hang", "8"], code=1)
    assert "nothing has moved for " in result.last_line
    assert cause in result.last_line
    outcome.assert_saved(save, step)


def test_the_example(tmp_path: Path) -> None:
    """The example continues without a restart after the loss of a rank, with the output of an undisturbed
    run.
    """
    script = tmp_path / "pretrain.py"
    # The harness names a file for records, which the example does not write.
    script.write_text(f"""
import os, runpy, sys
at = sys.argv.index("--record")
del sys.argv[at : at + 2]
if "--instances" in sys.argv:  # under torchrun
    os.environ["ENABLE_TTP"] = "False"
runpy.run_path({str(harness.ROOT / "examples/megatron_core/pretrain.py")!r}, run_name="__main__")
""")
    run = partial(train, layout=DP2, script=script)

    def steps_of(result: Ended) -> dict[str, str]:
        assert result.code == 0, result.log[-3000:]
        steps = re.findall(r"step (\d+) (loss \S+ grad norm \S+)", result.log)
        assert len(steps) == len({step for step, _ in steps}) == ITERATIONS
        return dict(steps)

    without = run(tmp_path / "undisturbed", "--save", str(tmp_path / "none"), launcher="torchrun")
    fault = "rank=1,step=6,phase=backward,kind=sigkill"
    options = ("--ttp-online", "60")
    job = run(tmp_path / "job", "--save", str(tmp_path / "save"), restarts=1, faults=[fault], options=options)
    assert steps_of(job) == steps_of(without)
    assert "replaced by pid" in job.log
    # The last words are complete by their manifest; the example has saved its last step by itself.
    assert manifest.defects(tmp_path / "save" / naming.final_name(5)) == []
    assert outcome.steps_in(tmp_path / "save") == [5, ITERATIONS]
    assert outcome.tracked(tmp_path / "save") == str(ITERATIONS)
