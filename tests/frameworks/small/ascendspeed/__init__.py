"""A small framework of the tests with the shape of ModelLink at commit af1347.

Its functions have the names, parameters and duties that the patches of `adaptor.patches.ascendspeed_*` rely
on, so that the tests of their logic need no copy of the framework: grad buffers that are cut in shards
without regard to params, params with memory of their own, a schedule that counts tokens, and a load that
derives the main params from the low-precision weights.
"""

from __future__ import annotations

from argparse import Namespace

from ascendspeed.timers import Timers

_ARGS = Namespace()
_TIMERS = Timers()


def get_args() -> Namespace:
    return _ARGS


def get_timers() -> Timers:
    return _TIMERS


def update_num_microbatches(consumed_samples: int, consistency_check: bool = True) -> None:
    """All steps have the same size."""


def get_num_microbatches() -> int:
    return int(_ARGS.global_batch_size // (_ARGS.micro_batch_size * _ARGS.data_parallel_size))
