"""The jobs of ModelLink that are recovered online, and the losses kept for their log."""

from __future__ import annotations

import sys
import types
from argparse import Namespace
from typing import Any

import pytest
import torch

from adaptor import context
from adaptor.frameworks.ascendspeed_online import AscendLog, build_data, of_data, of_options
from adaptor.frameworks.training_loop import Recovery


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({}, ""),
        # the framework's defaults
        ({"DDP_impl": "local", "auto_recompute_device_size": -1, "optimized_pipeline": False}, ""),
        ({"is_instruction_dataset": False, "adlr_autoresume": False}, ""),
        ({"DDP_impl": "torch"}, "--DDP-impl torch keeps work of a step in torch's own buckets"),
        (
            {"auto_recompute_device_size": 57344},
            "--auto-recompute-device-size measures the first steps of a process",
        ),
        (
            {"distribute_checkpointed_activations": True},
            "--distribute-checkpointed-activations has a buffer of its own",
        ),
        ({"optimized_pipeline": True}, "--optimized-pipeline has not been tested with it"),
        ({"is_instruction_dataset": True}, "--is-instruction-dataset has not been tested with it"),
        ({"adlr_autoresume": True}, "--adlr-autoresume ends jobs in a way of its own"),
    ],
)
def test_options_that_prevent_the_repetition_of_a_step(options: dict[str, Any], reason: str) -> None:
    assert of_options(Namespace(**options)) == reason


@pytest.mark.parametrize(
    ("train", "valid", "reason"),
    [
        (iter([]), [iter([])], ""),
        (None, [None], ""),  # another rank of this part of the model reads the data
        (iter([]), [], ""),
        ([], [], "there is a list where an iterator of data should be"),
        (iter([]), [{}], "there is a dict where an iterator of data should be"),
        (iter([]), None, "valid_data_iterator is a NoneType, and no list"),
    ],
)
def test_data_that_can_be_read_once_more(train: Any, valid: Any, reason: str) -> None:
    assert of_data({"train_data_iterator": train, "valid_data_iterator": valid}) == reason


def test_losses_are_averaged_as_the_framework_averages_them() -> None:
    """The sum starts with the first micro-batch, and the order of the sum decides the last bit."""
    log = AscendLog(lambda data: None, b"", 0, "ascendspeed.training")
    losses = [{"lm loss": torch.tensor(1.0 + 2.0**-n)} for n in (23, 12, 1)]
    joined = log.joined(losses)["lm loss"]
    assert joined == sum(loss["lm loss"] for loss in losses) / 3
    assert log.over_all_ranks({"lm loss": joined}) == {"lm loss": joined}
    assert log.joined([]) == {}


@pytest.mark.parametrize(
    ("reads", "built", "expected"),
    [
        (True, ("train", ["valid"], []), ("train", ["valid"], [])),
        # Alone it was told, by itself, that there is nothing to evaluate on.
        (False, (None, [], []), (None, [None], [None])),
    ],
)
def test_the_data_of_a_new_process(
    reads: bool, built: Any, expected: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The framework asserts conditions of a resumed job that a newcomer does not meet."""
    context.forget()
    context.part(Recovery).answers["asked"] = {"do_train": 1, "do_valid": True, "do_test": True}
    args = Namespace(iteration=5, do_valid=reads)
    framework = types.ModuleType("ascendspeed")
    framework.get_args = lambda: args  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "ascendspeed", framework)
    iterations: list[int] = []

    def build() -> Any:
        iterations.append(args.iteration)
        return built

    assert build_data(build) == expected
    assert iterations == [0]
    assert args == Namespace(iteration=5, do_train=1, do_valid=True, do_test=True)
