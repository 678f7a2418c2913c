"""A job in miniature around a real controller: workers, agents and a disk that a seed drives.

Every worker and every agent has a queue of its own towards the controller and one from it; which queue moves
next is drawn, so messages overtake each other as they may in a real job: only those of one sender keep their
order. What must never happen is asserted where it would happen.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from random import Random

from adaptor.checkpoint.manifest import FileEntry
from adaptor.control.controller import Controller
from adaptor.control.messages import (
    Addressed,
    AgentHello,
    AgentLost,
    BoardRecord,
    ControllerToAgent,
    Died,
    Dump,
    Exit,
    Freeze,
    FromAgent,
    Frozen,
    GroupOrder,
    Hello,
    Layout,
    Phase,
    Prepare,
    Prepared,
    Progress,
    Publish,
    Published,
    PublishFailed,
    Raised,
    Share,
    ToWorker,
    Verdict,
    WriteFailed,
    Written,
)

TIMEOUT_S = 120.0


@dataclass
class Worker:
    """What really is in a process; `ready` when it stands at the door to the step after `finished`."""

    rank: int
    node: int
    shares: tuple[Share, ...]
    finished: int
    ready: bool
    broken: bool = False
    alive: bool = True
    orders: deque[ToWorker] = field(default_factory=deque)
    says: deque[FromAgent] = field(default_factory=deque)

    def gives(self) -> set[int]:
        if self.broken:
            return set()
        return {self.finished, self.finished + 1} if self.ready else {self.finished}

    def board(self) -> BoardRecord:
        phase = Phase.BROKEN if self.broken else Phase.READY if self.ready else Phase.RUNNING
        return BoardRecord(self.rank, 1, phase, self.finished, self.finished, self.finished + 1)


@dataclass
class Agent:
    node: int
    alive: bool = True
    orders: deque[Prepare | Publish | Verdict] = field(default_factory=deque)
    says: deque[FromAgent] = field(default_factory=deque)


@dataclass
class Disk:
    """Temporary folders by step, with the group of each file in them; what the tracker names."""

    folders: dict[int, dict[str, str]] = field(default_factory=dict)
    published: list[int] = field(default_factory=list)


class Simulation:
    """One job and one incident; `trouble` is how often a write, a prepare or a publish fails.

    `log` tells a person what happened, in order.
    """

    def __init__(self, seed: str, trouble: float) -> None:
        self.random = Random(seed)
        self.trouble = trouble
        self.log: list[str] = []
        self.now = 0.0
        self._make_job()
        self.controller = Controller(len(self.workers), TIMEOUT_S, ("store", 1))
        self.disk = Disk()
        self.known_dead: set[int] = set()
        self.known_lost: set[int] = set()
        self.known_boards: dict[int, BoardRecord] = {}
        self.verdicts: dict[int, list[Verdict]] = {node: [] for node in self.agents}
        self.reported: dict[str, int] = {}  # groups, and the step at which the controller heard of them
        self.gathered: dict[tuple[int, str], set[int]] = {}
        for agent in self.agents.values():
            self.hear(
                AgentHello(agent.node, tuple(r for r, w in self.workers.items() if w.node == agent.node))
            )
        for worker in self.workers.values():
            self.hear(Hello(worker.rank, 1))
            self.hear(Layout(worker.rank, worker.shares, "/save", self.origin, "same"))

    def _make_job(self) -> None:
        """Every shard has one to three holders; where anyone has finished a step, all were ready for it."""
        draw = self.random
        count = draw.randint(1, 8)
        self.agents = {node: Agent(node) for node in range(draw.randint(1, min(3, count)))}
        self.groups = {f"g{n}": draw.randint(1, 3) for n in range(draw.randint(1, 2))}
        held: dict[int, list[Share]] = {rank: [] for rank in range(count)}
        for group, size in self.groups.items():
            for index in range(size):
                for rank in draw.sample(range(count), min(count, draw.choice([1, 2, 2, 2, 3]))):
                    held[rank].append(Share(group, index, size))
        self.origin = draw.choice([0, 7])
        before = self.origin + draw.randint(0, 2)
        barrier_passed = draw.random() < 0.5
        self.workers: dict[int, Worker] = {}
        for rank in range(count):
            ahead = draw.random() < 0.5
            if barrier_passed:
                worker = Worker(rank, rank % len(self.agents), tuple(held[rank]), before + ahead, not ahead)
            else:
                worker = Worker(rank, rank % len(self.agents), tuple(held[rank]), before, ahead)
            self.workers[rank] = worker

    # what the controller hears, and what it orders

    def hear(self, message: FromAgent) -> None:
        self.log.append(f"{self.now:.0f} heard {message}")
        match message:
            case Died(rank=rank):
                self.known_dead.add(rank)
            case AgentLost(node=node):
                self.known_lost.add(node)
                self.known_dead |= {rank for rank, worker in self.workers.items() if worker.node == node}
            case Frozen(rank=rank, board=board):
                self.known_boards.setdefault(rank, board)
            case Written(group=group, attempt=attempt):
                incident = self.controller.incident
                if incident is not None and incident.attempt == attempt:
                    self.reported[group] = incident.step
        self.obey(self.controller.handle(message, self.now))

    def tick(self, seconds: float) -> None:
        self.now += seconds
        self.obey(self.controller.tick(self.now))

    def obey(self, orders: list[tuple[int, ControllerToAgent]]) -> None:
        for node, order in orders:
            self.log.append(f"{self.now:.0f}     orders node {node}: {order}")
            assert node not in self.known_lost, "an order to a node that is known to be lost"
            if isinstance(order, Addressed):
                assert order.rank not in self.known_dead, "an order to a rank that is known to be dead"
                assert self.workers[order.rank].node == node, "an order to another node than the rank's"
                if not isinstance(order.message, Exit):
                    assert not any(self.verdicts.values()), "an order after the verdict"
                if isinstance(order.message, Dump):
                    self._check_dump(order.rank, order.message)
                self.workers[order.rank].orders.append(order.message)
                continue
            if isinstance(order, Verdict):
                self.verdicts[node].append(order)
                assert len(self.verdicts[node]) == 1, "two verdicts"
            else:
                assert not any(self.verdicts.values()), "an order after the verdict"
            if isinstance(order, Publish):
                assert {g for g, step in self.reported.items() if step == order.step} == set(self.groups), (
                    "a publish without every group written"
                )
            self.agents[node].orders.append(order)

    def _check_dump(self, rank: int, order: Dump) -> None:
        for part in order.groups:
            assert rank in part.holders
            assert part.writer in part.holders
            assert len(part.holders) == self.groups[part.group]
            for index, holder in enumerate(part.holders):
                assert Share(part.group, index, len(part.holders)) in self.workers[holder].shares
                assert holder not in self.known_dead, "a dead rank is asked for a shard"
                assert self.known_boards[holder].provides(order.step), "a rank is asked for a step it has not"

    # what workers and agents do

    def work(self, worker: Worker) -> None:
        match worker.orders.popleft():
            case Freeze(incident=incident):
                worker.says.append(Frozen(worker.rank, incident, worker.board()))
            case Dump() as order:
                assert order.step in worker.gives(), "a rank is brought to a step that it cannot reach"
                if order.step > worker.finished:
                    worker.finished, worker.ready = order.step, False
                for part in order.groups:
                    self._give(worker, order, part)
            case Exit():
                self._end(worker, 0)

    def _give(self, worker: Worker, order: Dump, part: GroupOrder) -> None:
        if self.random.random() < self.trouble:
            self._fail(worker, order, part.group)
            return
        given = self.gathered.setdefault((order.attempt, part.group), set())
        given.add(worker.rank)
        writer = self.workers[part.writer]
        if not writer.alive or any(not self.workers[holder].alive for holder in part.holders):
            self._fail(worker, order, part.group)
        elif given == set(part.holders):
            entry = FileEntry(f"{part.group}.pt", 1, "00", order.attempt)
            self.disk.folders[order.step][entry.draft] = part.group
            writer.says.append(Written(part.writer, order.incident, order.attempt, part.group, (entry,)))

    def _fail(self, worker: Worker, order: Dump, group: str) -> None:
        worker.says.append(WriteFailed(worker.rank, order.incident, order.attempt, group, "it failed"))

    def act(self, agent: Agent) -> None:
        order = agent.orders.popleft()
        match order:
            case Prepare(incident=incident, step=step):
                self.disk.folders[step] = {}
                failed = self.random.random() < self.trouble
                agent.says.append(Prepared(incident, "" if failed else "/save/tmp", "full" if failed else ""))
            case Publish(incident=incident, step=step, files=files):
                there = self.disk.folders[step]
                assert {there[entry.draft] for entry in files} == set(self.groups), "a group is not on disk"
                if self.random.random() < self.trouble:
                    agent.says.append(PublishFailed(incident, "full"))
                    return
                assert step >= max(self.disk.published, default=self.origin), "the tracker goes backwards"
                self.disk.published.append(step)
                agent.says.append(Published(incident, step, "/save"))

    # faults

    def kill(self, worker: Worker) -> None:
        self.log.append(f"{self.now:.0f} -- rank {worker.rank} is killed")
        self._end(worker, -9)

    def _end(self, worker: Worker, status: int) -> None:
        worker.alive = False
        worker.orders.clear()
        self.agents[worker.node].says.append(Died(worker.rank, status, self.now, worker.board()))

    def raise_in(self, worker: Worker) -> None:
        """An exception leaves the script, sometimes out of the middle of the update."""
        self.log.append(f"{self.now:.0f} -- rank {worker.rank} raises")
        worker.broken = worker.ready and self.random.random() < 0.3
        worker.says.append(Raised(worker.rank, "ValueError", 1))

    def lose(self, agent: Agent) -> None:
        """A node is gone, and what it had still to say."""
        self.log.append(f"{self.now:.0f} -- node {agent.node} is lost")
        agent.alive = False
        agent.orders.clear()
        agent.says = deque([AgentLost(agent.node)])
        for worker in self.workers.values():
            if worker.node == agent.node:
                worker.alive = False
                worker.orders.clear()
                worker.says.clear()

    def fault(self, *, may_raise: bool) -> None:
        """Main threads raise before the incident; later they are held at the door or in a collective."""
        alive = [worker for worker in self.workers.values() if worker.alive]
        nodes = [agent for agent in self.agents.values() if agent.alive and agent.node]
        kind = self.random.random()
        if kind < 0.2 and nodes:
            self.lose(self.random.choice(nodes))
        elif alive and (kind < 0.7 or not may_raise):
            self.kill(self.random.choice(alive))
        elif alive:
            self.raise_in(self.random.choice(alive))

    # the run

    def best_step(self) -> int | None:
        """The newest step that the living have all shards of, by trying; None when a shard has no holder."""
        alive = [worker for worker in self.workers.values() if worker.alive]
        shards = [Share(group, index, size) for group, size in self.groups.items() for index in range(size)]
        steps = {step for worker in alive for step in worker.gives()}
        return max(
            (
                step
                for step in steps
                if all(any(shard in w.shares and step in w.gives() for w in alive) for shard in shards)
            ),
            default=None,
        )

    def step(self) -> bool:
        """Let something happen; False when nothing is left that could."""
        moves = [(self.work, worker) for worker in self.workers.values() if worker.orders]
        moves += [(self.act, agent) for agent in self.agents.values() if agent.orders]
        moves += [(self._deliver, who) for who in (*self.workers.values(), *self.agents.values()) if who.says]
        if not moves:
            return False
        move, who = self.random.choice(moves)
        move(who)
        return True

    def _deliver(self, who: Worker | Agent) -> None:
        self.hear(who.says.popleft())

    def run(self, further_faults: int, in_time: bool) -> Verdict:
        """From the first fault, which has happened, to the verdict; `in_time`: no deadline is missed."""
        while self.step():
            if further_faults and self.random.random() < 0.05:
                further_faults -= 1
                self.fault(may_raise=False)
            if self.random.random() < 0.1:
                self.hear(Progress(0, 1))
            if self.random.random() < 0.1:
                self.tick(0.25 if in_time else self.random.choice([0.25, 20.0, 70.0]))
        for _ in range(4):  # half of the time to freeze, and the whole of it
            self.tick(TIMEOUT_S / 2)
            while self.step():
                pass
        assert self.controller.verdict is not None, "an incident that never ends"
        for node, verdicts in self.verdicts.items():
            assert node in self.known_lost or verdicts == [self.controller.verdict], (
                "an agent without a verdict"
            )
        return self.controller.verdict
