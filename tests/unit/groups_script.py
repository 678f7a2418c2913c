"""A rank of a job that replaces its process groups: `groups_script.py PORT RANK SIZE NEWCOMER BACKEND`.

Rank 0 of a job of SIZE ranks keeps its process through several exchanges; a newcomer (1) first makes its
groups without the others.
"""

from __future__ import annotations

import sys
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

import adaptor.patches as patches
from adaptor import context, patching
from adaptor.online import groups, transfer


def summed(group: dist.ProcessGroup | None) -> float:
    tensor = torch.full((3,), float(dist.get_rank() + 1))
    dist.all_reduce(tensor, group=group)
    return float(tensor[0])


def backend_of(group: Any) -> Any:
    return group._get_backend(torch.device("cpu"))


def main(port: int, rank: int, size: int, newcomer: bool, backend: str) -> None:
    remembered = context.part(groups.Groups)
    remembered.remember(lone=newcomer)
    patches.load("online")
    patching.arm("online")
    if backend == "hccl":
        import torch_npu.distributed.distributed_c10d as hccl  # replaces torch's helper
    store = dist.TCPStore("127.0.0.1", port, is_master=rank == 0, wait_for_workers=False)
    timeout = timedelta(seconds=60)
    dist.init_process_group(
        backend, store=dist.PrefixStore("job", store), rank=rank, world_size=size, timeout=timeout
    )
    new_groups = [None, dist.new_group(list(range(size))), dist.new_group([0, size - 1])]
    group_of_rank_1 = dist.new_group([1], backend="gloo")
    backend_before = backend_of(group_of_rank_1) if rank == 1 else None
    total = size * (size + 1) / 2
    outer = size + 1 if rank in (0, size - 1) else rank + 1  # whose collective does nothing
    if newcomer:
        gathered = [None] * size
        dist.all_gather_object(gathered, rank)
        assert gathered == [rank] * size, "alone, each rank has given the same"
        assert dist.get_backend() == backend, "who asks is told the backend that it will be"
        if rank == 1:
            sent, taken = torch.arange(3.0), torch.zeros(3)
            dist.all_to_all_single(taken, sent, group=group_of_rank_1)
            assert torch.equal(taken, sent), "with itself alone, it speaks in earnest from the beginning"
    else:
        assert [summed(group) for group in new_groups] == [total, total, outer]
        # The survivors have been through one exchange more than the newcomer.
        remembered.exchange(dist.PrefixStore("first", store), "first")
        assert [summed(group) for group in new_groups] == [total, total, outer]
    if rank == size - 1 and not newcomer:
        print("first")
        sys.stdout.flush()
        return
    for number in range(1, 4):
        remembered.exchange(dist.PrefixStore(f"exchange{number}", store), str(number))
        assert [summed(group) for group in new_groups] == [total, total, outer]
        assert dist.get_process_group_ranks(new_groups[1]) == [*range(size)]
    assert (group_of_rank_1 is dist.GroupMember.NON_GROUP_MEMBER) == (rank != 1)
    if rank == 1:
        assert backend_of(group_of_rank_1) is backend_before, "what no other rank can break is kept"
    assert dist.get_backend() == backend
    if backend == "hccl":
        exchanges = 2 if newcomer else 4  # with communicators; the first of a newcomer had none
        assert len(hccl.aborted) == exchanges * (remembered.known - (rank == 1)), hccl.aborted
    late_group = dist.new_group([0, size - 1])  # by the job's own store, under the name that all give it
    assert summed(late_group) == outer
    remembered.exchange(dist.PrefixStore("last", store), "last")
    assert summed(late_group) == outer
    pair(dist.PrefixStore("pair", store), rank, size)
    dist.barrier()
    print("done")


def pair(store: dist.Store, rank: int, size: int) -> None:
    """The first rank gives the state of an optimizer to the last one."""
    if rank not in (0, size - 1):
        return
    place = transfer.SOURCE if rank == 0 else transfer.NEWCOMER
    line = transfer.TransferChannel(dist.ProcessGroupGloo(store, place, 2, timedelta(seconds=60)), 1 - place)
    weights = [torch.nn.Parameter(torch.full((4, 3), float(rank))), torch.nn.Parameter(torch.zeros(7))]
    optimizer = torch.optim.AdamW([{"params": weights[:1], "lr": 0.5 - rank}, {"params": weights[1:]}])
    if rank == 0:
        for param in weights:
            param.grad = torch.full_like(param, 3.0)
        optimizer.step()
        transfer.answer(line, Given(optimizer), cancelled=lambda: False)
    else:
        assert transfer.ask_record(line) == {"step": 3}
        wrong = torch.optim.AdamW(weights[1:])
        try:
            transfer.ask_shard(line, 5, wrong)
        except transfer.TransferError as error:
            if "1 params" not in str(error):
                raise
            line.receive_tensors([torch.empty(12), torch.empty(7), *_states(weights)])
        else:
            raise AssertionError("a shard of another layout was taken")
        assert transfer.ask_shard(line, 5, optimizer) > 0
        assert optimizer.param_groups[0]["lr"] == 0.5
        transfer.end(line)
    assert float(weights[0].detach()[0, 0]) != float(rank)
    assert optimizer.state[weights[1]]["step"] == 1


def _states(weights: list[torch.nn.Parameter]) -> list[torch.Tensor]:
    return [tensor for weight in weights for tensor in (torch.empty(()), *(torch.empty(weight.shape),) * 2)]


class Given:
    """The state that the first rank sends."""

    from adaptor.devices.device import HOST as device

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self._optimizer = optimizer

    def record(self) -> object:
        return {"step": 3}

    def shard(self, index: int) -> torch.optim.Optimizer:
        assert index == 5
        return self._optimizer

    def frozen(self) -> list[torch.Tensor]:
        return []


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]), bool(int(sys.argv[4])), sys.argv[5])
