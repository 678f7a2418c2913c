"""One rank of a group whose ranks mirror each other: `mirror_script.py STORE RANK SIZE CLASS STRIDE`.

The shards are uneven, and one is empty. After every step each copy is compared bit for bit with the state of
its owner, which reaches all ranks by a collective and not by the mirror. torch.distributed is the one of a
CPU job.
"""

from __future__ import annotations

import sys
from typing import Any

import torch
import torch.distributed as dist
from torch.profiler import ProfilerActivity, profile

from adaptor.devices.cpu import cuda
from adaptor.devices.cpu.apex import FusedAdam
from adaptor.replica import ring
from adaptor.replica.mirror import Mirror, ParamPiece
from adaptor.replica.ring import Ring


class CountsInATensor(torch.optim.SGD):
    """Its param groups have the number of updates in a tensor, counted up in place, as MindSpeed's AdamW."""

    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            if "step" in group:
                group["step"] += 1
            else:
                group["step"] = torch.tensor(1)
            group["momentum"] = 1 - 1 / (1 + int(group["step"]))
        return super().step(closure)


SIZES = ((7, 1), (), (1030, 3, 64), (513,), (5, 5))
OPTIMIZERS = {
    "adam": lambda groups: torch.optim.Adam(groups, lr=1e-2, weight_decay=0.1),
    "adamw": lambda groups: torch.optim.AdamW(groups, lr=1e-2, betas=(0.8, 0.95)),
    "sgd": lambda groups: torch.optim.SGD(groups, lr=1e-2, momentum=0.9),
    "counting": lambda groups: CountsInATensor(groups, lr=1e-2, momentum=0.9),
    "fused": lambda groups: FusedAdam(groups, lr=1e-2, weight_decay=0.1),
    "fused-l2": lambda groups: FusedAdam(groups, lr=1e-2, weight_decay=0.1, adam_w_mode=False),
}


def owner(rank: int, kind: str) -> torch.optim.Optimizer:
    sizes = SIZES[rank % len(SIZES)]
    params = [torch.nn.Parameter(torch.randn(size)) for size in sizes]
    half = len(params) // 2
    groups = [{"params": params[:half], "weight_decay": 0.0, "is_expert": False}, {"params": params[half:]}]
    return OPTIMIZERS[kind](groups)


def tensors_of(optimizer: torch.optim.Optimizer) -> list[Any]:
    out: list[Any] = []
    for group in optimizer.param_groups:
        out.append({key: value for key, value in sorted(group.items()) if key not in ("params", "betas")})
        for param in group["params"]:
            out.append(param.detach().clone())
            out.append(dict(optimizer.state.get(param, {})))
    return out


def same(left: Any, right: Any) -> bool:
    if isinstance(left, torch.Tensor):
        return bool(left.dtype == right.dtype and torch.equal(left, right))
    if isinstance(left, dict):
        return left.keys() == right.keys() and all(same(left[key], right[key]) for key in left)
    if isinstance(left, list):
        return len(left) == len(right) and all(same(a, b) for a, b in zip(left, right, strict=True))
    return bool(left == right)


def step(optimizer: torch.optim.Optimizer, mirror: Mirror | None, number: int) -> None:
    params = [param for group in optimizer.param_groups for param in group["params"]]
    # As in a gradient buffer of the framework: end to end, the last param first.
    grads = torch.randn(sum(param.numel() for param in params)).split([p.numel() for p in params[::-1]])
    for param, grad in zip(params[::-1], grads, strict=True):
        param.grad = grad
    for group in optimizer.param_groups:
        group["lr"] = 1e-2 / (number + 1)
        if number == 2 and group["params"]:  # now and then a param has no gradient
            group["params"][0].grad = None
    if mirror is not None:
        with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiled:
            mirror.exchange()
        require_few_copies(profiled, optimizer)
    optimizer.step()
    if mirror is not None:
        mirror.update()


def require_few_copies(profiled: profile, optimizer: torch.optim.Optimizer) -> None:
    """Assert that a large gradient is sent from its own memory; small tensors are copied once."""
    grads = [param.grad for group in optimizer.param_groups for param in group["params"]]
    if not any(grad is not None and grad.numel() > 10 * ring.CHUNK for grad in grads):
        return
    events = profiled.profiler.kineto_results.events()
    allocated = sum(max(0, event.nbytes()) for event in events if event.name() == "[memory]")
    assert 0 < allocated < sum(grad.nbytes for grad in grads if grad is not None) / 2, allocated


def main() -> None:
    store, rank, size, kind, stride = sys.argv[1], *map(int, sys.argv[2:4]), sys.argv[4], int(sys.argv[5])
    ring.CHUNK, ring.HEAD = 100, 200  # several messages for a shard, and for what it says of itself
    cuda.install_collectives()
    dist.init_process_group("gloo", store=dist.FileStore(store, size), rank=rank, world_size=size)
    torch.manual_seed(rank)
    optimizer = owner(rank, kind)
    params = [param for group in optimizer.param_groups for param in group["params"]]
    pieces = [
        ParamPiece(0, number % 2, 9 - number, 9 - number + p.numel()) for number, p in enumerate(params)
    ]
    mirror = Mirror(optimizer, pieces, Ring(dist.group.WORLD, stride), torch.device("cpu"))
    compared = 0
    for number in range(8):
        if number == 4:  # as after a load: a new copy of a state that is there
            mirror = Mirror(optimizer, pieces, Ring(dist.group.WORLD, stride), torch.device("cpu"))
        if number != 5:  # a step that is skipped
            step(optimizer, mirror, number)
        everyone: list[Any] = [None] * size
        dist.all_gather_object(everyone, (tensors_of(optimizer), pieces, params))
        theirs, places, values = everyone[mirror.index]
        assert same(tensors_of(mirror.optimizer), theirs), (rank, number)
        for bucket in (0, 1):
            copied = [(start, end, parts["param"]) for start, end, parts in mirror.shard(0, bucket)]
            owned = [
                (p.start, p.end, value) for p, value in zip(places, values, strict=True) if p.bucket == bucket
            ]
            assert [part[:2] for part in copied] == [part[:2] for part in owned]
            assert all(torch.equal(a[2], b[2]) for a, b in zip(copied, owned, strict=True))
        compared += 1
    assert mirror.nbytes == 16 * sum(SIZES[mirror.index % len(SIZES)])
    dist.barrier()
    dist.destroy_process_group()  # gloo's threads may end a process that leaves it to the interpreter's end
    print(f"compared {compared}", flush=True)


main()
