"""Helpers of transformers."""

from __future__ import annotations

from transformers.utils import logging

__all__ = ["logging"]
