"""A custom training loop on Megatron-core: its state, its checkpoint from host copies, and online recovery.

The script loads checkpoints by itself, and announces the load by `adaptor.write_host_copies`, right before it
looks for a checkpoint. A copy has the entries of `extra` as they were after its step.

The loop is called once more after the last finished step. All other needs of a loop were created before: a
new process runs the script up to the loop, and gets the state from a survivor.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

from megatron.core import parallel_state, tensor_parallel

from adaptor import context
from adaptor.checkpoint.step_record import RandomStates, StepRecord
from adaptor.checkpoint.trainee import MegatronTrainee, ProtectedState
from adaptor.checkpoint.training_state import CheckpointContents, format_named
from adaptor.context import Context
from adaptor.errors import StartError, UnsupportedError
from adaptor.frameworks import megatron_settle
from adaptor.frameworks.megatron_online_support import why_not_on_core
from adaptor.host_copy import content, copier, rebuild
from adaptor.online.rejoin import Rejoin
from adaptor.online.state import Loop
from adaptor.protocol.environment import Generation
from adaptor.protocol.naming import model_parallel_folder
from adaptor.worker import runtime
from adaptor.worker.runtime import UNDECIDED
from adaptor.worker.session import Session


class CopiesAsked:
    """A mark in the context of a process.

    Attributes:
        asked: its script has asked for a checkpoint from host copies
    """

    def __init__(self, _context: Context) -> None:
        self.asked = False


def require_asked() -> None:
    """Refuse TTP_HOST_COPY in a script that would not go on from the copies. Raises UnsupportedError."""
    if context.get().settings.host_copy and not context.part(CopiesAsked).asked:
        raise UnsupportedError(
            "TTP_HOST_COPY is set: a loop of your own goes on from copies in host memory only where it calls"
            " adaptor.write_host_copies before it loads; do so, or leave it out"
        )


def folder_of_rank() -> str:
    """Return the name of the folder of this rank's files in a checkpoint."""
    stages = parallel_state.get_pipeline_model_parallel_world_size()
    experts = parallel_state.get_expert_model_parallel_world_size()
    return model_parallel_folder(
        parallel_state.get_tensor_model_parallel_rank(),
        parallel_state.get_pipeline_model_parallel_rank() if stages > 1 else None,
        parallel_state.get_expert_model_parallel_rank() if experts > 1 else None,
    )


def protected_state(
    *,
    model: Sequence[Any],
    optimizer: Any,
    save: str | Path,
    scheduler: Any = None,
    extra: Mapping[str, Any] | None = None,
    format: str = "torch",
    contents: CheckpointContents | None = None,
    increment: Callable[[], int] = lambda: 0,
    may_copy: bool = True,
) -> ProtectedState:
    """Return the state that `adaptor.protect` is given, with the same arguments."""
    return ProtectedState(
        model=model,
        optimizer=optimizer,
        scheduler=scheduler,
        save=save,
        group=folder_of_rank(),
        make_format=format_named(format, "format"),
        contents=contents or CheckpointContents(),
        increment=increment,
        random=lambda: RandomStates(tensor_parallel.get_cuda_rng_tracker()),
        sizes=lambda: (
            parallel_state.get_data_parallel_world_size(with_context_parallel=True),
            parallel_state.get_expert_data_parallel_world_size(),
        ),
        may_copy=may_copy,
        extra=extra or {},
    )


def write_host_copies(protected: ProtectedState) -> int | None:
    """Implement `adaptor.write_host_copies` in a process that trains with others."""
    context.part(CopiesAsked).asked = True
    if context.get().settings.host_copy == 0 or not context.part(Generation).is_restart:
        return None
    written = rebuild.write_newest(protected)
    copier.require_training()
    return written


# Is given the last finished step, and the counters after it.
GoBack = Callable[[int, Mapping[str, int | float]], Any]
T = TypeVar("T")


class LibraryLoop(Loop):
    """A custom training loop (`online.state.Loop`).

    Args:
        go_back: brings the script back to the end of a step.
        last: the number of the last step; None: the loop knows its last step.
        has_copies: `go_back` can set the loop to a step of any copy in host memory.
    """

    def __init__(
        self,
        protected: ProtectedState,
        session: Session,
        go_back: GoBack | None,
        last: int | None,
        has_copies: bool,
    ) -> None:
        self.protected = protected
        self._model, self._optimizer = protected.model, protected.optimizer
        self._session = session
        self._go_back = go_back
        self._last = last
        self._has_copies = has_copies
        self._record: StepRecord | None = None  # of the step to go back to, before the next

    def answers(self, step: int) -> Mapping[str, Any]:
        return {"last": self._last}

    def settle(self, step: int) -> None:
        megatron_settle.settle_core(self._model)
        megatron_settle.settle_optimizer(self._optimizer)

    def agree(self, step: int) -> None:
        """Nothing comes after a step: it is in the function."""

    def put_back(self, record: StepRecord) -> None:
        for chunk in self._model:  # a loop may do so after its update
            chunk.zero_grad_buffer()
        self._optimizer.zero_grad()
        self._record = record

    def finish_step(self) -> None:
        record, self._record = self._record, None
        if record is None or self._go_back is None:
            return
        with self._session.phase("go_back"):  # to come to the place in its data may take longer than a step
            self._go_back(record.step, record.counters)
        trainee = self._session.trainee
        assert isinstance(trainee, MegatronTrainee)
        # A data loader of torch draws a seed when it is made, and a sampler may shuffle.
        trainee.random.put_back(record.rng)

    def gather_weights(self) -> None:
        megatron_settle.gather_weights(self._model, self._optimizer)

    def copied_steps(self) -> tuple[int, ...]:
        made = self._session.copier if self._has_copies else None
        return () if made is None else made.steps

    def put_back_copy(self, step: int) -> StepRecord:
        return content.put_back(step, self._optimizer, self._model)


class OwnLoopRecovery:
    """Online recovery of a custom loop; the loop's first step decides whether recovery is possible."""

    def __init__(self, worker: Rejoin, protected: ProtectedState) -> None:
        self._worker = worker
        self._session = runtime.get().session
        self._protected = protected
        model, config = protected.model, getattr(protected.optimizer, "config", None)
        self._why_not = why_not_on_core(model[0].config, model[0].ddp_config, config)
        worker.set_online_support(self._why_not or UNDECIDED)

    def decline(self) -> None:
        """Decline recovery: the loop makes its steps in another way.

        Raises:
            StartError: in a replacement process whose predecessor's loop used `run_steps`.
        """
        if self._worker.newcomer:
            raise StartError(
                "a step was begun outside of protection.run_steps, by which other ranks make theirs"
            )
        if not self._why_not:
            self._worker.set_online_support(
                "its training loop does not make its steps by protection.run_steps"
            )
            self._session.tell_again()

    def run_steps(self, one_step: Callable[[int], Any], last: int, go_back: GoBack | None) -> None:
        """Make all steps to `last` by `one_step`, again from the last finished step after each fault.

        `go_back` puts the loop's own state to a step; None: the loop has no state of its own.
        """
        session, worker = self._session, self._worker
        if worker.newcomer:
            # The script may count it from the step of the checkpoint that it has loaded.
            last = worker.ask_record().answers["last"]

        def train() -> None:
            for number in range(session.board.finished + 1, last + 1):
                with session.step(number, updates_finish=True):
                    if one_step(number) is False:
                        return

        self._run(train, go_back, last)

    def run_loop(self, train: Callable[[], T], go_back: GoBack, why_not: str) -> T:
        """Call `train`, and again after the last finished step after each fault; return the result of
        `train`.

        Args:
            go_back: see `run_steps`.
            why_not: why the framework cannot call its loop again; empty: the framework can.
        """
        if self._worker.newcomer:
            self._worker.ask_record(lambda step: content.read_record(content.own_copy(step)).record)
        return self._run(train, go_back, None, why_not)

    def _run(self, train: Callable[[], T], go_back: GoBack | None, last: int | None, why_not: str = "") -> T:
        session, worker = self._session, self._worker
        if self._why_not and not worker.newcomer:
            return train()
        worker.set_online_support(why_not)
        if not worker.newcomer:
            session.tell_again()
            if why_not:
                return train()
        # Only a framework's loop knows its last step, and goes back to any step.
        return worker.run(LibraryLoop(self._protected, session, go_back, last, last is None), train)
