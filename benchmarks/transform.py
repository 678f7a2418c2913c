"""`python -m adaptor transform` against `cp -r` and a sync of its output.

In each round the command transforms a checkpoint with random content, as a user starts it, and `cp -r` copies
the output and syncs the new folder; the two take turns in going first. The ratio is that of one round, so
noise that lasts longer than a round does not count. Both read from the page cache, since the checkpoint was
just written, unless it is larger than the memory.

`--profile` prints where a process spends its time when it writes all ranks.
"""

from __future__ import annotations

import cProfile
import os
import pstats
import shutil
import subprocess
import sys
import time
from pathlib import Path

from _bench import ROOT, Benchmark, argument_parser, spread, table

from adaptor.__main__ import main as command
from adaptor.protocol import naming
from tests.unit import small_checkpoint
from tests.unit.small_checkpoint import STEP, Shape

TARGET = 0.7


def _seconds(arguments: list[str]) -> float:
    began = time.perf_counter()
    subprocess.run(arguments, cwd=ROOT, check=True, capture_output=True)
    return time.perf_counter() - began


def _sync(folder: Path) -> None:
    for path in [folder, *folder.rglob("*")]:
        descriptor = os.open(path, os.O_RDONLY)
        os.fsync(descriptor)
        os.close(descriptor)


def _copied(source: Path, target: Path) -> float:
    began = time.perf_counter()
    subprocess.run(["cp", "-r", str(source), str(target)], check=True)
    _sync(target)
    return time.perf_counter() - began


def _profile(source: Path, target: Path, options: list[str]) -> str:
    profile = cProfile.Profile()
    profile.runcall(command, ["transform", str(source), str(target), *options, "--workers", "1"])
    stats = pstats.Stats(profile)
    rows = []
    for (file, line, name), (_, calls, own_seconds, _, _) in stats.stats.items():  # type: ignore[attr-defined]
        rows.append((own_seconds, calls, f"{Path(file).name}:{line} {name}" if line else name))
    return table(
        ("seconds of its own", "calls", "function"),
        [(f"{own_seconds:.3f}", calls, name) for own_seconds, calls, name in sorted(rows, reverse=True)[:12]],
    )


def main() -> None:
    """Measure, and print the table."""
    parser = argument_parser(__doc__)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--layers", type=int, default=4, help="of 12 million params each (default 4: 0.9 GB)")
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--to", default="--tp 2 --pp 2", help="sizes of the target (default --tp 2 --pp 2)")
    parser.add_argument("--folder", type=Path, default=ROOT / "out" / "transform", help="on the disk")
    parser.add_argument("--profile", action="store_true", help="also where the time of one process goes")
    options = parser.parse_args()
    benchmark = Benchmark("transform", {k: v for k, v in vars(options).items() if k != "folder"})
    shutil.rmtree(options.folder, ignore_errors=True)
    shape = Shape(1024, 16, 2816, options.layers, 16380, 16384)
    small_checkpoint.write(options.folder / "source", shape)
    _sync(options.folder / "source")
    target, copy = options.folder / "target", options.folder / "copy"
    transform = [sys.executable, "-m", "adaptor", "transform", str(options.folder / "source"), str(target)]
    transform += [*options.to.split(), "--workers", str(options.workers)]
    _seconds(transform)
    took: dict[str, list[float]] = {"transform": [], "cp -r and sync": []}
    shutil.rmtree(copy, ignore_errors=True)
    for number in range(options.rounds):
        earlier = target.rename(options.folder / "before")
        for name in sorted(took, reverse=number % 2 == 0):
            if name == "transform":
                took[name].append(_seconds(transform))
            else:
                took[name].append(_copied(earlier, copy))
        shutil.rmtree(copy)
        shutil.rmtree(earlier)
    size = sum(path.stat().st_size for path in target.rglob("*") if path.is_file())
    ratios = [
        copy_s / transform_s
        for transform_s, copy_s in zip(took["transform"], took["cp -r and sync"], strict=True)
    ]
    rows = [
        (name, f"{s['median']:.2f}", f"{s['min']:.2f} to {s['max']:.2f}", f"{size / s['median'] / 1e6:.0f}")
        for name, s in ((name, spread(times)) for name, times in took.items())
    ]
    ratio = spread(ratios)
    text = table(("", "median s", "from to", "MB/s"), rows)
    text += (
        f"\n\n{size / 1e9:.3f} GB; transform has {ratio['median']:.0%} of the speed of cp"
        f" ({ratio['min']:.0%} to {ratio['max']:.0%}), target {TARGET:.0%}"
    )
    if options.profile:
        shutil.rmtree(target)
        text += "\n\n" + _profile(options.folder / "source", target, options.to.split())
    assert (target / naming.final_name(STEP)).is_dir()
    shutil.rmtree(options.folder)
    benchmark.finish(text, {"seconds": took, "ratios": ratios, "bytes": size})


if __name__ == "__main__":
    main()
