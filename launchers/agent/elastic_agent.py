"""The torch elastic agent of `ttprun`: it does not end the survivors when a worker dies."""

from __future__ import annotations

import signal
import time
from pathlib import Path
from typing import Any

from torch.distributed import PrefixStore
from torch.distributed.elastic.agent.server.api import RunResult, WorkerSpec, WorkerState
from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent
from torch.distributed.elastic.multiprocessing.api import SubprocessContext
from torch.distributed.elastic.multiprocessing.errors import ProcessFailure
from torch.distributed.elastic.multiprocessing.subprocess_handler import SubprocessHandler

from adaptor.checkpoint import read_ahead
from adaptor.config import Config
from adaptor.controller.verdict import EXIT_NO_PROGRESS
from adaptor.launchers.agent.elastic_events import ElasticEvents
from adaptor.launchers.agent.node import Node
from adaptor.launchers.agent.start_counts import StartCounts
from adaptor.launchers.agent.starter import Starter
from adaptor.launchers.cli.end_requests import EndRequests
from adaptor.launchers.cli.run_record import RunRecord
from adaptor.launchers.control import invitation
from adaptor.launchers.records.operator_summary import Account, say
from adaptor.launchers.rendezvous.agreement import Agreement
from adaptor.launchers.rendezvous.later_nodes import LaterNodes
from adaptor.launchers.rendezvous.node_slots import Places
from adaptor.launchers.rendezvous.rendezvous_handler import Rendezvous
from adaptor.launchers.rendezvous.waiting import wait_for
from adaptor.launchers.store.store_resume import StoreResume
from adaptor.protocol import naming
from adaptor.protocol.messages import NODES_JOIN, Verdict
from adaptor.protocol.spare_node_messages import TakePlace

# torch's name for the file of a failure that has left none.
_NO_FILE = "<N/A>"
# In the store of a generation: how many restarts the job has made.
_RESTARTS = "ttp/restarts"


class SurvivorsAgent(LocalElasticAgent):
    """torch's local agent; between a failure and the verdict the controller decides about the workers.

    After the verdict torch's own rules apply: restart all workers, or fail.

    Args:
        settings: the settings.
        job: the id that the user gave to the job; '' where there is none.
        resume: brings the checkpoint of an object store to each node before workers start.
        record: takes what `ttprun` tells at the end.
        spec: torch's, of the workers; further arguments are torch's, too.
    """

    def __init__(
        self,
        settings: Config,
        job: str,
        resume: StoreResume | None,
        record: RunRecord,
        spec: WorkerSpec,
        *args: Any,
        **kwargs: Any,
    ) -> None:
        super().__init__(spec, *args, **kwargs)
        self._config = settings
        self._resume = resume
        self._record = record
        place = record.place
        self._account = record.account = Account(spec.max_restarts, place.restarts if place else 0)
        # Where torch elastic has no choice of handlers, it has this one, which drops all.
        self._events = ElasticEvents(
            getattr(spec, "event_log_handler", "null"), spec.rdzv_handler.get_run_id()
        )
        handler: Any = spec.rdzv_handler
        self._handler: Rendezvous = handler  # by our registry
        nodes = self._handler.nodes
        self._agreement = Agreement(self._handler, record.facts)
        self._control = Node(self._config, job, spec.max_restarts, nodes)
        self._control.control.records.name_script(record.script)
        self._later_nodes = LaterNodes(self._handler, self._control) if nodes else None
        self._generations = place.generations if place else 0
        self._remaining_restarts -= place.restarts if place else 0
        self._places: Places | None = None
        self._interrupted = False
        self._end_requests = EndRequests()
        self._ends = False  # by a verdict
        self._closed = False
        self._has_failed = False
        record.end_agent = self.end_control

    def end_control(self) -> bool:
        """End the control thread, and remove what is left in folders: the last line does not wait for it.

        Returns whether that thread has failed.
        """
        if not self._closed:
            self._closed = True
            self._has_failed = self._control.close()
        return self._has_failed

    def _rendezvous(self, worker_group: Any) -> None:
        if not self._record.has_started:
            self._agreement.require_as_job()
        self._handler.meet(lambda: super(SurvivorsAgent, self)._rendezvous(worker_group))

    def _start_workers(self, worker_group: Any) -> dict[int, Any]:
        workers = worker_group.workers
        place = self._joined_place
        store = self._store_of_this_generation(worker_group)
        if place is None:  # else node 0 has compared this spare node with itself
            self._agreement.require(worker_group.group_rank, worker_group.group_world_size, store)
        self._keep_place(worker_group, joins=place is not None)
        self._share_restarts(worker_group.group_rank, store)
        if self._resume is not None and place is None:  # else others give these workers their state
            self._resume.prepare(
                worker_group.group_rank,
                worker_group.group_world_size,
                store,
                [worker.global_rank for worker in workers],
                workers[0].world_size,
            )
        if place is None:
            self._keep_place_until_invited(worker_group.group_rank, store)
        self._control.begin(
            ranks=[worker.global_rank for worker in workers],
            node=worker_group.group_rank,
            nodes=worker_group.group_world_size,
            world_size=workers[0].world_size,
            store=store,
            host=worker_group.master_addr,
            may_restart=self._remaining_restarts > 0,
            has_met_before=self._handler.has_met_before,
            counts=StartCounts(self._account.begun, self._generations),
            place=place,
        )
        if self._later_nodes is not None:
            self._later_nodes.begin()
        self._open_gate(worker_group)
        self._control.meet()
        started: dict[int, Any] = (
            self._start_newcomers(worker_group) if place is not None else super()._start_workers(worker_group)
        )
        self._record.has_started = True
        self._end_requests.install()  # torch has just set its own handlers
        assert isinstance(self._pcontext, SubprocessContext)
        handlers = self._handlers
        self._control.watch(
            {worker.global_rank: handlers[worker.local_rank].proc for worker in workers},
            Starter(self._pcontext, {worker.global_rank: worker.local_rank for worker in workers}),
        )
        return started

    def _start_newcomers(self, worker_group: Any) -> dict[int, Any]:
        """Start the workers of this node while those of other nodes train on: they join them."""
        assert self._record.taken is not None
        with self._record.taken.warm.become_workers():
            started: dict[int, Any] = super()._start_workers(worker_group)
        return started

    @property
    def _joined_place(self) -> TakePlace | None:
        """Return the place that this spare node takes while others train, before its first workers start."""
        place = self._record.place
        return place if place is not None and place.incident and not self._record.has_started else None

    def _store_of_this_generation(self, worker_group: Any) -> Any:
        """Return the store of this generation.

        A static rendezvous keeps one store for all generations, so each gets a prefix; others make a store
        for each round.
        """
        if worker_group.spec.rdzv_handler.get_backend() != "static":
            return worker_group.store
        self._generations += 1
        return PrefixStore(f"ttp/{self._generations}", worker_group.store)

    def _share_restarts(self, node: int, store: Any) -> None:
        """Let a node that comes later know how many restarts are used up: all agents decide alike then.

        Args:
            node: the rank of this node.
            store: with keys of this generation alone.
        """
        if not self._handler.has_met_before:
            return
        if node == 0:
            store.set(_RESTARTS, str(self._account.begun))
        elif not self._record.has_started:
            begun_restarts = int(store.get(_RESTARTS))
            self._account.begin_after(begun_restarts)
            self._remaining_restarts -= begun_restarts

    def _keep_place(self, worker_group: Any, *, joins: bool) -> None:
        """Check that no spare node has the place of this node.

        Args:
            joins: this is a spare node that the controller expects, which checks that.

        Raises:
            StartError: one has: this node was taken for lost.
        """
        if self._record.taken is not None and not joins:
            self._record.taken.warm.end()  # all start from the beginning
        if self._record.common is None:
            return
        if self._places is None:
            self._places = Places(worker_group.store, worker_group.group_rank, self._record.place)
        if not joins:
            self._places.require_own()

    def _keep_place_until_invited(self, node: int, store: Any) -> None:
        """Check once more: an agent that was taken for lost may wait here while its place is given away.

        Node 0 invites all only when it has written down who has which place.

        Args:
            node: the rank of this node.
            store: with keys of this generation alone.

        Raises:
            StartError: a spare node has this place.
        """
        if self._places is not None and node:
            wait_for(lambda: store.get(invitation.KEY), lambda: "the controller, on node 0")
            self._places.require_own()

    def _open_gate(self, worker_group: Any) -> None:
        """Let spare nodes wait at node 0, from the first start of workers on; other nodes connect to it."""
        if self._places is None or self._record.has_started:
            return
        if worker_group.group_rank == 0:
            assert self._record.common is not None
            self._places.announce(self._control.open_gate(self._record.common, worker_group.master_addr))
        elif gate := self._places.gate():
            ranks = tuple(worker.global_rank for worker in worker_group.workers)
            self._control.stay_at_gate(
                gate, worker_group.master_addr, worker_group.group_rank, ranks, self._record.taken
            )

    def _shutdown(self, *args: Any, **kwargs: Any) -> None:
        # args[0] is the signal that this process got. A second one interrupts this, and comes without it.
        in_time = self._save_first(args[0]) if args else not self._interrupted
        self._record.save = self._control.save
        # The deaths that follow are torch's doing, and no failures. It would wait for those that hang.
        self._control.dismiss(at_once=not in_time)
        self._tell_of_recoveries()
        super()._shutdown(*args, **kwargs)

    def _save_first(self, death_signal: signal.Signals) -> bool:
        """Have the job saved within TTP_GRACE; return False if there was not enough time."""
        self._interrupted = True
        self._end_requests.take()
        self._control.leave(death_signal.name, self._config.grace_s)
        self._interrupted = False
        in_time = self._control.verdict is not None or not self._control.is_needed
        if not in_time:
            say(f"not saved within {self._config.grace_s:g} s (TTP_GRACE) of {death_signal.name}")
        verdict = self._record.verdict = self._control.verdict
        if verdict is not None:
            self._tell(verdict)
        return in_time

    @property
    def _handlers(self) -> dict[int, SubprocessHandler]:
        """Return the handlers of the workers' processes, by local rank."""
        assert isinstance(self._pcontext, SubprocessContext)
        return self._pcontext.subprocess_handlers

    def _stop_workers(self, worker_group: Any, *args: Any, **kwargs: Any) -> None:
        super()._stop_workers(worker_group, *args, **kwargs)
        if not self._ends:  # else `close` does it, after the last line
            self._control.end()

    def _monitor_workers(self, worker_group: Any) -> RunResult:
        self._end_requests.raise_again()
        verdict = self._control.verdict
        self._write_down_given_places()  # behind a verdict no more are given
        self._tell_of_recoveries()
        self._tell_of_restart()
        if verdict is not None:
            # Not HEALTHY meanwhile: torch would take agents that are ahead of this one for new nodes.
            self._control.wait_until_reaped()
            return self._conclude(worker_group, verdict)
        if self._later_nodes is not None and worker_group.group_rank == 0:
            self._later_nodes.look(worker_group.group_world_size)
        handlers = self._handlers.values()
        if any(handler.proc.poll() != 0 for handler in handlers):
            # Also if none has failed yet: if one fails while torch looks at them, torch ends the others.
            # And while ranks are replaced online: torch counts a restart only after FAILED.
            return RunResult(state=WorkerState.HEALTHY)
        if not self._control.over:
            # If this agent left now, it would be missing at a restart; node 0 would take the store along.
            return RunResult(state=WorkerState.HEALTHY)
        self._tell_of_restart()  # training may have begun and come to its end since the last look
        for worker in worker_group.workers:  # one may have been replaced
            worker.id = self._handlers[worker.local_rank].proc.pid
        result: RunResult = super()._monitor_workers(worker_group)
        return result

    def _exit_barrier(self) -> None:
        super()._exit_barrier()  # type: ignore[no-untyped-call]  # torch has no types here
        assert self._worker_group.group_world_size is not None
        self._handler.stay_for_others(self._store, self._worker_group.group_world_size)

    def _tell_of_restart(self) -> None:
        if self._control.training_began is not None:
            self._account.training_began(*self._control.training_began)

    def _can_start_again(self, verdict: Verdict, worker_group: Any) -> bool:
        """Return True if enough nodes are left for a restart, or others may join."""
        if verdict.stop:
            return False
        if verdict.lost and worker_group.spec.rdzv_handler.get_backend() == "static":
            return self._fill(verdict, worker_group)
        settings = getattr(worker_group.spec.rdzv_handler, "settings", None)
        fewest = int(getattr(settings, "min_nodes", worker_group.group_world_size))
        ranks_left = worker_group.group_world_size - len(verdict.leaves)
        return 0 not in verdict.leaves and ranks_left >= fewest  # node 0 has the rendezvous store

    def _fill(self, verdict: Verdict, worker_group: Any) -> bool:
        """Return True if spare nodes take the places of all lost nodes; node 0 decides, for all."""
        if self._places is None or self._remaining_restarts <= 0 or verdict.leaves or 0 in verdict.lost:
            return False  # the rendezvous store is on node 0
        generation = self._generations
        if worker_group.group_rank == 0:
            counts = StartCounts(self._account.begun + 1, generation)
            self._places.settle(generation, self._control.fill(verdict.lost, counts))
        return self._places.are_filled(generation)

    def _conclude(self, worker_group: Any, verdict: Verdict) -> RunResult:
        if self._record.verdict is not verdict:
            if verdict.outcome == "refused":
                self._record.refused_after = self._record.verdict
                self._account.look_again()
            elif self._control.only_writes_copies:
                self._record.refused_after, self._remaining_restarts = self._record.verdict, 0
            self._record.verdict = verdict
            self._tell(verdict)
            if verdict.stop and (self._remaining_restarts or verdict.exit_code == EXIT_NO_PROGRESS):
                self._record.stopped = f"; not started again: {verdict.stop}"
            action = "the job ends"
            if verdict.outcome == "refused" or not self._can_start_again(verdict, worker_group):
                self._remaining_restarts = 0
            elif verdict.fault.kind == NODES_JOIN:
                say(verdict.line)
                self._control.record_next_action(self._account.join())
                self._handler.take_in()
                return RunResult(state=WorkerState.HEALTHY)
            elif self._remaining_restarts > 0:
                say(f"{verdict.line}; all workers start again")
                action = self._account.restart()
                if verdict.save and verdict.step >= 0:
                    read_ahead.begin(Path(verdict.save) / naming.final_name(verdict.step))
            elif self._may_have_copies(verdict):
                # torch's own count: workers start once more, and end before they train.
                self._remaining_restarts = 1
                self._control.only_writes_copies = True
                action = "no restart is left: workers start once more, to write their copies in host memory"
                say(f"{verdict.line}; {action}")
            self._control.record_next_action(f"{action}{self._record.stopped}")
            self._ends = self._remaining_restarts <= 0
            if self._ends:
                self._control.mark_leaving()
        if verdict.exit_code == 0:
            say(verdict.line)
            ranks = [worker.global_rank for worker in worker_group.workers]
            return RunResult(state=WorkerState.SUCCEEDED, return_values=dict.fromkeys(ranks))
        return RunResult(state=WorkerState.FAILED, failures=self._failures(worker_group, verdict))

    def _may_have_copies(self, verdict: Verdict) -> bool:
        """Return True if nothing could be saved, and workers that start again may have copies to write.

        All agents answer alike, by the verdict.
        """
        every, lost = self._config.host_copy, verdict.lost or verdict.leaves
        first = not self._control.only_writes_copies
        return bool(first and every and verdict.outcome == "lost" and verdict.newest >= every and not lost)

    def _write_down_given_places(self) -> None:
        """Let an agent that was taken for lost know before its next start that a spare node has its place."""
        while not self._control.given.empty():
            given_places = self._control.given.get()
            assert self._places is not None
            self._places.give(given_places)

    def _tell_of_recoveries(self) -> None:
        while not self._control.recovered.empty():
            recovered, report = self._control.recovered.get()
            self._account.recovered(recovered, report)
            self._events.go_on(recovered, self._worker_group.group_rank or 0)

    def _tell(self, verdict: Verdict) -> None:
        noticed = self._control.noticed or time.time()
        if verdict.outcome != "refused":
            self._account.fault(verdict, noticed, self._control.report)
        self._events.conclude(verdict, self._worker_group.group_rank or 0, noticed)

    def _failures(self, worker_group: Any, verdict: Verdict) -> dict[int, ProcessFailure]:
        """Return the workers that have failed by themselves, by rank, the first failure first.

        Survivors, which were told to exit or were ended, are not among them. torch takes the failure with the
        earliest time for the cause, and the first of several with the same time.
        """
        at = int(self._control.noticed or time.time())
        local = {worker.global_rank: worker.local_rank for worker in worker_group.workers}
        failures = {}
        for rank in verdict.fault.ranks or (verdict.cause_rank,):
            if rank in local:
                failures[rank] = self._failure(local[rank], verdict)
            elif rank == verdict.cause_rank:  # of another node; -1: nobody in particular
                failures[rank] = ProcessFailure(-1, verdict.fault.pid, verdict.exit_code, error_file="")
                failures[rank].message = verdict.line
            if rank in failures:
                failures[rank].timestamp = at
        return failures

    def _failure(self, local_rank: int, verdict: Verdict) -> ProcessFailure:
        process = self._handlers[local_rank].proc
        # A worker that hung was told to exit, too, and may have done so.
        code = process.poll() or verdict.exit_code
        assert self._pcontext is not None
        file = self._pcontext.error_files[local_rank]
        try:
            failure = ProcessFailure(local_rank, process.pid, code, file)
        except Exception:  # torch has said that it is damaged: it is empty where the disk was full
            failure = ProcessFailure(local_rank, process.pid, code, error_file="")
        if code > 0 and failure.error_file == _NO_FILE:
            failure.message = verdict.line
        return failure
