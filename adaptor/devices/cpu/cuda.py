"""`torch.cuda` and nccl on a CPU: information about the machine, random numbers, streams and events; gloo.

The "CUDA" generator is the CPU generator, because CPU operators draw from the CPU generator. The only stream
is the program itself, and all issued work has ended.
"""

from __future__ import annotations

import collections
import functools
import inspect
import logging
import os
import time
import types
from abc import ABCMeta
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d
from torch.utils import _triton

from adaptor.devices.cpu.tensors import rebind, replace

# Ampere: bf16 is supported, and nothing newer is asked of the device.
CAPABILITY = (8, 0)
# fmt: off
NOTHING_TO_DO = (
    "_lazy_init", "empty_cache", "init", "ipc_collect", "reset_max_memory_allocated",
    "reset_max_memory_cached", "reset_peak_memory_stats", "set_device", "set_per_process_memory_fraction",
    "synchronize",
)
MEMORY_FIGURES = ("max_memory_allocated", "max_memory_reserved", "memory_allocated", "memory_reserved")
# fmt: on


def _always(answer: Any) -> Callable[..., Any]:
    return lambda *args, **kwargs: answer


def install(device_count: int) -> None:
    """Make torch.cuda report `device_count` devices."""
    _install_streams()
    _install_generators(device_count)
    properties = types.SimpleNamespace(
        name="cpu",
        major=CAPABILITY[0],
        minor=CAPABILITY[1],
        multi_processor_count=1,
        total_memory=0,
        gcnArchName="",
    )
    answers: dict[str, Any] = {
        "is_available": True,
        "is_initialized": True,
        "is_bf16_supported": True,
        "_is_in_bad_fork": False,
        "device_count": device_count,
        "current_device": 0,
        "get_device_capability": CAPABILITY,
        "get_device_name": properties.name,
        "get_device_properties": properties,
        "memory_stats": collections.defaultdict(int),
        "mem_get_info": (0, 0),
    }
    answers |= dict.fromkeys(NOTHING_TO_DO) | dict.fromkeys(MEMORY_FIGURES, 0)
    replace((torch.cuda,), {name: _always(answer) for name, answer in answers.items()})
    replace((torch.cuda,), {"_lazy_call": lambda call, **kwargs: call()})
    replace((torch.cuda.nvtx,), {"range_push": _always(0), "range_pop": _always(0)})
    # torch.compile in a build for CUDA would ask the driver, which is missing.
    if hasattr(torch, "accelerator"):  # from torch 2.6 on
        replace((torch.accelerator,), {"is_available": _always(False)})
    replace((_triton,), {"has_triton_package": _always(False)})


def _get_rng_state(device: Any = "cuda") -> torch.Tensor:
    return torch.default_generator.get_state()


def _set_rng_state(new_state: torch.Tensor, device: Any = "cuda") -> None:
    torch.default_generator.set_state(new_state)


def _set_rng_state_all(new_states: Any) -> None:
    for state in new_states:
        torch.default_generator.set_state(state)


def _manual_seed(seed: int) -> None:
    # Not torch.manual_seed: that one calls this one.
    torch.default_generator.manual_seed(int(seed))


def _fork_is_expected(record: logging.LogRecord) -> bool:
    return "CPU RNG state changed within GPU RNG context" not in record.getMessage()


def _install_generators(device_count: int) -> None:
    """Replace the random generators of `device_count` devices."""
    stand_ins: dict[str, Callable[..., Any]] = {
        "get_rng_state": _get_rng_state,
        "get_rng_state_all": lambda: [_get_rng_state()],
        "set_rng_state": _set_rng_state,
        "set_rng_state_all": _set_rng_state_all,
        "manual_seed": _manual_seed,
        "manual_seed_all": _manual_seed,
        "seed": torch.default_generator.seed,
        "seed_all": torch.default_generator.seed,
        "initial_seed": torch.default_generator.initial_seed,
    }
    replace((torch.cuda, torch.cuda.random), stand_ins)
    torch.cuda.default_generators = (torch.default_generator,) * device_count  # type: ignore[assignment]
    # Megatron warns at every fork of its generator that the other one has moved too.
    logging.getLogger("megatron.core.tensor_parallel.random").addFilter(_fork_is_expected)


class HostEvent:
    """An event that is complete as soon as it is recorded; keeps the time for `elapsed_time`."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self._recorded = 0.0

    def record(self, stream: Any = None) -> None:
        self._recorded = time.perf_counter()

    def elapsed_time(self, end_event: HostEvent) -> float:
        """Milliseconds from this event to `end_event`."""
        return (end_event._recorded - self._recorded) * 1000.0

    def query(self) -> bool:
        """Return whether all work is done: always true on a CPU."""
        return True

    def synchronize(self) -> None:
        """Return at once: no work is pending."""

    def wait(self, stream: Any = None) -> None:
        """Return at once: no work is pending."""


class Stream:
    """A stream on which all work is done as soon as it is issued."""

    cuda_stream = 0
    priority = 0

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self.device = torch.device("cpu")

    def record_event(self, event: HostEvent | None = None) -> HostEvent:
        event = event or HostEvent()
        event.record(self)
        return event

    def query(self) -> bool:
        """Return whether all work is done: always true on a CPU."""
        return True

    def synchronize(self) -> None:
        """Return at once: no work is pending."""

    def wait_event(self, event: HostEvent) -> None:
        """Return at once: no work is pending."""

    def wait_stream(self, stream: Stream) -> None:
        """Return at once: no work is pending."""


class StreamContext:
    """A stand-in for `torch.cuda.stream(...)` and `torch.cuda.device(...)`, with repeated entries."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        """Ignore the named stream or device: the CPU has a single stream."""

    def __enter__(self) -> None:
        return None

    def __exit__(self, *exc_info: object) -> None:
        return None


_ONLY = Stream()


def _register_with_the_compiler() -> None:
    """Let torch 2.4 import its compiler, which accepts only subclasses of its own abstract classes.

    Later versions of torch have no such classes.
    """
    try:
        from torch import _streambase
    except ImportError:
        return
    for name, stand_in in (("_EventBase", HostEvent), ("_StreamBase", Stream)):
        base = getattr(_streambase, name, None)
        if isinstance(base, ABCMeta):
            base.register(stand_in)


def _install_streams() -> None:
    """Replace streams and events of CUDA."""
    _register_with_the_compiler()
    classes = {
        "Event": HostEvent,
        "Stream": Stream,
        "ExternalStream": Stream,
        "StreamContext": StreamContext,
        "stream": StreamContext,
        "device": StreamContext,
        "device_of": StreamContext,
    }
    for name, stand_in in classes.items():
        setattr(torch.cuda, name, stand_in)
    replace(
        (torch.cuda,),
        {
            "current_stream": lambda device=None: _ONLY,
            "default_stream": lambda device=None: _ONLY,
            "set_stream": lambda stream: None,
            "is_current_stream_capturing": lambda: False,
        },
    )


def _backend(name: str | None) -> str:
    return "gloo" if name is None or "nccl" in name else name


@functools.cache
def _signature(function: Any) -> inspect.Signature:
    return inspect.signature(function)


def _group_over_gloo(original: Any, *args: Any, **kwargs: Any) -> Any:
    call = _signature(original).bind(*args, **kwargs)
    call.arguments["backend"] = _backend(call.arguments.get("backend"))
    for of_nccl in ("device_id", "pg_options"):
        call.arguments.pop(of_nccl, None)
    return original(*call.args, **call.kwargs)


def _barrier_without_devices(original: Any, *args: Any, **kwargs: Any) -> Any:
    call = _signature(original).bind(*args, **kwargs)
    call.arguments.pop("device_ids", None)
    return original(*call.args, **call.kwargs)


def _send_a_copy(original: Any, tensor: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
    # Pipeline code frees the buffer as soon as isend returns: in order on a stream, a race here.
    return original(tensor.detach().clone(), *args, **kwargs)


def _split_sizes_as_lists(original: Any, *args: Any, **kwargs: Any) -> Any:
    call = _signature(original).bind(*args, **kwargs)
    for name in ("output_split_sizes", "input_split_sizes"):
        if call.arguments.get(name) is not None:
            call.arguments[name] = [int(size) for size in call.arguments[name]]
    return original(*call.args, **call.kwargs)


def _without_autograd(original: Any, *args: Any, **kwargs: Any) -> Any:
    # Gloo copies into the parts of the tensor that is filled, which autograd may watch.
    with torch.no_grad():
        return original(*args, **kwargs)


def _gather_other_sizes(
    original: Any, tensor_list: list[torch.Tensor], tensor: torch.Tensor, *args: Any, **kwargs: Any
) -> Any:
    # Gloo gathers tensors of one size alone.
    longest = max(part.numel() for part in tensor_list)
    if all(part.numel() == longest for part in tensor_list):
        return original(tensor_list, tensor, *args, **kwargs)
    padded = [part.new_empty(longest) for part in tensor_list]
    own = tensor.new_zeros(longest)
    own[: tensor.numel()] = tensor.detach().reshape(-1)
    work = original(padded, own, *args, **kwargs)
    if work is not None:  # what is copied below must be there
        work.wait()
    with torch.no_grad():
        for part, filled in zip(tensor_list, padded, strict=True):
            part.copy_(filled[: part.numel()].view_as(part))
    return work


def _coalesced_as_bytes(
    original: Any, output_tensor: torch.Tensor, input_tensor: torch.Tensor, *args: Any, **kwargs: Any
) -> Any:
    # Gloo makes one tensor of all that are gathered together, and would convert numbers of different types.
    if distributed_c10d._world.pg_coalesce_state:
        output_tensor, input_tensor = output_tensor.view(torch.uint8), input_tensor.view(torch.uint8)
    return original(output_tensor, input_tensor, *args, **kwargs)


@functools.cache
def _transports(process: int, interfaces: str) -> list[Any]:
    """Return what all groups of a process share: for each interface a listening socket and a reading thread.

    Args:
        process: pid of this process; a fork has no such threads.
        interfaces: their names with commas between them; empty: the interface of the host name.
    """
    group: Any = dist.ProcessGroupGloo
    if not interfaces:
        return [group.create_default_device()]
    return [group.create_device(interface=name) for name in interfaces.split(",")]


def _over_shared_transports(
    original: Any,
    group: Any,
    store: Any,
    rank: int,
    size: int,
    timeout: Any = distributed_c10d.default_pg_timeout,
    **more: Any,
) -> None:
    # Otherwise each group makes its own, whose thread wakes a hundred times a second: with the twenty groups
    # and more of a framework, up to half of the CPU time of a small job.
    if any(more.values()) or not isinstance(timeout, timedelta):
        original(group, store, rank, size, timeout, **more)
        return
    options: Any = dist.ProcessGroupGloo._Options()  # type: ignore[attr-defined]
    options._devices = _transports(os.getpid(), os.environ.get("GLOO_SOCKET_IFNAME", ""))
    options._threads, options._timeout = 2 * len(options._devices), timeout
    original(group, store, rank, size, options)


def install_collectives() -> None:
    """Replace the NCCL calls of torch.distributed, where gloo differs."""
    # P2POp compares the identity of isend, so both modules must hold the same function.
    for name, effect in {
        "init_process_group": _group_over_gloo,
        "new_group": _group_over_gloo,
        "barrier": _barrier_without_devices,
        "isend": _send_a_copy,
        "all_gather": _gather_other_sizes,
        "all_to_all_single": _split_sizes_as_lists,
        "_all_gather_base": _without_autograd,
        "all_gather_into_tensor": _coalesced_as_bytes,
    }.items():
        rebind((distributed_c10d, dist), name, effect)
    rebind(dist.ProcessGroupGloo, "__init__", _over_shared_transports)
