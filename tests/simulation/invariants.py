"""The invariants of a job; most of them are checked after every event."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from adaptor.controller.incident import Incident
from adaptor.controller.incident_state import Stage
from adaptor.protocol.messages import (
    Addressed,
    AgentHello,
    AgentLost,
    BoardRecord,
    ControllerToAgent,
    Died,
    Dump,
    Exit,
    Frozen,
    Hello,
    Phase,
    Proceed,
    Progress,
    Publish,
    Recovered,
    Regroup,
    ToController,
    Verdict,
    Written,
)
from tests.simulation.disk import REGULAR

if TYPE_CHECKING:
    from tests.simulation.agent import Agent
    from tests.simulation.controller_host import ControllerHost
    from tests.simulation.worker import Worker
    from tests.simulation.world import World

# Seconds after which the controller must know of a death, unless the network is silent.
NOTICED_S = 10.0
# Seconds by which an exception that a death has caused may be reported before the death.
EXPLAINED_S = 1.0


class Invariants:
    """The invariants of one world.

    Attributes:
        begun: the newest step whose update any rank has begun without an order. With local copies: the newest
            step whose update all ranks have reached without an order.
        saved: steps of last words, in the order in which they got their final names.
        recoveries: incidents that were recovered online.
    """

    def __init__(self, world: World) -> None:
        self._world = world
        self.begun = world.job.origin
        self._come = dict.fromkeys(world.job.ranks, world.job.origin)
        self.saved: list[int] = []
        self._saved_before = 0  # the number of `saved` at the last online recovery
        self._tracker = -1 if world.disk.tracker is None else world.disk.tracker
        self.latest_fault = world.clock.now
        self._verdicts: dict[Agent, Verdict] = {}
        self._verdict_machines: dict[Agent, int] = {}  # the machine of the controller that gave each verdict
        self.recoveries: set[int] = set()
        self._let_in: set[Agent] = set()  # agents of spare nodes whose hellos the controller has accepted
        self._taking_part: dict[tuple[int, int, int], Worker] = {}  # by incident, attempt and rank

    # boards and faults

    def moves_in(self, agent: Agent) -> None:
        """Check a spare node whose hello the controller has accepted."""
        assert agent.place is not None, "a node that nobody awaits has the place of another"
        owners = [gate.owners.get(agent.node) for gate in self._world.gates.values()]
        machines = [owner.machine for owner in owners if owner is not None]
        assert agent.machine in machines, "another spare node has got this place"
        self._let_in.add(agent)
        for rank in agent.ranks:
            self._world.faults.unsound.setdefault(rank, "new")

    def takes_part(self, worker: Worker, number: int, attempt: int) -> None:
        """Check a process that follows an attempt of an online recovery; attempt -1: it continues after the
        attempt.
        """
        assert worker.agent.place is None or worker.agent in self._let_in, (
            "a node takes part that was not let in"
        )
        first_worker = self._taking_part.setdefault((number, attempt, worker.rank), worker)
        assert first_worker is worker, "two processes of one rank take part"

    def board(self, worker: Worker) -> None:
        if self._world.workers[worker.rank] is not worker:
            return  # its node has lost its place to another
        board, has_local_copy = worker.session.board, self._world.job.has_local_copy
        if board.phase == Phase.READY and has_local_copy and not worker.session.door.closed:
            self._come[worker.rank] = board.ahead
            self.begun = max(self.begun, min(self._come.values()))
        elif board.phase == Phase.UPDATING and not has_local_copy and not worker.session.door.closed:
            self.begun = max(self.begun, board.ahead)
        step = self.regrouped_step
        if step is not None and board.phase == Phase.UPDATING:
            assert board.ahead <= step, "an update is begun before all ranks have joined"
        if board.phase == Phase.ENDED:  # its shards are gone
            self._world.faults.unsound[worker.rank] = "ended"

    @property
    def regrouped_step(self) -> int | None:
        """The step that ranks return to in an online recovery in progress."""
        incident = self._world.newest.controller.incident  # one on an island regroups no other node
        is_open = incident is not None and incident.state.stage is Stage.REGROUPING
        return incident.step if is_open else None

    def can_be_saved(self, incident: Incident) -> None:
        """During an online recovery: check that each living survivor has the state assumed by the
        controller.
        """
        job, faults = self._world.job, self._world.faults
        for rank in incident.state.nodes:
            worker = self._world.workers[rank]
            if not worker.alive or rank in faults.unsound:
                continue
            board = worker.session.board.record()
            assert board.provides(incident.step), f"rank {rank} has not step {incident.step} any more"
            if board.phase == Phase.RUNNING and board.finished == incident.step:
                self._holds(worker, incident.step)
                assert worker.session.record_of(incident.step) == job.record(incident.step)

    def _holds(self, worker: Worker, step: int) -> None:
        job = self._world.job
        tensors = worker.trainee.before if worker.session.from_local_copy(step) else worker.trainee.tensors
        for share in job.shares[worker.rank]:
            assert tensors[share.group, share.index] == job.tensors(step), (
                f"rank {worker.rank} does not hold step {step}"
            )

    def proceed(self, order: Proceed) -> None:
        """Check that no step is lost when the controller lets all ranks go on."""
        # A save that the disk delays goes back to the previous step, which others can write; then all ranks
        # go back, and the step is repeated.
        goes_back = self._world.job.has_local_copy and self._world.disk.troubled
        # Without sound holders, an exception may have interrupted the update of a later step.
        if self.has_sound_holders(0) and not goes_back:
            assert order.step >= self.begun, f"step {self.begun} is lost by going on from step {order.step}"
        self.begun = order.step
        self._saved_before = len(self.saved)
        agents = self._world.agents
        self._world.recovered_with += sum(agents[agent.node] is agent for agent in self._world.came)
        self._world.came.clear()
        self._come = dict.fromkeys(self._come, order.step)
        for worker in self._world.workers.values():
            if worker.alive:
                self._holds(worker, order.step)
                assert worker.trainee.updates == self._world.job.updates(order.step)
                is_unreachable = (
                    worker.stopped or worker.agent.stopped or worker.machine in self._world.network.cut
                )
                if not (is_unreachable or worker.main_hangs):
                    self._world.faults.unsound.pop(worker.rank, None)  # it holds the step, as just checked

    def recovered(self, agent: Agent, order: Recovered) -> None:
        assert agent not in self._verdicts, "an incident is recovered after the verdict"
        is_on_disk = order.step in self.saved or self.regular(order.step)
        is_reported = f"step {order.step} could not be saved meanwhile" in order.line
        assert is_on_disk or is_reported, "the step that all go on from is not on disk, and nobody says so"
        self.recoveries.add(order.incident)

    def fault(self, rank: int, kind: str) -> None:
        self.latest_fault = self._world.clock.now
        if kind in ("death", "node"):
            self._world.clock.after(NOTICED_S, self._noticed, rank, self._world.workers[rank])

    def _noticed(self, rank: int, lost: Worker) -> None:
        world = self._world
        if world.job.nodes[rank] not in world.network.known_nodes:
            return  # by design, the job waits for a node that never came as long as the framework does
        if not any(agent.alive for agent in world.machines.values()):
            return
        if lost.agent.stopped and not hasattr(lost, "trainee"):
            # Only its agent knows of the death, and before training begins a hang has no limit.
            lost.agent.do(world.clock.after, NOTICED_S, self._noticed, rank, lost)
            return
        hubs = world.hubs.values()
        is_known = any(h.left or h.controller.incident or h.controller.verdict for h in hubs)
        is_known = is_known or world.workers[rank] is not lost  # it has been replaced
        assert is_known, f"the loss of rank {rank} has not been noticed"

    def verdict(self, agent: Agent, verdict: Verdict) -> None:
        assert agent not in self._verdicts, "an agent is given two verdicts"
        self._verdicts[agent] = verdict
        self._verdict_machines[agent] = agent.machine if agent.connection is None else agent.connection.to

    def has_sound_holders(self, node: int) -> bool:
        """Return whether sound ranks hold every shard and can write every group.

        Only ranks count that the controller on `node` can reach.
        """
        job, faults, parted = self._world.job, self._world.faults, self._world.network.parted
        machines = {rank: worker.machine for rank, worker in self._world.workers.items()}
        controller_machine = self._world.agents[node].machine
        sound = [
            r
            for r in job.ranks
            if r not in faults.unsound and frozenset((controller_machine, machines[r])) not in parted
        ]
        able = {rank for rank in sound if machines[rank] not in faults.disk_hangs_on}
        held_shards = {(s.group, s.index) for rank in sound for s in job.shares[rank]}
        return all(
            able.intersection(ranks)
            and all((group, index) in held_shards for index in range(job.size(group)))
            for group, ranks in job.groups.items()
        )

    def regular(self, step: int) -> bool:
        return REGULAR in self._world.disk.folders.get(f"iter_{step:07d}", {})

    # the disk

    def final(self, step: int, files: dict[str, Any]) -> None:
        """Check last words that get their final name."""
        job = self._world.job
        assert step <= max(self.begun, *(w.trainee.step for w in self._trained())), "a step is invented"
        assert step not in self.saved, "a step is published twice"
        assert len(files) == len(job.groups), "files are missing"
        for group, shards, record in files.values():
            assert sorted(shards) == list(range(job.size(group))), "a shard is missing from what is published"
            assert set(shards.values()) == {job.tensors(step)}, f"shards of another step: {shards}"
            assert record == job.record(step), f"the record of another step: {record}"
        assert {group for group, _, _ in files.values()} == set(job.groups), "a group is missing"
        self.saved.append(step)

    def _trained(self) -> list[Worker]:
        return [worker for worker in self._world.workers.values() if hasattr(worker, "trainee")]

    # always, and at the end

    def always(self) -> None:
        tracker = self._world.disk.tracker
        controller_host = self._world.newest  # an earlier one that is cut off does not know the newest orders
        incident = controller_host.controller.incident
        if incident is not None and incident.state.stage is Stage.REGROUPING and not controller_host.left:
            self.can_be_saved(incident)
        if tracker is not None and tracker != self._tracker:
            assert tracker > self._tracker, "the tracker goes backwards"
            assert f"iter_{tracker:07d}" in self._world.disk.folders, "the tracker names what is not there"
            self._tracker = tracker

    def at_the_end(self) -> None:
        world = self._world
        verdict_lines: dict[int, dict[int, str | None]] = {}  # by the machine of the controller
        for agent in world.machines.values():
            if not agent.alive:
                continue
            assert not any(worker.alive for worker in agent.workers.values()), "a process is left"
            verdict = self._verdicts.get(agent)
            if agent.machine not in world.network.cut and not agent.left and agent.controlled:
                current = agent.machine if agent.connection is None else agent.connection.to
                controller = self._verdict_machines.get(agent, current)
                # An agent that loses node 0 before it learns of a spare node does not find the spare node.
                may_miss = world.network.parted or world.network.mended or self._let_in
                controller = controller if may_miss else 0
                lines = verdict_lines.setdefault(controller, {})
                lines[agent.machine] = verdict.line if verdict is not None else None
        for lines in verdict_lines.values():
            assert len(set(lines.values())) <= 1, f"nodes have different verdicts: {verdict_lines}"
        if not world.faults.causes:
            assert not self._verdicts, "a verdict without a fault"
            assert world.newest.controller.membership.everyone_is_dead, (
                "it ended, and the controller does not know"
            )
        # Otherwise one side may save what the other has not seen yet.
        hubs = [controller_host for controller_host in world.hubs.values() if controller_host.agent.alive]
        if not (world.network.parted or world.network.mended or world.network.islands):
            # A controller whose disk hangs cannot look; a tracker that is ahead is named in the verdict.
            able = [
                controller_host
                for controller_host in hubs
                if controller_host.agent.machine not in world.faults.disk_hangs_on
                and not _has_just_come(controller_host)
            ]
            ends = [controller_host.controller.verdict for controller_host in able]
            newest = max(a.boards.read(rank).finished for a in world.agents.values() for rank in a.ranks)
            kept = (
                self.saved[self._saved_before :]
                and not world.faults.disk_fails
                and not world.disk.is_ahead(newest, world.generation)
            )
            assert not kept or all(end is None or end.outcome == "saved" for end in ends), (
                "published, and the verdict says that it is lost, or nothing"
            )


def _has_just_come(controller_host: ControllerHost) -> bool:
    """Return whether the controller is on a spare node to which the layouts of all ranks had not come yet."""
    members = controller_host.controller.membership
    return controller_host.agent.place is not None and len(members.layouts) < members.world_size


class Watch:
    """The invariants of one controller."""

    def __init__(self, world: World, controller_host: ControllerHost) -> None:
        self._world = world
        self._controller_host = controller_host
        self._frozen: dict[int, BoardRecord] = {}
        self._dead: set[int] = set()
        self._lost: set[int] = set()
        self._reported: dict[str, int] = {}
        self._moved_at = 0.0
        self._attempt, self._attempt_at = 0, 0.0  # of an online recovery; a new attempt is progress
        self._verdict: Verdict | None = None
        self._number = 0  # the number of the incident
        self._recovered = 0

    def on_message(self, message: ToController) -> None:
        incident = self._controller_host.controller.incident
        match message:
            case AgentHello(node=node, owner=owner):
                if owner and self._verdict is None:
                    self._lost.discard(node)  # a spare node has its place
            case Died(rank=rank):
                self._dead.add(rank)
            case AgentLost(node=node):
                self._lost.add(node)
                self._dead.update(self._world.agents[node].ranks)
            case Hello(rank=rank):
                self._dead.discard(rank)  # another process
            case Progress():
                self._moved_at = self._world.clock.now
            case Frozen(rank=rank, incident=number, board=board):
                if incident is not None and incident.number == number:
                    self._begin(number)
                    self._frozen.setdefault(rank, board)
            case Written(group=group, incident=number, attempt=attempt):
                if incident is not None and (incident.number, incident.state.writing.attempt) == (
                    number,
                    attempt,
                ):
                    self._reported[group] = incident.step
                    self._moved_at = self._world.clock.now

    def _begin(self, number: int) -> None:
        if number != self._number:
            self._number, self._frozen, self._reported = number, {}, {}

    def on_order(self, node: int, order: ControllerToAgent) -> None:
        late = node in self._lost and isinstance(order, Verdict)  # the lost node has come after all
        assert node not in self._lost or late, "an order to a node that is known to be lost"
        if isinstance(order, Addressed):
            assert order.rank not in self._dead, "an order to a rank that is known to be dead"
            assert self._world.job.nodes[order.rank] == node, "an order to another node than the rank's"
            assert isinstance(order.message, Exit) or self._verdict is None, "an order after the verdict"
            if isinstance(order.message, Proceed) and order.message.incident != self._recovered:
                self._recovered = order.message.incident
                assert not self._controller_host.controller.membership.lost, "all go on without a lost node"
                self._world.invariants.proceed(order.message)
            if isinstance(order.message, Dump):
                self._dump(order.rank, order.message)
            if isinstance(order.message, Regroup):
                self._regroup(order.message)
        elif not isinstance(order, Verdict):
            assert self._verdict is None, "an order after the verdict"
            if isinstance(order, Publish):
                written = {group for group, step in self._reported.items() if step == order.step}
                assert written == set(self._world.job.groups), "a publish without every group written"

    def _regroup(self, order: Regroup) -> None:
        """Check that no rank leaves its loop before the step is on disk, or could not be saved."""
        invariants, incident = self._world.invariants, self._controller_host.controller.incident
        assert incident is not None
        is_on_disk = order.step in invariants.saved or invariants.regular(order.step)
        assert is_on_disk or incident.regrouping.unsaved, f"step {order.step} is not on disk yet"

    def _dump(self, rank: int, order: Dump) -> None:
        job = self._world.job
        for part in order.groups:
            assert rank in part.ranks, "a rank takes part in what is not its group"
            assert part.writer in job.groups[part.group], "a rank writes files of another group"
            assert len(part.holders) == job.size(part.group), "a shard is missing from a dump"
            assert not self._dead.intersection(part.ranks), "a dead rank takes part"
            for index, holder in enumerate(part.holders):
                held_shards = {(s.group, s.index) for s in job.shares[holder]}
                assert (part.group, index) in held_shards, "a rank is asked for a shard that it has not"
                assert self._frozen[holder].provides(order.step), "a rank is asked for a step that it has not"

    def after_decision(self) -> None:
        """Check the controller after each message."""
        controller, time_now = self._controller_host.controller, self._world.clock.now
        verdict, incident = controller.verdict, controller.incident
        assert self._verdict is None or verdict is self._verdict, "two verdicts"
        if incident is not None and not self._world.faults.causes:
            raise AssertionError("an incident without a fault")
        if incident is not None and verdict is None:
            latest = max(incident.state.opened_at, self._moved_at) + self._world.timeout_s
            if self._attempt != incident.state.writing.attempt:
                self._attempt, self._attempt_at = incident.state.writing.attempt, time_now
            if incident.regrouping.begun_at:  # after a save that ran out of time
                latest = max(latest, self._attempt_at) + incident.regrouping.timeout_s
                if incident.state.stage is Stage.FINDING:
                    latest += self._world.timeout_s / 20
            assert time_now < latest + 1.0, "an incident that lasts too long"
        if verdict is not None and self._verdict is None:
            self._verdict = verdict
            self._judge(verdict)

    def _judge(self, verdict: Verdict) -> None:
        world, job, invariants = self._world, self._world.job, self._world.invariants
        members = self._controller_host.controller.membership
        if not self._controller_host.term:
            assert set(verdict.lost) == self._lost, f"nodes {self._lost} are lost"
            assert members.agents.isdisjoint(verdict.lost), "a node counts as lost whose agent is there"
        if verdict.outcome == "saved":
            assert verdict.step in invariants.saved or invariants.regular(verdict.step), (
                "saved, and not on disk"
            )
            assert world.disk.tracker is not None
            assert world.disk.tracker >= verdict.step, "saved, and the tracker names an earlier step"
            assert verdict.step > job.origin
        agent, term = self._controller_host.agent, self._controller_host.term
        if world.agents[self._controller_host.home] is not agent:
            return  # its node has lost its place; the others train on
        if sum(hub.term == term for hub in world.hubs.values()) > 1:
            # This does not hold today: both use folders of the same names, and each removes them at its end.
            return
        if agent.machine in world.network.cut:
            return  # it knows only its own node, and others may save a later step
        if self._controller_host.term and world.network.mended:
            return  # agents that it could reach may not have come to it
        if not world.faults.unexplained and world.clock.now > invariants.latest_fault + EXPLAINED_S:
            assert verdict.cause_rank in world.faults.causes or verdict.cause_rank == -1, (
                f"rank {verdict.cause_rank} is blamed, and nothing happened to it"
            )
        if world.faults.disk_fails or not invariants.has_sound_holders(self._controller_host.home):
            return
        if _has_just_come(self._controller_host):
            return
        if "held is not known" in verdict.line:
            stopped = any(agent.stopped for agent in world.machines.values())
            is_cut = bool(world.network.cut)  # a silence that has not been noticed
            assert self._lost or stopped or is_cut, "what was told is not known"
            return  # by design: training does not wait until the standby agents know of a change
        if world.disk.is_ahead(max(invariants.begun, job.origin + 1), world.generation):
            return  # a call that hung in the previous generation has ended, and the next one starts from it
        if invariants.begun <= job.origin:
            # A save of a step that not all ranks have reached may be tried, although its only holder is on a
            # machine whose disk hangs, or is unsound.
            tried = verdict.outcome == "lost" and bool(world.faults.disk_hangs_on or world.faults.unsound)
            assert tried or verdict.outcome in ("nothing", "saved"), verdict.line
        else:
            assert verdict.outcome == "saved", f"step {invariants.begun} is lost: {verdict.line}"
            assert verdict.step >= invariants.begun, f"step {invariants.begun} is lost: {verdict.line}"
