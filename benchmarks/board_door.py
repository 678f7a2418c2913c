"""Cost of the board and the door per step, measured alone: `python benchmarks/board_door.py`.

One process makes the calls of a worker's step (begin_step, before_update, after_update, end_update), with a
trainee whose record, door and barrier do nothing, so that only board and door remain. The record of a step
(counters, schedule, random states) is measured separately, on Megatron's own scheduler and RNG tracker.
"""

from __future__ import annotations

import time
import types
from collections.abc import Callable
from typing import Any

from _bench import Benchmark, argument_parser, spread, table

from adaptor.devices.device import HOST
from adaptor.protocol.board import Board, BoardMemory
from adaptor.worker.door import Door
from adaptor.worker.session import Session

TARGET_US = 10.0


class _Idle:
    """A trainee of which board and door alone are left."""

    save_folder = ""
    shares = ()
    device = HOST
    has_local_copy = False
    in_parts = False

    def take_record(self, step: int) -> None: ...
    def snapshot_before_update(self) -> None: ...
    def derive(self, record: Any, door: Any, updated: bool) -> None: ...
    def exchange(self) -> None: ...
    def barrier(self) -> None: ...
    def copy_state(self) -> None: ...
    def update_replicas(self) -> None: ...
    def has_state(self) -> bool:
        return True

    def dump(self, record: Any, order: Any, run: Any) -> tuple[Any, ...]:
        return ()


def session_step(board: Board) -> Callable[[], None]:
    """A step of a worker, from which everything but board and door is taken away."""
    session = Session(board, lambda trainee, origin: None, lambda error: None)
    optimizer = object()
    session.begin_training(_Idle(), [optimizer], 0)
    number = 0

    def step() -> None:
        nonlocal number
        number += 1
        session.begin_step(number)
        session.before_update(optimizer)
        session.after_update(optimizer)
        session.end_update(True, 1.25)

    return step


def door_step() -> Callable[[], None]:
    """Return a step with the door only."""
    door = Door()

    def step() -> None:
        door.enter(1)
        door.leave()

    return step


def record_step() -> tuple[Callable[[], None], Callable[[], None]]:
    """Return the record of a step at its beginning, and at the door."""
    import sys
    import warnings

    import torch

    from adaptor import devices
    from adaptor.checkpoint.step_record import RandomStates
    from adaptor.checkpoint.trainee import MegatronTrainee
    from adaptor.checkpoint.training_state import TrainingState
    from tests.frameworks import prepare

    warnings.simplefilter("ignore")  # of the framework, which misses Transformer Engine and apex
    devices.activate("cpu")
    sys.path.insert(0, str(prepare.megatron_lm()))
    from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler
    from megatron.core.tensor_parallel import get_cuda_rng_tracker

    tracker = get_cuda_rng_tracker()
    tracker.add("model-parallel-rng", 1234)
    scalars = {"lr_mult": 1.0, "is_expert_parallel": False, "is_decoupled_lr": False, "max_lr": 1e-3}
    groups = [
        {"params": [], "wd_mult": wd, "min_lr": 1e-5, "lr": 0.0, "betas": (0.9, 0.999), "step": 1, **scalars}
        for wd in (0.0, 1.0)
    ]
    inner = types.SimpleNamespace(
        param_groups=groups, grad_scaler=None, optimizer=types.SimpleNamespace(state={0: {}})
    )
    optimizer = types.SimpleNamespace(chained_optimizers=[inner], param_groups=groups)
    scheduler = OptimizerParamScheduler(
        optimizer,
        init_lr=0.0,
        max_lr=1e-3,
        min_lr=1e-5,
        lr_warmup_steps=16,
        lr_decay_steps=1600,
        lr_decay_style="cosine",
        start_wd=0.1,
        end_wd=0.1,
        wd_incr_steps=1600,
        wd_incr_style="constant",
    )
    counters = {"consumed_train_samples": 800, "skipped_train_samples": 0, "floating_point": 1.5e12}
    trainee = MegatronTrainee(
        state=TrainingState(model=[torch.nn.Identity()], optimizer=optimizer, scheduler=scheduler, folder=""),
        save_folder="",
        shares=(),
        random=RandomStates(tracker),
        counters=lambda: counters,
        growth=lambda: counters,
        increment=lambda: 8,
        barrier=lambda: None,
    )
    return lambda: trainee.take_record(7), lambda: trainee.snapshot_before_update()


def measure(act: Callable[[], Any], batches: int, calls: int) -> dict[str, float]:
    """Microseconds per call: over `batches` medians of `calls` each."""
    for _ in range(calls):
        act()
    times = []
    for _ in range(batches):
        start = time.perf_counter_ns()
        for _ in range(calls):
            act()
        times.append((time.perf_counter_ns() - start) / calls / 1000)
    return spread(times)


def main() -> None:
    parser = argument_parser(__doc__)
    parser.add_argument("--batches", type=int, default=5000, help="the median is taken over so many batches")
    parser.add_argument("--steps", type=int, default=20, help="steps in a batch")
    parser.add_argument("--no-record", action="store_true", help="leave out the record, which needs Megatron")
    options = parser.parse_args()
    benchmark = Benchmark("board_door", {"batches": options.batches, "steps per batch": options.steps})

    memory = BoardMemory([0])
    board = Board(0, memory.path, memory.slots)
    parts = {
        "board and door, per step": session_step(board),
        "one write of the board": board.write,
        "the door, once through": door_step(),
    }
    if not options.no_record:
        parts["the step's record"], parts["the record at the door"] = record_step()
    figures = {name: measure(act, options.batches, options.steps) for name, act in parts.items()}

    rows = [[name, *(f"{figures[name][key]:.2f}" for key in ("median", "min", "p90"))] for name in parts]
    cost = figures["board and door, per step"]["median"]
    verdict = "reached" if cost <= TARGET_US else "MISSED"
    benchmark.finish(
        table(["µs", "median", "min", "p90"], rows)
        + f"\n\nboard and door: {cost:.1f} µs per step; at most {TARGET_US:g} µs: {verdict}",
        {"microseconds": figures, "target_us": TARGET_US, "reached": cost <= TARGET_US},
    )


if __name__ == "__main__":
    main()
