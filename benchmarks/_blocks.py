"""Blocks of steps in one job, each in one of two arms, and the measurements of a step: for `_worker.py`.

Every rank is pinned to a core and turns at the same step, in an order that is drawn beforehand. Neighbouring
blocks of both arms are a pair (`paired`).
"""

from __future__ import annotations

import argparse
import math
import os
import random
import statistics
from collections.abc import Callable, Mapping, Sequence
from typing import Any

ARMS = ("off", "on")
# Steps before the first block: memory is allocated, and the first steps of a process differ from the others.
WARM_UP = 8

# The fields of a line that are no measurements.
_ABOUT = {"what", "time", "seconds", "restart", "rank", "arm"}

Measured = dict[str, Any]


def add_options(parser: argparse.ArgumentParser, block: int = 5) -> None:
    """Add the options of blocks, of `block` steps by default; each script adds its number of pairs."""
    parser.add_argument("--block", type=int, default=block, help="steps in a block; the first is not counted")
    parser.add_argument(
        "--seed", type=int, default=1, help="of the order of blocks, and of what is drawn besides"
    )


class Blocks:
    """The blocks of one rank, which is pinned to a core.

    Args:
        add: writes a line of results.
        block: steps in a block.
        pairs: pairs of blocks.
        seed: of the order of blocks.
        turn: turns to an arm; True: on.
        begin: begins a measurement.
        end: ends the measurement of some steps, and returns the mean of a step.
        warm_up: steps before the first block.

    Attributes:
        block: steps in a block; may change before the first block.
    """

    def __init__(
        self,
        add: Callable[..., None],
        block: int,
        pairs: int,
        seed: int,
        *,
        turn: Callable[[bool], None],
        begin: Callable[[], None],
        end: Callable[[int], Measured],
        warm_up: int = WARM_UP,
    ) -> None:
        source = random.Random(seed)
        self._order = [arm for _ in range(pairs) for arm in source.sample(ARMS, k=2)]
        self._add, self._turn, self._begin, self._end = add, turn, begin, end
        self.block = block
        self._warm_up = warm_up
        self._steps = 0
        self._is_measured = False
        cores = sorted(os.sched_getaffinity(0))
        os.sched_setaffinity(0, {cores[int(os.environ.get("LOCAL_RANK", "0")) % len(cores)]})

    def step(self, wrapped: Any, instance: Any, args: Any, kwargs: Any) -> Any:
        """Make a step of the framework, and count the step."""
        result = wrapped(*args, **kwargs)
        self._steps += 1
        block, step = divmod(self._steps - self._warm_up, self.block)
        if self._steps < self._warm_up or block > len(self._order):
            return result
        if step == 0:  # a block ends, and the next begins
            if self._is_measured:
                self._add("block", 0.0, arm=self._order[block - 1], **self._end(self.block - 1))
            self._is_measured = False
            self._turn(self._order[block] == "on" if block < len(self._order) else True)
        elif step == 1:  # not the first step, which pays for leftovers of the previous block
            self._begin()
            self._is_measured = True
        return result


def paired(lines: Sequence[Mapping[str, Any]]) -> list[tuple[Measured, Measured]]:
    """Return the measurements of a step, off and on, of each pair of blocks: the mean over ranks.

    Args:
        lines: the lines of all ranks.
    """
    blocks: dict[int, list[Mapping[str, Any]]] = {}
    for line in lines:
        blocks.setdefault(line["rank"], []).append(line)
    of_all = [_mean_of_ranks(ranks) for ranks in zip(*blocks.values(), strict=True)]
    pairs = [dict(of_all[at : at + 2]) for at in range(0, len(of_all) - 1, 2)]
    return [(pair["off"], pair["on"]) for pair in pairs]


def middle(values: Sequence[float]) -> tuple[float, float, float]:
    """Return the Hodges-Lehmann estimate of the middle of `values`, and its 95 % interval."""
    count = len(values)
    means = sorted((a + b) / 2 for at, a in enumerate(values) for b in values[at:])
    spread = 1.96 * math.sqrt(count * (count + 1) * (2 * count + 1) / 24)
    out = max(0, round(len(means) / 2 - spread))
    return statistics.median(means), means[out], means[-1 - out]


def _mean_of_ranks(ranks: Sequence[Mapping[str, Any]]) -> tuple[str, Measured]:
    """Return the arm of a block, and the mean of the ranks' measurements in it."""

    def mean(values: Sequence[Any]) -> Any:
        if isinstance(values[0], dict):
            return {name: mean([value[name] for value in values]) for name in values[0]}
        return statistics.mean(values)

    (arm,) = {line["arm"] for line in ranks}
    return arm, {key: mean([line[key] for line in ranks]) for key in ranks[0].keys() - _ABOUT}
