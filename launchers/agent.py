"""torch's elastic agent, but one that does not end the survivors when a worker dies."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import MutableMapping
from typing import Any

from torch.distributed import PrefixStore
from torch.distributed.elastic.agent.server.api import RunResult, WorkerGroup, WorkerSpec, WorkerState
from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent
from torch.distributed.elastic.multiprocessing.errors import ProcessFailure
from torch.distributed.elastic.rendezvous.api import RendezvousConnectionError

from adaptor import config
from adaptor.control.messages import Verdict
from adaptor.launchers.node import Node

# What torch does about a collective that has failed, as it has in the survivors when a rank is lost: to end
# the process would end a holder, and to abort the collective would let the device go on with gradients that
# nobody has reduced. And NCCL's monitor ends a process some minutes after such a failure. 0: nothing.
_WATCHDOGS = (
    "TORCH_NCCL_ASYNC_ERROR_HANDLING",
    "TORCH_NCCL_ENABLE_MONITORING",
    "TORCH_HCCL_ASYNC_ERROR_HANDLING",
)


class _Rendezvous:
    """torch's own, but for this: while it cannot be asked whether nodes wait to join, none does.

    It often lives on the node whose loss is to be survived.
    """

    def __init__(self, handler: Any) -> None:
        self._handler = handler

    def __getattr__(self, name: str) -> Any:
        return getattr(self._handler, name)

    def num_nodes_waiting(self) -> int:
        try:
            return int(self._handler.num_nodes_waiting())
        except RendezvousConnectionError:
            return 0


class SurvivorsAgent(LocalElasticAgent):
    """Between a failure and the verdict the workers are the controller's; then torch's own rules apply."""

    last_verdict: Verdict | None = None
    has_started = False  # workers
    last_save = ""

    def __init__(self, spec: WorkerSpec, *args: Any, **kwargs: Any) -> None:
        spec.rdzv_handler = _Rendezvous(spec.rdzv_handler)  # type: ignore[assignment]
        super().__init__(spec, *args, **kwargs)
        self._config = config.load()
        self._control = Node(self._config)
        keep_survivors(os.environ)
        self._generations = 0
        self._interrupted = False

    def run(self, role: str = "default") -> RunResult:
        try:
            return super().run(role)
        finally:
            self._control.close()

    def _start_workers(self, worker_group: WorkerGroup) -> dict[int, Any]:
        workers = worker_group.workers
        self._control.begin(
            ranks=[worker.global_rank for worker in workers],
            node=worker_group.group_rank,
            nodes=worker_group.group_world_size,
            world_size=workers[0].world_size,
            store=self._store_of_this_generation(worker_group),
            host=worker_group.master_addr,
        )
        self._control.meet()
        started = super()._start_workers(worker_group)
        SurvivorsAgent.has_started = True
        handlers = self._pcontext.subprocess_handlers
        self._control.watch({worker.global_rank: handlers[worker.local_rank].proc for worker in workers})
        return started

    def _store_of_this_generation(self, worker_group: WorkerGroup) -> Any:
        """A static rendezvous keeps one store for all generations, others have one for each round."""
        if worker_group.spec.rdzv_handler.get_backend() != "static":
            return worker_group.store
        self._generations += 1
        return PrefixStore(f"ttp/{self._generations}", worker_group.store)

    def _shutdown(self, *args: Any, **kwargs: Any) -> None:
        # The signal that this process got; a second one interrupts, and comes here without it.
        in_time = self._save_first(args[0]) if args else not self._interrupted
        SurvivorsAgent.last_save = self._control.save
        # The deaths that follow are torch's doing, and no failures. It would wait for those that hang.
        self._control.dismiss(at_once=not in_time)
        super()._shutdown(*args, **kwargs)

    def _save_first(self, death_signal: signal.Signals) -> bool:
        """Whether there was time for it."""
        self._interrupted = True
        self._control.leave(death_signal.name, self._config.grace_s)
        self._interrupted = False
        in_time = self._control.verdict is not None or not self._control.running
        if not in_time:
            print(
                f"[ttp] not saved within {self._config.grace_s:g} s (TTP_GRACE) of {death_signal.name}",
                file=sys.stderr,
            )
        SurvivorsAgent.last_verdict = self._control.verdict
        return in_time

    def _stop_workers(self, worker_group: WorkerGroup, *args: Any, **kwargs: Any) -> None:
        super()._stop_workers(worker_group, *args, **kwargs)
        self._control.end()

    def _monitor_workers(self, worker_group: WorkerGroup) -> RunResult:
        verdict = self._control.verdict
        if verdict is not None:
            # Not HEALTHY meanwhile: torch would take agents that are ahead of this one for new nodes.
            self._control.settled.wait()
            return self._conclude(worker_group, verdict)
        handlers = self._pcontext.subprocess_handlers.values()
        if any(handler.proc.poll() != 0 for handler in handlers):
            # Not only where one has failed: one that fails while torch looks at them would cost the others.
            return RunResult(state=WorkerState.HEALTHY)
        if not self._control.over:
            # Who goes now would be missing when all start again, and on node 0 take the store along.
            return RunResult(state=WorkerState.HEALTHY)
        return super()._monitor_workers(worker_group)

    def _can_start_again(self, verdict: Verdict, worker_group: WorkerGroup) -> bool:
        """Whether the job can, with nodes that are left, or with others that may come."""
        if verdict.lost and worker_group.spec.rdzv_handler.get_backend() == "static":
            return False  # nobody can come in its place
        settings = getattr(worker_group.spec.rdzv_handler, "settings", None)
        fewest = int(getattr(settings, "min_nodes", worker_group.group_world_size))
        left = worker_group.group_world_size - len(verdict.leaves)
        return 0 not in verdict.leaves and left >= fewest  # on node 0 the store is

    def _conclude(self, worker_group: WorkerGroup, verdict: Verdict) -> RunResult:
        if SurvivorsAgent.last_verdict is not verdict:
            SurvivorsAgent.last_verdict = verdict
            if verdict.outcome == "refused" or not self._can_start_again(verdict, worker_group):
                self._remaining_restarts = 0
            elif self._remaining_restarts > 0:
                print(f"[ttp] {verdict.line}", file=sys.stderr, flush=True)
        result = super()._monitor_workers(worker_group)
        if result.state is WorkerState.FAILED:
            return result
        # The cause is a worker of another node, and every worker here left as it was told to.
        worker = worker_group.workers[0]
        pid = self._pcontext.pids()[worker.local_rank]
        failure = ProcessFailure(worker.local_rank, pid, verdict.exit_code, error_file="")
        return RunResult(state=WorkerState.FAILED, failures={worker.global_rank: failure})


def keep_survivors(environ: MutableMapping[str, str]) -> None:
    """In what workers inherit; torch elastic would have set the first of these to 1 for them."""
    for name in _WATCHDOGS:
        said = environ.get(name, "0")
        if said != "0":
            print(
                f"[ttp] {name} is {said}: 0 is used, for a survivor must outlive the collectives of the dead",
                file=sys.stderr,
                flush=True,
            )
        environ[name] = "0"
