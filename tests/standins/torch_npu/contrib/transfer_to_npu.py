"""Its import moves a script from CUDA to the NPU, by replacing functions of torch.

In the stand-in `torch.cuda` is already the CPU. The remaining change is a leniency of older torch: a group
may name a rank twice (ModelLink makes [0, 0] with a single pipeline stage).
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
