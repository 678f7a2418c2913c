"""Stands in for DeepSpeed in a framework that imports DeepSpeed without use: see ../README.md."""

from __future__ import annotations

import argparse
from typing import Any

from deepspeed import accelerator, zero
from deepspeed.runtime.activation_checkpointing import checkpointing
from deepspeed.runtime.pipe.engine import DeepSpeedEngine, PipelineEngine

__all__ = [
    "DeepSpeedEngine",
    "PipelineEngine",
    "accelerator",
    "add_config_arguments",
    "checkpointing",
    "init_distributed",
    "initialize",
    "zero",
]


def add_config_arguments(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
    """The two arguments that scripts read."""
    group = parser.add_argument_group("DeepSpeed")
    group.add_argument("--deepspeed", action="store_true")
    group.add_argument("--deepspeed_config", default=None)
    return parser


def initialize(*args: Any, **kwargs: Any) -> Any:
    raise NotImplementedError("deepspeed.initialize")


def init_distributed(*args: Any, **kwargs: Any) -> None:
    raise NotImplementedError("deepspeed.init_distributed")
