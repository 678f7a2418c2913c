"""torch's own exchange of the connections below a process group (torch 2.14 and later, gloo).

A backend made with `enable_reconfigure` keeps its object: `reconfigure` closes and reopens the connections to
the members, so an exchange leaves no thread, descriptor or memory behind. torch calls the interface
experimental. `group_books` exchanges the backends of all other groups.

Invariant: all ranks of a job decide alike, by the version of torch and by the arguments of the group.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
from collections.abc import Callable, Iterator, Mapping
from inspect import signature
from typing import Any

import torch
from torch.distributed import PrefixStore, ProcessGroup, ProcessGroupGloo, Store

from adaptor.online import group_books


class _RedirectedStore(Store):
    """A store that passes each call on: to the framework's store, or during an exchange to the meeting's
    store.

    The framework's store may wait for a lost rank; the store of a meeting can be abandoned.
    """

    def __init__(self, store: Any) -> None:
        super().__init__()
        self._framework_store = store
        self._target = store

    @contextlib.contextmanager
    def redirected(self, store: Any) -> Iterator[None]:
        """Use `store` in the place of the framework's."""
        self._target = store
        try:
            yield
        finally:
            self._target = self._framework_store

    def set(self, key: str, value: Any) -> None:
        self._target.set(key, value)

    def get(self, key: str) -> bytes:
        return bytes(self._target.get(key))

    def wait(self, keys: list[str], timeout: Any = None) -> None:
        self._target.wait(keys, *(() if timeout is None else (timeout,)))

    def check(self, keys: list[str]) -> bool:
        return bool(self._target.check(keys))

    def compare_set(self, key: str, expected: Any, desired: Any) -> bytes:
        # The first rank of a group claims the number of a connection: each claim has a key of its own.
        self._target.set(key, desired)
        return desired.encode() if isinstance(desired, str) else bytes(desired)


class Reconnection:
    """A process group whose connections torch makes anew.

    Args:
        request: the arguments with which torch makes the group.
    """

    def __init__(self, request: Mapping[str, Any]) -> None:
        self._request = request
        self.store = _RedirectedStore(request["store"])
        size = request["group_size"]
        self.ranks: list[int] = list(request["global_ranks_in_group"]) or list(range(size))  # in the job
        self.rank = self.ranks[request["group_rank"]]

    def connect(self, group: Any) -> None:
        """Connect a new group; all members call the function."""
        store = PrefixStore(f"ttp/{self._request['group_name']}", self._request["store"])
        # From 1, and more where an earlier group of this name was destroyed. Numbers of exchanges are hashes.
        number = (store.add("members", 1) - 1) // len(self.ranks) + 1
        store.set(f"{number}/{self.rank}", self.handle(group))
        self._reconnect(group, number, [store.get(f"{number}/{rank}").decode() for rank in self.ranks])

    def reconnect(self, group: Any, occasion: str, store: Any, handles: list[str]) -> None:
        """Close the connections of a group and connect the members again; all members call the function.

        Args:
            store: where the members meet.
            handles: of the members, in the order of their ranks.
        """
        number = int.from_bytes(hashlib.sha256(occasion.encode()).digest()[:7], "big")
        with self.store.redirected(store):
            self._reconnect(group, number, handles)

    def _reconnect(self, group: Any, number: int, handles: list[str]) -> None:
        options = torch.distributed.distributed_c10d.ReconfigureOptions()  # type: ignore[attr-defined]
        options.uuid, options.handles, options.timeout = number, handles, self._request["timeout"]
        _backend(group).reconfigure(options).wait()

    def handle(self, group: Any) -> str:
        """Return the handle by which other members find this rank."""
        return str(_backend(group).get_reconfigure_handle())

    def replace_lone_backend(self, group: Any) -> None:
        """Give a newcomer's group a gloo backend in the place of the backend that is alone."""
        if isinstance(_backend(group), ProcessGroupGloo):
            return
        request, devices = self._request, group._device_types
        first_device = "cpu" if torch.device("cpu") in devices else devices[0].type
        # torch's own prefixes: the members find each other below equal names.
        store = PrefixStore(f"{first_device}/", PrefixStore(f"{request['group_name']}/", self.store))
        place = (store, request["group_rank"], request["group_size"])
        make: Any = ProcessGroupGloo
        backend = make(*place, timeout=request["timeout"], enable_reconfigure=True)
        for device in devices:
            group._register_backend(device, ProcessGroup.BackendType.GLOO, backend)
        group._set_default_backend(ProcessGroup.BackendType.GLOO)


def of_group(helper: Callable[..., Any], request: Mapping[str, Any]) -> Reconnection | None:
    """Return the object that reconnects a group; None if torch cannot, or if this rank is not in the group.

    Args:
        helper: torch's `_new_process_group_helper`.
        request: the arguments of `helper` for the group.
    """
    if request["group_size"] == 1 or request["group_rank"] is None:
        return None
    # A helper that replaces torch's may have the argument of a later torch.
    if not hasattr(ProcessGroupGloo, "get_reconfigure_handle"):
        return None
    if "enable_reconfigure" not in signature(helper).parameters:
        return None
    # The wrapper of TORCH_DISTRIBUTED_DEBUG=DETAIL does not pass the calls on.
    if torch.distributed.get_debug_level() == torch.distributed.DebugLevel.DETAIL:
        return None
    backends = group_books.backends_by_device(request["backend"]).get_device_backend_map()
    is_gloo = set(backends.values()) == {"gloo"}
    return Reconnection(request) if is_gloo else None


def exchange(groups: Mapping[str, tuple[Any, Reconnection]], occasion: str, store: Any) -> None:
    """Connect the members of `groups` anew; each group contains this rank.

    Args:
        groups: each group with its description, by name, in the same order on all ranks.
        store: where the members meet; the keys must be new.
    """
    handles = {}
    for name, (group, description) in groups.items():
        description.replace_lone_backend(group)
        handles[name] = description.handle(group)
    rank = next(iter(groups.values()))[1].rank
    # One key for all groups of a rank, however many groups it has.
    store.set(f"handles/{rank}", json.dumps(handles).encode())
    members = sorted({member for _, description in groups.values() for member in description.ranks})
    handles_by_rank = {member: json.loads(store.get(f"handles/{member}")) for member in members}
    for name, (group, description) in groups.items():
        member_handles = [handles_by_rank[member][name] for member in description.ranks]
        description.reconnect(group, occasion, PrefixStore(name, store), member_handles)


def _backend(group: Any) -> Any:
    return group._get_backend(group._device_types[0])
