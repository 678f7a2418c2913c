"""Jobs for which Megatron-core's optimizer instances would compute differently than a single instance."""

from __future__ import annotations

import sys
import types
from types import SimpleNamespace
from typing import Any

import pytest

from adaptor import context
from adaptor.frameworks import optimizer_instances

TWICE = "reduces gradients twice"
EARLY = "may reduce gradients before they are ready"
NAMES: Any = SimpleNamespace()  # names used by the functions below


class Of015:
    """A bucket group of Megatron-core 0.14 and 0.15."""

    def start_grad_sync(self) -> None:
        NAMES.communication_stream.wait_stream(NAMES.cuda.default_stream())

    def finish_grad_sync(self) -> None:
        self.start_grad_sync()


class Of016(Of015):
    """The optimizer of 0.16, in which the first reductions of a process have another order."""

    def finish_grad_sync(self) -> None:
        if NAMES.is_first_batch:
            self.start_grad_sync()


class Of017(Of016):
    """The optimizer of 0.17 and later, whose stream is correct."""

    def start_grad_sync(self) -> None:
        NAMES.communication_stream.wait_stream(NAMES.cuda.current_stream())


@pytest.mark.parametrize(
    ("kind", "device", "stages", "aligned", "reason"),
    [
        (Of015, "cpu", 2, True, ""),
        (Of015, "", 1, True, EARLY),
        (Of016, "cpu", 1, True, ""),
        (Of016, "cpu", 2, True, TWICE),
        (Of016, "cpu", 2, False, ""),
        (Of016, "", 2, False, EARLY),
        (Of017, "", 1, True, ""),
        (Of017, "", 4, True, TWICE),
        (Of017, "", 4, False, ""),
    ],
)
def test_a_reduction_that_overlaps_the_backward_pass(
    kind: type, device: str, stages: int, aligned: bool, reason: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    buffers = types.ModuleType("megatron.core.distributed.param_and_grad_buffer")
    buffers._ParamAndGradBucketGroup = kind  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, buffers.__name__, buffers)
    context.begin({"TTP_DEVICE": device})
    overlaps, does_not = SimpleNamespace(overlap_grad_reduce=True), SimpleNamespace(overlap_grad_reduce=False)
    problem = optimizer_instances.wrong_with_options(overlaps, stages, aligned=aligned)
    assert reason in problem
    assert bool(reason) == bool(problem)
    assert optimizer_instances.wrong_with_options(does_not, stages, aligned=aligned) == ""


def test_sums_in_float32_allow_one_instance() -> None:
    arguments = SimpleNamespace(overlap_grad_reduce=False, reduce_scatter_with_fp32_accumulation=True)
    problem = optimizer_instances.wrong_with_options(arguments, 1, aligned=True)
    assert problem.startswith("--reduce-scatter-with-fp32-accumulation")
