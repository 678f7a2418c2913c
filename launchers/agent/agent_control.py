"""The work of an agent on its control thread: connecting the workers of a node with the controller.

One event loop in one thread per `ttprun`. All methods run on the control thread, except `begin`, `connect`
and `close`, which torch's thread calls while no worker runs. `Node` has the methods for torch's thread.
"""

from __future__ import annotations

import contextlib
import enum
import queue
import subprocess
import threading
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path

from adaptor import hooks, text
from adaptor.config import Config
from adaptor.controller.membership import Membership
from adaptor.descriptors import Descriptors
from adaptor.errors import CheckpointError
from adaptor.hooks import AgentHooks
from adaptor.launchers.agent import worker_watch
from adaptor.launchers.agent.control_thread import ControlThread
from adaptor.launchers.agent.host_copies import CopyFiles, CopyKeeper
from adaptor.launchers.agent.save_folder_tasks import JobLease, SaveFolderTasks
from adaptor.launchers.agent.worker_processes import Workers
from adaptor.launchers.agent.worker_watch import WorkerNews
from adaptor.launchers.control.controller_client import ControllerClient
from adaptor.launchers.control.controller_host import ControllerHost
from adaptor.launchers.records.job_records import JobRecords
from adaptor.launchers.spares.replacements import Replacements, Starter
from adaptor.launchers.spares.spare_gate import SpareGate, StartCounts, fill_online
from adaptor.launchers.spares.spare_pool import Spares
from adaptor.protocol import environment
from adaptor.protocol.messages import (
    Addressed,
    AgentTerminationRequested,
    BoardRecord,
    ControllerToAgent,
    Copied,
    Dismissed,
    Endpoint,
    EndRank,
    Exit,
    FillPlaces,
    Find,
    Freeze,
    FromAgent,
    Layout,
    Modules,
    PlacesFilled,
    Prepare,
    Publish,
    Raised,
    Recovered,
    Replace,
    TerminationRequested,
    Verdict,
)
from adaptor.protocol.spare_messages import Gate

# Descriptors reserved for an incident: folders and files of a checkpoint, the log, the report.
DESCRIPTORS = 16


class Forwarding(enum.Enum):
    """The use that the agent makes of messages from workers of the node, and of reports of their deaths."""

    IGNORED = "no generation is open: nobody waits for the message"
    SENT = "the message goes to the controller"
    RELEASES = "the agent ends its workers itself: a worker that waits to be a holder is told to exit"
    JUDGED_HERE = "the controller has left after the end of the job: a failure gets its verdict here"


class AgentControl:
    """The control of one agent, generation after generation.

    Args:
        job: the job id given by the user; '' without one.
        scratch: a folder of this agent.
        copies: the copies in host memory.
        parts: the hooks of optional parts.

    Attributes:
        records: the files of the job for operators.
        gate: where spare nodes wait; None on nodes that neither are node 0 nor stand by for it.
        keeper: gives host copies to another node; None without host copies or other nodes.
        makes_copies: workers of this node have begun to make host copies.
        client: the connection to the controller; None while no generation is open.
        news: the messages of the workers of this generation, summarised.
        verdict: on this generation; None before the verdict.
        dismissed: every worker of the job has ended, or this node has left the job.
        recovered: incidents after which training goes on, with the paths of their reports.
        given: places of lost nodes given to spare nodes during training, with the new owners.
        reaped: after a verdict: every worker has ended.
        settled: after a verdict: no known work in the save folder is left.
    """

    def __init__(
        self,
        config: Config,
        job: str,
        max_restarts: int,
        scratch: Path,
        copies: CopyFiles,
        parts: Sequence[AgentHooks] = (),
    ) -> None:
        self._config = config
        self._scratch = scratch
        self.thread = ControlThread(self._on_failure, self._on_broken_off)
        self.workers = Workers(self.thread.loop, self._hear)
        self.copies = copies
        self.workers.copies_of = lambda rank: copies.steps_of(rank, self.generation)
        self.hooks = parts
        self.records = JobRecords(config, job, max_restarts, self.workers, self._newest_copy, parts)
        self.gate: SpareGate | None = None
        self.keeper: CopyKeeper | None = None
        self.makes_copies = False
        self.node = 0
        self.generations_begun = 0
        self.generation = ""
        self.client: ControllerClient | None = None
        self._folder_tasks = SaveFolderTasks()
        self._replacements = Replacements(self.workers, config.spares)
        self._descriptors = Descriptors(0)
        self.lease = JobLease(scratch, config.timeout_s)
        self._forwarding = Forwarding.IGNORED
        self.verdict: Verdict | None = None
        self.dismissed = False
        self._may_restart = True
        self.news = WorkerNews()
        self.recovered: queue.SimpleQueue[tuple[Recovered, str]] = queue.SimpleQueue()
        self.given: queue.SimpleQueue[dict[int, str]] = queue.SimpleQueue()
        self._counts = StartCounts()
        self._joins = False
        self._has_workers = False  # those of this generation have been started
        self.reaped = threading.Event()
        self.settled = threading.Event()

    def begin(
        self,
        ranks: Sequence[int],
        node: int,
        nodes: int,
        *,
        may_restart: bool,
        counts: StartCounts,
        joins: bool,
    ) -> None:
        """Open a generation; `connect` follows. The arguments are those of `Node.begin`."""
        self.node = node
        self._may_restart, self._counts, self._joins = may_restart, counts, joins
        hooks.each(self.hooks, lambda hook: hook.begins(node, nodes))
        if node != 0:
            self.lease.release()  # rank 0, which takes the lease, is now on another node
        self.lease.watch("", "")  # workers of this side take the lease from now on
        self.generations_begun += 1
        self._descriptors.release()
        self._descriptors = Descriptors(DESCRIPTORS)
        self._folder_tasks.saves.clear()
        self._has_workers = False
        self.verdict = None
        self.dismissed = False
        self.news = WorkerNews(ranks)
        self.reaped.clear()
        self.settled.clear()
        self.records.begin(self.generations_begun)

    def expect_saves(self, save: str) -> None:
        """Note where the workers of a spare node will save: this agent may take over before they train."""
        self._folder_tasks.saves.add(save)

    def connect(self, client: ControllerClient) -> None:
        """Send messages to the controller through `client` from now on."""
        self.client = client
        self._forwarding = Forwarding.SENT

    def close(self) -> None:
        """Close the parts that outlive a generation, after the end of the thread."""
        self._folder_tasks.close()
        self._descriptors.release()
        # Lost nodes may live behind a cut network, and go on by the lease.
        self.lease.release(stays=self.verdict is not None and bool(self.verdict.lost))
        self.records.close()
        hooks.each(self.hooks, lambda hook: hook.close())

    @property
    def controller_host(self) -> ControllerHost | None:
        """Return the host of the controller, None if another node runs the controller."""
        return self.client.controller_host if self.client is not None else None

    @property
    def has_lost_node_0(self) -> bool:
        """Return whether node 0 is known to be lost, and no spare node has come in its place."""
        client, host = self.client, self.controller_host
        lost = host.controller.membership.lost if host is not None else ()
        return client is not None and (0 in client.succession.lost_homes or 0 in lost)

    @property
    def report_path(self) -> str:
        """Return the path of the last report, or the node that writes the report; '' without a report.

        A verdict of the agent itself has no report: the last report belongs to an earlier incident.
        """
        reporter = self.client.reporter if self.client is not None else None
        if reporter is None or (self.verdict is not None and not self.verdict.incident):
            return ""
        return self.records.report.path if reporter == self.node else f"on node {reporter}"

    @property
    def incident_is_open(self) -> bool:
        """Return whether an incident is known on this node without its verdict."""
        host = self.controller_host
        is_known = host.controller.incident is not None if host is not None else self.news.noticed > 0.0
        return is_known and self.verdict is None

    def why_not_drill(self, members: Membership) -> str:
        """Return why the job would end after the end of a rank; "" where the job recovers."""
        is_online = self._config.spares and not any(layout.online for layout in members.layouts.values())
        if self._may_restart or is_online:
            return ""
        return "no restart is left (--max-restarts), and no spare process replaces a rank: the job would end"

    def _newest_copy(self) -> int | None:
        return self.copies.newest(is_kept=self.keeper is not None) if self.makes_copies else None

    def _on_broken_off(self, reason: str) -> None:
        """End all workers: nothing runs on the control thread any more."""
        self.workers.end_the_living()
        if self.verdict is None:
            line = f"the control thread of ttprun has failed: {reason}; nothing more can be saved here"
            self.verdict = worker_watch.verdict_here(line, stop="its control thread has failed")
        self.reaped.set()
        self.settled.set()

    def _on_failure(self, error: BaseException) -> None:
        """Have the job saved and ended after an error on the control thread."""
        description = text.describe(error)
        try:
            if self.verdict is not None:
                self.reaped.set()
                self.settled.set()
            else:
                self._forward(AgentTerminationRequested(self.node, "", description))
        except Exception as another:
            description = f"{description}, then {text.describe(another)}"
            self.judge(f"ttprun has failed: {description}", stop="its control thread has failed")

    def _forward(self, message: FromAgent) -> None:
        """Handle `message` as the state `Forwarding` says."""
        match self._forwarding:
            case Forwarding.SENT:
                assert self.client is not None
                self.client.send(message)
            case Forwarding.RELEASES:
                self._release_worker(message)
            case Forwarding.JUDGED_HERE:
                if failure := worker_watch.failure_in(message):
                    self.judge(failure)

    def judge(self, description: str, stop: str = "") -> None:
        """Give the verdict where no controller gives one.

        Args:
            description: the failure.
            stop: why the job is not started again.
        """
        if self.verdict is None:
            line = f"{description}; nothing more can be saved from node {self.node}"
            self.obey(worker_watch.verdict_here(line, stop))
            for rank in sorted(self.workers.alive):  # a worker that exits by itself shows its error
                self.workers.order(rank, Exit(0, blamed=rank == self.news.first_raised))

    def _hear(self, message: FromAgent) -> None:
        """Pass on a message of a worker of this node, or the report of its death."""
        self.news.note(message)
        match message:
            case Layout(save_folder=save):
                self.makes_copies = message.copied > 0
                self._replacements.hear_layout(message)
                if message.in_parts:
                    self._folder_tasks.expect_parts()
                if save:
                    self._folder_tasks.saves.add(save)
                    if self.node == 0 and not self._joins:
                        self.lease.keep(Path(save))
                    hooks.each(self.hooks, lambda hook: hook.saves_to(Path(save)))
            case Copied():
                if self.keeper is not None:
                    self.keeper.copied()
                return
            case Modules():
                imports = self._replacements.hear(message)
                if imports is not None and self.gate is not None:
                    self.gate.tell_imports(imports)
                return  # the controller does not need the modules
        self._forward(message)

    async def stop_reporting(self) -> None:
        """Stop reporting to the controller; workers that wait to be holders are told to exit."""
        self._stop_sending(Forwarding.RELEASES)

    def _stop_sending(self, forwarding: Forwarding) -> None:
        """Stop sending to the controller, and ignore its loss."""
        self._forwarding = forwarding
        if self.client is not None:
            self.client.rest()

    def _release_worker(self, message: FromAgent) -> None:
        """Tell a worker that waits to be a holder to exit: nobody needs the state."""
        if isinstance(message, Raised | TerminationRequested):
            self.obey(Addressed(message.rank, Exit(0)))

    async def say(self, message: FromAgent) -> None:
        """Send a message of this agent to the controller, after all that its workers had sent before.

        A request to end that overtook a layout would end a job that trains as a job that does not yet.
        """
        await self.workers.read_sent()
        self._forward(message)

    async def watch(self, processes: Mapping[int, subprocess.Popen[bytes]], starter: Starter) -> None:
        """Watch the workers and their boards.

        Args:
            processes: by rank.
            starter: starts replacements.
        """
        newcomers = processes if self._joins else ()
        self._replacements.begin(starter, spares_alone=not self._may_restart, newcomers=newcomers)
        folder = environment.stack_folder(self._config.log_path, self.generation)
        self.workers.watch(processes, folder, self._scratch)
        self._has_workers = True
        self.thread.spawn(
            worker_watch.watch(
                self.node,
                self._config.hang_s,
                self.workers,
                look=self._look,
                moved=lambda: self._folder_tasks.moved,
                starting=self._replacements.starting,
                report=self._forward,
            )
        )
        self.lose_absent()

    def lose_absent(self) -> None:
        """Report spare nodes that took a place and ended before their agents came to the controller.

        Nothing is reported before the workers of this node have been started: until then workers cannot be
        ended.
        """
        if self.gate is not None and self.controller_host is not None and self._has_workers:
            for hello in self.gate.gone.values():
                self.controller_host.lose_absent(hello)

    def _job_is_over(self) -> bool:
        controller_host = self.controller_host
        return not self.workers.alive and (
            controller_host is None or controller_host.controller.membership.everyone_is_dead
        )

    def obey(self, order: ControllerToAgent) -> None:
        """Carry out an order of the controller, or pass the order on to its worker."""
        match order:
            case Addressed(rank=rank, message=message):
                if isinstance(message, Freeze):
                    self.news.note_incident()
                self.workers.order(rank, message)
            case Prepare() | Publish() | Find():
                self._descriptors.release()
                self.thread.spawn(self._carry_out(order))
            case Replace():
                self.thread.spawn(self._replace(order))
            case EndRank(rank=rank):
                self.workers.end_the_living({rank})
            case FillPlaces():
                self.thread.spawn(self._fill_places(order))
            case Recovered():
                self._end_incident(order)
            case Dismissed():
                self.dismissed = True
                self._stop_sending(Forwarding.JUDGED_HERE)
                assert self.client is not None
                for report in self.client.succession.said:  # a controller that has left gives no verdict
                    if failure := worker_watch.failure_in(report):
                        self.judge(failure)
            case Verdict():
                self.verdict = order
                if self.node:
                    self.lease.mark_leaving()  # rank 0, which takes the lease next, has another agent
                elif self._joins and (host := self.controller_host) is not None:
                    (agent,) = host.controller.membership.agents_of([self.node])
                    self.lease.watch(order.save_folder, agent)
                self.thread.spawn(self._reap_workers())

    async def _carry_out(self, order: Prepare | Publish | Find) -> None:
        self._forward(await self._folder_tasks.do(order, self.node, self.generation))

    async def _replace(self, order: Replace) -> None:
        self._descriptors.release()
        if (failed := await self._replacements.replace(order, self._wants_replacements)) is not None:
            self._forward(failed)

    async def _fill_places(self, order: FillPlaces) -> None:
        """Give the places of lost nodes to spare nodes, whose agents then connect to the controller."""
        host, client = self.controller_host, self.client
        assert host is not None
        assert client is not None
        assert client.invitation is not None

        async def refuses(lost: Collection[int]) -> str:
            """Note the loss in the lease, once spares have answered: the other side may have them."""
            refusal = await self.note_lost(lost)
            return refusal or ("" if self._wants_replacements() else "the recovery is over")

        def report(filled: PlacesFilled) -> None:
            if filled.owners:
                self.given.put(filled.owners)
            self._forward(filled)

        controller = Gate(client.address, client.invitation.encode().decode())
        await fill_online(self.gate, host, order, self._counts, controller, refuses, report)

    async def note_lost(self, lost: Collection[int], store: str = "", *, leaving: bool = False) -> str:
        """Note in the lease that the job goes on without the nodes `lost`; return why not, or "".

        Args:
            store: the address of a new rendezvous store; "": the store stays.
            leaving: as in `lease.go_on_without`.
        """
        assert self.controller_host is not None
        members = self.controller_host.controller.membership
        return await self._folder_tasks.in_thread(
            self.lease.go_on_without,
            members.save_folder,
            self.generation,
            members.agents_of(members.agents),
            members.agents_of(lost),
            is_first=self.node == 0 and not self._joins,
            store=store,
            leaving=leaving,
        )

    def take_given(self) -> dict[int, str]:
        """Return the new owners of places that are not in the rendezvous store yet, of other nodes than 0.

        A spare node in the place of node 0 writes its own name into its own store.
        """
        owners: dict[int, str] = {}
        while not self.given.empty():
            owners.update(self.given.get())
        owners.pop(0, None)
        return owners

    def use_store(self, store: Endpoint) -> None:
        """Note the rendezvous store in the place of a lost one, for nodes that come later."""
        self.lease.store = f"{store.address}:{store.port}"
        if self.gate is not None:
            self.gate.store = store

    def _wants_replacements(self) -> bool:
        return self._forwarding is Forwarding.SENT and self.verdict is None

    def _end_incident(self, order: Recovered) -> None:
        """Close an incident after which all ranks go on: inform the main thread, and reset."""
        self.recovered.put((order, self.report_path))
        if order.store is not None:
            self._come_to_store(order.store)
        self.news.end_incident()
        self.workers.end_incident()
        self._descriptors.release()
        self._descriptors = Descriptors(DESCRIPTORS)
        # The start of a spare takes milliseconds: the workers, which are told next, do not wait for it.
        self.thread.loop.call_soon(self._replacements.end_incident)

    def _come_to_store(self, store: Endpoint) -> None:
        """Use the rendezvous store of a spare node in the place of node 0, and note it in the lease."""

        async def note_in_lease() -> None:
            await self.note_lost((), self.lease.store)

        self.use_store(store)
        if self.controller_host is not None:
            self.thread.spawn(note_in_lease())

    async def _reap_workers(self) -> None:
        """Have the workers of this node end after a verdict."""
        self._replacements.end_newcomers()
        await worker_watch.reap(self.workers, self._job_is_over)
        self.reaped.set()
        try:
            await worker_watch.clean_up(
                self._folder_tasks, self.controller_host, self.verdict, self.generation
            )
        finally:
            self.settled.set()  # also after an error: torch's thread waits

    def _look(self, boards: Sequence[BoardRecord]) -> None:
        if self.controller_host is not None:
            waiting = self.gate.waiting if self.gate is not None else 0
            self.records.look(boards, self.controller_host, self.node, self.generations_begun, waiting)
        if self.news.training_began is not None and not self.news.noticed:
            self._replacements.look(boards, self.news.training_began[0])

    @property
    def spares(self) -> Spares:
        """Return the processes that wait to be workers."""
        return self._replacements.spares

    async def end(self, *, is_last: bool) -> None:
        """End the generation and all of its tasks.

        Args:
            is_last: there is no next generation.
        """
        self._forwarding = Forwarding.IGNORED
        await self.thread.cancel_tasks()
        await self._replacements.end(is_last=is_last)
        self.records.look_at_last_moments(self.controller_host)
        await self.workers.end()
        host, client = self.controller_host, self.client
        self.client = None
        if client is None:
            return
        # Other nodes may still be at work in the folder; the next job's first rank also cleans the folder.
        save = host.controller.membership.save_folder if host is not None and host.nodes == 1 else ""
        if save and not self._folder_tasks.busy:
            # The next start may complete a regular save on a disk of this node alone.
            with contextlib.suppress(CheckpointError):
                await self._folder_tasks.clean(Path(save), saves=self.node == 0)
        await client.close()
