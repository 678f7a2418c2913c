"""The refusals of the adapters; tests/integration/test_adapters.py trains the protected jobs."""

from __future__ import annotations

import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

import adaptor
from adaptor import patches
from adaptor.adapters import mcore_adapter, megatron_bridge, ms_swift


def bridge_config(**sections: dict[str, Any]) -> SimpleNamespace:
    """The config of a protected job, with some values changed by section."""
    defaults: dict[str, dict[str, Any]] = {
        "checkpoint": {"save": "/save", "ckpt_format": "torch_dist", "async_save": False},
        "train": {"exit_interval": None, "iterations_to_skip": []},
        "dataset": {"dataloader_type": "single"},
        **{name: {} for name in ("optimizer", "dist", "ddp", "rng", "model", "ft", "inprocess_restart")},
    }
    values = {name: SimpleNamespace(**{**defaults[name], **sections.get(name, {})}) for name in defaults}
    return SimpleNamespace(**values, peft=sections.get("peft"))


@pytest.mark.parametrize(
    ("sections", "message"),
    [
        ({"checkpoint": {"save": None}}, "checkpoint.save is None"),
        ({"checkpoint": {"ckpt_format": "fsdp_dtensor"}}, "checkpoint.ckpt_format is 'fsdp_dtensor'"),
        ({"checkpoint": {"save_optim": False}}, "checkpoint.save_optim is False"),
        ({"dist": {"use_decentralized_pg": True}}, "use_decentralized_pg is set"),
        ({"ddp": {"use_megatron_fsdp": True}}, "use_megatron_fsdp is set"),
        ({"optimizer": {"optimizer_cuda_graph": True}}, "optimizer_cuda_graph is set"),
        ({"train": {"iterations_to_skip": [3]}}, "iterations_to_skip is set"),
        ({"rng": {"data_parallel_random_init": True}}, "data_parallel_random_init is set"),
        ({"peft": {"dim": 8}}, "peft is set"),
        ({"ft": {"enable_ft_package": True}}, "ft is on"),
        ({"inprocess_restart": {"enabled": True}}, "inprocess_restart is on"),
    ],
)
def test_megatron_bridge_refuses(sections: dict[str, Any], message: str) -> None:
    (refusal,) = megatron_bridge.refused(bridge_config(**sections))
    assert refusal.startswith(message)


def test_megatron_bridge_protects_a_common_config() -> None:
    config = bridge_config()
    assert list(megatron_bridge.refused(config)) == []
    assert megatron_bridge.why_not_online(config) == ""


@pytest.mark.parametrize(
    ("sections", "message"),
    [
        ({"checkpoint": {"async_save": True}}, "checkpoint.async_save"),
        ({"model": {"cuda_graph_impl": "local"}}, "model.cuda_graph_impl is local"),
        ({"train": {"exit_interval": 100}}, "train.exit_interval"),
        ({"dataset": {"dataloader_type": "batch"}}, "dataset.dataloader_type batch"),
    ],
)
def test_megatron_bridge_restarts_all(sections: dict[str, Any], message: str) -> None:
    assert megatron_bridge.why_not_online(bridge_config(**sections)).startswith(message)


def test_a_report_imports_no_framework_that_a_script_does_not_use(monkeypatch: pytest.MonkeyPatch) -> None:
    patches.load("ttp")
    absent = patches.of_absent_frameworks()
    assert {"megatron.bridge.training.train", "swift.megatron.trainers.base"} < absent
    assert "megatron.training.training" not in absent
    monkeypatch.setitem(sys.modules, "flagscale.train.train", ModuleType("flagscale.train.train"))
    assert absent - patches.of_absent_frameworks() == {"flagscale.train.train"}


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"tuner_type": "lora_llm"}, "--tuner_type is lora_llm"),
        ({"rlhf_type": "grpo", "vllm_mode": "server"}, "--vllm_mode is server"),
        ({"use_megatron_fsdp": True}, "--use_megatron_fsdp is set"),
        ({"streaming": True}, "--streaming is true"),
    ],
)
def test_ms_swift_refuses(options: dict[str, Any], message: str) -> None:
    (refusal,) = ms_swift.refused(SimpleNamespace(**{"tuner_type": "full", **options}))
    assert refusal.startswith(message)


class PeftModel:
    """A model with adapters."""


class ExportableState:
    """A callback with a state of its own."""


def mca_trainer(monkeypatch: pytest.MonkeyPatch, **options: Any) -> SimpleNamespace:
    """The trainer of a protected job, with some options changed."""
    package, module = ModuleType("mcore_adapter.trainer"), ModuleType("mcore_adapter.trainer.trainer")
    vars(module).update(PeftModel=PeftModel, ExportableState=ExportableState)
    vars(package).update(trainer=module)
    monkeypatch.setitem(sys.modules, "mcore_adapter", ModuleType("mcore_adapter"))
    monkeypatch.setitem(sys.modules, package.__name__, package)
    monkeypatch.setitem(sys.modules, module.__name__, module)
    arguments = {"ignore_data_skip": False, "auto_find_batch_size": False, **options}
    return SimpleNamespace(
        model=[object()],
        args=SimpleNamespace(**arguments),
        train_dataset=[1, 2],
        callback_handler=SimpleNamespace(callbacks=[object()]),
    )


@pytest.mark.parametrize(
    ("options", "parts", "message"),
    [
        ({"ignore_data_skip": True}, {}, "ignore_data_skip is True"),
        ({"auto_find_batch_size": True}, {}, "auto_find_batch_size is True"),
        ({}, {"model": [PeftModel()]}, "the model is a PeftModel"),
        ({}, {"train_dataset": iter([1])}, "the train dataset has no length"),
    ],
)
def test_mcore_adapter_refuses(
    monkeypatch: pytest.MonkeyPatch, options: dict[str, Any], parts: dict[str, Any], message: str
) -> None:
    trainer = mca_trainer(monkeypatch, **options)
    vars(trainer).update(parts)
    (refusal,) = mcore_adapter.refused(trainer)
    assert refusal.startswith(message)


def test_mcore_adapter_restarts_all_where_a_callback_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    trainer = mca_trainer(monkeypatch)
    assert list(mcore_adapter.refused(trainer)) == []
    assert mcore_adapter.why_not_online(trainer) == ""
    trainer.callback_handler.callbacks.append(ExportableState())
    assert mcore_adapter.why_not_online(trainer).startswith("ExportableState has a state of its own")


def test_mcore_adapter_passes_over_saves_from_which_it_cannot_resume(tmp_path: Path) -> None:
    def save(name: str, state: str, *other_files: str) -> Path:
        for file in (*other_files, "rng_state_0.pth", "rng_state_1.pth"):
            (tmp_path / name / file).parent.mkdir(parents=True, exist_ok=True)
            (tmp_path / name / file).touch()
        (tmp_path / name / mcore_adapter.TRAINER_STATE).write_text(state)
        return tmp_path / name

    assert mcore_adapter._newest(tmp_path, 2) is None
    save("checkpoint-9", '{"global_step": 9}')  # without its optimizer
    save("checkpoint-8", '{"global_', mcore_adapter.SCHEDULER)  # cut off
    save(
        "checkpoint-7", '{"global_step": 7}', mcore_adapter.SCHEDULER, "iter_0000001/dist_model/metadata.json"
    )
    assert mcore_adapter._newest(tmp_path, 2) is None
    newest = save("checkpoint-6", '{"global_step": 6}', mcore_adapter.SCHEDULER)
    assert mcore_adapter._newest(tmp_path, 2) == newest
    assert mcore_adapter._newest(tmp_path, 4) is None
    last_words = tmp_path / mcore_adapter.LAST_WORDS
    last_words.mkdir()
    (last_words / mcore_adapter.TRACKER).write_text("6")
    assert mcore_adapter._newest(tmp_path, 2) == last_words / "iter_0000006"


def refused_by_mm(options: SimpleNamespace) -> list[str]:
    patches.load("ttp")  # Megatron-LM's patches first, whose wrappers the adapter uses
    from adaptor.adapters import copied_loops

    return list(copied_loops.refused(options))


def mm_options(model: dict[str, Any], **arguments: Any) -> SimpleNamespace:
    return SimpleNamespace(mm=SimpleNamespace(model=SimpleNamespace(**model)), **arguments)


@pytest.mark.parametrize(
    ("options", "name"),
    [
        (mm_options({}, lora_target_modules=["q"]), "lora_target_modules"),
        (mm_options({"use_dynamic_dpcp": True}), "use_dynamic_dpcp"),
        (mm_options({"patch": SimpleNamespace(use_fsdp1=True)}), "use_fsdp1"),
    ],
)
def test_mindspeed_mm_refuses(options: SimpleNamespace, name: str) -> None:
    (refusal,) = refused_by_mm(options)
    assert refusal.startswith(f"{name} is set")


def test_mindspeed_mm_refuses_training_with_preferences(monkeypatch: pytest.MonkeyPatch) -> None:
    options = mm_options({"patch": SimpleNamespace(use_fsdp1=False)}, lora_target_modules=[])
    assert refused_by_mm(options) == []
    monkeypatch.setitem(sys.modules, "mindspeed_mm.tasks.rl.dpo.dpo_trainer", ModuleType("dpo_trainer"))
    (refusal,) = refused_by_mm(options)
    assert "reference model" in refusal


@pytest.mark.parametrize("kind", [None, "dpo", "kto", "rm", "grpo", "gkd"])
@pytest.mark.parametrize("tuner", ["full", "lora"])
def test_ms_swift_protects_fine_tuning(kind: str | None, tuner: str) -> None:
    options = SimpleNamespace(tuner_type=tuner, rlhf_type=kind, fp8_param_gather=True)
    assert list(ms_swift.refused(options)) == []


def test_ms_swift_loads_the_newest_of_its_own_saves_and_last_words(tmp_path: Path) -> None:
    assert ms_swift._newest(tmp_path) is None
    for name, step in (("checkpoint-9", 9), ("last_words", 10), ("checkpoint-2", 2)):
        (tmp_path / name).mkdir()
        (tmp_path / name / ms_swift.TRACKER).write_text(str(step))
    assert ms_swift._newest(tmp_path) == tmp_path / "last_words"


def test_ms_swift_goes_on_from_last_words_where_its_own_saves_have_no_optimizer(tmp_path: Path) -> None:
    for name, step in (("checkpoint-9", 9), ("last_words", 4)):
        (tmp_path / name).mkdir()
        (tmp_path / name / ms_swift.TRACKER).write_text(str(step))
    assert ms_swift._newest(tmp_path, is_whole=False) == tmp_path / "last_words"


class Chunk:
    """A model chunk after an aborted evaluation, with or without the hooks of overlapped gathers."""

    def __init__(self, hooks: bool) -> None:
        self.training = False
        self.remove_forward_pre_hook_handles = {1: None} if hooks else {}

    def train(self) -> None:
        self.training = True

    def disable_forward_pre_hook(self, param_sync: bool) -> None:
        assert not param_sync
        self.remove_forward_pre_hook_handles.clear()


@pytest.mark.parametrize("is_newcomer", [False, True])
def test_after_a_fault_ms_swift_trains_alike_on_survivors_and_in_a_new_process(is_newcomer: bool) -> None:
    """The next step enables the hooks on all ranks: otherwise other ranks would wait for its gathers."""
    chunk = Chunk(hooks=not is_newcomer)
    trainer = SimpleNamespace(
        args=SimpleNamespace(global_batch_size=4),
        state=SimpleNamespace(iteration=0 if is_newcomer else 7),
        config=SimpleNamespace(param_sync_func=None if is_newcomer else print),
        wrapped_models=[chunk],
        _saved_param_sync_func=print,
        _start_iteration=0,
        _pre_hook_enabled=not is_newcomer,
    )
    ms_swift._set_to_step(trainer, 6)
    assert (trainer.state.iteration, trainer.state.consumed_train_samples) == (6, 24)
    assert trainer._start_iteration == trainer.state.iteration
    assert (trainer._pre_hook_enabled, trainer.config.param_sync_func) == (False, None)
    assert chunk.training
    assert not chunk.remove_forward_pre_hook_handles


def test_a_restart_of_megatron_bridge_loads_all_of_a_save(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first start's exclusions for a foreign checkpoint do not apply to the job's own save."""
    monkeypatch.setattr(adaptor, "enable", lambda: None)
    monkeypatch.setattr(adaptor, "is_restart", lambda: True)
    (tmp_path / megatron_bridge.TRACKER).write_text("3")
    start_options = {
        "load": "/other",
        "finetune": True,
        "ckpt_step": 5,
        "load_optim": False,
        "load_rng": False,
    }
    config = bridge_config(
        checkpoint={"save": str(tmp_path), "load_main_params_from_ckpt": True, **start_options}
    )
    patch = next(patch for patch in megatron_bridge.bridge.patches if patch.target.endswith("setup:setup"))
    patch.effect(lambda state: None, None, (SimpleNamespace(cfg=config),), {})
    loaded = config.checkpoint
    assert (loaded.load, loaded.finetune, loaded.ckpt_step) == (str(tmp_path), False, None)
    assert (loaded.load_optim, loaded.load_rng, loaded.load_main_params_from_ckpt) == (True, True, False)
