"""Arms and disarms online recovery, or the comparison of holders, every few steps of one job, and measures a
step: for `_worker.py`.

Disarmed, a step is that of a job with TTP_ONLINE=0: torch waits for its collectives, the data that a step
reads and its losses are not kept, the board is not told of them. What stays is what an armed job has beside
its steps: what it has imported, the descriptions of its process groups, a spare process that waits.
"""

from __future__ import annotations

import resource
import time
from collections.abc import Callable
from typing import Any

from _blocks import Blocks, Measured
from _calls import Calls

DRILLS = 7  # in a job that compares its holders


class Arming:
    """The measurement of one rank.

    Args:
        add: writes a line down.
        hook: wraps a function once its module is imported.
        given: steps in a block, pairs of blocks, the seed of their order, steps before them, and what is
            measured: "times", or "calls" of functions ("holders": see `Comparing`).
    """

    def __init__(self, add: Callable[..., None], hook: Callable[[str, str, Any], None], given: str) -> None:
        self._data: Any = None  # the iterator of the training data, where this rank reads any
        self._taken: list[tuple[Any, str, Any]] = []  # an object, its attribute, and what it was
        self._began: Measured = {}
        *numbers, what = given.split(",")
        block, pairs, seed, warm_up = map(int, numbers)
        self._calls = Calls() if what == "calls" else None
        self._blocks = Blocks(
            add, block, pairs, seed, turn=self._turn, begin=self._begin, end=self._end, warm_up=warm_up
        )
        hook("megatron.training.training", "train_step", self._step)

    def _step(self, wrapped: Any, instance: Any, args: Any, kwargs: Any) -> Any:
        self._data = args[1]
        return self._blocks.step(wrapped, instance, args, kwargs)

    def _turn(self, on: bool) -> None:
        from adaptor import context, patching
        from adaptor.frameworks.training_loop import Recovery
        from adaptor.online.rejoin import OnlineRecovery

        if on == (not self._taken):
            return
        if on:
            _let_act(True)
            for holder, name, value in self._taken:
                setattr(holder, name, value)
            self._taken = []
            return
        recovery = context.part(Recovery)
        if recovery.loop is None or not all(unit.acts for unit in patching.units("waits")):
            raise RuntimeError("the job is not armed: there is nothing to be measured")
        _let_act(False)
        if self._data is not None:
            self._take(self._data, "iterable", self._data.iterable._source)
        self._take(recovery, "loop", None)
        self._take(context.part(OnlineRecovery), "rejoin", None)

    def _take(self, holder: Any, name: str, instead: Any) -> None:
        self._taken.append((holder, name, getattr(holder, name)))
        setattr(holder, name, instead)

    def _begin(self) -> None:
        self._began = _now()
        if self._calls is not None:
            self._calls.begin()

    def _end(self, steps: int) -> Measured:
        if self._calls is not None:
            return {"calls": {name: count / steps for name, count in self._calls.end().items()}}
        return {name: (value - self._began[name]) / steps for name, value in _now().items()}


class Comparing(Arming):
    """Turns the comparison of the holders (TTP_VERIFY_EVERY=auto) off and on; drills before the first block.

    The steps of a block that count are a multiple of the interval that the job has chosen, so that each block
    has as many comparisons.
    """

    def __init__(self, add: Callable[..., None], hook: Callable[[str, str, Any], None], given: str) -> None:
        super().__init__(add, hook, given)
        self._add = add
        self._warm_up = int(given.split(",")[3])
        self._steps = 0
        self._verifier: Any = None

    def _step(self, wrapped: Any, instance: Any, args: Any, kwargs: Any) -> Any:
        result = self._blocks.step(wrapped, instance, args, kwargs)
        self._steps += 1
        if self._warm_up - DRILLS <= self._steps < self._warm_up:
            self._drill()
        if self._steps == self._warm_up - 1:
            every = _window().verifier._every
            if every < 1 or _window().verifier._chooses:
                raise RuntimeError("the interval between comparisons is not chosen")
            self._blocks.block = 1 + every * -(-(self._blocks.block - 1) // every)
        return result

    def _turn(self, on: bool) -> None:
        window = _window()
        if on:
            window.verifier = window.verifier or self._verifier
        elif window.verifier is not None:
            self._verifier, window.verifier = window.verifier, None
            self._verifier._updated = None  # of a step that will be an old one

    def _drill(self) -> None:
        from adaptor.replica import group
        from adaptor.verification import given_sums
        from adaptor.worker import runtime

        session, everyone = runtime.get().session, group.of_this_job()
        group.barrier(everyone)
        began = time.perf_counter()
        drilled = given_sums.hold(self._steps, session.trainee, session.board.record(), everyone)
        took = time.perf_counter() - began
        if drilled is not None:
            self._add("drill", took, problem=drilled.problem)


def _window() -> Any:
    from adaptor.worker import runtime

    return runtime.get().session.window


def _let_act(act: bool) -> None:
    """Put the wrappers of the patches in their places, or the framework's functions.

    `patching.arm` and `disarm` do the same, and more: arming looks at each signature again. What it leaves in
    memory and caches is felt for some steps, and would count as what armed steps take.
    """
    from adaptor import patching

    for unit in (*patching.units("online"), *patching.units("waits")):
        for patch in unit.patches:
            if patch.applied and patch._place is not None:
                if act:
                    patch._place.put(patch._wrapper)
                else:
                    patch._place.restore()
        unit.armed = act
        unit.settle()


def _now() -> Measured:
    """Return milliseconds of wall time, of CPU time of the process and of its main thread, and counts."""
    usage = resource.getrusage(resource.RUSAGE_SELF)
    return {
        "wall": time.perf_counter_ns() / 1e6,
        "cpu": time.process_time_ns() / 1e6,
        "main": time.thread_time_ns() / 1e6,
        "switches": usage.ru_nvcsw + usage.ru_nivcsw,
        "faults": usage.ru_minflt,
    }
