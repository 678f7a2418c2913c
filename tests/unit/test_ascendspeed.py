"""The patches' checks of ModelLink's arguments, without the framework."""

from __future__ import annotations

from argparse import Namespace
from pathlib import Path
from typing import Any

import pytest
import torch

from adaptor import context
from adaptor.errors import UnsupportedError
from adaptor.frameworks import (
    ascendspeed,
    megatron_lm,
    megatron_restart,
    mindspeed_wrappers,
    supported_options,
)
from adaptor.protocol import environment
from adaptor.protocol.framework_options import START_ONLY


def _args(**changes: Any) -> Namespace:
    usual = {"optimizer": "adam", "use_distributed_optimizer": True, "local_copy_os": False}
    return Namespace(**{**usual, **changes})


def _require_protected(args: Namespace) -> None:
    for check in ascendspeed.checks(args):
        check()


REFUSED = (
    ({"deepspeed": True}, "--deepspeed is True: training by DeepSpeed"),
    ({"release_fp32_grad": True}, "--release-fp32-grad is True: an optimizer without fp32 gradients"),
    ({"optimizer": "cadam"}, "--optimizer is cadam: an optimizer other than adam and sgd"),
    ({"optimizer": "sgd"}, "--optimizer is sgd with --use-distributed-optimizer: the framework itself"),
    ({"lora_target_modules": ["dense"]}, "--lora-target-modules is .'dense'.: LoRA"),
    ({"num_experts": [4]}, "--num-experts is .4.: experts, which DeepSpeed trains"),
    ({"random_ltd": True}, "--random-ltd is True: random-LTD"),
    ({"data_efficiency_curriculum_learning": True}, "--data-efficiency-curriculum-learning is True: "),
    ({"foldx_mode": "fifo"}, "--foldx-mode is fifo: a folded pipeline"),
    ({"num_layers_per_virtual_pipeline_stage": 1}, "--num-layers-per-virtual-pipeline-stage is 1: an inter"),
    (
        {"use_distributed_optimizer": False, "local_copy_os": True},
        r"--local-copy-os \(TTP_LOCAL_COPY\) is given without --use-distributed-optimizer: add",
    ),
)


@pytest.mark.parametrize(("options", "line"), REFUSED)
def test_unsupported_options_are_refused(options: dict[str, Any], line: str) -> None:
    with pytest.raises(UnsupportedError, match=line):
        _require_protected(_args(**options))


@pytest.mark.parametrize(("variable", "value"), [("TTP_HOST_COPY", "5"), ("TTP_LAYOUT_ONLY", "layout")])
def test_settings_of_megatron_lm_alone(variable: str, value: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Settings without an effect on this framework are refused."""
    monkeypatch.setenv(variable, value)
    context.forget()
    with pytest.raises(UnsupportedError, match=f"^{variable} is set: "):
        _require_protected(_args())


@pytest.mark.parametrize(
    ("options", "line"),
    [
        ({"virtual_optimizer": [65.0]}, r"--virtual-optimizer is \[65.0\]: optimizer state that is on the"),
        ({"smart_swap": True}, "--smart-swap is True: tensors that are on the host"),
        ({"compress_optimizer": True}, "--compress-optimizer is True: compressed optimizer state"),
        ({"quant_states": "mxfp8"}, "--quant-states is mxfp8: optimizer state in 8 bits"),
        ({"quant_grads": True}, "--quant-grads is True: gradients with scales of their own"),
        (
            {"optimizer_selection": "fused_ema_adamw"},
            "--optimizer-selection is fused_ema_adamw: .*; use fused_adamw or fused_torch_adamw, or",
        ),
        ({"use_ema": True}, "--use-ema is True: an average of the weights"),
        ({"layerzero": True}, "--layerzero is True: LayerZero"),
        ({"enable_zero3": True}, "--enable-zero3 is True: ZeRO-3"),
        ({"enable_expert_placement": True}, "--enable-expert-placement is True: experts that move"),
    ],
)
def test_options_of_modellink_1_2_and_mindspeed_llm_are_refused(options: dict[str, Any], line: str) -> None:
    """These frameworks add the options to Megatron-LM's."""
    usual: dict[str, Any] = dict.fromkeys(name for name, _, _ in mindspeed_wrappers.ALLOWED_VALUES)
    usual |= {"optimizer_selection": "fused_adamw"}
    megatron_lm.require_protected(Namespace(**usual))
    with pytest.raises(UnsupportedError, match=line):
        megatron_lm.require_protected(Namespace(**options))


@pytest.mark.parametrize("option", ["reuse_fp32_param", "swap_optimizer"])
def test_main_params_in_other_memory(option: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Protected in the form that MindSpeed restores from a checkpoint."""
    usual = {option: True, "use_distributed_optimizer": True, "ckpt_format": "torch"}
    flag = f"--{option.replace('_', '-')} is True: it cannot be protected "

    def refused(line: str, **options: Any) -> None:
        with pytest.raises(UnsupportedError, match=f"^{flag}{line}"):
            megatron_lm.require_protected(Namespace(**{**usual, **options}))

    megatron_lm.require_protected(Namespace(**usual))
    refused("without --use-distributed-optimizer", use_distributed_optimizer=False)
    with monkeypatch.context() as patched:
        patched.setattr(supported_options, "writes_torch_dist", lambda args: args.ckpt_format == "torch_dist")
        if option == "swap_optimizer":
            refused("with another --ckpt-format than torch", ckpt_format="torch_dist")
            refused("with another --ckpt-format than torch", use_dist_ckpt=True)
        else:
            refused("in torch_dist from Megatron-core 0.13 on", ckpt_format="torch_dist")
            patched.setattr(supported_options, "writes_torch_dist", lambda args: False)
            megatron_lm.require_protected(Namespace(**{**usual, "ckpt_format": "torch_dist"}))
    if option == "reuse_fp32_param":
        refused("with --npu-deterministic", npu_deterministic=True)
    monkeypatch.setenv("TTP_LOCAL_COPY", "True")
    context.forget()
    refused("with a local copy")


def test_protected_jobs_are_accepted() -> None:
    _require_protected(_args(local_copy_os=True))
    _require_protected(_args(use_distributed_optimizer=False, optimizer="sgd"))


def test_a_copy_of_shards_is_refused_where_there_are_none(monkeypatch: pytest.MonkeyPatch) -> None:
    """On every framework; TTP_LOCAL_COPY copies everything that an update changes."""
    monkeypatch.delenv("TTP_LOCAL_COPY", raising=False)
    with pytest.raises(
        UnsupportedError, match="--local-copy-os is given without --use-distributed-optimizer: add"
    ):
        supported_options.take_local_copy(_args(use_distributed_optimizer=False, local_copy_os=True))
    assert not context.get().settings.local_copy
    supported_options.take_local_copy(_args(use_distributed_optimizer=False))
    options = _args(local_copy_os=True)
    supported_options.take_local_copy(options)
    assert context.get().settings.local_copy
    assert "local_copy_os" not in options, "the framework would save it"


@pytest.mark.parametrize("tracked", [True, False])
def test_a_restart_loads_all_that_was_saved(
    tracked: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """With --no-load-rng ModelLink would leave out the optimizer state, too."""
    began = {
        "no_load_optim": True,
        "no_load_rng": True,
        "load_main_params_from_ckpt": True,
        "no_load_lr_state": True,
        "reset_iteration": True,
    }
    args = Namespace(rank=0, save=str(tmp_path), load="/weights", finetune=False, **began)
    if tracked:
        (tmp_path / "latest_checkpointed_iteration.txt").write_text("3")
    monkeypatch.setenv(environment.IS_RESTART, "1")
    megatron_restart.resume_after_restart(args)
    options = {name: getattr(args, name) for name in began}
    stdout = capsys.readouterr().out
    if not tracked:  # it has saved nothing, and begins once more
        assert (args.load, options, stdout) == ("/weights", began, "")
        return
    assert args.load == args.save
    assert not any(options.values())
    assert f"--load is /weights: the restarted job loads from --save {tmp_path}" in stdout
    assert (
        "--no-load-optim, --no-load-rng, --load-main-params-from-ckpt, --no-load-lr-state, --reset" in stdout
    )


@pytest.mark.parametrize("setting", ["auto", "5"])
def test_a_restart_that_may_have_copies_looks_for_them(
    setting: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A job without --load may be set to exit without a checkpoint; it needs none to begin."""
    monkeypatch.setenv(environment.IS_RESTART, "1")
    monkeypatch.setenv(environment.COPY_FILES, '{"0": ["/proc/1/fd/7", "/proc/1/fd/8"]}')
    monkeypatch.setenv("TTP_HOST_COPY", setting)
    args = Namespace(rank=0, save=str(tmp_path), load=None, exit_on_missing_checkpoint=True)
    megatron_restart.resume_after_restart(args)
    assert (args.load, args.exit_on_missing_checkpoint) == (args.save, False)


@pytest.mark.robustness(
    "B9", "a job is restarted that was given no option of its beginning", "no line says that one is left out"
)
@pytest.mark.parametrize("spelling", ["{}", "{}/", "{}/../save"])
def test_a_restart_does_not_report_defaults(
    spelling: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Megatron's default of --load-main-params-from-ckpt is None; a folder has several spellings."""
    save = tmp_path / "save"
    save.mkdir()
    (save / "latest_checkpointed_iteration.txt").write_text("3")
    none = dict.fromkeys(("no_load_optim", "no_load_rng", "load_main_params_from_ckpt", "ckpt_step"))
    args = Namespace(rank=0, save=str(save), load=spelling.format(save), finetune=False, **none)
    monkeypatch.setenv(environment.IS_RESTART, "1")
    megatron_restart.resume_after_restart(args)
    assert (args.load, capsys.readouterr().out) == (str(save), "")


def test_a_restart_loads_the_optimizer_from_its_own_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever the spelling of the folder, and before any later save."""
    (tmp_path / "latest_checkpointed_iteration.txt").write_text("3")
    args = Namespace(rank=0, save=str(tmp_path), load=f"{tmp_path}/", finetune=False, no_load_optim=True)
    monkeypatch.setenv(environment.IS_RESTART, "1")
    megatron_restart.resume_after_restart(args)
    assert not args.no_load_optim


@pytest.mark.parametrize(
    ("saved", "options", "loads"),
    [
        ("3", {}, "/weights"),  # of an earlier run: this one began at 300, and has saved nothing
        ("301", {}, "--save"),
        ("3", {"finetune": True}, "--save"),  # which begins at 0
        ("3", {"reset_iteration": True}, "--save"),  # so does this
        ("250", {"ckpt_step": 200}, "--save"),
        ("150", {"ckpt_step": 200}, "/weights"),
        ("8", {"override_ckpt_iteration": 7}, "--save"),  # the weights of 300, with the data of step 8
        ("3", {"override_ckpt_iteration": 0}, "--save"),
        ("7", {"override_ckpt_iteration": 7}, "/weights"),
    ],
)
def test_a_restart_goes_back_to_no_earlier_run(
    saved: str, options: dict[str, Any], loads: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save, load = tmp_path / "save", tmp_path / "weights"
    for folder, step in ((save, saved), (load, "300")):
        folder.mkdir()
        (folder / "latest_checkpointed_iteration.txt").write_text(step)
    args = Namespace(
        rank=0, save=str(save), load=str(load), **{"finetune": False, "ckpt_step": None, **options}
    )
    monkeypatch.setenv(environment.IS_RESTART, "1")
    megatron_restart.resume_after_restart(args)
    assert args.load == str(save if loads == "--save" else load)
    expected = {name: START_ONLY[name] for name in options} if loads == "--save" else options
    assert {name: getattr(args, name) for name in options} == expected


def test_a_model_that_modelopt_has_converted() -> None:
    model = torch.nn.Sequential(torch.nn.Linear(2, 2))
    megatron_lm.require_unconverted([model])
    setattr(model[0], megatron_lm.MODELOPT, [("kd_loss", {})])  # of which nothing is saved
    megatron_lm.require_unconverted([model])
    setattr(model[0], megatron_lm.MODELOPT, [("quantize", {}), ("kd_loss", {})])
    with pytest.raises(UnsupportedError, match="the model was converted by ModelOpt"):
        megatron_lm.require_unconverted([model])


def test_samples_of_an_evaluation() -> None:
    """With --full-validation a rank without data gets rank 0's number."""
    args = Namespace(global_batch_size=8, do_valid=True, eval_interval=5)
    assert [megatron_lm.evaluated(args, 2, step) for step in (4, 5, 6, 10)] == [0, 16, 0, 16]
    assert megatron_lm.evaluated(args, [2, 3], 5) == 40
    args.eval_global_batch_size, args.start_eval_at_iter = 4, 10
    assert [megatron_lm.evaluated(args, 2, step) for step in (5, 10)] == [0, 8]
    args.do_valid = False
    assert megatron_lm.evaluated(args, 2, 10) == 0
    assert megatron_lm.evaluated(Namespace(eval_interval=1000), 2, 10) == 0


@pytest.mark.parametrize(
    ("world", "tensor", "pipeline", "size"), [(8, 2, 2, 2), (6, 2, 1, 3), (2, 4, 1, 1), (4, 2, 8, 1)]
)
def test_the_data_parallel_size(world: int, tensor: int, pipeline: int, size: int) -> None:
    """As in the framework, sizes too large for the job are reduced."""
    args = Namespace(
        world_size=world, tensor_model_parallel_size=tensor, pipeline_model_parallel_size=pipeline
    )
    assert ascendspeed.data_parallel_size(args) == size
