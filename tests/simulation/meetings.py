"""Collectives and dumps: how ranks complete or break them."""

from __future__ import annotations

from collections import ChainMap, defaultdict
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from adaptor.protocol.messages import Dump, GroupOrder
from adaptor.protocol.naming import FileEntry
from tests.simulation.clock import Body

if TYPE_CHECKING:
    from tests.simulation.worker import Worker
    from tests.simulation.world import World

Tensors = dict[tuple[str, int], int]  # the step of each shard


class Meetings:
    """The collectives of all ranks. A rank completes a collective when all required ranks have arrived.

    As with gloo, the peers of a dead rank learn of its death soon or never.
    """

    def __init__(self, world: World, workers: Mapping[int, Worker] | None = None) -> None:
        self._world = world
        self._left_behind = workers
        self._arrived: defaultdict[Any, set[int]] = defaultdict(set)
        self._waiting: defaultdict[Any, set[int]] = defaultdict(set)
        self._gone: set[int] = set()  # ranks whose ends of all connections are closed
        self.handed_over: dict[Any, Any] = {}  # state for newcomers, by the name of the meeting

    @property
    def _workers(self) -> Mapping[int, Worker]:
        return self._left_behind or self._world.workers

    def leave_behind(self, strays: Mapping[int, Worker]) -> None:
        """Separate workers whose ranks others have now; they may live on, and meet only among themselves."""
        own_meetings = Meetings(self._world, ChainMap(dict(strays), self._world.workers))
        own_meetings._arrived.update({name: set(ranks) for name, ranks in self._arrived.items()})
        own_meetings._gone.update(self._gone)
        for name, ranks in self._waiting.items():
            own_meetings._waiting[name] = ranks & strays.keys()
            ranks.difference_update(strays)
        for worker in strays.values():
            worker.meetings = own_meetings

    def arrive(self, worker: Worker, name: Any, *, needs_others: bool = True) -> None:
        """Let a worker arrive; `needs_others`: the worker waits for the others, else only they may wait for
        the worker.
        """
        arrived, workers = self._arrived[name], self._workers
        arrived.add(worker.rank)
        if needs_others:
            self._waiting[name].add(worker.rank)
        for rank in sorted(self._waiting[name]):
            peer = workers[rank]
            required = peer.waits_for[name]
            if required <= arrived and not any(self._world.apart(peer, workers[r]) for r in required):
                peer.later(self._last_part(), peer.met, name, True)
        if needs_others and any(self._breaks(workers[r], name) for r in self._gone & worker.waits_for[name]):
            self._may_break(worker, name)

    def comes_new(self, rank: int) -> None:
        """Note that a new process is `rank` now."""
        self._gone.discard(rank)

    def _last_part(self) -> float:
        """Return the delay of the last message: some ranks complete while others still wait."""
        draw = self._world.random
        return draw.uniform(0.0, 0.05) if draw.random() < 0.25 else self._world.local_delay()

    def left(self, worker: Worker, name: Any) -> None:
        self._waiting[name].discard(worker.rank)

    def died(self, worker: Worker, *, noticed: bool) -> None:
        """Note a death; `noticed`: its kernel closes its connections, unlike a node without power."""
        for ranks in self._waiting.values():
            ranks.discard(worker.rank)
        if noticed:
            self._gone.add(worker.rank)
            self._break_for(worker)

    def shut(self, worker: Worker) -> None:
        """Shut down the connections of a worker."""
        for name, ranks in list(self._waiting.items()):
            if worker.rank in ranks and not is_apart(name):
                worker.later(0.0, worker.met, name, False)
        self._break_for(worker, collectives=True)

    def fail(self, worker: Worker, name: Any) -> None:
        """Let `worker` drop out of a meeting."""
        for rank in sorted(self._waiting[name]):
            self._may_break(self._workers[rank], name)

    def _break_for(self, worker: Worker, *, collectives: bool = False) -> None:
        for name, ranks in list(self._waiting.items()):
            for rank in sorted(ranks):
                peer = self._workers[rank]
                breaks = worker.rank in peer.waits_for[name] and self._breaks(worker, name)
                if breaks and not (collectives and is_apart(name)):
                    self._may_break(peer, name)

    def _breaks(self, worker: Worker, name: Any) -> bool:
        """Return whether the end of `worker` can break a meeting.

        A worker that has completed a meeting has sent its part, and the kernel delivers the part. For a
        worker that has never come to a new group the others wait.
        """
        joins = name[-1] == "connect" or name[1] in ("groups", "line")
        if is_apart(name) and joins and worker.rank not in self._arrived[name]:
            return False
        return not worker.has_done(name)

    def _may_break(self, worker: Worker, name: Any) -> None:
        draw = self._world.random
        if draw.random() < (0.9 if is_apart(name) else 0.6):
            worker.later(draw.uniform(0.0, 0.01), worker.met, name, False)
        else:
            worker.hangs_in(name)


def is_apart(name: Any) -> bool:
    """Return whether a meeting uses connections of its own: in a dump or an online recovery."""
    return name[0] == "dump"


class Dumping:
    """The dumps of an incident: ranks send shards to the writer of a group, which writes them."""

    def __init__(self, world: World) -> None:
        self._world = world
        self._gathered: dict[tuple[int, int, str], dict[int, int]] = {}

    def take_part(
        self, worker: Worker, order: Dump, group: GroupOrder, tensors: Tensors, record: tuple[int, int]
    ) -> Body[tuple[FileEntry, ...]]:
        """Take part in a dump with the tensors of the step, live or from the local copy."""
        dump = ("dump", order.incident, order.attempt, group.group)
        names = [(*dump, stage) for stage in ("connect", "shards", "thanks")]
        try:
            return (yield from self._take_part(worker, order, group, tensors, record, *names))
        except Exception:
            for name in names:
                worker.meetings.fail(worker, name)
            raise

    def _take_part(
        self,
        worker: Worker,
        order: Dump,
        group: GroupOrder,
        tensors: Tensors,
        record: tuple[int, int],
        connect: Any,
        shards: Any,
        thanks: Any,
    ) -> Body[tuple[FileEntry, ...]]:
        world, everyone = self._world, frozenset(group.ranks)
        yield from worker.through(lambda: worker.meet(connect, everyone))
        yield world.random.uniform(0.0, 0.05)
        self._check(worker, order)
        if order.in_place:  # a holder writes its shards itself, block by block
            worker.session.board.advance(1)
            yield from world.disk.wait(worker.machine, world.disk.slow_s)
            self._check(worker, order)
        gathered = self._gathered.setdefault((order.incident, order.attempt, group.group), {})
        for index, holder in enumerate(group.holders):
            if holder == worker.rank:
                gathered[index] = tensors[group.group, index]
        worker.session.board.advance(1)
        if group.writer != worker.rank:
            worker.meetings.arrive(worker, shards, needs_others=False)
            yield from worker.through(lambda: worker.meet(thanks, frozenset({group.writer, worker.rank})))
            return ()
        yield from worker.through(lambda: worker.meet(shards, everyone))
        worker.meetings.arrive(worker, thanks, needs_others=False)
        return (yield from self._write(worker, order, group, record, gathered))

    def _check(self, worker: Worker, order: Dump) -> None:
        if worker.cancelled(order):
            raise RuntimeError("a newer attempt has replaced this one")

    def _write(
        self,
        worker: Worker,
        order: Dump,
        group: GroupOrder,
        record: tuple[int, int],
        gathered: dict[int, int],
    ) -> Body[tuple[FileEntry, ...]]:
        disk, draw = self._world.disk, self._world.random
        entry = FileEntry(f"{group.group}/model.pt", 1, "00", order.attempt)
        yield from disk.wait(worker.machine)
        self._check(worker, order)
        disk.write(order.folder.rpartition("/")[2], entry.draft, (group.group, dict(gathered), record))
        for _ in range(disk.slices):
            yield from disk.wait(worker.machine, disk.slow_s)
            self._check(worker, order)
            worker.session.board.advance(1)
        if draw.random() < disk.trouble or worker.machine in disk.full_for:
            raise OSError("no space left on device")
        return (entry,)
