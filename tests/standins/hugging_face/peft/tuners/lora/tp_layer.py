"""Layers with adapters, cut by tensor parallelism."""

from __future__ import annotations

from peft.tuners.lora.layer import NameAlone


class LoraParallelLinear(NameAlone): ...
