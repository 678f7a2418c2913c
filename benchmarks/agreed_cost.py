"""Regular saves with and without the comparison with the state in memory: `python benchmarks/agreed_cost.py`.

One process saves the state of one rank in the format `torch`, as the framework does at a `--save-interval`,
with the adaptor's checksums, fsync and publish; in turns with the sums (`adaptor/verification`) and without.
The process holds the whole state, and takes the sums of the whole state; each of d data-parallel ranks would
take 1/d.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from _bench import Benchmark, argument_parser, bootstrap, table

from adaptor import context, patches, patching
from adaptor.frameworks.regular_save import RegularSaves
from adaptor.protocol import naming
from adaptor.protocol.board import Board, BoardMemory
from adaptor.protocol.messages import Share
from adaptor.verification import state_sums
from adaptor.verification.agreed_state import agree
from adaptor.verification.save_check import SaveCheck
from adaptor.worker import runtime
from adaptor.worker.session import Session
from tests.unit.test_in_place import DTYPES, one_param


@contextlib.contextmanager
def a_worker() -> Iterator[None]:
    """Let this process be rank 0 of a job, with the patches of torch."""
    memory = BoardMemory([0])
    session = Session(Board(0, memory.path, memory.slots), lambda *_: None, lambda _: None)
    runtime.get = lambda: SimpleNamespace(rank=0, session=session)  # type: ignore[assignment, return-value]
    patches.load("worker")
    patching.arm("worker")
    yield
    patching.disarm("worker")
    memory.close()


def rank_of(numel: int) -> Any:
    """Return a rank with one param of so many elements, and random state."""
    rank = one_param(numel)
    rank.states[rank.model.a] = {key: torch.rand(numel) for key in ("param", "exp_avg", "exp_avg_sq")}
    with torch.no_grad():
        rank.model.a.copy_(rank.states[rank.model.a]["param"])
    return rank


def save(root: Path, rank: Any, step: int, *, is_compared: bool) -> tuple[float, float]:
    """Save once; return seconds and CPU seconds."""

    def agreed(step: int) -> SaveCheck:
        own_state = state_sums.held_by(rank.state, (), (Share("mp_rank_00", 0, 1),))
        if own_state.problem:
            raise SystemExit(own_state.problem)
        return SaveCheck(step, rank.state, agree(step, [own_state]))

    def without(step: int) -> None:
        """Compare nothing."""

    os.sync()
    began, cpu = time.perf_counter(), time.process_time()
    saves = context.part(RegularSaves)
    with saves.regular(str(root), step, agree=agreed if is_compared else without):
        folder = Path(saves.renamed(str(root / naming.final_name(step))))
        world = {key: value.clone() for key, value in rank.states[rank.model.a].items()}  # the gather
        torch.save({"buckets_coalesced": True, 0: {DTYPES: world}}, folder / "distrib_optim.pt")
        body = {"iteration": step, "model": rank.model.state_dict()}
        torch.save(body, folder / "model_optim_rng.pt")
        saves.tracker(str(root / naming.TRACKER))
    took = time.perf_counter() - began, time.process_time() - cpu
    shutil.rmtree(root / naming.final_name(step))
    return took


def main() -> None:
    parser = argument_parser(__doc__)
    parser.add_argument("--pairs", type=int, default=8)
    parser.add_argument("--elements", type=int, default=1 << 24, help="of the model")
    parser.add_argument("--folder", type=Path, help="on the disk to measure; by default a temporary one")
    parsed = parser.parse_args()
    torch.set_num_threads(1)
    bench = Benchmark("agreed_cost", {"pairs": parsed.pairs, "elements": parsed.elements})

    root = Path(tempfile.mkdtemp(dir=parsed.folder))
    rank = rank_of(parsed.elements)
    pairs: list[tuple[tuple[float, float], tuple[float, float]]] = []
    with a_worker():
        for number in range(parsed.pairs + 1):
            order = [True, False] if number % 2 else [False, True]
            took = {compared: save(root, rank, number + 1, is_compared=compared) for compared in order}
            if number:  # the first warms up
                pairs.append((took[True], took[False]))
    shutil.rmtree(root)

    def ratio_of(clock: int) -> Callable[[list[Any]], float]:
        return lambda sample: statistics.median(on[clock] / off[clock] for on, off in sample)

    rows, results = [], {}
    for clock, name in enumerate(("seconds", "CPU seconds")):
        ratio = ratio_of(clock)(pairs)
        low, high = bootstrap(
            lambda source, clock=clock: ratio_of(clock)(source.choices(pairs, k=len(pairs))), 7
        )  # type: ignore[misc]
        on, off = (statistics.median(pair[side][clock] for pair in pairs) for side in (0, 1))
        rows.append([name, f"{off:.3f}", f"{on:.3f}", f"{ratio:.3f}", f"{low:.3f} to {high:.3f}"])
        results[name] = {"off": off, "on": on, "ratio": ratio, "interval": [low, high]}
    bench.finish(table(["", "without", "compared", "ratio", "95 % interval"], rows), results)


if __name__ == "__main__":
    main()
