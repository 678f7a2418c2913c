"""The process groups of a worker: their backends are exchanged, and the framework keeps the groups.

A framework holds its process groups in hundreds of places, so after a fault the objects stay, and only their
connections are replaced. torch replaces the connections itself where possible (`reconfiguration.py`).
Otherwise torch's helper makes a fresh backend, with the framework's arguments for the group
(`group_books.py`). A collective costs nothing more.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import inspect
import resource
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from adaptor.context import Context
from adaptor.online import group_books
from adaptor.online.group_books import ExchangeError
from adaptor.worker import abort_collectives

if TYPE_CHECKING:
    from adaptor.online.reconfiguration import Reconnection

# A backend that was exchanged stays in its group (gloo: 3 threads and 4 descriptors), so not for ever.
MOST_EXCHANGES = 10
# Twice what gloo opens for each. What is left afterwards is for last words, should the exchange fail.
DESCRIPTORS_OF_A_GROUP = 8
LEFT_DESCRIPTORS = 128
# A backend of torch whose collectives return at once, without another rank.
LONE_BACKEND = "fake"


class _Group(NamedTuple):
    """A group, torch's arguments for it, and the way torch reconnects it; None: torch cannot."""

    group: Any
    arguments: dict[str, Any]
    reconnection: Reconnection | None


class Groups:
    """All process groups of this worker since `remember`, in order of creation.

    Attributes:
        lone: groups are made without other ranks until the first `exchange`
        remembers: `remember` was called, and `forget` was not
    """

    def __init__(self, _context: Context) -> None:
        self.lone = False
        self.remembers = False
        self._made: dict[str, _Group] = {}
        self._helper: Callable[..., Any] | None = None
        self._exchanges = 0
        self._numbers: dict[str, int] = {}  # of each group, that of its next backend
        self._sockets: frozenset[int] = frozenset()
        self._before: frozenset[int] | None = None  # while groups are made: what there was

    def remember(self, lone: bool) -> None:
        """From now on remember the arguments of each group of this process.

        Args:
            lone: make the groups without other ranks until the first `exchange`. Their collectives return at
                once: a gather returns this rank's own contribution, once for each rank.
        """
        self.remembers, self.lone = True, lone

    def forget(self) -> None:
        """Remember no group any more: no backend will be exchanged."""
        self.remembers = False
        self._made.clear()

    def make(self, helper: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Make a group as `helper` (torch's `_new_process_group_helper`) does, and remember how."""
        if not self.remembers:
            return helper(*args, **kwargs)
        from torch.distributed import PrefixStore

        from adaptor.online import reconfiguration

        call = _signature(helper).bind(*args, **kwargs)
        request = dict(call.arguments)
        self._helper = helper
        reconnection = reconfiguration.of_group(helper, request)
        if reconnection is not None and not self.lone:
            call.arguments.update(enable_reconfigure=True, store=reconnection.store)
        if self.lone and _is_alone_in_gloo(request):
            from torch.distributed import HashStore

            call.arguments["store"] = HashStore()  # it meets nobody there, now or later
        elif self.lone:
            import torch.testing._internal.distributed.fake_pg  # noqa: F401  (it registers the backend)

            call.arguments["backend"] = _lone_backends(request["backend"])
            for name in ("backend_options", "pg_options"):
                call.arguments.pop(name, None)
        # Without other ranks there are no connections; to look for them takes as long as to make the group.
        with contextlib.nullcontext() if self.lone else self._connecting():
            created = helper(*call.args, **call.kwargs)
            group = created[0]
            # By the object: a job that has destroyed its groups gives their names to others.
            is_new = _is_member(group) and all(group is not known.group for known in self._made.values())
            if is_new and reconnection is not None and not self.lone:
                reconnection.connect(group)
        if is_new:
            self._made[request["group_name"]] = _Group(group, request, reconnection)
            if reconnection is not None:  # whoever makes groups later uses the framework's store
                world = group_books.books()
                store = PrefixStore(f"{request['group_name']}/", request["store"])
                world.pg_map[group] = (world.pg_map[group][0], store)
                created = (group, store)
            if self.lone:  # who asks for the backend is told the one that it will be
                world = group_books.books()
                world.pg_map[group] = (request["backend"], world.pg_map[group][1])
                world.pg_backend_config[group] = str(group_books.backends_by_device(request["backend"]))
        return created

    @property
    def known(self) -> int:
        """Return how many groups with this rank are remembered."""
        return len(self._made)

    @property
    def most_exchanges(self) -> int:
        """Return how often `exchange` can be called in this process; 0: any number of times."""
        return (
            MOST_EXCHANGES
            if any(created.reconnection is None for created in self._to_exchange().values())
            else 0
        )

    def _to_exchange(self) -> dict[str, _Group]:
        if not self._made:  # a script without process groups may not have torch
            return {}
        existing = group_books.books().pg_map  # without groups that the framework has destroyed
        return {
            name: created
            for name, created in self._made.items()
            if created.group in existing and not _is_sound(created.group)
        }

    @property
    def backends(self) -> frozenset[str]:
        """Return the names of all backends that the framework has asked for."""
        backend_names: set[str] = set()
        for created in self._made.values():
            backend_names.update(
                group_books.backends_by_device(created.arguments["backend"]).get_device_backend_map().values()
            )
        return frozenset(backend_names)

    @property
    def are_gloo(self) -> bool:
        """Return whether the framework has asked for gloo alone, on each device."""
        return self.backends <= {"gloo"}

    @property
    def is_bound(self) -> bool:
        """Return whether a group is bound to a device: NCCL makes its communicator by a split of another."""
        return any(
            getattr(created.group, "bound_device_id", None) is not None for created in self._made.values()
        )

    @property
    def timeout_s(self) -> float:
        """Return the longest time-out that the framework has given a group, in seconds."""
        from torch.distributed import constants

        timeouts = (
            created.arguments.get("timeout") or constants.default_pg_timeout
            for created in self._made.values()
        )
        return max(timeout.total_seconds() for timeout in timeouts)

    def count(self) -> int:
        """Return the number of groups made in this job, including groups without this rank."""
        return int(group_books.books().group_count)

    def exchange(self, store: Any, occasion: str) -> None:
        """Give the groups fresh backends: all members call `exchange`, in the order of the groups' creation.

        A gloo group of the rank alone keeps its backend, without any connection for a fault to break.

        NCCL and HCCL make the communicator of a group at the group's first collective, and another
        communicator for each pair of ranks with sends outside of a batch: so `store` must live until the next
        exchange.

        Args:
            store: where the members meet; the keys must be new.
            occasion: a name for this exchange, the same on all ranks, and unique.

        Raises:
            ExchangeError: too many exchanges in this process, or too few file descriptors.
            Exception: whatever torch raises where a member does not come.
        """
        from torch.distributed import PrefixStore

        from adaptor.online import reconfiguration

        exchanged = self._to_exchange()
        reconnecting = {
            name: (created.group, created.reconnection)
            for name, created in exchanged.items()
            if created.reconnection is not None
        }
        adopting = {name: created for name, created in exchanged.items() if name not in reconnecting}
        if adopting:
            if self._exchanges >= MOST_EXCHANGES:
                raise ExchangeError(
                    f"the process groups were exchanged {MOST_EXCHANGES} times in this process"
                )
            _require_descriptors(len(adopting))
        self._exchanges += 1
        self.lone = False
        group_books.leave_batches()
        if not adopting:
            self._sockets = frozenset()  # all connections of groups are closed in this exchange
        with self._connecting():
            if reconnecting:
                reconfiguration.exchange(reconnecting, occasion, PrefixStore("reconfigured", store))
            for name, created in adopting.items():
                self._exchange_one(f"{name}@{occasion}", created, store)

    def sockets(self) -> frozenset[int]:
        """Return the inodes of the groups' connections; from any thread."""
        sockets_before = self._before
        return (
            self._sockets
            if sockets_before is None
            else self._sockets | (abort_collectives.sockets() - sockets_before)
        )

    @contextlib.contextmanager
    def _connecting(self) -> Iterator[None]:
        """Count connections made in the block as connections of a group."""
        self._before = abort_collectives.sockets()
        try:
            yield
        finally:
            self._sockets, self._before = self.sockets(), None

    def _exchange_one(self, name: str, created: _Group, store: Any) -> None:
        from torch.distributed import PrefixStore

        assert self._helper is not None
        group_books.abort_communicators(created.group)
        ranks = created.arguments["global_ranks_in_group"]
        arguments = {
            **created.arguments,
            # The prefix is a hash of the ranks: a process with another list of ranks finds no peer.
            "store": PrefixStore(hashlib.sha256(repr(list(ranks)).encode()).hexdigest()[:16], store),
            "group_name": name,
            "pg_tag": None,
        }
        fresh, _ = self._helper(**arguments)
        for device in created.group._device_types:
            group_books.never_destroy(created.group._get_backend(device))
        key = created.arguments["group_name"]
        self._numbers[key] = group_books.adopt(
            created.group, fresh, self._numbers.get(key, group_books.FIRST_NUMBER)
        )
        group_books.forget(created.group, fresh)


# A framework makes dozens of groups.
_signature = functools.cache(inspect.signature)


def _require_descriptors(groups: int) -> None:
    """Raise ExchangeError if fresh backends could use up the file descriptors of this process.

    A failed exchange ends in last words, which need descriptors.
    """
    limit, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    open_descriptors = sum(1 for _ in Path("/proc/self/fd").iterdir())
    needed_descriptors = DESCRIPTORS_OF_A_GROUP * groups + LEFT_DESCRIPTORS
    if open_descriptors + needed_descriptors > limit:
        raise ExchangeError(
            f"{open_descriptors} descriptors are open, and {needed_descriptors} more may be needed for "
            f"{groups} process groups: "
            f"the limit (ulimit -n) is {limit}, {open_descriptors + needed_descriptors} would do"
        )


def _lone_backends(backend_request: Any) -> str:
    """Return LONE_BACKEND for exactly the kinds of device of `backend_request`.

    With an additional kind, torch would make barriers and gather objects on that kind: in an NCCL group on
    the host, for example, where the other ranks do not come, also after the exchange.
    """
    devices = group_books.backends_by_device(backend_request).get_device_backend_map()
    return ",".join(f"{device}:{LONE_BACKEND}" for device in devices)


def _is_alone_in_gloo(request: dict[str, Any]) -> bool:
    """Return whether the requested group has this rank alone, and gloo on each device."""
    return request["group_size"] == 1 and str(request["backend"]) == "gloo"


def _is_sound(group: Any) -> bool:
    """Return whether no fault of another rank can break a group: the group contains no other rank, and
    nothing aborts gloo.
    """
    from torch.distributed import ProcessGroupGloo

    backends = [group._get_backend(device) for device in group._device_types]
    return group.size() == 1 and all(isinstance(backend, ProcessGroupGloo) for backend in backends)


def _is_member(group: Any) -> bool:
    from torch.distributed import GroupMember

    return group is not None and group is not GroupMember.NON_GROUP_MEMBER
