"""Buffers that ranks share outside of process groups: left before an exchange of the groups, then made anew.

Transformer Engine's user buffers (`--tp-comm-overlap`) and the buffers of DeepEP and HybridEP
(`--moe-token-dispatcher-type flex`) map the memory of other processes, and count messages in that memory.
After a fault the counts differ between ranks, also if no process was lost. Invariant: each rank leaves all
shared buffers before it exchanges its groups, so all members of a group make the next buffer at the same
time.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator, Mapping
from types import ModuleType
from typing import Any

import torch.distributed as dist

from adaptor.context import Context
from adaptor.online import group_books
from adaptor.online.groups import Groups

_USER_BUFFERS = "transformer_engine.pytorch.module.base"
# The functions by which Transformer Engine makes process groups for its buffers.
_MAKERS = ("new_group", "new_subgroups_by_enumeration")
# The classes of Transformer Engine's library that map the memory of other ranks (the last three before 1.12).
_MAPPINGS: tuple[str, ...] = ("CommOverlapHelper", "CommOverlap", "CommOverlapP2P")
_MAPPINGS += ("UbufBootstrapCallbacks", "UbufCommOverlap", "UbufP2PCommOverlap")
_EXPERT_BUFFERS = "megatron.core.transformer.moe.fused_a2a"


class RankBuffers:
    """The buffers of this process."""

    def __init__(self, context: Context) -> None:
        self._context = context
        self._initialize: Callable[[], Any] | None = (
            None  # makes the user buffers, as the framework has asked
        )
        self._groups: list[Any] = []  # that were made for them

    def initialize(
        self, function: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]
    ) -> Any:
        """Make the user buffers as `function` (Transformer Engine's `initialize_ub`) does, and remember how.

        A new process among survivors makes the process groups alone, and no buffers: the buffers follow when
        the process has joined.
        """
        groups = self._context.part(Groups)
        if not groups.remembers or self._initialize is not None:
            return function(*args, **kwargs)
        self._initialize = lambda: function(*args, **kwargs)
        module = sys.modules[_USER_BUFFERS]
        with self._noting_groups(), _without_mappings(module) if groups.lone else contextlib.nullcontext():
            return self._initialize()

    def leave(self) -> None:
        """Leave all buffers; nothing on the device uses the buffers any more. Raises ExchangeError."""
        if self._initialize is not None:
            sys.modules[_USER_BUFFERS].destroy_ub()  # local: no other rank takes part
        fused_a2a = sys.modules.get(_EXPERT_BUFFERS)
        for name in ("_buffer", "_hybrid_ep_buffer"):
            buffer = getattr(fused_a2a, name, None)
            if buffer is None:
                continue
            if getattr(buffer, "num_of_nodes", 1) > 1:
                raise group_books.ExchangeError("the buffer of HybridEP spans several NVLink domains (RDMA)")
            # Its destructor waits for all members, and one may be gone. The next dispatch makes another one.
            group_books.never_destroy(buffer)
            setattr(fused_a2a, name, None)

    def make_again(self) -> None:
        """Make the user buffers once more, over the fresh groups; all ranks do it."""
        if self._initialize is not None:
            groups = iter(self._groups)
            with _replaced(dist, dict.fromkeys(_MAKERS, lambda *args, **kwargs: next(groups))):
                self._initialize()

    @contextlib.contextmanager
    def _noting_groups(self) -> Iterator[None]:
        def noting(make: Callable[..., Any]) -> Callable[..., Any]:
            def make_and_note(*args: Any, **kwargs: Any) -> Any:
                self._groups.append(make(*args, **kwargs))
                return self._groups[-1]

            return make_and_note

        with _replaced(dist, {name: noting(getattr(dist, name)) for name in _MAKERS}):
            yield


class _Nothing:
    """Stands in for an object with other ranks' memory, in a process that has not met other ranks."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        pass

    def __getattr__(self, name: str) -> Callable[..., bool]:
        return lambda *args, **kwargs: False


class _WithoutMappings:
    """Transformer Engine's library but for what maps the memory of other ranks."""

    def __init__(self, library: Any) -> None:
        self._library = library

    def __getattr__(self, name: str) -> Any:
        return _Nothing if name in _MAPPINGS else getattr(self._library, name)


def _without_mappings(module: Any) -> contextlib.AbstractContextManager[None]:
    return _replaced(module, {"tex": _WithoutMappings(module.tex)})


@contextlib.contextmanager
def _replaced(module: ModuleType, values: Mapping[str, Any]) -> Iterator[None]:
    """Give names of a module other values meanwhile."""
    replaced = {name: getattr(module, name) for name in values}
    vars(module).update(values)
    try:
        yield
    finally:
        vars(module).update(replaced)
