"""Turns online recovery, or the comparison of holders, on and off every few steps of a job: for `_worker.py`.

A step in the off arm equals a step with TTP_ONLINE=0: torch waits for its collectives, data and losses of the
step are not kept, and the board is not informed of them. The rest of an armed job stays: its imports, the
descriptions of its process groups, a waiting spare process.
"""

from __future__ import annotations

import resource
import time
from collections.abc import Callable
from typing import Any

from _blocks import Blocks, Measured

DRILLS = 7  # drills in a job that compares its holders


class Arming:
    """The measurement of one rank.

    Args:
        add: writes a line of results.
        hook: wraps a function once its module is imported.
        settings: steps in a block, pairs of blocks, the seed of their order, steps before them, and what is
            measured: "times" or "holders" (see `Comparing`).
    """

    def __init__(
        self, add: Callable[..., None], hook: Callable[[str, str, Any], None], settings: str
    ) -> None:
        self._data: Any = None  # the iterator of the training data, if this rank reads any
        self._replaced: list[tuple[Any, str, Any]] = []  # an object, its attribute, and the original value
        self._began: Measured = {}
        block, pairs, seed, warm_up = map(int, settings.split(",")[:4])
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

        if on == (not self._replaced):
            return
        if on:
            _let_act(True)
            for holder, name, value in self._replaced:
                setattr(holder, name, value)
            self._replaced = []
            return
        recovery = context.part(Recovery)
        if recovery.loop is None or not all(unit.acts for unit in patching.units("waits")):
            raise RuntimeError("the job is not armed: there is nothing to be measured")
        _let_act(False)
        if self._data is not None:
            self._replace(self._data, "iterable", self._data.iterable._source)
        self._replace(recovery, "loop", None)
        self._replace(context.part(OnlineRecovery), "rejoin", None)

    def _replace(self, holder: Any, name: str, value: Any) -> None:
        self._replaced.append((holder, name, getattr(holder, name)))
        setattr(holder, name, value)

    def _begin(self) -> None:
        self._began = _now()

    def _end(self, steps: int) -> Measured:
        return {name: (value - self._began[name]) / steps for name, value in _now().items()}


class Comparing(Arming):
    """Turns the comparison of the holders (TTP_VERIFY_EVERY=auto) off and on; drills before the first block.

    The counted steps of a block are a multiple of the interval that the job has chosen, so that each block
    has as many comparisons.
    """

    def __init__(
        self, add: Callable[..., None], hook: Callable[[str, str, Any], None], settings: str
    ) -> None:
        super().__init__(add, hook, settings)
        self._add = add
        self._warm_up = int(settings.split(",")[3])
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
            self._verifier._updated = None  # the checksums would be of an old step

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


def _let_act(on: bool) -> None:
    """Put the patches' wrappers in place, or the framework's functions.

    `patching.arm` and `disarm` do the same and more: arming checks each signature again. Its traces in memory
    and caches would count as time of armed steps.
    """
    from adaptor import patching

    for unit in (*patching.units("online"), *patching.units("waits")):
        for patch in unit.patches:
            if patch.applied and patch._place is not None:
                if on:
                    patch._place.put(patch._wrapper)
                else:
                    patch._place.restore()
        unit.armed = on
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
