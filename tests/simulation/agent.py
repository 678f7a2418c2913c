"""A simulated agent: `agent.node` and `agent.worker_processes` without processes and sockets.

It reads real boards, and detects hangs with the real `HangDetector`.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import TYPE_CHECKING

from adaptor.controller.failover import stands_by
from adaptor.controller.hang_detector import HangDetector
from adaptor.launchers.agent.save_folder_tasks import CLEAN_S
from adaptor.launchers.agent.worker_watch import EXIT_GRACE_S, PROGRESS_S, SHUTDOWN_GRACE_S
from adaptor.launchers.control.agent_connections import CONNECT_TIMEOUT_S
from adaptor.launchers.spares.spare_gate import StartCounts, fill_online
from adaptor.protocol.board import BoardMemory
from adaptor.protocol.messages import (
    Addressed,
    AgentHello,
    AgentTerminationRequested,
    ControllerToAgent,
    Died,
    Dismissed,
    Dying,
    Endpoint,
    Exit,
    FillPlaces,
    Find,
    FromAgent,
    FromWorker,
    Hello,
    NodesWaiting,
    Phase,
    Prepare,
    Progress,
    Publish,
    Raised,
    Recovered,
    RegroupFailed,
    Replace,
    TerminationRequested,
    Verdict,
)
from adaptor.protocol.spare_messages import Gate, TakePlace
from tests.simulation.clock import Body
from tests.simulation.controller_client import Follower
from tests.simulation.save_folder_tasks import SaveFolderTasks

if TYPE_CHECKING:
    from tests.simulation.worker import Worker
    from tests.simulation.world import World


class Agent(Follower):
    """The agent of one node; the boards of its ranks outlive the workers.

    Attributes:
        place: the place taken by the agent during training, as a spare node; None: a node from the start.
        workers: the newest process of each rank.
        has_begun: whether the agent has started its workers.
        left: whether torch has ended the workers, after the agent was asked to end.
        controlled: whether the agent has always had a controller.
    """

    def __init__(self, world: World, node: int, machine: int, place: TakePlace | None = None) -> None:
        super().__init__(world, node, machine, place.term if place is not None else 0)
        self.place = place
        self.workers: dict[int, Worker] = {}
        self.has_begun = False
        self.ranks = tuple(rank for rank in world.job.ranks if world.job.nodes[rank] == node)
        self.boards = BoardMemory(self.ranks)
        self.living = set(self.ranks) if place is None else set()
        self.verdict: Verdict | None = None
        self.settled = False
        self.left = False
        previous_agent = (
            world.before.machines.get(machine) if world.before is not None and place is None else None
        )
        tasks = (
            previous_agent.folder_tasks
            if previous_agent is not None and previous_agent.folder_tasks.alive
            else None
        )
        self.folder_tasks = SaveFolderTasks(world, node, machine, tasks)
        self.controlled = True
        self._met = False
        self._early: list[Worker] = []  # workers that wait to be started
        self._dismissed = False
        self._silent = False
        self._started = 0  # replacement processes
        self._replaced: dict[int, Replace] = {}  # by rank, the newest order

    def begin(self) -> None:
        if self.node or self.place is not None:
            self.thread(self._join())
        else:
            self._enter()

    def _join(self) -> Body[None]:
        """Connect to the controller, as `agent_connections.connect` does."""
        network, controller_machine = self.world.network, self.world.agents[0].machine
        if self.place is not None:
            assert self.place.controller is not None
            controller_machine = int(self.place.controller.address)
        deadline = self.clock.now + CONNECT_TIMEOUT_S
        while network.apart(self.machine, controller_machine) or controller_machine in network.closed:
            if self.clock.now >= deadline:
                self.world.faults.cannot_start(self)
                return
            yield 0.5
        self.connection = network.join(self, controller_machine)
        self._enter()

    def _enter(self) -> None:
        endpoint = Endpoint("here", self.machine) if stands_by(self.node) else None
        owner = self.place.owner if self.place is not None else ""
        store = Endpoint("store", self.machine) if self.place is not None and not self.node else None
        self.say_first(AgentHello(self.node, self.ranks, endpoint, owner=owner, store=store))
        if self.place is None:
            self.has_begun = True
            for rank in self.ranks:
                worker = self.world.workers[rank]
                worker.later(self.world.random.uniform(0.05, 0.5), self._start, worker)
        if self.controller_host is not None:
            self.lose_absent()
            self.meet()
        self.later(CONNECT_TIMEOUT_S, self.meet)
        self.thread(self._watch_boards())

    def meet(self) -> None:
        if not self._met and self.place is not None:
            self.later(self.world.random.uniform(0.0, 0.2), self._begin_newcomers)
        self._met = True
        early, self._early = self._early, []
        for worker in early:
            worker.do(worker.start)

    def _begin_newcomers(self) -> None:
        """Start the workers of a spare node without an order."""
        self.has_begun = True
        if self.verdict is not None or self._silent:
            return  # real workers would be started and ended again
        for rank in self.ranks:
            worker = self._start_newcomer(rank)
            worker.later(self.world.random.uniform(0.05, 0.5), worker.start)
        self.world.faults.on_spare(self.world.spares[self.machine], "started")

    def _start_newcomer(self, rank: int) -> Worker:
        self._started += 1
        worker = self.world.replace(self, rank, 1000 * self._started + 100_000 * self.machine + rank)
        self.living.add(rank)
        return worker

    def lose_absent(self) -> None:
        """Report spare nodes that got a place, but ended before their agents connected."""
        gate = self.world.gates.get(self.machine)
        if gate is not None and self.controller_host is not None and self.has_begun:
            for hello in list(gate.gone.values()):
                self.controller_host.lose_absent(hello)

    def _start(self, worker: Worker) -> None:
        if self._met:
            worker.start()
        else:
            self._early.append(worker)

    def _up(self, message: FromAgent) -> None:
        if self._silent:
            self._release_worker(message)
        elif self._dismissed:
            self._judge_alone(message)
        else:
            self.say(message)

    # workers

    def receive_from_worker(self, worker: Worker, message: FromWorker) -> None:
        if not self.alive or self.workers[worker.rank] is not worker:
            return
        if isinstance(message, Hello):
            worker.is_known = message.rank in self.living
        if worker.is_known:
            self._up(message)

    def see_dying(self, worker: Worker) -> None:
        board = self.boards.read(worker.rank)
        if worker.is_known and worker.rank in self.living and board.phase != Phase.ENDED:
            self._up(Dying(worker.rank, 0.0, board))

    def see_dead(self, worker: Worker, status: int) -> None:
        if status == 0:
            self.see_dying(worker)
        self.living.discard(worker.rank)
        self._up(Died(worker.rank, status, 0.0, self.boards.read(worker.rank)))

    def _watch_boards(self) -> Body[None]:
        last = 0
        stillness = HangDetector(self.node, self.world.hang_s)
        while True:  # also after its workers have ended: ranks of other nodes may hang
            yield PROGRESS_S
            boards = [self.boards.read(rank) for rank in sorted(self.living)]
            report = stillness.look(boards, self.clock.now)
            if report is not None:
                self._up(report)
            total = sum(board.progress for board in boards) + self.folder_tasks.progress
            if total != last:
                last = total
                self._up(Progress(self.node, total))

    # orders

    def obey(self, order: ControllerToAgent) -> None:
        match order:
            case Addressed(rank=rank, message=message):
                worker = self.workers.get(rank)
                if worker is not None and worker.is_known:
                    worker.from_agent.send(message)
            case Replace():
                self.thread(self._replace(order))
            case FillPlaces():
                self.thread(self._fill_places(order))
            case Recovered():
                self.world.invariants.recovered(self, order)
            case Prepare():
                self.folder_tasks.prepare(order, self._answer)
            case Publish() | Find():
                self.folder_tasks.publish(order, self._answer)
            case Dismissed():
                self._dismissed = True
            case Verdict():
                self.world.invariants.verdict(self, order)
                self.verdict = order
                self.thread(self._reap_workers())

    def _fill_places(self, order: FillPlaces) -> Body[None]:
        controller_host = self.controller_host
        assert controller_host is not None
        members = controller_host.controller.membership

        async def refuses(lost: Collection[int]) -> str:
            if not self.world.goes_on(members.agents_of(members.agents), members.agents_of(lost)):
                return "the other side of a cut network goes on"
            return "" if self.verdict is None and not self._silent else "the recovery is over"

        yield from fill_online(
            self.world.gates.get(self.machine),  # type: ignore[arg-type]
            controller_host,  # type: ignore[arg-type]
            order,
            StartCounts(0, self.world.number),
            Gate(str(self.machine), ""),
            refuses,
            self._up,
        ).__await__()

    def _replace(self, order: Replace) -> Body[None]:
        if not self.has_begun:
            reason = "its workers have not been started yet"
            self._up(RegroupFailed(order.rank, order.incident, order.attempt, reason))
            return
        self._replaced[order.rank] = order
        self.world.end(self.workers[order.rank], -9)
        while order.rank in self.living:
            yield 0.01
        if self.verdict is not None or self._silent or self._replaced[order.rank] is not order:
            return
        draw = self.world.random
        if draw.random() < 0.02:
            reason = "no process can be started in its place"
            self._up(RegroupFailed(order.rank, order.incident, order.attempt, reason))
            return
        worker = self._start_newcomer(order.rank)
        yield draw.uniform(1.0, 3.0) if order.cold else draw.uniform(0.01, 0.2)
        worker.do(worker.start)

    def _answer(self, message: FromAgent) -> None:
        self.do(self._up, message)

    @property
    def resting(self) -> bool:
        return self._dismissed or self._silent

    def on_controller_unreachable(self) -> None:
        self._judge("the controller's node is lost")

    def _judge(self, reason: str) -> None:
        self.controlled = False
        if self.verdict is None:
            self.obey(
                Verdict(
                    incident=0,
                    outcome="lost",
                    step=-1,
                    line=reason,
                    cause_rank=-1,
                    exit_code=1,
                    save_folder="",
                )
            )

    def _judge_alone(self, message: FromAgent) -> None:
        if (isinstance(message, Died) and message.status) or isinstance(
            message, AgentTerminationRequested | TerminationRequested | Raised
        ):
            self._judge(f"{type(message).__name__} after node 0 had finished")

    def _release_worker(self, message: FromAgent) -> None:
        if isinstance(message, Raised | TerminationRequested):
            self.obey(Addressed(message.rank, Exit(0)))

    def _reap_workers(self) -> Body[None]:
        yield from self._until_gone(EXIT_GRACE_S)
        for rank in sorted(self.living):
            self.world.end(self.workers[rank], -9)
        deadline = self.clock.now + SHUTDOWN_GRACE_S
        while self.clock.now < deadline and (
            self.living
            or (
                self.controller_host is not None
                and not self.controller_host.controller.membership.everyone_is_dead
            )
        ):
            yield 0.1
        if (
            self.controller_host is not None
            and not self.folder_tasks.busy
            and self.verdict is not None
            and self.verdict.save_folder
        ):
            self.folder_tasks.clean(self.controller_host.term)
            deadline = self.clock.now + CLEAN_S
            while self.folder_tasks.busy and self.clock.now < deadline:
                yield 0.1
        self.settled = True

    def _until_gone(self, seconds: float) -> Body[None]:
        deadline = self.clock.now + seconds
        while self.living and self.clock.now < deadline:
            yield 0.1

    # torch's side

    def nodes_wait(self) -> None:
        """Request the save after which another node joins the job."""
        self._up(NodesWaiting(self.node, 1))

    def leave(self, grace_s: float) -> None:
        """Receive SIGTERM, as `ttprun` does."""
        self._up(AgentTerminationRequested(self.node, "SIGTERM"))
        self.thread(self._leave(grace_s))

    def _leave(self, grace_s: float) -> Body[None]:
        deadline = self.clock.now + grace_s
        while not self.settled and self.clock.now < deadline:
            yield 0.1
        self._silent = True
        for rank in self.ranks:  # its node leaves, whether saved or not
            self.world.faults.causes.setdefault(rank, "told")
        for rank in sorted(self.living):
            self.world.faults.unsound[rank] = "its time is over"
            self.workers[rank].sigterm()
        yield from self._until_gone(30.0)
        for rank in sorted(self.living):
            self.world.end(self.workers[rank], -9)
        yield from self._until_gone(30.0)
        self.left = self.settled = True
        self.folder_tasks.end()
        if self.controller_host is not None:
            self.controller_host.leave()
        self.world.network.close(self.machine)
