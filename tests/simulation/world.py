"""A job around real controllers, driven by a seed: all of its generations, from start to end."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from random import Random

from adaptor.launchers.spares.spare_gate import StartCounts, fill_for_restart
from adaptor.worker import freezer, pace, update_window
from tests.simulation import jobs
from tests.simulation.agent import Agent
from tests.simulation.clock import Clock
from tests.simulation.controller_client import Follower
from tests.simulation.controller_host import ControllerHost
from tests.simulation.disk import Disk
from tests.simulation.faults import Faults
from tests.simulation.invariants import Invariants
from tests.simulation.meetings import Dumping, Meetings
from tests.simulation.network import Network
from tests.simulation.spare_nodes import FIRST_MACHINE, SpareGate, SpareNode
from tests.simulation.step_invariants import StepInvariants
from tests.simulation.worker import Worker

# Longer than any job: two timeouts, and the waits of agents at the end.
NEVER_S = 2000.0


# The most generations of a job, and the probability of a restart after an incident.
GENERATIONS = 3
RESTARTS = 0.4
# `undisturbed` finds a job within the first few of these seeds.
_SEEDS = 300


def undisturbed(fits: Callable[[World], bool], log: list[str] | None = None) -> World:
    """Return the first job without faults that `fits`.

    Args:
        fits: whether the job has the required nodes or ranks.
        log: receives a line for each event.

    Raises:
        AssertionError: no job of the first seeds fits.
    """
    for seed in range(_SEEDS):
        world = World(Random(seed), log, None)
        if fits(world) and not (world.faults.count or world.faults.disk_hangs_on):
            return world
        world.close()
    raise AssertionError(f"no job of the first {_SEEDS} seeds fits")


def live(seed: int, *, log: list[str] | None = None) -> World:
    """Run all generations of the job of a seed, and return the last one."""
    world = World(Random(seed), log, None)
    world.run()
    while world.starts_again():
        world = World(world.random, log, world)
        world.run()
    return world


class World:
    """One generation of a job.

    Attributes:
        hubs: controllers by term and machine.
        agents: by node, the agent with the node's place.
        machines: all agents by machine, also agents without their places.
        spares: the processes of spare nodes by machine.
        gates: the gates of spare nodes, by the machines of present or former controllers; empty: the job
            has no spare nodes.
        excluded: the agents of the generation without which one side of a cut network continues (the lease).
        log: receives a line for each event, for people to read; None: no log.
        before: the previous generation, whose time, disk and disk tasks continue.
        filled: places of spare nodes in the next generation, by node.
        came: agents of spare nodes accepted during the current online recovery.
        recovered_with: the number of spare nodes that train after an online recovery.
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
            machines = {node: node for node in sorted(set(self.job.nodes))}
            count = draw.choice([0, 1, 2]) if len(machines) > 1 else 0
            self.spares = {
                machine: SpareNode(self, machine) for machine in range(FIRST_MACHINE, FIRST_MACHINE + count)
            }
            self.gates = {0: SpareGate(self, 0)} if count else {}
            for spare in self.spares.values():
                self.gates[0].waiting.append(spare)
        else:
            self.spares, self.gates = before.spares, before.gates
            machines = {node: agent.machine for node, agent in before.agents.items()} | before.filled
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
        chance = draw.random()
        self._pause_before = draw.choice(self.job.steps) if chance < 0.1 else -1
        if chance > 0.9:  # an update takes longer than the deadline of a rank whose shards others hold
            self.timeout_s, self.hang_s, self.update_s = 30.0, 60.0, 6.0
        self.hubs: dict[tuple[int, int], ControllerHost] = {}
        self.excluded: set[str] = set()
        self.filled: dict[int, int] = {}
        self.came: list[Agent] = []
        self.recovered_with = before.recovered_with if before is not None else 0
        self.invariants = Invariants(self)
        self.step_invariants = StepInvariants(self)
        self.meetings = Meetings(self)
        self.dumping = Dumping(self)
        self.agents = {node: Agent(self, node, machine) for node, machine in machines.items()}
        self.machines = {agent.machine: agent for agent in self.agents.values()}
        self.network = Network(self)
        self.workers: dict[int, Worker] = {}
        for rank, node in enumerate(self.job.nodes):
            self.workers[rank] = self.agents[node].workers[rank] = Worker(self.agents[node], rank)
        self.faults = Faults(self)
        self.agents[0].have_the_controller()
        for agent in self.agents.values():
            agent.later(draw.uniform(0.0, 0.2) if agent.node else 0.0, agent.begin)
        if self.gates:
            self.gates[0].begin(self)
            for machine, spare in self.spares.items():
                if machine in self.machines:
                    spare.agent = self.machines[machine]
                    if not spare.alive:  # it has ended between the generations
                        self.faults.never_comes(spare.agent)
        self.tell(str(self.job))

    def tell(self, event: str) -> None:
        if self.log is not None:
            self.log.append(f"{self.clock.now:9.4f} {event}")

    # used by the parts of the world

    def local_delay(self) -> float:
        draw = self.random.random()
        return 0.0001 + draw * (0.005 if draw > 0.95 else 0.001)

    def pause_before(self, step: int) -> float:
        """Return the pause before a step: an evaluation between two steps takes longer than any step."""
        return 2 * self.hang_s if step == self._pause_before else 0.0001

    def saves_after(self, step: int) -> bool:
        return bool(self._save_interval) and step % self._save_interval == 0

    def apart(self, worker: Worker, peer: Worker) -> bool:
        """Return whether no packet passes between two workers."""
        return self.network.apart(worker.machine, peer.machine)

    @property
    def all_machines(self) -> list[int]:
        """All machines, also those of waiting spare nodes."""
        return sorted({*self.machines, *(m for m, spare in self.spares.items() if spare.alive)})

    @property
    def newest(self) -> ControllerHost:
        """The controller of the latest term whose machine has not lost its place."""
        if len(self.hubs) == 1:  # the common case; this is called at each event
            return next(iter(self.hubs.values()))
        keys = [key for key, hub in self.hubs.items() if self.agents[hub.home] is hub.agent]
        return self.hubs[max(keys)]

    def on_board(self, worker: Worker) -> None:
        self.invariants.board(worker)
        self.step_invariants.board(worker)
        self.faults.on_phase(worker, worker.session.board.phase.name)

    def at_point(self, worker: Worker, point: str) -> None:
        self.faults.on_phase(worker, point)

    def replace(self, agent: Agent, rank: int, pid: int) -> Worker:
        """Let a new process be `rank`; the old one has ended, or its node has lost its place."""
        worker = Worker(agent, rank, pid, newcomer=True)
        assert rank not in agent.workers or not agent.workers[rank].alive, "two processes of one rank"
        agent.workers[rank] = worker
        if self.agents[agent.node] is agent:  # otherwise its workers train with nobody
            self.meetings.comes_new(rank)
            self.workers[rank] = worker
        return worker

    def begin_spare(self, spare: SpareNode) -> Agent:
        """Start the agent of a spare node that got a place while others train."""
        assert spare.place is not None
        agent = self.machines[spare.machine] = Agent(self, spare.place.node, spare.machine, spare.place)
        self.faults.on_spare(spare, "began")
        agent.begin()
        return agent

    def open_gate(self, follower: Follower) -> None:
        """Open a gate at an agent that has taken the controller over, for spare nodes that come."""
        if self.gates:
            self.gates[follower.machine] = SpareGate(self, follower.machine)

    def goes_on(self, members: Collection[str], lost: Collection[str]) -> bool:
        """Exclude `lost`, and return whether `members` may go on, as `lease.go_on_without` decides."""
        if self.excluded & set(members):
            return False
        self.excluded |= set(lost)
        return True

    def moves_in(self, agent: Agent, hub: ControllerHost) -> None:
        """Give the agent the place of its node: the controller has accepted its hello.

        The agent gets no place in three cases: agent and controller were cut off together and others have the
        place; its hello was on its way when the controller's node was cut off; others continue without the
        agent.
        """
        previous_agent = self.agents[agent.node]
        apart = self.agents[hub.home] is not hub.agent or hub.agent.machine in self.network.cut
        if (
            previous_agent is agent
            or apart
            or (agent.place is None and f"node {agent.node}" in self.excluded)
        ):
            return
        self.tell(f"-- machine {agent.machine} has the place of node {agent.node}")
        self.agents[agent.node] = agent
        self.meetings.leave_behind(previous_agent.workers)
        self.came.append(agent)
        self.invariants.moves_in(agent)
        self.faults.on_spare(self.spares[agent.machine], "came")

    # ends

    def end(self, worker: Worker, status: int, *, noticed: bool = True) -> None:
        """End a process; `noticed`: its kernel lives and informs its agent and its peers."""
        if not worker.alive:
            return
        worker.alive = False
        self.tell(f"-- rank {worker.rank} ends with {status}")
        worker.meetings.died(worker, noticed=noticed)
        if not noticed:
            return
        agent = worker.agent
        dying = self.random.uniform(0.0001, 0.002)
        # Freeing memory takes time; a small process is gone as soon as its main thread ends.
        freed = self.random.choice([0.0, 0.001, 0.3])
        agent.later(dying, agent.see_dying, worker)
        agent.later(
            max(0.0, self.random.uniform(-0.0005, 0.002) + dying + freed), agent.see_dead, worker, status
        )

    def end_agent(self, agent: Agent, *, noticed: bool) -> None:
        """End the process of an agent and its workers."""
        for worker in agent.workers.values():
            self.end(worker, -9, noticed=noticed)
        agent.alive = False
        agent.folder_tasks.end()
        if agent.machine in self.spares:
            self.spares[agent.machine].alive = False
        self.network.close(agent.machine)

    def over(self) -> bool:
        """Return whether every agent has seen its workers end, or every rank's script has finished."""
        goes_on = False
        for agent in self.machines.values():
            if agent.alive and not agent.settled:
                goes_on = goes_on or not self._is_over_at(agent)
                if agent.verdict is not None or agent.living:
                    return False
        if not goes_on:
            return True
        newest = self.newest
        controller = newest.controller
        return controller.incident is None and (newest.left or controller.membership.everyone_is_dead)

    def _is_over_at(self, agent: Agent) -> bool:
        """Return whether a controller on an island knows that every rank's script has finished."""
        if agent.controller_host is None or agent.machine not in self.network.islands:
            return False
        controller = agent.controller_host.controller
        return controller.incident is None and controller.membership.everyone_is_dead

    def run(self) -> None:
        """Run to the end. Raises AssertionError if an invariant is broken."""
        with self.by_its_clock():
            try:
                while not self.over():
                    assert self.clock.now < self._begun_at + NEVER_S, "it never ends"
                    assert self.clock.step(), "nothing happens any more, and it has not ended"
                    self.step_invariants.always()
                    self.invariants.always()
                self.invariants.at_the_end()
            except BaseException:
                self.close()
                raise

    def close(self) -> None:
        """Stop everything, and release the boards."""
        for agent in self.machines.values():
            for worker in agent.workers.values():
                worker.alive = False
                worker.__dict__.pop("session", None)
            agent.boards.close()

    def starts_again(self) -> bool:
        """Return whether torch restarts the workers; the disk has been repaired then."""
        try:
            with self.by_its_clock():
                return self._starts_again()
        finally:
            self.close()

    def _starts_again(self) -> bool:
        has_verdict = any(agent.verdict is not None for agent in self.agents.values() if agent.alive)
        if not has_verdict or self.number == GENERATIONS or self.random.random() > RESTARTS:
            return False
        if self.gates and not self._fill_places():
            return False
        for agent in self.machines.values():
            agent.alive = False  # its threads that work on the disk go on
        self.disk.heal()
        return True

    def _fill_places(self) -> bool:
        """Give the places of lost nodes to spare nodes, as `launchers.agent` does.

        If no spare node waits, the lost nodes come back themselves, as in jobs without spare nodes. The move
        to another store (`move`) is not simulated: if spare nodes have places, such a job ends.

        Returns:
            Whether the job goes on.
        """
        agent, gate = self.agents[0], self.gates[0]
        is_first = agent.controller_host is not None and agent.machine == gate.machine
        if not agent.alive or agent.verdict is None or not is_first:
            return not any(gate.owners for gate in self.gates.values())
        assert agent.controller_host is not None
        lost, members = agent.verdict.lost, agent.controller_host.controller.membership
        counts = StartCounts(0, self.number)

        async def until(condition: Callable[[], bool], limit_s: float) -> None:
            ends_at = self.clock.now + limit_s
            while not condition() and self.clock.now < ends_at and self.clock.step():
                pass

        work = fill_for_restart(gate, members, lost, counts, until).__await__()  # type: ignore[arg-type]
        try:
            while True:
                ends_at = self.clock.now + next(work)
                while self.clock.now < ends_at and self.clock.step():
                    pass
        except StopIteration as end:
            owners: dict[int, str] = end.value
        if not owners:
            return gate.owners.keys().isdisjoint(lost)
        self.filled = {node: gate.owners[node].machine for node in owners}
        return True

    @contextmanager
    def by_its_clock(self) -> Iterator[None]:
        """Let the session measure steps by the clock of this world."""
        clocks = (freezer, update_window, pace)
        real = [module.time for module in clocks]  # type: ignore[attr-defined]
        for module in clocks:
            module.time = self  # type: ignore[attr-defined]
        try:
            yield
        finally:
            for module, original in zip(clocks, real, strict=True):
                module.time = original  # type: ignore[attr-defined]

    def monotonic(self) -> float:
        return self.clock.now
