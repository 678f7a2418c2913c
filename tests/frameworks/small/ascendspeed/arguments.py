"""The arguments: `parse_args`."""

from __future__ import annotations

import argparse
import os
from collections.abc import Callable
from typing import Any


def parse_args(
    extra_args_provider: Callable[[Any], Any] | None = None, ignore_unknown_args: bool = False
) -> argparse.Namespace:
    parser = argparse.ArgumentParser(allow_abbrev=False)
    for name, kind, default in (
        ("tensor-model-parallel-size", int, 1),
        ("pipeline-model-parallel-size", int, 1),
        ("global-batch-size", int, 8),
        ("micro-batch-size", int, 1),
        ("seq-length", int, 4),
        ("train-iters", int, 8),
        ("save-interval", int, 1000),
        ("eval-interval", int, 1000),
        ("log-interval", int, 1),
        ("exit-interval", int, None),
        ("DDP-impl", str, "local"),
        ("eval-iters", int, 0),
        ("clip-grad", float, 0.05),
        ("optimizer", str, "adam"),
        ("foldx-mode", str, None),
        ("save", str, None),
        ("load", str, None),
    ):
        parser.add_argument(f"--{name}", type=kind, default=default)
    for name in ("use-distributed-optimizer", "deepspeed", "release-fp32-grad", "no-load-optim"):
        parser.add_argument(f"--{name}", action="store_true")
    if extra_args_provider is not None:
        parser = extra_args_provider(parser)
    args = parser.parse_args()
    args.rank, args.world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    args.local_rank = int(os.environ["LOCAL_RANK"])
    args.exit_duration_in_mins = None
    args.log_params_norm = False
    args.consumed_train_samples = args.consumed_valid_samples = args.consumed_train_tokens = 0
    return args
