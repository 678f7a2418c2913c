"""A training loop in plain torch, adapted to MindIO TTP by hand, in the older form or the newer one.

    train_mindio.py --save FOLDER --form older|newer [--local-copy] [--blocks]
                    [--fault RANK:STEP:WHERE:KIND ...]

WHERE is `backward`, `reduced`, `window` (in the update), `ended` (after it), `barrier` (after the engine's
barrier), `save` (in the save handler) or `rename`. KIND is `sigkill`, `exception`, `stall`, or `break`: an
exception once the rank to be killed is dead. With --blocks a collective with a lost rank never returns, as
over HCCL. The calls of the handlers are written to FOLDER/calls.
"""

from __future__ import annotations

import argparse
import os
import select
import signal
import threading
import traceback
from pathlib import Path
from typing import Any

import mindio_ttp.framework_ttp as ttp
import torch
import torch.distributed as dist

from tests.frameworks.sharded_adam import SHARDS, STEPS, Sharded, gradient

TRACKER = "latest.txt"


class Faults:
    def __init__(self, rank: int, save: Path, faults: list[str]) -> None:
        self.step = 0
        self._rank, self._save = rank, save
        self._wanted = [tuple(fault.split(":")) for fault in faults]
        (save / f"pid{rank}").write_text(str(os.getpid()))

    def reach(self, place_reached: str, step: int | None = None) -> None:
        """Strike the faults that are due at `place_reached`; `step`: the saved step, which may be behind the
        training.
        """
        for fault in self._wanted:
            rank, due, place, kind = fault
            stamp = self._save / f"struck-{'-'.join(fault)}"
            reached = (self._rank, self.step if step is None else step, place_reached)
            if (int(rank), int(due), place) == reached and not stamp.exists():
                stamp.touch()
                self._strike(kind)

    def _strike(self, kind: str) -> None:
        if kind == "sigkill":
            os.kill(os.getpid(), signal.SIGKILL)
        elif kind == "stall":
            threading.Event().wait()
        elif kind == "break":
            (victim,) = (rank for rank, _, _, kind in self._wanted if kind == "sigkill")
            death = os.pidfd_open(int((self._save / f"pid{victim}").read_text()))
            select.select([death], [], [])
        raise RuntimeError("told to raise")


class Training:
    def __init__(self, options: argparse.Namespace) -> None:
        self.rank, self.world = dist.get_rank(), dist.get_world_size()
        self.save: Path = options.save
        self.local_copy: bool = options.local_copy
        self.blocks: bool = options.blocks
        self.older = options.form == "older"
        self.faults = Faults(self.rank, self.save, options.fault)
        tracker = self.save / TRACKER
        self.iteration = int(tracker.read_text()) if tracker.exists() else 0
        loaded = torch.load(self._folder(self.iteration) / "state.pt") if self.iteration else None
        self.optimizer = Sharded(self.rank, loaded)
        halves = [list(range(first, first + SHARDS)) for first in range(0, self.world, SHARDS)]
        groups = [dist.new_group(half) for half in halves]
        self.half = groups[self.rank // SHARDS]

    def _folder(self, step: int, suffix: str = "") -> Path:
        return self.save / f"iter_{step:07d}{suffix}"

    def call(self, *fields: Any) -> None:
        with (self.save / "calls").open("a") as calls:
            calls.write(" ".join(map(str, fields)) + "\n")

    def train(self) -> None:
        try:
            self._train()
        except RuntimeError as error:
            if not (self.blocks and "gloo" in str(error)):
                raise
            threading.Event().wait()

    def _train(self) -> None:
        while self.iteration < STEPS:
            self.faults.step = self.iteration + 1
            self.faults.reach("backward")
            grad = gradient(self.iteration + 1, self.rank)
            dist.all_reduce(grad)
            self.faults.reach("reduced")
            if self.older and not self.local_copy:
                dist.barrier()  # as in the guide
            self.begin()
            self.faults.reach("window")
            self.optimizer.step(grad)
            self.end()
            self.faults.reach("ended")
            parts = [torch.empty_like(self.optimizer.main.data) for _ in range(SHARDS)]
            dist.all_gather(parts, self.optimizer.main.data, group=self.half)
            self.optimizer.weights = torch.cat(parts)
            self.iteration += 1
            if self.older:
                ttp.ttp_set_ckpt_args((self.iteration, self.optimizer))
            else:
                ttp.tft_set_step_args([self.optimizer])

    def begin(self) -> None:
        if self.older:
            self.optimizer.begin_to_update(self.iteration)
        elif self.local_copy:
            ttp.tft_start_copy_os()
            self.optimizer.copy_state()
            ttp.tft_start_updating_os(self.iteration)
        else:
            ttp.tft_start_updating_os()

    def end(self) -> None:
        if self.older:
            self.optimizer.end_to_update()
        else:
            ttp.tft_end_updating_os(self.iteration + 1)

    def gather(self, step: int, label: int, ranks: list[int], live_step: int) -> None:
        """Write `iter_{label}_tmp` from the shards of `ranks`; the first rank writes."""
        group = dist.new_group(sorted(ranks), backend="gloo", use_local_synchronization=True)
        self.faults.reach("save", step)
        own_state = self.optimizer.copied if live_step > step else self.optimizer.live()
        joined: dict[str, Any] = {"step": step}
        for name, tensor in own_state.items():
            parts = [torch.empty_like(tensor) for _ in ranks] if self.rank == ranks[0] else None
            dist.gather(tensor, parts, dst=ranks[0], group=group)
            if parts is not None:  # in the order of the ranks in the group
                by_shard = {rank % SHARDS: part for rank, part in zip(sorted(ranks), parts, strict=True)}
                joined[name] = torch.cat([by_shard[index] for index in range(SHARDS)])
        if self.rank == ranks[0]:
            folder = self._folder(label, "_tmp")
            folder.mkdir(exist_ok=True)
            torch.save(joined, folder / "state.pt")

    def finish(self, label: int) -> None:
        self.faults.reach("rename")
        self._folder(label, "_tmp").rename(self._folder(label))
        (self.save / TRACKER).write_text(str(label))


def adapt_older(training: Training) -> Any:
    def save(save_rank: int, step: int, rank_list: list[int], args: Any) -> None:
        iteration, optimizer = args
        training.call("save", training.rank, step, iteration, save_rank, rank_list)
        assert save_rank == rank_list[0]
        optimizer.set_dump_args(save_rank, step, rank_list)
        training.gather(step, iteration, rank_list, optimizer.current_step)

    def rename(args: Any) -> int:
        training.call("rename", training.rank, args[0])
        try:
            training.finish(args[0])
        except Exception:
            traceback.print_exc()
            return 1
        return 0

    ranks = list(range(training.world))
    copies = {"replica": training.world // 2, "enable_local_copy": training.local_copy}
    address = ("127.0.0.1", int(os.environ["TTP_PORT"]))
    if training.rank == 0:
        ttp.ttp_init_controller(training.rank, training.world, **copies)
        ttp.ttp_start_controller(*address)
    ttp.ttp_init_processor(training.rank, ranks, len(ranks), training.world, **copies)
    ttp.ttp_start_processor(*address)
    ttp.ttp_register_save_ckpt_handler(save)
    ttp.ttp_register_rename_handler(rename)
    return ttp.ttp_to_persist(training.train)


def adapt_newer(training: Training) -> Any:
    def save(step: int, infos: list[dict[str, Any]], args: Any, ctx: Any) -> None:
        (info,) = infos
        training.call("save", training.rank, step, info["type"], info["ranks"], ctx)
        live_step = int(training.optimizer.adam.state[training.optimizer.main]["step"])
        training.gather(step, step, info["ranks"], live_step)

    def rename(step: int, args: Any) -> None:
        training.call("rename", training.rank, step)
        assert args == [training.optimizer]
        training.finish(step)

    rank, world = training.rank, training.world
    address = ("127.0.0.1", int(os.environ["TTP_PORT"]))
    if rank == 0:
        ttp.tft_init_controller(rank, world, training.local_copy)
        ttp.tft_start_controller(*address, False, "")
    dist.barrier()
    ttp.tft_init_processor(rank, world, training.local_copy, False, "")
    ttp.tft_start_processor(*address)
    ranks = list(range(world))
    ttp.tft_set_optimizer_replica(
        rank, [{"rank_list": ranks, "replica_cnt": world // SHARDS, "replica_shift": SHARDS}]
    )
    ttp.tft_register_save_ckpt_handler(save, "ctx")
    ttp.tft_register_rename_handler(rename)
    ttp.tft_register_stop_handler(lambda args, ctx: training.call("stop", rank))
    ttp.tft_register_clean_handler(lambda damaged, args, ctx: training.call("clean", rank, damaged))
    ttp.tft_register_exit_handler(lambda ctx: training.call("exit", rank, ctx), "bye")
    ttp.tft_register_repair_handler(lambda *_: training.call("repair", rank))
    if training.iteration:  # else the SDK refuses it
        ttp.tft_report_load_ckpt_step(training.iteration)
    dist.barrier()
    return ttp.tft_exception_handler(training.train)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--record")
    parser.add_argument("--save", type=Path, required=True)
    parser.add_argument("--form", choices=["older", "newer"], required=True)
    parser.add_argument("--local-copy", action="store_true")
    parser.add_argument("--blocks", action="store_true")
    parser.add_argument("--fault", action="append", default=[])
    options = parser.parse_args()
    dist.init_process_group("gloo")
    training = Training(options)
    train = adapt_older(training) if options.form == "older" else adapt_newer(training)
    passed = dist.barrier

    def barrier(group: Any = None) -> None:
        passed(group)
        if group is not None:  # the engine's own
            training.faults.reach("barrier")

    dist.barrier = barrier  # type: ignore[assignment]
    train()
    dist.barrier = passed
    if training.rank == 0:
        torch.save(training.optimizer.weights, training.save / "final.pt")


if __name__ == "__main__":
    main()
