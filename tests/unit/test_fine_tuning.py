"""The refused kinds of fine-tuning, and the checkpoints loaded by restarts of the others."""

from __future__ import annotations

from argparse import Namespace
from pathlib import Path
from typing import Any

import pytest

from adaptor.errors import UnsupportedError
from adaptor.frameworks import fine_tuning, megatron_lm, megatron_restart
from adaptor.protocol import environment

# Defaults of MindSpeed-LLM's parsers; Megatron-LM's parsers have none of these options.
SINCE_2_2: dict[str, Any] = {
    "lora_target_modules": [],
    "lora_ckpt_filter": False,
    "lora_load": None,
    "deprecated_use_mcore_models": False,
    "stage": None,
    "ref_model": None,
    "lu_lora_final_layer_index": None,
}
BEFORE: dict[str, Any] = {
    "lora_target_modules": [],
    "lora_ckpt_filter": False,
    "use_mcore_models": True,
    "qlora": False,
    "stage": None,
}
MODELLINK: dict[str, Any] = {"lora_target_modules": [], "use_mcore_models": False, "stage": None}
LORA = {"lora_target_modules": ["linear_qkv"]}
FILTERED = {**LORA, "lora_ckpt_filter": True, "load": "/base"}


def _check(options: dict[str, Any]) -> None:
    for check in fine_tuning.checks(Namespace(**options)):
        check()


@pytest.mark.parametrize(
    "options",
    [
        {},
        SINCE_2_2,
        BEFORE,
        MODELLINK,
        {**SINCE_2_2, **LORA},
        {**SINCE_2_2, **LORA, "use_mcore_models": False},
        {**BEFORE, **LORA, "stage": "sft"},
        {**BEFORE, **LORA, "qlora": True},
        {**MODELLINK, **LORA, "use_mcore_models": True},
        {**SINCE_2_2, "stage": "dpo", "ref_model": "/base"},
        {**SINCE_2_2, **FILTERED},
        {**SINCE_2_2, **FILTERED, "ckpt_format": "torch_dist", "ckpt_step": 8},
        {**SINCE_2_2, "lora_ckpt_filter": True},
    ],
)
def test_full_fine_tuning_is_protected(options: dict[str, Any]) -> None:
    _check(options)


@pytest.mark.parametrize(
    ("options", "line"),
    [
        ({**SINCE_2_2, **FILTERED, "load": None}, "--lora-ckpt-filter is given without --load: "),
        (
            {**SINCE_2_2, **FILTERED, "ckpt_step": 8},
            "--ckpt-step is 8 with --lora-ckpt-filter: the base is what",
        ),
        (
            {**SINCE_2_2, **FILTERED, "lora_modules_to_save": ["output_layer"]},
            "--lora-modules-to-save is .* with --lora-ckpt-filter: these modules are trained, and no",
        ),
        (
            {**SINCE_2_2, **FILTERED, "enable_hf2mg_convert": True},
            "--enable-hf2mg-convert is True with --lora-ckpt-filter: the base is made anew at each start",
        ),
        (
            {**SINCE_2_2, **FILTERED, "stage": "dpo", "ref_model": "/base"},
            "--stage is dpo with --lora-ckpt-filter: two models are loaded",
        ),
        (
            {**BEFORE, **LORA, "use_mcore_models": False},
            r"--lora-target-modules is .'linear_qkv'.: checkpoints of models without --use-mcore-models lack",
        ),
        ({**MODELLINK, **LORA}, "checkpoints of models without --use-mcore-models lack the model"),
        (
            {**BEFORE, **LORA, "qlora": True, "qlora_save_dequantize": True},
            "--qlora-save-dequantize is True: checkpoints whose weights come back in more than 4 bits",
        ),
        ({**SINCE_2_2, "lu_lora_final_layer_index": 0}, "--lu-lora-final-layer-index is 0: LU-LoRA, which"),
        ({**BEFORE, "stage": "orm"}, "--stage is orm: a stage whose other models"),
        ({**SINCE_2_2, "stage": "dpo"}, "--stage is dpo without --ref-model, and --load is None: "),
        (
            {**SINCE_2_2, "stage": "dpo", "load": "/run", "save": "/run"},
            "--stage is dpo without --ref-model, and --load is /run: .*; add --ref-model, let --load",
        ),
        (
            {**SINCE_2_2, "stage": "dpo", "ref_model": "/base", "ckpt_step": 8},
            "--ckpt-step is 8 with --stage",
        ),
    ],
)
def test_partial_fine_tuning_is_refused(options: dict[str, Any], line: str) -> None:
    with pytest.raises(UnsupportedError, match=line):
        _check(options)
    with pytest.raises(UnsupportedError, match=line):
        megatron_lm.require_protected(Namespace(**options))


@pytest.mark.parametrize(
    ("options", "folder"),
    [
        ({}, "/base"),
        ({"enable_hf2mg_convert": True}, "/base/megatron_cache_tp2pp4ep1"),
        ({"enable_hf2mg_convert": True, "mg_save_dir": "/converted"}, "/converted"),
        ({"ref_model": "/other"}, "/other"),
    ],
)
def test_a_restart_of_dpo_has_the_reference_model_of_the_first_start(
    options: dict[str, Any], folder: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "latest_checkpointed_iteration.txt").write_text("3")
    sizes = {
        f"{part}_model_parallel_size": size for part, size in (("tensor", 2), ("pipeline", 4), ("expert", 1))
    }
    of_dpo = {"stage": "dpo", "ref_model": None, "load": "/base", "save": str(tmp_path), "rank": 0, **sizes}
    args = Namespace(**{**SINCE_2_2, **of_dpo, **options})
    _check(vars(args))
    monkeypatch.setenv(environment.IS_RESTART, "1")
    megatron_restart.resume_after_restart(args)
    assert (args.load, args.ref_model) == (str(tmp_path), folder)


def test_a_restart_loads_its_own_adapters(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """--lora-load would replace them; the converted weights were in the first --load."""
    (tmp_path / "latest_checkpointed_iteration.txt").write_text("3")
    monkeypatch.setenv(environment.IS_RESTART, "1")
    args = Namespace(
        rank=0,
        save=str(tmp_path),
        load="/huggingface",
        finetune=True,
        lora_load="/adapters",
        enable_hf2mg_convert=True,
    )
    megatron_restart.resume_after_restart(args)
    assert args.load == str(tmp_path)
    assert (args.finetune, args.lora_load, args.enable_hf2mg_convert) == (False, None, False)
    assert "--finetune, --lora-load, --enable-hf2mg-convert: not for the restarted" in capsys.readouterr().out
