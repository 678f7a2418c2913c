"""The small framework in this folder, adapted by hand as MindIO TTP's guide adapts ModelLink.

The guide edits functions of the framework; this script derives from them. Further arguments:

    --local-copy-os   as in the guide
    --odd             the guide's variant for odd data-parallel sizes
    --words FOLDER    the folder of last words; the framework's own saves go to --save
    --die STEP        the last rank is killed in the update of STEP, which rank 1 does not reach, once rank 0
                      has finished the update and written to the named pipe FOLDER.made
"""

from __future__ import annotations

import argparse
import os
import signal
import sys
import threading
from pathlib import Path
from typing import Any

import ascendspeed.optimizer
import mindio_ttp.framework_ttp as ttp
import torch
import torch.distributed as dist
from ascendspeed import get_args, training
from ascendspeed.core import parallel_state
from mindio_ttp.modellink import build_optimizer_replica_group, get_dp_rank_list
from mindio_ttp.modellink.os_shard_parallel import get_os_shard_group

parser = argparse.ArgumentParser(allow_abbrev=False)
parser.add_argument("--record")
parser.add_argument("--local-copy-os", action="store_true")
parser.add_argument("--odd", action="store_true")
parser.add_argument("--words", type=Path, required=True)
parser.add_argument("--die", type=int, required=True)
OURS, sys.argv[1:] = parser.parse_known_args()

if OURS.odd:
    from mindio_ttp.modellink import TTPOddReplicaOptimizer as TTPReplicaOptimizer
else:
    from mindio_ttp.modellink import TTPReplicaOptimizer


class Adapted(TTPReplicaOptimizer):
    def __init__(self, optimizer: torch.optim.Optimizer, models: list[Any]) -> None:
        super().__init__(optimizer, models, OURS.local_copy_os)
        optimizer.register_step_pre_hook(self._begin)
        optimizer.register_step_post_hook(self._end)

    def _begin(self, *_: Any) -> None:
        self.begin_to_update(get_args().iteration)
        if _fatal() and dist.get_rank() == dist.get_world_size() - 1:
            with Path(f"{OURS.words}.made").open():
                os.kill(os.getpid(), signal.SIGKILL)

    def _end(self, *_: Any) -> None:
        self.end_to_update()
        if _fatal() and dist.get_rank() == 0:
            os.close(os.open(f"{OURS.words}.made", os.O_WRONLY))

    def exchange(self) -> None:
        super().exchange()
        if _fatal() and dist.get_rank() == 1:
            threading.Event().wait()

    def clip_grad_norm(self, clip_grad: float) -> float:
        data_parallel_group, group = parallel_state.get_data_parallel_group, get_os_shard_group()
        # The guide edits the line that asks for it.
        parallel_state.get_data_parallel_group = lambda: group
        try:
            return super().clip_grad_norm(clip_grad)
        finally:
            parallel_state.get_data_parallel_group = data_parallel_group


def _fatal() -> bool:
    return bool(get_args().iteration + 1 == OURS.die)


def save(save_rank: int, step: int, rank_list: list[int], args: Any) -> None:
    iteration, model, optimizer, _ = args
    optimizer.set_dump_args(save_rank, step, rank_list)
    folder = OURS.words / f"iter_{iteration:07d}_tmp"
    if optimizer.need_write_file():
        folder.mkdir()
    optimizer.save_parameter_state(str(folder / "distrib_optim.pt"))
    if optimizer.need_write_file():
        body = {"iteration": iteration, "model": model[0].module.state_dict_for_save_checkpoint()}
        torch.save(body, folder / "model_optim_rng.pt")


def rename(args: Any) -> int:
    (OURS.words / f"iter_{args[0]:07d}_tmp").rename(OURS.words / f"iter_{args[0]:07d}")
    return 0


make_groups, train, train_step = (
    parallel_state.initialize_model_parallel,
    training.train,
    training.train_step,
)


def groups_are_cut(*sizes: int) -> None:
    make_groups(*sizes)
    if not OURS.odd:
        build_optimizer_replica_group(list(parallel_state._DATA_PARALLEL_GLOBAL_RANKS))


def train_persistently(*arguments: Any) -> int:
    rank, world = dist.get_rank(), dist.get_world_size()
    ranks = parallel_state._DATA_PARALLEL_GLOBAL_RANKS if OURS.odd else get_dp_rank_list()
    copies = {"replica": 2 if OURS.odd else len(ranks) // 2, "enable_local_copy": OURS.local_copy_os}
    if rank == 0:
        ttp.ttp_init_controller(rank, world, **copies)
        ttp.ttp_start_controller("127.0.0.1", 8000)
    ttp.ttp_init_processor(rank, ranks, len(ranks), world, **copies)
    ttp.ttp_start_processor("127.0.0.1", 8000)
    ttp.ttp_register_save_ckpt_handler(save)
    ttp.ttp_register_rename_handler(rename)
    return ttp.ttp_to_persist(train)(*arguments)


def step_and_tell(forward: Any, data: Any, model: Any, optimizer: Any, scheduler: Any, config: Any) -> Any:
    result = train_step(forward, data, model, optimizer, scheduler, config)
    ttp.ttp_set_ckpt_args((get_args().iteration + 1, model, optimizer, scheduler))
    return result


ascendspeed.optimizer.DistributedOptimizer = Adapted
parallel_state.initialize_model_parallel = groups_are_cut
training.train, training.train_step = train_persistently, step_and_tell

if __name__ == "__main__":
    training.pretrain()
