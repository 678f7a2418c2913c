"""Also `deepspeed.checkpointing`: not configured, so that frameworks use their own."""

from __future__ import annotations


def is_configured() -> bool:
    return False
