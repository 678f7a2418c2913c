"""Layouts and modes of Megatron that are refused, before anything is built."""

from __future__ import annotations

import math
import re
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from adaptor import context
from adaptor.errors import ConfigError, UnsupportedError
from adaptor.frameworks import parallel_sizes, supported_options
from adaptor.replica.choice import ReplicaChoice, describe

# Megatron-LM's own defaults, and what the tests here are about.
PROTECTED = {
    "pipeline_model_parallel_size": 1,
    "tensor_model_parallel_size": 1,
    "expert_model_parallel_size": 1,
    "num_experts": None,
    "expert_tensor_parallel_size": None,
    "sequence_parallel": False,
    "use_megatron_fsdp": False,
    "use_torch_fsdp2": False,
    "use_precision_aware_optimizer": False,
    "optimizer_cpu_offload": False,
    "fp8": None,
    "fp4": None,
    "optimizer": "adam",
    "overlap_grad_reduce": False,
    "overlap_param_gather": False,
    "async_save": None,
    "non_persistent_save_interval": None,
    "ckpt_format": "torch",
    "inprocess_restart": False,
    "perform_rl_step": False,
    "vision_pretraining_type": "classify",
    "qk_clip": False,
    "optimizer_cuda_graph": False,
    "gtp_weight_remat_size": 1,
    "expert_gtp_weight_remat_size": 1,
    "world_size": 4,
}

REFUSED = [
    ("use_megatron_fsdp", True),
    ("use_custom_fsdp", True),
    ("use_torch_fsdp2", True),
    ("fp4", "e2m1"),
    ("optimizer", "soap"),
    ("non_persistent_save_interval", 100),
    ("ckpt_format", "zarr"),
    ("inprocess_restart", True),
    ("perform_rl_step", True),
    ("vision_pretraining_type", "dino"),
    ("qk_clip", True),
    ("optimizer_cuda_graph", True),
    ("gtp_weight_remat_size", 2),
    ("expert_gtp_weight_remat_size", 2),
    ("encoder_pipeline_model_parallel_size", 1),
    ("enable_hetero", True),
    ("freeze_all_layers", True),
    ("yaml_cfg", "gpt.yaml"),
]

# An optimizer on the host as it can be protected.
OFFLOADED = {
    "optimizer_cpu_offload": True,
    "optimizer_offload_fraction": 1.0,
    "use_distributed_optimizer": True,
    "use_precision_aware_optimizer": True,
}


def args(**changed: Any) -> SimpleNamespace:
    return SimpleNamespace(**{**PROTECTED, **changed})


@pytest.mark.parametrize(
    ("switch", "message"),
    [
        (
            "enable_high_availability",
            "--enable-high-availability is given (HIGH_AVAILABILITY sets it, too): ",
        ),
        ("ttp_enabled", "--ttp-enabled is given: "),
    ],
)
def test_a_second_system_that_saves_the_job(switch: str, message: str) -> None:
    supported_options.require_alone(args())
    supported_options.require_alone(args(**{switch: False}))
    with pytest.raises(UnsupportedError) as refused:
        supported_options.require_alone(args(**{switch: True}))
    assert str(refused.value) == (
        f"{message}two systems cannot save the same job; leave it out, or set ENABLE_TTP=False"
    )


def test_a_job_on_a_cpu_without_the_options_that_it_needs() -> None:
    defaults = args(transformer_impl="transformer_engine", gradient_accumulation_fusion=True)
    supported_options.require_cpu_options(defaults)
    context.begin({"TTP_DEVICE": "cpu"})
    with pytest.raises(ConfigError, match=r"--transformer-impl is transformer_engine, .* --no-rope-fusion"):
        supported_options.require_cpu_options(defaults)
    fused = args(transformer_impl="local", gradient_accumulation_fusion=True)
    with pytest.raises(ConfigError, match=r"--gradient-accumulation-fusion is True, .* --no-masked-softmax"):
        supported_options.require_cpu_options(fused)
    supported_options.require_cpu_options(args(transformer_impl="local", gradient_accumulation_fusion=False))


def test_protected_options_are_accepted() -> None:
    supported_options.require_protected(args())
    supported_options.require_protected(args(ckpt_format="torch_dist", tensor_model_parallel_size=2))
    supported_options.require_protected(args(async_save=False, no_save_optim=True, no_save_rng=True))
    supported_options.require_protected(args(pipeline_model_parallel_size=2, sequence_parallel=True))


def test_a_config_that_names_no_format_is_judged_by_that_of_last_words() -> None:
    config = SimpleNamespace(fp8_param_gather=True)
    supported_options.require_protected(config, format="torch_dist")
    with pytest.raises(UnsupportedError, match="--fp8-param-gather is True"):
        supported_options.require_protected(config, format="torch")


def test_a_student_in_a_format_that_the_framework_cannot_load() -> None:
    student = args(export_kd_teacher_load="teacher")
    supported_options.require_protected(student, format="torch_dist")
    with pytest.raises(UnsupportedError, match=r"--export-kd-teacher-load is teacher: .* use --ckpt-format"):
        supported_options.require_protected(student)


def test_an_argument_that_this_version_does_not_have_is_no_obstacle() -> None:
    supported_options.require_protected(SimpleNamespace())


@pytest.mark.parametrize(("name", "value"), REFUSED)
def test_an_unprotected_option_is_named_in_one_line(name: str, value: Any) -> None:
    with pytest.raises(UnsupportedError) as caught:
        supported_options.require_protected(args(**{name: value}))
    line = str(caught.value)
    assert line.startswith(f"--{name.replace('_', '-')} is {value}: ")
    assert line.endswith("or set ENABLE_TTP=False")
    assert "\n" not in line


@pytest.mark.parametrize(
    ("changed", "line"),
    [
        (OFFLOADED, ""),
        ({**OFFLOADED, "fp8": "e4m3", "fp8_recipe": "blockwise", "exp_avg_dtype": "fp8"}, ""),
        (
            {**OFFLOADED, "use_precision_aware_optimizer": False},
            "--optimizer-cpu-offload is True: it cannot be protected without --use-precision-aware-optimizer",
        ),
        (
            {**OFFLOADED, "optimizer_offload_fraction": 0.5},
            "--optimizer-cpu-offload is True: it cannot be protected with another --optimizer-offload-fr",
        ),
        (
            {"dataloader_save": "run", "save": "./run"},
            "--dataloader-save is run, which is the --save folder",
        ),
        ({"dataloader_save": "run/loaders", "save": "run"}, ""),
        ({"dataloader_save": "run", "save": None}, ""),  # a later check names the missing option
        ({"optimizer": "muon", "muon_tp_mode": "duplicated"}, ""),
        (
            {"optimizer": "muon", "muon_tp_mode": "duplicated", "tensor_model_parallel_size": 2},
            "--muon-tp-mode is duplicated: an update that asks other tensor-parallel ranks",
        ),
        ({"optimizer": "muon", "use_distributed_optimizer": True, "ckpt_format": "torch_dist"}, ""),
        (
            {"optimizer": "muon", "use_distributed_optimizer": True, "ckpt_format": "torch"},
            "--ckpt-format is torch: with --optimizer dist_muon, or muon and --use-distributed-opt",
        ),
        ({"optimizer": "dist_muon", "ckpt_format": "torch"}, "--ckpt-format is torch: with --optimi"),
        ({"fp8": "hybrid"}, ""),
        (
            {"fp8": "hybrid", "tp_only_amax_red": True},
            "--fp8-recipe is delayed: with --tp-only-amax-red each data-parallel rank has histories of its",
        ),
        (
            {"fp8": "hybrid", "fp8_param_gather": True},
            "--fp8-recipe is delayed: with --fp8-param-gather the update uses scales that",
        ),
        ({"fp8": "hybrid", "fp8_recipe": "custom"}, "--fp8-recipe is custom: the state of its quantizers"),
        ({"fp8": "e4m3", "fp8_recipe": "mxfp8"}, ""),
        (
            {"fp8": "e4m3", "fp8_recipe": "blockwise", "fp8_param_gather": True},
            "--fp8-param-gather is True: last words in the format torch would have other scales",
        ),
        ({"use_precision_aware_optimizer": True, "use_distributed_optimizer": True}, ""),
        (
            {"use_precision_aware_optimizer": True, "use_distributed_optimizer": False},
            "--use-precision-aware-optimizer is True: it cannot be protected without --use-distributed-opt",
        ),
        (
            {"use_precision_aware_optimizer": True, "fp8_recipe": "mxfp8", "main_params_dtype": "fp16"},
            "--main-params-dtype is fp16: main params of this type have scales",
        ),
        (
            {"use_precision_aware_optimizer": True, "fp8_recipe": "mxfp8", "exp_avg_sq_dtype": torch.uint8},
            "--exp-avg-sq-dtype is uint8: moments of this type have scales outside of",
        ),
        ({"use_precision_aware_optimizer": True, "fp8_recipe": "mxfp8", "exp_avg_dtype": "bf16"}, ""),
        (
            {
                "use_precision_aware_optimizer": True,
                "fp8_recipe": "blockwise",
                "exp_avg_dtype": torch.bfloat16,
                "main_params_dtype": torch.float32,
            },
            "",
        ),
    ],
)
def test_fp8_and_moments_of_fewer_bits(changed: dict[str, Any], line: str) -> None:
    if not line:
        supported_options.require_protected(args(**changed))
        return
    with pytest.raises(UnsupportedError) as caught:
        supported_options.require_protected(args(**changed))
    assert str(caught.value).startswith(line)
    assert str(caught.value).endswith("set ENABLE_TTP=False")
    assert "\n" not in str(caught.value)


def test_the_distributed_checkpoints_of_an_older_framework_are_refused() -> None:
    supported_options.require_protected(args(use_dist_ckpt=True, ckpt_format="torch_dist"))
    supported_options.require_protected(SimpleNamespace(use_dist_ckpt=False))
    with pytest.raises(UnsupportedError, match="--use-dist-ckpt is True: "):
        supported_options.require_protected(SimpleNamespace(use_dist_ckpt=True))


def test_one_of_several_configs_is_enough_to_refuse() -> None:
    supported_options.require_protected(args(), SimpleNamespace(use_torch_fsdp2=False))
    with pytest.raises(UnsupportedError, match="--use-torch-fsdp2 is True"):
        supported_options.require_protected(args(), SimpleNamespace(use_torch_fsdp2=True))


def test_an_asynchronous_save_needs_a_format_that_has_it() -> None:
    supported_options.require_protected(args(async_save=True, ckpt_format="torch_dist"))
    with pytest.raises(
        UnsupportedError, match="--async-save is True with --ckpt-format torch: the framework"
    ):
        supported_options.require_protected(args(async_save=True))


def test_every_refusal_is_tested() -> None:
    of_plug_ins = ("ckpt_format",)  # which values it may have depends on what is installed
    refused = [name for name, _ in REFUSED if name not in of_plug_ins]
    assert refused == [name for name, _, _ in supported_options.ALLOWED_VALUES]


@pytest.mark.parametrize(("world", "tensor", "size"), [(1, 1, 1), (4, 1, 4), (4, 2, 2), (8, 4, 2), (6, 2, 3)])
def test_the_data_parallel_size(world: int, tensor: int, size: int) -> None:
    assert (
        supported_options.data_parallel_size(args(world_size=world, tensor_model_parallel_size=tensor))
        == size
    )


@pytest.mark.parametrize(
    ("size", "setting", "expected"),
    [
        (2, "auto", "split"),
        (64, "auto", "split"),
        (3, "auto", "mirror"),
        (1, "auto", "none"),
        (4, "split", "split"),
        (2, "mirror", "mirror"),
        (3, "mirror", "mirror"),
        (1, "none", "none"),
        (4, "none", "none"),
    ],
)
def test_the_replica(size: int, setting: str, expected: str) -> None:
    assert chosen(setting).replica(size) == expected


def test_ranks_with_the_same_experts_are_split_as_well() -> None:
    assert chosen("auto").replica(4, experts=2) == "split"
    assert chosen("auto").replica(4, experts=1) == "mirror"
    assert chosen("auto").replica(6, experts=3) == "mirror"
    with pytest.raises(UnsupportedError, match="3 ranks have the same experts, which is odd"):
        chosen("split").replica(6, experts=3)


@pytest.mark.parametrize(
    ("changed", "size"),
    [
        ({}, 4),
        ({"num_experts": 4, "expert_model_parallel_size": 2}, 2),
        ({"num_experts": 4, "expert_model_parallel_size": 4, "pipeline_model_parallel_size": 1}, 1),
        ({"num_experts": 4, "tensor_model_parallel_size": 2}, 2),
        (
            {
                "num_experts": 4,
                "tensor_model_parallel_size": 2,
                "expert_tensor_parallel_size": 1,
                "expert_model_parallel_size": 2,
            },
            2,
        ),
    ],
)
def test_the_data_parallel_size_of_experts(changed: dict[str, Any], size: int) -> None:
    assert supported_options.expert_data_parallel_size(args(**changed)) == size


@pytest.mark.parametrize(
    ("size", "setting", "message"),
    [
        (1, "split", "TTP_REPLICA is split, but the data-parallel size is 1"),
        (1, "mirror", "TTP_REPLICA is mirror, but the data-parallel size is 1"),
        (3, "split", "TTP_REPLICA is split, but the data-parallel size is 3, which is odd"),
    ],
)
def test_a_size_that_does_not_allow_it_is_refused(size: int, setting: str, message: str) -> None:
    with pytest.raises(UnsupportedError, match=message) as caught:
        chosen(setting).replica(size)
    assert "use auto" in str(caught.value)


@pytest.mark.parametrize("tensor", [1, 2, 3, 4, 6])
@pytest.mark.parametrize("cut", [1, 2, 3, 4, 6])
@pytest.mark.parametrize("experts", [1, 2, 3, 4])
def test_experts_have_folders_or_are_refused(tensor: int, cut: int, experts: int) -> None:
    """Ranks of a folder have the same experts, and include the first rank with these experts."""
    ranks = range(math.lcm(tensor, cut * experts) * 2)
    folders: dict[tuple[int, int], list[int]] = {}
    for rank in ranks:
        folders.setdefault((rank % tensor, rank // cut % experts), []).append(rank)
    fit = all(
        len({rank % (cut * experts) for rank in members}) == 1 and members[0] < cut * experts
        for members in folders.values()
    )
    if fit and tensor % cut == 0:
        supported_options.require_folders_for_experts(tensor, cut, experts)
    else:
        with pytest.raises(
            UnsupportedError, match=f"--expert-tensor-parallel-size is {cut}: .* or set ENABLE_TTP"
        ):
            supported_options.require_folders_for_experts(tensor, cut, experts)


def test_experts_are_cut_like_the_rest_where_nothing_is_said() -> None:
    supported_options.require_folders_for_experts(2, None, 1)


@pytest.mark.parametrize(
    ("options", "alone"),
    [
        ({}, True),
        ({"num_experts": None}, False),
        ({"world_size": 16}, False),  # two ranks have each expert
        ({"moe_layer_freq": 2}, True),
        ({"moe_layer_freq": [0, 0, 1, 1, 1, 1, 1, 1]}, True),
        ({"moe_layer_freq": [0, 0, 0, 0, 1, 1, 1, 1]}, False),  # the first stage has none
        (
            {"moe_layer_freq": [0, 0, 0, 0, 1, 1, 1, 1], "num_virtual_stages_per_pipeline_rank": 2},
            True,
        ),
        ({"first_k_dense_replace": 4}, False),
        ({"first_k_dense_replace": 3}, True),
        ({"num_layers_per_virtual_pipeline_stage": 8}, False),  # which the framework refuses afterwards
        ({"decoder_first_pipeline_num_layers": 2}, False),  # not known
        ({"pipeline_model_parallel_size": 1, "world_size": 4, "num_layers": None}, True),
    ],
)
def test_experts_that_each_rank_has_alone(options: dict[str, Any], alone: bool) -> None:
    """A death then loses some, whatever second copies the rest has; `auto` makes none."""
    sizes = {
        "tensor_model_parallel_size": 1,
        "pipeline_model_parallel_size": 2,
        "expert_model_parallel_size": 4,
        "world_size": 8,
        "num_experts": 8,
        "num_layers": 8,
    }
    assert parallel_sizes.has_lone_experts(SimpleNamespace(**(sizes | options))) is alone
    for setting, kind in (("auto", "none" if alone else "mirror"), ("mirror", "mirror")):
        choice = chosen(setting)
        choice.has_lone_parts(alone)
        assert choice.replica(4, 1) == kind


def chosen(setting: str) -> ReplicaChoice:
    """The choice of a job that has just begun, with TTP_REPLICA."""
    return context.begin({"TTP_REPLICA": setting}).part(ReplicaChoice)


def test_instances() -> None:
    choice = chosen("auto")
    assert choice.instances(4, requested_instances=1) == 2
    assert choice.instances(8, requested_instances=4) == 4, "the user asked the framework for more"
    assert choice.instances(3, requested_instances=1) == 1
    choice.decide(False, 4)
    assert choice.instances(4, requested_instances=1) == 1, (
        "without a distributed optimizer every rank is a copy"
    )
    choice.decide(True, 4)
    assert choice.instances(4, requested_instances=1) == 2


def test_mirrors() -> None:
    choice = chosen("mirror")
    choice.decide(True, 4)
    assert choice.instances(4, requested_instances=1) == 1
    assert choice.wants_mirrors(4, instances=1)
    assert not choice.wants_mirrors(4, instances=4)


def test_no_replicas() -> None:
    choice = chosen("none")
    choice.decide(True, 4)
    assert choice.instances(4, requested_instances=1) == 1
    assert not choice.wants_mirrors(3, instances=1)
    choice.require_instances(3, instances=1)


def test_split_of_an_odd_size_is_refused_once_the_optimizer_is_known() -> None:
    choice = chosen("split")
    assert choice.instances(3, requested_instances=1) == 1, (
        "nobody has said whether the optimizer is distributed"
    )
    with pytest.raises(UnsupportedError, match="odd"):
        choice.require_instances(3, instances=1)
    choice.decide(False, 3)
    with pytest.raises(UnsupportedError, match="odd"):
        choice.decide(True, 3)


NO_INSTANCES = "Megatron-core 0.9.0 has no optimizer instances"


def test_a_framework_without_right_instances_has_mirrors() -> None:
    choice = chosen("auto")
    choice.cannot_split(NO_INSTANCES)
    assert choice.replica(4) == "mirror"
    assert choice.instances(4, requested_instances=1) == 1
    assert choice.instances(4, requested_instances=2) == 2, "the user asked the framework for more"
    assert choice.wants_mirrors(4, instances=1)


def test_split_is_refused_without_right_instances_once_the_optimizer_is_known() -> None:
    choice = chosen("split")
    choice.cannot_split(NO_INSTANCES)
    assert choice.instances(4, requested_instances=1) == 1, (
        "nobody has said whether the optimizer is distributed"
    )
    choice.decide(False, 4)
    with pytest.raises(
        UnsupportedError, match=r"is split, but Megatron-core 0\.9\.0 has no .*: use auto or mirror"
    ):
        choice.decide(True, 4)


@pytest.mark.parametrize(
    ("size", "instances", "sharded", "mirrored", "message"),
    [
        (1, 1, True, 0, "the death of a process is not"),
        (2, 1, False, 0, "nothing is added"),
        (4, 2, True, 0, "by split, 2 instances: 6.0 MiB more on rank 0"),
        (3, 1, True, 3 << 20, "by mirror: 3.0 MiB more on rank 0"),
        (4, 1, True, 0, "(TTP_REPLICA=none)"),
    ],
)
def test_the_description_of_copies(
    size: int, instances: int, sharded: bool, mirrored: int, message: str
) -> None:
    assert message in describe(size, instances, sharded, 1 << 20, mirrored)


def test_a_loop_of_a_user_repeats_no_micro_batches() -> None:
    context.begin({"TTP_VERIFY_EVERY": "1", "TTP_REPLAY_EVERY": "5"})
    with pytest.raises(UnsupportedError, match="TTP_REPLAY_EVERY is 5: only scripts of Megatron-LM"):
        supported_options.require_no_replay()
    context.begin({"TTP_VERIFY_EVERY": "1"})
    supported_options.require_no_replay()


@pytest.mark.parametrize(
    ("options", "line"),
    [
        ({"global_batch_size": 16}, ""),
        ({"global_batch_size": None}, ""),
        (
            {"global_batch_size": 12},
            "--global-batch-size is 12, no multiple of 8: --micro-batch-size 2 times the data-parallel",
        ),
        (
            {"global_batch_size": 16, "rampup_batch_size": ["4", "4", "100"]},
            "--global-batch-size is 16 and 4 ",
        ),
        ({"global_batch_size": 12, "decrease_batch_size_if_needed": True}, ""),
    ],
)
def test_a_global_batch_that_the_ranks_cannot_share(options: dict[str, Any], line: str) -> None:
    sizes = {"world_size": 8, "tensor_model_parallel_size": 2, "pipeline_model_parallel_size": 1}
    args = SimpleNamespace(micro_batch_size=2, **sizes, **options)
    if not line:
        parallel_sizes.require_whole_batches(args)
        return
    with pytest.raises(UnsupportedError, match=f"^{re.escape(line)}"):
        parallel_sizes.require_whole_batches(args)
