"""The faults of a seed: what goes wrong, where and when, also in the middle of an incident."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from tests.simulation.worker import Worker
    from tests.simulation.world import World

_PHASES = ("RUNNING", "READY", "READY", "UPDATING")
_STATES = (
    *("REGROUPING", "REGROUPING", "REGROUPING", "REGROUPING"),
    *("FREEZING", "PREPARING", "DUMPING", "DUMPING", "PUBLISHING", "PUBLISHING"),
    *("FINDING", "TAKING OVER", "ENDED"),
)
_POINTS = ("frozen", "let through", "let through", "written", "unwound", "joined")


class Faults:
    """Draws the faults of a world and lets them happen.

    hurt  ranks of which it cannot be asked that they give their state, and why
    by    what each rank did that a verdict may name as its cause; -1: somebody wanted the job to end
    cut   nodes that no packet reaches
    disk_hangs_on  nodes on which nothing that is asked of the disk returns, from the start
    stalls  a connection is silent for some seconds
    unexplained  an exception may be known long before what has caused it
    """

    def __init__(self, world: World) -> None:
        self._world = world
        self._draw = draw = world.random
        self.hurt: dict[int, str] = {}
        self.by: dict[int, str] = {}
        self.cut: set[int] = set()
        self.unexplained = False
        self.stalls = False
        self.disk_fails = False
        self.disk_hangs_on: set[int] = set()
        self.count = draw.choices([0, 1, 2, 3, 4], [5, 45, 30, 14, 6])[0]
        # (phase of a worker, state of the controller, or a point that a worker passes; how many are let by)
        self._at_phase: dict[str, list[int]] = {}
        self._at_state: dict[str, int] = {}
        self._after: list[int] = []  # so many messages of an online recovery are let by before a second fault
        for number in range(self.count):
            self._plan(first=number == 0)
        if draw.random() < 0.15:
            self._trouble_the_disk()
        if draw.random() < 0.2 and len(world.agents) > 1:
            node = draw.randrange(len(world.agents))
            world.clock.after(draw.uniform(0.0, 3.0), self._stall, node)
        if draw.random() < 0.1:
            world.clock.after(draw.uniform(0.0, 3.0), self._nodes_wait)

    def _plan(self, *, first: bool) -> None:
        draw = self._draw
        when = draw.random()
        if first and when < 0.4:
            self._world.clock.after(draw.uniform(0.0, 2.0), self._strike_any)
        elif first:
            self._at_phase.setdefault(draw.choice(_PHASES), []).append(draw.randrange(12))
        elif when < 0.3:
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
        for place, left in enumerate(waiting):
            waiting[place] = left - 1
        if min(waiting) < 0:
            waiting.remove(min(waiting))
            self._world.clock.after(self._soon(), self._strike, worker)

    def on_regrouping(self) -> None:
        """A message of an online recovery was heard: a second fault may come after any."""
        while self._after and self._after[0] <= 0:
            self._after.pop(0)
            self._world.clock.after(self._soon(), self._strike_any)
        self._after = [left - 1 for left in self._after]

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
        if alive:
            # Often one of the first ranks: they write and publish.
            self._strike(self._draw.choice(alive if self._draw.random() < 0.7 else alive[:2]))

    def _strike_publisher(self) -> None:
        incident = self._world.newest.controller.incident
        assert incident is not None
        publisher = incident.target.publisher
        if publisher < 0 or not self._world.agents[publisher].alive:
            return
        how = self._draw.random()
        if self._world.agents[publisher].controller_host is None and how < 0.4:
            self._stop_agent(publisher)
        elif how < 0.6 and not self._world.disk.troubled:
            self._tell(f"the disk is stuck on node {publisher}")
            self._world.disk.hang(self._world.clock.now, {publisher}, float("inf"))
            self.disk_hangs_on = {publisher}
            self.disk_fails = self.disk_fails or self._world.disk.has_turn(
                self._world.agents[publisher].folder_tasks
            )
        else:
            self._strike_node(publisher)

    def _strike_node(self, node: int) -> None:
        worker = self._world.workers[self._world.agents[node].ranks[0]]
        self._draw.choice([self._lose_loudly, self._lose_silently, self._cut_off])(worker)

    def _strike_controller(self) -> None:
        if self._world.newest.agent.alive and len(self._world.agents) > 1:
            self._strike_node(self._world.newest.term)

    def _strike(self, worker: Worker) -> None:
        """One fault, which begins with `worker`, or its node."""
        if self._world.over():
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
            (6, self._lose_loudly),
            (6, self._lose_silently),
            (5, self._cut_off),
            (4, self._cut_in_two),
            (2, self._cut_from_the_controller),
        ]
        weights, acts = zip(*kinds, strict=True)
        act = self._draw.choices(acts, weights)[0]
        act(worker)

    def in_a_window(self, worker: Worker) -> None:
        """The main thread of `worker` hangs there, or raises in the middle of an update."""
        self.hurt[worker.rank] = "in the middle of a window"

    def _tell(self, what: str) -> None:
        self._world.tell(f"-- {what}")

    def _blame(self, rank: int, what: str) -> None:
        self.by.setdefault(rank, what)
        self._world.invariants.fault(rank, what)

    # what can happen

    def _kill(self, worker: Worker) -> None:
        if not worker.alive:
            return
        status = self._draw.choice([-9, -9, -11, 1, 3])
        self._tell(f"rank {worker.rank} is killed ({status})")
        self.hurt[worker.rank] = "killed"
        self._world.end(worker, status)
        self._blame(worker.rank, "death")

    def _exit_0(self, worker: Worker) -> None:
        """os._exit(0) in the middle of the script."""
        if not worker.alive or not worker.hellos:
            return
        self._tell(f"rank {worker.rank} calls os._exit(0)")
        self.hurt[worker.rank] = "left"
        self._world.end(worker, 0)
        self._blame(worker.rank, "death")

    def _raise(self, worker: Worker) -> None:
        self._tell(f"rank {worker.rank} will raise")
        worker.raises = True
        self._blame(worker.rank, "exception")

    def _stop(self, worker: Worker) -> None:
        """SIGSTOP, and mostly no SIGCONT."""
        self._tell(f"rank {worker.rank} is stopped")
        self.unexplained = True  # out of the middle of a step, only the others' time-outs tell
        worker.stopped = True
        self.hurt[worker.rank] = "stopped"
        self._blame(worker.rank, "hang")
        # Somebody sees to it at last: outside of a step nothing else would.
        seconds = self._draw.uniform(0.1, 10.0) if self._draw.random() < 0.3 else 300.0
        self._world.clock.after(seconds, self._continue, worker)

    def _continue(self, worker: Worker) -> None:
        self._tell(f"rank {worker.rank} goes on")
        worker.go_on()

    def _hang(self, worker: Worker) -> None:
        """The main thread never comes back."""
        self._tell(f"the main thread of rank {worker.rank} hangs")
        self.unexplained = True
        worker.main_hangs = True
        self._blame(worker.rank, "hang")

    def _sigterm(self, worker: Worker) -> None:
        if worker.hellos:
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
        """No fault: all are to start again on more nodes."""
        agent = self._world.agents[0]
        if agent.alive and agent.living and not agent.stopped:
            self._tell("a node waits to be taken in")
            self.by.setdefault(-1, "nodes")
            self._world.invariants.fault(agent.ranks[0], "nodes")
            agent.nodes_wait()

    def _preempt(self, worker: Worker) -> None:
        for agent in self._world.agents.values():
            if agent.living:
                self._leave(self._world.workers[agent.ranks[0]])
        for other in self._world.workers.values():
            self._sigterm(other)

    def _lose(self, node: int, what: str) -> None:
        # Its silence is known late; where it was never heard of, nobody misses it but the framework.
        if node in self.cut or node not in self._world.network.heard:
            self.unexplained = True
        for worker in self._world.workers.values():
            if worker.node == node:
                self.hurt[worker.rank] = what
        for rank in self._world.agents[node].ranks:
            self._blame(rank, "node")

    def _stop_agent(self, node: int) -> None:
        """SIGSTOP to `ttprun`; somebody sees to it at last."""
        agent = self._world.agents[node]
        self._tell(f"ttprun of node {node} is stopped")
        self.unexplained = True
        # All others wait for one that is stopped while it gives the checkpoint its name.
        self.disk_fails = self.disk_fails or self._world.disk.has_turn(agent.folder_tasks)
        for rank in agent.ranks:
            self.hurt.setdefault(rank, "its agent is stopped")
        agent.stopped = agent.folder_tasks.stopped = self._world.network.mended = True
        seconds = self._draw.choice([300.0, self._world.timeout_s * self._draw.random()])
        for process in (agent, agent.folder_tasks):
            self._world.clock.after(seconds, process.go_on)

    def _lose_loudly(self, worker: Worker) -> None:
        """`ttprun` is killed, and its workers with it."""
        node = worker.node
        if not self._world.agents[node].alive:
            return
        self._tell(f"ttprun of node {node} is killed")
        self._lose(node, "its agent was killed")
        self._world.end_node(node, told=True)

    def _lose_silently(self, worker: Worker) -> None:
        """No power."""
        node = worker.node
        if not self._world.agents[node].alive:
            return
        self._tell(f"node {node} loses its power")
        self.cut.add(node)
        self._lose(node, "no power")
        self._world.network.silence(node)
        self._world.end_node(node, told=False)

    def _cut_off(self, worker: Worker) -> None:
        """The node lives, and nothing reaches it."""
        node = worker.node
        if len(self._world.agents) == 1:
            return
        self._tell(f"node {node} is cut off")
        self.cut.add(node)
        self._lose(node, "cut off")
        self._world.network.islands.add(node)
        self._world.network.silence(node)

    def _cut_in_two(self, worker: Worker) -> None:
        """Nothing passes between some nodes and the others; often the network heals."""
        nodes = set(self._world.agents)
        side = {node for node in nodes if self._draw.random() < 0.5}
        self._part(side, nodes - side)

    def _cut_from_the_controller(self, worker: Worker) -> None:
        """Others reach both."""
        self._part({worker.node}, {self._world.newest.term} - {worker.node})

    def _part(self, side: set[int], others: set[int]) -> None:
        if not side or not others:
            return
        self._tell(f"nothing passes between nodes {sorted(side)} and {sorted(others)}")
        self.unexplained = True
        for rank, node in enumerate(self._world.job.nodes):
            if node in side | others:
                self._blame(rank, "cut")
        self._world.network.part(side, others)
        if self._draw.random() < 0.5:
            self._world.clock.after(self._draw.uniform(0.5, 10.0), self._world.network.heal)

    def _stall(self, node: int) -> None:
        """No fault: packets are lost and sent again, for less time than a silence that counts."""
        self._tell(f"nothing passes to and from node {node} for a while")
        self.unexplained = self.stalls = True
        self._world.network.stall(node, self._draw.uniform(0.2, 0.9))

    def _trouble_the_disk(self) -> None:
        disk, draw = self._world.disk, self._draw
        kind = draw.choice(["slow", "slow", "fails", "full", "stuck", "stuck on one node"])
        self._tell(f"the disk is {kind}")
        if kind == "slow":
            disk.names_s = draw.choice([0.005, 0.5])
            disk.slow_s = draw.choice([0.5, 0.8 * self._world.timeout_s / 2])
            return
        now = self._world.clock.now
        if kind == "stuck on one node":
            disk.hang(
                now + draw.choice([0.0, 0.0, 3.0]) * draw.random(),
                {draw.choice(list(self._world.agents))},
                float("inf"),
            )
            self.disk_hangs_on = disk.stuck_on
            return
        self.disk_fails = True
        if kind == "fails":
            disk.trouble = draw.choice([0.1, 0.5, 1.0])
        elif kind == "full":
            disk.full_for = {draw.choice(list(self._world.agents))}
        else:
            disk.hang(now + draw.uniform(0.5, 4.0), set(self._world.agents), float("inf"))
