"""The work of an agent on its control thread: it connects the workers of a node with the controller.

One event loop in one thread per `ttprun`; the methods of this file run on it, but for `begin`, `connect` and
`close`, which torch's thread calls while no worker runs. `Node` is what torch's thread sees of it.
"""

from __future__ import annotations

import contextlib
import enum
import queue
import subprocess
import threading
from collections.abc import Coroutine, Mapping, Sequence
from pathlib import Path

from adaptor import text
from adaptor.config import Config
from adaptor.descriptors import Descriptors
from adaptor.errors import CheckpointError
from adaptor.launchers.agent import board_watch, worker_shutdown
from adaptor.launchers.agent.control_thread import ControlThread
from adaptor.launchers.agent.copy_files import CopyFiles
from adaptor.launchers.agent.copy_keeper import CopyKeeper
from adaptor.launchers.agent.generation_state import WorkerNews
from adaptor.launchers.agent.save_folder_tasks import SaveFolderTasks
from adaptor.launchers.agent.start_counts import StartCounts
from adaptor.launchers.agent.worker_processes import Workers
from adaptor.launchers.control.controller_client import ControllerClient
from adaptor.launchers.control.controller_host import ControllerHost
from adaptor.launchers.records.job_lease import JobLease
from adaptor.launchers.records.job_records import JobRecords
from adaptor.launchers.spares.replacements import Replacements, WorkerStarter
from adaptor.launchers.spares.slot_filling import fill_online
from adaptor.launchers.spares.spare_gate import SpareGate
from adaptor.launchers.store.job_uploads import JobUploads, OutputUploads
from adaptor.protocol import stack_files
from adaptor.protocol.messages import (
    Addressed,
    AgentTerminationRequested,
    BoardRecord,
    ControllerToAgent,
    Copied,
    Dismissed,
    Exit,
    FillPlaces,
    Find,
    Freeze,
    FromAgent,
    Layout,
    Modules,
    Prepare,
    Publish,
    Raised,
    Recovered,
    Replace,
    TerminationRequested,
    Verdict,
)

# Descriptors that are kept for an incident: folders and files of a checkpoint, the log, the report.
DESCRIPTORS = 16


class Forwarding(enum.Enum):
    """The use that the agent makes of a message of a worker of this node, or of the report of its death."""

    IGNORED = "no generation is open: nobody waits for it"
    SENT = "it goes to the controller"
    RELEASES = "the agent ends its workers itself: one that waits to be a holder is told to exit"
    JUDGED_HERE = "the controller has left after the end of the job: a failure gets its verdict here"


class AgentControl:
    """The control of one agent, generation after generation.

    Args:
        config: the settings.
        job: the id that the user gave to the job; '' where there is none.
        max_restarts: how many restarts the job may make.
        scratch: a folder of this agent.
        copies: the copies in host memory that it holds.

    Attributes:
        thread: the control thread.
        workers: of this node.
        records: what operators read of the job.
        gate: where spare nodes wait; None: not here.
        keeper: gives host copies to another node; None: there are none, or no other node.
        client: the connection to the controller; None while no generation is open.
        news: what the workers of this generation have told.
        verdict: on this generation; None: there is none yet.
        dismissed: every worker of the job has ended, or this node has left it.
        recovered: incidents after which training goes on, with the paths of their reports.
        given: places of lost nodes that were given to spare nodes while others train, with their owners.
        reaped: after a verdict: every worker has gone, or was ended.
        settled: and nothing is at work in the save folder, as far as that is known.
    """

    def __init__(self, config: Config, job: str, max_restarts: int, scratch: Path, copies: CopyFiles) -> None:
        self._config = config
        self._scratch = scratch
        self.thread = ControlThread(self._on_failure, self._on_broken_off)
        self.workers = Workers(self.thread.loop, self._hear)
        self._copies = copies
        self.records = JobRecords(config, job, max_restarts, self.workers, self._newest_copy)
        self.gate: SpareGate | None = None
        self.keeper: CopyKeeper | None = None
        self.node = 0
        self.generations_begun = 0
        self.generation = ""
        self.client: ControllerClient | None = None
        self._folder_tasks = SaveFolderTasks()
        self._replacements = Replacements(self.workers, config.spares if config.online_s else 0)
        self._descriptors = Descriptors(0)
        self.lease = JobLease(scratch, config.timeout_s)
        self._checkpoint_uploads, self._output_uploads = JobUploads(config), OutputUploads(config)
        self.uploads = self._checkpoint_uploads, self._output_uploads  # in the order of their importance
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
        for one in self.uploads:
            one.place(node, nodes)
        self._output_uploads.begin_outputs()
        if node != 0:
            self.lease.release()  # rank 0, which takes the lease, is on another node from now on
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

    def connect(self, client: ControllerClient) -> None:
        """From now on messages go to the controller by way of `client`."""
        self.client = client
        self._forwarding = Forwarding.SENT

    def close(self) -> None:
        """Close what outlives a generation, once the thread has ended."""
        self._folder_tasks.close()
        self._descriptors.release()
        self.lease.release()
        self.records.close()
        for one in self.uploads:
            one.close()

    @property
    def controller_host(self) -> ControllerHost | None:
        """Return the host of the controller, None if it runs on another node."""
        return self.client.controller_host if self.client is not None else None

    @property
    def report_path(self) -> str:
        """Return the path of the last report, or the node that writes it; '' if no controller has.

        A verdict that this agent gave by itself has none: the last one is of an earlier incident.
        """
        reporter = self.client.reporter if self.client is not None else None
        if reporter is None or (self.verdict is not None and not self.verdict.incident):
            return ""
        return self.records.report.path if reporter == self.node else f"on node {reporter}"

    @property
    def incident_is_open(self) -> bool:
        """Return whether an incident is known here whose verdict has not come."""
        host = self.controller_host
        is_known = host.controller.incident is not None if host is not None else self.news.noticed > 0.0
        return is_known and self.verdict is None

    def _newest_copy(self) -> int | None:
        return self._copies.newest(is_kept=self.keeper is not None) if self._config.host_copy else None

    def _on_broken_off(self, reason: str) -> None:
        """End what is left: nothing runs on the control thread any more."""
        self.workers.end_the_living()
        if self.verdict is None:
            line = f"the control thread of ttprun has failed: {reason}; nothing more can be saved here"
            self.verdict = worker_shutdown.verdict_here(line, stop="its control thread has failed")
        self.reaped.set()
        self.settled.set()

    def _on_failure(self, error: BaseException) -> None:
        """Have the job saved and ended after an error on the control thread, on which it may depend."""
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
        """Do with `message` what the state says."""
        match self._forwarding:
            case Forwarding.SENT:
                assert self.client is not None
                self.client.send(message)
            case Forwarding.RELEASES:
                self._release_worker(message)
            case Forwarding.JUDGED_HERE:
                if failure := worker_shutdown.failure_in(message):
                    self.judge(failure)

    def judge(self, description: str, stop: str = "") -> None:
        """The verdict where no controller gives one; `stop`: why the job is not started again."""
        if self.verdict is None:
            line = f"{description}; nothing more can be saved from node {self.node}"
            self.obey(worker_shutdown.verdict_here(line, stop))
            for rank in sorted(self.workers.alive):  # else they would be ended, and show nothing
                self.workers.order(rank, Exit(0, blamed=rank == self.news.first_raised))

    def _hear(self, message: FromAgent) -> None:
        """Pass on a message of a worker of this node, or the report of its death."""
        self.news.note(message)
        match message:
            case Layout(save=save):
                self._replacements.hear_layout(message)
                if message.in_parts:
                    self._folder_tasks.expect_parts()
                if save:
                    self._folder_tasks.saves.add(save)
                    if self.node == 0:
                        self.lease.keep(Path(save))
                    self._checkpoint_uploads.begin(Path(save))
            case Copied():
                if self.keeper is not None:
                    self.keeper.copied()
                return
            case Modules():
                imports = self._replacements.hear(message)
                if imports is not None and self.gate is not None:
                    self.gate.tell_imports(imports)
                return  # it stays here
        self._forward(message)

    async def stop_reporting(self) -> None:
        """Tell the controller nothing more; workers that wait to be holders are told to exit."""
        self._stop_sending(Forwarding.RELEASES)

    def _stop_sending(self, forwarding: Forwarding) -> None:
        """Send nothing more to the controller, and ignore its loss."""
        self._forwarding = forwarding
        if self.client is not None:
            self.client.rest()

    def _release_worker(self, message: FromAgent) -> None:
        """Tell a worker to exit that waits to be a holder: its state is not needed."""
        if isinstance(message, Raised | TerminationRequested):
            self.obey(Addressed(message.rank, Exit(0)))

    async def say(self, message: FromAgent) -> None:
        """Send a message of this agent to the controller."""
        self._forward(message)

    async def watch(self, processes: Mapping[int, subprocess.Popen[bytes]], starter: WorkerStarter) -> None:
        """Watch the workers, `processes` by rank, and their boards; `starter` makes new ones."""
        newcomers = processes if self._joins else ()
        self._replacements.begin(starter, spares_alone=not self._may_restart, newcomers=newcomers)
        folder = stack_files.folder(self._config.log_path, self.generation)
        self.workers.watch(processes, folder, self._scratch)
        self._has_workers = True
        self.thread.spawn(
            board_watch.watch(
                self.node,
                self._config.hang_s,
                self.workers,
                look=self._look,
                moved=lambda: self._folder_tasks.moved,
                report=self._forward,
            )
        )
        self.lose_absent()

    def lose_absent(self) -> None:
        """Tell the controller which spare nodes have taken a place, and ended before their agents came to it.

        Not before the workers of this node have been started: until then they cannot be ended. They may have
        died since.
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
        """Do what the controller orders, or pass it on to the worker that it is for."""
        match order:
            case Addressed(rank=rank, message=message):
                if isinstance(message, Freeze):
                    self.news.note_incident()
                self.workers.order(rank, message)
            case Prepare() | Publish() | Find():
                self._descriptors.release()
                self.thread.spawn(self._answer(self._folder_tasks.do(order, self.node, self.generation)))
            case Replace():
                self.thread.spawn(self._replace(order))
            case FillPlaces():
                self.thread.spawn(self._fill_places(order))
            case Recovered():
                self._end_incident(order)
            case Dismissed():
                self.dismissed = True
                self._stop_sending(Forwarding.JUDGED_HERE)
                assert self.client is not None
                for (
                    early_message
                ) in self.client.said:  # while the controller left: no verdict of it comes any more
                    if failure := worker_shutdown.failure_in(early_message):
                        self.judge(failure)
            case Verdict():
                self.verdict = order
                self.thread.spawn(self._reap_workers())

    async def _answer(self, work: Coroutine[object, None, FromAgent]) -> None:
        self._forward(await work)

    async def _replace(self, order: Replace) -> None:
        self._descriptors.release()
        failed = await self._replacements.replace(order, self._wants_replacements)
        if failed is not None:
            self._forward(failed)

    async def _fill_places(self, order: FillPlaces) -> None:
        """Give the places of lost nodes to spare nodes, whose agents come to the controller then."""
        assert self.controller_host is not None
        filled = await fill_online(
            self.gate,
            self.controller_host.controller.membership,
            order,
            self._counts,
            self._wants_replacements,
        )
        if filled.owners:
            self.given.put(filled.owners)
        self._forward(filled)

    def _wants_replacements(self) -> bool:
        return self._forwarding is Forwarding.SENT and self.verdict is None

    def _end_incident(self, order: Recovered) -> None:
        """Close an incident after which all ranks go on: pass it to the main thread, and reset."""
        self.recovered.put((order, self.report_path))
        self.news.end_incident()
        self.workers.end_incident()
        self._descriptors.release()
        self._descriptors = Descriptors(DESCRIPTORS)
        self._replacements.end_incident()

    async def _reap_workers(self) -> None:
        """Have the workers of this node end after a verdict."""
        self._replacements.end_newcomers()
        await worker_shutdown.reap(self.workers, self._job_is_over)
        self.reaped.set()
        try:
            await worker_shutdown.clean_up(
                self._folder_tasks, self.controller_host, self.verdict, self.generation
            )
        finally:
            self.settled.set()  # whatever happened: torch's thread waits for it

    def _look(self, boards: Sequence[BoardRecord]) -> None:
        if self.controller_host is not None:
            waiting = self.gate.waiting if self.gate is not None else 0
            self.records.look(boards, self.controller_host, self.node, self.generations_begun, waiting)
        if self.news.training_began is not None and not self.news.noticed:
            self._replacements.look(boards, self.news.training_began[0])

    async def end(self) -> None:
        """End the generation, with all that is at work for it."""
        self._forwarding = Forwarding.IGNORED
        await self.thread.cancel_tasks()
        await self._replacements.end()
        self.records.look_at_last_moments(self.controller_host)
        await self.workers.end()
        client, self.client = self.client, None
        if client is not None:
            # Other nodes may still be at work in the folder; the next job's first rank cleans it, too.
            if (
                client.controller_host is not None
                and client.alone
                and client.controller_host.controller.membership.save
                and not self._folder_tasks.busy
            ):
                save = Path(client.controller_host.controller.membership.save)
                # The next start may complete a regular save that is on a disk of this node's own.
                with contextlib.suppress(CheckpointError):
                    await self._folder_tasks.clean(save, saves=self.node == 0)
            await client.close()
