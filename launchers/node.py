"""What an agent does in its control thread: it connects the workers of a node with the controller.

One event loop in one thread per `ttprun`. A generation is the time from one start of all workers to the next;
`begin`, `meet` and `watch` open it, `end` closes it. In a file system it makes only a scratch folder, for the
files of multiprocessing in workers that may be killed.
"""

from __future__ import annotations

import contextlib
import enum
import os
import queue
import socket
import subprocess
import tempfile
import threading
import time
from collections.abc import Coroutine, Mapping, Sequence
from pathlib import Path
from typing import Protocol

from adaptor import output, text
from adaptor.config import Config
from adaptor.controller.recurrence import Recurrence
from adaptor.descriptors import Descriptors
from adaptor.errors import AdaptorError, CheckpointError, ConfigError
from adaptor.launchers import after_verdict, board_watch, invitation, notifier, tls
from adaptor.launchers.control_thread import ControlThread, ControlThreadError
from adaptor.launchers.controller_client import ControllerClient
from adaptor.launchers.controller_host import ControllerHost
from adaptor.launchers.incident_report import IncidentReport
from adaptor.launchers.invitation import Invitation
from adaptor.launchers.job_files import JobFiles
from adaptor.launchers.job_lease import JobLease
from adaptor.launchers.job_server import JobServer
from adaptor.launchers.job_status import JobStatus
from adaptor.launchers.log import Log, tell_error
from adaptor.launchers.replacements import Replacements, WorkerStarter
from adaptor.launchers.save_folder_tasks import SaveFolderTasks
from adaptor.launchers.waiting import wait_for
from adaptor.launchers.worker_processes import Workers
from adaptor.operations.job_folder import name_of
from adaptor.protocol import stack_files
from adaptor.protocol.environment import AGENT, BOARD, BOARD_RANKS, GENERATION, IS_RESTART, SCRATCH
from adaptor.protocol.messages import (
    Addressed,
    AgentHello,
    AgentTerminationRequested,
    BoardRecord,
    ControllerToAgent,
    Died,
    Dismissed,
    Dying,
    Exit,
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


class RendezvousStore(Protocol):
    """The store over which the agents of a generation have met, of torch elastic."""

    def get(self, key: str) -> bytes: ...

    def set(self, key: str, value: bytes) -> None: ...


class Reports(enum.Enum):
    """What the agent does with a message of a worker of this node, or with the report of its death."""

    IGNORED = "no generation is open: nobody waits for it"
    SENT = "it goes to the controller"
    RELEASES = "the agent ends its workers itself: one that waits to be a holder is told to exit"
    JUDGED_HERE = "the controller has left after the end of the job: a failure gets its verdict here"


class Node:
    """The control thread of a node's agent, as its main thread calls it.

    Args:
        config: the settings.
        job: the id that the user gave to the job; '' where there is none.
        max_restarts: how many restarts the job may make.
    """

    def __init__(self, config: Config, job: str = "", max_restarts: int = 0) -> None:
        self._config = config
        self._tls = tls.load(config)
        self._control = ControlThread(self._on_failure, self._on_broken_off)
        self._workers = Workers(self._control.loop, self._hear)
        self._scratch = tempfile.TemporaryDirectory(prefix="ttp-", ignore_cleanup_errors=True)
        self._files = JobFiles(config.log_path, job)
        self._incident_report = IncidentReport(self._files, notifier.of_job(config))
        self._status = JobStatus(self._files, self._incident_report, max_restarts)
        self._server = JobServer(config, lambda: self._files.folder)
        self._log = Log(config)
        self._recurrence = Recurrence(config.no_progress)
        self._node = 0
        self._begun = 0  # generations
        self._generation = ""
        self._client: ControllerClient | None = None
        self._folder_tasks = SaveFolderTasks()
        self._replacements = Replacements(self._workers, config.spares if config.online_s else 0)
        self._descriptors = Descriptors(0)
        self._lease = JobLease(Path(self._scratch.name), config.timeout_s)
        self._reports = Reports.IGNORED
        self.verdict: Verdict | None = None
        self._dismissed = False
        self._may_restart = True
        self._unbegun: set[int] = set()  # ranks on which training has not begun
        self._first_raised = -1  # the rank of this node that has raised first
        self.noticed = 0.0  # when the fault was, in Unix seconds; 0: none is known
        self.training_began: tuple[int, float] | None = None  # the step, and when, on the monotonic clock
        # Incidents after which training goes on, with the paths of their reports.
        self.recovered: queue.SimpleQueue[tuple[Recovered, str]] = queue.SimpleQueue()
        self.reaped = threading.Event()  # after a verdict: every worker has gone, or was ended
        self.settled = threading.Event()  # and nothing is at work in the save folder, as far as that is known
        self._control.start()
        self._control.wait_for(self._workers.serve())

    # the agent's main thread

    def begin(
        self,
        ranks: Sequence[int],
        node: int,
        nodes: int,
        world_size: int,
        store: RendezvousStore,
        host: str,
        *,
        may_restart: bool = True,
    ) -> None:
        """Prepare a generation before its workers start.

        Make their boards, run the controller or connect to it, and set their environment.

        Args:
            store: the rendezvous store, which all agents share, with keys of this generation alone.
            host: the address of node rank 0.
            may_restart: whether all may be started again after this; if not, only a spare replaces a rank.
        """
        self._node = node
        self._may_restart = may_restart
        if node != 0:
            self._lease.release()  # rank 0, which takes the lease, is on another node from now on
        self._begun += 1
        self._descriptors.release()
        self._descriptors = Descriptors(DESCRIPTORS)
        self._folder_tasks.saves.clear()
        boards = self._workers.begin(ranks)
        os.environ[AGENT] = self._workers.address
        os.environ[BOARD] = boards.path
        os.environ[BOARD_RANKS] = boards.slots
        os.environ[SCRATCH] = self._scratch.name
        with contextlib.suppress(OSError):  # something may have cleaned up there; workers do without it
            Path(self._scratch.name).mkdir(mode=0o700, exist_ok=True)
        os.environ.update(self._lease.environment())
        self.verdict = None
        self._dismissed = False
        self._unbegun, self.noticed, self.training_began, self._first_raised = set(ranks), 0.0, None, -1
        self.reaped.clear()
        self.settled.clear()
        self._incident_report.begin(self._begun)
        client = ControllerClient(
            node=node,
            nodes=nodes,
            world_size=world_size,
            config=self._config,
            tls=self._tls,
            report=self._incident_report,
            online_s=self._config.online_s,
            obey=self._obey,
            on_controller_unreachable=lambda: self._judge("the controller's node is lost"),
            recurrence=self._recurrence,
        )
        self._client = client
        self._reports = Reports.SENT
        if node == 0:
            self._serve()
            hosts = client.host(host, restart=self._begun > 1, job=self._files.job)
            made: Invitation = self._control.wait_for(hosts)
            if nodes > 1:
                store.set(invitation.KEY, made.encode())
            hello = AgentHello(node, tuple(ranks), host=socket.gethostname(), pid=os.getpid())
            self._control.wait_for(self._say(hello))
        else:
            there = f"the controller, on node 0 of {nodes} at {host}"
            told: bytes = wait_for(lambda: store.get(invitation.KEY), lambda: there)
            join = client.join(host, told, tuple(ranks))
            made = wait_for(lambda: self._control.wait_for(join), lambda: there)
            self._files.job = name_of(made.job)  # after a take-over this node writes to the same folder
        self._generation = os.environ[GENERATION] = made.generation
        os.environ[IS_RESTART] = str(int(made.restart))

    def _serve(self) -> None:
        """Serve the files of the job from here; before workers were started what is wrong ends ttprun."""
        try:
            self._server.start()
        except (AdaptorError, OSError) as error:
            if self._begun == 1:
                raise ConfigError(f"TTP_SERVE is {text.say(error)}") from None
            output.tell(f"[ttp] this node does not serve the job: TTP_SERVE is {text.say(error)}")

    def meet(self) -> None:
        """Wait for the addresses of the nodes that stand by."""
        assert self._client is not None
        self._control.wait_for(self._client.meet())

    def watch(self, processes: Mapping[int, subprocess.Popen[bytes]], starter: WorkerStarter) -> None:
        """Watch the workers, which have been started; `processes` by rank; `starter` starts more of them."""
        self._control.wait_for(self._watch(processes, starter))

    @property
    def running(self) -> bool:
        """Return whether workers have been started and are alive."""
        return self._workers.running

    @property
    def save(self) -> str:
        """Return the save folder; '' if only another node knows it, or none does yet."""
        return self._controller_host.controller.membership.save if self._controller_host is not None else ""

    @property
    def report(self) -> str:
        """Return the path of the last report, or the node that writes it; '' if no controller has.

        A verdict that this agent gave by itself has none: the last one is of an earlier incident.
        """
        reporter = self._client.reporter if self._client is not None else None
        if reporter is None or (self.verdict is not None and not self.verdict.incident):
            return ""
        return self._incident_report.path if reporter == self._node else f"on node {reporter}"

    @property
    def over(self) -> bool:
        """Return True if every worker of the job has ended; until then one may fail, and all start again.

        The controller knows it, not the processes that live: those that died may still get a verdict.
        """
        return self._dismissed or (self._controller_host is not None and self._controller_host.dismissed)

    def leave(self, signal: str, grace_s: float) -> None:
        """Have the job saved, because this agent was told to end; a verdict says that it was in time.

        Args:
            signal: the name of the signal.
            grace_s: seconds to wait for the verdict.
        """
        if self.running:
            with contextlib.suppress(ControlThreadError):
                self._control.wait_for(self._say(AgentTerminationRequested(self._node, signal)))
            self.mark_leaving()
            self.reaped.wait(grace_s)

    def record_next_action(self, action: str) -> None:
        """Add to the report of the last incident what is done after its verdict."""
        with contextlib.suppress(RuntimeError):  # the control thread has ended
            self._control.loop.call_soon_threadsafe(self._incident_report.record_next_action, action)

    def mark_leaving(self) -> None:
        """The job ends, and may save until then: one that is started again waits for that."""
        self._lease.mark_leaving()

    def dismiss(self, *, at_once: bool = False) -> None:
        """Stop reporting: the workers are about to be ended by this agent, and their deaths are no failures.

        Args:
            at_once: kill them now, whatever they are doing.
        """
        with contextlib.suppress(ControlThreadError):
            self._control.wait_for(self._stop_reporting())
        if at_once:
            self._control.loop.call_soon_threadsafe(self._workers.end_the_living)

    @property
    def has_broken_off(self) -> bool:
        """Return whether the control thread has ended by itself."""
        return self._control.has_broken_off

    def end(self) -> None:
        """Close the generation: every worker is dead."""
        if self.verdict is not None:  # what is removed then must not be what others have begun to write
            self.settled.wait()
        with contextlib.suppress(ControlThreadError):
            self._control.wait_for(self._end())

    def close(self) -> None:
        """Stop the control thread."""
        self.end()
        with contextlib.suppress(ControlThreadError):
            self._control.wait_for(self._workers.close())
        self._control.stop()
        self._folder_tasks.close()
        self._descriptors.release()
        self._lease.release()
        self._status.end()
        self._incident_report.close()
        self._server.close()
        self._log.close()
        self._scratch.cleanup()

    # the control thread

    def _on_broken_off(self, reason: str) -> None:
        """End what is left: nothing runs on the control thread any more."""
        self._workers.end_the_living()
        if self.verdict is None:
            line = f"the control thread of ttprun has failed: {reason}; nothing more can be saved here"
            self.verdict = after_verdict.verdict_here(line, stop="its control thread has failed")
        self.reaped.set()
        self.settled.set()

    def _on_failure(self, error: BaseException) -> None:
        """Have the job saved and ended after an error on the control thread, on which it may depend."""
        what = text.describe(error)
        try:
            if self.verdict is not None:
                self.reaped.set()
                self.settled.set()
            else:
                self._report(AgentTerminationRequested(self._node, "", what))
        except Exception as another:
            what = f"{what}, then {text.describe(another)}"
            self._judge(f"ttprun has failed: {what}", stop="its control thread has failed")

    def _report(self, message: FromAgent) -> None:
        """Do with `message` what the state says."""
        match self._reports:
            case Reports.SENT:
                assert self._client is not None
                self._client.send(message)
            case Reports.RELEASES:
                self._release_worker(message)
            case Reports.JUDGED_HERE:
                if failure := after_verdict.failure_in(message):
                    self._judge(failure)

    def _judge(self, what: str, stop: str = "") -> None:
        """The verdict where no controller gives one; `stop`: why the job is not started again."""
        if self.verdict is None:
            line = f"{what}; nothing more can be saved from node {self._node}"
            self._obey(after_verdict.verdict_here(line, stop))
            for rank in sorted(self._workers.alive):  # else they would be ended, and show nothing
                self._workers.order(rank, Exit(0, blamed=rank == self._first_raised))

    def _hear(self, message: FromAgent) -> None:
        """Pass on a message of a worker of this node, or the report of its death."""
        match message:
            case Layout(rank=rank, origin=origin, save=save):
                self._replacements.hear_layout(message)
                if save:
                    self._folder_tasks.saves.add(save)
                    if self._node == 0:
                        self._lease.keep(Path(save))
                self._unbegun.discard(rank)
                if not self._unbegun and self.training_began is None:
                    self.training_began = origin, time.monotonic()
            case Modules():
                self._replacements.hear(message)
                return  # it stays here
            case Dying(at=at) | Died(at=at) if not isinstance(message, Died) or message.status:
                self.noticed = self.noticed or at
            case Raised() | TerminationRequested():
                self.noticed = self.noticed or time.time()
                if isinstance(message, Raised) and self._first_raised < 0:
                    self._first_raised = message.rank
        self._report(message)

    async def _stop_reporting(self) -> None:
        self._rest(Reports.RELEASES)

    def _rest(self, reports: Reports) -> None:
        """Send nothing more to the controller, and ignore its loss."""
        self._reports = reports
        if self._client is not None:
            self._client.rest()

    def _release_worker(self, message: FromAgent) -> None:
        """Tell a worker to exit that waits to be a holder: its state is not needed."""
        if isinstance(message, Raised | TerminationRequested):
            self._obey(Addressed(message.rank, Exit(0)))

    async def _say(self, message: FromAgent) -> None:
        self._report(message)

    async def _watch(self, processes: Mapping[int, subprocess.Popen[bytes]], starter: WorkerStarter) -> None:
        self._replacements.begin(starter, spares_alone=not self._may_restart)
        folder = stack_files.folder(self._config.log_path, self._generation)
        self._workers.watch(processes, folder, Path(self._scratch.name))
        self._control.spawn(
            board_watch.watch(
                self._node,
                self._config.hang_s,
                self._workers,
                look=self._look,
                moved=lambda: self._folder_tasks.moved,
                report=self._report,
            )
        )

    def _job_is_over(self) -> bool:
        controller_host = self._controller_host
        return not self._workers.alive and (
            controller_host is None or controller_host.controller.membership.everyone_is_dead
        )

    @property
    def _controller_host(self) -> ControllerHost | None:
        """Return the host of the controller, None if it runs on another node."""
        return self._client.controller_host if self._client is not None else None

    def _obey(self, order: ControllerToAgent) -> None:
        match order:
            case Addressed(rank=rank, message=message):
                if isinstance(message, Freeze):
                    self.noticed = self.noticed or time.time()
                self._workers.order(rank, message)
            case Prepare() | Publish() | Find():
                self._descriptors.release()
                self._control.spawn(self._answer(self._folder_tasks.do(order, self._node, self._generation)))
            case Replace():
                self._control.spawn(self._replace(order))
            case Recovered():
                self._end_incident(order)
            case Dismissed():
                self._dismissed = True
                self._rest(Reports.JUDGED_HERE)
                assert self._client is not None
                for told in self._client.said:  # while the controller left: no verdict of it comes any more
                    if failure := after_verdict.failure_in(told):
                        self._judge(failure)
            case Verdict():
                self.verdict = order
                self._control.spawn(self._reap_workers())

    async def _answer(self, work: Coroutine[object, None, FromAgent]) -> None:
        self._report(await work)

    async def _replace(self, order: Replace) -> None:
        self._descriptors.release()
        failed = await self._replacements.replace(order, self._wants_replacements)
        if failed is not None:
            self._report(failed)

    def _wants_replacements(self) -> bool:
        return self._reports is Reports.SENT and self.verdict is None

    def _end_incident(self, order: Recovered) -> None:
        """Close an incident after which all ranks go on: pass it to the main thread, and reset."""
        self.recovered.put((order, self.report))
        self.noticed = 0.0
        self._descriptors.release()
        self._descriptors = Descriptors(DESCRIPTORS)
        self._replacements.end_incident()

    async def _reap_workers(self) -> None:
        """Have the workers of this node end after a verdict."""
        self._replacements.end_newcomers()
        await after_verdict.reap(self._workers, self._job_is_over)
        self.reaped.set()
        try:
            await after_verdict.clean_up(
                self._folder_tasks, self._controller_host, self.verdict, self._generation
            )
        finally:
            self.settled.set()  # whatever happened: torch's thread waits for it

    def _look(self, boards: Sequence[BoardRecord]) -> None:
        self._report_status(boards)
        if self.training_began is not None and not self.noticed:
            self._replacements.look(boards, self.training_began[0])

    def _report_status(self, boards: Sequence[BoardRecord]) -> None:
        """Write what operators read; it is for people, so an error in it ends nothing."""
        host = self._controller_host
        if host is None:
            return
        try:
            if self._node:
                self._server.take_over()
            self._status.look(boards, host.controller, self._node, host.nodes, self._begun)
            self._incident_report.record_progress(max((board.finished for board in boards), default=-1))
        except Exception as error:
            tell_error("the status of the job is not written", error)

    async def _end(self) -> None:
        self._reports = Reports.IGNORED
        await self._control.cancel_tasks()
        await self._replacements.end()
        await self._workers.end()
        client, self._client = self._client, None
        if client is not None:
            # Other nodes may still be at work in the folder; the next job's first rank cleans it, too.
            if (
                client.controller_host is not None
                and client.alone
                and client.controller_host.controller.membership.save
                and not self._folder_tasks.busy
            ):
                with contextlib.suppress(CheckpointError):
                    await self._folder_tasks.clean(Path(client.controller_host.controller.membership.save))
            await client.close()
