"""What a new process does alone at its start, by the size of its part of the model: `newcomer_build.py`.

CPU seconds of Megatron-LM's own start, as a process in the place of a failed rank makes it without others:
its imports, which a spare has made (`--ttp-spares`), and what it does afterwards: initialise, build the model
and the optimizer, build the data. That is what a spare that stands for one rank could have done before the
fault (docs/decisions.md).
"""

from __future__ import annotations

import argparse
import json
import socket
import subprocess
import sys
import tempfile

from _bench import ROOT, Benchmark, spread, table
from _job import run

from tests.frameworks import args, prepare

_START = """
import json, runpy, sys, time
from adaptor import devices
devices.activate("cpu")
began = time.process_time()
import megatron.training.training as training
spent = {"imports": time.process_time() - began}
def timed(name, part):
    function = getattr(training, name)
    def measure(*given, **named):
        since = time.process_time()
        try:
            return function(*given, **named)
        finally:
            spent[part] = time.process_time() - since
    setattr(training, name, measure)
timed("initialize_megatron", "initialise")
timed("setup_model_and_optimizer", "model and optimizer")
timed("build_train_valid_test_data_iterators", "data")
def train(forward, model, *given, **named):
    spent["parameters"] = sum(param.numel() for chunk in model for param in chunk.parameters())
    print("\\n" + json.dumps(spent), flush=True)
    sys.exit(0)
training.train = train
sys.argv = sys.argv[1:]
runpy.run_path(sys.argv[0], run_name="__main__")
"""
PARTS = ("imports", "initialise", "model and optimizer", "data")
# Layers and hidden size.
SIZES = ((2, 64), (6, 512), (12, 1024))


def start(layers: int, hidden: int) -> dict[str, float]:
    """Start a process that builds so large a model; return CPU seconds of each part, and its parameters."""
    with socket.socket() as bound:
        bound.bind(("127.0.0.1", 0))
        port = bound.getsockname()[1]
    with tempfile.TemporaryDirectory() as cache:
        size = ("--num-layers", str(layers), "--hidden-size", str(hidden), "--data-cache-path", cache)
        given = args.tiny_gpt(train_iters=1000, extra=size)
        script = prepare.megatron_lm() / "pretrain_gpt.py"
        ran = subprocess.run(
            [sys.executable, "-W", "ignore", "-c", _START, str(script), *given],
            env=args.environment(
                PYTHONPATH=f"{ROOT}:{script.parent}",
                RANK="0",
                LOCAL_RANK="0",
                WORLD_SIZE="1",
                MASTER_ADDR="127.0.0.1",
                MASTER_PORT=str(port),
            ),
            capture_output=True,
            text=True,
            check=False,
        )
    if ran.returncode:
        raise SystemExit(f"the start of {layers} layers failed:\n{ran.stderr[-2000:]}")
    line = next(line for line in reversed(ran.stdout.splitlines()) if line.startswith("{"))
    found: dict[str, float] = json.loads(line)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--runs", type=int, default=3, help="processes of each size")
    options = parser.parse_args()
    benchmark = Benchmark("newcomer_build", {"runs": options.runs})
    start(*SIZES[0])  # the first one may compile what it imports
    found = {size: [start(*size) for _ in range(options.runs)] for size in SIZES}
    rows = [[part, *(_told(runs, part) for runs in found.values())] for part in PARTS]
    millions = [runs[0]["parameters"] / 1e6 for runs in found.values()]
    head = ["CPU seconds, median (range)", *(f"{count:.1f} M parameters" for count in millions)]
    kept = {f"{layers} layers of {hidden}": runs for (layers, hidden), runs in found.items()}
    benchmark.finish(table(head, rows), {"starts": kept})


def _told(runs: list[dict[str, float]], part: str) -> str:
    told = spread([run[part] for run in runs])
    return f"{told['median']:.2f} ({told['min']:.2f} to {told['max']:.2f})"


if __name__ == "__main__":
    run(main)
