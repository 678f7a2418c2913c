from __future__ import annotations

from typing import Any


def evaluate_and_print_results(state: Any) -> None:
    state.train_state.consumed_valid_samples += state.cfg.train.eval_iters * state.cfg.train.global_batch_size
