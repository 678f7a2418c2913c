"""Iterators over the data, from the place that the training state says."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from megatron.bridge.training.state import TrainState
from megatron.core.rerun_state_machine import RerunDataIterator


def setup_data_iterators(
    cfg: Any,
    train_state: TrainState,
    model_length: int,
    train_valid_test_datasets_provider: Callable[..., Any],
) -> tuple[Any, Any, Any]:
    first = train_state.consumed_train_samples // cfg.train.global_batch_size + 1

    def read() -> Iterator[Any]:
        for number in range(first, cfg.train.train_iters + 1):
            yield train_valid_test_datasets_provider(number)

    return RerunDataIterator(read()), None, None
