"""Several processes on one GPU: `shared.py [--nccl] [--at RANK STEP WHAT] script args...`.

gloo does not know all collectives of tensors that lie on a GPU: they go by way of the host here. With
`--nccl` collectives are NCCL's own: it refuses two processes of one host on a GPU, so each process says that
it is a host by itself (NCCL_HOSTID), and they talk over sockets on the loopback interface. `--at` breaks the
device of a rank as a step begins: `blocked` by a kernel that never ends, or `failed`, by an assertion in a
kernel, after which every call is an error.
"""

from __future__ import annotations

import argparse
import functools
import os
import runpy
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d
from torch.utils._pytree import tree_flatten, tree_unflatten

# The script is run by its path, in a folder of its own.
sys.path.append(str(Path(__file__).resolve().parents[3]))

from adaptor.devices import cpu

# Cycles of a device's clock: for centuries.
NEVER = 1 << 62
COLLECTIVES = (
    *("all_reduce", "broadcast", "reduce", "all_gather", "gather", "scatter", "reduce_scatter"),
    *("all_gather_into_tensor", "reduce_scatter_tensor", "all_to_all", "all_to_all_single"),
)


class Done:
    """A collective that has ended."""

    def wait(self, timeout: Any = None) -> bool:
        return True

    def is_completed(self) -> bool:
        return True


def on_device(tensor: torch.Tensor) -> bool:
    return tensor.is_cuda


def by_way_of_the_host(original: Any) -> Any:
    """A collective of torch on copies of its tensors, which are brought back before it returns."""

    @functools.wraps(original)
    def act(*args: Any, **kwargs: Any) -> Any:
        values, tree = tree_flatten((args, kwargs))
        there = [value for value in values if isinstance(value, torch.Tensor) and on_device(value)]
        if not there:
            return original(*args, **kwargs)
        copies = {id(tensor): tensor.detach().cpu().clone().contiguous() for tensor in there}
        before = {key: copy.clone() for key, copy in copies.items()}
        here = [copies.get(id(value), value) for value in values]
        given, named = tree_unflatten(here, tree)
        asked = named.pop("async_op", False)
        original(*given, **named)
        with torch.no_grad():
            for tensor in there:  # what was only read may be part of what was written
                copy = copies[id(tensor)]
                if not torch.equal(_bits(copy), _bits(before[id(tensor)])):
                    tensor.copy_(copy)
        return Done() if asked else None

    return act


def _bits(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.reshape(-1).view(torch.uint8)


@contextmanager
def one_after_the_other(*args: Any, **kwargs: Any) -> Iterator[Done]:
    """In the place of torch's manager of collectives that go together."""
    yield Done()


def install() -> None:
    for name in COLLECTIVES:
        made = by_way_of_the_host(getattr(distributed_c10d, name))
        for module in (distributed_c10d, dist):
            setattr(module, name, made)
    for module in (distributed_c10d, dist):
        setattr(module, "_coalescing_manager", one_after_the_other)  # noqa: B010
    barrier = distributed_c10d.barrier
    without_devices = functools.wraps(barrier)(
        lambda group=None, async_op=False, device_ids=None: barrier(group, async_op)
    )
    for module in (distributed_c10d, dist):
        setattr(module, "barrier", without_devices)  # noqa: B010


def one_gpu() -> None:
    """Let every process take the first GPU."""
    choose = torch.cuda.set_device
    torch.cuda.set_device = lambda device: choose(0)  # type: ignore[assignment]
    # Without apex or Transformer Engine the framework cannot load what it has saved with torch's AdamW.
    cpu.install_apex()
    cpu.supply_missing_names()


def a_host_of_its_own(rank: int) -> None:
    """Let NCCL take this process for the only one on its host; before torch makes a communicator."""
    os.environ.update(
        NCCL_HOSTID=f"rank-{rank}", NCCL_SOCKET_IFNAME="lo", NCCL_IB_DISABLE="1", NCCL_NET="Socket"
    )


def break_device(what: str) -> None:
    if what == "blocked":
        torch.cuda._sleep(NEVER)
        return
    table = torch.zeros(1, device="cuda")
    table[torch.tensor([1 << 20], device="cuda")]


def break_at(rank: int, step: int, what: str) -> None:
    """Break the device of `rank` as `step` begins, once in a job."""
    import wrapt

    if rank != int(os.environ["RANK"]):
        return

    def is_first() -> bool:
        try:
            (Path(os.environ["TTP_LOG_PATH"]) / "has-broken").touch(exist_ok=False)
        except FileExistsError:
            return False
        return True

    def broken(wrapped: Any, instance: Any, args: Any, kwargs: Any) -> Any:
        from megatron.training.global_vars import get_args

        if get_args().curr_iteration + 1 == step and is_first():
            break_device(what)
        return wrapped(*args, **kwargs)

    def wrap(module: ModuleType) -> None:
        wrapt.wrap_function_wrapper(module, "train_step", broken)

    wrapt.register_post_import_hook(wrap, "megatron.training.training")


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--nccl", action="store_true")
    parser.add_argument("--at", nargs=3, metavar=("RANK", "STEP", "WHAT"))
    parser.add_argument("script")
    parser.add_argument("arguments", nargs=argparse.REMAINDER)
    parsed = parser.parse_args()
    one_gpu()
    if parsed.nccl:
        a_host_of_its_own(int(os.environ["RANK"]))
    else:
        install()
    if parsed.at:
        break_at(int(parsed.at[0]), int(parsed.at[1]), parsed.at[2])
    sys.argv = [parsed.script, *parsed.arguments]
    sys.path[0] = str(Path(parsed.script).resolve().parent)
    runpy.run_path(parsed.script, run_name="__main__")


if __name__ == "__main__":
    main()
