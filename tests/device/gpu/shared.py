"""Several processes on one GPU: `shared.py [--nccl] [--at RANK STEP WHAT] script args...`.

gloo lacks some collectives of GPU tensors, so they go through the host. With `--nccl` collectives are NCCL's
own: NCCL refuses two processes of one host on a GPU, so each process declares a host of its own
(NCCL_HOSTID), and they use sockets on the loopback interface. `--at` breaks the device of a rank at the start
of a step: `blocked` by an endless kernel, or `failed` by an assertion in a kernel, after which every call is
an error.
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
    """Return a collective of torch on host copies of its tensors; results are copied back before the
    return.
    """

    @functools.wraps(original)
    def act(*args: Any, **kwargs: Any) -> Any:
        values, tree = tree_flatten((args, kwargs))
        on_gpu = [value for value in values if isinstance(value, torch.Tensor) and on_device(value)]
        if not on_gpu:
            return original(*args, **kwargs)
        copies = {id(tensor): tensor.detach().cpu().clone().contiguous() for tensor in on_gpu}
        copies_before = {key: copy.clone() for key, copy in copies.items()}
        host_values = [copies.get(id(value), value) for value in values]
        arguments, named = tree_unflatten(host_values, tree)
        is_async = named.pop("async_op", False)
        original(*arguments, **named)
        with torch.no_grad():
            for tensor in on_gpu:  # what was only read may be part of what was written
                copy = copies[id(tensor)]
                if not torch.equal(_bits(copy), _bits(copies_before[id(tensor)])):
                    tensor.copy_(copy)
        return Done() if is_async else None

    return act


def _bits(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.reshape(-1).view(torch.uint8)


@contextmanager
def one_after_the_other(*args: Any, **kwargs: Any) -> Iterator[Done]:
    """In the place of torch's manager of collectives that go together."""
    yield Done()


def install() -> None:
    for name in COLLECTIVES:
        collective = by_way_of_the_host(getattr(distributed_c10d, name))
        for module in (distributed_c10d, dist):
            setattr(module, name, collective)
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
    """Let NCCL see the process as alone on its host; to be called before torch makes a communicator."""
    os.environ.update(
        NCCL_HOSTID=f"rank-{rank}", NCCL_SOCKET_IFNAME="lo", NCCL_IB_DISABLE="1", NCCL_NET="Socket"
    )


def break_device(fault: str) -> None:
    if fault == "blocked":
        torch.cuda._sleep(NEVER)
        return
    table = torch.zeros(1, device="cuda")
    table[torch.tensor([1 << 20], device="cuda")]


def break_at(rank: int, step: int, fault: str) -> None:
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
            break_device(fault)
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
