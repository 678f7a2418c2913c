"""Runs a training script and writes down what every iteration of it gave: `record.py OUT_DIR script args...`.

Each rank appends to `OUT_DIR/rank<R>.jsonl`, a line per iteration: iteration, losses {name: float as hex},
grad_norm (hex, null when skipped), skipped, restart (the launcher's count) and time (seconds since the epoch,
at the end of the step). A line is one write to a file opened for appending: a SIGKILL right after it loses
nothing. It wraps `train_step` from outside and knows nothing of the adaptor, so that runs with and without it compare.
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


def install(out: Path) -> None:
    """Record into `out` from the moment the framework's training loop is imported."""
    out.mkdir(parents=True, exist_ok=True)
    path = out / f"rank{os.environ.get('RANK', '0')}.jsonl"
    file = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
    restart = int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0"))

    def step_is_recorded(wrapped: Any, instance: Any, args: Any, kwargs: Any) -> Any:
        from megatron.training.global_vars import get_args

        result = wrapped(*args, **kwargs)
        losses, skipped, *_ = result
        # The last but one: newer versions append to the result what the optimizer counted.
        grad_norm = result[5]
        line = {
            "iteration": get_args().curr_iteration + 1,
            "losses": {name: _hex(loss) for name, loss in losses.items()},
            "grad_norm": _hex(grad_norm),
            "skipped": int(skipped),
            "restart": restart,
            "time": time.time(),
        }
        os.write(file, (json.dumps(line) + "\n").encode())
        return result

    def wrap(module: ModuleType) -> None:
        wrapt.wrap_function_wrapper(module, "train_step", step_is_recorded)

    wrapt.register_post_import_hook(wrap, "megatron.training.training")


def read(out: Path) -> dict[int, list[dict[str, Any]]]:
    """The recorded lines of every rank, in the order in which they were written."""
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
