"""Stands in for peft: names imported by MindSpeed-LLM since 26.1 for every training."""

from __future__ import annotations

from typing import Any

from peft.tuners.lora.layer import NameAlone

__all__ = ["LoraConfig", "LoraModel", "PeftModel", "TaskType", "get_peft_model"]


class LoraConfig(NameAlone): ...


class LoraModel(NameAlone): ...


class PeftModel(NameAlone): ...


class TaskType(NameAlone): ...


def get_peft_model(model: Any, config: Any) -> Any:
    """Adapters of low rank are not trained here."""
    raise NotImplementedError("get_peft_model")
