"""The torch elastic agent of `ttprun`: survivors live on when a worker dies.

`SurvivorsAgent._invoke_run` is the life of a job on one node, in one loop.
"""

from __future__ import annotations

import contextlib
import signal
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from torch.distributed import PrefixStore
from torch.distributed.elastic.agent.server.api import DEFAULT_ROLE, RunResult, WorkerSpec, WorkerState
from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent
from torch.distributed.elastic.metrics import put_metric
from torch.distributed.elastic.multiprocessing.api import SubprocessContext
from torch.distributed.elastic.multiprocessing.subprocess_handler import SubprocessHandler

from adaptor import text
from adaptor.checkpoint import page_cache
from adaptor.config import Config
from adaptor.controller.verdict import EXIT_NO_PROGRESS
from adaptor.errors import StartError
from adaptor.hooks import AgentHooks
from adaptor.launchers.agent import elastic_outputs, move
from adaptor.launchers.agent.elastic_outputs import ElasticEvents
from adaptor.launchers.agent.move import Move
from adaptor.launchers.agent.node import Node
from adaptor.launchers.control import credentials
from adaptor.launchers.records.log import Account, RunRecord, say
from adaptor.launchers.rendezvous.agreement import Agreement
from adaptor.launchers.rendezvous.rendezvous_handler import LaterNodes, Rendezvous
from adaptor.launchers.rendezvous.waiting import (
    ANSWERS_S,
    UNMET,
    EndRequests,
    SilentStoreError,
    ask,
    wait_for,
)
from adaptor.launchers.spares.places import Places, find_gate
from adaptor.launchers.spares.replacements import Starter
from adaptor.launchers.spares.spare_gate import StartCounts
from adaptor.launchers.spares.spare_pool import workers_from_spares
from adaptor.protocol import naming
from adaptor.protocol.messages import NODES_JOIN, Endpoint, Verdict
from adaptor.protocol.spare_messages import TakePlace

# The key in the store of a generation: how many restarts the job has made.
_RESTARTS = "ttp/restarts"


class SurvivorsAgent(LocalElasticAgent):
    """torch's local agent with a loop of its own: the controller decides what follows a failure.

    Args:
        job: the job id given by the user; '' without one.
        parts: the hooks of optional parts.
        record: notes for the last line of `ttprun`.
        spec: torch's, of the workers; further arguments are torch's, too.
    """

    def __init__(
        self,
        settings: Config,
        job: str,
        parts: Sequence[AgentHooks],
        record: RunRecord,
        spec: WorkerSpec,
        *args: Any,
        **kwargs: Any,
    ) -> None:
        super().__init__(spec, *args, **kwargs)
        self._config = settings
        self._hooks = parts
        self._record = record
        place = record.place
        self._account = record.account = Account(spec.max_restarts, place.restarts if place else 0)
        self._account.joined = place is not None
        # Versions of torch elastic without a choice of handlers have only the null handler.
        self._events = ElasticEvents(
            getattr(spec, "event_log_handler", "null"), spec.rdzv_handler.get_run_id()
        )
        handler: Any = spec.rdzv_handler
        self._handler: Rendezvous = handler  # made by our registry
        nodes = self._handler.nodes
        self._agreement = Agreement(self._handler, record.facts)
        self._node = Node(self._config, job, spec.max_restarts, nodes, self._handler.open_store, parts)
        self._control = self._node.control
        self._control.records.status.script = record.script
        self._later_nodes = (
            LaterNodes(self._handler, self._node.fits, self._node.ask_for_nodes) if nodes else None
        )
        self._generations = place.generations if place and self._handler.is_fixed else 0
        self._remaining_restarts -= place.restarts if place else 0
        self._places: Places | None = None
        # After an online recovery of the loss of node 0.
        self._store_endpoint = place.store if place is not None and place.incident else None
        self._gate_home: int | None = None  # the node of the controller, to whose gate this node has come
        self._own_store: Endpoint | None = None  # of a spare node in the place of node 0
        self._interrupted = False
        self._end_requests = EndRequests()
        self._ends = False  # by a verdict
        self._closed = False
        self._has_failed = False
        record.end_agent = self.end_control

    def _invoke_run(self, role: str = DEFAULT_ROLE) -> RunResult:
        """Run the job on this node: start workers, watch workers, act on each verdict of the controller.

        torch's loop restarts all workers after a failure. Here a failed worker changes nothing by itself: the
        survivors save the state or take a new process in, and only a verdict ends a generation of workers.
        """
        group = self._worker_group
        self._initialize_workers(group)  # meets the other nodes, then `_start_workers`
        while True:
            time.sleep(group.spec.monitor_interval)
            self._end_requests.raise_again()
            verdict = self._control.verdict
            if self._control.has_lost_node_0:
                self._handler.lose_store()
            self._tell_of_recoveries()
            self._write_down_given_places()  # after a verdict no more places are given
            self._tell_of_restart()
            if verdict is not None:
                self._control.reaped.wait()
                result = self._conclude(group, verdict)
            else:
                result = self._monitor_workers(group)
            state = group.state = result.state
            put_metric(f"workers.{group.spec.role}.remaining_restarts", self._remaining_restarts)
            put_metric(f"workers.{group.spec.role}.{state.name.lower()}", 1)
            if state == WorkerState.SUCCEEDED:
                self._exit_barrier()
                return result
            if state == WorkerState.HEALTHY:
                if verdict is not None:  # nodes that wait join; torch's count of restarts stays
                    self._restart_workers(group)
                continue
            if state not in (WorkerState.FAILED, WorkerState.UNHEALTHY):
                raise RuntimeError(f"torch elastic has lost track of the workers: {state.name}")
            if self._remaining_restarts <= 0:
                self._stop_workers(group)
                return result
            self._remaining_restarts -= 1
            self._restart_workers(group)

    # the start of a generation

    def _rendezvous(self, worker_group: Any) -> None:
        place, verdict = self._joined_place, self._record.verdict
        if not self._record.has_started:
            self._agreement.require_as_job()
            if self._record.common is not None and place is None:
                self._handler.look_for_gate(find_gate)
        elif self._places is not None and not self._handler.is_fixed and not (verdict and verdict.incident):
            self._places.require_own()  # no controller has given the verdict: this node may be taken for lost
        if place is not None and place.node == 0:
            self._open_own_store(worker_group)
        if place is not None and not self._handler.is_fixed:
            self._handler.take_place(place.node)
        self._handler.meet(
            lambda: super(SurvivorsAgent, self)._rendezvous(worker_group), self._control.lease.require_own
        )

    def _open_own_store(self, worker_group: Any) -> None:
        """Open the rendezvous store of this spare node, which joins training in the place of node 0.

        All other nodes come to the store when the recovery is over. Until then their entries are made here:
        nodes of a job with spare nodes have equal numbers of workers.
        """
        assert self._record.taken is not None
        opened = self._handler.own_store(self._record.taken.address)
        if opened is None:
            raise StartError("this spare node cannot open a rendezvous store, in the place of node 0")
        self._own_store, store = opened
        self._be_at(worker_group.spec, self._own_store)
        move.enter_nodes(store, worker_group.spec, range(1, self._handler.most_nodes))

    def _be_at(self, spec: WorkerSpec, endpoint: Endpoint) -> None:
        """Let workers learn the new store; without fixed numbers torch tells them in each round."""
        if self._handler.is_fixed:
            spec.master_addr, spec.master_port = endpoint.address, endpoint.port

    def _start_workers(self, worker_group: Any) -> dict[int, Any]:
        workers = worker_group.workers
        place = self._joined_place
        store = self._store_of_this_generation(worker_group)
        if place is None:  # node 0 has compared a spare node with itself
            self._agreement.require(worker_group.group_rank, worker_group.group_world_size, store)
        self._keep_place(worker_group, joins=place is not None)
        self._share_restarts(worker_group.group_rank, store)
        for hook in self._hooks if place is None else ():  # newcomers get their state from other ranks
            hook.before_workers(
                worker_group.group_rank,
                worker_group.group_world_size,
                store,
                [worker.global_rank for worker in workers],
                workers[0].world_size,
            )
        if place is None:
            self._keep_place_until_invited(worker_group.group_rank, store)
        self._node.begin(
            ranks=[worker.global_rank for worker in workers],
            node=worker_group.group_rank,
            nodes=worker_group.group_world_size,
            world_size=workers[0].world_size,
            store=store,
            host=worker_group.master_addr,
            may_restart=self._remaining_restarts > 0,
            has_met_before=self._handler.has_met_before,
            counts=StartCounts(self._account.begun, self._generations),
            taken=self._record.taken if place is not None else None,
            own_store=self._own_store if place is not None else None,
        )
        if self._later_nodes is not None:
            self._later_nodes.begin()
        self._come_to_gate(worker_group)
        self._node.meet()
        taken = self._record.taken
        with (
            taken.warm.become_workers(joins=place is not None)
            if taken is not None and not self._record.has_started
            else workers_from_spares(self._control.spares, self._control.thread.wait_for)
        ):
            started: dict[int, Any] = super()._start_workers(worker_group)
        self._record.has_started = True
        if self._places is not None:
            self._places.note_start()
        self._end_requests.install()  # torch has just set its own handlers
        assert isinstance(self._pcontext, SubprocessContext)
        handlers = self._handlers
        self._node.watch(
            {worker.global_rank: handlers[worker.local_rank].proc for worker in workers},
            Starter(self._pcontext, {worker.global_rank: worker.local_rank for worker in workers}),
        )
        return started

    @property
    def _joined_place(self) -> TakePlace | None:
        """Return the place that this spare node takes during training, before its first workers start."""
        place = self._record.place
        return place if place is not None and place.incident and not self._record.has_started else None

    def _store_of_this_generation(self, worker_group: Any) -> Any:
        """Return the store of the generation: a prefix where a static rendezvous keeps one store for all.

        Other rendezvous backends make a store for each round.
        """
        if not self._handler.is_fixed:
            return worker_group.store
        self._generations += 1
        return PrefixStore(f"ttp/{self._generations}", worker_group.store)

    def _share_restarts(self, node: int, store: Any) -> None:
        """Give a node that joins later the number of used restarts, so that all agents decide alike.

        Args:
            store: has keys of this generation alone.
        """
        if not self._handler.has_met_before or self._joined_place is not None:
            return
        if node == 0:
            store.set(_RESTARTS, str(self._account.begun))
        elif not self._record.has_started:
            begun_restarts = int(
                ask(store, lambda: store.get(_RESTARTS), lambda: "the number of restarts, from node 0")
            )
            self._account.begun, self._account.joined = begun_restarts, True
            self._remaining_restarts -= begun_restarts

    def _keep_place(self, worker_group: Any, *, joins: bool) -> None:
        """Check that no spare node has the place of this node.

        Args:
            joins: this node is a spare node, which the controller expects.

        Raises:
            PlaceLostError: this node has come back.
            StartError: this node was taken for lost, and a spare node has its place.
        """
        is_fixed, is_full = self._handler.is_fixed, worker_group.group_world_size == self._handler.most_nodes
        if not is_fixed:  # nodes have got new numbers
            self._places = None
        if self._record.common is None:
            return
        if not (is_fixed or is_full):
            self._node.leave_gate()
            return
        if self._places is None:
            place = self._record.place if is_fixed else self._joined_place
            self._places = Places(worker_group.store, worker_group.group_rank, place)
            if is_fixed and place is None:
                self._places.require_first()
        if not joins:
            self._places.require_own()
        elif self._own_store is not None:
            assert self._record.place is not None
            self._places.give({0: self._record.place.owner})

    def _keep_place_until_invited(self, node: int, store: Any) -> None:
        """Check the place again after the invitation of node 0.

        Node 0 invites only after the owners of all places are in the store, so an agent that was taken for
        lost cannot keep a place given away meanwhile.

        Args:
            store: has keys of this generation alone.

        Raises:
            StartError: a spare node has this place.
        """
        if self._places is not None and node:
            ask(store, lambda: store.get(credentials.KEY), lambda: "the controller, on node 0")
            self._places.require_own()

    def _come_to_gate(self, worker_group: Any) -> None:
        """Open or reach the gate for spare nodes, once for each node with the controller."""
        assert self._control.client is not None
        home = self._control.client.succession.home
        if self._places is None or home == self._gate_home:
            return
        self._gate_home = home
        assert self._record.common is not None
        ranks = tuple(worker.global_rank for worker in worker_group.workers)
        taken = None if self._record.has_started else self._record.taken
        self._node.come_to_gate(self._places, self._record.common, worker_group.master_addr, ranks, taken)

    # while workers run

    @property
    def _handlers(self) -> dict[int, SubprocessHandler]:
        """Return the handlers of the workers' processes, by local rank."""
        assert isinstance(self._pcontext, SubprocessContext)
        return self._pcontext.subprocess_handlers

    def _monitor_workers(self, worker_group: Any) -> RunResult:
        if self._later_nodes is not None and worker_group.group_rank == 0:
            self._later_nodes.look(worker_group.group_world_size)
        handlers = self._handlers.values()
        # HEALTHY also if no worker has failed yet: torch ends all workers if a worker fails during its look.
        if any(handler.proc.poll() != 0 for handler in handlers):
            return RunResult(state=WorkerState.HEALTHY)
        if not self._node.over:
            # This agent would be missing at a restart, and node 0 would take the rendezvous store along.
            return RunResult(state=WorkerState.HEALTHY)
        self._tell_of_restart()  # training may have begun and ended since the last look
        for worker in worker_group.workers:  # a worker may have been replaced
            worker.id = self._handlers[worker.local_rank].proc.pid
        result: RunResult = super()._monitor_workers(worker_group)
        return result

    def _tell_of_restart(self) -> None:
        training_began = self._control.news.training_began
        if training_began is not None:
            self._account.training_began(*training_began)

    def _write_down_given_places(self) -> None:
        """Write the new owners of places into the store, for agents that were taken for lost.

        The store of node 0 is lost with the node. A spare node in its place writes its own name into the new
        store; other names wait until this node comes to that store.
        """
        host = self._control.controller_host
        if host is not None and host.controller.store_of_node_0 not in (None, self._store_endpoint):
            return
        if given_places := self._control.take_given():
            assert self._places is not None
            self._places.give(given_places)

    def _tell_of_recoveries(self) -> None:
        while not self._control.recovered.empty():
            recovered, report = self._control.recovered.get()
            self._account.recovered(recovered, report)
            self._events.go_on(recovered, self._worker_group.group_rank or 0)
            if recovered.store is not None:
                self._follow(recovered.store)

    def _follow(self, endpoint: Endpoint) -> None:
        """Come to the rendezvous store of a spare node that has the place of node 0, while workers train.

        Come to the gate of the controller, too. If the node is lost at once, the next incident gives a store.
        """
        group: Any = self._worker_group
        try:
            if group.group_rank and endpoint != self._store_endpoint:
                self._come_to_store(endpoint)
            self._store_endpoint = endpoint
            self._come_to_gate(group)
        except (*UNMET, RuntimeError) as error:
            say(f"the rendezvous store at {endpoint.address}:{endpoint.port} is lost ({text.say(error)})")

    def _come_to_store(self, endpoint: Endpoint) -> None:
        group: Any = self._worker_group
        until = time.monotonic() + ANSWERS_S  # a store on a busy machine is slow, and has not fallen silent

        def look() -> float | None:
            remaining_s = until - time.monotonic()
            if self._control.verdict is None or remaining_s > 0.0:
                return max(0.0, remaining_s)  # 0: as seldom as lines are printed
            raise SilentStoreError("it does not answer, and a further incident has ended")

        store, group.master_addr, group.master_port = wait_for(
            lambda: self._handler.come_to(endpoint, group.group_rank),
            lambda: "the node that has the place of node 0",
            look=look,
        )
        self._be_at(group.spec, endpoint)
        assert self._pcontext is not None
        for environment in self._pcontext.envs.values():  # of later replacements
            environment.update(MASTER_ADDR=group.master_addr, MASTER_PORT=str(group.master_port))
        group.store = store
        self._store: Any = store  # of the barrier at the end
        self._places, self._gate_home = Places(store, group.group_rank, None), None
        is_fixed = self._handler.is_fixed
        self._node.move(PrefixStore(f"ttp/{self._generations}", store) if is_fixed else store)

    # after a verdict

    def _conclude(self, worker_group: Any, verdict: Verdict) -> RunResult:
        """Act on a verdict.

        Returns:
            HEALTHY: all workers start again, with the nodes that wait. FAILED: all workers start again if a
            restart remains. SUCCEEDED: the job has come to its end.
        """
        if verdict.outcome == "refused":
            self._record.refused_after = self._record.verdict
            self._account.look_again()
        elif self._node.only_writes_copies:
            self._record.refused_after, self._remaining_restarts = self._record.verdict, 0
        self._record.verdict = verdict
        self._tell(verdict)
        if verdict.agreed is not None:
            self._control.copies.forget_after(verdict.agreed)
        if verdict.stop and (self._remaining_restarts or verdict.exit_code == EXIT_NO_PROGRESS):
            self._record.stopped = f"; not started again: {verdict.stop}"
        action = "the job ends"
        if verdict.outcome == "refused" or not self._can_start_again(verdict, worker_group):
            self._remaining_restarts = 0
        elif verdict.fault.kind == NODES_JOIN:
            say(verdict.line)
            self._node.record_next_action(self._account.join())
            return RunResult(state=WorkerState.HEALTHY)
        elif self._remaining_restarts > 0:
            say(f"{verdict.line}; all workers start again")
            action = self._account.restart()
            if verdict.save_folder and verdict.step >= 0:
                page_cache.begin_read_ahead(Path(verdict.save_folder) / naming.final_name(verdict.step))
        elif self._may_have_copies(verdict):
            # One more start, after which workers end before they train.
            self._remaining_restarts = 1
            self._node.only_writes_copies = True
            action = "no restart is left: workers start once more, to write their copies in host memory"
            say(f"{verdict.line}; {action}")
        self._node.record_next_action(f"{action}{self._record.stopped}")
        self._ends = self._remaining_restarts <= 0
        if self._ends:
            self._control.lease.mark_leaving()
        if verdict.exit_code == 0:
            say(verdict.line)
            ranks = [worker.global_rank for worker in worker_group.workers]
            return RunResult(state=WorkerState.SUCCEEDED, return_values=dict.fromkeys(ranks))
        assert self._pcontext is not None
        noticed = self._control.news.noticed or time.time()
        local_ranks = {worker.global_rank: worker.local_rank for worker in worker_group.workers}
        processes = {local_rank: handler.proc for local_rank, handler in self._handlers.items()}
        failures = elastic_outputs.failures(
            verdict, noticed, local_ranks, processes, self._pcontext.error_files
        )
        return RunResult(state=WorkerState.FAILED, failures=failures)

    def _can_start_again(self, verdict: Verdict, worker_group: Any) -> bool:
        """Return True if enough nodes remain for a restart, or others may join."""
        if verdict.stop:
            return False
        is_fixed, nodes = self._handler.is_fixed, worker_group.group_world_size
        fewest = int(getattr(getattr(self._handler, "settings", None), "min_nodes", nodes))
        leaves = set(verdict.leaves) - set(verdict.lost)
        may_be_enough = 0 not in leaves and nodes - len(leaves) >= fewest
        has_moved = verdict.store is not None and 0 not in verdict.lost  # to a spare node
        if has_moved or (0 in verdict.lost and self._handler.ends_with_node_0):
            return may_be_enough and self._remaining_restarts > 0 and self._move(verdict, worker_group)
        if verdict.lost and is_fixed:
            return self._fill(verdict, worker_group)
        return may_be_enough

    def _fill(self, verdict: Verdict, worker_group: Any) -> bool:
        """Return True if spare nodes take the places of all lost nodes; the controller's node decides."""
        if self._places is None or self._remaining_restarts <= 0 or verdict.leaves:
            return False
        if self._control.controller_host is not None:
            counts = StartCounts(self._account.begun + 1, self._generations)
            self._places.settle(self._generations, self._node.fill(verdict.lost, counts))
        return self._places.are_filled(self._generations)

    def _move(self, verdict: Verdict, worker_group: Any) -> bool:
        """Return True if the nodes that are left go on at another store, without their node 0."""
        counts = StartCounts(self._account.begun + 1, self._generations)
        places, reason = Move(self._handler, self._node, verdict, worker_group, counts).decide()
        if places is None:
            self._record.stopped = f"; not started again: {reason}"
            return False
        if self._places is not None:
            self._gate_home = None
            if verdict.store not in (self._own_store, self._store_endpoint):  # else the node is there already
                self._places = places
        return True

    def _may_have_copies(self, verdict: Verdict) -> bool:
        """Return True if nothing was saved, and restarted workers may have host copies to write.

        All agents answer alike: the verdict is the same, and in a job that has finished a step all nodes make
        copies, or none does.
        """
        # With auto the copy of the first step is whole before the update of the second.
        every, lost = self._config.host_copy or 2, verdict.lost or verdict.leaves
        is_first, is_due = not self._node.only_writes_copies, verdict.newest >= every
        return self._control.makes_copies and is_first and is_due and verdict.outcome == "lost" and not lost

    def _tell(self, verdict: Verdict) -> None:
        noticed = self._control.news.noticed or time.time()
        if verdict.outcome != "refused":
            self._account.fault(verdict, noticed, self._control.report_path)
        self._events.conclude(verdict, self._worker_group.group_rank or 0, noticed)

    # the end

    def _stop_workers(self, worker_group: Any, *args: Any, **kwargs: Any) -> None:
        super()._stop_workers(worker_group, *args, **kwargs)
        if self._ends:  # `close` ends the generation, after the last line
            return
        if not self._handler.is_fixed and self._places is not None:
            verdict = self._record.verdict
            self._node.release_spares(self._places, verdict.lost if verdict is not None else ())
            self._gate_home = None
        self._node.end(is_last=False)

    def _exit_barrier(self) -> None:
        super()._exit_barrier()  # type: ignore[no-untyped-call]  # torch has no types here
        assert self._worker_group.group_world_size is not None
        self._handler.stay_for_others(self._store, self._worker_group.group_world_size)

    def _shutdown(self, *args: Any, **kwargs: Any) -> None:
        # args[0] is the signal of this process. A second signal interrupts `_shutdown`, and the next call of
        # torch has no args.
        in_time = self._save_first(args[0]) if args else not self._interrupted
        self._record.save_folder = self._node.save_folder
        # torch causes the deaths that follow, so they are no failures. It would wait for workers that hang.
        self._node.dismiss(at_once=not in_time)
        self._tell_of_recoveries()
        # The control thread may take the status of a worker between torch's look at the worker and torch's
        # signal, at most once for each worker.
        for _ in range(self._worker_group.spec.local_world_size):
            with contextlib.suppress(ProcessLookupError):
                super()._shutdown(*args, **kwargs)
                return
        super()._shutdown(*args, **kwargs)

    def _save_first(self, death_signal: signal.Signals) -> bool:
        """Have the job saved within TTP_GRACE; return False if the time was too short."""
        self._interrupted = True
        self._end_requests.take()
        self._node.leave(death_signal.name, self._config.grace_s)
        self._interrupted = False
        in_time = self._control.verdict is not None or not self._node.is_needed
        if not in_time:
            say(f"not saved within {self._config.grace_s:g} s (TTP_GRACE) of {death_signal.name}")
        verdict = self._record.verdict = self._control.verdict
        if verdict is not None:
            self._tell(verdict)
        return in_time

    def end_control(self) -> bool:
        """End the control thread and remove temporary files, after the last line.

        Returns whether the control thread has failed.
        """
        if not self._closed:
            self._closed = True
            self._has_failed = self._node.close()
        return self._has_failed
