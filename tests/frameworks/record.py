"""Runs a training script and records each iteration: `record.py OUT_DIR script args...`.

Each rank appends to `OUT_DIR/rank<R>.jsonl`, a line per iteration: iteration, losses {name: float as hex},
grad_norm (hex, null when skipped), zeros (of the gradient, null if not counted), skipped, restart (the
launcher's count) and time (seconds since the epoch, at the end of the step). A line is a single write to a
file opened for appending: a SIGKILL right after the write loses nothing. The script wraps `train_step` from
outside, without the adaptor: runs with and without the adaptor can be compared.
"""

from __future__ import annotations

import json
import os
import runpy
import sys
import time
from pathlib import Path
from types import ModuleType
from typing import Any

import wrapt


def _hex(value: Any) -> str | None:
    return None if value is None else float(value).hex()


class Recorder:
    """Appends to the file of this rank in `out`."""

    def __init__(self, out: Path) -> None:
        out.mkdir(parents=True, exist_ok=True)
        path = out / f"rank{os.environ.get('RANK', '0')}.jsonl"
        self._file = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
        self._restart = int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0"))

    def add(
        self, iteration: int, losses: dict[str, Any], grad_norm: Any, zeros: Any = None, *, skipped: bool
    ) -> None:
        line = {
            "iteration": iteration,
            "losses": {name: _hex(loss) for name, loss in losses.items()},
            "grad_norm": _hex(grad_norm),
            "zeros": None if zeros is None else float(zeros),
            "skipped": int(skipped),
            "restart": self._restart,
            "time": time.time(),
        }
        os.write(self._file, (json.dumps(line) + "\n").encode())


def install(out: Path) -> None:
    """Record into `out` from the moment the training loop of Megatron-LM or ModelLink is imported."""
    recorder = Recorder(out)

    def wrap(module: ModuleType) -> None:
        def step_is_recorded(wrapped: Any, instance: Any, args: Any, kwargs: Any) -> Any:
            result = wrapped(*args, **kwargs)
            losses, skipped, *further_results = result
            # Up to 0.8 the norm and the zeros come at once, later three words on how to go on come first.
            grad_norm, zeros = further_results if len(further_results) == 2 else further_results[3:5]
            arguments = module.get_args()
            iterations_done = (
                arguments.curr_iteration if hasattr(arguments, "curr_iteration") else arguments.iteration
            )
            recorder.add(iterations_done + 1, losses, grad_norm, zeros, skipped=bool(skipped))
            return result

        wrapt.wrap_function_wrapper(module, "train_step", step_is_recorded)

    copies = ("ascendspeed.training", "flagscale.train.train", "mindspeed_mm.training")
    for module in ("megatron.training.training", *copies):
        wrapt.register_post_import_hook(wrap, module)


def read(out: Path) -> dict[int, list[dict[str, Any]]]:
    """Return the recorded lines of every rank, in the order of writing."""
    return {
        int(path.stem.removeprefix("rank")): [json.loads(line) for line in path.read_text().splitlines()]
        for path in sorted(out.glob("rank*.jsonl"))
    }


def main() -> None:
    if len(sys.argv) < 3:
        sys.exit("usage: record.py OUT_DIR script.py [args...]")
    install(Path(sys.argv[1]))
    del sys.argv[:2]
    sys.path[0] = str(Path(sys.argv[0]).resolve().parent)
    runpy.run_path(sys.argv[0], run_name="__main__")


if __name__ == "__main__":
    main()
