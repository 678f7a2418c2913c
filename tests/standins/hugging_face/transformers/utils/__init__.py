"""Helpers of transformers."""

from __future__ import annotations

from enum import Enum

from transformers.utils import logging

__all__ = ["PaddingStrategy", "logging"]


class PaddingStrategy(str, Enum):
    """How a tokenizer pads a batch."""

    LONGEST = "longest"
    MAX_LENGTH = "max_length"
    DO_NOT_PAD = "do_not_pad"
