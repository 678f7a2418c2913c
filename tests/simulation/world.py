"""A job around real controllers, from its start to its end, driven by a seed: its generations, in turn."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from random import Random

from adaptor.worker import freezer, pace, update_window
from tests.simulation import jobs
from tests.simulation.agent import Agent
from tests.simulation.clock import Clock
from tests.simulation.controller_host import ControllerHost
from tests.simulation.disk import Disk
from tests.simulation.faults import Faults
from tests.simulation.invariants import Invariants
from tests.simulation.meetings import Dumping, Meetings
from tests.simulation.network import Network
from tests.simulation.step_invariants import StepInvariants
from tests.simulation.worker import Worker

# Nothing here takes longer: two time-outs, and what agents wait for at the end.
NEVER_S = 2000.0


# Generations of a job, and how often it is started again after an incident.
GENERATIONS = 3
RESTARTS = 0.4


def live(seed: int, *, log: list[str] | None = None) -> World:
    """All generations of the job of a seed; the last of them."""
    world = World(Random(seed), log, None)
    world.run()
    while world.starts_again():
        world = World(world.random, log, world)
        world.run()
    return world


class World:
    """One generation. `hubs` by their terms.

    log     tells a person what happened, in order; None where nobody will read it
    before  the generation before this one: time, the disk and what the agents do to it go on
    """

    def __init__(self, random: Random, log: list[str] | None, before: World | None) -> None:
        self.random = draw = random
        self.log = log
        self.before = before
        if before is None:
            self.clock = Clock()
            self.number = 1
            self.job = jobs.draw(draw)
            self.disk = Disk(self.clock, draw)
        else:
            self.clock, self.disk = before.clock, before.disk
            self.number = before.number + 1
            tracker = self.disk.tracker
            self.job = jobs.again(before.job, before.job.origin if tracker is None else tracker, draw)
        self.generation = f"g{self.number}"
        self._begun_at = self.clock.now
        self.timeout_s = draw.choice([10.0, 30.0])
        self.hang_s = 3.0
        self.online_s = draw.choice([0.0, 2.0, 60.0, 60.0])
        self.step_s = draw.choice([0.02, 0.1, 0.3])
        self.update_s = draw.choice([0.001, 0.05])
        self._save_interval = draw.choice([0, 0, 0, 2])
        self._pause_before = draw.choice(self.job.steps) if draw.random() < 0.1 else -1
        self.hubs: dict[int, ControllerHost] = {}
        self.invariants = Invariants(self)
        self.step_invariants = StepInvariants(self)
        self.meetings = Meetings(self)
        self.dumping = Dumping(self)
        self.agents = {node: Agent(self, node) for node in sorted(set(self.job.nodes))}
        self.network = Network(self)
        self.workers = {rank: Worker(self, rank) for rank in self.job.ranks}
        self.faults = Faults(self)
        self.agents[0].have_the_controller()
        for agent in self.agents.values():
            agent.later(draw.uniform(0.0, 0.2) if agent.node else 0.0, agent.begin)
        self.tell(str(self.job))

    def tell(self, what: str) -> None:
        if self.log is not None:
            self.log.append(f"{self.clock.now:9.4f} {what}")

    # what the parts ask for

    def local_delay(self) -> float:
        draw = self.random.random()
        return 0.0001 + draw * (0.005 if draw > 0.95 else 0.001)

    def pause_before(self, step: int) -> float:
        """An evaluation between two steps takes longer than any step."""
        return 2 * self.hang_s if step == self._pause_before else 0.0001

    def saves_after(self, step: int) -> bool:
        return bool(self._save_interval) and step % self._save_interval == 0

    def apart(self, one: Worker, other: Worker) -> bool:
        """Whether no packet passes between two workers."""
        return self.network.apart(one.node, other.node)

    @property
    def newest(self) -> ControllerHost:
        """With the controller of the latest term."""
        return self.hubs[max(self.hubs)]

    def on_board(self, worker: Worker) -> None:
        self.invariants.board(worker)
        self.step_invariants.board(worker)
        self.faults.on_phase(worker, worker.session.board.phase.name)

    def at_point(self, worker: Worker, point: str) -> None:
        self.faults.on_phase(worker, point)

    def replace(self, rank: int, pid: int) -> Worker:
        """Another process is `rank` now; the one before has ended."""
        assert not self.workers[rank].alive, "two processes of one rank"
        self.meetings.comes_new(rank)
        self.workers[rank] = Worker(self, rank, pid, newcomer=True)
        return self.workers[rank]

    # ends

    def end(self, worker: Worker, status: int, *, told: bool = True) -> None:
        """A process ends; `told`: its kernel lives, and tells its agent and whom it was connected to."""
        if not worker.alive:
            return
        worker.alive = False
        self.tell(f"-- rank {worker.rank} ends with {status}")
        self.meetings.died(worker, told=told)
        if not told:
            return
        agent = worker.agent
        dying = self.random.uniform(0.0001, 0.002)
        # Freeing memory takes time; a small process is gone as soon as its main thread.
        freed = self.random.choice([0.0, 0.001, 0.3])
        agent.later(dying, agent.see_dying, worker)
        agent.later(
            max(0.0, self.random.uniform(-0.0005, 0.002) + dying + freed), agent.see_dead, worker, status
        )

    def end_node(self, node: int, *, told: bool) -> None:
        for worker in self.workers.values():
            if worker.node == node:
                self.end(worker, -9, told=told)
        self.agents[node].alive = False
        self.agents[node].folder_tasks.end()
        self.network.close(node)

    def over(self) -> bool:
        """Every agent has seen its workers off, or the script has come to its end on every rank."""
        going_on = [agent for agent in self.agents.values() if agent.alive and not agent.settled]
        if not going_on:
            return True
        if any(agent.verdict is not None or agent.living for agent in going_on):
            return False
        newest = self.newest
        controller = newest.controller
        return controller.incident is None and (newest.left or controller.membership.everyone_is_dead)

    def run(self) -> None:
        """To the end; raises AssertionError where an invariant is broken."""
        with self.by_its_clock():
            try:
                while not self.over():
                    assert self.clock.now < self._begun_at + NEVER_S, "it never ends"
                    assert self.clock.step(), "nothing happens any more, and it has not ended"
                    self.step_invariants.always()
                    self.invariants.always()
                self.invariants.at_the_end()
            finally:
                self.close()

    def close(self) -> None:
        """Nothing runs any more, and the boards are gone."""
        for worker in self.workers.values():
            worker.alive = False
            worker.__dict__.pop("session", None)
        for agent in self.agents.values():
            agent.boards.close()

    def starts_again(self) -> bool:
        """Whether torch starts the workers again; what is wrong with the disk has been seen to."""
        told = any(agent.verdict is not None for agent in self.agents.values() if agent.alive)
        if not told or self.number == GENERATIONS or self.random.random() > RESTARTS:
            return False
        for agent in self.agents.values():
            agent.alive = False  # but for its threads that work on the disk
        self.disk.heal()
        return True

    @contextmanager
    def by_its_clock(self) -> Iterator[None]:
        """The session measures steps by the clock of this world."""
        clocks = (freezer, update_window, pace)
        real = [module.time for module in clocks]  # type: ignore[attr-defined]
        for module in clocks:
            module.time = self  # type: ignore[attr-defined]
        try:
            yield
        finally:
            for module, its in zip(clocks, real, strict=True):
                module.time = its  # type: ignore[attr-defined]

    def monotonic(self) -> float:
        return self.clock.now
