"""torch's private books of process groups: registers a backend that `groups.py` has made, and frees the old.

`ProcessGroup` maps backend types to backends, and keeps a backend of a known type. A type is an eight-bit
number, unchecked by torch, so a fresh backend is registered under a number without a name in torch. torch
documents none of these facts: `why_not` tests them when a worker starts.
"""

from __future__ import annotations

import contextlib
import ctypes
from datetime import timedelta
from typing import Any

from adaptor.worker.processor import CannotRejoinError

# The numbers of backends that torch has names for end at 6 (2.13); 255 is the last one that fits.
FIRST_NUMBER = 64
LAST_NUMBER = 255


class ExchangeError(CannotRejoinError):
    """The backends of this worker's groups cannot be exchanged."""


def leave_batches() -> None:
    """Clear the leftovers of a batch of collectives after an exception; torch would keep adding to the batch.

    Raises:
        ExchangeError: NCCL or HCCL may also be waiting for the end of the batch, and would delay all later
            work.
    """
    begun_batches = books().pg_coalesce_state
    for group, collected in begun_batches.items():
        name = str(books().pg_map[group][0]) if group in books().pg_map else ""
        for library in ("nccl", "hccl") if not collected else ():
            if library in name:
                raise ExchangeError(
                    f"the fault has struck in the middle of a batch of messages over {library.upper()}"
                )
    begun_batches.clear()


def never_destroy(backend: Any) -> None:
    """Keep a backend to the end of the process.

    The destructor waits for the backend's threads, and a thread may be in work that gloo has forgotten.
    """
    ctypes.pythonapi.Py_IncRef(ctypes.py_object(backend))


def abort_communicators(group: Any) -> None:
    """Abort the HCCL communicators of a process group, and free their buffers on the device.

    The group gets a fresh backend afterwards. Groups with other backends, and groups that a new process has
    made alone, have no communicators of HCCL.
    """
    if any(hasattr(group._get_backend(device), "abort_hccl_comm") for device in group._device_types):
        from torch_npu.distributed import reinit_process_group

        # An error, as of a store that has ended, costs the memory of the buffers alone.
        with contextlib.suppress(Exception):
            reinit_process_group(group, rebuild_link=True)


def adopt(group: Any, fresh: Any, number: int) -> int:
    """Register the backends of `fresh` in `group`.

    Args:
        fresh: a group made with the same arguments.
        number: of the first backend.

    Returns:
        The number of the group's next backend.

    Raises:
        ExchangeError: torch has no more numbers for backends.
    """
    from torch.distributed import ProcessGroup

    types: dict[int, Any] = {}
    default = None
    for device in fresh._device_types:
        backend = fresh._get_backend(device)
        if id(backend) not in types:
            if number > LAST_NUMBER:
                raise ExchangeError("torch cannot register another backend: all of its numbers are taken")
            types[id(backend)] = ProcessGroup.BackendType(number)
            number += 1
        group._register_backend(device, types[id(backend)], backend)
        if default is None or device.type != "cpu":
            default = types[id(backend)]
    group._set_default_backend(default)
    return number


def forget(group: Any, fresh: Any) -> None:
    """Remove `fresh` from torch's books, which keep `group` unchanged except for the name of its backend."""
    from torch._C import _distributed_c10d

    world = books()
    backend, _ = world.pg_map[fresh]
    world.pg_map[group] = (backend, world.pg_map[group][1])
    world.pg_backend_config[group] = world.pg_backend_config[fresh]
    for book in (
        world.pg_map,
        world.pg_names,
        world.pg_group_ranks,
        world.pg_backend_config,
        world.pg_to_tag,
    ):
        book.pop(fresh, None)
    for tagged in world.tags_to_pg.values():
        if fresh in tagged:
            tagged.remove(fresh)
    with contextlib.suppress(Exception):  # some versions of torch have registered its name, others not
        _distributed_c10d._unregister_process_group(fresh.group_name)


def books() -> Any:
    """Return torch's books of process groups."""
    from torch.distributed import distributed_c10d

    return distributed_c10d._world


def backends_by_device(backend_request: Any) -> Any:
    """Return torch's `BackendConfig` of a backend request, such as "nccl" or "cpu:gloo,cuda:nccl"."""
    from torch.distributed import Backend
    from torch.distributed.distributed_c10d import BackendConfig

    return BackendConfig(Backend(str(backend_request)))


def why_not() -> str:
    """Return why the backends of groups cannot be exchanged with this torch; empty: exchanges work."""
    import torch
    from torch.distributed import HashStore, PrefixStore, ProcessGroup, ProcessGroupGloo

    store, timeout, cpu = HashStore(), timedelta(seconds=10), torch.device("cpu")

    def backend(name: str) -> Any:
        return ProcessGroupGloo(PrefixStore(name, store), 0, 1, timeout)

    try:
        group = ProcessGroup(PrefixStore("group", store), 0, 1)
        group._register_backend(cpu, ProcessGroup.BackendType.GLOO, backend("first"))
        group._set_default_backend(ProcessGroup.BackendType.GLOO)
        for number in (FIRST_NUMBER, LAST_NUMBER):
            fresh, kind = backend(str(number)), ProcessGroup.BackendType(number)
            group._register_backend(cpu, kind, fresh)
            group._set_default_backend(kind)
            if group._get_backend(cpu) is not fresh:
                return f"torch {torch.__version__} does not let the backend of a process group be exchanged"
        probe = torch.ones(1)
        group.allreduce([probe]).wait()
    except Exception as error:  # whatever a version of torch says to what it does not know
        return f"torch {torch.__version__} cannot exchange backends ({type(error).__name__})"
    return ""
