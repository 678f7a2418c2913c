"""The arguments of Megatron-LM in a job with `--nnodes MIN:MAX`: kept, changed or refused."""

from __future__ import annotations

import re
from argparse import Namespace
from itertools import product
from typing import Any

import pytest

from adaptor import context, output
from adaptor.errors import AdaptorError
from adaptor.frameworks import megatron_nodes, reshape_sizes
from adaptor.protocol import environment

# Arguments of a job that fits its nodes.
FITS: dict[str, Any] = {
    "rank": 0,
    "world_size": 12,
    "tensor_model_parallel_size": 2,
    "pipeline_model_parallel_size": 1,
    "context_parallel_size": 1,
    "micro_batch_size": 2,
    "global_batch_size": 24,
    "num_experts": None,
    "train_samples": None,
    "use_distributed_optimizer": False,
}


@pytest.fixture
def nodes(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    """3 nodes of 2 to 4; the previous start had 4."""
    monkeypatch.setenv(environment.NODES, "2:4")
    monkeypatch.setenv(environment.NODES_BEFORE, "4")
    monkeypatch.setenv("GROUP_WORLD_SIZE", "3")
    context.forget()
    return monkeypatch


@pytest.mark.usefixtures("nodes")
@pytest.mark.parametrize(
    ("changes", "line"),
    [
        ({}, "data-parallel size 6, global batch 24: 2 micro-batches of 2 on each data-parallel rank"),
        ({"context_parallel_size": 3}, "data-parallel size 2, global batch 24: 6 micro-batches of 2"),
        ({"rampup_batch_size": ["12", "12", "1000"]}, "data-parallel size 6, global batch 24\n"),
        (
            {"global_batch_size": 25, "decrease_batch_size_if_needed": True},
            "global batch 25: 2 micro-batches",
        ),
        (
            {"num_experts": 4, "expert_model_parallel_size": 2, "expert_tensor_parallel_size": 1},
            "data-parallel size 6",
        ),
    ],
    ids=["as it is", "context parallel", "ramp-up", "rounded by the framework", "experts"],
)
def test_a_job_that_fits(changes: dict[str, Any], line: str, capfd: pytest.CaptureFixture[str]) -> None:
    for _ in range(2):  # the framework parses its arguments several times
        args = Namespace(**{**FITS, **changes})
        megatron_nodes.fit(args)
    assert args == Namespace(**{**FITS, **changes})
    output.finish()
    stderr = capfd.readouterr().err
    assert stderr.startswith("[ttp] 3 nodes of 2 to 4, 4 before: ")
    assert line in stderr
    assert stderr.count("\n") == 1


@pytest.mark.usefixtures("nodes")
@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"global_batch_size": None}, "--nnodes 2:4 without --global-batch-size: "),
        ({"dataloader_type": "cyclic"}, "--nnodes 2:4 with --dataloader-type cyclic: "),
        ({"data_parallel_random_init": True}, "--nnodes 2:4 with --data-parallel-random-init: "),
        (
            {"pipeline_model_parallel_size": 4},
            "context parallel size) takes 8, of which 12 is no multiple; start 2 or 4 nodes, or with",
        ),
        (
            {"tensor_model_parallel_size": 24},
            "of which 12 is no multiple; start another number of nodes, or with other parallel sizes",
        ),
        (
            {"num_experts": 8, "expert_model_parallel_size": 4, "pipeline_model_parallel_size": 1},
            "with 12 ranks: 8 experts with TP2 EP4 PP1 take 8 ranks, and 12 is not divisible by 8; start 2",
        ),
        (
            {"global_batch_size": 16},
            "the data-parallel size is 6, and --global-batch-size 16 cannot be divided by 6 times --micro-",
        ),
        (
            {"rampup_batch_size": ["16", "12", "1000"]},
            "--global-batch-size 24 and --rampup-batch-size 16 12 1000 cannot be divided by 6 times",
        ),
    ],
)
def test_a_job_that_does_not_fit(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(AdaptorError) as refused:
        megatron_nodes.fit(Namespace(**{**FITS, **changes}))
    assert message in str(refused.value)


def test_the_nearest_batch(nodes: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> None:
    nodes.setenv("TTP_BATCH", "nearest")
    args = Namespace(**{**FITS, "global_batch_size": 40, "train_samples": 1000})
    megatron_nodes.fit(args)
    assert args.global_batch_size == 36
    output.finish()
    assert "global batch 36 in place of 40 (TTP_BATCH): 3 micro-batches of 2 on" in capfd.readouterr().err
    args.iteration, args.consumed_train_samples, args.train_iters = 10, 400, 27
    megatron_nodes.count_iterations(args)
    assert args.train_iters == 10 + 600 // 36


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({}, "--ttp-batch nearest without --train-samples: "),
        (
            {"train_samples": 1000, "rampup_batch_size": ["4", "4", "9"]},
            "--ttp-batch nearest with --rampup-batch-size: ",
        ),
    ],
)
def test_where_no_batch_is_chosen(changes: dict[str, Any], message: str, nodes: pytest.MonkeyPatch) -> None:
    nodes.setenv("TTP_BATCH", "nearest")
    with pytest.raises(AdaptorError, match=message):
        megatron_nodes.fit(Namespace(**{**FITS, "global_batch_size": 40, **changes}))


@pytest.mark.parametrize(("batch", "nearest_batch"), [(1, 12), (17, 12), (18, 12), (19, 24), (24, 24)])
def test_the_nearest_batch_size(batch: int, nearest_batch: int) -> None:
    assert megatron_nodes.nearest(batch, 12) == nearest_batch


def test_a_fixed_number_of_nodes_checks_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """The framework alone decides then."""
    monkeypatch.delenv(environment.NODES, raising=False)
    context.forget()
    args = Namespace(**{**FITS, "global_batch_size": 7, "dataloader_type": "cyclic", "train_samples": 10})
    megatron_nodes.fit(args)
    megatron_nodes.count_iterations(args)
    assert args.global_batch_size == 7
    assert not hasattr(args, "train_iters")


@pytest.mark.parametrize(
    ("changes", "settings", "numbers"),
    [
        ({}, {}, (2, 3)),  # 24 samples in micro-batches of 2, on 4, 6 or 8 data-parallel ranks
        ({"micro_batch_size": 1}, {}, (2, 3, 4)),
        ({"pipeline_model_parallel_size": 3, "micro_batch_size": 1}, {}, (3,)),
        ({"train_samples": 1000}, {"TTP_BATCH": "nearest"}, (2, 3, 4)),
        ({"micro_batch_size": 1, "tensor_model_parallel_size": 4}, {"TTP_REPLICA": "split"}, (2, 4)),
    ],
)
def test_the_numbers_of_nodes_that_a_job_can_use(
    changes: dict[str, Any], settings: dict[str, str], numbers: tuple[int, ...], nodes: pytest.MonkeyPatch
) -> None:
    for name, value in settings.items():
        nodes.setenv(name, value)
    megatron_nodes.fit(Namespace(**{**FITS, **changes}))
    assert context.part(environment.Nodes).fitting == numbers


MODEL = {
    **FITS,
    "num_attention_heads": 8,
    "num_layers": 4,
    "use_distributed_optimizer": True,
    "optimizer": "adam",
    "global_batch_size": 48,
    "micro_batch_size": 1,
    "save": "/my runs/gpt/",
}


@pytest.mark.parametrize(
    ("changes", "sizes"),
    [
        ({"world_size": 6, "pipeline_model_parallel_size": 2}, (2, 1)),  # 4 and more do not divide 6
        ({"world_size": 12, "tensor_model_parallel_size": 8}, (4, 1)),
        ({"world_size": 8, "tensor_model_parallel_size": 3}, (4, 1)),
        ({"world_size": 8, "tensor_model_parallel_size": 2, "pipeline_model_parallel_size": 3}, (2, 4)),
        ({"world_size": 8, "group_query_attention": True, "num_query_groups": 2}, (2, 1)),
        ({"world_size": 12, "num_experts": 4, "expert_model_parallel_size": 4, "num_layers": 3}, None),
        ({"world_size": 3, "ckpt_format": "torch_dist"}, (1, 1)),
        ({"world_size": 6, "ckpt_format": "zarr"}, None),
        ({"world_size": 6, "decoder_first_pipeline_num_layers": 1}, None),
        # Chunks of a pipeline keep its size.
        (
            {"world_size": 4, "pipeline_model_parallel_size": 4, "num_virtual_stages_per_pipeline_rank": 2},
            (2, 2),
        ),
        ({"world_size": 6, "use_distributed_optimizer": False}, None),
        ({"world_size": 6, "num_attention_heads": 1, "global_batch_size": 7}, None),
    ],
)
def test_sizes_in_which_the_model_would_fit(changes: dict[str, Any], sizes: tuple[int, int] | None) -> None:
    assert reshape_sizes.other_sizes(Namespace(**{**MODEL, **changes})) == sizes


@pytest.mark.usefixtures("nodes")
def test_the_command_that_makes_it_fit() -> None:
    with pytest.raises(AdaptorError) as refused:
        megatron_nodes.fit(Namespace(**{**MODEL, "world_size": 6, "pipeline_model_parallel_size": 2}))
    assert str(refused.value).endswith(
        "start 2 or 4 nodes, or run `python -m adaptor transform '/my runs/gpt/' '/my runs/gpt-tp2-pp1' --tp"
        " 2 --pp 1` and start with --tensor-model-parallel-size 2 --pipeline-model-parallel-size 1 --load"
        " '/my runs/gpt-tp2-pp1' --save '/my runs/gpt-tp2-pp1'"
    )


@pytest.mark.usefixtures("nodes")
def test_the_command_for_chunks_in_the_sharded_format() -> None:
    chunks = {"pipeline_model_parallel_size": 2, "num_virtual_stages_per_pipeline_rank": 2}
    changes = {**chunks, "num_attention_heads": 1}
    with pytest.raises(AdaptorError, match="--tp 1 --pp 2 --vpp 2 --format torch_dist` and start with"):
        megatron_nodes.fit(Namespace(**{**MODEL, **changes, "world_size": 6, "ckpt_format": "torch_dist"}))


@pytest.mark.usefixtures("nodes")
def test_the_command_that_makes_experts_fit() -> None:
    """No shorter pipeline fits, but another expert parallel size does."""
    experts = {"num_experts": 8, "expert_model_parallel_size": 4, "save": "/runs/moe", "num_layers": 3}
    with pytest.raises(AdaptorError) as refused:
        megatron_nodes.fit(Namespace(**{**MODEL, **experts, "world_size": 12}))
    assert str(refused.value) == (
        "3 nodes with 12 ranks: 8 experts with TP2 EP4 PP1 take 8 ranks, and 12 is not divisible by 8; start"
        " 2 or 4 nodes, or run `python -m adaptor transform /runs/moe /runs/moe-tp2-pp1-ep2 --tp 2 --pp 1"
        " --ep 2` and start with --tensor-model-parallel-size 2 --pipeline-model-parallel-size 1"
        " --expert-model-parallel-size 2 --load /runs/moe-tp2-pp1-ep2 --save /runs/moe-tp2-pp1-ep2"
        " (it has to divide 8 experts, and 6 = 12 ranks / TP2 / PP1)"
    )


# With the pipeline unchanged the data-parallel size would be 3, which does not divide the batch.
OTHER_PIPELINE = {
    "num_experts": 8,
    "expert_model_parallel_size": 4,
    "pipeline_model_parallel_size": 2,
    "num_layers": 12,
    "global_batch_size": 16,
    "save": "/runs/moe",
}


@pytest.mark.usefixtures("nodes")
def test_the_command_that_makes_experts_fit_changes_the_pipeline_where_the_batch_asks_for_it() -> None:
    with pytest.raises(AdaptorError) as refused:
        megatron_nodes.fit(Namespace(**{**MODEL, **OTHER_PIPELINE}))
    assert "--tp 2 --pp 3 --ep 2` and start with" in str(refused.value)
    assert "(it has to divide 8 experts, and 2 = 12 ranks / TP2 / PP3)" in str(refused.value)


OPTION = re.compile(r"--(\w+)-model-parallel-size (\d+)")


@pytest.mark.parametrize("reshape", ["", "auto"])
def test_a_job_starts_with_the_sizes_that_the_line_names(reshape: str, nodes: pytest.MonkeyPatch) -> None:
    """Following the line never leads to a second refusal of sizes."""
    if reshape:
        nodes.setenv("TTP_RESHAPE", reshape)
    followed = 0
    for ranks, tensor, pipeline, expert, batch, layers in product(
        (3, 6, 12, 18), (1, 2), (1, 2, 3), (2, 4, 8), (16, 18, 24), (6, 12)
    ):
        sizes = {
            "world_size": ranks,
            "tensor_model_parallel_size": tensor,
            "pipeline_model_parallel_size": pipeline,
            "expert_model_parallel_size": expert,
        }
        model = {"num_experts": 8, "num_layers": layers, "global_batch_size": batch}
        arguments = {**MODEL, **model, **sizes}
        try:
            megatron_nodes.fit(Namespace(**arguments))
        except AdaptorError as refused:
            options = OPTION.findall(str(refused))
            named = {f"{parallelism}_model_parallel_size": int(size) for parallelism, size in options}
            if "expert_model_parallel_size" in named:
                megatron_nodes.fit(Namespace(**{**arguments, **named}))
                followed += 1
    assert followed > 20


@pytest.mark.parametrize(
    ("setting", "changes", "line"),
    [
        ("auto", {}, "TP2 PP1 in place of TP2 PP2 (TTP_RESHAPE), data-parallel size 3, global batch 48: 16 "),
        (
            "tp=1,pp=1",
            {},
            "TP1 PP1 in place of TP2 PP2 (TTP_RESHAPE), data-parallel size 6, global batch 48: 8 ",
        ),
        ("tp=1,pp=1", {"world_size": 12}, "before: data-parallel size 3, global batch 48: 16 "),
        ("auto", {"num_attention_heads": 1}, "TP1 PP2 in place of TP2 PP2 (TTP_RESHAPE)"),
    ],
    ids=["chosen", "given", "not needed", "one head"],
)
def test_a_job_takes_other_sizes(
    setting: str,
    changes: dict[str, Any],
    line: str,
    nodes: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    nodes.setenv("TTP_RESHAPE", setting)
    args = Namespace(**{**MODEL, "pipeline_model_parallel_size": 2, "world_size": 6, **changes})
    megatron_nodes.fit(args)
    output.finish()
    assert line in capfd.readouterr().err
    # With 4 nodes and 8 ranks the sizes of the arguments; with 2 nodes other sizes again.
    assert context.part(environment.Nodes).fitting == (2, 3, 4)


def test_chunks_go_with_their_pipeline(nodes: pytest.MonkeyPatch) -> None:
    nodes.setenv("TTP_RESHAPE", "tp=2,pp=1")
    args = Namespace(**{**MODEL, "pipeline_model_parallel_size": 4, "world_size": 6})
    args.num_layers_per_virtual_pipeline_stage = 1
    megatron_nodes.fit(args)
    assert (args.tensor_model_parallel_size, args.pipeline_model_parallel_size) == (2, 1)
    assert args.num_layers_per_virtual_pipeline_stage is None


@pytest.mark.parametrize(
    ("setting", "changes", "message"),
    [
        (
            "tp=3,pp=1",
            {},
            "TTP_RESHAPE is tp=3,pp=1, and 8 attention heads are not divisible by 3; give other",
        ),
        ("tp=1,pp=3", {}, "4 layers are not divisible by 3"),
        ("tp=4,pp=1", {}, "the model takes 4 ranks, of which 6 is no multiple"),
        (
            "tp=1,pp=1",
            {"num_experts": 4, "expert_model_parallel_size": 1},
            "experts keep the tensor parallel size",
        ),
        (
            "auto",
            {"global_batch_size": 7},
            "in no tensor and pipeline parallel sizes 6 ranks can train this model",
        ),
        (
            "auto",
            {
                "world_size": 3,
                "tensor_model_parallel_size": 1,
                "num_experts": 4,
                "expert_model_parallel_size": 2,
            },
            "3 is not divisible by 2; start another number of nodes, or with --expert-model-parallel-size 1 ",
        ),
        (
            "auto",
            {"world_size": 9, "num_experts": 4, "expert_model_parallel_size": 2},
            "4 experts with TP2 EP2 PP1 take 4 ranks, and 9 is not divisible by 4; start another .* nodes$",
        ),
        (
            "tp=2,pp=2",
            {"world_size": 12, "num_experts": 4, "expert_model_parallel_size": 2},
            "4 experts with TP2 EP2 PP2 take 8 ranks, and 12 is not divisible by 8; give other sizes",
        ),
        ("auto", {"use_checkpoint_args": True}, "a job with --use-checkpoint-args is not transformed"),
        (
            "auto",
            {"optimizer": "sgd"},
            "a job with --optimizer sgd is not transformed; leave out one of them",
        ),
        ("auto", {"fp8": "hybrid"}, "a job with --fp8-format is not transformed"),
        ("auto", {"ckpt_format": "zarr"}, "a job with --ckpt-format zarr is not transformed"),
    ],
)
def test_sizes_that_no_job_can_take(
    setting: str, changes: dict[str, Any], message: str, nodes: pytest.MonkeyPatch
) -> None:
    nodes.setenv("TTP_RESHAPE", setting)
    with pytest.raises(AdaptorError, match=message):
        megatron_nodes.fit(
            Namespace(**{**MODEL, "pipeline_model_parallel_size": 2, "world_size": 6, **changes})
        )
