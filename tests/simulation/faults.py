"""The faults of a seed: their kinds, places and times, some of them in the middle of an incident."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from tests.simulation.agent import Agent
    from tests.simulation.spare_nodes import SpareNode
    from tests.simulation.worker import Worker
    from tests.simulation.world import World

_PHASES = ("RUNNING", "READY", "READY", "UPDATING")
_STATES = (
    *("REGROUPING", "REGROUPING", "REGROUPING", "REGROUPING"),
    *("FREEZING", "PREPARING", "DUMPING", "DUMPING", "PUBLISHING", "PUBLISHING"),
    *("FINDING", "TAKING OVER", "ENDED"),
)
# Moments of a spare node: it has got a place, its agent has begun, was accepted, has started its workers.
_OF_SPARES = ("given", "began", "came", "started")
_POINTS = ("frozen", "let through", "let through", "written", "unwound", "joined")


class Faults:
    """Draws the faults of a world and lets them happen.

    Attributes:
        unsound: ranks that need not be able to provide their state, with the reason.
        causes: by rank, the fault that a verdict may name as the cause; -1: a request to end the job.
        cut: machines reached by no packet.
        disk_fails: whether a save may fail because of the disk.
        disk_hangs_on: machines on which calls to the disk do not return, from the start.
        stalls: whether a connection is silent for some seconds.
        unexplained: whether an exception may be known long before its cause.
    """

    def __init__(self, world: World) -> None:
        self._world = world
        self._draw = draw = world.random
        self.unsound: dict[int, str] = {}
        self.causes: dict[int, str] = {}
        self.cut: set[int] = set()
        self.unexplained = False
        self.stalls = False
        self.disk_fails = False
        self.disk_hangs_on: set[int] = set()
        self.count = draw.choices([0, 1, 2, 3, 4], [5, 45, 30, 14, 6])[0]
        # Faults to come: by phase or point of a worker, and by state of the controller; the numbers are how
        # often the event must pass first.
        self._at_phase: dict[str, list[int]] = {}
        self._at_state: dict[str, int] = {}
        self._at_spare: dict[str, int] = {}
        self._after: list[int] = []  # numbers of messages of an online recovery before a second fault
        for number in range(self.count):
            self._plan(first=number == 0)
        if world.spares and draw.random() < 0.4:
            self._at_spare[draw.choice(_OF_SPARES)] = draw.choice([1, 1, 2])
        if draw.random() < 0.15:
            self._trouble_the_disk()
        if draw.random() < 0.2 and len(world.agents) > 1:
            machine = draw.choice(world.all_machines)
            world.clock.after(draw.uniform(0.0, 3.0), self._stall, machine)
        if draw.random() < 0.1:
            world.clock.after(draw.uniform(0.0, 3.0), self._nodes_wait)

    def _plan(self, *, first: bool) -> None:
        draw = self._draw
        chance = draw.random()
        if first and chance < 0.4:
            self._world.clock.after(draw.uniform(0.0, 2.0), self._strike_any)
        elif first:
            self._at_phase.setdefault(draw.choice(_PHASES), []).append(draw.randrange(12))
        elif chance < 0.3:
            self._at_phase.setdefault(draw.choice(_POINTS), []).append(draw.randrange(4))
        else:
            state = draw.choice(_STATES)
            if state == "REGROUPING":
                self._after = sorted([*self._after, draw.randrange(6 * len(self._world.job.nodes) + 8)])
                return
            self._at_state[state] = self._at_state.get(state, 0) + 1

    def on_phase(self, worker: Worker, phase: str) -> None:
        waiting = self._at_phase.get(phase)
        if not waiting:
            return
        for index, remaining in enumerate(waiting):
            waiting[index] = remaining - 1
        if min(waiting) < 0:
            waiting.remove(min(waiting))
            self._world.clock.after(self._soon(), self._strike, worker)

    def on_spare(self, spare: SpareNode, moment: str) -> None:
        """Notice that a spare node has reached a moment of `_OF_SPARES`."""
        if self._at_spare.get(moment):
            self._at_spare[moment] -= 1
            self._world.clock.after(self._soon(), self._strike_spare, spare)

    def never_comes(self, agent: Agent) -> None:
        """Lose a spare node that ended before the generation began; nobody knows yet."""
        agent.alive = False
        for worker in agent.workers.values():
            worker.alive = False
        self._lose(agent, "it never came")

    def cannot_start(self, agent: Agent) -> None:
        """End `ttprun`, which could not connect to the controller."""
        self._tell(f"ttprun of node {agent.node} on machine {agent.machine} cannot reach the controller")
        self._lose(agent, "it could not connect")
        self._world.end_agent(agent, noticed=True)

    def _strike_spare(self, spare: SpareNode) -> None:
        if self._world.over() or not spare.alive or spare.world is not self._world:
            return
        self._tell(f"the spare node on machine {spare.machine} is struck")
        self._draw.choice([self._end_spare, self._end_spare, self._cut_spare, self._stop_spare])(spare)

    def _end_spare(self, spare: SpareNode) -> None:
        if spare.agent is not None:
            self._draw.choice([self._lose_loudly, self._lose_silently])(spare.agent)
            return
        noticed = self._draw.random() < 0.5
        self._tell(f"machine {spare.machine} {'ends' if noticed else 'loses its power'}")
        self._blame_for(spare)
        if not noticed:
            self._world.network.silence(spare.machine)
        spare.end(noticed=noticed)

    def _cut_spare(self, spare: SpareNode) -> None:
        """Cut the spare node off from all others, or from the controller alone."""
        self._blame_for(spare)
        if self._draw.random() < 0.5:
            self._part({spare.machine}, {self._world.newest.agent.machine} - {spare.machine})
        elif spare.agent is not None:
            self._cut_off(spare.agent)
        else:
            self._tell(f"machine {spare.machine} is cut off")
            self._world.network.silence(spare.machine)
            self.unexplained = True

    def _stop_spare(self, spare: SpareNode) -> None:
        self._blame_for(spare)
        if spare.agent is not None:
            self._stop_agent(spare.agent)
            return
        self._tell(f"machine {spare.machine} is stopped")
        spare.stopped = self.unexplained = True
        self._world.clock.after(self._draw.choice([300.0, self._draw.uniform(0.0, 20.0)]), spare.go_on)

    def _blame_for(self, spare: SpareNode) -> None:
        if spare.place is not None:
            for rank, node in enumerate(self._world.job.nodes):
                if node == spare.place.node:
                    self.causes.setdefault(rank, "node")

    def on_regrouping(self) -> None:
        """Notice a message of an online recovery: a second fault may follow any of them."""
        while self._after and self._after[0] <= 0:
            self._after.pop(0)
            self._world.clock.after(self._soon(), self._strike_any)
        self._after = [remaining - 1 for remaining in self._after]

    def on_state(self, state: str) -> None:
        while self._at_state.get(state):
            self._at_state[state] -= 1
            if state in ("PREPARING", "PUBLISHING") and self._draw.random() < 0.6:
                self._world.clock.after(self._soon(), self._strike_publisher)
            elif self._draw.random() < (0.8 if state == "ENDED" else 0.3):
                self._world.clock.after(self._soon(), self._strike_controller)
            else:
                self._world.clock.after(self._soon(), self._strike_any)

    def _soon(self) -> float:
        return self._draw.choice([0.0, 0.001, 0.01, 0.1]) * self._draw.random()

    def _strike_any(self) -> None:
        alive = [worker for worker in self._world.workers.values() if worker.alive]
        if alive and self._world.spares and self._draw.random() < 0.5:
            self._strike_agent(self._draw.choice(alive).agent)
        elif alive:
            # Often one of the first ranks, which write and publish.
            self._strike(self._draw.choice(alive if self._draw.random() < 0.7 else alive[:2]))

    def _strike_publisher(self) -> None:
        incident = self._world.newest.controller.incident
        assert incident is not None
        publisher = incident.state.target.publisher
        if publisher < 0 or not self._world.agents[publisher].alive:
            return
        chance = self._draw.random()
        if self._world.agents[publisher].controller_host is None and chance < 0.4:
            self._stop_agent(self._world.agents[publisher])
        elif chance < 0.6 and not self._world.disk.troubled:
            self._tell(f"the disk is stuck on node {publisher}")
            machine = self._world.agents[publisher].machine
            self._world.disk.hang(self._world.clock.now, {machine}, float("inf"))
            self.disk_hangs_on = {machine}
            self.disk_fails = self.disk_fails or self._world.disk.has_turn(
                self._world.agents[publisher].folder_tasks
            )
        else:
            self._strike_agent(self._world.agents[publisher])

    def _strike_agent(self, agent: Agent) -> None:
        if not self._world.over():
            self._draw.choice([self._lose_loudly, self._lose_silently, self._cut_off])(agent)

    def _strike_controller(self) -> None:
        if self._world.newest.agent.alive and len(self._world.agents) > 1:
            agent = self._world.agents[self._world.newest.home]
            self._draw.choice([self._lose_loudly, self._lose_silently, self._cut_off])(agent)

    def _strike(self, worker: Worker) -> None:
        """Let a fault happen to `worker` or its node."""
        if self._world.over():
            return
        if self._world.spares and worker.node and self._draw.random() < 0.4:
            self._strike_agent(worker.agent)
            return
        kinds: list[tuple[int, Callable[[Worker], None]]] = [
            (40, self._kill),
            (12, self._raise),
            (8, self._exit_0),
            (10, self._stop),
            (6, self._hang),
            (5, self._sigterm),
            (4, self._leave),
            (3, self._preempt),
            (6, lambda struck: self._lose_loudly(struck.agent)),
            (6, lambda struck: self._lose_silently(struck.agent)),
            (5, lambda struck: self._cut_off(struck.agent)),
            (4, self._cut_in_two),
            (2, self._cut_from_the_controller),
        ]
        weights, acts = zip(*kinds, strict=True)
        act = self._draw.choices(acts, weights)[0]
        act(worker)

    def in_a_window(self, worker: Worker) -> None:
        """Notice that the main thread of `worker` hangs or raises in the middle of an update."""
        self.unsound[worker.rank] = "in the middle of a window"

    def _tell(self, text: str) -> None:
        self._world.tell(f"-- {text}")

    def _blame(self, rank: int, fault: str) -> None:
        self.causes.setdefault(rank, fault)
        self._world.invariants.fault(rank, fault)

    # kinds of faults

    def _kill(self, worker: Worker) -> None:
        if not worker.alive:
            return
        status = self._draw.choice([-9, -9, -11, 1, 3])
        self._tell(f"rank {worker.rank} is killed ({status})")
        self.unsound[worker.rank] = "killed"
        self._world.end(worker, status)
        self._blame(worker.rank, "death")

    def _exit_0(self, worker: Worker) -> None:
        """Call os._exit(0) in the middle of the script."""
        if not worker.alive or not worker.is_known:
            return
        self._tell(f"rank {worker.rank} calls os._exit(0)")
        self.unsound[worker.rank] = "left"
        self._world.end(worker, 0)
        self._blame(worker.rank, "death")

    def _raise(self, worker: Worker) -> None:
        self._tell(f"rank {worker.rank} will raise")
        worker.raises = True
        self._blame(worker.rank, "exception")

    def _stop(self, worker: Worker) -> None:
        """Send SIGSTOP, mostly without a SIGCONT soon after."""
        self._tell(f"rank {worker.rank} is stopped")
        self.unexplained = True  # in the middle of a step only the others' timeouts reveal it
        worker.stopped = True
        self.unsound[worker.rank] = "stopped"
        self._blame(worker.rank, "hang")
        # An operator continues it in the end: outside of a step nothing else would.
        seconds = self._draw.uniform(0.1, 10.0) if self._draw.random() < 0.3 else 300.0
        self._world.clock.after(seconds, self._continue, worker)

    def _continue(self, worker: Worker) -> None:
        self._tell(f"rank {worker.rank} goes on")
        worker.go_on()

    def _hang(self, worker: Worker) -> None:
        """Let the main thread never return."""
        self._tell(f"the main thread of rank {worker.rank} hangs")
        self.unexplained = True
        worker.main_hangs = True
        self._blame(worker.rank, "hang")

    def _sigterm(self, worker: Worker) -> None:
        if worker.is_known:
            self._tell(f"SIGTERM to rank {worker.rank}")
            self._blame(worker.rank, "told")
            worker.do(worker.sigterm)

    def _leave(self, worker: Worker) -> None:
        agent = worker.agent
        if agent.alive and agent.living:
            self._tell(f"SIGTERM to ttprun of node {agent.node}")
            self._blame(-1, "told")
            agent.leave(self._draw.choice([2.0, 25.0]))

    def _nodes_wait(self) -> None:
        """Request a restart on more nodes, which is no fault."""
        agent = self._world.agents[0]
        if agent.alive and agent.living and not agent.stopped:
            self._tell("a node waits to be taken in")
            self.causes.setdefault(-1, "nodes")
            self._world.invariants.fault(agent.ranks[0], "nodes")
            agent.nodes_wait()

    def _preempt(self, worker: Worker) -> None:
        for agent in self._world.agents.values():
            if agent.living:
                self._leave(self._world.workers[agent.ranks[0]])
        for signalled in self._world.workers.values():
            self._sigterm(signalled)

    def _lose(self, agent: Agent, reason: str) -> None:
        # Its silence is known late; if the controller never knew the node, only the framework waits for it.
        if agent.machine in self.cut or agent.node not in self._world.network.known_nodes:
            self.unexplained = True
        for rank in agent.ranks:
            if self._world.workers[rank].agent is agent:
                self.unsound[rank] = reason
            self._blame(rank, "node")

    def _stop_agent(self, agent: Agent) -> None:
        """Send SIGSTOP to `ttprun`; an operator continues it in the end."""
        self._tell(f"ttprun of node {agent.node} on machine {agent.machine} is stopped")
        self.unexplained = True
        # All others wait for an agent that is stopped while it renames the checkpoint.
        self.disk_fails = self.disk_fails or self._world.disk.has_turn(agent.folder_tasks)
        for rank in agent.ranks:
            self.unsound.setdefault(rank, "its agent is stopped")
        agent.stopped = agent.folder_tasks.stopped = self._world.network.mended = True
        seconds = self._draw.choice([300.0, self._world.timeout_s * self._draw.random()])
        for process in (agent, agent.folder_tasks):
            self._world.clock.after(seconds, process.go_on)

    def _lose_loudly(self, agent: Agent) -> None:
        """Kill `ttprun` and its workers."""
        if not agent.alive:
            return
        self._tell(f"ttprun of node {agent.node} on machine {agent.machine} is killed")
        self._lose(agent, "its agent was killed")
        self._world.end_agent(agent, noticed=True)

    def _lose_silently(self, agent: Agent) -> None:
        """Cut the node's power."""
        if not agent.alive:
            return
        self._tell(f"node {agent.node} on machine {agent.machine} loses its power")
        self.cut.add(agent.machine)
        self._lose(agent, "no power")
        self._world.network.silence(agent.machine)
        self._world.end_agent(agent, noticed=False)

    def _cut_off(self, agent: Agent) -> None:
        """Cut all connections of a node that lives on."""
        if len(self._world.agents) == 1:
            return
        self._tell(f"node {agent.node} on machine {agent.machine} is cut off")
        self.cut.add(agent.machine)
        self._lose(agent, "cut off")
        self._world.network.islands.add(agent.machine)
        self._world.network.silence(agent.machine)

    def _cut_in_two(self, worker: Worker) -> None:
        """Cut the connections between some machines and all others; often they heal."""
        machines = self._world.all_machines
        side = {machine for machine in machines if self._draw.random() < 0.5}
        self._part(side, set(machines) - side)

    def _cut_from_the_controller(self, worker: Worker) -> None:
        """Cut the connection between a machine and the controller's machine; others reach both."""
        self._part({worker.machine}, {self._world.newest.agent.machine} - {worker.machine})

    def _part(self, side: set[int], rest_of_machines: set[int]) -> None:
        if not side or not rest_of_machines:
            return
        self._tell(f"nothing passes between machines {sorted(side)} and {sorted(rest_of_machines)}")
        self.unexplained = True
        for rank, worker in self._world.workers.items():
            if worker.machine in side | rest_of_machines:
                self._blame(rank, "cut")
        self._world.network.part(side, rest_of_machines)
        if self._draw.random() < 0.5:
            self._world.clock.after(self._draw.uniform(0.5, 10.0), self._world.network.heal)

    def _stall(self, machine: int) -> None:
        """Delay all packets of a machine for less time than a silence that counts as a loss."""
        self._tell(f"nothing passes to and from machine {machine} for a while")
        self.unexplained = self.stalls = True
        self._world.network.stall(machine, self._draw.uniform(0.2, 0.9))

    def _trouble_the_disk(self) -> None:
        disk, draw = self._world.disk, self._draw
        kind = draw.choice(["slow", "slow", "fails", "full", "stuck", "stuck on one node"])
        self._tell(f"the disk is {kind}")
        if kind == "slow":
            disk.names_s = draw.choice([0.005, 0.5])
            disk.slow_s = draw.choice([0.5, 0.8 * self._world.timeout_s / 2])
            return
        time_now = self._world.clock.now
        if kind == "stuck on one node":
            disk.hang(
                time_now + draw.choice([0.0, 0.0, 3.0]) * draw.random(),
                {draw.choice(list(self._world.machines))},
                float("inf"),
            )
            self.disk_hangs_on = disk.stuck_on
            return
        self.disk_fails = True
        if kind == "fails":
            disk.trouble = draw.choice([0.1, 0.5, 1.0])
        elif kind == "full":
            disk.full_for = {draw.choice(list(self._world.machines))}
        else:
            disk.hang(time_now + draw.uniform(0.5, 4.0), set(self._world.all_machines), float("inf"))
