"""Importing it moves a script from CUDA to the NPU, by replacing functions of torch.

Here `torch.cuda` is the CPU already. What is left is what a torch of that time let pass: a group that names a
rank twice (ModelLink makes [0, 0] where there is one pipeline stage).
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import torch.distributed as dist

_new_group = dist.new_group


@functools.wraps(_new_group)
def _group_of_each_rank_once(ranks: Sequence[int] | None = None, *args: Any, **kwargs: Any) -> Any:
    return _new_group(None if ranks is None else list(dict.fromkeys(ranks)), *args, **kwargs)


dist.new_group = _group_of_each_rank_once
