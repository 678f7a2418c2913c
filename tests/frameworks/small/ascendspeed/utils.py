"""Helpers."""

from __future__ import annotations

import copy
from argparse import Namespace


def convert_args_to_strs(args: Namespace) -> Namespace:
    """A copy of the arguments for a checkpoint."""
    return copy.deepcopy(args)
